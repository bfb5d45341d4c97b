"""A demonstration engine: no model, invented text and times, labelled as such.

The README's screenshots and the snapshot tests are made with it, because they must look the same
on every machine. Its rounds obey the laws of the real engine; figures of speed in it mean nothing.
"""

from __future__ import annotations

import random
import re
import threading
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from specllama.errors import SpecllamaError
from specllama.events import (
    Event,
    Finished,
    FinishReason,
    LoadProgress,
    PrefillProgress,
    RoundDone,
    Started,
    TargetKind,
    TextDelta,
    Timings,
)
from specllama.host import EngineFactory
from specllama.interface import EngineInfo, EngineLike, Message, MethodInfo, ModelInfo
from specllama.params import GenerateParams
from specllama.stats import SpecStats

STOP_TOKEN = 2
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


def demo_info() -> EngineInfo:
    def model(role: str, quantization: str, params: int, file_bytes: int) -> ModelInfo:
        return ModelInfo(
            path=f"demo-{role}.gguf",
            name=f"demo-{role}",
            architecture="llama",
            quantization=quantization,
            n_params=params,
            file_bytes=file_bytes,
            n_ctx=4096,
            n_ctx_train=8192,
            n_vocab=32000,
            kv_bytes=64 << 20,
            gpu_layers=0,
        )

    later = "not built yet"
    return EngineInfo(
        target=model("target", "Q4_0", 7_000_000_000, 3_900_000_000),
        draft=model("draft", "Q8_0", 300_000_000, 320_000_000),
        exactness="bitwise up to 7 rows",
        exact_rows=7,
        device="demo",
        threads=8,
        flash_attn=False,
        load_ms=420.0,
        has_chat_template=True,
        methods=(
            MethodInfo(
                "draft",
                "Draft model",
                "A small model of the same vocabulary writes ahead. The classic, good everywhere.",
                True,
            ),
            MethodInfo(
                "ngram",
                "N-gram / prompt lookup",
                "Copies what followed the same words before. Free; best on edits, quotes, code.",
                True,
            ),
            MethodInfo(
                "mixed", "Mixed", "N-gram where it matches at length, else the draft model.", True
            ),
            MethodInfo("none", "Plain", "One token per pass: the yardstick.", True),
            MethodInfo(
                "eagle3",
                "EAGLE-3",
                "A head on the target's hidden states drafts a tree. Needs a trained head.",
                False,
                later,
            ),
            MethodInfo(
                "medusa",
                "Medusa",
                "Several heads guess several positions at once. Needs trained heads.",
                False,
                later,
            ),
            MethodInfo(
                "lookahead",
                "Lookahead",
                "Jacobi iteration inside the target's own pass finds n-grams. No training.",
                False,
                later,
            ),
        ),
    )


