"""The first weights of an EAGLE-3 head, by least squares: training starts with one that drafts.

From random weights, a head spends most of a short training on three things that can be set at once:

- *One kind of state.* The fused state is fitted to the target's last hidden state, which is also
  what the head's own output is to be: the head can then read either.
- *The token.* It enters through attention alone, so some heads look for the place that holds their
  own token (usually the place itself) and bring its code.
- *Copying.* As many look for the place whose state says that this token came last, and bring the
  token that followed. A place holds the state after a token and the embedding of the next one, so
  one layer is enough where a plain model needs two.

What these bring is then fitted to what the last hidden state will be.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from specllama.training.eagle_head import EagleHead, rope_tables

SELF_SCORE = 16.0  # attention logit of a place for itself
COPY_SCORE = 15.0  # and for a place that followed the same token
CODE = 24  # size of the code by which a head compares tokens: as many slow RoPE pairs hold it


def ridge(x: Tensor, y: Tensor, strength: float = 1e-2) -> Tensor:
    """Return the matrix w with x @ w.T close to y."""
    gram = x.T @ x
    gram += strength * gram.diagonal().mean() * torch.eye(x.shape[1])
    return torch.linalg.solve(gram, x.T @ y).T


def token_codes(h: Tensor, size: int, generator: torch.Generator) -> Tensor:
    """Make random codes of about unit variance, hardly correlated, one row per token."""
    x = h - h.mean(0)
    values, vectors = torch.linalg.eigh(x.T @ x / len(x))
    used = values > min(0.1 * float(values.max()), float(values[-size]) * 0.999)
    white = x @ vectors[:, used] / values[used].sqrt()
    mix = torch.linalg.qr(torch.randn(white.shape[1], white.shape[1], generator=generator)).Q
    return white @ mix[:, :size]


def seed_head(
    head: EagleHead,
    words: Tensor,
    embedded: Tensor,
    features: Tensor,
    states: Tensor,
    judged: Tensor,
    seed: int = 0,
) -> None:
    """Set the fusing matrix and attention of a new head; its feed-forward net still adds nothing.
    Call it without gradients.

    Args:
        words: [tokens, width] embeddings of usual tokens.
        embedded, features, states, judged: see ``Lesson``, some thousand places.
        seed: of the random codes.
    """
    s, wide = head.s, head.s.width
    size, half = s.head_size, s.heads // 2
    code = min(CODE, size // 2)
    generator = torch.Generator().manual_seed(seed)
    features = features * head.get_buffer("scale")
    behind, ahead = states[:, :-1], states[:, 1:]
    head.fc.weight.copy_(ridge(features[judged], behind[judged], 1e-3))
    if not half:
        return
    state = head.fc(features)
    read = head.attn_norm_2(state)
    table, token = head.attn_norm(words), head.attn_norm(embedded)

    for matrix in (head.attn_q, head.attn_k):
        matrix.weight.mul_(0.2)
    own = ridge(table, token_codes(table, size, generator))
    own *= math.sqrt(SELF_SCORE / math.sqrt(size))
    match = ridge(table, token_codes(table, code * half, generator))
    sharp = math.sqrt(COPY_SCORE * math.sqrt(size) / code)
    # the state at a place follows the token before the one at that place
    known = judged[:, 1:]
    key = ridge(read[:, 1:][known], (token[:, :-1] @ match.T)[known])
    for h in range(half):
        rows = slice(h * size, (h + 1) * size)
        head.attn_q.weight[rows, :wide] += own
        head.attn_k.weight[rows, :wide] += own
        # the last pairs turn slowly enough to compare contents over hundreds of tokens
        slow = slice((half + h + 1) * size - code, (half + h + 1) * size)
        some = slice(h * code, (h + 1) * code)
        for matrix, columns, values in (
            (head.attn_q, slice(0, wide), match[some] * sharp),
            (head.attn_k, slice(wide, 2 * wide), key[some] * sharp),
        ):
            matrix.weight[slow] = 0
            matrix.weight[slow, columns] = values
    spoken = ridge(table, token_codes(table, size * half, generator))
    head.attn_v.weight[: 2 * half * size].zero_()
    head.attn_v.weight[: 2 * half * size, :wide] = spoken.repeat(2, 1)

    z = torch.cat((token, read), -1)
    brought = head.attend(z, *(t.to(z) for t in rope_tables(size, s.rope_base, z.shape[1])))[2]
    head.attn_output.weight.copy_(ridge(brought[judged], (ahead - state)[judged]))
