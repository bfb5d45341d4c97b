"""Acceptance of a head's guesses in texts, as chains of them would be accepted."""

from __future__ import annotations

import torch
from torch import Tensor

CHAIN = 3  # guesses of the chains of which tokens a pass are counted


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
