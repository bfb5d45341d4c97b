"""Whole engines in simulated time: who drafts best, and what it costs to find out.

The target writes a given text, the draft model guesses it at given rates, every pass advances a
virtual clock by what it costs on a measured machine. Everything between is the real thing.
"""

from __future__ import annotations

import dataclasses
import random
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from engines import FakeContext, fake_info, loaded
from replay import VirtualClock
from table_model import FakeTable, FakeVocab
from traces import CPU, MEASURED, Script, Talk, V, fresh, talk

from specllama.arrays import Rows
from specllama.backend.base import Outputs
from specllama.engine.engine import Engine
from specllama.engine.profiles import Profile, band
from specllama.events import Finished, PrefillProgress, RoundDone
from specllama.settings.params import GenerateParams, SamplingParams
from specllama.speculative.drafting.draft_model import ChainDrafter
from specllama.speculative.drafting.drafter import Drafter, Request
from specllama.speculative.drafting.lookahead import LookaheadDrafter
from specllama.speculative.drafting.mixed import MixedDrafter
from specllama.speculative.drafting.ngram import NgramDrafter
from specllama.speculative.drafting.prediction import PredictionDrafter
from specllama.speculative.drafting.suffix import SuffixDrafter
from specllama.speculative.policy.policy import Policy
from specllama.speculative.window import Window

CHEAP = [0.0, *(1 + 0.12 * i for i in range(66))]
COSTS = {"measured": (MEASURED, 0.19), "cheap rows": (CHEAP, 0.06)}
METHODS = ("ngram", "suffix", "draft", "mixed")


class Timed(FakeContext):
    """Passes take simulated time; those that return no rows (of a prompt) are wide ones."""

    def __init__(self, table: FakeTable, clock: VirtualClock, costs: Sequence[float]) -> None:
        super().__init__(table, n_ctx=4096)
        self._clock, self._costs = clock, costs

    def forward(
        self, tokens: Sequence[int], *, outputs: Outputs, parents: Sequence[int] | None = None
    ) -> Rows:
        n = len(tokens)
        wide = len(self._costs) - 1
        self._clock.steps(self._costs[min(n, wide)] * max(n / wide, 1.0))
        return super().forward(tokens, outputs=outputs, parents=parents)


def talks(kind: str, n: int = 8) -> list[Talk]:
    rng = random.Random(kind)
    if kind == "copies":
        parts = [("quote", 24, 0.3), ("new", 8, 0.3)] * 4
    elif kind == "model":
        parts = [("new", 128, 0.97)]
    elif kind == "alternating":
        parts = [("quote", 30, 0.3), ("new", 40, 0.97), ("new", 30, 0.1)] * 2
    else:  # nothing helps
        parts = [("new", 128, 0.05)]
    return [talk(rng, parts) for _ in range(n)]


