"""Attributes of facts: the statements and questions of each, and the kinds that have it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from specllama.models.recipe.corpus.base import Source

Value = Callable[[Source], str]


@dataclass(frozen=True)
class Attribute:
    """One attribute of an entity: `{e}` is the entity, `{v}` the value.

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
    """A kind of entity, its names, and its attributes."""

    label: str
    name: Value
    intros: tuple[str, ...]
    attributes: tuple[Attribute, ...]
