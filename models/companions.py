"""Files that go with a model and are none: drafting heads, projectors, importance matrices.

A new kind of head is a line in ``HEADS``, and a file that ends in ``HEAD``. A listing of the hub
has only names; a file on disk also has a header, which wins if the two disagree. Names follow
llama.cpp's own (``mtp-…``, ``eagle3-…``, ``dflash-…``, ``dspark-…``, ``mmproj…``, ``imatrix…``;
common/download.cpp).
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from specllama import paths
from specllama.errors import PairIncompatible
from specllama.files import DAMAGE

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


CARD = "specllama.training"  # the key of what a head learned from, in its file
_SAME_TEXTS = 0.99  # of the token ids of a head and its target
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
    """The functions of a kind of head.

    Attributes:
        check: that a head belongs to a target, and the facts of it that ``open`` needs; raises
            PairIncompatible, BadGguf, UnsupportedModel.
        open: "module:function", loaded when called: makes its pool from its header, a
            ``LoadedModel`` and these facts; raises what ``check`` does, CannotLoad and DoesNotFit.
            The caller closes it.
        memory: the ``ModelMemory`` that it takes on top of its target, at a context length.
        recognise: whether a file is of this kind.
        convert: writes the file from a published checkpoint, see ``conversion.convert``; None
            where none is converted here.
        published: what such checkpoints call themselves.
    """

    check: Callable[[GgufHeader, GgufHeader], object]
    open: str
    memory: Callable[[GgufHeader, GgufHeader, int], Any]
    recognise: Callable[[GgufHeader, str], bool] = by_architecture
    convert: Callable[..., None] | None = None
    published: tuple[str, ...] = ()


def find(kind: str) -> Head:
    """Return the entry of a kind."""
    head: Head = import_module(HEADS[kind].module).HEAD
    return head


def function(name: str) -> Any:
    """Import the function that "module:function" names."""
    module, _, attribute = name.partition(":")
    return getattr(import_module(module), attribute)


# ---------------------------------------------------------------------- which kind a file is

# kind -> what it is
SIDECARS = {kind: head.says for kind, head in HEADS.items()} | {
    "mmproj": "a vision projector (mmproj)",
    "imatrix": "an importance matrix for quantizing",
}

_PROJECTOR = re.compile(r"(?<![a-z0-9])mmproj(?![a-z0-9])")
_QUANT = re.compile(r"(?<![a-z0-9])i?q\d(?![a-z0-9])")


def kind_of_name(name: str) -> str:
    """Return the kind of sidecar that a file name names, "" for a model's."""
    lowered = Path(name).name.lower()
    for kind, head in HEADS.items():
        if head.named and re.search(head.named, lowered):
            return kind
    if _PROJECTOR.search(lowered):
        return "mmproj"
    # a model quantized with an importance matrix may say so in its name
    return "imatrix" if "imatrix" in lowered and not _QUANT.search(lowered) else ""


def kind_of(header: GgufHeader) -> str:
    """Return the kind of sidecar that a file is, "" for one that may be a model."""
    arch, kind = header.architecture, header.kind
    if arch == "clip" or kind == "mmproj" or "clip.has_vision_encoder" in header.metadata:
        return "mmproj"
    if kind == "imatrix" or arch == "imatrix" or "imatrix.chunk_count" in header.metadata:
        return "imatrix"
    return next((kind for kind in HEADS if find(kind).recognise(header, kind)), "")


def require_head(header: GgufHeader) -> str:
    """Return the kind of head that a file is.

    Raises:
        PairIncompatible: it is none.
    """
    kind = kind_of(header)
    if kind and kind not in HEADS:
        raise PairIncompatible(
            f"{header.path.name} is {SIDECARS[kind]}, which --head does not take", advice(kind)
        )
    if kind not in HEADS:
        raise PairIncompatible(
            f"{header.path.name} is no drafting head but a model of the architecture "
            f"{header.architecture!r}",
            "give draft models with -d; --head takes "
            + ", ".join(head.says for head in HEADS.values()),
        )
    return kind


def advice(kind: str) -> str:
    """Return what to do with such a file."""
    if kind in HEADS:
        return "give it beside its target: specllama chat -m TARGET --head FILE"
    return "give the language model that it belongs to"


# ---------------------------------------------------------------------- heads of a person's own


def own_heads(target: GgufHeader) -> list[Path]:
    """List the files that are named as heads of a target: in its folder, and in our own."""
    ours = _own_folder()
    folders = [target.path.parent, *([ours / target.fingerprint] if ours.is_dir() else [])]
    named = [folder / own_name(target, kind) for folder in folders for kind in HEADS]
    return [path for path in named if path.is_file()]


def own_name(target: GgufHeader, kind: str) -> str:
    """Return the name of the file of a target's head."""
    return f"{kind}-{target.path.name.removesuffix('.gguf')}.gguf"


def own_place(target: GgufHeader, kind: str) -> Path:
    """Return the path of a head to be made: in the target's folder if that is a person's own, else
    in ours. Links and names without an ending are in stores of other programs."""
    path = target.path
    foreign = path.is_symlink() or path.suffix != ".gguf" or path.parent == paths.bundled_dir()
    own = not foreign and os.access(path.parent, os.W_OK | os.X_OK)
    folder = path.parent if own else _own_folder() / target.fingerprint
    return folder / own_name(target, kind)


def trained_for(head: GgufHeader) -> str:
    """Return the fingerprint of the file that a head was trained for here; "" if it was not."""
    with suppress(*DAMAGE):
        return str(msgspec.json.decode(head.text(CARD) or "{}")["fingerprint"])
    return ""


def _own_folder() -> Path:
    return paths.cache_dir() / "heads"


# ---------------------------------------------------------------------- what heads have in common


def require_architecture(header: GgufHeader, architecture: str, what: str, hint: str) -> None:
    """Check that a file says to be of an architecture.

    Raises:
        PairIncompatible: it is of another.
    """
    if header.architecture != architecture:
        said = header.architecture or "nameless"
        raise PairIncompatible(f"{header.path.name} is a {said} file, not {what}", hint)


def require_same_target(head: GgufHeader, why: str, hint: str) -> None:
    """Refuse a head that was made for another target, if there is a reason to think so.

    Raises:
        PairIncompatible: with that reason.
    """
    if why:
        raise PairIncompatible(f"{head.path.name} was made for another target: {why}", hint)


def other_tokens(head: GgufHeader, target: GgufHeader) -> str:
    """Describe how the tokens of a head and a target differ; "" if they are the same."""
    if head.vocab_size != target.vocab_size:
        return f"it knows {head.vocab_size:,} tokens, {target.path.name} {target.vocab_size:,}"
    if head.tokenizer_model in (None, "no_vocab", "none"):
        return ""
    pairs = list(zip(head.token_bytes, target.token_bytes, strict=True))
    other = [i for i, (a, b) in enumerate(pairs) if a != b]
    if len(other) <= (1 - _SAME_TEXTS) * len(pairs):
        return ""
    a, b = pairs[other[0]]
    return (
        f"{len(other):,} of {len(pairs):,} tokens have another text, for example "
        f"{other[0]}: {a.decode('utf-8', 'replace')!r} and {b.decode('utf-8', 'replace')!r}"
    )
