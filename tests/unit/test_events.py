"""Events survive the trip through JSON, also from newer and older writers."""

import dataclasses
import json
import pickle
from typing import Any, get_args, get_type_hints

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specllama.events import (
    EVENT_TYPES,
    Chance,
    Chances,
    Event,
    Finished,
    Notice,
    RoundDone,
    Started,
    TextDelta,
    Timings,
    event_from_dict,
)
from specllama.rates import Payoff, Remedy

number = st.floats(allow_nan=False, allow_infinity=False)


def strategy_for(hint: Any) -> st.SearchStrategy[Any]:
    """A strategy for every annotation that events use; a new kind of field fails here."""
    args = get_args(hint)
    if hint is int:
        return st.integers(-(2**63), 2**64 - 1)
    if hint is float:
        return number
    if hint is str:
        return st.text()
    if hint is bool:
        return st.booleans()
    if hint in (Timings, Payoff, Remedy, Chance, Chances):
        names = get_type_hints(hint)
        names.pop("type", None)
        return st.builds(hint, **{n: strategy_for(h) for n, h in names.items()})
    if hint == frozenset[str]:  # names of fields, see below
        return st.just(frozenset())
    if getattr(hint, "__origin__", None) is tuple:
        if ... not in args:
            return st.tuples(*map(strategy_for, args))
        return st.lists(strategy_for(args[0]), max_size=4).map(tuple)
    if type(None) in args:
        (inner,) = (a for a in args if a is not type(None))
        return st.none() | strategy_for(inner)
    if args and all(isinstance(a, str) for a in args):
        return st.sampled_from(args)
    raise AssertionError(f"no strategy for {hint}")


def built(cls: type[Event]) -> st.SearchStrategy[Event]:
    hints = get_type_hints(cls)
    parts = {f.name: strategy_for(hints[f.name]) for f in dataclasses.fields(cls)}
    if "unknown" not in parts:
        return st.builds(cls, **parts)
    counts = [name for name, hint in hints.items() if hint is int]
    parts["unknown"] = st.frozensets(st.sampled_from(counts), max_size=3)
    return st.builds(cls, **parts).map(untold)


def untold(event: Any) -> Event:
    """Counts that are not told are 0 beside their names."""
    found: Event = dataclasses.replace(event, **dict.fromkeys(event.unknown, 0))
    return found


any_event = st.one_of([built(cls) for cls in EVENT_TYPES.values()])


@given(any_event)
def test_round_trip_through_json(event: Event) -> None:
    data = event.to_dict()
    assert data["type"] == event.type
    assert event_from_dict(json.loads(json.dumps(data))) == event


def test_what_another_engine_does_not_tell_is_null_in_json() -> None:
    told = Started(3, 0, 0, 7, "vllm", "", 0, "", unknown=frozenset({"cached_n", "n_ctx"}))
    data = told.to_dict()
    assert (data["prompt_n"], data["cached_n"], data["n_ctx"]) == (3, None, None)
    assert "unknown" not in data
    assert event_from_dict(data) == told


@given(any_event)
def test_round_trip_through_pickle(event: Event) -> None:
    """Events cross the pipe of the engine process."""
    assert pickle.loads(pickle.dumps(event)) == event


@given(any_event)
def test_unknown_keys_of_a_newer_writer_are_ignored(event: Event) -> None:
    data = {**event.to_dict(), "colour": "blue"}
    if "timings" in data:
        data["timings"] = {**data["timings"], "moon_ms": 1.0}
    assert event_from_dict(data) == event


def test_fields_with_defaults_may_be_missing() -> None:
    data = Notice("hello").to_dict()
    del data["level"], data["topic"]
    assert event_from_dict(data) == Notice("hello")


@pytest.mark.parametrize(
    "data", [{"type": "no_such_event"}, {}, {"type": "text_delta"}, {"type": "finish", "text": ""}]
)
def test_what_is_not_an_event_is_a_key_error(data: dict[str, Any]) -> None:
    with pytest.raises(KeyError):
        event_from_dict(data)


def test_names_are_unique_and_stable() -> None:
    assert set(EVENT_TYPES) == {
        "load_progress",
        "measuring",
        "notice",
        "started",
        "prefill_progress",
        "text_delta",
        "reasoning_delta",
        "round_done",
        "finish",
    }


def test_events_cannot_be_changed() -> None:
    event = TextDelta("a")
    with pytest.raises(dataclasses.FrozenInstanceError):
        event.text = "b"  # type: ignore[misc]


def test_finish_has_the_documented_keys() -> None:
    names = {f.name for f in dataclasses.fields(Finished)} | {"type"}
    assert names >= {
        "type", "reason", "text", "token_ids", "seed", "rounds", "draft_n", "draft_n_accepted",
        "cut", "proposer", "verify", "timings",
    }  # fmt: skip
    assert {f.name for f in dataclasses.fields(Timings)} >= {
        "load_ms", "tokenize_ms", "prefill_ms", "first_decode_ms", "ttft_ms", "decode_ms",
        "draft_ms", "verify_ms", "other_ms", "tok_per_s",
    }  # fmt: skip


def test_is_chain() -> None:
    base = {f.name: 0 for f in dataclasses.fields(RoundDone)}
    for parents, expected in (
        ((), True),
        ((-1, 0, 1), True),
        ((-1, -1), False),
        ((-1, 0, 0), False),
    ):
        done = RoundDone(**{**base, "parents": parents})  # type: ignore[arg-type]
        assert done.is_chain == expected


def test_a_started_event_is_plain_data() -> None:
    assert Started(3, 1, 512, 2**64 - 1, "draft", "match", 4, "bitwise up to 7 rows").to_dict() == {
        "type": "started", "prompt_n": 3, "cached_n": 1, "n_ctx": 512, "seed": 2**64 - 1,
        "proposer": "draft", "verify": "match", "draft_max": 4,
        "exactness": "bitwise up to 7 rows", "tokenize_ms": 0.0,
        "queue_ms": 0.0, "position": 0, "slot": -1,
    }  # fmt: skip