class Bench:
    """Replies of one method, in a row, with what it learns from one to the next."""

    def __init__(
        self,
        method: str,
        costs: str,
        monkeypatch: pytest.MonkeyPatch,
        *,
        folder: Path | None = None,
    ) -> None:
        self.method = method
        self.verify, self.step = COSTS[costs]
        self.clock = VirtualClock()
        self.path = folder / "profile.json" if folder else None
        self.profile = Profile(self.path)
        self.points: list[tuple[int, float]] = [(0, 0.0)]
        self.reasons: set[str] = set()
        self.keep_time(monkeypatch)

    def keep_time(self, monkeypatch: pytest.MonkeyPatch) -> None:
        for module in ("speculative.round", "engine.conversation"):
            monkeypatch.setattr(f"specllama.{module}.perf_counter", self.clock)

    def window(self, params: GenerateParams) -> Window:
        if self.path is not None:  # every reply is a run of the program
            self.profile = Profile(self.path)
        profile = self.profile
        profile.costs.draft_share = self.step
        return Policy(
            profile.learned(band(params)),
            profile.costs,
            profile.ledger,
            draft_max=params.draft_limit(1),
            tokens=params.max_tokens,
            clock=self.clock,
            on_finish=profile.save,
        )

    def proposers(self, spoken: Talk) -> dict[str, Drafter]:
        text = spoken.prompt + spoken.reply
        right = [True] * len(spoken.prompt) + spoken.right
        reading = [0.0, *(self.step * (1 + 0.35 * i) for i in range(1024))]
        script = Script(text, right)
        model = ChainDrafter(Timed(script, self.clock, reading), n_vocab=V, clock=self.clock)
        script.start = lambda: model._start
        copies: list[Drafter] = [SuffixDrafter(), NgramDrafter()]
        return {
            "suffix": copies[0],
            "ngram": copies[1],
            "draft": model,
            "mixed": MixedDrafter([*copies, model]),
            "lookahead": LookaheadDrafter(),
        }

    def reply(self, spoken: Talk) -> None:
        table = Script(spoken.prompt + spoken.reply)
        engine = Engine(
            loaded(
                target=Timed(table, self.clock, self.verify),
                vocab=FakeVocab(V),
                info=fake_info(4096, V),
                drafters=self.proposers(spoken),
                make_window=self.window,
            )
        )
        params = GenerateParams(
            sampling=SamplingParams(temperature=0.0),
            max_tokens=len(spoken.reply),
            proposer=self.method,
        )
        begin = self.clock.now
        with engine:
            for event in engine.generate(spoken.prompt, params):
                if isinstance(event, RoundDone):
                    tokens, time = self.points[-1]
                    spent = (self.clock.now - begin) * 1e3
                    begin = self.clock.now
                    self.points.append((tokens + len(event.emitted), time + spent))
                    self.reasons.add(event.window_reason)
                elif isinstance(event, PrefillProgress):
                    begin = self.clock.now
                elif isinstance(event, Finished):
                    assert list(event.token_ids) == spoken.reply

    def speed(self, first: int = 0) -> float:
        """Over plain decoding, without the first tokens."""
        start = next(p for p in self.points if p[0] >= first)
        tokens, time = self.points[-1]
        return (tokens - start[0]) / (time - start[1])

    def slowest(self, tokens: int) -> float:
        return min(self._stretches(tokens))

    def _stretches(self, tokens: int) -> Iterator[float]:
        end = 0
        for n, t in self.points:
            while end < len(self.points) and self.points[end][0] - n < tokens:
                end += 1
            if end == len(self.points):
                return
            yield (self.points[end][0] - n) / (self.points[end][1] - t)


