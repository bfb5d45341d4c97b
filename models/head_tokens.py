"""The comparison of a head's tokens with its target's: converters copy the target's tokenizer."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from specllama.models.gguf import GgufHeader

_SAME_TEXTS = 0.99  # of the token ids


def other_tokens(head: GgufHeader, target: GgufHeader) -> str:
    """Describe how the tokens of a head and a target differ; "" if they are the same."""
    if head.vocab_size != target.vocab_size:
        return f"it knows {head.vocab_size:,} tokens, {target.path.name} {target.vocab_size:,}"
    if head.tokenizer_model in (None, "no_vocab", "none"):
        return ""
    pairs = list(zip(head.token_bytes, target.token_bytes, strict=True))
    other = [i for i, (a, b) in enumerate(pairs) if a != b]
    if len(other) <= (1 - _SAME_TEXTS) * len(pairs):
        return ""
    a, b = pairs[other[0]]
    return (
        f"{len(other):,} of {len(pairs):,} tokens have another text, for example "
        f"{other[0]}: {a.decode('utf-8', 'replace')!r} and {b.decode('utf-8', 'replace')!r}"
    )
