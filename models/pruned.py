"""A draft cut out of its own target: the same file without some of its layers.

    <cache>/self/<target>-without-2-4.gguf    made on first use

``<target>`` names the contents of the target's file, so that another one in the same place gets its
own drafts.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from specllama import paths
from specllama.errors import SpecllamaError, UnsupportedModel
from specllama.models import quantization
from specllama.models.contents import SHORT, Check
from specllama.models.download import disk_error
from specllama.models.gguf import GgufHeader, read_header


def why_not(header: GgufHeader) -> str:
    """Return why no layers can be dropped from a target, "" if they can."""
    if header.block_count < 2:
        return f"the target has {header.block_count} layer"
    try:
        quantization.check_prunable(header)
    except UnsupportedModel as error:
        return error.message
    return ""


def names(layers: Sequence[int]) -> str:
    """Name layers in a row, such as "2-4"."""
    return f"{layers[0]}-{layers[-1]}"


def middle_half(n_layers: int) -> tuple[int, ...]:
    """Return the layers that ``--proposer self`` leaves out: the first and the last ones matter
    most."""
    n = max(n_layers // 2, 1)
    first = (n_layers - n + 1) // 2
    return tuple(range(first, first + n))


def draft_work(header: GgufHeader, drop: Sequence[int]) -> float:
    """Return the bytes read by a step without these layers, as a share of a whole step."""
    gone = tuple(f"blk.{layer}." for layer in drop)
    left_out = sum(tensor.n_bytes for tensor in header.tensors if tensor.name.startswith(gone))
    return 1 - left_out / header.step_bytes


def folder() -> Path:
    return paths.cache_dir() / "self"


def make_draft(
    header: GgufHeader, drop: Sequence[int], *, threads: int = 0, check: Check = lambda: None
) -> GgufHeader:
    """Make the target without the layers ``drop``, once; reuse it later. The target is read for
    that, which takes less time than to make a copy. ``check`` may end it.

    Raises:
        UnsupportedModel: layers cannot be dropped from this architecture.
        SpecllamaError: the disk is full or not writable, or llama.cpp refused.
    """
    contents = header.read_contents(check)
    path = folder() / f"{contents[:SHORT]}-without-{names(drop)}.gguf"
    if found := _found(path, header, drop):
        return found
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.unlink(missing_ok=True)
    except OSError as error:
        raise disk_error(error, path) from None
    job = quantization.prepare(header.path, path, None, prune=drop, threads=threads)
    try:
        return quantization.run(job)
    except SpecllamaError:
        # another process may have made it meanwhile
        if found := _found(path, header, drop):
            return found
        raise


def _found(path: Path, target: GgufHeader, drop: Sequence[int]) -> GgufHeader | None:
    """Read the header of a draft made earlier; None if it is not the expected one."""
    try:
        draft = read_header(path)
    except (SpecllamaError, OSError):
        return None
    return draft if draft.block_count == target.block_count - len(drop) else None
