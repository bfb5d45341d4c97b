"""llama.cpp's own quantizer through the binding: ``python -m specllama.backend.quantizer``.

A bad tensor may end the process, so the command line never calls the quantizer in its own. The
child reads one JSON object from stdin and writes JSON lines: ``{"tensor": i, "of": n}`` and finally
``{"rc": 0}`` or ``{"rc": 1, "error": "…"}``.
"""

from __future__ import annotations

import ctypes
import json
import os
import re
import sys
from pathlib import Path
from typing import Any

from specllama.models.gguf import read_header
from specllama.models.quantization import read_imatrix

# the names people type, and llama.cpp's file types
FILE_TYPES = {
    "f32": 0, "f16": 1, "bf16": 32, "q8_0": 7, "q6_k": 18, "q5_k_m": 17, "q5_k_s": 16, "q5_1": 9,
    "q5_0": 8, "q4_k_m": 15, "q4_k_s": 14, "q4_1": 3, "q4_0": 2, "iq4_nl": 25, "iq4_xs": 30,
    "q3_k_l": 13, "q3_k_m": 12, "q3_k_s": 11, "q2_k": 10, "mxfp4": 38,
}  # fmt: skip
TENSOR_TYPES = {"f32": 0, "f16": 1, "bf16": 30, "q4_0": 2, "q5_1": 7, "q8_0": 8, "q6_k": 14}
# multiplied value by value, which CPUs do in F32 alone: llama.cpp's quantizer knows
# most of them by name and leaves them alone, but not qwen4exp's ple_norm_*
NEVER = rb"norm[a-z_]*\.weight$"
_PROGRESS = re.compile(r"^\[\s*(\d+)/\s*(\d+)\]")


def run(request: dict[str, Any]) -> dict[str, Any]:
    """Quantize as asked; keys as in ``QuantizeJob.request``, and a destination."""
    os.environ.setdefault("GGML_NO_BACKTRACE", "1")
    import llama_cpp

    errors: list[str] = []

    def log(level: int, raw: bytes, _user: object) -> None:
        text = raw.decode("utf-8", "replace")
        match = _PROGRESS.match(text.strip())
        if match:
            say({"tensor": int(match[1]), "of": int(match[2])})
        elif level >= 4 and text.strip():
            errors.append(text.strip())

    callback = llama_cpp.llama_log_callback(log)
    llama_cpp.llama_log_set(callback, ctypes.c_void_p(0))
    params = llama_cpp.llama_model_quantize_default_params()
    params.nthread = int(request["threads"])
    params.allow_requantize = bool(request["requantize"])
    params.pure = bool(request["pure"])
    if request["type"] == "copy":
        params.only_copy = True
    else:
        params.ftype = FILE_TYPES[request["type"]]
    if request.get("output_type"):
        params.output_tensor_type = TENSOR_TYPES[request["output_type"]]
    kept = (llama_cpp.llama_model_tensor_override * 2)((NEVER, TENSOR_TYPES["f32"]))
    params.tt_overrides = ctypes.cast(kept, ctypes.POINTER(llama_cpp.llama_model_tensor_override))
    prune = sorted(set(request.get("prune_layers") or []))
    if prune:
        # llama.cpp takes the first as the smallest, and stops at a negative one
        layers = (ctypes.c_int32 * (len(prune) + 1))(*prune, -1)
        params.prune_layers = ctypes.cast(layers, ctypes.POINTER(ctypes.c_int32))
    if request.get("imatrix"):
        inputs = read_imatrix(Path(request["imatrix"]), read_header(request["source"]))
        pointer = ctypes.POINTER(ctypes.c_float)
        entries = (llama_cpp.llama_model_imatrix_data * (len(inputs) + 1))()  # the last ends them
        for entry, (name, values) in zip(entries, inputs.items(), strict=False):
            entry.name, entry.size = name.encode(), values.size
            entry.data = values.ctypes.data_as(pointer)
        params.imatrix = ctypes.cast(entries, ctypes.POINTER(llama_cpp.llama_model_imatrix_data))
    rc = llama_cpp.llama_model_quantize(
        os.fsencode(request["source"]), os.fsencode(request["destination"]), ctypes.byref(params)
    )
    return {"rc": int(rc), "error": errors[-1] if errors else ""}


def say(value: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(value) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    say(run(json.loads(sys.stdin.readline())))
