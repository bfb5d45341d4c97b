"""``specllama prove`` on the bundled pair, and the promise with the clock playing tricks."""

from __future__ import annotations

import json
import random
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from engines import FakeContext, Given, engine_over
from table_model import FakeTable
from windows import Answers, Pair, play

from specllama.backend.kernels import TILE
from specllama.bench.prompts import BenchPrompt
from specllama.bench.proof import Case, available, prove
from specllama.bench.rounding import RowProbe, probe_stated_rows
from specllama.cli.prove import command, rows_alike
from specllama.engine.conversation import Conversation
from specllama.engine.engine import Engine
from specllama.engine.seating import Seats
from specllama.engine.slot import Slot
from specllama.errors import CannotLoad, UsageError
from specllama.events import Finished, RoundDone
from specllama.settings.params import GenerateParams, SamplingParams
from specllama.speculative.drafting.drafter import Drafter, Request
from specllama.speculative.window import Plan, Window
from specllama.text_history import common_prefix

WAYS = ("draft", "ngram", "auto", "suffix", "tree", "merged", "eagle3", "medusa", "self")


@contextmanager
def random_pauses(engine: Engine, longest_ms: float, *, seed: int = 0) -> Iterator[None]:
    """Delay target passes at random by up to ``longest_ms``, and drafters by up to a tenth of that.

    The window's decisions then differ from run to run; the text must not. Drafters are slowed less,
    so that drafting stays worthwhile and there is something to decide.
    """
    rng = random.Random(seed)
    slowed: list[tuple[object, str]] = []

    def slow(owner: object, name: str, share: float) -> None:
        inner = getattr(owner, name)

        def wrapped(*args: Any, **kwargs: Any) -> Any:
            time.sleep(rng.random() * share * longest_ms / 1e3)
            return inner(*args, **kwargs)

        setattr(owner, name, wrapped)
        slowed.append((owner, name))

    try:
        slow(engine.target, "forward", 1.0)
        for name in engine.drafters:
            slow(engine.drafters[name], "draft", 0.1)
        yield
    finally:
        for owner, name in slowed:
            delattr(owner, name)


def test_random_pauses_with_the_window_on_never_change_a_token(
    own_tiny: Engine, prompts: list[BenchPrompt]
) -> None:
    with random_pauses(own_tiny, 3.0, seed=7):
        cases = list(
            prove(
                own_tiny,
                prompts[4:8],  # one of each slice
                proposers=WAYS,
                temperatures=(0.0, 0.7, 1.0),
                draft_max=(6,),
                max_tokens=20,
                window="auto",
            )
        )
    assert len(cases) == 12 * len(WAYS)
    assert [c for c in cases if not c.identical] == []
    assert all(c.law_holds for c in cases)
    assert sum(c.drafted for c in cases) > 0


def warm(engine: Engine, prompts: list[BenchPrompt], *proposers: str) -> list[Case]:
    """One prompt that is long enough for tiles and one that is not, all three ways."""
    some = [
        next(p for p in prompts if (len(engine.encode(p.content)[0]) > TILE) == w) for w in (0, 1)
    ]
    return list(
        prove(engine, some, proposers=proposers, temperatures=(0.0, 0.8), max_tokens=20, warm=True)
    )


def test_a_text_is_the_same_cold_behind_a_stranger_and_behind_its_own_turns(
    tiny: Engine, prompts: list[BenchPrompt]
) -> None:
    cases = warm(tiny, prompts, *WAYS[:-1])
    n = 4 * len(WAYS[:-1])
    assert Counter(case.way for case in cases) == {"cold": n, "behind": n + 4, "turns": n}
    assert [
        case for case in cases if not (case.identical and case.bitwise and case.law_holds)
    ] == []


