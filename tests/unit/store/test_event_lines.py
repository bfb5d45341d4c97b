"""The quick way to write an event is the slow way's, byte for byte."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest
from fakes import Reply, ScriptedEngine

from specllama.events import Chance, Chances, Event, ReasoningDelta, RoundDone, TextDelta
from specllama.settings.params import GenerateParams
from specllama.store.codec import encode, encode_event

TEXT = 'She said "é\n🦙" to the fox, and the fox \\ said nothing. ' * 3
EVENTS = [
    *ScriptedEngine([Reply(TEXT, tree=True)]).generate("Hello", GenerateParams(seed=3)),
    TextDelta('a "b"\t\x00\x1b'),
    ReasoningDelta("\ud800 alone"),
]
ROUND = next(event for event in EVENTS if isinstance(event, RoundDone) and event.drafted)
ODD = [
    replace(ROUND, balance=math.inf),
    replace(ROUND, plain_ms=math.nan),
    replace(ROUND, q=(math.nan, *ROUND.q[1:])),
    replace(ROUND, p=(0.0, *ROUND.p[1:]), target_text="\ud83e"),
    replace(ROUND, chances=(Chances(1, -math.inf, (97,), (Chance(2, -0.5, (98,)),)),)),
]


@pytest.mark.parametrize("event", [*EVENTS, *ODD], ids=lambda event: event.type)
def test_a_line_is_that_of_the_events_fields(event: Event) -> None:
    assert encode_event(event) == encode(event.to_dict())
    line = encode_event(event, "round", turn=7)
    assert line == encode({**event.to_dict(), "type": "round", "turn": 7})
    assert b"\n" not in line
    assert json.loads(line)["turn"] == 7
