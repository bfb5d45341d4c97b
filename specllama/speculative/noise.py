"""Common noise: exponential variates that are a pure hash of (seed, position, token id).

Drawing ``argmin_v E_v / p(v)`` with E_v ~ Exp(1) samples exactly from p (the exponential race, the
same thing as Gumbel-max). Keying E by the position makes a draw independent of how the text before
it was produced, so speculative and plain decoding with one seed write the same text; sharing E
between draft and target makes them agree as often as a coupling without communication can (Daliri,
Musco and Suresh 2024). Nothing is stored, so nothing has to be rolled back.

Positions count from the start of the reply, so a question that changed leaves the noise as it was:
what the model wrote before is a good draft of what it writes now. A reply that is continued goes on
counting. Each reply of a conversation has positions of its own (``reply_position``): with those of
an earlier one, which it reads, it would not be drawn from the model's law. A raw prompt has no
border that a later request would know of. It counts as the begun reply, from its first token.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from specllama.arrays import FloatArray, IntArray
from specllama.speculative.types import Law
from specllama.text_history import Places

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15
_MIX_1 = 0xBF58476D1CE4E5B9
_MIX_2 = 0x94D049BB133111EB
_XTC_STREAM = 0x5851F42D4C957F2D
_SHIFT_1, _SHIFT_2, _SHIFT_3, _UNUSED = map(np.uint64, (30, 27, 31, 12))
_FACTOR_1, _FACTOR_2 = map(np.uint64, (_MIX_1, _MIX_2))
_REPLY_BITS = 32  # no reply is longer
_MANY = 4096  # tokens whose noise is not worth a logarithm each
_FAVOURITES = 64
_FEW = 8
_TILE = 32768  # hashes that are made at once: they stay in a core's own cache
_BITS = 31  # of a hash, the highest, which its last step leaves as they are
_LEAST_NOISE = -np.log1p(-(2.0**-53))  # see ``exp_noise``
_ROUNDING = 1e-9  # much more than that of a time
_ENDLESS = 1e300  # a time that nobody has whose weight counts
_LOWEST = float(np.finfo(np.float32).min)


def reply_position(replies: int, begun: int) -> int:
    """Return the position of a reply's next token, after ``replies`` other replies and ``begun``
    tokens of this one."""
    return (replies << _REPLY_BITS) + begun


def _mix(x: int) -> int:
    """Apply the splitmix64 finaliser to one integer."""
    x &= _MASK
    x = ((x ^ (x >> 30)) * _MIX_1) & _MASK
    x = ((x ^ (x >> 27)) * _MIX_2) & _MASK
    return x ^ (x >> 31)


def _key(seed: int, position: int) -> int:
    return _mix(_mix(seed + _GOLDEN) + position * _GOLDEN)


def _hash(seed: int, position: int, ids: IntArray) -> npt.NDArray[np.uint64]:
    """Return 52 random bits for each token id at one position, uint64 [n]."""
    key = _key(seed, position)
    if len(ids) <= _FEW:  # array by array would take longer
        return np.array([_mix(i * _GOLDEN + key) >> 12 for i in ids.tolist()], np.uint64)
    x = _spread(ids)
    x += np.uint64(key)
    x ^= _almost(x, np.empty_like(x)) >> _SHIFT_3
    x >>= _UNUSED
    return x


def _spread(ids: IntArray) -> npt.NDArray[np.uint64]:
    x = ids.astype(np.uint64)
    x *= np.uint64(_GOLDEN)
    return x


_SPREAD = _spread(np.arange(_TILE, dtype=np.int32))


def _almost(x: npt.NDArray[np.uint64], shifted: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Hash in place, but for the last step, which leaves the highest bits as they are."""
    x ^= np.right_shift(x, _SHIFT_1, out=shifted)
    x *= _FACTOR_1
    x ^= np.right_shift(x, _SHIFT_2, out=shifted)
    x *= _FACTOR_2
    return x