@pytest.mark.parametrize("costs", COSTS)
@pytest.mark.parametrize("kind", ["copies", "model", "alternating", "nothing"])
def test_the_mixture_is_as_good_as_the_best_of_its_sources(
    kind: str, costs: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    speed = {}
    for method in METHODS:
        bench = Bench(method, costs, monkeypatch)
        for spoken in talks(kind):
            bench.reply(spoken)
        speed[method] = bench.speed()
        assert bench.slowest(500) > 0.97
    best = max(speed[name] for name in METHODS[:-1])
    assert speed["mixed"] >= 0.95 * best
    if kind == "copies":
        assert best > 1.15
    if kind == "alternating" and costs == "cheap rows":
        assert speed["mixed"] > 1.08 * max(speed["ngram"], speed["suffix"])


@pytest.mark.parametrize("restarted", [False, True])
@pytest.mark.parametrize("method", ["lookahead", *METHODS])
def test_many_short_replies_lose_no_more_than_a_long_one(
    method: str, restarted: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was lost and what is known goes on from one reply, and one run, to the next."""
    rng = random.Random(method)
    bench = Bench(method, "measured", monkeypatch, folder=tmp_path if restarted else None)
    for i in range(50):
        bench.reply(talk(rng, [("new", 24, 0.6 if i % 2 else 0.05)]))
    assert bench.points[-1][0] == 50 * 24
    assert bench.slowest(500) > 0.97
    assert bench.speed() > 0.97


def test_a_disturbed_draft_model_does_not_stop_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    """What looking at the draft model lost is its own loss: copies have proved themselves."""
    rng = random.Random(3)
    bench = Bench("mixed", "measured", monkeypatch)
    alone = Bench("suffix", "measured", monkeypatch)
    for i in range(16):
        spoken = talk(rng, [("new", 12, 0.6), ("quote", 24, 0.6)] * 3)
        bench.step = 4.0 if i == 4 else 0.19
        bench.keep_time(monkeypatch)
        bench.reply(spoken)
        alone.keep_time(monkeypatch)
        alone.reply(spoken)
    after = 5 * 108
    assert alone.speed(after) > 1.12
    assert bench.speed(after) > 0.97 * alone.speed(after)


def test_one_method_cannot_spend_what_another_gained(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = random.Random(1)
    rich = Bench("ngram", "measured", monkeypatch)
    poor = Bench("lookahead", "measured", monkeypatch)
    poor.profile, poor.clock = rich.profile, rich.clock
    rich.keep_time(monkeypatch)
    for _ in range(30):
        rich.reply(talk(rng, [("quote", 24, 0.5)]))
        poor.reply(talk(rng, [("new", 24, 0.5)]))
    assert poor.speed() > 0.98
    assert rich.speed() > 1.2


def test_lookahead_is_given_up_where_rows_are_dear_and_kept_where_they_are_free(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rng = random.Random(2)
    dear = Bench("lookahead", "measured", monkeypatch)
    dear.reply(talk(rng, [("quote", 60, 0.0), ("new", 60, 0.0)] * 4))
    assert dear.slowest(300) > 0.97
    monkeypatch.setitem(COSTS, "free rows", ([0.0, *(1 + 0.004 * i for i in range(66))], 0.1))
    free = Bench("lookahead", "free rows", monkeypatch)
    for _ in range(4):
        free.reply(talk(rng, [("quote", 60, 0.0), ("new", 10, 0.0)] * 3))
    assert free.speed() > 1.3


def test_reasons_make_sense_to_people(monkeypatch: pytest.MonkeyPatch) -> None:
    for costs in COSTS:
        for method in ("lookahead", *METHODS):
            bench = Bench(method, costs, monkeypatch)
            for spoken in talks("alternating", 4):
                bench.reply(spoken)
            for reason in bench.reasons:
                assert not re.search(r"-\d|\bnan\b|\binf\b|credit|time of 0\.0", reason), reason


# -- what a caller expects ------------------------------------------------------------------------


class Given(PredictionDrafter):
    """For a reply of which something is expected, whoever asks for it."""

    def __init__(self, prediction: Sequence[int]) -> None:
        super().__init__()
        self._prediction = prediction

    def start(self, request: Request) -> None:
        super().start(dataclasses.replace(request, prediction=self._prediction))


class Editing(Bench):
    """Replies of which ``expected`` makes what is expected."""

    def __init__(self, expected: str, costs: str, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__("mixed", costs, monkeypatch)
        wide = (6.3 + 0.4 * i for i in range(1, 60))
        self.verify, self._expected, self._rng = [*CPU, *wide], expected, random.Random(2)

    def window(self, params: GenerateParams) -> Window:
        return super().window(params.replace(draft_max=15))  # as where wide passes are exact

    def proposers(self, spoken: Talk) -> dict[str, Drafter]:
        old = list(spoken.reply)
        if self._expected == "edited":
            old[200] = 1 + old[200] % 50
        elif self._expected == "wrong":
            old = fresh(self._rng, len(old))
        else:
            old = []
        return {"mixed": MixedDrafter([SuffixDrafter(), NgramDrafter(), Given(old)])}


def test_an_edited_text_is_written_in_a_fraction_of_the_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """And quite another text costs less than a hundredth."""
    rng, speed = random.Random(5), {}
    spoken = [talk(rng, [("new", 360, 0.0), ("quote", 24, 0.0)]) for _ in range(6)]
    for expected in ("nothing", "edited", "wrong"):
        bench = Editing(expected, "measured", monkeypatch)
        for one in spoken:
            bench.reply(one)
        speed[expected] = bench.speed()
    assert speed["edited"] > 2.5
    assert speed["wrong"] > 0.99 * speed["nothing"]
