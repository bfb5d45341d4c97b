"""Stop conditions inside a run of tokens, text held back, and pieces that split characters."""

import itertools
import json
import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from engines import FakeContext, engine_over, fake_info
from hypothesis import given
from hypothesis import strategies as st
from requests_made import FREE, check_laws, params
from table_model import FakeTable, FakeVocab

from specllama.cancel import Cancel
from specllama.engine import pair_loading
from specllama.engine.engine import Engine
from specllama.engine.reply import ReplyBuilder, TextStream
from specllama.errors import UsageError
from specllama.events import Chances, Event, FinishReason, Notice, RoundDone, event_from_dict
from specllama.settings.params import GenerateParams
from specllama.speculative.drafting.draft_model import ChainDrafter
from specllama.speculative.drafting.text_library import Library
from specllama.speculative.sampling import likeliest
from specllama.store.rounds import RoundLog, list_runs, read_run
from specllama.text import decoded


class Pieces:
    """A vocabulary given as bytes; token 0 ends a turn."""

    def __init__(self, *pieces: bytes) -> None:
        self._pieces = (b"", *pieces)

    @property
    def n_tokens(self) -> int:
        return len(self._pieces)

    def tokenize(self, text: str, *, add_special: bool, parse_special: bool) -> list[int]:
        raise NotImplementedError

    def piece(self, token: int, *, special: bool = False) -> bytes:
        return self._pieces[token]

    def is_eog(self, token: int) -> bool:
        return token == 0


def reply(*pieces: bytes, **changes: Any) -> ReplyBuilder:
    return ReplyBuilder(GenerateParams(**changes), Pieces(*pieces))


class Taken(NamedTuple):
    kept: int
    text: str
    reason: FinishReason | None


def take(reply: ReplyBuilder, tokens: Sequence[int], *, late: bool = False) -> Taken:
    return Taken(reply.accept(tokens, late=late), reply.new[1], reply.reason)


def test_tokens_become_text() -> None:
    r = reply(b"ab", b"c")
    taken = take(r, [1, 2, 1])
    assert (taken.kept, taken.text, taken.reason) == (3, "abcab", None)
    assert (r.token_ids, r.text, r.finish(None)) == ([1, 2, 1], "abcab", ("", ""))


def test_a_stop_token_is_kept_but_not_shown() -> None:
    r = reply(b"ab", b"c")
    taken = take(r, [1, 0, 2])
    assert (taken.kept, taken.text, taken.reason) == (2, "ab", "stop_token")
    assert r.token_ids == [1, 0]


def test_control_tokens_are_spelled_for_whoever_reads_calls() -> None:
    class Marked(Pieces):
        def piece(self, token: int, *, special: bool = False) -> bytes:
            return b"<|call|>" if special and token < 2 else self._pieces[token]

    for spelled, text in ((False, "ab"), (True, "<|call|>ab")):
        r = ReplyBuilder(GenerateParams(spelled=spelled), Marked(b"", b"ab"))
        assert take(r, [1, 2, 0]).text == text


def test_ignore_eos_makes_it_an_ordinary_token() -> None:
    r = reply(b"ab", ignore_eos=True)
    assert not r.is_stop(0)
    assert take(r, [1, 0, 1]).kept == 3
    assert r.text == "abab"


@pytest.mark.parametrize("limit", range(1, 7))
def test_max_tokens_inside_a_run(limit: int) -> None:
    r = reply(b"a", b"b", max_tokens=limit)
    assert r.remaining == limit
    first = take(r, [1, 2])
    if limit <= 2:
        assert (first.kept, first.reason) == (limit, "length")
        assert r.remaining == 0
        return
    second = take(r, [1, 2, 1, 2, 1])
    assert (second.kept, second.reason) == (limit - 2, "length")
    assert len(r.token_ids) == limit


def test_a_stop_token_at_the_limit_is_a_stop() -> None:
    assert take(reply(b"a", max_tokens=2), [1, 0]).reason == "stop_token"


