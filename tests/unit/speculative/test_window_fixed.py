"""The fixed window: always the same length, within the room that is left."""

import pytest
from fakes import learn

from specllama.speculative.types import Guess, Room
from specllama.speculative.window import Plan, Window


@pytest.mark.parametrize(
    ("draft_max", "room", "plan"),
    [
        (4, 100, Plan(4, "fixed")),
        (4, 4, Plan(4, "fixed")),
        (4, 3, Plan(3, "room")),
        (4, 1, Plan(1, "room")),
        (4, 0, Plan(0, "last token")),
        (4, -3, Plan(0, "last token")),
        (0, 100, Plan(0, "off")),
    ],
)
def test_plans(draft_max: int, room: int, plan: Plan) -> None:
    assert Window(draft_max).plan(room) == plan


def test_it_never_stops_a_draft_and_learns_nothing() -> None:
    window = Window(3)
    learn(window, 3, 0, (1,), 1e9, 2e9)
    assert window.plan(10) == Plan(3, "fixed")


def test_a_room_answers_yes_to_everything_by_default() -> None:
    judge = Room(4).judge
    assert judge.further()
    assert judge.further(0.01, 3)
    assert judge.read("draft", 17) == judge.granted == 17
    assert judge.read("", 40) == 40
    assert judge.granted == 17, "scouts are no tokens of the text"
    assert judge.take(0.1, None, None)
    assert judge.row(0.0)
    assert judge.pick((Guess("suffix", (1, 2, 3), 2), Guess("ngram", (4,), 9))) == (0, 3)
    assert not judge.weighs
    assert Room(4).judge.granted == 0
