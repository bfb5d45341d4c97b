"""The tokens that the target will most likely choose, from the row of a draft model or a head."""

from __future__ import annotations

import numpy as np

from specllama.arrays import FloatArray, Row
from specllama.speculative.noise import exp_noise
from specllama.speculative.sampling import SamplerChain
from specllama.speculative.selection import Peaks
from specllama.speculative.types import Law

_NEAR = 8.0  # logits; a token farther below the best is never a greedy guess


def likeliest(
    law: Law, row: Row, ahead: SamplerChain, most: int, seed: int | None
) -> tuple[list[tuple[int, float]], float]:
    """Return the best ``most`` tokens with their shares, and the lead of the first in log score.

    Greedily the shares are the softmax of the logits. With a seed they are that of log q - log E
    in the race of common noise, in which the target draws its own token; without one, the law.

    Args:
        law: what the sampler chain ``ahead`` makes of ``row``.
        seed: of the common noise; None where the rule has none.
    """
    if ahead.greedy:
        top = row.max()
        ids = np.flatnonzero(row > top - np.float32(_NEAR)).astype(np.int32)
        weights: FloatArray = np.exp((row[ids] - top).astype(np.float64))
    else:
        ids, weights = law.ids, law.probs
        if seed is not None:
            weights = weights / exp_noise(seed, ahead.position, ids)
    weights = weights / weights.sum()
    order = Peaks(weights).best(max(most, 2))
    found = [(int(ids[i]), float(weights[i])) for i in order]
    lead = float(np.log(found[0][1] / found[1][1])) if len(found) > 1 else float("inf")
    if ahead.greedy and found[0][0] != (best := int(law.ids[0])):
        # a penalty or a grammar moved the best token away from the top
        found = [(best, found[0][1]), *(guess for guess in found if guess[0] != best)]
    return found[:most], min(lead, ahead.gap)
