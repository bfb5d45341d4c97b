"""A minimal runner over llama.cpp's low-level API, for scoring the family.

Greedy decoding, per-token losses, and the share of draft guesses that the target would accept.
It is written to be read, not to be fast: the project's engine does the real work.
"""

from __future__ import annotations

import ctypes
import logging
import os
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

import numpy as np
from numpy.typing import NDArray

os.environ.setdefault("GGML_NO_BACKTRACE", "1")

# The variable above must be set before this.
import llama_cpp

Logits = NDArray[np.float32]


# The binding prints llama.cpp's log unless it is told not to; a log of somebody else's goes on.
logging.getLogger("llama-cpp-python").setLevel(logging.CRITICAL + 1)


class Runner:
    """One model with one context; a context manager."""

    def __init__(self, path: Path, *, context: int = 2048, threads: int = 2) -> None:
        llama_cpp.llama_backend_init()
        mp = llama_cpp.llama_model_default_params()
        mp.n_gpu_layers = 0
        self.model = llama_cpp.llama_model_load_from_file(str(path).encode(), mp)
        if not self.model:
            raise RuntimeError(f"cannot load {path}")
        cp = llama_cpp.llama_context_default_params()
        cp.n_ctx = cp.n_batch = context
        cp.n_ubatch = 512
        cp.n_threads = cp.n_threads_batch = threads
        cp.flash_attn_type = llama_cpp.LLAMA_FLASH_ATTN_TYPE_DISABLED
        self.ctx = llama_cpp.llama_init_from_model(self.model, cp)
        if not self.ctx:
            raise RuntimeError(f"cannot make a context for {path}")
        self.context = context
        self.vocab = llama_cpp.llama_model_get_vocab(self.model)
        self.n_vocab = llama_cpp.llama_vocab_n_tokens(self.vocab)
        self.memory = llama_cpp.llama_get_memory(self.ctx)
        self.batch = llama_cpp.llama_batch_init(context, 0, 1)
        self.length = 0

    def __enter__(self) -> Runner:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        llama_cpp.llama_batch_free(self.batch)
        llama_cpp.llama_free(self.ctx)
        llama_cpp.llama_model_free(self.model)

    def tokenize(self, text: str) -> list[int]:
        """Return the token ids of a text; special tokens are recognized."""
        data = text.encode()
        buffer = (llama_cpp.llama_token * (len(data) + 8))()
        n = llama_cpp.llama_tokenize(self.vocab, data, len(data), buffer, len(buffer), False, True)
        return list(buffer[:n])

    def text(self, tokens: Sequence[int]) -> str:
        """Return the text of tokens; special tokens are shown."""
        out = b""
        buffer = ctypes.create_string_buffer(256)
        for t in tokens:
            n = llama_cpp.llama_token_to_piece(self.vocab, t, buffer, 256, 0, True)
            out += buffer.raw[:n]
        return out.decode(errors="replace")

    def is_end(self, token: int) -> bool:
        """True if the token ends an answer."""
        return bool(llama_cpp.llama_vocab_is_eog(self.vocab, token))

    def forward(self, tokens: Sequence[int], *, every: bool = False) -> Logits:
        """Append tokens; the logits of the last one, or of all (rows)."""
        n = len(tokens)
        b = self.batch
        b.n_tokens = n
        for i, t in enumerate(tokens):
            b.token[i] = t
            b.pos[i] = self.length + i
            b.n_seq_id[i] = 1
            b.seq_id[i][0] = 0
            b.logits[i] = 1 if every or i == n - 1 else 0
        if llama_cpp.llama_decode(self.ctx, b) != 0:
            raise RuntimeError("decoding failed")
        self.length += n
        rows = range(n) if every else range(n - 1, n)
        out = np.empty((len(rows), self.n_vocab), np.float32)
        for i, row in enumerate(rows):
            pointer = llama_cpp.llama_get_logits_ith(self.ctx, row)
            out[i] = np.ctypeslib.as_array(pointer, (self.n_vocab,))
        return out

    def rollback(self, length: int) -> None:
        """Forget everything from position `length` on."""
        if length < self.length:
            if not llama_cpp.llama_memory_seq_rm(self.memory, 0, length, -1):
                raise RuntimeError("rollback refused")
            self.length = length

    def generate(
        self, prompt: Sequence[int], limit: int = 400, temperature: float = 0.0, seed: int = 0
    ) -> list[int]:
        """Decode until an end mark, greedily or with common noise; the mark is left out."""
        self.rollback(0)
        row = self.forward(prompt)[0]
        out: list[int] = []
        while len(out) < limit and self.length < self.context:
            token = choose(row, temperature, seed, len(prompt) + len(out))
            if self.is_end(token):
                break
            out.append(token)
            row = self.forward([token])[0]
        return out


def noise(seed: int, position: int, vocab: int) -> NDArray[np.float64]:
    """Return exponential noise as a pure function of seed, absolute position and token."""
    with np.errstate(over="ignore"):
        x = np.arange(vocab, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        x += np.uint64(seed) * np.uint64(0xBF58476D1CE4E5B9)
        x += np.uint64(position) * np.uint64(0x94D049BB133111EB)
        x ^= x >> np.uint64(30)
        x *= np.uint64(0xBF58476D1CE4E5B9)
        x ^= x >> np.uint64(27)
        x *= np.uint64(0x94D049BB133111EB)
        x ^= x >> np.uint64(31)
    uniform = ((x >> np.uint64(11)).astype(np.float64) + 0.5) * 2.0**-53
    result: NDArray[np.float64] = -np.log(uniform)
    return result


def choose(row: Logits, temperature: float, seed: int, position: int) -> int:
    """Choose the likeliest token at temperature 0, else the winner under common noise."""
    if temperature <= 0:
        return int(row.argmax())
    return int((row / temperature - np.log(noise(seed, position, len(row)))).argmax())


def log_softmax(rows: Logits) -> NDArray[np.float64]:
    """Return the logarithms of the probabilities, row by row."""
    x = rows.astype(np.float64)
    x -= x.max(axis=-1, keepdims=True)
    result: NDArray[np.float64] = x - np.log(np.exp(x).sum(axis=-1, keepdims=True))
    return result