def test_a_stop_string_over_tokens_and_rounds() -> None:
    r = reply(b"hel", b"lo w", b"orld", stop=("lo world",))
    first = take(r, [1, 2])
    assert (first.kept, first.text, first.reason) == (2, "hel", None)
    second = take(r, [3, 1])
    assert (second.kept, second.text, second.reason) == (1, "", "stop_string")
    assert (r.text, r.finish("stop_string"), r.token_ids) == ("hel", ("", ""), [1, 2, 3])


def test_a_false_start_is_shown_later() -> None:
    r = reply(b"hel", b"lo", b"!", stop=("lox",))
    assert take(r, [1, 2]).text == "hel"
    assert take(r, [3]).text == "lo!"
    r = reply(b"lo", stop=("lox",))
    assert take(r, [1]).text == ""
    assert r.finish("length") == ("", "lo")
    assert r.text == "lo"


def test_a_stop_string_at_the_limit_is_a_stop_string() -> None:
    assert take(reply(b"a", b"b", stop=("ab",), max_tokens=2), [1, 2]).reason == "stop_string"


def test_characters_split_over_tokens() -> None:
    snowman = "☃".encode()
    r = reply(snowman[:1], snowman[1:2], snowman[2:], b"x")
    assert [take(r, [t]).text for t in (1, 2, 3, 4)] == ["", "", "☃", "x"]
    r = reply(snowman[:2], b"x")
    assert take(r, [1]).text == ""
    assert r.finish("length") == ("", ""), "an unfinished character is left out at the end"
    r = reply(snowman[:2], b"x")
    assert take(r, [1, 2]).text == "�x"


@given(
    tokens=st.lists(st.integers(1, 20), max_size=40),
    cuts=st.lists(st.integers(1, 5), min_size=1, max_size=40),
    stop=st.lists(st.text("etaoin", min_size=1, max_size=3), max_size=2),
    limit=st.none() | st.integers(1, 30),
)
def test_how_rounds_cut_the_tokens_does_not_matter(
    tokens: list[int], cuts: list[int], stop: list[str], limit: int | None
) -> None:
    params = GenerateParams(stop=tuple(dict.fromkeys(stop)), max_tokens=limit)
    whole, parts = ReplyBuilder(params, FakeVocab(24)), ReplyBuilder(params, FakeVocab(24))
    one = take(whole, tokens)
    rest, reason, shown, i = list(tokens), None, "", 0
    while rest and reason is None:
        n = cuts[i % len(cuts)]
        taken = take(parts, rest[:n])
        shown += taken.text
        reason = taken.reason
        rest, i = rest[n:], i + 1
    assert reason == one.reason
    assert parts.token_ids == whole.token_ids
    assert len(whole.token_ids) == one.kept
    assert shown == one.text
    assert shown + parts.finish(reason)[1] == one.text + whole.finish(reason)[1] == whole.text
    assert parts.text == whole.text
    for s in params.stop:
        assert s not in whole.text


CODE = b"x)\n    a = 1\n\n    return total\n"


@pytest.mark.parametrize("size", [1, 2, 3, 50])
@pytest.mark.parametrize(
    ("fields", "text", "reason"),
    [
        ({"indent": 4}, "x)\n    a = 1\n", "length"),
        ({"indent": 5}, "x)\n    ", "length"),
        ({"indent": 0}, CODE.decode(), "stop_token"),
        ({"repeats": ("\n    return total\n",)}, "x)\n    a = 1\n", "stop_string"),
        ({"repeats": ("\n\n    return total\n", "\n    return total\n")}, "x)\n    a = 1",
         "stop_string"),
        ({"repeats": (")\n    a = 1\n",), "indent": 4}, "x", "stop_string"),
        ({"repeats": ("\n    return tot\n",)}, CODE.decode(), "stop_token"),
        ({"stop": (" = ",), "indent": 5}, "x)\n    ", "length"),
    ],
)  # fmt: skip
def test_what_fills_a_gap_ends_by_itself(
    size: int, fields: dict[str, Any], text: str, reason: str
) -> None:
    pieces = [CODE[i : i + size] for i in range(0, len(CODE), size)]
    r = reply(*pieces, **fields)
    taken = take(r, [*range(1, len(pieces) + 1), 0])
    assert (taken.text + r.finish(taken.reason)[1], taken.reason) == (text, reason)


