"""What was told of a request: whatever the events, nothing is lost and nothing is told twice."""

from __future__ import annotations

import dataclasses

import pytest
from fakes import Reply, ScriptedEngine

from specllama.errors import EngineError
from specllama.events import (
    EVENT_TYPES,
    Event,
    Finished,
    LoadProgress,
    Measuring,
    Notice,
    ReasoningDelta,
    TextDelta,
)
from specllama.settings.params import GenerateParams
from specllama.told import News, Told, news

NOTICE = Notice("the draft model was refused", "warning")
LOADING = LoadProgress("target", "a.gguf", 0.5)


def events() -> list[Event]:
    text = "<think>Hm, let me see.</think>One two three four."
    engine = ScriptedEngine([Reply(text, accept=(2, 0), notices=(NOTICE,))])
    return [
        LOADING,
        Measuring("exactness"),
        *engine.generate("x", GenerateParams(seed=1, draft_max=4)),
    ]


EVENTS = tuple(events())


def test_every_kind_of_event_is_news() -> None:
    assert {event.type for event in EVENTS} == set(EVENT_TYPES)
    for event in EVENTS:
        assert news(event) != News(), event.type
    assert news(Event()) == News(), "of an event that only a newer engine knows nothing is told"


def test_what_is_new_adds_up_to_what_was_told() -> None:
    told, again = Told(), Told()
    parts = [told.take(event) for event in EVENTS]
    for part in parts:
        again.add(part)
    assert told == again == Told.of(EVENTS)
    assert told.text == "".join(part.text for part in parts)
    assert told.rounds == [done for part in parts for done in part.rounds]


def test_a_reply_is_told_as_its_last_word_has_it() -> None:
    told = Told.of(EVENTS)
    assert (told.text, told.reasoning) == (told.end.text, told.end.reasoning)
    assert told.reasoning
    assert told.figures is not None
    assert told.figures.tokens == len(told.end.token_ids)
    assert len(told.rounds) == told.end.rounds
    assert told.notices == [NOTICE]
    assert told.load == LOADING
    assert told.prefill is not None
    assert told.started is not None
    assert told.started.seed == told.end.seed


def test_two_requests_do_not_share_what_they_are_told() -> None:
    one, other = Told.of(EVENTS), Told()
    assert other == Told()
    other.take(TextDelta("a"))
    other.take(ReasoningDelta("b"))
    assert (other.text, other.reasoning) == ("a", "b")
    assert one == Told.of(EVENTS)


@pytest.mark.parametrize(
    ("reason", "whole"),
    [("stop_token", True), ("length", True), ("cancelled", False), ("error", False)],
)
def test_a_reply_that_was_cut_short_is_not_whole(reason: str, whole: bool) -> None:
    *said, last = EVENTS
    told = Told.of(said)
    assert not told.whole
    with pytest.raises(EngineError, match="without a result"):
        _ = told.end
    assert isinstance(last, Finished)
    told.take(dataclasses.replace(last, reason=reason))  # type: ignore[arg-type]
    assert told.whole == whole
