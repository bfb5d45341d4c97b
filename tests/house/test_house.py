"""The house stays small: bounds of what is counted, and that the counting counts right."""

from collections import Counter

import house_table
import pytest
from house_table import House, Module

# what tests import from, by a path or by another one put before it
SEARCHED = ("support", "tools", "lab", "new_backend", "new_head", "new_method")

SOURCE = '''"""First line.

Second.
"""

from specllama import events  # a comment

# a comment alone


class One:
    """What it is."""

    text = """two
    lines"""


def fold(event):
    """What it does."""
    if isinstance(event, (events.Finished, int)):
        return (
            1
        )
'''


@pytest.fixture(scope="module")
def house() -> House:
    return House()


def test_code_lines_are_those_with_code_on_them() -> None:
    assert Module("m", "m.py", SOURCE).code_lines == 1 + 3 + 5


def test_a_long_function_is_seen_and_a_short_one_is_not() -> None:
    def source(lines: int) -> str:
        return "def f():\n" + "    x = 1\n" * (lines - 1)

    most = house_table.LONG_FUNCTION
    assert list(Module("m", "m.py", source(most)).long_parts()) == []
    assert list(Module("m", "m.py", source(most + 1)).long_parts()) == [("m.f", most + 1)]


def test_the_counting_sees_what_ships(house: House) -> None:
    names = {module.name for module in house.shipped}
    assert {"specllama.engine.engine", "specllama.tui.app", "specllama.models.gguf"} <= names
    assert not any("recipe" in name for name in names)
    assert house.code_by_package["specllama.engine"] > 1000
    assert house.folds
    assert house.constants["named"]


def test_the_root_has_at_most_sixteen_modules(house: House) -> None:
    assert len(house.root_modules) <= 16, house.root_modules


def test_events_are_folded_in_one_place(house: House) -> None:
    assert set(house.folds) >= {"specllama.told"}
    assert sum(house.folds.values()) <= 12, house.folds
    assert len(house.folds) <= 3, house.folds


def test_a_module_of_the_tests_is_found_under_one_name() -> None:
    rooms = [house_table.ROOT / "tests" / room for room in SEARCHED]
    names = Counter(path.stem for room in rooms for path in room.glob("*.py"))
    assert [name for name, times in names.items() if times > 1 and name != "conftest"] == []


# Upper bounds of what the design wants smaller: they go down with the figures, never up.
BOUNDS = {
    "code that ships": 50_757,
    "class names defined twice": 0,
    "functions over 80 lines": 0,
    "classes over 400 lines": 0,
    "numbers of the policy": 20,
    "modules that derive rates of replies": 1,
}


@pytest.mark.parametrize("row", BOUNDS)
def test_what_should_be_smaller_does_not_grow(house: House, row: str) -> None:
    counted = {
        "code that ships": house.code,
        "class names defined twice": len(house.doubles),
        "functions over 80 lines": len(house.long_functions),
        "classes over 400 lines": len(house.long_classes),
        "numbers of the policy": sum(map(len, house.constants.values())),
        "modules that derive rates of replies": len(house.rates),
    }
    assert counted[row] <= BOUNDS[row], dict(house.names())