@dataclass(slots=True)
class DemoEngine:
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
        if isinstance(prompt, str):
            return len(pieces(prompt))
        return sum(len(pieces(m.content)) + 4 for m in prompt)

    def generate(
        self,
        prompt: str | Sequence[int] | Sequence[Message],
        params: GenerateParams,
        *,
        cancel: threading.Event | None = None,
    ) -> Iterator[Event]:
        seed = 7 if params.seed is None else params.seed
        rng = random.Random(seed)
        messages = [m for m in prompt if isinstance(m, Message)]
        words = prompt if isinstance(prompt, str) else messages
        prompt_n = self.count_tokens(words) if words else len(prompt)
        drafting = params.speculate and params.draft_max > 0 and params.proposer != "none"
        proposer = params.proposer.replace("auto", "mixed") if drafting else "none"
        yield Started(
            prompt_n,
            0,
            self.info.target.n_ctx,
            seed,
            proposer,
            params.verify,
            params.draft_max if drafting else 0,
            self.info.exactness,
        )
        prefill_ms = 2.2 * prompt_n
        for step in (1, 2):
            self._wait(prefill_ms / 2)
            yield PrefillProgress(prompt_n * step // 2, prompt_n, 0)
        todo = [*pieces(self.reply), ""]
        reason: FinishReason = "stop_token"
        if params.max_tokens is not None and params.max_tokens < len(todo):
            todo, reason = todo[: params.max_tokens], "length"
        stats, text, clock_ms = SpecStats(), "", prefill_ms
        ids: list[int] = []
        while todo:
            if cancel is not None and cancel.is_set():
                reason = "cancelled"
                break
            done = self._round(rng, stats.rounds, prompt_n + len(ids), todo, params, drafting)
            took = done.draft_ms + done.verify_ms + done.other_ms
            clock_ms += took
            done = _at(done, clock_ms / 1000)
            self._wait(took)
            stats.observe(done)
            ids.extend(done.emitted)
            todo = todo[len(done.emitted) :]
            yield done
            if new := "".join(done.emitted_text):
                text += new
                yield TextDelta(new)
        decode_ms = stats.draft_ms + stats.verify_ms + stats.other_ms
        yield Finished(
            reason=reason,
            text=text,
            token_ids=tuple(ids),
            seed=seed,
            rounds=stats.rounds,
            draft_n=stats.drafted,
            draft_n_accepted=stats.accepted,
            cut=stats.cut,
            prompt_n=prompt_n,
            cached_n=0,
            n_ctx=self.info.target.n_ctx,
            proposer=proposer,
            verify=params.verify,
            exactness=self.info.exactness,
            acceptance_rate=stats.acceptance_rate,
            mean_acceptance_length=stats.mean_acceptance_length,
            accepted_per_position=tuple(stats.accepted_at),
            drafted_per_position=tuple(stats.drafted_at),
            timings=Timings(
                load_ms=self.info.load_ms,
                tokenize_ms=1.1,
                prefill_ms=prefill_ms,
                first_decode_ms=STEP_MS,
                ttft_ms=1.1 + prefill_ms + STEP_MS,
                decode_ms=decode_ms,
                draft_ms=stats.draft_ms,
                verify_ms=stats.verify_ms,
                other_ms=stats.other_ms,
                tok_per_s=1000 * len(ids) / decode_ms if decode_ms else None,
            ),
        )

    def _wait(self, ms: float) -> None:
        if self.speed > 0:
            time.sleep(ms / 1000 / self.speed)

    def _round(
        self,
        rng: random.Random,
        index: int,
        n_past: int,
        todo: Sequence[str],
        params: GenerateParams,
        drafting: bool,
    ) -> RoundDone:
        # Every ninth round is plain, as a controller does that keeps its yardstick fresh.
        plain = index == 0 or not drafting or index % 9 == 8
        copying = params.proposer in ("auto", "mixed", "ngram") and index % 5 == 4
        source = "none" if plain else "ngram" if copying else "draft"
        room = 0 if plain else min(params.draft_max + 2 * copying, len(todo))
        accepted = 0
        while accepted < room and rng.random() < self.acceptance + 0.1 * copying:
            accepted += 1
        tokens: list[int] = []
        parents: list[int] = []
        texts: list[str] = []
        confidence: list[float | None] = []
        p: list[float | None] = []
        q: list[float | None] = []
        path: list[int] = []

        def add(text: str, parent: int, right: bool, judged: bool) -> None:
            tokens.append(_id(text))
            parents.append(parent)
            texts.append(text)
            sure = rng.uniform(0.62, 0.98) if right else rng.uniform(0.18, 0.6)
            confidence.append(round(sure, 2))
            q.append(None if copying else round(min(0.99, sure * rng.uniform(0.9, 1.05)), 2))
            high = rng.uniform(0.6, 0.97) if right else rng.uniform(0.01, 0.2)
            p.append(round(high, 2) if judged else None)

        at = -1
        for depth in range(room):
            right = depth < accepted
            wrong = rng.choice([w for w in WRONG if w != todo[depth]])
            add(todo[depth] if right else wrong, at, right, depth <= accepted)
            here = len(tokens) - 1
            if right:
                path.append(here)
            if self.tree:
                other = rng.choice([w for w in WRONG if w not in (todo[depth], texts[here])])
                add(other, at, False, depth <= accepted)
            at = here
        cut = int(not plain and accepted == len(todo))
        emitted = list(todo[: accepted + 1 - cut])
        kind: TargetKind = "plain" if plain else "bonus" if accepted == room else "recovered"
        target = todo[accepted] if accepted < len(todo) else ""
        reason = (
            "plain step, to keep the yardstick fresh"
            if plain
            else (
                "the last 12 tokens match the text above"
                if copying
                else f"drafting {room} pays 1.7x"
            )
        )
        rows = len(tokens)
        return RoundDone(
            index=index,
            t_s=0.0,
            n_past=n_past,
            source=source,
            draft_max=room,
            window_reason=reason,
            drafted=tuple(tokens),
            parents=tuple(parents),
            drafted_text=tuple(texts),
            confidence=tuple(confidence),
            p=tuple(p),
            q=tuple(q),
            accepted=accepted,
            accepted_path=tuple(path),
            target_token=_id(target),
            target_text=target,
            target_kind=kind,
            emitted=tuple(_id(t) for t in emitted),
            emitted_text=tuple(emitted),
            cut=cut,
            draft_ms=0.0 if plain else 0.2 if copying else DRAFT_STEP_MS * rows,
            verify_ms=STEP_MS + ROW_MS * rows,
            other_ms=0.3,
            sources=(source,) * rows,
        )


def _id(text: str) -> int:
    return 3 + zlib.crc32(text.encode()) % 31_000 if text else STOP_TOKEN


def _at(done: RoundDone, t_s: float) -> RoundDone:
    import dataclasses

    return dataclasses.replace(done, t_s=t_s)


@dataclass(frozen=True, slots=True)
class DemoFactory:
    """A recipe for EngineHost; ``speed`` as in DemoEngine."""

    reply: str = DEMO_REPLY
    speed: float = 1.0
    tree: bool = False

    def __call__(self, progress: Callable[[Event], None], /) -> DemoEngine:
        for fraction in (0.25, 0.5, 0.75, 1.0):
            progress(LoadProgress("target", "demo-target.gguf", fraction))
        return DemoEngine(self.reply, self.speed, self.tree)


class InlineHost:
    """An engine in this process with the face of ``EngineHost``, for screenshots and tests."""

    def __init__(self, factory: EngineFactory) -> None:
        self.factory = factory
        self.on_event: Callable[[Event], None] | None = None
        self.engine: EngineLike | None = None

    @property
    def info(self) -> EngineInfo:
        return self._started().info

    def _started(self) -> EngineLike:
        if self.engine is None:
            self.engine = self.factory(self.on_event or (lambda event: None))
        return self.engine

    def start(self) -> EngineInfo:
        return self._started().info

    def switch(self, factory: EngineFactory) -> EngineInfo:
        before, old = self.factory, self.engine
        self.factory, self.engine = factory, None
        try:
            return self.start()
        except SpecllamaError:
            self.factory, self.engine = before, old
            raise

    def generate(
        self,
        prompt: str | Sequence[int] | Sequence[Message],
        params: GenerateParams,
        *,
        cancel: threading.Event | None = None,
    ) -> Iterator[Event]:
        yield from self._started().generate(prompt, params, cancel=cancel)

    def count_tokens(self, prompt: str | Sequence[Message]) -> int:
        return self._started().count_tokens(prompt)

    def close(self) -> None:
        if self.engine is not None:
            self.engine.close()
