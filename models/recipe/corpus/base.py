"""Types and the seeded source of choices that every slice of the corpus draws from.

Two things are held out for evaluation: *values* (a made-up word belongs to the held-out side by a
hash of its spelling) and *templates* (a template that starts with ``~`` is never used for
training). Nothing in the training split contains either. Listed words are shared: most are single
tokens, and a token that never occurs in training cannot be used afterwards.
"""

from __future__ import annotations

import random
import re
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

Split = Literal["train", "heldout"]
Message = dict[str, str]
T = TypeVar("T")

SLICES = ("chat", "code", "rag", "json")


@dataclass(frozen=True)
class Check:
    """A check of an answer: `json` parses, `code` compiles, `span` is contained, `none`."""

    kind: Literal["json", "code", "span", "none"]
    value: Any = None


@dataclass(frozen=True)
class Sample:
    """One conversation; the last message is the reference answer."""

    slice: str
    messages: tuple[Message, ...]
    check: Check = field(default_factory=lambda: Check("none"))

    @property
    def prompt(self) -> list[Message]:
        """The messages up to the reference answer."""
        return [dict(m) for m in self.messages[:-1]]

    @property
    def reference(self) -> str:
        """The reference answer."""
        return self.messages[-1]["content"]


def is_held(value: str) -> bool:
    """True if a made-up word is kept for evaluation only (about one in seven)."""
    return zlib.crc32(value.lower().encode()) % 7 == 0


_CHOICE = re.compile(r"\[([^\[\]]*)\]")
_SLOT = re.compile(r"\{(\w+)\}")


def words(text: str) -> tuple[str, ...]:
    """Return the words of a list written as one string."""
    return tuple(text.split())


_ONSET = words(
    "b br c cl d dr f fl g gr h j k kr l m n p pl pr qu r s sh sk sl st t th tr v w y z vr zh gl"
)
_VOWEL = words("a e i o u a e i o ai ea ou ia oo ae y")
_CODA = ["", "", "", "", "n", "r", "l", "s", "th", "m", "x", "k", "nd", "rn", "st", "sh", "v"]

GIVEN = words(
    "Ada Alba Amir Anna Anton Aria Arlo Astrid Basil Bea Bruno Carla Cleo Clara Dario Dina Edith "
    "Elena Elio Emma Enzo Erik Esme Ezra Fatima Felix Fiona Flora Frida Gideon Greta Hana Hugo "
    "Ida Igor Ines Irene Ivan Iris Jana Jonas Jules Juno Kaya Kira Lars Leila Leo Lena Lina Lola "
    "Lucia Luka Magnus Maia Marco Mara Marta Mateo Mia Milo Mina Nadia Nico Nils Nina Noor Nora "
    "Olga Omar Oscar Otto Paco Paula Petra Pia Quinn Rafael Rhea Rita Rosa Ruben Ruth Sami Sara "
    "Selma Sofia Stella Sven Tara Tariq Tess Theo Tilda Tom Uma Vera Victor Wanda Willa Yara "
    "Yusuf Zoe Zora Ben Sam Max Eva Lily Jack Ella Noah Grace Henry Alice Oliver Ruby"
)

COLOURS = words(
    "red blue green yellow orange purple black white grey brown pink silver golden teal crimson "
    "violet amber ivory scarlet turquoise maroon indigo"
)
ANIMALS = words(
    "cat dog fox owl hare otter badger crow heron goat horse donkey turtle hedgehog mouse sparrow "
    "wolf bear squirrel duck swan frog lizard seal robin beaver"
)
THINGS = words(
    "lamp key kettle map clock boat basket bell violin lantern book coin mirror box letter wheel "
    "umbrella ladder compass blanket drum kite jar brush bicycle hammer ribbon telescope flute "
    "button whistle stone feather candle notebook spoon rope bottle ring scarf"
)
PLACES = words(
    "harbour library market forest garden station bakery bridge valley mill lighthouse museum "
    "school orchard island workshop castle meadow village river tower farm beach theatre hill "
    "kitchen attic cave"
)
FRUIT = words(
    "apples pears plums grapes lemons figs cherries melons peaches dates oranges berries nuts "
    "carrots onions beans potatoes tomatoes peas radishes"
)
JOBS = words(
    "baker carpenter doctor teacher engineer sailor painter farmer librarian nurse pilot miner "
    "gardener tailor cook architect clerk plumber chemist musician driver editor weaver builder"
)
MONTHS = words(
    "January February March April May June July August September October November December"
)
WEEKDAYS = words("Monday Tuesday Wednesday Thursday Friday Saturday Sunday")


