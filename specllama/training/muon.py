"""Muon: momentum whose update is made orthogonal, for the matrices inside of blocks."""

from __future__ import annotations

import torch
from torch import Tensor


class Muon(torch.optim.Optimizer):  # type: ignore[misc]
    """The optimizer (Jordan et al. 2024)."""

    def __init__(self, params: list[Tensor], lr: float, decay: float = 0.05) -> None:
        super().__init__(params, {"lr": lr, "decay": decay})

    def step(self, closure: None = None) -> None:
        """Make one update."""
        with torch.no_grad():
            self._update()

    def _update(self) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if "m" not in state:
                    state["m"] = torch.zeros_like(p)
                m = state["m"].lerp_(p.grad, 0.05)
                g = p.grad.lerp(m, 0.95).bfloat16()
                tall = g.shape[0] > g.shape[1]
                x = g.T if tall else g
                x = x / (x.float().norm().bfloat16() + 1e-7)
                for _ in range(5):
                    gram = x @ x.T
                    x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
                update = (x.T if tall else x).to(p.dtype)
                p.mul_(1 - group["decay"] * group["lr"])
                scale = max(1.0, p.shape[0] / p.shape[1]) ** 0.5
                p.add_(update, alpha=-group["lr"] * scale)
