"""A reply that ends inside a character ends before it, however it ends; its tokens stay."""

from __future__ import annotations

from dataclasses import replace

import pytest
from engines import FakeContext, fake_info, loaded
from requests_made import FREE, check_laws, params
from table_model import FakeTable, FakeVocab

from specllama.cancel import Cancel
from specllama.engine.engine import Engine
from specllama.events import Event, Notice, RoundDone

V = 48
LLAMA = "🦙".encode()


class Halves(FakeVocab):
    """Every token ends one llama and begins the next, so that every reply ends inside one."""

    def piece(self, token: int, *, special: bool = False) -> bytes:
        return LLAMA[2:] + LLAMA[:2] if token else super().piece(token, special=special)


def engine(n_ctx: int = 256) -> Engine:
    table = FakeTable(V, seed=1, eog_bias=-40.0)
    target = FakeContext(table, n_ctx=n_ctx)
    return Engine(loaded(target=target, vocab=Halves(V), info=fake_info(n_ctx, V)))


def reply(at: Engine, cancel_after: int = 0, **changes: object) -> list[Event]:
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
    end = check_laws(reply(engine(16), **changes))  # the deltas are the text, among others
    assert end.reason == reason
    if reason != "context":
        assert len(end.token_ids) == tokens
    whole = 0 if reason == "stop_string" else len(end.token_ids) - 1
    # the first token begins with an end of a character: a fault of the model, not of the cut
    assert end.text.lstrip("\ufffd") == "🦙" * whole
    assert not end.text.endswith("\ufffd") or not whole


def test_the_rounds_show_the_bytes() -> None:
    rounds = [one for one in reply(engine(), max_tokens=3) if isinstance(one, RoundDone)]
    assert [text for one in rounds for text in one.emitted_text] == ["<A6 99><F0 9F>"] * 3


@pytest.mark.parametrize("has_draft", [True, False])
def test_that_a_short_reply_is_not_drafted_is_told_where_it_could_be(has_draft: bool) -> None:
    info = fake_info(256, V)
    if not has_draft:
        info = replace(info, draft=None)
    target = FakeContext(FakeTable(V, seed=1), n_ctx=256)
    one = Engine(loaded(target=target, vocab=FakeVocab(V), info=info))
    events = one.generate("the", params(max_tokens=2, proposer="auto", min_speculative_tokens=8))
    told = [event.message for event in events if isinstance(event, Notice)]
    assert told == (["no drafting for 2 tokens: it starts to pay at 8"] if has_draft else [])
