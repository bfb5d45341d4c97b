"""The proof against a server: its texts, its law, and what is made of both."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence

import numpy as np
import pytest
from engines import FakeContext, loaded
from law_servers import Law, TableServer, noise, toward_draft
from table_model import FakeTable

from specllama.bench.against import (
    PLAIN,
    SPECULATIVE,
    LawCase,
    Side,
    TextCase,
    compare_texts,
    follow_law,
    lead,
    parted,
    pure,
    spelt,
)
from specllama.bench.against_report import ServerProof, judge, to_json
from specllama.bench.plain_law import OwnLaw, PlainLaw, StatedLaw, copied_after, own_answer
from specllama.bench.prompts import BenchPrompt
from specllama.engine.engine import Engine
from specllama.errors import EngineDied, EngineError
from specllama.remote.answers import Likely
from specllama.remote.kinds.kind import Heard
from specllama.settings.params import GenerateParams

PROMPTS = [BenchPrompt(str(n), "own", text=text) for n, text in enumerate(("tea", "rain", "no"))]
BASE = GenerateParams(max_tokens=16, seed=1)
TABLE = FakeTable(64, sharpness=2.0, eog_bias=1.0)
DRAFT = FakeTable(64, seed=9, sharpness=2.0, of=TABLE, agreement=0.5)


def engine_over(table: FakeTable) -> Engine:
    return Engine(loaded(FakeContext(table)))


def arm(name: str, ask: Callable[[BenchPrompt, GenerateParams], Heard]) -> Side:
    return Side(name, f"the {name} one", ask)


def texts(
    speculative: TableServer, plain: TableServer, *, temperatures: Sequence[float] = (0.0,)
) -> list[TextCase]:
    wishes = [pure(BASE, t) for t in temperatures]
    arms = arm(SPECULATIVE, speculative), arm(PLAIN, plain)
    return list(compare_texts(*arms, PROMPTS, wishes, at_once=2))


def last(server: TableServer, law: PlainLaw, *, most: int = 400, name: str = PLAIN) -> LawCase:
    *_, case = follow_law(arm(name, server), law, PROMPTS, pure(BASE, 1.0), most=most)
    assert case.over
    return case


def proof_of(cases: Sequence[TextCase] = (), laws: Sequence[LawCase] = ()) -> ServerProof:
    arms = (arm(name, TableServer(TABLE)) for name in (SPECULATIVE, PLAIN))
    return ServerProof(["server: a <table>"], *arms, "a table", 3, list(cases), list(laws), [])


# ---- texts


def test_equal_arms_are_equal_in_every_way() -> None:
    cases = texts(TableServer(TABLE), TableServer(TABLE), temperatures=(0.0, 1.0))
    assert {case.outcome for case in cases} == {"equal"}
    ways = {(case.arm, case.way, case.temperature) for case in cases}
    assert ways == {
        (SPECULATIVE, "first", 0.0),
        (SPECULATIVE, "again", 0.0),
        (SPECULATIVE, "beside", 0.0),
        (PLAIN, "again", 0.0),
        (PLAIN, "beside", 0.0),
        (SPECULATIVE, "first", 1.0),
    }
    verdict = judge(proof_of(cases))
    assert verdict.answer == "lossless so far"
    assert not verdict.fault
    assert "3 of 3 greedy texts equal the plain ones, the first time." in verdict.reasons


def test_a_cache_that_spoils_the_second_reply_is_named() -> None:
    wrong = TableServer(TABLE, spoil=lambda n, text: text if n == 1 else text[:4] + "Q9Q9")
    cases = texts(wrong, TableServer(TABLE))
    found = {(case.way, case.outcome) for case in cases if case.arm == SPECULATIVE}
    assert found == {("first", "equal"), ("again", "different"), ("beside", "different")}
    verdict = judge(proof_of(cases))
    assert verdict.fault
    assert "0 of 3 greedy texts equal the plain ones, repeated at once" in verdict.reasons[0]
    first = next(case for case in cases if case.outcome == "different")
    assert (first.at, first.other[:4]) == (4, "Q9Q9")


def test_a_plain_arm_that_does_not_repeat_itself_is_a_fault_of_its_own() -> None:
    wobbly = TableServer(TABLE, spoil=lambda n, text: f"{n}{text}")
    verdict = judge(proof_of(texts(wobbly, wobbly)))
    assert verdict.answer == "not repeatable"
    assert "does not show that speculation is to blame" in verdict.reasons[0]


def test_a_near_tie_is_told_from_a_wrong_text() -> None:
    near = FakeTable(64, sharpness=2.0, eog_bias=-9.0)
    close, far = near.row([8]), np.argsort(-near.row([8]))
    close[far[1:3]] = close[far[0]] - np.array([0.1, 1.0])  # the table keeps its rows
    close[far[3:]] -= 2.0
    server = TableServer(near)
    one = BenchPrompt("x", "own", text=server.vocab.piece(8).decode())
    replies = [server.vocab.piece(int(far[i])).decode() for i in (1, 2)]
    for text, outcome in zip(replies, ("near-tie", "different"), strict=True):
        other = TableServer(near, spoil=lambda n, whole, text=text: text + whole[1:])
        arms = arm(SPECULATIVE, other), arm(PLAIN, server)
        case, *_ = compare_texts(*arms, [one], [pure(BASE, 0.0)], at_once=1)
        assert (case.outcome, case.at) == (outcome, 0)
        assert case.gap is not None
        assert (case.gap < 0.11) == (outcome == "near-tie")
        assert case.gap_by == "its own logprobs"


def test_our_engine_scores_the_gap_where_the_server_lists_nothing() -> None:
    with engine_over(TABLE) as engine:
        law = OwnLaw(engine, listed=False)
        plain = own_answer(engine, PROMPTS[0], pure(BASE, 0.0)).text
        other = "z" if plain[2] != "z" else "x"
        gap = law.lead(PROMPTS[0], BASE, plain[:2], plain[2:], other)
        row = TABLE.row(engine.encode(PROMPTS[0].content[:]) [0] + list(
            engine.vocab.tokenize(plain[:2], add_special=False, parse_special=False)))  # fmt: skip
    a, b = (engine.vocab.tokenize(t, add_special=False, parse_special=False)[0]
            for t in (plain[2], other))  # fmt: skip
    assert gap == pytest.approx(abs(float(row[a]) - float(row[b])), abs=1e-5)


def test_where_one_reply_ends_its_end_is_scored_however_the_other_would_be_split() -> None:
    with engine_over(TABLE) as engine:
        law, vocab = OwnLaw(engine, listed=False), engine.vocab
        shared = own_answer(engine, PROMPTS[0], pure(BASE, 0.0)).text[:3]
        ids = vocab.tokenize(shared, add_special=False, parse_special=False)
        row = TABLE.row([*engine.encode(PROMPTS[0].content)[0], *ids])
        ends = [float(row[t]) for t in range(vocab.n_tokens) if vocab.is_eog(t)]
        [first] = vocab.tokenize("z", add_special=False, parse_special=False)
        for plain, other in (("", "zx"), ("zx", "")):
            gap = law.lead(PROMPTS[0], BASE, shared, plain, other)
            assert gap == pytest.approx(abs(max(ends) - float(row[first])), abs=1e-5)


def test_white_space_at_the_ends_is_no_silent_equality() -> None:
    cases = texts(TableServer(TABLE, spoil=lambda n, text: f"{text} "), TableServer(TABLE))
    assert {case.outcome for case in cases if case.arm == SPECULATIVE} == {"white space"}
    (reason, *_) = judge(proof_of(cases)).reasons
    assert "0 of 3" in reason
    assert "3 differ in white space at their ends" in reason


def test_a_refused_request_is_one_failed_case() -> None:
    def refuse(prompt: BenchPrompt, params: GenerateParams) -> Heard:
        raise EngineError("out of cells")

    arms = arm(SPECULATIVE, refuse), arm(PLAIN, TableServer(TABLE))
    cases = list(compare_texts(*arms, PROMPTS, [pure(BASE, 0.0)]))
    assert {c.outcome for c in cases if c.arm == SPECULATIVE} == {"failed"}
    assert judge(proof_of(cases)).answer == "cannot be told"


def test_a_server_that_is_gone_ends_it() -> None:
    def gone(prompt: BenchPrompt, params: GenerateParams) -> Heard:
        raise EngineDied("nobody answers")

    arms = arm(SPECULATIVE, gone), arm(PLAIN, TableServer(TABLE))
    with pytest.raises(EngineDied):
        list(compare_texts(*arms, PROMPTS, [pure(BASE, 0.0)]))


@pytest.mark.parametrize(
    ("a", "b", "at"), [("ab", "ab", None), ("ab", "ac", 1), ("ab", "abc", 2), ("", "x", 0)]
)
def test_where_texts_part(a: str, b: str, at: int | None) -> None:
    assert parted(a, b) == at


def test_the_lead_of_a_token_in_byte_level_spelling() -> None:
    told = [Likely("A", -0.1, (("A", -0.1),)), Likely("Ġcat", -0.5, (("Ġcat", -0.5), ("Ġc", -0.9)))]
    assert spelt("Ġcat") == " cat"
    assert lead(told, 4, "A cow") == pytest.approx(0.4)
    assert lead(told, 2, "A dog") is None


# ---- the law


@pytest.mark.parametrize("lists", [True, False])
def test_a_right_server_follows_the_law(lists: bool) -> None:
    with engine_over(TABLE) as engine:
        case = last(TableServer(TABLE, lists=lists), OwnLaw(engine, listed=lists))
    assert not case.shown
    assert case.tokens == 400
    assert case.read_as == ("tokens" if lists else "text")
    assert (case.stray > 0) == (not lists)


@pytest.mark.parametrize(
    ("law", "lists", "most"),
    [(noise, True, 10), (noise, False, 30), (toward_draft(0.6), True, 400)],
)
def test_another_law_is_shown(law: Law, lists: bool, most: int) -> None:
    with engine_over(TABLE) as engine:
        case = last(TableServer(TABLE, DRAFT, law, lists=lists), OwnLaw(engine, listed=lists))
    assert case.shown
    assert case.found_at is not None
    assert case.found_at <= most
    assert case.tokens == case.found_at  # it stops there


def test_the_drafts_law_finds_it_sooner() -> None:
    found = []
    for draft in (None, engine_over(DRAFT)):
        with engine_over(TABLE) as engine:
            server = TableServer(TABLE, DRAFT, toward_draft(0.5))
            found.append(last(server, OwnLaw(engine, draft, listed=True), most=2000))
    assert all(case.shown for case in found)
    assert found[1].by in ("draft", "overlap")
    assert (found[1].found_at or 0) < (found[0].found_at or 0)


def test_a_server_is_held_to_what_it_states() -> None:
    assert not last(TableServer(TABLE), StatedLaw()).shown
    case = last(TableServer(TABLE, law=noise), StatedLaw())
    assert case.shown
    assert (case.found_at or 99) < 40


def test_the_same_reply_again_and_again_is_not_counted_twice() -> None:
    case = last(TableServer(TABLE, fixed=True), StatedLaw())
    assert not case.shown
    assert case.replies < 8
    assert case.skipped
    assert "fixed seed" in case.note


def test_another_template_is_said() -> None:
    class Longer(TableServer):
        def answer(self, prompt: str, params: GenerateParams) -> Heard:
            return super().answer(f"a{prompt}", params)

    with engine_over(TABLE) as engine:
        case = last(Longer(TABLE), OwnLaw(engine, listed=True))
    assert not case.tokens
    assert "another chat template or vocabulary" in case.note
    assert judge(proof_of((), [case])).answer == "cannot be told"


@pytest.mark.parametrize(
    ("tokens", "guess"),
    [([1, 2, 3, 4, 1, 2, 3], 4), ([1, 2, 3], -1), ([1, 2, 3, 4, 5], -1), ([7, 7, 7, 7], 7)],
)
def test_what_a_copy_guesses(tokens: list[int], guess: int) -> None:
    assert copied_after(tokens) == guess


# ---- the verdict


def law_case(arm: str, shown: bool) -> LawCase:
    return LawCase(
        arm, 1.0, "a table", "tokens", 120, 4, 0, 120 if shown else None, 2.5 if shown else 0.1,
        2.5 if shown else 0.4, "draft", over=True,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("laws", "answer", "words"),
    [
        ([law_case(SPECULATIVE, False)], "lossless so far", "120 tokens follow the law"),
        (
            [law_case(SPECULATIVE, True), law_case(PLAIN, False)],
            "not lossless",
            "Its plain replies do follow that law",
        ),
        (
            [law_case(SPECULATIVE, True), law_case(PLAIN, True)],
            "cannot be told",
            "says nothing about speculation",
        ),
        ([law_case(SPECULATIVE, True)], "not lossless", "no plain arm to compare with"),
    ],
)
def test_the_plain_arm_decides_what_another_law_means(
    laws: list[LawCase], answer: str, words: str
) -> None:
    verdict = judge(proof_of((), laws))
    assert verdict.answer == answer
    assert words in " ".join(verdict.reasons)


def test_json_holds_the_verdict_and_every_text() -> None:
    wrong = TableServer(TABLE, spoil=lambda n, text: "<b>&\x1b[31m" + text)
    proof = proof_of(texts(wrong, TableServer(TABLE)), [law_case(SPECULATIVE, True)])
    told = json.loads(json.dumps(to_json(proof)))
    assert told["verdict"] == "not lossless"
    assert len(told["texts"]) == len(proof.texts)