def test_a_prompt_that_takes_what_another_left_is_found_out(
    tiny: Engine, prompts: list[BenchPrompt], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Cells that are taken without asking whether a fresh reading would leave them: every case
    behind a stranger is red, also plain ones, whether its text changed or its logprobs alone."""

    def unasked(self: Seats, place: Any, ids: Sequence[int], scope: str) -> int:
        held = place.target if isinstance(place, Slot) else place.blob
        return min(common_prefix(held.tokens, ids), len(ids) - 1)

    monkeypatch.setattr(Seats, "_usable", unasked)
    cases = warm(tiny, prompts, "draft", "suffix")
    tiny.reset()
    assert {case.ok for case in cases if case.way == "behind"} == {False}
    assert {case.ok for case in cases if case.way == "cold"} == {True}
    parted = [case.difference for case in cases if case.difference is not None]
    assert any(difference.of_logprobs for difference in parted)


def test_the_next_turn_of_a_reply_with_a_wrong_cell_is_found_out(
    tiny: Engine, prompts: list[BenchPrompt], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rejected guess whose cells stay in place of a token's: the reply was right, and only the
    next turn reads them."""
    run = Conversation.settle

    def spoilt(self: Conversation) -> int:
        keep = run(self)
        if self._drafter.name == "draft" and self._slot.held.ends:
            target, n = self._target, self._slot.held.ends[-1]
            target.rollback(n - 1)
            target.forward([self._tokens[0]], outputs="none")
            target.tokens.cut(n - 1)
            target.tokens.extend([self._tokens[n - 1]])
        return keep

    monkeypatch.setattr(Conversation, "settle", spoilt)
    cases = warm(tiny, prompts, "draft")
    tiny.reset()
    assert [case.ok for case in cases if case.way == "turns"] == [False] * 4
    assert all(case.ok for case in cases if case.way != "turns")


def test_rows_are_alike_as_far_as_is_stated(tiny: Engine, prompts: list[BenchPrompt]) -> None:
    probes = probe_stated_rows(tiny, prompts)
    assert [probe.rows for probe in probes] == [2, 4, 8, 16, 32, tiny.info.exact_rows]
    assert {probe.difference for probe in probes} == {0.0}
    brief = probe_stated_rows(
        tiny, [BenchPrompt("short", "chat", text="What is a draft model for?")]
    )
    assert 2 <= brief[-1].rows < 64


def test_a_machine_whose_rows_differ_is_told_how_far_it_is_exact(
    capsys: pytest.CaptureFixture[str],
) -> None:
    rows_alike([RowProbe(2, 0.0), RowProbe(4, 0.0), RowProbe(8, 3e-6), RowProbe(16, 0.1)])
    said = capsys.readouterr().out
    assert "a pass of 8 differs" in said
    assert "--draft-max 3 stays exact" in said
    rows_alike([RowProbe(2, 0.0), RowProbe(7, 0.0)])
    assert "up to 7 tokens are bit-identical" in capsys.readouterr().out
    rows_alike([])
    assert capsys.readouterr().out == ""


class Moody(Window):
    """Drafts as far as a die says, whatever anything costs: every decision a clock could cause."""

    def __init__(self, params: GenerateParams, rng: random.Random) -> None:
        super().__init__(params.draft_max)
        self._most = params.draft_max
        self._rng = rng

    def plan(self, room: int) -> Plan:
        n = min(self._rng.randint(0, self._most), room)
        return Plan(n, "the die", Answers(further=self._further))

    def _further(self, likely: float | None = None, rows: int = 0) -> bool:
        return self._rng.random() < 0.8


@pytest.mark.parametrize("proposer", WAYS)
def test_any_decision_of_a_window_gives_the_same_text(
    tiny: Engine, prompts: list[BenchPrompt], proposer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = random.Random(proposer)
    windows = Given(tiny.info, lambda params: Moody(params, rng))
    monkeypatch.setattr(tiny, "_loaded", replace(tiny._loaded, windows=windows))
    cases = list(prove(tiny, prompts[4:8], proposers=(proposer,), draft_max=(6, 6), max_tokens=24))
    assert len(cases) == 24
    assert [c for c in cases if not c.identical] == []
    assert sum(c.drafted for c in cases) > 0
    pairs = zip(cases[::2], cases[1::2], strict=True)
    assert any(a.drafted != b.drafted for a, b in pairs), "the die should have made a difference"


def test_pauses_really_slow_down_and_go_away(tiny: Engine, prompts: list[BenchPrompt]) -> None:
    before = tiny.target.forward
    with random_pauses(tiny, 1.0):
        assert tiny.target.forward != before
    assert tiny.target.forward == before
    assert "draft" not in vars(tiny.drafters["draft"])


def run(*arguments: str) -> tuple[int, str, str]:
    result = CliRunner().invoke(command, ["-t", "1", "--max-tokens", "12", *arguments])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.stdout, result.stderr


def test_all_ways_to_draft_in_one_command_and_what_is_missing_is_skipped() -> None:
    code, out, err = run("-n", "2", "--temperature", "0.7", "--proposer", "all", "--json")
    assert code == 0
    *lines, summary = map(json.loads, out.splitlines())
    proved = {line["proposer"] for line in lines}
    assert {"draft", "ngram", "mixed", "suffix", "tree", "merged", "lookahead"} <= proved
    assert {"eagle3", "medusa", "self"} <= proved, "heads of the bundled target are found"
    assert list(summary["skipped"]) == ["mtp", "dflash"]
    assert "NextN" in summary["skipped"]["mtp"]
    assert "skipped mtp" in err
    assert summary["cases"] == len(lines) == summary["identical"]
    assert summary["finished"]
    forced = [line for line in lines if line["proposer"] == "forced" and line["accepted"]]
    assert {line["slice"] for line in forced} == {"schema"}, "it has a prompt of its own"
    n = 2 * len(proved - {"none"})
    same = {"cold": n, "behind": n + 2, "turns": n}
    assert summary["ways"] == {w: {"cases": k, "identical": k} for w, k in same.items()}


def test_the_table_has_a_column_for_each_way() -> None:
    code, out, _ = run("-n", "1", "--temperature", "0", "--proposer", "ngram")
    assert code == 0
    head, ngram, none, *_ = out.splitlines()
    assert "cold" in head
    assert "after another prompt" in head
    assert "second turn" in head
    assert ngram.split()[:5] == ["ngram", "0", "1/1", "1/1", "1/1"]
    assert none.split()[:5] == ["none", "0", "–", "1/1", "–"]
    code, out, _ = run("-n", "1", "--temperature", "0", "--proposer", "ngram", "--parallel", "2")
    assert code == 0
    assert "beside others" in out
    assert "cold" not in out


def test_nothing_left_to_prove_is_an_error_that_names_the_reason() -> None:
    with pytest.raises(UsageError, match="NextN") as caught:
        run("-n", "1", "--proposer", "mtp")
    assert "draft" in (caught.value.hint or "")


def test_a_run_that_goes_on_is_the_same_run() -> None:
    def cases(*arguments: str) -> list[dict[str, object]]:
        code, out, _ = run(
            *arguments, "--proposer", "ngram", "--temperature", "1", "--json", "--seed", "5"
        )
        assert code == 0
        return [json.loads(line) for line in out.splitlines()][:-1]

    whole = cases("-n", "4")
    assert cases("-n", "2", "--skip", "2") == whole[len(whole) // 2 :]


def test_a_prompt_that_is_not_there_cannot_be_the_first(tmp_path: Path) -> None:
    file = tmp_path / "prompts.txt"
    file.write_text("one\ntwo\n")
    code, _, err = run("--prompts", str(file), "--skip", "2")
    assert code == 2
    assert "there are 2 prompts" in err


class Unopenable(Drafter):
    name = "self"

    def start(self, request: Request) -> None:
        raise CannotLoad("no room for a second model")


def test_a_method_that_cannot_be_opened_is_neither_passed_nor_failed() -> None:
    engine = engine_over(FakeContext(FakeTable(seed=3), n_ctx=256), drafters={"self": Unopenable()})
    assert available(engine, ("self", "mtp", "auto"))[0] == ("self", "auto")
    some = [BenchPrompt(str(i), "own", text="the rain in spain") for i in range(2)]
    skipped: list[tuple[str, str]] = []
    cases = list(
        prove(
            engine,
            some,
            proposers=("self", "none"),
            max_tokens=8,
            on_skip=lambda *why: skipped.append(why),
        )
    )
    assert skipped == [("self", "no room for a second model")]
    assert {c.proposer for c in cases} == {"none"}
    with pytest.raises(CannotLoad):
        list(prove(engine, some, proposers=("self",), max_tokens=8))


# -- rounds of the bundled pair, replayed at several costs of a pass --


def answer(engine: Engine, prompt: BenchPrompt, **changes: Any) -> tuple[Finished, list[RoundDone]]:
    engine.reset()
    params = GenerateParams(max_tokens=48, seed=7, min_speculative_tokens=0).replace(**changes)
    events = list(engine.generate(prompt.content, params))
    finished = events[-1]
    assert isinstance(finished, Finished)
    return finished, [e for e in events if isinstance(e, RoundDone)]


def test_logged_rounds_replay_within_the_ledger(
    own_tiny: Engine, prompts: list[BenchPrompt]
) -> None:
    """Real drafts, real confidences: what the window would lose at several costs of a pass."""
    from replay import trace_of_rounds

    from specllama.speculative.policy.constants import EPSILON
    from specllama.speculative.policy.ledger import Ledger

    for n, prompt in enumerate(prompts[:8]):
        sampling = SamplingParams(temperature=float(n % 2))
        _, rounds = answer(
            own_tiny, prompt, sampling=sampling, proposer="draft", window="fixed", draft_max=4
        )
        trace = trace_of_rounds(rounds)
        for extra, step in ((0.1, 0.05), (0.5, 0.1), (0.9, 0.6)):
            verify = [0.0, *(1 + extra * (k - 1) for k in range(1, 18))]
            pair = Pair().tuned(verify, step)
            result = play(trace, verify, step, pair=pair)
            assert result.worst_loss(EPSILON) <= Ledger().total + 1e-6
