"""A demonstration engine: no model, invented text and times, labelled as such.

The README's screenshots and the snapshot tests are made with it, because they must look the same
on every machine. Its rounds obey the laws of the real engine; its speeds mean nothing.
"""

import random
import re
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest

from fakes import engine_info, model_info
from script import Move, OneAtATime, ScriptedGuess, ScriptedReading, count_tokens, is_drafting, play

from specllama.events import Event, LoadProgress
from specllama.interface import EngineInfo, Message, ModelInfo, Prompt
from specllama.settings.params import GenerateParams
from specllama.speculative.drafting.method import Facts, menu

STEP_MS = 31.0
ROW_MS = 1.4
DRAFT_STEP_MS = 2.6

DEMO_REPLY = """\
Speculative decoding makes a large model faster **without changing what it says**.

1. A small *draft model* guesses the next few tokens.
2. The *target* checks all of them in **one** pass.
3. Every guess it agrees with is kept; the first one it does not is replaced by its own.

```python
def speedup(alpha, c, k):
    tokens = (1 - alpha ** (k + 1)) / (1 - alpha)
    return tokens / (1 + k * c)
```

| acceptance | tokens per round |
|-----------:|-----------------:|
|       60 % |             2.31 |
|       80 % |             3.36 |

So the price of a round is one pass of the target, and the prize is up to k + 1 tokens.
"""
WRONG = (" a", " the", " it", " and", " model", " to", " of", " one", " small", ".", ",", " is")


def pieces(text: str) -> list[str]:
    return re.findall(r"[ \t]*\n[ \t]*|\s?\w{1,7}|\s?[^\w\s]|\s+", text)


def demo_info(n_ctx: int = 4096) -> EngineInfo:
    def model(role: str, n_params: int, file_bytes: int) -> ModelInfo:
        name, sizes = f"demo-{role}", {"n_params": n_params, "file_bytes": file_bytes}
        room = {"n_ctx": n_ctx, "n_ctx_train": 2 * n_ctx, "kv_bytes": 64 << 20}
        return model_info(role, path=f"{name}.gguf", name=name, **sizes, **room)

    return engine_info(
        target=model("target", 7_000_000_000, 3_900_000_000),
        draft=model("draft", 300_000_000, 320_000_000),
        device="demo",
        threads=8,
        load_ms=420.0,
        methods=menu(Facts(draft=True)),
    )


@dataclass(slots=True)
class DemoEngine(OneAtATime):
    """Satisfies ``EngineLike``. ``speed`` > 0 sleeps as long as the invented times say, divided by
    it; 0 never sleeps."""

    reply: str = DEMO_REPLY
    speed: float = 0.0
    tree: bool = False
    acceptance: float = 0.78
    info: EngineInfo = field(default_factory=demo_info)

    def close(self) -> None:
        pass

    def count_tokens(self, prompt: str | Sequence[Message]) -> int:
        return count_tokens(prompt, pieces)

    def generate(
        self, prompt: Prompt, params: GenerateParams, *, cancel: threading.Event | None = None
    ) -> Iterator[Event]:
        seed = 7 if params.seed is None else params.seed
        rng = random.Random(seed)
        return play(
            self.reply,
            lambda index, todo: self._move(rng, index, todo, params),
            info=self.info,
            params=params,
            cut=pieces,
            prompt_n=count_tokens(prompt, pieces),
            seed=seed,
            reading=ScriptedReading(1.1, 2.2, steps=2, before_step=self._wait),
            cancel=cancel,
        )

    def _wait(self, ms: float) -> None:
        if self.speed > 0:
            time.sleep(ms / 1000 / self.speed)

    def _move(
        self, rng: random.Random, index: int, todo: Sequence[str], params: GenerateParams
    ) -> Move:
        # Every ninth round is plain, as a controller does that keeps its yardstick fresh.
        plain = index == 0 or index % 9 == 8 or not is_drafting(params)
        copying = params.proposer in ("auto", "mixed", "ngram") and index % 5 == 4
        room = (
            0 if plain else min(params.draft_limit(self.info.exact_rows) + 2 * copying, len(todo))
        )
        guesses = self._guesses(rng, todo, room, copying)
        if plain:
            source, reason = "none", "plain step, to keep the yardstick fresh"
        elif copying:
            source, reason = "ngram", "the last 12 tokens match the text above"
        else:
            source, reason = "draft", f"drafting {room} pays 1.7x"
        move = Move(
            guesses,
            source=source,
            draft_max=room,
            reason=reason,
            draft_ms=0.0 if plain else 0.2 if copying else DRAFT_STEP_MS * len(guesses),
            verify_ms=STEP_MS + ROW_MS * len(guesses),
            other_ms=0.3,
            plain_ms=STEP_MS + 0.3,
            balance=7.9 if is_drafting(params) else None,
            likely=self._likely(index, guesses, todo) if params.chances else (),
        )
        self._wait(move.draft_ms + move.verify_ms + move.other_ms)
        return move

    def _likely(
        self, index: int, guesses: Sequence[ScriptedGuess], todo: Sequence[str]
    ) -> list[list[tuple[str, float]]]:
        rng, found = random.Random(index), []
        right = [guess for guess in guesses if guess.right]
        for guess, piece in zip_longest(right, todo[: len(right) + 1]):
            if piece is None:
                break
            own = (piece, (guess and guess.p) or round(rng.uniform(0.5, 0.9), 2))
            first, second = rng.sample([word for word in WRONG if word != piece], 2)
            left = 1 - own[1]
            found.append([own, own, (first, 0.6 * left), (second, 0.2 * left)])
        return found

    def _guesses(
        self, rng: random.Random, todo: Sequence[str], room: int, copying: bool
    ) -> list[ScriptedGuess]:
        accepted = 0
        while accepted < room and rng.random() < self.acceptance + 0.1 * copying:
            accepted += 1
        guesses: list[ScriptedGuess] = []

        def add(text: str, parent: int, right: bool, judged: bool) -> None:
            sure = rng.uniform(0.62, 0.98) if right else rng.uniform(0.18, 0.6)
            q = None if copying else round(min(0.99, sure * rng.uniform(0.9, 1.05)), 2)
            high = rng.uniform(0.6, 0.97) if right else rng.uniform(0.01, 0.2)
            p = round(high, 2) if judged else None
            guesses.append(ScriptedGuess(text, parent, right, round(sure, 2), p, q))

        at = -1
        for depth in range(room):
            right = depth < accepted
            wrong = rng.choice([w for w in WRONG if w != todo[depth]])
            add(todo[depth] if right else wrong, at, right, depth <= accepted)
            here = len(guesses) - 1
            if self.tree:
                other = rng.choice([w for w in WRONG if w not in (todo[depth], wrong)])
                add(other, at, False, depth <= accepted)
            at = here
        return guesses


@dataclass(frozen=True, slots=True)
class DemoFactory:
    """A recipe for a host; ``speed`` as in DemoEngine."""

    reply: str = DEMO_REPLY
    speed: float = 1.0
    tree: bool = False
    n_ctx: int = 4096

    def __call__(self, progress: Callable[[Event], None], /) -> DemoEngine:
        for fraction in (0.25, 0.5, 0.75, 1.0):
            progress(LoadProgress("target", "demo-target.gguf", fraction))
        return DemoEngine(self.reply, self.speed, self.tree, info=demo_info(self.n_ctx))