def test_a_repeated_line_without_its_break_is_left_out_at_the_end() -> None:
    r = reply(b"x", b"\n    return total", repeats=("\n    return total\n",))
    taken = take(r, [1, 2, 0])
    assert (taken.text, r.finish(taken.reason)[1]) == ("x", "")


def test_when_time_is_up_the_reply_ends_with_its_line() -> None:
    r = reply(b"a", b":\n  ")
    assert take(r, [1, 2, 1], late=False).kept == 3
    taken = take(r, [1, 2, 1], late=True)
    assert (taken.kept, taken.reason, r.text) == (2, "length", "a:\n  aa:\n  ")


# -- a reply that ends inside a character --


V = 48
LLAMA = "🦙".encode()


class Halves(FakeVocab):
    """Every token ends one llama and begins the next, so that every reply ends inside one."""

    def piece(self, token: int, *, special: bool = False) -> bytes:
        return LLAMA[2:] + LLAMA[:2] if token else super().piece(token, special=special)


def engine(n_ctx: int = 256) -> Engine:
    target = FakeContext(FakeTable(V, seed=1, eog_bias=-40.0), n_ctx=n_ctx)
    return engine_over(target, vocab=Halves(V))


def halved(at: Engine, cancel_after: int = 0, **changes: object) -> list[Event]:
    cancel, events, seen = Cancel(), [], 0
    asked = params(proposer="none", sampling=FREE, **changes)
    for event in at.generate("the", asked, cancel=cancel):
        events.append(event)
        seen += isinstance(event, RoundDone)
        if cancel_after and seen == cancel_after:
            cancel.set()
    return events


@pytest.mark.parametrize(
    ("reason", "tokens", "changes"),
    [
        ("length", 1, {"max_tokens": 1}),
        ("length", 5, {"max_tokens": 5}),
        ("cancelled", 4, {"cancel_after": 4}),
        ("stop_string", 3, {"stop": ("🦙🦙",)}),
        ("context", 14, {"max_tokens": None}),
    ],
)
def test_no_ending_leaves_a_part_of_a_character(
    reason: str, tokens: int, changes: dict[str, object]
) -> None:
    end = check_laws(halved(engine(16), **changes))  # the deltas are the text, among others
    assert end.reason == reason
    if reason != "context":
        assert len(end.token_ids) == tokens
    whole = 0 if reason == "stop_string" else len(end.token_ids) - 1
    # the first token begins with an end of a character: a fault of the model, not of the cut
    assert end.text.lstrip("\ufffd") == "🦙" * whole
    assert not end.text.endswith("\ufffd") or not whole


def test_the_rounds_show_the_bytes() -> None:
    rounds = [one for one in halved(engine(), max_tokens=3) if isinstance(one, RoundDone)]
    assert [text for one in rounds for text in one.emitted_text] == ["<A6 99><F0 9F>"] * 3


@pytest.mark.parametrize("has_draft", [True, False])
def test_that_a_short_reply_is_not_drafted_is_told_where_it_could_be(has_draft: bool) -> None:
    info = fake_info(256, V)
    if not has_draft:
        info = replace(info, draft=None)
    target = FakeContext(FakeTable(V, seed=1), n_ctx=256)
    one = engine_over(target, info=info)
    events = one.generate("the", params(max_tokens=2, proposer="auto", min_speculative_tokens=8))
    told = [event.message for event in events if isinstance(event, Notice)]
    assert told == (["no drafting for 2 tokens: it starts to pay at 8"] if has_draft else [])


# -- the chance of each token --


PROMPT = "the rain in spain, the rain in "


def rounds(**changes: Any) -> list[RoundDone]:
    table = FakeTable(V, seed=1, sharpness=2.0, eog_bias=-9.0)
    other = FakeTable(V, seed=99, sharpness=2.0, of=table, agreement=0.7)
    engine = engine_over(
        FakeContext(table, n_ctx=256),
        info=fake_info(256, V, exact_rows=65),
        drafters={"draft": ChainDrafter(FakeContext(other, n_ctx=256), n_vocab=V, batch=64)},
    )
    params = GenerateParams(sampling=FREE, seed=3, max_tokens=40, proposer="draft")
    return [
        event
        for event in engine.generate(PROMPT, params.replace(**changes))
        if isinstance(event, RoundDone)
    ]


