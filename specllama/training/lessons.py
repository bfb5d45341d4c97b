"""Lessons for a head: texts of a target with its states and laws, as tensors side by side.

Also the acceptance of its guesses in them, as chains of guesses would be accepted.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from specllama.arrays import IntArray
from specllama.backend.embedding import decode
from specllama.models.gguf import GgufHeader
from specllama.models.tensors import read_tensor
from specllama.models.trimmed import TABLE
from specllama.models.words import rows_of
from specllama.training.head_file import last_norm

if TYPE_CHECKING:
    from specllama.training.features import Features

CHAIN = 3  # guesses of the chains of which tokens a pass are counted


class Lesson(NamedTuple):
    """Texts side by side, [batch, n, …]: at a place, a state of the target and the next token.

    Attributes:
        embedded: of the token after each place. features: the states that the head fuses, which is
            the last one where there are no others.
        states: [batch, n + 1, width] the target's last state at each token, before its last norm.
        judged: places whose guess is a token of the reply.
        index, p: the target's law for that guess: rows of the head's output, and probabilities.
        best: the row of the likeliest token; -1 if it has none. follows: it is the text's.
    """

    embedded: Tensor
    features: Tensor
    states: Tensor
    judged: Tensor
    index: Tensor
    p: Tensor
    best: Tensor
    follows: Tensor

    def to(self, device: torch.device) -> Lesson:
        return Lesson(*(part.to(device) for part in self))


class TargetFacts:
    """A target as its heads see it: embeddings, the norm before its output, and the output.

    Args:
        words: the tokens that a head may guess, ascending.

    Raises:
        UnsupportedModel: of a kind that has no such norm.
        CannotLoad: this build of llama.cpp does not decode a matrix.
    """

    def __init__(self, header: GgufHeader, words: IntArray) -> None:
        self.header, self.words = header, words
        self.width = header.embedding_length
        self._row = np.full(header.vocab_size, -1, np.int64)
        self._row[words] = np.arange(len(words))
        self.norm = torch.tensor(read_tensor(header, last_norm(header)))

    def embed(self, tokens: npt.NDArray[np.int32]) -> Tensor:
        """Return the embeddings of tokens [n]."""
        some, place = np.unique(tokens, return_inverse=True)
        return self._rows(TABLE, some.astype(np.int32))[torch.from_numpy(place)]

    def output(self) -> Tensor:
        """Return the rows of the target's output matrix of all ``words``."""
        tied = "output.weight" not in self.header.by_name
        return self._rows(TABLE if tied else "output.weight", self.words)

    def _rows(self, name: str, rows: IntArray) -> Tensor:
        info = self.header.by_name[name]
        packed = np.frombuffer(rows_of(self.header, info, rows).make(), np.uint8)
        into = np.empty((len(rows), self.width), np.float32)
        decode(packed, info.type, into)
        return torch.from_numpy(into)

    def lesson(self, texts: Sequence[Features]) -> Lesson:
        """Lay texts side by side, each at the start of a row."""
        b, n, likeliest = len(texts), max(len(t.tokens) for t in texts) - 1, texts[0].top_ids
        top = (b, n, likeliest.shape[1])
        tokens = np.zeros((b, n), np.int32)
        features = torch.zeros(b, n, texts[0].inputs.shape[1] or self.width)
        final = torch.zeros(b, n + 1, self.width)
        judged, follows = np.zeros((2, b, n), bool)
        ids, p = np.zeros(top, np.int32), np.zeros(top, np.float32)
        for row, text in enumerate(texts):
            m = len(text.tokens) - 1
            tokens[row, :m] = text.tokens[1:]
            features[row, :m] = torch.tensor((text.inputs if text.inputs.size else text.final)[:m])
            ids[row, :m], p[row, :m] = text.top_ids[1:], text.top_p[1:]
            follows[row, : m - 1] = text.tokens[2:] == text.top_ids[1:m, 0]
            judged[row, max(text.reply_from - 2, 0) : m - 1] = True
            final[row, : m + 1] = torch.tensor(text.final) / self.norm
        index = self._row[ids]
        p[index < 0] = 0
        return Lesson(
            self.embed(tokens.ravel()).view(b, n, -1), features, final,
            torch.from_numpy(judged), torch.from_numpy(index).clamp_(min=0),
            torch.from_numpy(p), torch.from_numpy(index[..., 0]), torch.from_numpy(follows),
        )  # fmt: skip


class ChainCount:
    """Counts over texts: right guesses by position, and passes of chains."""

    def __init__(self, steps: int) -> None:
        self._right = torch.zeros(steps, dtype=torch.int64)
        self._asked = torch.zeros(steps, dtype=torch.int64)
        self._tokens = self._passes = 0

    def add(self, right: Tensor, follows: Tensor, judged: Tensor) -> None:
        """Count a batch.

        Args:
            right: [steps, batch, n] the guess of step k at a place (whose chain began k places
                before) is the likeliest token.
            follows: [batch, n] the text goes on with it. judged: [batch, n] places of replies.
        """
        right, follows, judged = right.cpu(), follows.cpu(), judged.cpu()  # where the counts are
        alive = judged.clone()
        kept = torch.zeros_like(judged, dtype=torch.int64)  # guesses of a chain, at its begin
        for k in range(len(right)):
            here, asked = ahead(right[k], k), alive & ahead(judged, k)
            good = asked & here
            self._asked[k] += asked.sum()
            self._right[k] += good.sum()
            if k < CHAIN:
                kept += good
            # beyond another token than the likeliest, the text is not what a chain would meet
            alive = good & ahead(follows, k)
        for row, places in zip(kept, judged, strict=True):
            found = places.nonzero()[:, 0].tolist()
            if not found:
                continue
            at, end, by = found[0], found[-1], row.tolist()
            while at <= end:
                emitted = min(by[at] + 1, end + 1 - at)
                self._tokens += emitted
                self._passes += 1
                at += emitted

    @property
    def right(self) -> tuple[float, ...]:
        """The share of right guesses of each step, given that those before it were right."""
        return tuple((self._right / self._asked.clamp(min=1)).tolist())

    @property
    def per_pass(self) -> float:
        return self._tokens / max(self._passes, 1)


def ahead(x: Tensor, by: int) -> Tensor:
    """Give each place of [batch, n] the value ``by`` places further on; False beyond the end."""
    out = torch.zeros_like(x)
    out[:, : x.shape[1] - by] = x[:, by:]
    return out
