"""What a way to draft says about itself: an entry of the registry, told without a drafter."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal

Cost = Literal["free", "draft model", "own", "of its sources"]

NO_DRAFT = "no draft model loaded (-d)"
NO_HEAD = "no head of the target loaded (--head)"
CHAINS_ONLY = "this target takes chains only"


@dataclass(frozen=True, slots=True)
class Facts:
    """What a pair has to draft with; known from file headers alone, before anything is loaded.

    Attributes:
        draft: a draft model.
        laws: it speaks the target's tokens, so that its probabilities can be compared.
        trees: the target takes token trees.
        own: what drafts for this target only (heads, layers of its file) by name: "" where it is
            there, else why it cannot be used. What nobody looked for is missing.
    """

    draft: bool = False
    laws: bool = True
    trees: bool = True
    own: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Method:
    """One way to draft.

    Attributes:
        name: the choice of ``--proposer``, and the source that its tokens are booked under.
        label: in menus.
        short: in a sentence, and beside a round.
        letter: marks a token's source; unlike those of other methods, "" for a method that only
            joins others.
        blurb: what it does and when it pays, in one or two sentences.
        cost: what a step of it is: nothing that is timed, a step of the draft model, a step that
            has a cost table under the method's name, or those of the sources it joins.
        why_not: why it cannot draft for a pair, "" if it can.
        copies: some of its drafts are copied from the text and cost nothing.
        trees: its drafts may have branches.
        auto: the mixture that ``auto`` drafts with asks it where it is there.
        on_request: opening it writes a file or loads a model, so only its name does that.
    """

    name: str
    label: str
    short: str
    letter: str
    blurb: str
    cost: Cost
    why_not: Callable[[Facts], str]
    copies: bool = False
    trees: bool = False
    auto: bool = False
    on_request: bool = False


def always(facts: Facts) -> str:
    """``why_not`` of a method that needs nothing."""
    return ""


def with_draft(facts: Facts) -> str:
    """``why_not`` of a method that needs a draft model."""
    return "" if facts.draft else NO_DRAFT


def with_trees(facts: Facts) -> str:
    """``why_not`` of a method that needs branches."""
    return "" if facts.trees else CHAINS_ONLY


def with_own(name: str, missing: str) -> Callable[[Facts], str]:
    """``why_not`` of a method that needs something of the target's own, and what to say without."""
    return lambda facts: facts.own.get(name, missing)
