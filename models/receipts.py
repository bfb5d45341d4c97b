"""Receipts of pulled files: one small JSON file next to each model in our own folder.

``verify`` compares bytes with the digest in the receipt (or in the name that the Hugging Face cache
or Ollama gives to a blob); ``remove`` deletes models that are ours, and nothing else.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import msgspec

from specllama import paths
from specllama.errors import ModelUnavailable, SpecllamaError, UsageError
from specllama.files import DAMAGE, read_json
from specllama.models import contents, library
from specllama.models.companions import own_heads, trained_for
from specllama.models.contents import SHORT
from specllama.models.download import Digest, disk_error, parts_of
from specllama.models.gguf import read_header
from specllama.models.gguf_format import is_later_part, part_names

FOLDER = ".specllama"
OWNERS = {
    "huggingface": "hf cache rm", "lmstudio": "LM Studio", "ollama": "ollama rm",
    "llama.cpp": "the folder of llama.cpp's cache", "folder": "your file manager",
    "bundled": "pip uninstall specllama",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Receipt:
    """The origin of one file and its expected content."""

    repo: str
    file: str
    commit: str
    size: int
    digest_kind: str
    digest: str
    pulled_at: float = 0.0


@dataclass(frozen=True, slots=True)
class HashVerdict:
    """The result of re-hashing one file: "ok", "damaged", "missing" or "unknown"."""

    path: Path
    status: str
    detail: str

    @property
    def sound(self) -> bool:
        return self.status in ("ok", "unknown")


def receipt_path(file: Path) -> Path:
    return file.parent / FOLDER / f"{file.name}.json"


def write_receipt(file: Path, receipt: Receipt) -> None:
    """Record a finished download (atomically).

    Raises:
        SpecllamaError: the disk refuses.
    """
    target = receipt_path(file)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        draft = target.with_suffix(".tmp")  # as readable as the model itself
        draft.write_bytes(msgspec.json.encode(receipt))
        os.replace(draft, target)
    except OSError as error:
        raise disk_error(error, target) from None


def read_receipt(file: Path) -> Receipt | None:
    """Read the receipt of a file; None if there is none or it cannot be read."""
    with contextlib.suppress(OSError, *DAMAGE):
        found: Receipt | None = read_json(receipt_path(file), Receipt)
        return found
    return None


def expected_digest(file: Path) -> Digest | None:
    """Return the digest a file must have: of its receipt, else of a blob's content-addressed
    name."""
    receipt = read_receipt(file)
    if receipt is not None and receipt.digest_kind in ("sha256", "git"):
        return Digest(receipt.digest_kind, receipt.digest)
    name = file.name
    if file.is_symlink():
        # one level: in newer caches the blob is itself a link to a store with other names
        name = Path(os.readlink(file)).name
    match = re.fullmatch(r"(?:sha256-)?([0-9a-f]{64})|[0-9a-f]{40}", name)
    if match is None:
        return None
    return Digest("sha256", match[1]) if match[1] else Digest("git", name)


def verify(
    model: library.LocalModel, advanced: Callable[[Path, int], object] = lambda file, n: None
) -> list[HashVerdict]:
    """Re-hash every file of a model."""
    verdicts = []
    for name in part_names(model.path.name):
        file = model.path.with_name(name)
        if not file.is_file():
            verdicts.append(HashVerdict(file, "missing", "this part is not here"))
            continue
        digest = expected_digest(file)
        if digest is None:
            verdicts.append(_structure(file))
            continue
        try:
            with file.open("rb", buffering=0) as stream:
                found = contents.digest_of(stream, digest, partial(advanced, file))
        except OSError as error:
            raise ModelUnavailable(f"{file} cannot be read: {error.strerror or error}") from None
        status, detail = "ok", f"{digest.kind} {digest.hex[:12]}…"
        if found != digest.hex:
            status = "damaged"
            detail = f"its digest is {found[:12]}…, it must be {digest.hex[:12]}…"
        verdicts.append(HashVerdict(file, status, detail))
    return verdicts


def _structure(file: Path) -> HashVerdict:
    """Judge a file without a digest by its header and tensors: are they whole?"""
    if is_later_part(file.name):
        return HashVerdict(file, "unknown", "no digest is known for it")
    try:
        read_header(file)
    except SpecllamaError as error:
        return HashVerdict(file, "damaged", error.message)
    return HashVerdict(file, "unknown", "no digest is known; header and tensor lengths are right")


def removable(model: library.LocalModel) -> list[Path]:
    """List the files that removing a model deletes: its parts, receipts and unfinished transfers.

    Raises:
        UsageError: another tool owns it, or it lies outside our folder.
    """
    if model.source == "bundled":
        raise UsageError(
            f"{model.ref} comes with specllama and is not deleted", "other models: specllama hub ls"
        )
    if not model.owned:
        owner = OWNERS.get(model.source, model.source)
        raise UsageError(
            f"{model.ref} belongs to another tool ({model.source}); specllama does not delete it",
            f"remove it with {owner}",
        )
    root = paths.models_dir().resolve()
    files: list[Path] = []
    for name in part_names(model.path.name):
        file = model.path.with_name(name)
        if not file.parent.resolve().is_relative_to(root):
            raise UsageError(f"{file} lies outside {root}: not deleted")
        files += [file, receipt_path(file), *parts_of(file)]
    return [file for file in files if file.is_symlink() or file.exists()]


def belongings(model: library.LocalModel) -> dict[str, list[Path]]:
    """Group what is kept on disk of a model, besides its own files, by what it is.

    What goes by the contents of another file as well is not among it.
    """
    begins, heads = contents.names_of(model.path), list[Path]()
    with contextlib.suppress(SpecllamaError, OSError):
        header = read_header(model.path)
        if contents.of_model(model.path, most=0) in (None, *begins):
            begins.add(header.fingerprint)
        heads = [head for head in own_heads(header) if trained_for(read_header(head))]
    cache, states = paths.cache_dir(), paths.states_dir()
    folders = {
        "trained head": [cache / "heads"],
        "training of a head": [cache / "training"],
        "copy with fewer words or layers": [cache / "drafts", cache / "self"],
        "states of conversations": [states],
        "measurements": [*paths.profiles_dir().glob("*/")],
    }
    found = {
        kind: [
            one for folder in where for name in begins for one in folder.glob(f"{name[:SHORT]}*")
        ]
        for kind, where in folders.items()
    }
    beside = [head.with_suffix(".card.json") for head in heads]
    found["trained head"] += [one for one in (*heads, *beside) if one.exists()]
    return {kind: sorted({*some}) for kind, some in found.items() if some}


def bytes_of(place: Path) -> int:
    """Return the bytes of a file, or of all files in a folder."""
    files = place.rglob("*") if place.is_dir() and not place.is_symlink() else [place]
    return sum(one.lstat().st_size for one in files)


def remove(model: library.LocalModel, more: Iterable[Path] = ()) -> int:
    """Delete a model of ours and what belongs to it; returns the bytes freed.

    Raises:
        UsageError: it is not ours to delete.
        SpecllamaError: the disk refuses.
    """
    freed = 0
    try:
        for one in (*more, *removable(model)):
            freed += bytes_of(one)
            if one.is_dir() and not one.is_symlink():
                shutil.rmtree(one)
            else:
                one.unlink(missing_ok=True)
        _drop_empty(model.path.parent)
    except OSError as error:
        raise SpecllamaError(f"{model.path} cannot be deleted: {error.strerror}") from None
    return freed


def _drop_empty(folder: Path) -> None:
    """Remove folders that became empty, up to our own root."""
    root = paths.models_dir().resolve()
    for candidate in (folder / FOLDER, folder, *folder.parents):
        inside = candidate.resolve()
        if inside != root and inside.is_relative_to(root):
            with contextlib.suppress(OSError):
                candidate.rmdir()
