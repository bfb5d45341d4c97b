"""Checks of a request's size before any of it is read.

No token of a prompt is longer than the longest one of the vocabulary, so a text of more bytes than
the context has room for such tokens cannot fit, whatever it says.
"""

from __future__ import annotations

from collections.abc import Sequence

from specllama.backend.base import Vocab
from specllama.errors import PromptTooLong
from specllama.interface import Message, Prompt

_HINT = "shorten it, or raise --ctx-size"


def require_room(n: int, n_ctx: int, what: str = "tokens") -> None:
    """Raise PromptTooLong if a prompt of ``n`` tokens, or messages, exceeds the context."""
    if n > n_ctx:
        raise PromptTooLong(
            f"the prompt of {n} {what} exceeds the available context size of {n_ctx}",
            _HINT,
            n_prompt=n,
            n_ctx=n_ctx,
        )


def require_parts(prompt: Prompt, n_ctx: int) -> None:
    """Raise PromptTooLong if it has too many parts, each of which is a token at least."""
    if not isinstance(prompt, str) and prompt:
        require_room(len(prompt), n_ctx, "messages" if isinstance(prompt[0], Message) else "tokens")


def require_size(prompt: Prompt, n_ctx: int, vocab: Vocab) -> None:
    """Raise PromptTooLong if it has too many parts, or too many bytes, to fit the context."""
    require_parts(prompt, n_ctx)
    parts: Sequence[int | str | Message] = [prompt] if isinstance(prompt, str) else prompt
    size = 0
    for part in parts:
        if isinstance(part, Message):
            size += _bytes(part.content) + _bytes(part.reasoning)
        elif isinstance(part, str):
            size += _bytes(part)
    require_text(size, n_ctx, vocab)


def require_text(n_bytes: int, n_ctx: int, vocab: Vocab) -> None:
    """Raise PromptTooLong if a text of this many bytes cannot fit the context."""
    if n_bytes <= n_ctx or not (longest := vocab.longest) or n_bytes <= n_ctx * longest:
        return
    least = -(-n_bytes // longest)
    raise PromptTooLong(
        f"a text of {n_bytes} bytes exceeds the available context size of {n_ctx} tokens, which "
        f"hold {longest} bytes each at most",
        _HINT,
        n_prompt=least,
        n_ctx=n_ctx,
    )


def _bytes(text: str) -> int:
    return len(text) if text.isascii() else len(text.encode("utf-8", "replace"))
