"""Experiments: prompts that are answered in several ways, and their results, lap by lap.

Runs go one after the other. Each begins with an empty cache, and all have one seed and one length,
so they differ in nothing but how they draft. Laps alternate the order (plain, drafted, drafted,
plain, ...), so that a machine that gets slower or faster meanwhile favours none. Times are the
engine's own. Light to import.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from time import perf_counter
from uuid import uuid4

from specllama.cancel import Cancel
from specllama.interface import EngineLike, Message, Prompt
from specllama.settings.params import GenerateParams
from specllama.store.rounds import Logged
from specllama.told import Told
from specllama.verdict import TimedRound

PLAIN, DRAFTED = "plain", "drafted"
TOKENS = 128  # of a race, unless the settings say fewer
LAPS = 2  # of a table: each way once in either order


@dataclass(slots=True)
class Run(Told):
    """One answer to a prompt. Runs of one ``lap`` are compared with each other."""

    name: str
    prompt: Prompt
    params: GenerateParams
    lap: int = 0
    began_s: float = 0.0  # by ``perf_counter``

    @property
    def tokens(self) -> list[int]:
        return [token for done in self.rounds for token in done.emitted]

    @property
    def ttft_s(self) -> float:
        return self.rounds[0].t_s if self.rounds else 0.0

    @property
    def end_s(self) -> float:
        return self.rounds[-1].t_s if self.rounds else 0.0

    @property
    def passes(self) -> list[TimedRound]:
        return [TimedRound.of(done) for done in self.rounds if done.index]

    @property
    def singles(self) -> list[float]:
        return [one.pass_ms for one in self.passes if not one.drafted]

    def same(self, plain: Run) -> tuple[int, int]:
        """Count the first tokens that equal plain decoding, and those of the longer run."""
        mine, theirs = self.tokens, plain.tokens
        pairs = zip(mine, theirs, strict=False)
        length = min(len(mine), len(theirs))
        return next((i for i, (a, b) in enumerate(pairs) if a != b), length), max(
            len(mine), len(theirs)
        )


def plain_and(
    prompt: Prompt,
    params: GenerateParams,
    ways: Iterable[tuple[str, GenerateParams]],
    lap: int = 0,
) -> list[Run]:
    """List plain decoding and each way to draft: same prompt, seed and length. Every second lap
    goes the other way round."""
    tokens = params.max_tokens or TOKENS
    base = params.replace(max_tokens=tokens, seed=params.seed if params.seed is not None else 1)
    same = {"max_tokens": tokens, "seed": base.seed, "ignore_eos": base.ignore_eos}
    plain = base.replace(speculate=False, proposer="none")
    runs = [
        Run(PLAIN, prompt, plain, lap),
        *(Run(name, prompt, way.replace(**same), lap) for name, way in ways),
    ]
    return runs[::-1] if lap % 2 else runs


def drafted(params: GenerateParams) -> GenerateParams:
    """Return today's settings, with drafting on."""
    proposer = "auto" if params.proposer == "none" else params.proposer
    reach = None if params.draft_max == 0 else params.draft_max
    return params.replace(speculate=True, proposer=proposer, draft_max=reach)


def ask(
    engine: EngineLike,
    run: Run,
    *,
    cancel: Cancel | None = None,
    moved: Callable[[Run], object] | None = None,
) -> None:
    """Run one answer; ``moved`` is called with every round. Nothing is copied from other runs: they
    wrote the same."""
    params = run.params.replace(scope=uuid4().hex)
    run.began_s = perf_counter()
    for event in engine.generate(run.prompt, params, cancel=cancel):
        if run.take(event).rounds and moved is not None:
            moved(run)


def ask_all(
    engine: EngineLike,
    runs: Sequence[Run],
    cancel: Cancel,
    moved: Callable[[Run], object],
    *,
    log: bool,
) -> None:
    """Run answers one after the other; ``log`` keeps their rounds."""
    empty = GenerateParams(max_tokens=1, speculate=False, proposer="none", seed=1)
    for run in runs:
        if cancel.is_set():
            return
        for _ in engine.generate(".", empty, cancel=cancel):
            pass  # nothing of the prompt is left in the cache
        logged = Logged(engine, command="race")
        try:
            ask(logged if log else engine, run, cancel=cancel, moved=moved)
        finally:
            logged.close()


def question(prompt: Prompt | None) -> str:
    """Return the question of a prompt, in its own words."""
    if isinstance(prompt, str):
        return prompt
    said = [one.content for one in prompt or () if isinstance(one, Message) and one.role == "user"]
    return said[-1] if said else ""


Laps = dict[int, dict[str, Run]]
"""By number of the lap, and in it by way: what is compared."""


@dataclass(slots=True)
class RaceBoard:
    """The races of the loaded pair, by tab; they outlive the page."""

    runs: dict[str, list[Run]] = field(default_factory=dict)

    def laps(self, tab: str) -> Laps:
        """Return the laps in which every run came to its end."""
        found: Laps = {}
        for run in self.runs.get(tab, ()):
            found.setdefault(run.lap, {})[run.name] = run
        return {lap: ways for lap, ways in found.items() if all(r.whole for r in ways.values())}

    def free_lap(self, tab: str) -> int:
        """Return the number of the next lap."""
        return max((run.lap for run in self.runs.get(tab, ())), default=-1) + 1

    def drop_halves(self, tab: str) -> None:
        """Forget the laps that did not come to their end."""
        kept = [run for ways in self.laps(tab).values() for run in ways.values()]
        if kept:
            self.runs[tab] = kept
        else:
            self.runs.pop(tab, None)

    def plain(self, tab: str) -> Run | None:
        """Return the newest plain run, which may still go on."""
        runs = [run for run in self.runs.get(tab, ()) if run.name == PLAIN]
        begun = [run for run in runs if run.rounds]
        return (begun or runs)[-1] if runs else None

    def ways(self, tab: str) -> list[Run]:
        """Return the newest finished run of each way other than plain decoding."""
        found = [run for run in self.runs.get(tab, ()) if run.name != PLAIN and run.whole]
        return list({run.name: run for run in found}.values())
