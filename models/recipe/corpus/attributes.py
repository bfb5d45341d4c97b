"""What a fact is made of: an attribute, how it is said and asked, and the kinds that have it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from specllama.models.recipe.corpus.base import Source

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
