"""A deterministic table model: no weights, exact arithmetic, the same protocol as llama.cpp.

Logits are a hash of the last few tokens, so every context row is reproducible and independent of
how the pass was cut. A draft is the same table plus noise: ``agreement`` 1 copies the target, 0 is
unrelated. Rows handed out are poisoned by the next pass, as llama.cpp reuses its buffer.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from specllama.backend.base import Outputs, SpecialToken
from specllama.backend.hidden import HiddenRows
from specllama.cancel import StopFlag
from specllama.errors import Cancelled, ContextFull, EngineError
from specllama.interface import EngineInfo, ModelInfo
from specllama.speculative.tree import layout
from specllama.speculative.types import HiddenNeed, Row, Rows

_EOG = 0
_WIDTH = 8  # of a hidden state


class FakeVocab:
    """Token 0 ends a turn; token t > 0 is one character from a fixed alphabet."""

    def __init__(self, n_tokens: int = 64, alphabet: str | None = None) -> None:
        self._n = n_tokens
        letters = (
            alphabet or "etaoin shrdlucmfwypvbgkqjxz.,;:!?'-ETAOINSHRDLUCMFWYPVBGKQJXZ0123456789"
        )
        self._letters = (letters * (n_tokens // len(letters) + 1))[: n_tokens - 1]

    @property
    def n_tokens(self) -> int:
        return self._n

    @property
    def adds_bos(self) -> bool:
        return False

    @property
    def specials(self) -> Sequence[SpecialToken]:
        return ()

    def special(self, token: int) -> SpecialToken | None:
        return None

    def tokenize(
        self, text: str, *, add_special: bool, parse_special: bool, after_text: bool = False
    ) -> list[int]:
        return [1 + max(self._letters.find(c), 0) for c in text]

    def piece(self, token: int, *, special: bool = False) -> bytes:
        if not 0 <= token < self._n:
            raise EngineError(f"token {token} is outside the vocabulary of {self._n}")
        if token == _EOG:
            return b"<end>" if special else b""
        return self._letters[token - 1].encode()

    def is_eog(self, token: int) -> bool:
        return token == _EOG


class FakeTable:
    """Logits as a pure function of the last ``order`` tokens.

    Args:
        sharpness: scale of the logits; larger is more predictable.
        agreement: for drafts, weight of the table ``of`` in the mixture.
    """

    def __init__(
        self,
        n_vocab: int = 64,
        *,
        seed: int = 0,
        order: int = 2,
        sharpness: float = 3.0,
        eog_bias: float = 0.0,
        of: FakeTable | None = None,
        agreement: float = 1.0,
    ) -> None:
        self.n_vocab = n_vocab
        self._seed = seed
        self._order = order
        self._sharpness = sharpness
        self._eog_bias = eog_bias
        self._of = of
        self._agreement = agreement
        self._cache: dict[tuple[int, ...], Row] = {}

    def row(self, tokens: Sequence[int]) -> Row:
        key = tuple(tokens[-self._order :])
        found = self._cache.get(key)
        if found is None:
            rng = np.random.default_rng((self._seed, *key))
            found = (rng.standard_normal(self.n_vocab) * self._sharpness).astype(np.float32)
            if self._of is not None:
                a = np.float32(self._agreement)
                found = a * self._of.row(tokens)[: self.n_vocab] + (1 - a) * found
            else:
                found[_EOG] += self._eog_bias
            self._cache[key] = found
        return found


class FakeContext:
    """A KV cache that is a list; refuses everything llama.cpp would refuse or abort on."""

    def __init__(
        self,
        table: FakeTable,
        *,
        n_ctx: int = 512,
        max_rows: int = 65,
        n_batch: int = 512,
        max_leaves: int = 16,
        stop: StopFlag | None = None,
    ) -> None:
        self._table = table
        self._n_ctx = n_ctx
        self._max_rows = max_rows
        self._n_batch = n_batch
        self._max_leaves = max_leaves
        self._stop = stop or StopFlag()
        self._tokens: list[int] = []
        self._tree: tuple[int, list[int], list[int]] | None = None
        self._handed_out: Rows | None = None
        self._need: HiddenNeed = "nothing"
        self.hidden = HiddenRows()
        self.passes: list[int] = []
        self.closed = False

    @property
    def n_ctx(self) -> int:
        return self._n_ctx

    @property
    def n_vocab(self) -> int:
        return self._table.n_vocab

    @property
    def n_batch(self) -> int:
        return self._n_batch

    @property
    def max_rows(self) -> int:
        return self._max_rows

    @property
    def max_leaves(self) -> int:
        return self._max_leaves

    @property
    def tokens(self) -> list[int]:
        return self._tokens

    @property
    def n_past(self) -> int:
        if self.closed:
            raise EngineError("the context is closed")
        return len(self._tokens)

    def forward(
        self, tokens: Sequence[int], *, outputs: Outputs, parents: Sequence[int] | None = None
    ) -> Rows:
        n = len(tokens)
        if self.closed:
            raise EngineError("the context is closed")
        if self._stop.is_set():
            raise Cancelled("the pass was cancelled")
        if not 0 < n <= self._n_batch:
            raise ValueError(f"a pass takes 1 to {self._n_batch} tokens, got {n}")
        if outputs == "all" and n > self._max_rows:
            raise ValueError(f"a pass returns at most {self._max_rows} rows, got {n}")
        if len(self._tokens) + n > self._n_ctx:
            raise ContextFull(f"the context of {self._n_ctx} tokens is full")
        if any(not 0 <= t < self.n_vocab for t in tokens):
            raise EngineError(f"a token is outside the vocabulary of {self.n_vocab}")
        if self._tree is not None:
            raise EngineError("a tree pass must be settled with keep_path")
        if self._handed_out is not None:
            self._handed_out.fill(np.nan)
        above = list(range(-1, n - 1)) if parents is None else list(parents)
        if parents is not None and layout(above).n_leaves > self._max_leaves:
            raise ValueError(f"a tree has at most {self._max_leaves} leaves")
        paths: list[list[int]] = []
        for token, parent in zip(tokens, above, strict=True):
            paths.append([*(paths[parent] if parent >= 0 else self._tokens), int(token)])
        if parents is None:
            self._tokens = paths[-1]
        else:
            self._tree = (len(self._tokens), [int(t) for t in tokens], above)
        self.passes.append(n)
        given = len(paths) if outputs == "all" else int(outputs == "last")
        if self._need != "final_hidden":
            given = len(paths) if self._need != "nothing" else 0
        if given:
            states = np.array([self._table.row(p)[:_WIDTH] for p in paths[-given:]], np.float32)
            self.hidden.add(len(paths[0]) - 1 + len(paths) - given, states)
        wanted = paths if outputs == "all" else paths[-1:] if outputs == "last" else []
        rows = np.array([self._table.row(p) for p in wanted], np.float32)
        self._handed_out = rows.reshape(len(wanted), self.n_vocab)
        return self._handed_out

    def keep_path(self, path: Sequence[int]) -> None:
        if self._tree is None:
            raise EngineError("there is no tree pass to settle")
        _, tokens, above = self._tree
        before = -1
        for node in path:
            if above[node] != before:
                raise ValueError("not a path from the root of the tree")
            before = node
        self.hidden.keep_path(len(self._tokens), path)
        self._tokens = self._tokens + [tokens[i] for i in path]
        self._tree = None

    def capture(self, need: HiddenNeed) -> None:
        """A state is the first logits of its row: whoever reads it can be checked against them."""
        if need != self._need:
            self._need = need
            self.hidden.clear()

    def rollback(self, keep_len: int) -> None:
        if self.closed:
            raise EngineError("the context is closed")
        if self._tree is not None:
            self.keep_path(())
        if not 0 <= keep_len <= len(self._tokens):
            raise ValueError(f"cannot roll back to {keep_len} of {len(self._tokens)} tokens")
        del self._tokens[keep_len:]
        self.hidden.cut(keep_len)

    def close(self) -> None:
        self.closed = True


def fake_info(n_ctx: int = 512, n_vocab: int = 64, *, exact_rows: int = 65) -> EngineInfo:
    """What an engine over fake contexts says of itself."""
    model = ModelInfo(
        path="fake",
        name="fake table",
        architecture="table",
        quantization="exact",
        n_params=0,
        file_bytes=0,
        n_ctx=n_ctx,
        n_ctx_train=n_ctx,
        n_vocab=n_vocab,
        kv_bytes=0,
        gpu_layers=0,
    )
    return EngineInfo(
        target=model,
        draft=model,
        exactness=f"bitwise up to {exact_rows} rows",
        exact_rows=exact_rows,
        device="CPU",
        threads=1,
        flash_attn=False,
        load_ms=0.0,
        has_chat_template=False,
        exact_trees=exact_rows > 1,
    )
