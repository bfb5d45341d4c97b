"""The target transform: one row of logits to one sparse law, the same for plain and speculative
decoding and for drafts.

The chain and its order follow llama.cpp's ``common_sampler``: logit bias, penalties, DRY, top-k,
typical, top-p, min-p, XTC, temperature. Ties are ordered by (logit descending, id ascending), so
the law is a pure function of (row, tokens before it, seed).

A grammar masks the survivors of truncation; only when none of them is allowed is the whole row
masked before truncation. That keeps the common case to a handful of candidates.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

from specllama.errors import EngineError
from specllama.params import SamplingParams
from specllama.spec.noise import coin
from specllama.spec.types import FloatArray, IntArray, Law, Row

# Tokens this far (in logits) below the best are looked at only when the nearer ones do not settle
# the truncation: a threshold scan is some 20 times cheaper than a partition of the vocabulary.
_NEAR = 12.0
_LOG_FLOAT_MAX = 88.7228391


class Constraint(Protocol):
    """A grammar: which tokens may come next."""

    def allowed(self, ids: IntArray) -> npt.NDArray[np.bool_]: ...

    def accept(self, token: int) -> None: ...

    def fork(self) -> Constraint: ...


class SamplerChain:
    """The user's sampler settings plus the state they need, positioned before one token.

    ``advance`` moves past a token; ``fork`` gives an independent copy (for drafting and for rules
    that must look at several positions before committing).

    Args:
        params: validated settings.
        seed: the request's seed; only XTC uses it here.
        tokens: all tokens before the position, prompt included.
        breakers: token ids that stop a DRY match.
        constraint: a grammar positioned at the same place, or None.
        is_end: whether a token ends a reply. Where a grammar allows nothing else it is complete,
            and no bias can forbid the end.
    """

    def __init__(
        self,
        params: SamplingParams,
        *,
        seed: int = 0,
        tokens: Sequence[int] = (),
        breakers: frozenset[int] = frozenset(),
        constraint: Constraint | None = None,
        is_end: Callable[[int], bool] = lambda token: False,
    ) -> None:
        self.params = params
        self.seed = seed
        self.position = len(tokens)
        self.gap = math.inf
        self.constraint = constraint
        self._breakers = breakers
        self._is_end = is_end
        self._penalties = params.repeat_last_n != 0 and (
            params.repeat_penalty != 1.0
            or params.frequency_penalty != 0.0
            or params.presence_penalty != 0.0
        )
        self._dry = params.dry_multiplier > 0.0 and params.dry_penalty_last_n != 0
        self._history: list[int] = list(tokens) if self._penalties or self._dry else []

    @property
    def greedy(self) -> bool:
        return self.params.temperature == 0.0

    def advance(self, token: int) -> None:
        self.position += 1
        if self._penalties or self._dry:
            self._history.append(token)
        if self.constraint is not None:
            self.constraint.accept(token)

    def advance_committed(self, token: int, is_stop: Callable[[int], bool]) -> None:
        """Advance past an emitted token. A stop token ends a grammar: nothing may follow it."""
        if self.constraint is not None and is_stop(token):
            self.constraint = None
        self.advance(token)

    def fork(self) -> SamplerChain:
        other = SamplerChain.__new__(SamplerChain)
        other.__dict__.update(self.__dict__)
        if self._penalties or self._dry:
            other._history = self._history.copy()
        if self.constraint is not None:
            other.constraint = self.constraint.fork()
        return other

    def law(self, row: Row) -> Law:
        """The law of the next token. ``row``: [n_vocab] logits, left unchanged.

        For a greedy chain the law is a point mass and ``gap`` is the lead of the best logit over
        the second; otherwise ``gap`` is inf (the draw reports its own).

        Raises:
            EngineError: the row holds NaN or +inf, or every token is forbidden.
        """
        z = self._adjusted(row)
        best = int(np.argmax(z))  # the lowest id on ties; a NaN wins the argmax, so it is seen here
        top = float(z[best])
        if not math.isfinite(top):
            if np.isfinite(row.max()):
                raise EngineError("every token is forbidden by a logit bias")
            raise EngineError(
                f"the model returned logits that cannot be sampled ({top})",
                "the file may be damaged: re-download it, or run specllama hub verify",
            )
        if self.greedy:
            return self._greedy_law(z, best, top)
        ids, logits = self._truncate(z, best, top)
        if self.constraint is not None:
            keep = self.constraint.allowed(ids)
            if keep.any():
                ids, logits = ids[keep], logits[keep]
            else:
                z = self._masked(z)
                best = int(np.argmax(z))
                ids, logits = self._truncate(z, best, float(z[best]))
        with np.errstate(over="ignore"):  # a tiny temperature makes the others -inf, as it should
            scaled = (logits - logits.max()) / self.params.temperature
        weights = np.exp(scaled)
        weights /= weights.sum()
        self.gap = math.inf
        positive = weights > 0.0
        if not positive.all():
            ids, weights = ids[positive], weights[positive]
        return Law(ids, weights)

    # -- logits ---------------------------------------------------------------------------------

    def _adjusted(self, row: Row) -> Row:
        """Bias, penalties and DRY; the row itself when none applies (no copy)."""
        p = self.params
        if not (p.logit_bias or self._penalties or self._dry):
            return row
        z = row.copy()
        for token, bias in p.logit_bias.items():
            if 0 <= token < len(z):
                z[token] += bias if math.isinf(bias) else max(min(bias, 1e37), -1e37)
        if self._penalties:
            window = self._history if p.repeat_last_n < 0 else self._history[-p.repeat_last_n :]
            counts = Counter(window)
            ids = np.fromiter((t for t in counts if t < len(z)), np.int64)
            n = np.fromiter((c for t, c in counts.items() if t < len(z)), np.float32)
            seen = z[ids]
            repeat = np.float32(p.repeat_penalty)
            seen = np.where(seen <= 0, seen * repeat, seen / repeat)
            z[ids] = seen - n * np.float32(p.frequency_penalty) - np.float32(p.presence_penalty)
        if self._dry:
            # llama.cpp's bound on the exponent: a penalty stays a finite float32
            most = int(_LOG_FLOAT_MAX / math.log(p.dry_base)) if p.dry_base > 1.000001 else 0
            for token, length in self._dry_matches().items():
                if token < len(z):
                    exponent = min(length - p.dry_allowed_length, most)
                    z[token] -= np.float32(min(p.dry_multiplier * p.dry_base**exponent, 1e38))
        return z

    def _dry_matches(self) -> dict[int, int]:
        """Token -> length of the longest repeat it would continue (Z-algorithm, backwards).

        Source: the DRY sampler's definition in llama.cpp (src/llama-sampler.cpp).
        """
        p = self.params
        window = (
            self._history if p.dry_penalty_last_n < 0 else self._history[-p.dry_penalty_last_n :]
        )
        recent: list[int] = []  # newest first, up to the last sequence breaker
        for token in reversed(window):
            recent.append(token)
        limit = next((i for i, t in enumerate(recent) if t in self._breakers), len(recent))
        n = len(recent)
        if n <= p.dry_allowed_length or limit < p.dry_allowed_length:
            return {}
        z = [0] * n
        left = right = 0
        for i in range(1, n):
            if i < right:
                z[i] = min(right - i, z[i - left])
            while i + z[i] < n and recent[z[i]] == recent[i + z[i]]:
                z[i] += 1
            if i + z[i] > right:
                left, right = i, i + z[i]
        longest: dict[int, int] = {}
        for i in range(1, n):
            length = min(z[i], limit)
            if length >= p.dry_allowed_length:
                token = recent[i - 1]  # what followed the earlier occurrence
                if token not in self._breakers:
                    longest[token] = max(longest.get(token, 0), length)
        return longest

    # -- selection ------------------------------------------------------------------------------

    def _greedy_law(self, z: Row, best: int, top: float) -> Law:
        if (
            self.constraint is not None
            and not self.constraint.allowed(np.array([best], np.int32)).all()
        ):
            z = self._masked(z)
            best = int(np.argmax(z))
            top = float(z[best])
        if self.constraint is not None:
            # only what the grammar allows can compete; a lead of more than 1 is no tie of any kind
            rivals = np.flatnonzero(z > top - 1.0).astype(np.int32)
            rivals = rivals[rivals != best]
            rivals = rivals[self.constraint.allowed(rivals)] if len(rivals) else rivals
            self.gap = top - float(z[rivals].max()) if len(rivals) else math.inf
            return Law.point(best)
        keep = z[best]
        if z.flags.writeable:
            z[best] = -np.inf
            self.gap = top - float(z.max())
            z[best] = keep
        else:
            self.gap = top - float(np.delete(z, best).max()) if len(z) > 1 else math.inf
        return Law.point(best)

    def _masked(self, z: Row) -> Row:
        assert self.constraint is not None
        keep = self.constraint.allowed(np.arange(len(z), dtype=np.int32))
        if not keep.any():
            raise EngineError("the grammar allows no further token here", "check the grammar")
        masked: Row = np.where(keep, z, np.float32(-np.inf))
        if not np.isfinite(masked.max()):
            allowed = [int(token) for token in np.flatnonzero(keep)]
            if all(map(self._is_end, allowed)):
                masked[allowed[0]] = 0.0
                return masked
            raise EngineError("every token the grammar allows is forbidden by a logit bias")
        return masked

    def _truncate(self, z: Row, best: int, top: float) -> tuple[IntArray, FloatArray]:
        """Top-k, typical, top-p, min-p, XTC. Returns (ids ascending, logits float64)."""
        p = self.params
        if p.top_k == 1:
            return np.array([best], np.int32), np.array([top])
        ids, total = self._candidates(z, top)
        logits = z[ids].astype(np.float64)
        if p.typical_p < 1.0 or p.top_p < 1.0 or p.min_p > 0.0 or p.xtc_probability > 0.0:
            order = np.argsort(-logits, kind="stable")  # ids ascend: ties go to the lowest
            ids, logits = ids[order], logits[order]
            probs = np.exp(logits - top) / total
            if p.typical_p < 1.0:
                ids, logits, probs = _typical(ids, logits, probs, p.typical_p)
            if p.top_p < 1.0:
                probs = probs / probs.sum() if p.typical_p < 1.0 else probs
                n = int(np.searchsorted(np.cumsum(probs), p.top_p - 1e-12)) + 1
                ids, logits, probs = ids[:n], logits[:n], probs[:n]
            if p.min_p > 0.0:
                n = (
                    int(np.count_nonzero(logits >= logits[0] + math.log(p.min_p)))
                    if p.min_p < 1
                    else 1
                )
                n = max(n, 1)
                ids, logits, probs = ids[:n], logits[:n], probs[:n]
            if (
                p.xtc_probability > 0.0
                and p.xtc_threshold <= 0.5
                and len(ids) > 1
                and coin(self.seed, self.position) < p.xtc_probability
            ):
                above = int(np.count_nonzero(probs / probs.sum() >= p.xtc_threshold))
                if above > 1:
                    ids, logits = ids[above - 1 :], logits[above - 1 :]
            order = np.argsort(ids, kind="stable")
            ids, logits = ids[order], logits[order]
        return ids.astype(np.int32, copy=False), logits

    def _candidates(self, z: Row, top: float) -> tuple[IntArray, float]:
        """Ids (ascending) that can survive, and the sum of exp(logit - top) of the top-k set.

        Without top-k the sum runs over the vocabulary, and the far tail is dropped from the ids
        only where top-p or min-p is certain to drop it.
        """
        p = self.params
        near = np.flatnonzero(z >= top - _NEAR).astype(np.int32)
        if 0 < p.top_k < len(z):
            ids = near if len(near) >= p.top_k else np.flatnonzero(z > -np.inf).astype(np.int32)
            if len(ids) > p.top_k:
                ids = _top_k(ids, z[ids], p.top_k)
            return ids, float(np.exp(z[ids].astype(np.float64) - top).sum())
        total = float(np.exp(z - np.float32(top)).sum(dtype=np.float64))
        if p.typical_p >= 1.0 and len(near) < len(z):
            certain = p.min_p > math.exp(-_NEAR + 0.1)
            if not certain and p.top_p < 1.0:
                mass = float(np.exp(z[near].astype(np.float64) - top).sum()) / total
                certain = mass > p.top_p + 1e-6
            if certain:
                return near, total
        return np.flatnonzero(z > -np.inf).astype(np.int32), total


def _top_k(ids: IntArray, logits: Row, k: int) -> IntArray:
    """The k best of ``ids`` (ascending), ties at the edge going to the lowest ids."""
    edge = np.partition(logits, len(logits) - k)[len(logits) - k]
    above = logits > edge
    ties = np.flatnonzero(logits == edge)[: k - int(above.sum())]
    above[ties] = True
    kept: IntArray = ids[above]
    return kept


def _typical(
    ids: IntArray, logits: FloatArray, probs: FloatArray, typical_p: float
) -> tuple[IntArray, FloatArray, FloatArray]:
    """Locally typical sampling (Meister et al. 2022); keeps the descending-logit order."""
    probs = probs / probs.sum()
    surprise = -np.log(np.maximum(probs, 1e-300))
    entropy = float((probs * surprise).sum())
    order = np.argsort(np.abs(surprise - entropy), kind="stable")
    n = int(np.searchsorted(np.cumsum(probs[order]), typical_p - 1e-12)) + 1
    kept = np.sort(order[:n])
    return ids[kept], logits[kept], probs[kept]


def confidence(row: Row) -> float:
    """The probability of the best token under the plain softmax of a row, tail ignored.

    0 for a row that cannot be sampled (NaN, +inf, all -inf).
    """
    top = row.max()
    if not np.isfinite(top):
        return 0.0
    near = row[row >= top - np.float32(_NEAR)]
    return float(1.0 / np.exp(near - top).sum(dtype=np.float64))
