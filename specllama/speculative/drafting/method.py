"""The description of a drafting method, and the making of its drafters.

Types of drafters are named, never imported: asking for a label loads that method's file only.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from specllama.backend.base import Context
from specllama.interface import MethodInfo
from specllama.settings import method_list as registry
from specllama.speculative.drafting.copying import TextFollower
from specllama.speculative.drafting.drafter import Drafter
from specllama.speculative.drafting.text_library import Library
from specllama.speculative.types import Booking

Cost = Literal["free", "draft model", "own", "of its sources"]
Branches = Literal["no", "may", "must"]

NO_DRAFT = "no draft model loaded (-d)"
NO_HEAD = "no head of the target loaded (--head)"
CHAINS_ONLY = "this target can check chains only, no trees"
HINTS = {  # what to do about a reason
    NO_DRAFT: "give a draft model with -d",
    NO_HEAD: "give a head that was trained for this target with --head FILE",
}


@dataclass(frozen=True, slots=True)
class Facts:
    """Facts about a pair that decide how it can draft; known from file headers, before any load.

    Attributes:
        draft: a draft model.
        laws: it speaks the target's tokens, so that its probabilities can be compared.
        trees: the target takes token trees.
        own: what drafts for this target only (heads, layers of its file) by name: "" where it is
            there, else why it cannot be used. What was not looked for is missing.
    """

    draft: bool = False
    laws: bool = True
    trees: bool = True
    own: Mapping[str, str] = field(default_factory=dict)


@dataclass(slots=True)
class Kit:
    """The maker of the drafters of one conversation, each made once.

    Attributes:
        target: its lane of the target.
        draft: its lane of the draft model, in the target's tokens; a drafter where that has to
            translate; None without a draft model.
        library: texts that were given, to copy from.
        parts: what was opened of the target's own, by method; ``reasons``: why other was not.
        reader: reads the text, once for all that copy from it.
        made: drafters by method, so far.
    """

    target: Any
    draft: Context | Drafter | None = None
    library: Library = field(default_factory=Library)
    parts: Mapping[str, Any] = field(default_factory=dict)
    reasons: Mapping[str, str] = field(default_factory=dict)
    reader: TextFollower = field(default_factory=TextFollower)
    made: dict[str, Drafter] = field(default_factory=dict)

    @property
    def facts(self) -> Facts:
        return Facts(
            draft=self.draft is not None,
            laws=not isinstance(self.draft, Drafter),
            trees=self.target.max_leaves > 1,
            own={**self.reasons, **dict.fromkeys(self.parts, "")},
        )

    def own(self, method: str) -> Any:
        """Return the part of this target opened for a method, see ``Facts.own``.

        Only the method and its opener know what it is.
        """
        return self.parts[method]

    def drafter(self, method: str) -> Drafter | None:
        """Return the drafter of another method, to join it; None if the pair has none."""
        if method not in self.made:
            entry = find(method)
            if entry is None or entry.why_not(self.facts):
                return None
            self.made[method] = entry.open(self)
        return self.made[method]

    def all(self) -> dict[str, Drafter]:
        """Return the drafters of every method that the pair has, in order."""
        return {name: found for name in registry.names() if (found := self.drafter(name))}


@dataclass(frozen=True, slots=True)
class Method:
    """One way to draft.

    Attributes:
        name: the choice of ``--proposer``, and the source that its tokens are booked under.
        label: in menus.
        short: in a sentence, and alongside a round.
        letter: marks a token's source; unlike those of other methods, "" for a method that only
            joins others.
        blurb: what it does and when it pays, in one or two sentences.
        open: makes a drafter for one conversation, where nothing speaks against it.
        cost: what a step of it is: nothing that is timed, a step of the draft model, a step that
            has a cost table under the method's name, or those of the sources it joins.
        why_not: why it cannot draft for a pair, "" if it can.
        branches: "may" of one that grows trees, and chains where only chains can be judged; "must"
            of one that has nothing to say without them.
        auto: the mixture that ``auto`` drafts with asks it where it is there.
        at_once: its first step gives all guesses of a round; a further one takes no time.
        on_request: opening it writes a file or loads a model, so only its name does that.
    """

    name: str
    label: str
    short: str
    letter: str
    blurb: str
    open: Callable[[Kit], Drafter]
    cost: Cost = "free"
    why_not: Callable[[Facts], str] = lambda facts: ""
    branches: Branches = "no"
    auto: bool = False
    at_once: bool = False
    on_request: bool = False


def with_draft(facts: Facts) -> str:
    """Return ``why_not`` of a method that needs a draft model."""
    return "" if facts.draft else NO_DRAFT


def with_trees(facts: Facts) -> str:
    """Return ``why_not`` of a method that needs branches."""
    return "" if facts.trees else CHAINS_ONLY


def with_own(name: str, missing: str) -> Callable[[Facts], str]:
    """Return ``why_not`` of a method that needs a part of the target's; ``missing`` explains."""
    return lambda facts: facts.own.get(name, missing)


def find(name: str) -> Method | None:
    """Return the entry of a method; None for any other word, such as "auto" and "none"."""
    file = registry.FILES.get(name)
    if file is None:
        return None
    method: Method = importlib.import_module(f"{__package__}.{file}").METHOD
    return method


def methods() -> tuple[Method, ...]:
    """Return all entries, in order."""
    return tuple(method for name in registry.names() if (method := find(name)) is not None)


def menu(facts: Facts) -> tuple[MethodInfo, ...]:
    """List all methods in the order of a menu, each with the reason if this pair lacks it."""
    return tuple(
        MethodInfo(
            entry.name,
            entry.label,
            entry.blurb,
            not (reason := entry.why_not(facts)),
            reason,
            entry.short,
            entry.letter,
        )
        for entry in methods()
    )


def booked(drafter: Drafter) -> Booking:
    """Return the names that a drafter's drafts are booked under."""
    method = find(drafter.name)
    if method is None:  # of no entry: as if it stepped through a draft model
        return Booking(drafter.name, "" if drafter.name == "none" else drafter.name)
    paid = "" if method.cost == "free" else method.name
    if method.cost == "of its sources":
        paid = drafter.paid
    payer = find(paid)
    if payer is None:
        return Booking(method.name, paid)
    return Booking(method.name, paid, payer.cost == "own", payer.at_once)
