from __future__ import annotations

from dataclasses import fields

from fakes import ScriptedEngine

from specllama.events import Finished
from specllama.params import GenerateParams
from specllama.tui.bridge import Batch


def test_a_batch_with_nothing_but_the_end_is_not_empty() -> None:
    # the drain may fall between the last event and the end of the thread
    events = list(ScriptedEngine(["Hi."]).generate("x", GenerateParams(seed=1)))
    last = events[-1]
    assert isinstance(last, Finished)
    assert not Batch()
    assert Batch(finished=last)


def test_every_field_makes_a_batch_worth_showing_but_the_error() -> None:
    # an error always comes with ``ended``
    for field in fields(Batch):
        if field.name != "error":
            assert Batch(**{field.name: "x"}), field.name  # type: ignore[arg-type]
