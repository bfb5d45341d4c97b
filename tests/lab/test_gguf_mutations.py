"""500 mutated headers of the bundled target: refused in one line, or survived by llama.cpp.

What passes our checks is loaded in a child process, tokenizes, detokenizes its vocabulary and
decodes. A child that dies or hangs is a check that is missing in ``loadable.py``.
"""

from __future__ import annotations

import random
import resource
import select
import struct
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from specllama.errors import SpecllamaError
from specllama.models.gguf import read_header
from specllama.models.loadable import check_loadable
from specllama.models.refs import bundled

CASES = 500
SEED = 20261121
HANG_S = 60
NUMBERS = (
    *range(12), 31, 255, 256, 511, 513, 1000, 65535, 65536, 2**31 - 1, 2**31, 2**32 - 1, 2**32,
    2**62, 2**63, 2**64 - 1,
)  # fmt: skip
FLOATS = (0.0, -1.0, 1e-5, -1e-5, 0.5, 1e38, float("nan"), float("inf"))
SCALARS = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}

CHILD = r"""
import ctypes, os, sys
os.environ["GGML_NO_BACKTRACE"] = "1"
import llama_cpp as L
silent = L.llama_log_callback(lambda level, text, user: None)
L.llama_log_set(silent, ctypes.c_void_p(0))
text = "Hello, what is a draft? \u00e9\u4f60\U0001f600 def f(x): return x\n<|im_end|>".encode()
for line in sys.stdin:
    model = L.llama_model_load_from_file(line.strip().encode(), L.llama_model_default_params())
    if not model:
        print("refused", flush=True)
        continue
    vocab = L.llama_model_get_vocab(model)
    params = L.llama_context_default_params()
    params.n_ctx, params.n_batch, params.n_ubatch, params.n_threads = 256, 64, 64, 1
    params.n_threads_batch, params.flash_attn_type = 1, 0
    context = L.llama_init_from_model(model, params)
    status = "no context"
    if context:
        tokens = (L.llama_token * 256)()
        n = L.llama_tokenize(vocab, text, len(text), tokens, 256, True, True)
        piece = ctypes.create_string_buffer(4096)
        for token in range(L.llama_vocab_n_tokens(vocab)):
            L.llama_token_to_piece(vocab, token, piece, 4096, 0, True)
        if n > 0:
            L.llama_decode(context, L.llama_batch_get_one(tokens, min(n, 60)))
        L.llama_free(context)
        status = "ran"
    L.llama_model_free(model)
    print(status, flush=True)
"""


class Loader:
    """A child that loads files for us; it is started again after it died."""

    def __init__(self, errors: Path) -> None:
        self._errors = errors
        self._child: subprocess.Popen[str] | None = None

    def load(self, path: Path) -> str:
        if self._child is None:
            with self._errors.open("w") as errors:
                self._child = subprocess.Popen(
                    [sys.executable, "-c", CHILD],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=errors,
                    text=True,
                )
        child = self._child
        assert child.stdin is not None
        assert child.stdout is not None
        child.stdin.write(f"{path}\n")
        child.stdin.flush()
        readable, _, _ = select.select([child.stdout], [], [], HANG_S)
        line = child.stdout.readline().strip() if readable else ""
        if line:
            return line
        self.close()
        return "HANG" if not readable else f"DIED: {self._errors.read_text()[-300:]}"

    def close(self) -> None:
        if self._child is not None:
            self._child.kill()
            self._child.wait()
            for stream in (self._child.stdin, self._child.stdout):
                assert stream is not None
                stream.close()
            self._child = None