class Source:
    """A seeded stream of choices for one split."""

    def __init__(self, seed: int | str, split: Split) -> None:
        self.split: Split = split
        self.held = split == "heldout"
        self.r = random.Random(f"{split}/{seed}")

    def maybe(self, p: float) -> bool:
        """Return True with probability `p`."""
        return self.r.random() < p

    def pick(self, items: Sequence[T]) -> T:
        """Choose one of `items`, the same in both splits."""
        return items[int(self.r.random() * len(items))]

    def few(self, items: Sequence[T], n: int) -> list[T]:
        """Choose `n` distinct items in random order."""
        return self.r.sample(list(items), min(n, len(items)))

    def between(self, low: int, high: int) -> int:
        """Choose an integer in [low, high]."""
        return self.r.randint(low, high)

    def form(self, templates: Sequence[str], **slots: object) -> str:
        """Expand one template; those marked ``~`` are for the held-out split only."""
        return self._expand(templates, 0.35, slots)

    def mostly_seen(self, templates: Sequence[str], **slots: object) -> str:
        """Expand like `form`, with few unseen templates in the held-out split."""
        return self._expand(templates, 0.15, slots)

    def _expand(self, templates: Sequence[str], unseen: float, slots: dict[str, object]) -> str:
        marked = [t for t in templates if t.startswith("~")] if self.held else []
        if marked and self.maybe(unseen):
            chosen = self.pick(marked)[1:]
        else:
            chosen = self.pick(templates)
            while chosen.startswith("~"):
                chosen = self.pick(templates)
        return self.spin(chosen, **slots)

    def spin(self, text: str, **slots: object) -> str:
        """Resolve ``[a|b]`` choices (they nest), then fill ``{slot}`` names."""
        while True:
            text, n = _CHOICE.subn(lambda m: self.pick(m.group(1).split("|")), text)
            if n == 0:
                break
        if slots:
            text = _SLOT.sub(lambda m: str(slots.get(m.group(1), m.group(0))), text)
        return text

    def word(self, low: int = 2, high: int = 3) -> str:
        """Make up a lower-case word of this split, as a rule with `low` syllables."""
        while True:
            n = low if self.maybe(0.8) else self.between(low, high)
            w = "".join(
                self.pick(_ONSET) + self.pick(_VOWEL) + (self.pick(_CODA) if i == n - 1 else "")
                for i in range(n)
            )
            if is_held(w) == self.held:
                return w

    def proper(self) -> str:
        """Make up a proper name."""
        return self.word().capitalize()

    def given(self) -> str:
        """Choose a first name, made up one time in three."""
        return self.proper() if self.maybe(0.33) else self.pick(GIVEN)

    def person(self) -> str:
        """Make a first name and a made-up family name."""
        return f"{self.given()} {self.proper()}"

    def town(self) -> str:
        """Make up a place name."""
        return self.proper() + self.pick(["", "", "", " Bay", " Falls", "ville", "ton", " Hill"])

    def code_id(self) -> str:
        """Make a short identifier such as ``KX-4821``."""
        a = "".join(self.pick("ABCDEFGHJKLMNPRSTUVWXYZ") for _ in range(self.between(1, 3)))
        return f"{a}{self.pick(['-', '', '-'])}{self.number()}"

    def number(self) -> int:
        """Choose a positive integer whose size varies over orders of magnitude."""
        return self.between(1, 10 ** self.between(1, 4))

    def date(self) -> str:
        """Make a date such as ``4 March 1987``."""
        return f"{self.between(1, 28)} {self.pick(MONTHS)} {self.between(1850, 2030)}"


def an(text: str) -> str:
    """Turn ``a`` into ``an`` before a vowel of `text`."""
    return re.sub(r"\b([Aa]) (?=[aeiou])", r"\1n ", text)


def turn(role: str, content: str) -> Message:
    """Make one message."""
    return {"role": role, "content": content}


_SYSTEM = (
    "You are a [helpful|friendly|careful|concise] assistant.",
    "You are a [small|tiny] local model. [Answer|Reply] [briefly|in plain words|with care].",
    "[Be brief.|Be clear and brief.|Answer clearly.|Keep answers short.]",
    "~You are a patient assistant who answers in plain words.",
)


def conversation(
    src: Source, slice_: str, turns: list[Message], check: Check, system: Sequence[str] = ()
) -> Sample:
    """Put an optional system prompt in front of `turns`."""
    head: list[Message] = []
    if src.maybe(0.45):
        forms = system if system and src.maybe(0.7) else _SYSTEM
        head = [turn("system", src.form(forms).strip())]
    return Sample(slice_, tuple(head + turns), check)
