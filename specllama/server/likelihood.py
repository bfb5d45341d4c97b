"""Log probabilities as clients read them: OpenAI's two shapes, and llama-server's."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from specllama.events import Chance, Chances, RoundDone
from specllama.server.dialect import Piece

_NEVER = -9999.0  # JSON has no minus infinity


def chances_of(rounds: Iterable[RoundDone]) -> list[Chances]:
    """Return the chances of every token that was emitted, accepted drafts included."""
    return [chance for done in rounds for chance in done.chances]


def pieces(piece: Piece) -> Iterator[tuple[str, list[int], list[Chances]]]:
    """Yield a piece as text, tokens and chances: token by token if chances are requested, as
    llama-server does. Text that was held back comes with the last token of those that follow it."""
    text = piece.reasoning + piece.text
    tokens = [token for done in piece.rounds for token in done.emitted]
    chances = chances_of(piece.rounds)
    if not chances:
        if text:
            yield text, tokens, []
        return
    spelled = [part for done in piece.rounds for part in done.emitted_text]
    if "".join(spelled) != text:
        spelled = [*[""] * (len(chances) - 1), text]
    for part, token, chance in zip(spelled, tokens, chances, strict=True):
        yield part, [token], [chance]


def in_chat(chances: Sequence[Chances]) -> list[dict[str, Any]]:
    """Spell ``logprobs.content`` of a chat, also llama-server's ``completion_probabilities``."""
    return [
        {**_one(chance), "top_logprobs": [_one(other) for other in chance.top]}
        for chance in chances
    ]


def _one(chance: Chance) -> dict[str, Any]:
    return {
        "id": chance.token,
        "token": text_of(chance),
        "bytes": list(chance.bytes),
        "logprob": max(chance.logprob, _NEVER),
    }


def text_of(chance: Chance) -> str:
    return bytes(chance.bytes).decode("utf-8", "replace")


def in_completions(chances: Sequence[Chances], offset: int) -> dict[str, Any]:
    """Spell ``logprobs`` of completions; ``offset``: characters of the text before the first token.
    The token itself stands among the likeliest, as OpenAI and vLLM write it."""
    texts = [text_of(chance) for chance in chances]
    offsets = []
    for text in texts:
        offsets.append(offset)
        offset += len(text)
    return {
        "tokens": texts,
        "token_logprobs": [max(chance.logprob, _NEVER) for chance in chances],
        "top_logprobs": [
            {text_of(other): max(other.logprob, _NEVER) for other in (*chance.top, chance)}
            for chance in chances
        ],
        "text_offset": offsets,
    }
