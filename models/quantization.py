"""Quantization: a smaller model file by llama.cpp's own quantizer, in a child process.

A tensor that llama.cpp cannot handle may end its process, so a child does the work; the result gets
its name only after its header was read again. GGUF has no FP8: a user who asks for it is shown
the 8-bit type.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from specllama.errors import SpecllamaError, UnsupportedModel, UsageError
from specllama.models.companions import kind_of
from specllama.models.download import disk_error
from specllama.models.gguf import GgufHeader, read_header
from specllama.models.gguf_format import TensorInfo
from specllama.models.loadable import check_loadable, elementwise
from specllama.models.tensors import Floats, read_tensor
from specllama.text import did_you_mean, size

# bits per weight of the matrices, K-quant mixtures on average over a model
BITS = {
    "f32": 32.0, "f16": 16.0, "bf16": 16.0, "q8_0": 8.5, "q6_k": 6.57, "q5_k_m": 5.7,
    "q5_k_s": 5.55, "q5_1": 6.0, "q5_0": 5.5, "q4_k_m": 4.9, "q4_k_s": 4.6, "q4_1": 5.0,
    "q4_0": 4.5, "iq4_nl": 4.5, "iq4_xs": 4.3, "q3_k_l": 4.3, "q3_k_m": 3.95, "q3_k_s": 3.5,
    "q2_k": 3.0, "mxfp4": 4.3,
}  # fmt: skip
# what llama.cpp takes instead for rows that are no multiple of 256 weights
_NARROW = {
    "q2_k": 4.5, "q3_k_s": 4.5, "q3_k_m": 4.7, "q3_k_l": 5.0, "iq4_xs": 4.5, "q4_k_s": 5.55,
    "q4_k_m": 5.7, "q5_k_s": 6.05, "q5_k_m": 6.2, "q6_k": 8.5,
}  # fmt: skip
_WHOLE = ("f32", "f16", "bf16", "q8_0")  # the output matrix is of that type, too
SPACE_MARGIN = 64 << 20

_INSTEAD = {
    "fp8": "q8_0", "f8": "q8_0", "e4m3": "q8_0", "e5m2": "q8_0", "fp8_e4m3": "q8_0", "int8": "q8_0",
    "q8": "q8_0", "8bit": "q8_0", "int4": "q4_0", "q4": "q4_k_m", "4bit": "q4_0", "fp4": "mxfp4",
    "nvfp4": "mxfp4", "fp16": "f16", "fp32": "f32", "q4_k": "q4_k_m", "q5_k": "q5_k_m",
    "q6": "q6_k", "q3_k": "q3_k_m", "iq4": "iq4_nl",
}  # fmt: skip
_SUMS, _COUNTS = ".in_sum2", ".counts"  # of an importance matrix
FLOATS = frozenset({"F32", "F16", "BF16"})
# per-layer arrays in the metadata are not renumbered when layers are dropped
PRUNABLE = frozenset({"llama", "qwen2", "qwen3", "gemma", "mistral3", "olmo2"})
_ALTERNATING = frozenset({"smollm3"})  # what a layer computes depends on its number


@dataclass(frozen=True, slots=True)
class QuantizeJob:
    """One conversion, checked.

    Attributes:
        header: of the source.
        request: for the child, without a destination; its type is a name of BITS, or "copy" when
            layers are only dropped.
        expected: estimated bytes of the result.
    """

    header: GgufHeader
    destination: Path
    request: dict[str, object]
    expected: int


def check_type(name: str) -> str:
    """Find a quantization by its usual name, ignoring case.

    Raises:
        UsageError: unknown; names the one to use instead, and why there is no FP8.
    """
    wanted = name.lower().replace("-", "_")
    if wanted in BITS:
        return wanted
    instead = _INSTEAD.get(wanted)
    if instead == "q8_0" and wanted not in ("int8", "q8", "8bit"):
        raise UsageError(
            f"GGUF has no FP8 tensor type, so there is no {name!r}; its 8-bit type is Q8_0: 8-bit"
            " integers with one 16-bit scale for each 32 weights, about as accurate and as large",
            "use --type q8_0",
        )
    if instead is not None:
        raise UsageError(f"there is no type {name!r} in GGUF", f"use --type {instead}")
    hint = did_you_mean(wanted, BITS, f"one of: {', '.join(BITS)}", 0.4)
    raise UsageError(f"unknown quantization {name!r}", hint)


def prepare(
    source: Path,
    destination: Path,
    type_name: str | None,
    *,
    prune: Sequence[int] = (),
    threads: int = 0,
    pure: bool = False,
    requantize: bool = False,
    output_type: str | None = None,
    imatrix: Path | None = None,
) -> QuantizeJob:
    """Check everything before the first byte is written.

    Args:
        prune: layers to drop. type_name: None copies the others as they are.

    Raises:
        UsageError: type or destination do not make sense.
        CannotLoad: the source is not a model.
        SpecllamaError: not enough free space.
    """
    if type_name is None and not prune:
        raise UsageError("there is nothing to do", "give --type q4_0")
    kind = check_type(type_name) if type_name is not None else "copy"
    header = read_header(source)
    check_loadable(header)
    check_destination(destination)
    if len(header.parts) > 1 and not destination.name.endswith(".gguf"):
        raise UsageError("the result of a split model needs a name that ends in .gguf")
    if prune:
        check_prunable(header)
    requantize = requantize or kind.upper() in FLOATS  # they hold all that the source does
    _check_source_types(header, kind, requantize)
    if imatrix is not None:
        read_imatrix(imatrix, header)
    if kind in ("f16", "bf16"):
        _check_stays_f32(header, kind)
    expected = estimate_bytes(header, kind, prune, pure=pure, output_type=output_type)
    free = shutil.disk_usage(destination.parent).free
    if expected + SPACE_MARGIN > free:
        raise SpecllamaError(
            f"the result needs about {size(expected)}, {size(free)} are free there",
            "free some space or choose another disk",
        )
    request: dict[str, object] = {
        "source": str(source.absolute()), "type": kind, "threads": threads, "pure": pure,
        "requantize": requantize, "output_type": output_type, "prune_layers": list(prune),
        "imatrix": None if imatrix is None else str(imatrix.absolute()),
    }  # fmt: skip
    return QuantizeJob(header, destination, request, expected)


def check_destination(destination: Path) -> None:
    """Refuse a name that no new file can have.

    Raises:
        UsageError: it is there already, or its folder is not.
    """
    if destination.is_dir():
        raise UsageError(f"{destination} is a folder", "give the new file a name")
    if destination.exists():
        raise UsageError(f"{destination} exists and is never overwritten", "choose another name")
    if not destination.parent.is_dir():
        raise UsageError(f"there is no folder {destination.parent}", "create it first")


def check_prunable(header: GgufHeader) -> None:
    """Check that layers can be dropped from a model.

    Raises:
        UnsupportedModel: they cannot, and why.
    """
    arrays = [key for key in header.arrays if key.startswith(f"{header.architecture}.")]
    # four numbers of one rotation, whatever the layer
    arrays = [key for key in arrays if not key.endswith(".rope.dimension_sections")]
    alternating = header.architecture in _ALTERNATING or header.sliding_window or header.is_hybrid
    if header.architecture not in PRUNABLE or arrays or alternating:
        why = "what a layer computes depends on its number" if alternating else "not tried"
        if arrays:
            why = f"its header has values per layer ({arrays[0]})"
        raise UnsupportedModel(
            f"layers cannot be dropped from the architecture {header.architecture}: {why}",
            f"it works for {', '.join(sorted(PRUNABLE))}",
        )


def _check_source_types(header: GgufHeader, kind: str, requantize: bool) -> None:
    if kind == "copy" or requantize:
        return
    quantized = [name for name in header.tensor_types if name not in FLOATS]
    if quantized:
        raise UsageError(
            f"{header.path.name} is quantized already ({header.quantization}); quantizing it again"
            " loses more than quantizing the original",
            "start from an F16, BF16 or F32 file, or accept the loss with --requantize",
        )


def _check_stays_f32(header: GgufHeader, kind: str) -> None:
    """Refuse norms of several rows without the ending _norm: llama.cpp would quantize them."""
    for tensor in header.tensors:
        known = tensor.name.endswith("_norm.weight") or not tensor.is_matrix
        if elementwise(tensor.name) and not known:
            raise UnsupportedModel(
                f"llama.cpp's quantizer would make {kind} of {tensor.name}, too, with which it"
                " cannot compute",
                "a quantized type leaves it as it is: --type q8_0",
            )


def estimate_bytes(
    header: GgufHeader,
    kind: str,
    layers: Sequence[int] = (),
    *,
    pure: bool = False,
    output_type: str | None = None,
) -> int:
    """Return the size of the result, to within a few percent."""

    def bits(tensor: TensorInfo) -> float:
        narrow = tensor.shape[0] % 256 != 0
        if tensor.name == output and not pure and kind not in _WHOLE:
            return BITS[output_type or ("q8_0" if narrow or kind == "mxfp4" else "q6_k")]
        return _NARROW.get(kind, BITS[kind]) if narrow else BITS[kind]

    output = "output.weight" if "output.weight" in header.by_name else "token_embd.weight"
    dropped = tuple(f"blk.{layer}." for layer in layers)
    total = header.data_offset
    for tensor in header.tensors:
        if tensor.name.startswith(dropped):
            continue
        stays = kind == "copy" or not tensor.is_matrix
        total += tensor.n_bytes if stays else int(tensor.n_elements * bits(tensor) / 8)
    return total


def read_imatrix(path: Path, model: GgufHeader) -> dict[str, Floats]:
    """Return the mean square of each input of a model's matrices, [experts, inputs], by name.

    Raises:
        UsageError: the file is none, or one of another model.
        ModelUnavailable, CannotLoad: it cannot be read.
    """
    header = read_header(path)
    if kind_of(header) != "imatrix":
        raise UsageError(f"{path.name} is no importance matrix", "llama-imatrix writes one")
    found = {}
    for name in header.by_name:
        of = model.by_name.get(name.removesuffix(_SUMS))
        if of is None or not of.is_matrix or not name.endswith(_SUMS):
            continue
        sums, counts = (read_tensor(header, of.name + end).ravel() for end in (_SUMS, _COUNTS))
        experts = of.shape[2] if len(of.shape) > 2 else 1
        if sums.size != of.shape[0] * experts or counts.size != experts:
            raise UsageError(f"{path.name} is of another model: {of.name} has other inputs")
        seen = counts.reshape(experts, 1)
        means = sums.reshape(experts, -1) / np.maximum(seen, 1)
        found[of.name] = np.where(seen > 0, means, 1).astype(np.float32)
    if not found:
        raise UsageError(f"{path.name} names no matrix of {model.path.name}")
    return found


def run(job: QuantizeJob, advanced: Callable[[int, int], None] | None = None) -> GgufHeader:
    """Quantize; return the header of the result.

    Args:
        advanced: called with (tensors done, tensors).

    Raises:
        SpecllamaError: the quantizer failed; nothing is left behind.
    """
    scratch = job.destination.with_name(f".{job.destination.name}.{os.getpid()}.tmp")
    request = {**job.request, "destination": str(scratch.absolute())}
    try:
        _run_child(request, advanced or (lambda done, of: None))
        check_loadable(read_header(scratch))
        if job.destination.exists():
            raise UsageError(f"{job.destination} was created meanwhile and is never overwritten")
        os.replace(scratch, job.destination)
    except OSError as error:
        raise disk_error(error, job.destination) from None
    finally:
        scratch.unlink(missing_ok=True)
    return read_header(job.destination)


def _run_child(request: dict[str, object], advanced: Callable[[int, int], None]) -> None:
    command = [sys.executable, "-P", "-m", "specllama.backend.quantizer"]
    with subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
    ) as child:
        assert child.stdin is not None
        assert child.stdout is not None
        assert child.stderr is not None
        result: dict[str, object] | None = None
        try:
            child.stdin.write(json.dumps(request) + "\n")
            child.stdin.close()
            for line in child.stdout:
                try:
                    said = json.loads(line)
                except ValueError:
                    continue
                if "tensor" in said:
                    advanced(int(said["tensor"]), int(said["of"]))
                elif "rc" in said:
                    result = said
        except BrokenPipeError:
            pass
        except BaseException:
            child.kill()
            raise
        noise = child.stderr.read().strip().splitlines()
        status = child.wait()
    if result is None or status != 0:
        last = noise[-1][:200] if noise else f"exit status {status}"
        hint = "nothing was written"
        if status == -signal.SIGILL:
            last = "this build of llama.cpp uses an instruction that fails on this processor"
            hint += "; specllama doctor tells how to build it again"
        raise SpecllamaError(f"the quantizer stopped: {last}", hint)
    if result["rc"] != 0:
        reason = str(result.get("error") or "llama.cpp gave no reason")
        raise SpecllamaError(f"the quantizer refused: {reason[:300]}", "nothing was written")
