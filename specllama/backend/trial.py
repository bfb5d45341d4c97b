"""A trial of llama.cpp's build on this machine, in a process that may die.

A compiler may drop what a processor needs, a wheel may be made for another one: then some
instruction ends the process, at once or at the first pass of several rows. The process that tries
computes with every type of tensor in both layouts of the weights, from a file that is written for
it. One that dies costs a fallback: weights stay as stored, without the processor's own layouts. If
that dies, too, nothing is loaded. Either is remembered for this build and this machine.
"""

from __future__ import annotations

import ctypes
import logging
import math
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import msgspec

from specllama import kernels as own_kernels
from specllama.backend import devices, verdicts
from specllama.errors import CannotLoad
from specllama.paths import scratch

logger = logging.getLogger("specllama.backend.trial")

SCHEMA = "specllama.trials.v1"
KERNELS = "specllama.kernels.v1"
TRYING = Path(__file__).with_name("trying.py")
PATIENCE_S = 120.0
_FAULTS = frozenset({signal.SIGILL, signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGABRT,
                     signal.SIGTRAP, signal.SIGSYS})  # fmt: skip
_LATER = "a model is computed with weights repacked"  # after a trial that went well
LATER = (
    "this build of llama.cpp died of an instruction that fails on this processor (SIGILL): weights "
    "stay as stored from now on; specllama doctor tells how to build it again"
)
_WIDTH = 256  # of the small model: the fewest values that every type has whole blocks for
_NOT_WEIGHTS = frozenset({"F32", "F64", "I8", "I16", "I32", "I64", "Q8_1", "Q8_K"})


class Ended(msgspec.Struct, frozen=True):
    """The end of a process that computed with this build here.

    Attributes:
        died: of which signal, "" if it did not.
        step: what it was about to do then.
        stored: one that leaves weights as they are stored lives.
    """

    died: str = ""
    step: str = ""
    stored: bool = True

    @property
    def said(self) -> str:
        """The consequence, in words; "" if there is none."""
        if not self.died:
            return ""
        what = f"this build of llama.cpp dies of {self.died} on this processor when {self.step}"
        if not self.stored:
            return what
        return f"{what}: weights stay as stored, which reads prompts slower"


class OwnKernels(msgspec.Struct, frozen=True):
    """The kernels of our own that can be used here.

    Attributes:
        name: their instruction set, "" if llama.cpp's compute.
        why: the reason for that.
    """

    name: str = ""
    why: str = ""


_lock = threading.RLock()
_known: dict[bytes, Ended] = {}  # by what they belong to
_checked: dict[bytes, OwnKernels] = {}
_untold: list[str] = []


def repacks() -> bool:
    """True if weights may be laid out for this processor.

    Raises:
        CannotLoad: see ``require``.
    """
    return not require().died


def require(*, anew: bool = False) -> Ended:
    """Return the facts about this build on this machine; try it if it was never tried.

    Args:
        anew: try again what died before.

    Raises:
        CannotLoad: llama.cpp cannot be imported here, or cannot compute.
    """
    key = _key()
    text = msgspec.json.encode(key)
    with _lock:
        found = _known.get(text) or verdicts.known(SCHEMA, key, Ended)
        if found is None or (anew and found.died and found.step != _LATER):
            found = _tried()
            if found is not None and found.died != "SIGABRT":  # that may be for want of memory
                verdicts.keep(SCHEMA, key, found)
            if found is not None and found.died and found.stored:
                _untold.append(f"{found.said}; {mend()}")
        _known[text] = found = found or Ended()
    if not found.stored:
        raise CannotLoad(found.said, mend())
    try:
        devices.ggml("ggml_backend_dev_count", ctypes.c_size_t)  # imports it
    except Exception as error:
        why = str(error).rpartition("': ")[2] or str(error)  # the binding's words
        hint = f"free some memory (ulimit -v shows a limit), or build it again: {mend(short=True)}"
        raise CannotLoad(f"llama.cpp cannot be loaded: {why}", hint) from None
    return found


def kernels() -> OwnKernels:
    """Return our own kernels for this build on this machine. A process that may die checks them
    once, bit for bit."""
    if why := own_kernels.missing():
        return OwnKernels(why=why)
    stat = own_kernels.LIBRARY.stat()
    key = {**_key(), "kernels": [stat.st_size, stat.st_mtime_ns]}
    text = msgspec.json.encode(key)
    with _lock:
        found = _checked.get(text) or verdicts.known(KERNELS, key, OwnKernels)
        if found is None:
            found = _check_kernels()
            if "SIGABRT" not in found.why:  # that may be for want of memory
                verdicts.keep(KERNELS, key, found)
            if not found.name:
                _untold.append(f"specllama's own CPU kernels are off: {found.why}")
        _checked[text] = found
    return found


def _check_kernels() -> OwnKernels:
    """Return the result of a process that compares our kernels with their scalar reference."""
    try:
        with scratch("trial-kernels") as folder:
            died, steps = _ended(folder, "-P", "-m", "specllama.kernels.check")
    except (OSError, subprocess.SubprocessError) as error:
        return OwnKernels(why=f"they could not be checked: {error}")
    last = steps[-1] if steps else "nothing was logged"
    word, _, rest = last.partition(": ")
    if word == "alike":
        return OwnKernels(rest)
    if word in ("none", "different"):
        wrong = f"their results are wrong here ({steps[-2:][0]})"
        return OwnKernels(why=rest if word == "none" else wrong)
    return OwnKernels(why=f"their check ended {f'by {died} ' if died else ''}here: {last}")


