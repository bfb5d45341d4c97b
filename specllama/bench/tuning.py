"""A measurement of a pair on this machine, and advice.

First what passes cost, timed directly. Then one experiment: plain decoding, drafts of one length,
and the adaptive window, which knows those costs and has learnt from other prompts, as the next run
will find it. The drafts of one length show at each position how often guesses are accepted, which
the window learns from.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from itertools import count
from statistics import median
from typing import Any

from specllama.backend.base import Context, Outputs
from specllama.backend.turns import timed
from specllama.bench.experiment import EngineArm, compare, tasks_of
from specllama.bench.outcome import is_idle, lacking, ratio_words
from specllama.bench.prompts import BenchPrompt, numbered
from specllama.bench.report import Comparison
from specllama.engine.engine import Engine
from specllama.rates import LONGEST, Payoff
from specllama.settings.params import GenerateParams
from specllama.speculative.drafting.draft_model import ChainDrafter
from specllama.speculative.policy.costs import Costs

ROWS = (1, 2, 3, 4, 5, 6, 7, 8, 9, 12, 16)
READS = (1, 2, 4, 8, 16, 32, 64, 128)
TEXT = 256  # tokens of the text behind which passes are timed
MORE = "more repetitions (specllama tune -r 3), with nothing else running,"
PLAIN, WINDOW = "plain", "specllama"


@dataclass(frozen=True, slots=True)
class PassCosts:
    """Median milliseconds by rows (target, every row with logits) and by tokens (draft)."""

    context: int
    target: dict[int, float]
    draft: dict[int, float]

    @property
    def ratios(self) -> dict[int, float]:
        return {n: ms / self.target[1] for n, ms in self.target.items()}

    @property
    def draft_step(self) -> float | None:
        """A draft step in plain steps."""
        return self.draft[1] / self.target[1] if self.draft else None

    def store(self, costs: Costs) -> None:
        """Put everything into the cost tables of a pair; plain steps first, they are the unit."""
        for table, passes in ((costs.target, self.target), (costs.draft, self.draft)):
            for n in sorted(passes):
                table.set(n, passes[n], self.context)

    def to_dict(self) -> dict[str, Any]:
        return {
            "context": self.context,
            "target_ms": {str(n): round(ms, 4) for n, ms in self.target.items()},
            "target_ratio": {str(n): round(r, 3) for n, r in self.ratios.items()},
            "draft_ms": {str(n): round(ms, 4) for n, ms in self.draft.items()},
            "draft_step": self.draft_step,
        }


@dataclass(slots=True)
class Tuning:
    costs: PassCosts
    check: Comparison
    advice: dict[str, Any]

    def to_dict(self) -> dict[str, Any]:
        return {
            "schema": "specllama.tune.v2",
            "costs": self.costs.to_dict(),
            "check": [s.to_dict() for s in self.check.summaries()],
            "advice": self.advice,
        }


def time_passes(
    context: Context,
    tokens: Sequence[int],
    sizes: Sequence[int],
    *,
    outputs: Outputs,
    repetitions: int,
    progress: Callable[[], object],
) -> dict[int, float]:
    """Return the median milliseconds of each size of pass after ``tokens``, to which the cache is
    cut."""
    context.rollback(0)
    for i in range(0, len(tokens), TEXT):
        context.forward(tokens[i : i + TEXT], outputs="none")
    turns = timed([context], sizes, repetitions, outputs=outputs, text=tokens, done=progress)
    context.rollback(0)
    return {n: median(turn[n] for (turn,) in turns) for n in sizes}


def pass_costs(
    target: Context,
    draft: Context | None,
    tokens: Sequence[int],
    *,
    repetitions: int,
    progress: Callable[[], object] = lambda: None,
) -> PassCosts:
    """Time both contexts at the length of ``tokens`` (a real prompt, some hundred tokens)."""
    text = tokens[: max(target.n_ctx - max(ROWS) - 1, 1)]
    rows = [n for n in ROWS if n <= target.max_rows]
    v = time_passes(target, text, rows, outputs="all", repetitions=repetitions, progress=progress)
    steps: dict[int, float] = {}
    if draft is not None:
        short = [t for t in text if t < draft.n_vocab][: draft.n_ctx - max(READS) - 1]
        steps = time_passes(
            draft, short, READS, outputs="last", repetitions=repetitions, progress=progress
        )
    return PassCosts(len(text), v, steps)


def tune(
    engine: Engine,
    prompts: Sequence[BenchPrompt],
    *,
    base: GenerateParams,
    temperatures: Sequence[float] = (0.0, 0.7, 1.0),
    per_slice: int = 3,
    max_tokens: int = 64,
    repetitions: int = 9,
    checks: int = 1,
    progress: Callable[[float], object] = lambda share: None,
    say: Callable[[str], object] = lambda words: None,
) -> Tuning:
    """Run the whole measurement; a few minutes on a desktop.

    Args:
        repetitions: of every timed pass.
        checks: repetitions of the replies.
        progress: called with the share that is done.
        say: called with what comes next, and about how long it takes.
    """
    profile, (chosen, others) = engine.windows.profile, split(prompts, per_slice)
    text = [token for prompt in chosen for token in engine.encode(prompt.content)[0]]
    drafter = engine.drafters.get("draft")
    draft: Any = drafter.lane if isinstance(drafter, ChainDrafter) else None
    source, longest = "draft" if draft else "ngram", min(LONGEST, engine.target.max_rows - 1)

    say("step 1 of 2: what passes of 1 to 16 rows take")
    turns, most = count(1), repetitions * (len(ROWS) + len(READS))
    costs = pass_costs(
        engine.target, draft, text[: min(TEXT, engine.target.n_ctx // 2)],
        repetitions=repetitions, progress=lambda: progress(0.2 * next(turns) / most),
    )  # fmt: skip
    costs.store(profile.costs)

    fixed = base.replace(proposer=source, draft_max=longest, window="fixed")
    window = EngineArm(WINDOW, engine, base)
    plain = EngineArm(PLAIN, engine, base.replace(speculate=False))
    arms = [plain, EngineArm(f"fixed {longest}", engine, fixed), window]
    tasks = tasks_of(chosen, temperatures, max_tokens)
    lessons = tasks_of(others, temperatures, max_tokens)
    replies = len(lessons) + (checks * len(tasks) + 1) * len(arms)
    minutes = max(replies * max_tokens * costs.target[1] / 60e3, 0.1)
    say(f"step 2 of 2: {replies} replies, about {minutes:.1f} min")
    written = count(1)

    def wrote(done: int, total: int) -> None:
        progress(0.2 + 0.8 * next(written) / replies)

    with profile.practice():  # nothing written within is booked on the pair's balance
        for _ in compare([window.run], lessons, progress=wrote):
            profile.forgive()  # written whatever they cost
        check = Comparison.of(arms, tasks, repetitions=checks, progress=wrote)
    remedies = [asdict(one) for one in engine.windows.remedies(base)]
    return Tuning(costs, check, advise(check) | {"remedies": remedies})


def split(prompts: Sequence[BenchPrompt], n: int) -> tuple[list[BenchPrompt], ...]:
    """Return the first ``n`` prompts of every slice, and the next ``n``."""
    found = list(numbered(prompts))
    return tuple([one for at, one in found if at // n == part] for part in (0, 1))


def advise(check: Comparison) -> dict[str, Any]:
    """Judge the window over plain decoding: the whole, and each temperature for itself."""
    whole = check.verdict(WINDOW)
    each = {f"{t:g}": _figures(check.verdict(WINDOW, t)) for t in check.temperatures}
    return {**_figures(whole), "temperatures": each, "words": _words(whole)}


def _figures(one: Payoff) -> dict[str, Any]:
    return {"speculate": _wanted(one), "measured": one.ratio, "low": one.low, "high": one.high}


def _wanted(one: Payoff) -> bool | None:
    """True if drafting pays; None if that is not known."""
    if is_idle(one) or one.answer in ("slower", "off"):
        return False
    return True if one.answer == "faster" else None


def _words(whole: Payoff) -> str:
    """Write the verdict on all replies together, and what follows from it."""
    found = f"{ratio_words(whole)} of plain over all replies"
    off = "the window keeps it off, and --no-spec saves the memory of the draft model"
    if is_idle(whole):
        return f"hardly anything was guessed in these replies: {off}"
    match whole.answer:
        case "faster":
            return f"keep speculation on: {found}; the window turns it off where it loses"
        case "slower" | "off":
            return f"speculation loses here: {found}; {off}"
        case "unsure":
            return f"no sure gain and no sure loss: {found}; {MORE} may tell"
    return f"{lacking(whole)}; {MORE} may tell"
