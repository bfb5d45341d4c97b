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
from specllama.history import Places
from specllama.speculative.selection import Peaks
from specllama.speculative.types import Law

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15
_MIX_1 = 0xBF58476D1CE4E5B9
_MIX_2 = 0x94D049BB133111EB
_XTC_STREAM = 0x5851F42D4C957F2D
_SHIFT_1, _SHIFT_2, _SHIFT_3, _UNUSED = map(np.uint64, (30, 27, 31, 12))
_ONE = np.float64(1.0).view(np.uint64)
_REPLY_BITS = 32  # no reply is longer
_MANY = 4096  # tokens whose noise is not worth a logarithm each
_FAVOURITES = 16
_FEW = 8


def reply_position(replies: int, begun: int) -> int:
    """The position of the next token of a reply that follows ``replies`` others, and of which
    ``begun`` tokens are written."""
    return (replies << _REPLY_BITS) + begun


def _mix(x: int) -> int:
    """The splitmix64 finaliser on one integer."""
    x &= _MASK
    x = ((x ^ (x >> 30)) * _MIX_1) & _MASK
    x = ((x ^ (x >> 27)) * _MIX_2) & _MASK
    return x ^ (x >> 31)


def _key(seed: int, position: int) -> int:
    return _mix(_mix(seed + _GOLDEN) + position * _GOLDEN)


def _hash(seed: int, position: int, ids: IntArray) -> npt.NDArray[np.uint64]:
    """52 random bits for each token id at one position, uint64 [n]."""
    key = _key(seed, position)
    if len(ids) <= _FEW:  # array by array would take longer
        return np.array([_mix(i * _GOLDEN + key) >> 12 for i in ids.tolist()], np.uint64)
    x = ids.astype(np.uint64)
    x *= np.uint64(_GOLDEN)
    x += np.uint64(key)
    shifted = np.empty_like(x)
    x ^= np.right_shift(x, _SHIFT_1, out=shifted)
    x *= np.uint64(_MIX_1)
    x ^= np.right_shift(x, _SHIFT_2, out=shifted)
    x *= np.uint64(_MIX_2)
    x ^= np.right_shift(x, _SHIFT_3, out=shifted)
    x >>= _UNUSED
    return x


def exp_noise(seed: int, position: int, ids: IntArray) -> FloatArray:
    """Exp(1) variates for the given token ids at one position, float64 [n]."""
    # 52 bits: the half is exact, so the uniform is never 1 and the noise never 0
    uniform = (_hash(seed, position, ids).astype(np.float64) + 0.5) * 2.0**-52
    noise: FloatArray = -np.log(uniform)
    return noise


def coin(seed: int, position: int) -> float:
    """One private uniform in (0, 1) per position, independent of the token noise (for XTC)."""
    return ((_key(seed ^ _XTC_STREAM, position) >> 12) + 0.5) * 2.0**-52


def draw(law: Law, seed: int, position: int) -> tuple[int, float]:
    """The token that wins the race at ``position``, and its lead in log score (inf if alone).

    A lead near zero is a near-tie: a floating-point difference in the logits could flip it.
    """
    if len(law.ids) == 1:
        return int(law.ids[0]), float("inf")
    ids, probs = law.ids, law.probs
    if len(ids) > _MANY:
        running = _contenders(law, seed, position)
        ids, probs = ids[running], probs[running]
    with np.errstate(over="ignore"):  # a vanishing probability never wins: inf is its time
        times = exp_noise(seed, position, ids) / probs
        winner = int(times.argmin())
        first = times[winner]
        times[winner] = np.inf
        lead = float(np.log(times.min() / first))
    return int(ids[winner]), lead


def _contenders(law: Law, seed: int, position: int) -> Places:
    """Indices that hold the winner and the runner-up of a race, and few others.

    A logarithm for each of 150,000 tokens takes longer than all else. The second of the likeliest
    tokens has some time t; who beats it has noise below t * p, and so, as -log(u) >= 1 - u, a
    uniform u with u + t * p >= 1. The bits of a hash are read as the mantissa of 1 + u, and a hair
    more than is needed passes.
    """
    ids, probs = law.ids, law.probs
    peaks = Peaks(probs)
    likeliest = peaks.reaching(peaks.bar(_FAVOURITES))
    times = exp_noise(seed, position, ids[likeliest]) / probs[likeliest]
    bound = float(np.partition(times, 1)[1])
    bits = _hash(seed, position, ids)
    bits |= _ONE
    reach = bits.view(np.float64)
    reach += probs * bound
    return np.flatnonzero(reach >= 2.0 - 1e-9)