def exp_noise(seed: int, position: int, ids: IntArray) -> FloatArray:
    """Return Exp(1) variates for the given token ids at one position, float64 [n]."""
    # 52 bits: the half is exact, so the uniform is never 1 and the noise never 0
    uniform = (_hash(seed, position, ids).astype(np.float64) + 0.5) * 2.0**-52
    noise: FloatArray = -np.log(uniform)
    return noise


def coin(seed: int, position: int) -> float:
    """Return a private uniform in (0, 1) per position, independent of token noise (for XTC)."""
    return ((_key(seed ^ _XTC_STREAM, position) >> 12) + 0.5) * 2.0**-52


def draw(law: Law, seed: int, position: int) -> tuple[int, float]:
    """Draw the winner of the race at ``position``; also return its lead in log score (inf if
    alone).

    A lead near zero is a near-tie: a floating-point difference in the logits could flip it.
    """
    if law.size == 1:
        return int(law.ids[0]), float("inf")
    with np.errstate(over="ignore", divide="ignore"):  # who cannot win takes for ever
        if law.size > _MANY:
            token, lead = _first(*_contenders(law, seed, position))
            if lead > _ROUNDING:
                return token, lead
        return _first(law.ids, exp_noise(seed, position, law.ids) / law.probs)


def _first(ids: IntArray, times: FloatArray) -> tuple[int, float]:
    """Return the first token and its lead in log score."""
    winner = int(times.argmin())
    first = times[winner]
    times[winner] = np.inf
    return int(ids[winner]), float(np.log(times.min() / first))


def _contenders(law: Law, seed: int, position: int) -> tuple[IntArray, FloatArray]:
    """Return the winner and the runner-up of a race, among few others, and their times.

    To hash 150,000 tokens takes longer than all else, to take the logarithm of each longer still.
    The second of the likeliest tokens has some time t; who beats it has noise below t * w, where w
    is its weight. No noise is less than ``_LEAST_NOISE``, which leaves most of them out where the
    others are likely enough. A bar bounds the weights of the rest, and as -log(u) >= 1 - u, their
    uniform u is above 1 - t * w: the highest bits of a hash tell, and a hair more than is needed
    passes.
    """
    peaks = law.peaks
    values, bar = peaks.values, max(peaks.bar(_FAVOURITES), _LOWEST)
    at = peaks.reaching(bar)
    times = exp_noise(seed, position, law.at(at)) / law.weights(values[at])
    limit = float(np.partition(times, 1)[1]) * (1.0 + _ROUNDING) if len(at) > 1 else np.inf
    if limit < _ENDLESS:
        level = law.level(_LEAST_NOISE / limit)
        if level < bar:
            more = peaks.among(level)
            more = more[_lucky(seed, position, law.at(more), limit * law.weight(bar))]
            if len(more := more[values[more] < bar]):
                late = exp_noise(seed, position, law.at(more)) / law.weights(values[more])
                at, times = np.concatenate((at, more)), np.concatenate((times, late))
    return law.at(at), times


def _lucky(seed: int, position: int, ids: IntArray, bound: float) -> Places:
    """Return the indices of those whose noise can be below ``bound``, and of few others."""
    key = _key(seed, position)
    least = np.uint64(max(int((1.0 - min(bound, 1.0)) * 2**_BITS) - 1, 0) << (64 - _BITS))
    whole = len(ids) > 0 and int(ids[-1]) == len(ids) - 1  # ascending: each is its index
    hashes, shifted = np.empty((2, _TILE), np.uint64)
    found = [np.empty(0, np.int64)]
    for i in range(0, len(ids), _TILE):
        n = min(len(ids) - i, _TILE)
        spread, first = (_SPREAD, i) if whole else (_spread(ids[i : i + n]), 0)
        x = np.add(spread[:n], np.uint64((key + first * _GOLDEN) & _MASK), out=hashes[:n])
        if _almost(x, shifted[:n]).max() >= least:
            found.append((x >= least).nonzero()[0] + i)
    return np.concatenate(found)
