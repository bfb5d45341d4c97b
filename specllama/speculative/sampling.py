"""The target transform: one row of logits to one sparse law.

Plain decoding, speculative decoding and drafts use the same one.

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
from functools import cached_property
from typing import Protocol

import numpy as np
import numpy.typing as npt

from specllama.arrays import FloatArray, IntArray, Row
from specllama.errors import EngineError, UsageError
from specllama.settings.params import SamplingParams
from specllama.speculative.cuts import REACH, Candidates, slack
from specllama.speculative.matches import agreement
from specllama.speculative.noise import coin
from specllama.speculative.selection import Numbers, Peaks, every, smallest
from specllama.speculative.types import CERTAIN, Law
from specllama.text_history import History, Places

# Tokens this far (in logits) below the best are looked at only when the nearer ones do not settle
# the truncation: a threshold scan is some 20 times cheaper than a partition of the vocabulary.
_NEAR = 12.0
_LEAST = float(np.finfo(np.float32).min)
_NEVER = np.float32(-1e4)  # a logit whose exponential is 0
_LOG_FLOAT_MAX = 88.7228391
_BIASED = "leave out some of the biases"

# Rows of logits and indexes of long texts are arrays of a few MB that live for a moment. glibc
# hands such memory back to the system and faults it in again, which costs more than the work on
# it, until a larger array was freed once. Nothing here is touched: no memory is used.
np.empty(16 << 20, np.uint8)


class Constraint(Protocol):
    """A grammar: it decides which tokens may come next."""

    def allowed(self, ids: IntArray) -> npt.NDArray[np.bool_]: ...

    def accept(self, token: int) -> None: ...

    def fork(self) -> Constraint: ...

    def ahead(
        self, most: int, habits: dict[bytes, dict[bytes, float]]
    ) -> Sequence[tuple[int, float]]:
        """Return at most ``most`` tokens that follow while there is only one way on, each with its
        probability after the others; a token of -1 ends the text. It is a hint for drafts: nothing
        depends on it.

        Args:
            habits: how texts were laid out. The caller keeps it for as long as one may learn from
                another; what it holds is the constraint's own.
        """


class SamplerChain:
    """The user's sampler settings plus the state they need, positioned before one token.

    ``advance`` moves past a token; ``fork`` gives an independent copy (for drafting and for rules
    that must look at several positions before committing).

    Args:
        params: validated settings.
        seed: the request's seed; only XTC uses it here.
        tokens: all tokens before the next one, prompt included.
        position: of the next token in the noise (see ``noise``); None is that of a raw text.
        breakers: token ids that stop a DRY match.
        constraint: a grammar positioned at the same place, or None.
        is_end: whether a token ends a reply. Where a grammar allows nothing else it is complete,
            and no bias can forbid the end.
        fills: leaves those of (ids, logits) that may fill a gap, see ``filling``.
    """

    def __init__(
        self,
        params: SamplingParams,
        *,
        seed: int = 0,
        tokens: Sequence[int] = (),
        position: int | None = None,
        breakers: frozenset[int] = frozenset(),
        constraint: Constraint | None = None,
        is_end: Callable[[int], bool] = lambda token: False,
        fills: Callable[[IntArray, FloatArray], tuple[IntArray, FloatArray]] | None = None,
    ) -> None:
        self.params = params
        self.seed = seed
        self.position = len(tokens) if position is None else position
        # of the last row: its lead, or the best of it; what was cut, and what the cuts began with
        self._gap: float | tuple[Row, int] = math.inf
        self._peaks: Peaks | None = None
        self._cut: Candidates | None = None
        self._scan: Peaks | None = None  # one for all rows, but for laws that keep theirs
        self.constraint = constraint
        self._breakers = breakers
        self._is_end = is_end
        self._fills = fills
        # made once: forks share them
        self._biased = np.array([t for t in params.logit_bias if t >= 0], np.int64)
        biases = np.array([b for t, b in params.logit_bias.items() if t >= 0], np.float64)
        finite = np.isfinite(biases)
        np.clip(biases, -1e37, 1e37, out=biases, where=finite)
        self._biases = biases.astype(np.float32)
        self._penalties = params.repeat_last_n != 0 and (
            params.repeat_penalty != 1.0
            or params.frequency_penalty != 0.0
            or params.presence_penalty != 0.0
        )
        # whether what survives depends on probabilities
        self._weighs = (
            params.typical_p < 1.0
            or params.top_p < 1.0
            or params.min_p > 0.0
            or params.xtc_probability > 0.0
            or fills is not None
        )
        self._dry = params.dry_multiplier > 0.0 and params.dry_penalty_last_n != 0
        self._history = History(tokens) if self._penalties or self._dry else History()
        # where the text's end stood before and how far back, when it had so many tokens
        self._repeats: tuple[int, tuple[Places, Places] | None] = (0, None)
        self._unbroken = 0  # tokens since the newest sequence breaker
        if self._dry:
            while self._unbroken < len(tokens) and tokens[-1 - self._unbroken] not in breakers:
                self._unbroken += 1

    @property
    def greedy(self) -> bool:
        return self.params.temperature == 0.0

    @property
    def scale(self) -> float:
        """Logits per unit of log probability: the law divides a change of a logit by it."""
        return self.params.temperature or 1.0

    @property
    def gap(self) -> float:
        """The lead of the last row's best logit over the second, of a greedy chain; else inf. The
        row must still be there."""
        if isinstance(self._gap, tuple):
            z, best = self._gap
            others = [float(part.max()) for part in (z[:best], z[best + 1 :]) if len(part)]
            self._gap = float(z[best]) - max(others, default=-math.inf)
        return self._gap

    @property
    def remembers(self) -> bool:
        """True if laws depend on the tokens before, and not only on their number."""
        return self._penalties or self._dry or self.constraint is not None

    def advance(self, token: int) -> None:
        self.position += 1
        if self._penalties or self._dry:
            self._history.append(token)
            self._unbroken = 0 if token in self._breakers else self._unbroken + 1
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
        other._scan = None
        if self._penalties or self._dry:
            other._history = self._history.copy()
        if self.constraint is not None:
            other.constraint = self.constraint.fork()
        return other

    def law(self, row: Row) -> Law:
        """Return the law of the next token. ``row``: [n_vocab] logits, left unchanged.

        For a greedy chain the law is a point mass, and ``gap`` tells the lead of its token; of
        another one the draw reports its own, and ``slack`` that of the cuts.

        Raises:
            EngineError: the row holds NaN or +inf.
            UsageError: the request forbids every token here.
        """
        z = self._adjusted(row)
        if self.greedy:
            best = int(z.argmax())  # the lowest id on ties; a NaN wins, so it is seen here
            self._require_number(row, float(z[best]))
            return self._greedy_law(z, best)
        self._gap = math.inf
        if self.constraint is None and not self._weighs and not 0 < self.params.top_k < len(z):
            self._peaks = None
            self._require_number(row, (whole := Peaks(z)).top)
            return Softmax(whole, self.params.temperature)
        peaks = self._scan = Peaks(z) if self._scan is None else self._scan.read(z)
        self._require_number(row, peaks.top)
        at, logits = self._truncate(peaks)
        if self._fills is not None:
            at, logits = self._fills(at, logits)
        if self.constraint is not None:
            keep = self.constraint.allowed(at)
            if keep.any():
                at, logits = at[keep], logits[keep]
            else:
                at, logits = self._truncate(Peaks(self._masked(z)))
        return _softmax(at, logits, self.params.temperature)

    def slack(self, winner: int) -> float:
        """Return by how many logits rounding must change the last row for a token other than
        ``winner`` to be drawn, as far as the best logit or the cuts decide that. inf for a large
        number."""
        p, peaks = self.params, self._peaks
        if self.greedy or peaks is None or self._fills is not None:  # which has no margins
            return self.gap
        if p.top_k != 1 and p.min_p > 0.0 and p.typical_p >= 1.0:
            bar = peaks.top + math.log(p.min_p) - REACH
            if len(peaks.reaching(bar)) == 1:  # nothing else is close to coming in
                return math.inf
        cut = self._cut or self._candidates(peaks)
        return slack(peaks, cut, p, self.seed, self.position, winner)

    def _require_number(self, row: Row, top: float) -> None:
        """Require that the best logit can be sampled."""
        if math.isfinite(top):
            return
        if np.isfinite(row.max()):
            raise UsageError("every token is forbidden by a logit bias", _BIASED)
        raise EngineError(
            f"the model returned logits that cannot be sampled ({top})",
            "the file may be damaged: re-download it, or run specllama hub verify FILE",
        )

    # -- logits ---------------------------------------------------------------------------------

    def _adjusted(self, row: Row) -> Row:
        """Apply bias, penalties and DRY; return the row itself if none applies (no copy)."""
        p = self.params
        if not (len(self._biased) or self._penalties or self._dry):
            return row
        z = row.copy()
        if len(self._biased):
            inside = self._biased < len(z)
            z[self._biased[inside]] += self._biases[inside]
        if self._penalties:
            self._penalize(z)
        if self._dry:
            tokens, lengths = self._dry_matches()
            inside = tokens < len(z)
            tokens, exponents = tokens[inside], lengths[inside] - p.dry_allowed_length
            with np.errstate(over="ignore"):
                penalties = p.dry_multiplier * np.power(p.dry_base, exponents.astype(np.float64))
            z[tokens] -= np.minimum(penalties, 1e38).astype(np.float32)
        return z

    def _penalize(self, z: Row) -> None:
        """Lower the logits of the different tokens of the penalised window."""
        p, n = self.params, len(z)
        window = self._history if p.repeat_last_n < 0 else self._history[-p.repeat_last_n :]
        repeat = float(np.float32(p.repeat_penalty))
        if p.frequency_penalty == p.presence_penalty == 0.0:
            # Python is quicker with few, and a product or quotient of float32 rounds alike
            known = [token for token in set(window) if token < n]
            z[known] = [x * repeat if x <= 0 else x / repeat for x in z[known].tolist()]
            return
        counts = Counter([token for token in window if token < n])
        ids, times = list(counts), np.array(list(counts.values()), np.int64)
        seen = z[ids]
        seen = np.where(seen <= 0, seen * np.float32(repeat), seen / np.float32(repeat))
        z[ids] = seen - times * np.float32(p.frequency_penalty) - np.float32(p.presence_penalty)

    def _dry_matches(self) -> tuple[IntArray, Places]:
        """Return (tokens, for each the length of the longest repeat that it would continue).

        Source: the DRY sampler's definition in llama.cpp (src/llama-sampler.cpp).
        """
        p = self.params
        text = self._history.array
        n = len(text)
        start = 0 if p.dry_penalty_last_n < 0 else max(n - p.dry_penalty_last_n, 0)
        limit = min(self._unbroken, n - start)  # a repeat reaches back to a breaker at most
        # llama.cpp's bound on the exponent: a penalty stays a finite float32
        most = int(_LOG_FLOAT_MAX / math.log(p.dry_base)) if p.dry_base > 1.000001 else 0
        longest = p.dry_allowed_length + most
        if n - start <= p.dry_allowed_length or limit < p.dry_allowed_length:
            return np.empty(0, np.int32), np.empty(0, np.int64)
        known, before = self._repeats
        if before is None or known < n:
            places = self._history.places(self._history[-1])[:-1]
            before = places, agreement(text, text, places, n - known, before, longest)
            self._repeats = n, before
        places, lengths = before
        limit = min(limit, longest)
        lengths = np.minimum(np.minimum(lengths, places - start + 1), limit)
        repeats = lengths >= p.dry_allowed_length
        tokens, lengths = text[places[repeats] + 1], lengths[repeats]
        order = np.lexsort((lengths, tokens))  # the longest of each token comes last
        tokens, lengths = tokens[order], lengths[order]
        last = np.ones(len(tokens), np.bool_)
        np.not_equal(tokens[1:], tokens[:-1], out=last[:-1])
        last[last] = [token not in self._breakers for token in tokens[last].tolist()]
        return tokens[last], lengths[last]

    # -- selection ------------------------------------------------------------------------------

    def _greedy_law(self, z: Row, best: int) -> Law:
        if (
            self.constraint is not None
            and not self.constraint.allowed(np.array([best], np.int32)).all()
        ):
            z = self._masked(z)
            best = int(z.argmax())
        top = float(z[best])
        if self.constraint is not None:
            # only what the grammar allows can compete; a lead of more than 1 is no tie of any kind
            rivals = np.flatnonzero(z > top - 1.0).astype(np.int32)
            rivals = rivals[rivals != best]
            rivals = rivals[self.constraint.allowed(rivals)] if len(rivals) else rivals
            self._gap = top - float(z[rivals].max()) if len(rivals) else math.inf
            return Law.point(best)
        self._gap = z, best
        return Law.point(best)

    def _masked(self, z: Row) -> Row:
        assert self.constraint is not None
        keep = self.constraint.allowed(np.arange(len(z), dtype=np.int32))
        if not keep.any():
            raise UsageError("the grammar allows no further token here", "check the grammar")
        masked: Row = np.where(keep, z, np.float32(-np.inf))
        if not np.isfinite(masked.max()):
            allowed = [int(token) for token in np.flatnonzero(keep)]
            if all(map(self._is_end, allowed)):
                masked[allowed[0]] = 0.0
                return masked
            raise UsageError("every token the grammar allows is forbidden by a logit bias", _BIASED)
        return masked

    def _truncate(self, peaks: Peaks) -> tuple[IntArray, FloatArray]:
        """Apply top-k, typical, top-p, min-p and XTC. Return (ids ascending, logits float64)."""
        p, top = self.params, peaks.top
        self._peaks = peaks if 0 < p.top_k < len(peaks.values) or self._weighs else None
        self._cut = None
        if p.top_k == 1 or (p.min_p > 0.0 and p.typical_p >= 1.0):
            bar = top if p.top_k == 1 else top + math.log(p.min_p)
            if 1 < p.top_k < len(peaks.values):
                peaks.reaching(min(bar, max(_LEAST, peaks.bar(p.top_k))))  # both are asked
            near = peaks.reaching(bar)
            if p.top_k == 1 or len(near) == 1:
                return near[:1].astype(np.int32), np.array([top])
        ids, logits, total, mean = self._cut = self._candidates(peaks)
        whole = 1.0
        if p.typical_p < 1.0:
            # typical: as surprising as the mean, so a logit close to the mean one
            probs = _weights(logits, top) / total
            keep = smallest(np.abs(logits - top - mean), probs, p.typical_p)
            ids, logits, whole = ids[keep], logits[keep], float(probs[keep].sum())
        if p.min_p > 0.0:  # before top-p, which keeps the best as well: fewer have to be sorted
            first = int(logits.argmax())
            keep = (logits >= logits[first] + math.log(p.min_p)).nonzero()[0]
            if p.min_p >= 1.0:
                keep = np.array([first])
            ids, logits = ids[keep], logits[keep]
        if p.top_p < 1.0 and len(ids) > 1:
            keep = smallest(-logits, _weights(logits, top) / total, p.top_p * whole)
            ids, logits = ids[keep], logits[keep]
        if (
            p.xtc_probability > 0.0
            and p.xtc_threshold <= 0.5
            and len(ids) > 1
            and coin(self.seed, self.position) < p.xtc_probability
        ):
            probs = _weights(logits, top) / total
            above = np.flatnonzero(probs >= p.xtc_threshold * probs.sum())
            if len(above) > 1:  # all of these go but the least likely
                stays = above[len(above) - 1 - int(logits[above][::-1].argmin())]
                gone = np.zeros(len(ids), np.bool_)
                gone[above] = True
                gone[stays] = False
                ids, logits = ids[~gone], logits[~gone]
        return ids, logits

    def _candidates(self, peaks: Peaks) -> Candidates:
        """Return the ids that can survive; the mean only if typical sampling needs it.

        Without top-k sum and mean run over the vocabulary, and the far tail is dropped from the ids
        only where typical sampling, top-p or min-p is certain to drop it.
        """
        p, z, top = self.params, peaks.values, peaks.top
        picks = 0 < p.top_k < len(z)
        if not picks and not self._weighs:
            return *_possible(z), math.nan, math.nan
        if picks:
            ids = _top_k(peaks, p.top_k)
            logits = z[ids].astype(np.float64)
            weights = _weights(logits, top)
            total = float(weights.sum())
            mean = float(weights @ (logits - top)) / total if p.typical_p < 1.0 else 0.0
            return ids, logits, total, mean
        relative = z - np.float32(top)
        if p.typical_p < 1.0:
            np.maximum(relative, _NEVER, out=relative)  # a forbidden token adds 0, not NaN
        exp = np.exp(relative)
        total = float(exp.sum(dtype=np.float64))
        mean = float(np.dot(exp, relative)) / total if p.typical_p < 1.0 else 0.0
        far = _NEAR
        certain = False
        if p.typical_p >= 1.0 and p.min_p > 0.0:
            far = min(far, 0.1 - math.log(p.min_p))
            certain = far < _NEAR
        near = np.flatnonzero(relative >= -far)  # int64: numpy takes by these at once
        if p.typical_p < 1.0:
            # whatever is closer to the mean than far + mean is near the best
            typical = near[relative[near] <= far + 2.0 * mean] if far + mean > 0.0 else near[:0]
            certain = float(exp[typical].sum(dtype=np.float64)) / total > p.typical_p + 1e-6
        elif p.top_p < 1.0 and not certain:
            certain = float(exp[near].sum(dtype=np.float64)) / total > p.top_p + 1e-6
        if not certain:
            return *_possible(z), total, mean
        return near.astype(np.int32), z[near].astype(np.float64), total, mean


class Softmax(Law):
    """Law of a row from which nothing is cut.

    What takes the whole vocabulary is worked out when it is asked for: the row must stand so long.
    """

    def __init__(self, peaks: Peaks, temperature: float) -> None:
        self._row = peaks
        self._temperature = temperature

    @cached_property
    def _worked_out(self) -> Law:
        return _softmax(*_possible(self._row.values), self._temperature)

    @property
    def ids(self) -> IntArray:  # type: ignore[override]
        return self._worked_out.ids

    @property
    def probs(self) -> FloatArray:  # type: ignore[override]
        return self._worked_out.probs

    def kept(self) -> Law:
        return self._worked_out

    @property
    def size(self) -> int:
        return len(self._row.values)

    @property
    def peaks(self) -> Peaks:
        return self._row

    def at(self, places: Places | IntArray) -> IntArray:
        return places.astype(np.int32, copy=False)

    def weights(self, values: Numbers) -> FloatArray:
        logits = values.astype(np.float64) - self._row.top
        logits /= self._temperature
        return np.exp(logits, out=logits)

    def weight(self, value: float) -> float:
        return math.exp((value - self._row.top) / self._temperature)

    def level(self, weight: float) -> float:
        top = self._row.top
        return top + self._temperature * math.log(weight) - 1e-12 * abs(top)


def _softmax(at: IntArray, logits: FloatArray, temperature: float) -> Law:
    if len(at) == 1:
        return Law(at, CERTAIN)
    logits = logits - logits.max()
    with np.errstate(over="ignore"):  # a tiny temperature makes the others -inf, as it should
        logits /= temperature
    weights = np.exp(logits, out=logits)
    weights /= weights.sum()
    if weights.min() == 0.0:
        positive = weights > 0.0
        at, weights = at[positive], weights[positive]
    return Law(at, weights)


def _weights(logits: FloatArray, top: float) -> FloatArray:
    weights = logits - top
    return np.exp(weights, out=weights)


def _possible(z: Row) -> tuple[IntArray, FloatArray]:
    """Return the ids and logits of all tokens that are not forbidden."""
    if z.min() > -np.inf:
        return every(len(z)), z.astype(np.float64)
    allowed = np.flatnonzero(z > -np.inf)
    return allowed.astype(np.int32), z[allowed].astype(np.float64)


def _top_k(peaks: Peaks, k: int) -> IntArray:
    """Return the ids of the k best logits, ascending; ties at the edge go to the lowest ids.

    Forbidden tokens (-inf) are never among them.
    """
    ids = peaks.reaching(max(_LEAST, peaks.bar(k))).astype(np.int32)
    if len(ids) <= k:
        return ids
    logits = peaks.values[ids]
    edge = np.partition(logits, len(logits) - k)[len(logits) - k]
    kept: IntArray = ids[logits >= edge]
    if len(kept) > k:
        ties = ids[logits == edge]
        kept = kept[~np.isin(kept, ties[len(ties) - (len(kept) - k) :])]
    return kept


def likeliest(row: Row, token: int, n: int) -> list[tuple[int, float]]:
    """Return (token, log probability by plain softmax) of ``token``, then of the n likeliest."""
    peaks = Peaks(row)
    total = float(np.log(np.exp(row - np.float32(peaks.top)).sum(dtype=np.float64))) + peaks.top
    best = peaks.best(n) if n else ()
    return [(int(t), float(row[t]) - total) for t in (token, *best)]
