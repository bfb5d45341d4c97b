"""The features that a head learns from: states and laws of the target, at each token of a reply.

They come from the passes of the engine's own pool: the inputs of some layers, the state after the
last norm, and the likeliest tokens under the plain softmax of the logits. Numbers are kept in 16
bits, which is all that is lost.

    writing   passes that write a reply give its features as well (``writing``)
    reading   a reply whose features are gone is read again, in passes of ``rows`` tokens; where
              passes of this width are bitwise like single steps, so are the features
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Sequence
from contextlib import closing
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from specllama.arrays import FINAL, IntArray, Rows
from specllama.backend.base import Lane, OpenedPair, Part
from specllama.engine.opening import OpeningPair
from specllama.engine.pair_loading import SamplerChains
from specllama.engine.prompting import Prompting
from specllama.errors import DoesNotFit
from specllama.interface import Closes
from specllama.models.gguf import GgufHeader
from specllama.settings.params import EngineOptions
from specllama.speculative.selection import Peaks
from specllama.training.corpus import Sample
from specllama.training.head_file import layers_read

TOP = 64  # tokens of a law that are kept
KEPT = 256  # tokens of a prompt, its last ones
PARTS = ("tokens", "inputs", "final", "top_ids", "top_p")  # arrays of ``Features``
_ROWS = 256  # of a pass; its logits take at most _LOGITS bytes
_LOGITS = 64 << 20
_LEAST_ROWS = 32
_MOST = float(np.finfo(np.float16).max)

HalfArray = npt.NDArray[np.float16]


@dataclass(frozen=True, slots=True)
class Features:
    """The features of one reply and of the end of its prompt, n tokens.

    Attributes:
        reply_from: index of the reply's first token.
        inputs: [n, 3E] the residual stream as it enters three layers, a low, a middle and a high
            one; [n, 0] where llama.cpp gives no others than ``final``.
        final: [n, E] the state after the last norm, which the target's output matrix reads.
        top_ids, top_p: [n, TOP] the likeliest tokens after each token, and their probabilities at
            temperature 1, the likeliest first.
        id: of the ``Sample``.
    """

    tokens: IntArray
    reply_from: int
    inputs: HalfArray
    final: HalfArray
    top_ids: IntArray
    top_p: HalfArray
    id: str = ""

    @property
    def n_bytes(self) -> int:
        return sum(getattr(self, part).nbytes for part in PARTS)


def read_laws(rows: Rows) -> tuple[IntArray, HalfArray]:
    """Return ids and probabilities [n, TOP] of ``rows`` [n, n_vocab], the likeliest first."""
    n, most = len(rows), min(TOP, rows.shape[1])
    ids, chances = np.zeros((n, TOP), np.int32), np.zeros((n, TOP), np.float16)
    weights = np.empty(rows.shape[1], np.float32)
    for i, row in enumerate(rows):
        peaks = Peaks(row)
        ids[i, :most] = best = peaks.best(most)
        np.exp(np.subtract(row, np.float32(peaks.top), out=weights), out=weights)
        chances[i, :most] = weights[best] / weights.sum()
    return ids, chances


class Gathering:
    """The features of one lane's text as its passes come, from token ``first`` on.

    Args:
        states: that the lane keeps of each token, side by side.
    """

    def __init__(self, lane: Lane, first: int, states: int) -> None:
        self._lane, self.first, self._states = lane, first, states
        self._ids: list[IntArray] = []
        self._chances: list[HalfArray] = []

    def take(self, rows: Rows) -> None:
        """Take the rows of the tokens that the lane has just read."""
        ids, chances = read_laws(rows)
        self._ids.append(ids)
        self._chances.append(chances)

    def features(self, sample: Sample) -> Features:
        """Return the features of the whole text, which the lane holds."""
        end = len(sample.prompt) + len(sample.reply)
        found = self._lane.hidden.rows(self.first, end)
        assert found is not None, "every pass over these tokens returned all rows"
        width = found.shape[1] // self._states
        states = np.clip(found, -_MOST, _MOST).astype(np.float16)
        return Features(
            tokens=np.array((*sample.prompt, *sample.reply)[self.first :], np.int32),
            reply_from=len(sample.prompt) - self.first, inputs=states[:, :-width],
            final=states[:, -width:], top_ids=np.concatenate(self._ids),
            top_p=np.concatenate(self._chances), id=sample.id,
        )  # fmt: skip


class Teacher(Closes):
    """An opened target that writes replies and gives its states away.

    Args:
        layers: whose inputs its features hold.

    Attributes:
        lanes: replies that it can write at once.
        rows: most tokens of a pass that gives features.
    """

    def __init__(self, opened: OpenedPair, layers: Sequence[int], lanes: int) -> None:
        self._close = opened.close
        self.need = (*layers, FINAL)
        self.pool, self.vocab = opened.target.pool, opened.target.vocab
        self.info = opened.target.info
        self.rows = min(self.pool.n_batch, self.pool.max_rows)
        self.lanes = min(lanes, self.pool.lanes)
        self.prompting = Prompting(self.vocab, opened.template, opened.bos, opened.eos)
        self.chains = SamplerChains(self.vocab)

    @classmethod
    def open(
        cls,
        target: GgufHeader,
        *,
        lanes: int = 16,
        longest: int = 1024,
        threads: int | None = None,
    ) -> Teacher:
        """Open a target for ``lanes`` texts at once, of at most ``longest`` tokens each; for fewer
        where memory does not hold them.

        Raises:
            UsageError: it has too few layers.
            what ``Engine.load`` raises.
        """
        layers = layers_read(target)
        rows = min(_ROWS, max(_LOGITS // (4 * max(target.vocab_size, 1)), _LEAST_ROWS))
        if target.is_recurrent or target.is_hybrid:  # keeps a state for each row of a pass
            rows = _LEAST_ROWS
        options = EngineOptions(
            threads=threads, n_batch=_ROWS, max_rows=rows, max_leaves=1, kv_disk="off",
        )  # fmt: skip
        while True:
            options = replace(options, n_ctx=lanes * longest, parallel=lanes)
            try:
                with OpeningPair(target.path, "none", options) as opening:
                    return cls(opening.pair(), layers, lanes)
            except DoesNotFit:
                if lanes == 1:
                    raise
                lanes //= 2

    def open_lane(self) -> Lane:
        """Open an empty lane whose passes leave the states of features.

        Raises:
            PairIncompatible: llama.cpp does not give the states of this model away.
        """
        lane = self.pool.open()
        try:
            lane.capture(self.need)
        except BaseException:
            lane.close()
            raise
        return lane

    def gathering(self, lane: Lane, prompt: Sequence[int]) -> Gathering:
        """Read the begin of a prompt, which has no features; return a gathering of the rest."""
        # states of the last row alone are not known of a prompt, while drafting
        first = max(len(prompt) - (KEPT if len(self.need) > 1 else 1), 0)
        for at in range(0, first, self.pool.n_batch):
            piece = prompt[at : min(at + self.pool.n_batch, first)]
            self.pool.run([Part(lane, piece, "none")])
        return Gathering(lane, first, len(self.need))

    def close(self) -> None:
        self._close()


def read_again(
    teacher: Teacher, samples: Iterable[Sample], rows: int | None = None
) -> Generator[Features]:
    """Yield the features of replies that were written before; leave out what has no room.

    Args:
        rows: most tokens of a pass; None takes the most that the teacher's passes have.
    """
    with closing(teacher.open_lane()) as lane:
        for sample in samples:
            text = (*sample.prompt, *sample.reply)
            if len(text) > lane.n_ctx:
                continue
            gathering = teacher.gathering(lane, sample.prompt)
            unread = np.array(text[gathering.first :], np.int32)
            # as long as each other: none is very short
            passes = -(-len(unread) // min(rows or teacher.rows, teacher.rows))
            for part in np.array_split(unread, passes):
                gathering.take(lane.forward(part.tolist(), outputs="all"))
            yield gathering.features(sample)
            lane.rollback(0)