def fields(data: bytes) -> Iterator[tuple[str, int, int]]:
    """(kind, offset, bytes) of everything in a header that can be set to another value."""
    n_tensors, n_keys = struct.unpack_from("<QQ", data, 8)
    at = 24

    def u64() -> int:
        return int(struct.unpack_from("<Q", data, at)[0])

    for _ in range(n_keys):
        yield "length", at, 8
        yield "name", at + 8, u64()
        at += 8 + u64()
        (kind,) = struct.unpack_from("<I", data, at)
        yield "type", at, 4
        at += 4
        if kind == 8:
            yield "length", at, 8
            yield "text", at + 8, u64()
            at += 8 + u64()
        elif kind == 9:
            element, count = struct.unpack_from("<IQ", data, at)
            yield "type", at, 4
            yield "count", at + 4, 8
            at += 12
            for i in range(count if element == 8 else 0):
                if i % 97 == 0:
                    yield "length", at, 8
                    yield "text", at + 8, u64()
                at += 8 + u64()
            if element != 8:
                yield "text", at, min(count * SCALARS[element], 64)
                at += count * SCALARS[element]
        else:
            yield "value", at, SCALARS[kind]
            at += SCALARS[kind]
    for _ in range(n_tensors):
        yield "length", at, 8
        yield "name", at + 8, u64()
        at += 8 + u64()
        (n_dims,) = struct.unpack_from("<I", data, at)
        yield "count", at, 4
        at += 4
        for _ in range(n_dims):
            yield "value", at, 8
            at += 8
        yield "type", at, 4
        yield "value", at + 4, 8
        at += 12


class Mutator:
    """One random change to a header at a time."""

    def __init__(self, data: bytes, header_bytes: int) -> None:
        self._data = data
        self._end = header_bytes
        found = list(fields(data))
        self._all = found
        self._values = [field for field in found if field[0] == "value" and field[2] <= 8]
        self._types = [field for field in found if field[0] == "type"]

    def mutate(self, rng: random.Random) -> tuple[str, bytes]:
        data = bytearray(self._data)
        kind = rng.choice(
            ["bit", "bits", "cut", "value", "value", "value", "field", "field", "type", "count",
             "swap", "insert"]
        )  # fmt: skip
        if kind in ("bit", "bits"):
            for _ in range(1 if kind == "bit" else rng.randrange(2, 20)):
                data[rng.randrange(self._end)] ^= 1 << rng.randrange(8)
        elif kind == "cut":
            data = data[: rng.choice([rng.randrange(self._end), rng.randrange(len(data))])]
        elif kind == "insert":
            at = rng.randrange(self._end)
            data[at:at] = rng.randbytes(rng.choice([1, 8, 32]))
        elif kind == "count":
            at = rng.choice([8, 16])
            data[at : at + 8] = rng.choice(NUMBERS).to_bytes(8, "little")
        elif kind == "swap":
            (_, a, n), (_, b, m) = rng.sample(self._all, 2)
            size = min(n, m, 8)
            first = bytes(data[a : a + size])
            data[a : a + size] = data[b : b + size]
            data[b : b + size] = first
        else:
            pool = {"value": self._values, "field": self._all, "type": self._types}[kind]
            name, at, size = rng.choice(pool)
            size = max(1, min(size, 8))
            if name == "value" and size == 4 and rng.random() < 0.3:
                data[at : at + 4] = struct.pack("<f", rng.choice(FLOATS))
            else:
                number = rng.choice(NUMBERS) if name != "type" else rng.randrange(48)
                data[at : at + size] = (number % (1 << (8 * size))).to_bytes(size, "little")
        return kind, bytes(data)


@pytest.mark.e2e
def test_500_mutated_headers(tmp_path: Path) -> None:
    source = bundled("tiny-target")
    mutator = Mutator(source.read_bytes(), read_header(source).data_offset)
    loader = Loader(tmp_path / "stderr")
    path = tmp_path / "mutant.gguf"
    outcomes: Counter[str] = Counter()
    slowest = 0.0
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    try:
        for case in range(CASES):
            kind, data = mutator.mutate(random.Random(SEED + case))
            path.unlink(missing_ok=True)  # never overwrite a file that may be mapped
            path.write_bytes(data)
            started = time.process_time()
            try:
                check_loadable(read_header(path))
            except SpecllamaError as error:
                good = error.exit_code in (3, 5) and "\n" not in error.message
                outcome = "refused by us" if good else f"bad refusal: {error.message}"
            else:
                outcome = loader.load(path)
            slowest = max(slowest, time.process_time() - started)
            assert not outcome.startswith(("DIED", "HANG", "bad")), (
                f"case {case} ({kind}): {outcome}"
            )
            outcomes[outcome] += 1
    finally:
        loader.close()
    assert sum(outcomes.values()) == CASES
    assert outcomes["refused by us"] > CASES / 2
    assert outcomes["ran"] > CASES / 20  # mutations that do no harm must stay usable
    assert slowest < 5
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert grown < 200 * 1024  # kB
