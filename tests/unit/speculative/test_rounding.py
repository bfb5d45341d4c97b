"""What rounding can flip: judged in logits, marked where it can be, explained only there."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

import numpy as np
import pytest
from engines import FakeContext, fake_info, loaded
from table_model import FakePool, FakeTable, FakeVocab

from specllama.arrays import Rows
from specllama.backend.base import Outputs
from specllama.bench.prompts import BenchPrompt
from specllama.bench.proof import prove
from specllama.bench.rounding import probe_rows
from specllama.engine.engine import Engine
from specllama.engine.slot import Slot
from specllama.errors import Cancelled
from specllama.events import Event, Finished, RoundDone
from specllama.settings.params import GenerateParams, SamplingParams
from specllama.speculative.drafting.draft_model import ChainDrafter
from specllama.speculative.noise import exp_noise
from specllama.speculative.rules import Walk, verify_match
from specllama.speculative.sampling import SamplerChain
from specllama.speculative.types import EMPTY_DRAFT
from specllama.speculative.window import Plan, Window

V = 64
FLAT = {"sharpness": 0.05, "eog_bias": -9.0}  # near-ties everywhere


class Wobbly(FakeContext):
    """Passes of several rows move logits by up to a hundredth, as other kernels do."""

    def forward(
        self, tokens: Sequence[int], *, outputs: Outputs, parents: Sequence[int] | None = None
    ) -> Rows:
        rows = super().forward(tokens, outputs=outputs, parents=parents)
        if outputs == "all" and len(tokens) > 1:
            rows += np.linspace(-0.01, 0.01, rows.size, dtype=np.float32).reshape(rows.shape)
        return rows


class Burst(Window):
    """Drafts in the second round only."""

    def __init__(self) -> None:
        super().__init__(4)
        self._rounds = 0

    def plan(self, room: int) -> Plan:
        self._rounds += 1
        return Plan(min(4, room) if self._rounds == 1 else 0, "a burst")


def engine(exact_rows: int, *, burst: bool = False, target: type[FakeContext] = Wobbly) -> Engine:
    table = FakeTable(V, seed=3, **FLAT)
    draft = ChainDrafter(FakeContext(table), n_vocab=V)
    return Engine(
        loaded(
            target=target(table),
            vocab=FakeVocab(V),
            info=dataclasses.replace(fake_info(exact_rows=exact_rows), exact_rows=exact_rows),
            drafters={"draft": draft},
            make_window=(lambda params: Burst()) if burst else None,
        )
    )


def rounds(engine: Engine, prompt: list[int], **changes: object) -> list[RoundDone]:
    params = GenerateParams(
        sampling=SamplingParams(temperature=0.0),
        seed=1,
        max_tokens=12,
        ignore_eos=True,
        proposer="draft",
    ).replace(**changes)
    events = list(engine.generate(prompt, params))
    assert isinstance(events[-1], Finished)
    return [event for event in events if isinstance(event, RoundDone)]


@pytest.mark.parametrize("temperature", [0.05, 0.2, 1.0, 3.0])
def test_a_gap_is_counted_in_logits_whatever_the_temperature(temperature: float) -> None:
    row = np.full(V, -1e3, np.float32)
    row[[5, 9]] = 1.0, 1.3
    sampling = SamplingParams(temperature=temperature, top_k=0, top_p=1.0, min_p=0.0)
    chain = SamplerChain(sampling, seed=4, tokens=[1, 2])
    walk = Walk(row[None], chain)
    verdict = verify_match(EMPTY_DRAFT, walk, 4)
    times = np.log(exp_noise(4, 2, np.array([5, 9], np.int32)))
    expected = abs((row[5] - temperature * times[0]) - (row[9] - temperature * times[1]))
    assert verdict.gap == pytest.approx(expected, rel=1e-4)


def test_steps_after_a_wide_pass_are_marked_until_its_cells_are_gone() -> None:
    prompt = [3, 4, 5, 6]
    one = engine(2, burst=True)
    first = rounds(one, prompt)
    wide = next(i for i, done in enumerate(first) if len(done.drafted) > 1)
    assert wide > 0
    assert not any(done.near_tie for done in first[:wide])
    assert any(done.near_tie for done in first[wide + 1 :]), "plain steps that read its cells"
    text = [*prompt, *(token for done in first for token in done.emitted)]
    assert any(done.near_tie for done in rounds(one, text, proposer="none"))
    assert not any(done.near_tie for done in rounds(one, prompt, proposer="none"))
    rounds(one, prompt)
    one.reset()
    assert not any(done.near_tie for done in rounds(one, text, proposer="none"))


@pytest.mark.parametrize("exact_rows", [65, 1])
def test_a_difference_is_explained_only_where_passes_may_round(exact_rows: int) -> None:
    """All gaps are tiny here: where passes are said to be exact, they are failures all the same."""
    prompts = [BenchPrompt(str(i), "own", text="the rain in spain") for i in range(8)]
    cases = list(prove(engine(exact_rows), prompts, proposers=("draft",), max_tokens=24))
    differ = [case for case in cases if case.difference is not None]
    assert differ
    for case in differ:
        assert case.difference is not None
        assert case.difference.explained is (exact_rows == 1)
        assert case.difference.bound == pytest.approx(0.0148 if exact_rows == 1 else 0, abs=4e-4)
    assert all(case.bitwise is (exact_rows > 1) for case in differ)
    assert all(case.ok is (exact_rows == 1) for case in differ)
    assert differ[0].to_dict()["bitwise"] is (exact_rows > 1)


class Faulty(Wobbly):
    """A wide pass over one text favours one token, by less than a tenth."""

    text: list[int] = []  # noqa: RUF012

    def forward(
        self, tokens: Sequence[int], *, outputs: Outputs, parents: Sequence[int] | None = None
    ) -> Rows:
        same = self.tokens[: len(self.text)] == self.text
        fault = same and len(tokens) > 1 and outputs == "all"
        rows = super().forward(tokens, outputs=outputs, parents=parents)
        if fault:
            rows[:, 7] += 0.09
        return rows


def test_a_gap_that_rounding_does_not_close_on_this_file_is_not_explained() -> None:
    """However small it is: what passes here move is measured, and is less."""
    prompts = [BenchPrompt(str(i), "own", text="the rain in spain") for i in range(8)]
    one = engine(1, target=Faulty)
    Faulty.text = one.encode("the rain in spain")[0]
    cases = list(prove(one, prompts, proposers=("draft",), max_tokens=16))
    wrong = [case for case in cases if not case.ok]
    assert wrong
    for case in wrong:
        assert case.difference is not None
        assert case.difference.bound < case.difference.gap < 0.1


def test_a_reply_that_was_cut_short_is_no_disproof() -> None:
    """As when the process is told to end: the case is dropped, by name."""
    one = engine(65)
    generate = one.generate

    def cut(prompt: object, params: GenerateParams) -> Iterator[Event]:
        for event in generate(prompt, params):  # type: ignore[arg-type]
            if params.proposer == "draft" and isinstance(event, RoundDone):
                one.abort()
            yield event

    one.generate = cut  # type: ignore[assignment, method-assign]
    prompts = [BenchPrompt("first", "own", text="the rain in spain")]
    with pytest.raises(Cancelled, match=r"first, draft, temperature 0.*dropped"):
        list(prove(one, prompts, proposers=("draft",), max_tokens=24))


def test_a_probe_reads_in_passes_that_the_context_takes() -> None:
    table = FakeTable(V, seed=3, **FLAT)
    short = Engine(
        loaded(
            target=FakeContext(table, n_batch=16), vocab=FakeVocab(V), info=fake_info(), drafters={}
        )
    )
    assert probe_rows(short, [1, 2, 3, 4] * 10, (2, 4))


@pytest.mark.parametrize("exact_rows", [1, 65])
def test_a_prompt_that_was_read_beside_another_may_round(exact_rows: int) -> None:
    """The other reply has one token: what follows is written alone."""
    pool = FakePool(FakeTable(V, seed=3, **FLAT), lanes=2)
    more = [Slot(pool.open(), {})]
    info = fake_info(512, V, exact_rows=exact_rows)
    engine = Engine(loaded(pool.open(), FakeVocab(V), info=info, more=more))
    asked = GenerateParams(proposer="none", seed=1, ignore_eos=True)
    engine.submit([1, 2, 3], asked.replace(max_tokens=1))
    second = engine.submit([4, 5, 6], asked.replace(max_tokens=20))
    said = [one for events in iter(engine.step, []) for one in events]
    rounds = [event for id, event in said if id == second and isinstance(event, RoundDone)]
    assert len(rounds) == 20
    assert any(done.near_tie for done in rounds) == (exact_rows == 1)
    alone = [e for e in engine.generate([7, 8], asked) if isinstance(e, RoundDone)]
    assert not any(done.near_tie for done in alone)


@pytest.mark.parametrize("exact_rows", [1, 65])
def test_a_prompt_that_goes_on_from_another_may_round(exact_rows: int) -> None:
    """It is read in other parts than alone."""
    pool = FakePool(FakeTable(V, seed=3, **FLAT), lanes=2)
    pool.kernels = dataclasses.replace(pool.kernels, exact_rows=exact_rows)
    more = [Slot(pool.open(), {})]
    info = fake_info(512, V, exact_rows=exact_rows)
    engine = Engine(loaded(pool.open(), FakeVocab(V), info=info, more=more))
    asked = GenerateParams(proposer="none", seed=1, ignore_eos=True, max_tokens=20)
    head = list(range(1, 40))
    for tail, cached in ((50, False), (51, True)):
        events = list(engine.generate([*head, tail], asked))
        marked = [done.near_tie for done in events if isinstance(done, RoundDone)]
        assert any(marked) == (cached and exact_rows == 1)
