"""The first weights of an EAGLE-3 head, by least squares: training starts with one that drafts.

From random weights, a head spends most of a short training on three things that can be set at once:

- *One kind of state.* The fused state is fitted to the target's last hidden state, which is also
  what the head's own output is to be: the head can then read either.
- *The token.* It enters through attention alone, so two heads look for the place that holds their
  own token (usually the place itself) and bring its code.
- *Copying.* Two heads look for the place whose state says that this token came last, and bring the
  token that followed. A place holds the state after a token and the embedding of the next one, so
  one layer is enough where a plain model needs two.

What the four heads bring is then fitted to what the last hidden state will be.
"""

from __future__ import annotations

import math

import torch

from specllama.models.recipe.eagle_head import EagleHead, Lesson
from specllama.models.recipe.induction import CODE, ridge, token_codes
from specllama.models.recipe.model import Tiny

SELF_SCORE = 16.0  # attention logit of a place for itself
COPY_SCORE = 15.0  # and for a place that followed the same token


def seed_head(head: EagleHead, target: Tiny, given: Lesson, seed: int = 0) -> None:
    """Set the fusing matrix and attention of a new head; its feed-forward net still adds nothing.

    Args:
        head: new; its shape is the target's, with as many KV heads as heads.
        target: read, not touched.
        given: some thousand places, rows that begin with the begin of a text.
        seed: of the random codes.
    """
    s = head.s
    size, half, wide = s.head_size, s.heads // 2, s.width
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        judged = given.judged.flatten()
        features = given.features.flatten(0, 1).float()
        ahead = given.final[:, 1:].flatten(0, 1).float()
        behind = given.final[:, :-1].flatten(0, 1).float()
        head.fc.weight.copy_(ridge(features, behind, 1e-3))
        state = head.fc(features)
        read = head.attn_norm_2(state).unflatten(0, given.tokens.shape)
        table = head.attn_norm(target.token_embd.weight)

        for matrix in (head.attn_q, head.attn_k):
            matrix.weight.mul_(0.2)
        own = ridge(table, token_codes(table, size, generator))
        own *= math.sqrt(SELF_SCORE / math.sqrt(size))
        match = token_codes(table, CODE * half, generator)
        sharp = math.sqrt(COPY_SCORE * math.sqrt(size) / CODE)
        query = ridge(table, match) * sharp
        # the state at a place follows the token before the one at that place
        key = ridge(read[:, 1:].flatten(0, 1), match[given.tokens[:, :-1].flatten()]) * sharp
        for h in range(half):
            rows = slice(h * size, (h + 1) * size)
            head.attn_q.weight[rows, :wide] += own
            head.attn_k.weight[rows, :wide] += own
            # the last pairs turn slowly enough to compare contents over hundreds of tokens
            slow = slice((half + h + 1) * size - CODE, (half + h + 1) * size)
            code = slice(h * CODE, (h + 1) * CODE)
            for matrix, columns, values in (
                (head.attn_q, slice(0, wide), query[code]),
                (head.attn_k, slice(wide, 2 * wide), key[code]),
            ):
                matrix.weight[slow] = 0
                matrix.weight[slow, columns] = values
        head.attn_v.weight.zero_()
        spoken = ridge(table, token_codes(table, size * half, generator))
        head.attn_v.weight[:, :wide] = spoken.repeat(2, 1)

        brought = head.attend(head.attn_norm(target.token_embd(given.tokens)), read)
        brought = brought.flatten(0, 1)
        missing = ahead - state
        head.attn_output.weight.copy_(ridge(brought[judged], missing[judged]))