def told(found: list[RoundDone]) -> list[Chances]:
    return [chances for done in found for chances in done.chances]


@pytest.mark.parametrize("n_vocab", [3, 64, 5000, 100_000])
def test_the_likeliest_are_those_of_the_softmax(n_vocab: int) -> None:
    row = (np.random.default_rng(n_vocab).normal(size=n_vocab) * 3).astype(np.float32)
    row[n_vocab // 2 + 1] = -np.inf
    wide = row.astype(np.float64)
    logs = wide - wide.max() - np.log(np.exp(wide - wide.max()).sum())
    best = np.argsort(-wide, kind="stable")
    for n in (0, 1, 3, 128):
        (token, logprob), *top = likeliest(row, 1, n)
        assert (token, logprob) == (1, pytest.approx(logs[1], abs=1e-5))
        assert [t for t, _ in top] == [int(t) for t in best[:n]]
        assert [p for _, p in top] == pytest.approx([logs[t] for t in best[:n]], abs=1e-5)


def test_nothing_is_told_unless_it_is_asked_for() -> None:
    assert told(rounds()) == []
    with pytest.raises(UsageError, match="chances"):
        GenerateParams(chances=129)


@pytest.mark.parametrize("n", [0, 3])
def test_accepted_drafts_have_the_chances_of_plain_decoding(n: int) -> None:
    drafted, plain = rounds(chances=n), rounds(chances=n, speculate=False)
    assert any(done.accepted for done in drafted)
    for done in drafted:
        assert [c.token for c in done.chances] == list(done.emitted)
        assert all(len(c.top) == n for c in done.chances)
    assert told(drafted) == told(plain)


def test_they_survive_json() -> None:
    done = rounds(chances=3)[1]
    assert event_from_dict(done.to_dict()) == done


def test_a_round_log_keeps_them_and_older_logs_are_read() -> None:
    found = rounds(chances=3)
    params = GenerateParams(seed=3, chances=3)
    log = RoundLog(fake_info(256, V), params)
    for done in found:
        assert log.write(done) is None
    log.close()
    (path,) = list_runs()
    assert read_run(path).rounds == found
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    for line in lines:
        for name in ("chances", "balance"):
            line.pop(name, None)
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    older = [replace(done, chances=(), balance=None) for done in found]
    assert read_run(path).rounds == older


# -- a drawn seed survives every JSON reader --


def test_drawn_seeds_are_exact_in_a_double() -> None:
    engine = engine_over(FakeContext(FakeTable()))
    seeds = []
    for _ in range(60):
        *_, last = engine.generate("the rain", GenerateParams(max_tokens=1))
        seeds.append(last.seed)
    assert max(seeds) < 2**53
    assert max(seeds) > 2**48
    assert len(set(seeds)) == len(seeds)


# -- texts that a user names, in the target's tokens --


def test_they_are_read_up_to_the_bound_and_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    vocab, ids = FakeVocab(), {}
    for name in ("one", "two"):
        text = f"the rain of {name}"
        (tmp_path / name).write_text(text, "utf-8")
        ids[name] = vocab.tokenize(text, add_special=False, parse_special=False)
    (tmp_path / "image").write_bytes(b"\0")
    found, said = pair_loading._given([str(tmp_path)], vocab)
    assert sorted(found) == sorted(ids.values())
    assert said.startswith("drafting from 2 of 2 texts")
    assert said.endswith("left out: 1 no text")
    places, length = Library(found).find(ids["one"], 4)
    assert length == len(ids["one"])
    assert len(places) == 1
    monkeypatch.setattr(pair_loading, "GIVEN_TOKENS", len(found[-1]))
    assert pair_loading._given([str(tmp_path)], vocab)[0] == found[-1:]
    assert pair_loading._given([], vocab) == ([], "")
    with pytest.raises(UsageError, match="no such file or folder"):
        pair_loading._given([str(tmp_path / "three")], vocab)


# -- stop strings, over tokens and characters --


def cut(data: bytes, at: list[int]) -> list[bytes]:
    marks = sorted({0, len(data), *(i % (len(data) + 1) for i in at)})
    return [data[a:b] for a, b in itertools.pairwise(marks)]


def first_stop(text: str, stops: list[str]) -> str:
    """The reference: grow the text by one character and stop at the first complete stop string."""
    for n in range(1, len(text) + 1):
        starts = [n - len(s) for s in stops if text[:n].endswith(s)]
        if starts:
            return text[: min(starts)]
    return text


@given(
    text=st.text(alphabet="ab\u00e9\U0001f600", max_size=20),
    stops=st.lists(st.text(alphabet="ab\u00e9\U0001f600", min_size=1, max_size=4), max_size=3),
    at=st.lists(st.integers(0, 80), max_size=8),
)
def test_stops_do_not_depend_on_the_cut(text: str, stops: list[str], at: list[int]) -> None:
    stream = TextStream(stops)
    out = "".join(stream.feed(piece) for piece in cut(text.encode(), at)) + stream.finish()
    assert out == stream.text == first_stop(text, stops)
    assert stream.stopped == any(s in text for s in stops)


@given(data=st.binary(max_size=30), at=st.lists(st.integers(0, 30), max_size=8))
def test_any_bytes_decode_like_the_whole(data: bytes, at: list[int]) -> None:
    stream = TextStream()
    pieces = cut(data, at)
    out = "".join(stream.feed(piece) for piece in pieces) + stream.finish()
    assert out == decoded(data)
    assert out == data.decode("utf-8", "replace") or out + "\ufffd" == data.decode(
        "utf-8", "replace"
    )


def test_nothing_that_may_be_a_stop_is_shown_early() -> None:
    stream = TextStream(["\nUser:"])
    assert stream.feed(b"Yes.\nU") == "Yes."
    assert stream.feed(b"s") == ""
    assert not stream.stopped
    assert stream.feed(b"er: and more") == ""
    assert stream.stopped
    assert stream.stop == "\nUser:"
    assert stream.feed(b"never") == ""
    assert stream.finish() == ""
    assert stream.text == "Yes."


def test_held_text_comes_out_when_the_stop_fails_or_the_text_ends() -> None:
    stream = TextStream(["END"])
    assert stream.feed(b"the E") == "the "
    assert stream.feed(b"NT and EN") == "ENT and "
    assert stream.finish() == "EN"
    assert stream.text == "the ENT and EN"


def test_a_character_over_three_tokens() -> None:
    stream = TextStream()
    assert [stream.feed(bytes([b])) for b in "€".encode()] == ["", "", "€"]
    assert TextStream().feed(b"\xe2\x82") == ""
    stream.feed(b"\xe2\x82")
    assert stream.finish() == ""  # what ends inside a character ends before it
    assert TextStream().feed("\ufffd".encode()) == "\ufffd"  # written as such


def test_an_empty_stop_is_refused() -> None:
    with pytest.raises(ValueError):
        TextStream([""])


@pytest.mark.parametrize("seed", range(40))
def test_stops_are_found_as_by_searching_the_whole_text(seed: int) -> None:
    """However the text is cut, and where beginnings of stop strings overlap."""
    rng = random.Random(seed)
    stops = ["".join(rng.choices("ab", k=rng.randint(1, 6))) for _ in range(rng.randint(1, 4))]
    text = "".join(rng.choices("abc", weights=(5, 5, 1), k=40))
    ends = [(text.find(s) + len(s), text.find(s), s) for s in stops if s in text]
    stream, shown, at = TextStream(stops), "", 0
    while at < len(text) and not stream.stopped:
        n = rng.randint(1, 7)
        shown += stream.feed(text[at : at + n].encode())
        at += n
        assert not any(stop in shown for stop in stops)
    shown += stream.finish()
    if ends:
        _, start, stop = min(ends)
        assert (shown, stream.stop) == (text[:start], stop)
    else:
        assert (shown, stream.stop) == (text, None)


def test_a_long_stop_string_costs_each_character_once() -> None:
    class Counted(str):
        looked = 0

        def __getitem__(self, at: Any) -> str:
            Counted.looked += 1
            return str(self).__getitem__(at)

    stream = TextStream(["a" * 1000 + "b"])
    (stop,) = stream._stops
    stop.text = Counted(stop.text)
    n = 20_000
    for _ in range(n):
        stream.feed(b"a")
    assert Counted.looked <= 6 * n
