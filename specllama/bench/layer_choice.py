"""Choosing the layers of a target's own draft: texts, search, proof, and the verdict in words."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import monotonic
from typing import TYPE_CHECKING, Any

from specllama.bench.layer_search import LONGEST, Drop, Scorer, Trial, search
from specllama.bench.prompts import Prompt, interleaved
from specllama.errors import ContextFull, PromptTooLong, UnsupportedModel
from specllama.events import Finished
from specllama.models import pruned
from specllama.settings.params import GenerateParams, SamplingParams

if TYPE_CHECKING:
    from specllama.engine.engine import Engine
    from specllama.models.gguf import GgufHeader

TOKENS = 64  # of a calibration text
ENOUGH = 1500  # tokens of all texts: with fewer the search overfits
TEXTS = 64  # at most; every third one is held out for the final figures
FEW = 250  # tokens that every choice is tried on; the best ones are then tried on all of them
FINALISTS = 6
WRITING, SEARCHING = 0.35, 0.75  # shares of the time after which the texts, the search must end
SHOWN = 4  # positions that people are told about

Text = tuple[list[int], list[int]]  # a prompt and the target's greedy reply
Progress = Callable[[float, str], None]


@dataclass(frozen=True, slots=True)
class Choice:
    """The layers that make the best draft, and what they are worth.

    Attributes:
        best: measured on texts that the search did not see, if there were enough of them.
        finalists: what the search found, measured on all other texts, the best first.
        tried: how many choices were tried.
        complete: whether the search finished before its time ran out.
        positions: tokens that finalists were measured on; ``checked`` for ``best``.
        passes: where the cost of wider passes comes from: "measured" or "assumed".
    """

    best: Trial
    finalists: tuple[Trial, ...]
    tried: int
    complete: bool
    n_layers: int
    positions: int
    checked: int
    passes: str

    @property
    def words(self) -> str:
        """One sentence: what was chosen and whether it pays."""
        shown = self.best.survival[:SHOWN]
        shares = ", ".join(f"{share:.0%}" for share in shown)
        no = "it cannot pay here" if self.complete else "none that was tried pays here"
        verdict = "it pays here" if self.best.pays else no
        return (
            f"without {'layers' if len(self.best.drop) > 1 else 'layer'} "
            f"{pruned.layer_list(self.best.drop)} of 0-{self.n_layers - 1}: {shares} of the rounds "
            f"accept all of 1 to {len(shown)} drafts, a step costs {self.best.cost:.0%} of the "
            f"target's; at best {self.best.speed:.2f}× plain decoding, with {self.best.length} a "
            f"round: {verdict}"
        )

    @property
    def extent(self) -> str:
        """How much the search tried, and whether it finished."""
        ended = "" if self.complete else "; time ran out before the search was finished"
        return (
            f"{self.tried} choices tried, the best of them over {self.positions} tokens of the "
            f"target's own text{ended}"
        )

    def to_dict(self) -> dict[str, Any]:
        return {
            "schema": pruned.CHOICE_SCHEMA,
            "layers": self.n_layers,
            **self.best.to_dict(),
            "pays": self.best.pays,
            "complete": self.complete,
            "tried": self.tried,
            "finalists": [trial.to_dict() for trial in self.finalists],
            "positions": self.positions,
            "checked_positions": self.checked,
            "passes": self.passes,
            "words": self.words,
        }


def choose_layers(
    engine: Engine,
    header: GgufHeader,
    prompts: Sequence[Prompt],
    *,
    passes: Sequence[float] | None = None,
    seconds: float = 120.0,
    progress: Progress | None = None,
) -> Choice:
    """Search the layers whose draft gains most.

    Texts, agreement and costs by bytes need no clock, so the choice repeats; it depends on the
    machine's pace only if time runs out.

    Args:
        engine: of the target; its conversation is reset.
        header: of the target's file.
        passes: the target's costs by rows, ``passes[1]`` a plain step; None takes assumed ones.
        seconds: time for texts and search together.
        progress: called with the share of the time or work that is done, and a label.

    Raises:
        UnsupportedModel: layers cannot be dropped from this target, or it writes nothing.
        CannotLoad: no memory for a second cache.
    """
    from specllama.backend.layer_skip import SkippingContext
    from specllama.backend.llama_pool import LlamaPool

    if reason := pruned.why_not(header):
        raise UnsupportedModel(f"there is no draft in this target: {reason}")
    if not isinstance(engine.target.pool, LlamaPool):
        raise UnsupportedModel("only models that llama.cpp runs can leave out layers")
    begin = monotonic()

    def spent(share: float = 1.0) -> bool:
        return monotonic() - begin > share * seconds

    short = shortest_first(engine, prompts)
    texts = write_texts(engine, short, spent=lambda: spent(WRITING), progress=progress)
    if not texts:
        raise UnsupportedModel("the target writes no text on which a draft could be measured")
    kept_back = texts[2::3] or texts
    seen = [text for i, text in enumerate(texts) if i % 3 != 2]
    few = [text for i, text in enumerate(seen) if _tokens(seen[:i]) < FEW]
    scorer = Scorer(lambda drop: pruned.draft_work(header, drop), passes or assumed_passes())
    context = SkippingContext(engine.target.pool, n_ctx=max(len(p) + len(r) for p, r in texts))

    def look(drop: Drop, over: Sequence[Text] = few) -> Trial:
        return scorer.trial(drop, [_agreement(context, text, drop) for text in over])

    def tell(n: int, best: Trial) -> None:
        if progress is not None:
            share = min((monotonic() - begin) / seconds, 1.0)
            without = pruned.layer_list(best.drop)
            progress(share, f"{n} choices tried, best without {without}: {best.speed:.2f}×")

    try:
        found = search(
            header.block_count,
            look,
            ceiling=scorer.ceiling,
            starts=_usual(header.block_count),
            spent=lambda: spent(SEARCHING),
            progress=tell,
        )
        finalists: list[Trial] = []
        for trial in found.tried[:FINALISTS]:
            if finalists and spent():
                break
            finalists.append(look(trial.drop, seen) if len(few) < len(seen) else trial)
        finalists.sort(key=lambda trial: trial.speed, reverse=True)
        best = look(finalists[0].drop, kept_back)
    finally:
        context.close()
    return Choice(
        best,
        tuple(finalists),
        len(found.tried),
        found.complete and len(finalists) == min(FINALISTS, len(found.tried)),
        header.block_count,
        _tokens(seen),
        _tokens(kept_back),
        "assumed" if passes is None else "measured",
    )


def shortest_first(engine: Engine, prompts: Sequence[Prompt]) -> list[Prompt]:
    """Prompts by length, the slices in turn: every choice of layers has to read them."""
    return interleaved(sorted(prompts, key=lambda prompt: engine.count_tokens(prompt.content)))


def _tokens(texts: Sequence[Text]) -> int:
    return sum(len(reply) for _, reply in texts)


def write_texts(
    engine: Engine,
    prompts: Sequence[Prompt],
    *,
    spent: Callable[[], bool] = lambda: False,
    progress: Progress | None = None,
) -> list[Text]:
    """What the target answers at temperature 0; prompts that do not fit are skipped."""
    params = GenerateParams(
        sampling=SamplingParams(temperature=0.0), max_tokens=TOKENS, seed=1, speculate=False
    )
    texts: list[Text] = []
    written = 0
    for prompt in prompts[:TEXTS]:
        if texts and (written >= ENOUGH or spent()):
            break
        engine.reset()
        try:
            tokens = engine.encode(prompt.content)[0]
            reply = [
                token
                for event in engine.generate(prompt.content, params)
                if isinstance(event, Finished)
                for token in event.token_ids
            ]
        except (PromptTooLong, ContextFull):
            continue
        if reply:
            texts.append((tokens, reply))
            written += len(reply)
        if progress is not None:
            progress(0.0, f"the target has written {written} of {ENOUGH} tokens")
    engine.reset()
    return texts


def _usual(n_layers: int) -> list[Drop]:
    """Runs around the middle, half of the layers first: the fallback of a search without time."""
    sizes = dict.fromkeys((n_layers // 2, n_layers // 4, n_layers // 3, 2 * n_layers // 3))
    return [pruned.middle(n_layers, n) for n in sizes if n]


def _agreement(context: Any, text: Text, drop: Drop) -> list[bool]:
    prompt, reply = text
    same = context.choices(prompt, reply, drop) == reply
    return [bool(agrees) for agrees in same]


def assumed_passes() -> list[float]:
    """Costs of passes by rows if nobody measured them: the window's own prior."""
    from specllama.speculative.policy.costs import CostTable

    return CostTable(1.0).upto(LONGEST + 1)
