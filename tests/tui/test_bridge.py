from __future__ import annotations

from dataclasses import fields

from fakes import ScriptedEngine

from specllama.events import Finished
from specllama.settings.params import GenerateParams
from specllama.tui.bridge import Drained, FlushPace, Rest


def test_a_batch_with_nothing_but_the_end_is_not_empty() -> None:
    # the drain may fall between the last event and the end of the thread
    events = list(ScriptedEngine(["Hi."]).generate("x", GenerateParams(seed=1)))
    last = events[-1]
    assert isinstance(last, Finished)
    assert not Drained()
    assert Drained(finished=last)


def test_every_field_makes_a_batch_worth_showing_but_the_error() -> None:
    # an error always comes with ``ended``
    for field in fields(Drained):
        if field.name != "error":
            assert Drained(**{field.name: "x"}), field.name  # type: ignore[arg-type]


def test_flushes_keep_to_their_share_of_a_core() -> None:
    pace = FlushPace(0.2, longest_s=0.8, share=0.1)
    for _ in range(40):
        period = pace.observe(0.05)
    assert abs(0.05 / period - 0.1) < 0.001
    for _ in range(40):
        period = pace.observe(0.001)
    assert period == 0.2
    for _ in range(40):
        period = pace.observe(1.0)
    assert period == 0.8


def test_one_slow_flush_hardly_slows_the_next() -> None:
    pace = FlushPace(0.2, share=0.1)
    for _ in range(10):
        pace.observe(0.01)
    assert pace.observe(0.05) < 0.3
    for _ in range(5):
        period = pace.observe(0.01)
    assert period == 0.2


def test_figures_rest_but_the_last_ones_are_drawn() -> None:
    now = 0.0
    rest = Rest(1.0, clock=lambda: now)
    assert rest.over(True)
    now = 0.4
    assert not rest.over(True)
    now = 1.0
    assert rest.over(False)
    now = 9.0
    assert not rest.over(False)
