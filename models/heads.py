"""The kinds of head files: a new one is a line here, and a file that ends in ``HEAD``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from specllama.models.gguf import GgufHeader


class HeadKind(NamedTuple):
    """What a file is, the method that drafts with it, and the module of its ``HEAD``."""

    says: str
    method: str
    module: str


# by ``general.architecture``, or as ``sidecars.kind_of`` tells apart what shares one
HEADS = {
    "eagle3": HeadKind("an EAGLE-3 head", "eagle3", "specllama.models.eagle3_file"),
    "medusa": HeadKind("Medusa heads", "medusa", "specllama.models.medusa_file"),
    "dflash": HeadKind("a DFlash drafter", "dflash", "specllama.models.dflash_file"),
    "dspark": HeadKind("a DSpark drafter", "dflash", "specllama.models.dflash_file"),
    "gemma4-assistant": HeadKind("an assistant head", "mtp", "specllama.models.assistant_file"),
    "mtp": HeadKind("an MTP head", "mtp", "specllama.models.nextn_file"),
}


@dataclass(frozen=True, slots=True)
class Head:
    """What a kind of head can do; functions are named "module:function" and loaded when called.

    Attributes:
        check: that a head belongs to a target; raises PairIncompatible, BadGguf, UnsupportedModel.
        open: makes its pool from its header, checked before, and a ``LoadedTarget``; raises what
            ``check`` does, CannotLoad and DoesNotFit.
        convert: writes the file from a published checkpoint; "" where none is converted here.
        published: what such checkpoints call themselves.
    """

    check: Callable[[GgufHeader, GgufHeader], None]
    open: str
    convert: str = ""
    published: tuple[str, ...] = ()


def find(kind: str) -> Head:
    """The entry of a kind."""
    head: Head = import_module(HEADS[kind].module).HEAD
    return head


def function(name: str) -> Any:
    """What "module:function" names."""
    module, _, attribute = name.partition(":")
    return getattr(import_module(module), attribute)
