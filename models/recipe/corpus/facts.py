"""Facts for the passage slice: kinds of things, what can be said of them, asked and answered."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from specllama.models.recipe.corpus.base import (
    ANIMALS,
    COLOURS,
    FRUIT,
    JOBS,
    PLACES,
    THINGS,
    WEEKDAYS,
    Source,
    an,
)

Value = Callable[[Source], str]


@dataclass(frozen=True)
class Attribute:
    """One thing that can be said of an entity: `{e}` is the entity, `{v}` the value.

    Unseen templates (``~``) put words that occur elsewhere in a new order. A word that training
    never shows would only test guessing.
    """

    label: str
    value: Value
    says: tuple[str, ...]
    asks: tuple[str, ...]
    answers: tuple[str, ...]


@dataclass(frozen=True)
class Kind:
    """A kind of entity, how it is named, and its attributes."""

    label: str
    name: Value
    intros: tuple[str, ...]
    attributes: tuple[Attribute, ...]


def _count(src: Source) -> str:
    return str(src.between(2, 10 ** src.between(1, 4)))


def _year(src: Source) -> str:
    return str(src.between(1720, 2031))


def _material(src: Source) -> str:
    return src.pick(
        ["oak", "brass", "steel", "glass", "clay", "copper", "bamboo", "granite", "wool", "tin"]
    )


def _clock(src: Source) -> str:
    return f"{src.between(0, 23):02d}:{src.pick(['00', '15', '30', '45', '10', '20', '40', '50'])}"


def _colour(src: Source) -> str:
    return src.pick(COLOURS)


def _thing(src: Source) -> str:
    return f"{src.pick(COLOURS)} {src.pick(THINGS)}"


def _fruit(src: Source) -> str:
    return src.pick(FRUIT)


def _place(src: Source) -> str:
    return f"the {src.pick(PLACES)}" if src.maybe(0.5) else src.town()


def _animal(src: Source) -> str:
    return an(f"{src.pick(['a', 'one', 'the'])} {src.pick(COLOURS)} {src.pick(ANIMALS)}")


def _ship(src: Source) -> str:
    return src.spin("[the|the ship|the ferry|the boat] ") + src.proper()


def _machine(src: Source) -> str:
    return src.spin("[the|the model|the machine|the pump|the engine] ") + src.code_id()


def _company(src: Source) -> str:
    return src.proper() + src.pick([" Works", " & Sons", " Labs", " Mills", " Tools", ""])


def _book(src: Source) -> str:
    return src.pick(
        [
            f"The {src.pick(COLOURS).capitalize()} {src.pick(THINGS).capitalize()}",
            f"The {src.pick(THINGS).capitalize()} of {src.town()}",
            f"A {src.pick(ANIMALS).capitalize()} in {src.town()}",
        ]
    )


def _project(src: Source) -> str:
    return src.spin("[the project|the library|the tool|the program] ") + src.word()


def _person(src: Source) -> str:
    return src.person()


def _town(src: Source) -> str:
    return src.town()


def _money(src: Source) -> str:
    return f"{src.number()} {src.pick(['crowns', 'coins', 'marks', 'pounds', 'euros', 'credits'])}"


def _unit(*units: str) -> Value:
    def value(src: Source) -> str:
        return f"{src.number()} {src.pick(units)}"

    return value


A = Attribute
_JOB = A(
    "job",
    lambda s: s.pick(JOBS),
    (
        "{e} works as a {v}.",
        "{e} is a {v} by trade.",
        "By trade, {e} is a {v}.",
        "~The job of {e} is that of a {v}.",
    ),
    (
        "What does {e} do for a living?",
        "What is the job of {e}?",
        "What work does {e} do?",
        "~What does {e} work as?",
    ),
    ("{e} is a {v}.", "{e} works as a {v}."),
)
_BORN = A(
    "birthplace",
    _town,
    (
        "{e} was born in {v}.",
        "{e} comes from {v}.",
        "{e} grew up in {v}.",
        "~{e} was born and grew up in {v}.",
    ),
    (
        "Where was {e} born?",
        "Where does {e} come from?",
        "Where did {e} grow up?",
        "~In which town was {e} born?",
    ),
    ("{e} comes from {v}.", "{v}.", "{e} was born in {v}."),
)
_PET = A(
    "pet",
    _animal,
    ("{e} keeps {v} as a pet.", "{e} lives with {v}.", "~The pet of {e} is {v}."),
    ("Which pet does {e} keep?", "Which animal lives with {e}?", "~What pet does {e} have?"),
    ("{e} keeps {v}.", "{e} lives with {v}."),
)
_LOST = A(
    "object",
    lambda s: an(f"a {_thing(s)}"),
    (
        "{e} lost {v} on {d}.",
        "{e} bought {v}.",
        "{e} found {v} near the {p}.",
        "~{e} lost and found {v}.",
    ),
    (
        "What is the thing of {e} in the text?",
        "Which object is tied to {e}?",
        "What object does the text give {e}?",
        "~Which object does the text link to {e}?",
    ),
    ("It is {v}.", "{v}."),
)
_PHONE = A(
    "desk number",
    lambda s: str(s.between(100, 9999)),
    (
        "The desk number of {e} is {v}.",
        "You can reach {e} at desk {v}.",
        "{e} sits at desk {v}.",
        "~Desk {v} belongs to {e}.",
    ),
    (
        "What is the desk number of {e}?",
        "At which desk can I find {e}?",
        "~Which desk belongs to {e}?",
    ),
    ("The desk number of {e} is {v}.", "{e} sits at desk {v}."),
)
_LIKES = A(
    "favourite food",
    _fruit,
    (
        "{e} likes {v} more than any other food.",
        "{e} eats {v} every day.",
        "~The food that {e} likes is {v}.",
    ),
    (
        "What does {e} like to eat?",
        "Which food does {e} like most?",
        "~What is the favourite food of {e}?",
    ),
    ("{e} likes {v}.", "{e} likes {v} most."),
)
_SHIFT = A(
    "day off",
    lambda s: s.pick(WEEKDAYS),
    ("{e} is away on {v}.", "The day off of {e} is {v}.", "~On {v}, {e} is away."),
    ("When is {e} away?", "Which day off does {e} have?", "~On which day is {e} away?"),
    ("{e} is away on {v}.", "On {v}."),
)

PERSON = Kind(
    "person",
    _person,
    ("{e} is known to everyone here.", "Many people have met {e}.", "This note is about {e}."),
    (_JOB, _BORN, _PET, _LOST, _PHONE, _LIKES, _SHIFT),
)

TOWN = Kind(
    "town",
    _town,
    ("{e} is a quiet place.", "Few visitors know {e}.", "{e} lies off the main road."),
    (
        A(
            "population",
            _count,
            (
                "{e} has {v} inhabitants.",
                "About {v} people live in {e}.",
                "The population of {e} is {v}.",
                "~{e} is home to {v} people.",
            ),
            (
                "How many people live in {e}?",
                "What is the population of {e}?",
                "~How many inhabitants does {e} have?",
            ),
            ("{v} people live in {e}.", "{e} has {v} inhabitants."),
        ),
        A(
            "founding year",
            _year,
            (
                "{e} was founded in {v}.",
                "The founding year of {e} is {v}.",
                "~The year {v} saw {e} founded.",
            ),
            (
                "When was {e} founded?",
                "In which year was {e} founded?",
                "~What is the founding year of {e}?",
            ),
            ("{e} was founded in {v}.", "In {v}."),
        ),
        A(
            "river",
            lambda s: s.proper(),
            (
                "The river {v} flows through {e}.",
                "{e} lies on the river {v}.",
                "~The river of {e} is the river {v}.",
            ),
            (
                "Which river flows through {e}?",
                "On which river does {e} lie?",
                "~What is the river of {e} called?",
            ),
            ("The river {v} flows through {e}.", "It is the river {v}."),
        ),
        A(
            "mayor",
            _person,
            (
                "The mayor of {e} is {v}.",
                "{e} is led by its mayor, {v}.",
                "~{v} was elected mayor of {e}.",
            ),
            ("Who is the mayor of {e}?", "Who leads {e}?", "~Who was elected mayor of {e}?"),
            ("The mayor of {e} is {v}.", "{v} is the mayor of {e}."),
        ),
        A(
            "sight",
            lambda s: f"its {s.pick(COLOURS)} {s.pick(PLACES)}",
            (
                "{e} is famous for {v}.",
                "People visit {e} to see {v}.",
                "~Visitors come to {e} to see {v}.",
            ),
            (
                "What is {e} famous for?",
                "Why do people visit {e}?",
                "~What do people visit {e} to see?",
            ),
            ("{e} is famous for {v}.", "It is {v}."),
        ),
    ),
)

MACHINE = Kind(
    "machine",
    _machine,
    ("{e} stands in hall {n}.", "The manual describes {e}.", "{e} needs regular care."),
    (
        A(
            "maker",
            _company,
            ("{e} is made by {v}.", "{v} builds {e}.", "~The company that makes {e} is {v}."),
            ("Who makes {e}?", "Which company builds {e}?", "~Who is the maker of {e}?"),
            ("{v} makes {e}.", "{e} is made by {v}."),
        ),
        A(
            "weight",
            _unit("kg", "tons", "grams"),
            ("{e} weighs {v}.", "The weight of {e} is {v}.", "~{v} is how much {e} weighs."),
            ("How heavy is {e}?", "What is the weight of {e}?", "~How much does {e} weigh?"),
            ("{e} weighs {v}.", "The weight of {e} is {v}."),
        ),
        A(
            "power",
            _unit("watts", "kilowatts", "horsepower"),
            ("{e} draws {v}.", "The power of {e} is {v}.", "~{e} has a power of {v}."),
            (
                "What is the power of {e}?",
                "How much power does {e} draw?",
                "~How much is the power of {e}?",
            ),
            ("{e} draws {v}.", "The power of {e} is {v}."),
        ),
        A(
            "service code",
            lambda s: s.code_id(),
            (
                "The service code of {e} is {v}.",
                "To open {e}, enter {v}.",
                "~The code that opens {e} is {v}.",
            ),
            (
                "What is the service code of {e}?",
                "Which code opens {e}?",
                "~With which code can I open {e}?",
            ),
            ("The service code of {e} is {v}.", "The code is {v}."),
        ),
        A(
            "case material",
            _material,
            (
                "The case of {e} is made of {v}.",
                "{e} has a case of {v}.",
                "~{e} is made with a case of {v}.",
            ),
            (
                "What is the case of {e} made of?",
                "Which material is the case of {e}?",
                "~Of what is the case of {e} made?",
            ),
            ("The case of {e} is made of {v}.", "It is made of {v}."),
        ),
        A(
            "price",
            _money,
            ("{e} costs {v}.", "The price of {e} is {v}.", "~For {e} the price is {v}."),
            (
                "How much does {e} cost?",
                "What is the price of {e}?",
                "~How much is the price of {e}?",
            ),
            ("{e} costs {v}.", "The price of {e} is {v}."),
        ),
    ),
)

SHIP = Kind(
    "ship",
    _ship,
    ("{e} is well known on this coast.", "Sailors speak kindly of {e}.", "{e} was painted again."),
    (
        A(
            "captain",
            _person,
            (
                "The captain of {e} is {v}.",
                "{e} sails under captain {v}.",
                "~Captain {v} sails {e}.",
            ),
            (
                "Who is the captain of {e}?",
                "Under which captain does {e} sail?",
                "~Which captain sails {e}?",
            ),
            ("The captain of {e} is {v}.", "{v} is the captain of {e}."),
        ),
        A(
            "cargo",
            lambda s: f"{s.number()} boxes of {s.pick(FRUIT)}",
            ("{e} carries {v}.", "On board {e} are {v}.", "~{e} has {v} on board."),
            ("What does {e} carry?", "What is on board {e}?", "~What does {e} have on board?"),
            ("{e} carries {v}.", "On board are {v}."),
        ),
        A(
            "home port",
            _town,
            (
                "The home port of {e} is {v}.",
                "{e} is based in {v}.",
                "~{v} is the home port of {e}.",
            ),
            (
                "What is the home port of {e}?",
                "Where is {e} based?",
                "~In which home port is {e} based?",
            ),
            ("The home port of {e} is {v}.", "{e} is based in {v}."),
        ),
        A(
            "departure",
            _clock,
            ("{e} leaves at {v}.", "The departure of {e} is at {v}.", "~At {v}, {e} leaves."),
            (
                "When does {e} leave?",
                "At what time does {e} depart?",
                "~At what time does {e} leave?",
            ),
            ("{e} leaves at {v}.", "At {v}."),
        ),
        A(
            "length",
            _unit("metres", "feet"),
            ("{e} is {v} long.", "The length of {e} is {v}.", "~{e} has a length of {v}."),
            ("How long is {e}?", "What is the length of {e}?", "~What length does {e} have?"),
            ("{e} is {v} long.", "The length of {e} is {v}."),
        ),
    ),
)

BOOK = Kind(
    "book",
    lambda s: f'"{_book(s)}"',
    ("{e} is on the upper shelf.", "Readers still ask for {e}.", "{e} was printed twice."),
    (
        A(
            "author",
            _person,
            (
                "{e} was written by {v}.",
                "The author of {e} is {v}.",
                "{v} wrote {e}.",
                "~{v} is the author of {e}.",
            ),
            ("Who wrote {e}?", "Who is the author of {e}?", "~By whom was {e} written?"),
            ("{e} was written by {v}.", "The author is {v}.", "{v} wrote {e}."),
        ),
        A(
            "number of pages",
            _count,
            ("{e} has {v} pages.", "There are {v} pages in {e}.", "~{v} pages are in {e}."),
            (
                "How many pages does {e} have?",
                "How long is {e} in pages?",
                "~How many pages are in {e}?",
            ),
            ("{e} has {v} pages.", "It has {v} pages."),
        ),
        A(
            "hero",
            lambda s: s.proper(),
            (
                "The hero of {e} is called {v}.",
                "{e} tells the story of {v}.",
                "~{v} is the hero of {e}.",
            ),
            (
                "What is the hero of {e} called?",
                "Whose story does {e} tell?",
                "~Who is the hero of {e}?",
            ),
            ("The hero of {e} is called {v}.", "{e} tells the story of {v}."),
        ),
        A(
            "publication date",
            lambda s: s.date(),
            ("{e} was published on {v}.", "{e} came out on {v}.", "~On {v}, {e} was published."),
            (
                "When was {e} published?",
                "When did {e} come out?",
                "~On which date was {e} published?",
            ),
            ("{e} was published on {v}.", "It came out on {v}."),
        ),
    ),
)

PROJECT = Kind(
    "project",
    _project,
    ("{e} is open to all.", "People use {e} every day.", "{e} is a small piece of software."),
    (
        A(
            "lead",
            _person,
            ("{e} is led by {v}.", "The lead of {e} is {v}.", "~{v} is the lead of {e}."),
            ("Who leads {e}?", "Who is the lead of {e}?", "~By whom is {e} led?"),
            ("{e} is led by {v}.", "{v} leads {e}."),
        ),
        A(
            "latest version",
            lambda s: f"{s.between(0, 12)}.{s.between(0, 30)}.{s.between(0, 20)}",
            (
                "The latest version of {e} is {v}.",
                "{e} is now at version {v}.",
                "~Version {v} of {e} is out.",
            ),
            (
                "What is the latest version of {e}?",
                "At which version is {e}?",
                "~Which version of {e} is out?",
            ),
            ("The latest version of {e} is {v}.", "{e} is at version {v}."),
        ),
        A(
            "port",
            lambda s: str(s.between(1024, 65535)),
            ("{e} listens on port {v}.", "The port of {e} is {v}.", "~{e} is on port {v}."),
            (
                "On which port does {e} listen?",
                "What is the port of {e}?",
                "~Which port is {e} on?",
            ),
            ("{e} listens on port {v}.", "The port of {e} is {v}."),
        ),
        A(
            "settings file",
            lambda s: f"{s.word()}.{s.pick(['toml', 'json', 'yaml', 'ini', 'cfg'])}",
            (
                "{e} reads its settings from {v}.",
                "The settings of {e} are in {v}.",
                "~{e} has its settings in {v}.",
            ),
            (
                "Which file holds the settings of {e}?",
                "Where are the settings of {e}?",
                "~In which file are the settings of {e}?",
            ),
            ("The settings of {e} are in {v}.", "{e} reads them from {v}."),
        ),
        A(
            "speed",
            _unit("tokens per second", "requests per second", "megabytes per second"),
            ("{e} reaches {v}.", "The speed of {e} is {v}.", "~{e} has a speed of {v}."),
            ("How fast is {e}?", "What is the speed of {e}?", "~What speed does {e} reach?"),
            ("{e} reaches {v}.", "The speed of {e} is {v}."),
        ),
    ),
)

EVENT = Kind(
    "event",
    lambda s: f"the {s.proper()} {s.pick(['fair', 'race', 'festival', 'meeting', 'concert'])}",
    ("{e} is held every year.", "Tickets for {e} sell fast.", "Everyone talks about {e}."),
    (
        A(
            "place",
            _place,
            ("{e} takes place at {v}.", "{e} is held at {v}.", "~The place of {e} is {v}."),
            ("Where does {e} take place?", "Where is {e} held?", "~At which place is {e} held?"),
            ("{e} takes place at {v}.", "It is held at {v}."),
        ),
        A(
            "first day",
            lambda s: s.date(),
            ("{e} starts on {v}.", "The first day of {e} is {v}.", "~On {v}, {e} starts."),
            (
                "When does {e} start?",
                "What is the first day of {e}?",
                "~On which day does {e} start?",
            ),
            ("{e} starts on {v}.", "The first day of {e} is {v}."),
        ),
        A(
            "number of guests",
            _count,
            ("{e} expects {v} guests.", "{v} people will come to {e}.", "~{e} expects {v} people."),
            (
                "How many guests does {e} expect?",
                "How many people will come to {e}?",
                "~How many people does {e} expect?",
            ),
            ("{e} expects {v} guests.", "{v} people."),
        ),
        A(
            "winner",
            _person,
            (
                "{v} won the first prize at {e}.",
                "The first prize at {e} went to {v}.",
                "~The winner of the first prize at {e} is {v}.",
            ),
            (
                "Who won the first prize at {e}?",
                "To whom did the first prize at {e} go?",
                "~Who is the winner of {e}?",
            ),
            ("{v} won the first prize at {e}.", "The first prize went to {v}."),
        ),
    ),
)

KINDS = (PERSON, TOWN, MACHINE, SHIP, BOOK, PROJECT, EVENT)

FILLERS = (
    "[The weather|The wind|The rain] was [mild|cold|calm|strong] [that day|all week|at noon].",
    "[Nobody|No one|Hardly anyone] [spoke|said much] about [it|this] [later|afterwards|at first].",
    "[Some|Most|All] of [this|it] was [written down|noted|recorded] in [a small book|the log].",
    "[Further|More] details are [kept|stored] in the [archive|cellar|office|library].",
    "[The road|The path|The way] [there|back] is [long|short|steep] and [quiet|busy|narrow].",
    "[Later|Soon after|In the evening] the [lights|doors|shops] were [closed|out|open again].",
    "[People|Visitors|Guests] [often|rarely|sometimes] ask [about this|for more|why that is].",
    "[The report|The page|The list] was [checked|copied|signed] [twice|once more|by two people].",
    "[There is|There was] [no|little] [doubt|question] about [this|the rest|it].",
    "[A second|Another|One more] [note|letter|page] [followed|arrived] [a week|two days] later.",
)
