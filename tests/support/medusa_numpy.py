"""Medusa's mathematics in numpy, by which what the product computes is judged.

    head d      x <- x + SiLU(W x + b) for every residual block, then (optionally) a square matrix
                in front of the target's own output matrix, or an output matrix of its own
    depth       head d guesses the token d places after the pending one, from the hidden state
                that the pending token was drawn from; it never sees the tokens between

Source: Cai et al. 2024 (Medusa).
"""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from specllama.arrays import IntArray, Rows
from specllama.models.gguf import GgufHeader, read_header
from specllama.models.medusa_file import (
    MedusaFacts,
    check_target,
    output_name,
    read_facts,
    read_output_ids,
)
from specllama.models.tensors import read_tensor

Matrix = npt.NDArray[np.float32]  # [out, in]
Vector = npt.NDArray[np.float32]


@dataclass(frozen=True)
class MedusaHead:
    """One head. ``width`` is the target's hidden width.

    ``blocks`` are (weight [width, width], bias [width]); ``proj`` [width, width] and ``output``
    [rows, width] may be missing: then the identity and the shared output matrix stand for them.
    """

    blocks: tuple[tuple[Matrix, Vector], ...]
    proj: Matrix | None = None
    output: Matrix | None = None

    def state(self, hidden: Rows) -> Rows:
        """What the output matrix reads: [..., width] from [..., width]."""
        x = hidden
        for weight, bias in self.blocks:
            x = x + silu(x @ weight.T + bias)
        return x if self.proj is None else x @ self.proj.T


@dataclass(frozen=True)
class Heads:
    """All heads of a file, in float32.

    Attributes:
        heads: head d (from 1) is ``heads[d - 1]``.
        output: the matrix that heads without one of their own share [rows, width].
        ids: the token of each output row; None where row r is token r.
        n_vocab: tokens of the target.
    """

    heads: tuple[MedusaHead, ...]
    output: Matrix | None
    ids: IntArray | None
    n_vocab: int

    def __len__(self) -> int:
        return len(self.heads)

    def close(self) -> None:
        pass

    def logits(self, hidden: Rows, depth: int) -> Rows:
        """Logits [..., n_vocab] of head ``depth`` (from 1) on states [..., width]; -inf for tokens
        it cannot say."""
        head = self.heads[depth - 1]
        matrix = self.output if head.output is None else head.output
        if matrix is None:
            raise ValueError("a head without an output matrix")
        said: Rows = head.state(hidden) @ matrix.T
        if self.ids is None:
            return said
        rows: Rows = np.full((*hidden.shape[:-1], self.n_vocab), -np.inf, np.float32)
        rows[..., self.ids] = said
        return rows


def silu(x: Rows) -> Rows:
    """x times its logistic function; no overflow warning for large negative values."""
    one = np.float32(1.0)
    out: Rows = np.divide(x, one + np.exp(-np.maximum(x, np.float32(-80.0))), dtype=np.float32)
    return out


def load_heads(path: Path, target: GgufHeader) -> Heads:
    """The heads of a file, as float32.

    Heads without an output matrix share that of the target, which is then read from its file.

    Raises:
        PairIncompatible: not Medusa heads, or heads of another target.
        BadGguf, UnsupportedModel: damaged, or in types that are not decoded here.
    """
    header = read_header(path)
    facts = read_facts(header)
    check_target(facts, header, target)
    ids = read_output_ids(header, facts)
    return Heads(
        heads=tuple(_head(header, facts, h) for h in range(facts.heads)),
        output=read_tensor(target, output_name(target))[slice(None) if ids is None else ids]
        if facts.needs_target_output
        else None,
        ids=ids,
        n_vocab=facts.vocab,
    )


def _head(header: GgufHeader, facts: MedusaFacts, h: int) -> MedusaHead:
    def tensor(name: str) -> np.ndarray[tuple[int, ...], np.dtype[np.float32]] | None:
        full = f"head.{h}.{name}"
        return read_tensor(header, full) if full in header.by_name else None

    blocks = tuple(
        (
            read_tensor(header, f"head.{h}.block.{b}.weight"),
            read_tensor(header, f"head.{h}.block.{b}.bias"),
        )
        for b in range(facts.blocks)
    )
    return MedusaHead(blocks, tensor("proj.weight"), tensor("output.weight"))