def distrust(died: str) -> bool:
    """Remember that a process died though the trial went well, unless that is known: the next one
    leaves weights as stored. Return True if that is new."""
    key = _key()
    before = verdicts.known(SCHEMA, key, Ended)
    new = before is None or not before.died
    if new:
        verdicts.keep(SCHEMA, key, Ended(died, _LATER))
    return new


def untold() -> list[str]:
    """Return the results of this process's trials, once."""
    said = _untold[:]
    _untold.clear()
    return said


def mend(*, short: bool = False) -> str:
    """Return the steps to build llama.cpp so that it runs on this processor."""
    command = devices.build_command(cxxflags=_cxxflags())
    return command if short else f"build it for this processor: {command}"


def mend_each() -> str:
    """Return the same, and the command for the next installation of specllama."""
    if not (flags := _cxxflags()):
        return mend()
    tools = "uv tool install, pipx install or pip install"
    return f'{mend()}; later, too, write CXXFLAGS="{flags}" before {tools} without a cache'


def _cxxflags() -> str:
    """Return flags that keep the stores of this processor's tiles: some compilers drop them."""
    tiles = "amx_tile" in devices.cpu_features().split()
    return "-fno-dse -fno-tree-dse" if tiles else ""


def _key() -> dict[str, Any]:
    """Name the build and the machine; llama.cpp is not imported for that."""
    return {
        "build": devices.library_files(),
        "machine": [devices.cpu_name(), devices.cpu_features()],
    }


def _tried() -> Ended | None:
    """Return the end of a process that tries this build; None if it is unknown."""
    with scratch("trial") as folder:
        model = folder / "every-type.gguf"
        try:
            _write(model)
            died, steps = _run(folder, model, "as stored", "repacked")
            if not died:
                return Ended() if steps[-1:] == ["nothing is left"] else None
            if "repacked" in steps[-1]:
                return Ended(died, steps[-1])
            # types that no file here may have were tried as well
            from specllama.models.refs import bundled

            again, other = _run(folder, bundled("tiny-target"), "as stored")
        except (OSError, subprocess.SubprocessError) as error:
            logger.warning("this build of llama.cpp could not be tried: %s", error)
            return None
        return Ended(again, other[-1], stored=False) if again else Ended(died, steps[-1])


def _run(folder: Path, model: Path, *layouts: str) -> tuple[str, list[str]]:
    """Try some layouts in a process of their own in a folder, which gets its core dump; return the
    signal of which it died, "" if it did not, and the steps that it began."""
    return _ended(folder, "-P", str(TRYING), str(model), *layouts)


def _ended(folder: Path, *arguments: str) -> tuple[str, list[str]]:
    """Run Python in a folder; return the signal of which it died, "" if it did not, and its
    lines."""
    command = [sys.executable or "python3", *arguments]
    ended = subprocess.run(
        command, cwd=folder, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL, timeout=PATIENCE_S,
    )  # fmt: skip
    steps = ended.stdout.decode("utf-8", "replace").splitlines()
    code = -ended.returncode
    return (signal.Signals(code).name if code in _FAULTS and steps else ""), steps


def _write(path: Path) -> None:
    """Write a model of zeros with a layer for each type of tensor, in products of all rows
    (attention) and of chosen ones (experts)."""
    import numpy as np

    from specllama.models.ggml_types import TENSOR_TYPES
    from specllama.models.gguf_writer import Blocks, write_gguf

    types = {kind.name: kind for kind in TENSOR_TYPES.values() if kind.name not in _NOT_WEIGHTS}
    ones = np.ones(_WIDTH, np.float32), "F32"

    def zeros(name: str, *shape: int) -> tuple[Blocks, str]:
        n_bytes = math.prod(shape) // types[name].block * types[name].size
        return Blocks(shape, lambda: bytes(n_bytes)), name

    tensors: dict[str, Any] = {
        "token_embd.weight": zeros("F16", _WIDTH, _WIDTH),
        "output_norm.weight": ones,
    }
    for layer, name in enumerate(types):
        block = f"blk.{layer}."
        tensors[f"{block}attn_norm.weight"] = tensors[f"{block}ffn_norm.weight"] = ones
        tensors[f"{block}ffn_gate_inp.weight"] = np.zeros((2, _WIDTH), np.float32), "F32"
        for matrix in ("q", "k", "v", "output"):
            tensors[f"{block}attn_{matrix}.weight"] = zeros(name, _WIDTH, _WIDTH)
        for matrix in ("gate", "up", "down"):
            tensors[f"{block}ffn_{matrix}_exps.weight"] = zeros(name, 2, _WIDTH, _WIDTH)
    sizes = {
        "vocab_size": _WIDTH, "context_length": _WIDTH, "embedding_length": _WIDTH,
        "feed_forward_length": _WIDTH, "rope.dimension_count": 64, "attention.head_count": 4,
        "attention.layer_norm_rms_epsilon": 1e-5, "block_count": len(types), "expert_count": 2,
        "expert_used_count": 1,
    }  # fmt: skip
    metadata = {"general.architecture": "llama", "tokenizer.ggml.model": "no_vocab"}
    write_gguf(path, metadata | {f"llama.{key}": size for key, size in sizes.items()}, tensors)
