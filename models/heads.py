"""The kinds of head files: a new one is a line here, and a file that ends in ``HEAD``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from specllama.models.gguf import GgufHeader


class HeadKind(NamedTuple):
    """The kind of a file, the method that drafts with it, and the module of its ``HEAD``.

    ``named`` is what the hub's names of such files hold, a pattern in lower case; "" where no word
    tells them from whole models.
    """

    says: str
    method: str
    module: str
    named: str = ""


def _word(word: str) -> str:
    return rf"(?<![a-z0-9]){word}(?![a-z0-9])"


_FILES = "specllama.models."
HEADS = {
    "eagle3": HeadKind("an EAGLE-3 head", "eagle3", _FILES + "eagle3_file", _word("eagle3")),
    "medusa": HeadKind("Medusa heads", "medusa", _FILES + "medusa_file"),
    "dflash": HeadKind("a DFlash drafter", "dflash", _FILES + "dflash_file", _word("dflash")),
    "dspark": HeadKind("a DSpark drafter", "dflash", _FILES + "dflash_file", _word("dspark")),
    "gemma4-assistant": HeadKind(
        "an assistant head", "mtp", _FILES + "assistant_file", "^mtp-gemma|gemma-?4.*assistant"
    ),
    "mtp": HeadKind("an MTP head", "mtp", _FILES + "nextn_file", "^mtp-"),
}


def by_architecture(header: GgufHeader, kind: str) -> bool:
    """True if ``general.architecture`` is the kind's own name."""
    return header.architecture == kind


@dataclass(frozen=True, slots=True)
class Head:
    """The functions of a kind of head; each is named "module:function" and loaded when called.

    Attributes:
        check: that a head belongs to a target, and the facts of it that ``open`` needs; raises
            PairIncompatible, BadGguf, UnsupportedModel.
        open: makes its pool from its header, a ``LoadedTarget`` and these facts; raises what
            ``check`` does, CannotLoad and DoesNotFit. The caller closes it.
        memory: the ``ModelMemory`` that it takes on top of its target, at a context length.
        recognise: whether a file is of this kind.
        convert: writes the file from a published checkpoint; "" where none is converted here.
        published: what such checkpoints call themselves.
    """

    check: Callable[[GgufHeader, GgufHeader], object]
    open: str
    memory: Callable[[GgufHeader, GgufHeader, int], Any]
    recognise: Callable[[GgufHeader, str], bool] = by_architecture
    convert: str = ""
    published: tuple[str, ...] = ()


def find(kind: str) -> Head:
    """Return the entry of a kind."""
    head: Head = import_module(HEADS[kind].module).HEAD
    return head


def function(name: str) -> Any:
    """Import the function that "module:function" names."""
    module, _, attribute = name.partition(":")
    return getattr(import_module(module), attribute)
