"""A cached line about each model on disk, so that listings do not read every header again.

The cache (``<cache>/headers.json``) is keyed by path and the stamps of all parts. If it is damaged
or not writable, that only costs time.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import msgspec

from specllama import paths
from specllama.errors import SpecllamaError
from specllama.files import DAMAGE
from specllama.models import library
from specllama.models.companions import kind_of, kind_of_name
from specllama.models.contents import stamp_of
from specllama.models.gguf import GgufHeader, read_header
from specllama.models.gguf_format import part_names
from specllama.models.loadable import check_loadable
from specllama.models.pairing import active_params

SCHEMA = 3


@dataclass(frozen=True, slots=True)
class FileSummary:
    """A listing's data about one file.

    Attributes:
        reason: why it cannot be run, "" if it can.
        fingerprint: equal for files with identical token lists.
        sidecar: which kind of sidecar it is (``companions.SIDECARS``), "" for a model.
    """

    name: str
    architecture: str
    quantization: str
    n_params: int
    active_params: int
    context_length: int
    vocab_size: int
    tokenizer: str
    fingerprint: str
    file_bytes: int
    reason: str
    sidecar: str = ""

    @property
    def usable(self) -> bool:
        return not self.reason


def fingerprint(header: GgufHeader) -> str:
    """Return a digest of the token list and of its use."""
    state = hashlib.sha256()
    for text in (header.tokenizer_model, str(header.special_id("bos")), str(header.vocab_size)):
        state.update((text or "").encode() + b"\0")
    state.update(b"\0".join(header.token_bytes))
    return state.hexdigest()[:32]


def summarize(path: Path) -> FileSummary:
    """Read one file; a file that cannot be run gets its reason instead of an exception."""
    try:
        header = read_header(path)
    except SpecllamaError as error:
        quant = library.quant_of(path.name) or "?"
        kind = kind_of_name(path.name)
        return FileSummary("", "?", quant, 0, 0, 0, 0, "", "", 0, error.message, kind)
    reason = ""
    try:
        check_loadable(header)
    except SpecllamaError as error:
        reason = error.message
    has_tokens = "tokenizer.ggml.tokens" in header.arrays
    return FileSummary(
        name=header.name, architecture=header.architecture or "?",
        quantization=header.quantization, n_params=header.n_params,
        active_params=active_params(header), context_length=header.context_length,
        vocab_size=header.vocab_size, tokenizer=header.tokenizer_model or "",
        fingerprint=fingerprint(header) if has_tokens else "", file_bytes=header.file_bytes,
        reason=reason, sidecar=kind_of(header),
    )  # fmt: skip


class Summaries:
    """Summaries of files, from the cache where they are current."""

    def __init__(self) -> None:
        self._file = paths.cache_dir() / "headers.json"
        self._known: dict[str, dict[str, Any]] = {}
        self._changed = False
        with contextlib.suppress(OSError, *DAMAGE):
            data = json.loads(self._file.read_bytes())
            self._known = dict(data["files"]) if data.get("schema") == SCHEMA else {}

    def get(self, path: Path) -> FileSummary:
        key = str(path.absolute())
        parts = [path.parent / name for name in part_names(path.name)]
        stamp = [one and list(one) for one in map(stamp_of, parts)]
        if not all(stamp):
            return summarize(path)
        known = self._known.get(key)
        if isinstance(known, dict) and known.get("stamp") == stamp:
            with contextlib.suppress(*DAMAGE):
                return msgspec.convert(known["summary"], FileSummary)
        summary = summarize(path)
        self._known[key] = {"stamp": stamp, "summary": asdict(summary)}
        self._changed = True
        return summary

    def save(self) -> None:
        """Write the cache; a failure does no harm."""
        if self._changed:
            # names of files need not be UTF-8, which msgspec's writer insists on
            data = json.dumps({"schema": SCHEMA, "files": self._known}).encode()
            with contextlib.suppress(OSError):
                paths.replace_file(self._file, data)


def loadable(found: Iterable[library.LocalModel]) -> list[library.LocalModel]:
    """Return those that can be run: whole ones, and no heads, whatever they are called."""
    known = Summaries()
    whole = [model for model in found if model.complete and not kind_of_name(model.path.name)]
    models = [model for model in whole if known.get(model.path).usable]
    known.save()
    return models
