"""Made-up names and values that the facts of the passage slice are about."""

from __future__ import annotations

from specllama.models.recipe.corpus.attributes import Value
from specllama.models.recipe.corpus.base import ANIMALS, COLOURS, FRUIT, PLACES, THINGS, Source, an


def count(src: Source) -> str:
    """Make a number of one to four digits, rarely five."""
    return str(src.between(2, 10 ** src.between(1, 4)))


def year(src: Source) -> str:
    """Choose a year."""
    return str(src.between(1720, 2031))


def material(src: Source) -> str:
    """Choose a material."""
    return src.pick(
        ["oak", "brass", "steel", "glass", "clay", "copper", "bamboo", "granite", "wool", "tin"]
    )


def clock(src: Source) -> str:
    """Choose a time of day."""
    return f"{src.between(0, 23):02d}:{src.pick(['00', '15', '30', '45', '10', '20', '40', '50'])}"


def colour(src: Source) -> str:
    """Choose a color."""
    return src.pick(COLOURS)


def thing(src: Source) -> str:
    """Make a thing with its color."""
    return f"{src.pick(COLOURS)} {src.pick(THINGS)}"


def fruit(src: Source) -> str:
    """Choose a fruit or vegetable."""
    return src.pick(FRUIT)


def place(src: Source) -> str:
    """Choose a place or a town."""
    return f"the {src.pick(PLACES)}" if src.maybe(0.5) else src.town()


def animal(src: Source) -> str:
    """Make an animal with its color."""
    return an(f"{src.pick(['a', 'one', 'the'])} {src.pick(COLOURS)} {src.pick(ANIMALS)}")


def ship(src: Source) -> str:
    """Make a ship's name."""
    return src.spin("[the|the ship|the ferry|the boat] ") + src.proper()


def machine(src: Source) -> str:
    """Make a machine's code."""
    return src.spin("[the|the model|the machine|the pump|the engine] ") + src.code_id()


def company(src: Source) -> str:
    """Make the name of a company."""
    return src.proper() + src.pick([" Works", " & Sons", " Labs", " Mills", " Tools", ""])


def book(src: Source) -> str:
    """Make the title of a book."""
    return src.pick(
        [
            f"The {src.pick(COLOURS).capitalize()} {src.pick(THINGS).capitalize()}",
            f"The {src.pick(THINGS).capitalize()} of {src.town()}",
            f"A {src.pick(ANIMALS).capitalize()} in {src.town()}",
        ]
    )


def project(src: Source) -> str:
    """Make the name of a piece of software."""
    return src.spin("[the project|the library|the tool|the program] ") + src.word()


def person(src: Source) -> str:
    """Make a full name."""
    return src.person()


def town(src: Source) -> str:
    """Make the name of a town."""
    return src.town()


def money(src: Source) -> str:
    """Make a sum of money."""
    return f"{src.number()} {src.pick(['crowns', 'coins', 'marks', 'pounds', 'euros', 'credits'])}"


def unit(*units: str) -> Value:
    """Return a maker of numbers with one of `units`."""

    def value(src: Source) -> str:
        return f"{src.number()} {src.pick(units)}"

    return value
