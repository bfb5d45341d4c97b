"""A reply in llama-server's words: its settings, its progress and the reason for its end."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from specllama.server.dialect import Piece, Reply
from specllama.server.figures import metrics, timings
from specllama.server.likelihood import chances_of, in_chat
from specllama.server.sampling import SAMPLERS
from specllama.settings.params import GenerateParams

_STOP_TYPES = {"stop_token": "eos", "stop_string": "word", "length": "limit", "context": "limit"}

# samplers of llama-server that are always off here, as it writes that
_OFF = {
    "dynatemp_range": 0.0,
    "dynatemp_exponent": 1.0,
    "top_n_sigma": -1.0,
    "mirostat": 0,
    "mirostat_tau": 5.0,
    "mirostat_eta": 0.1,
    "adaptive_target": -1.0,
    "adaptive_decay": 0.9,
    "min_keep": 0,
    "n_keep": 0,
    "post_sampling_probs": False,
    "lora": (),
}
_ORDER = ("penalties", "dry", "top_k", "typ_p", "top_p", "min_p", "xtc", "temperature")


def settings(params: GenerateParams) -> dict[str, Any]:
    """Return the parameters of a request under llama-server's names."""
    sampling = params.sampling
    limit = -1 if params.max_tokens is None else params.max_tokens
    bias = sampling.logit_bias.items()
    return {
        **_OFF,
        **{name: getattr(sampling, name) for name in SAMPLERS},
        "dry_sequence_breakers": list(sampling.dry_sequence_breakers),
        "logit_bias": [{"token": t, "bias": b if b > float("-inf") else None} for t, b in bias],
        "samplers": _ORDER,
        "seed": -1 if params.seed is None else params.seed,
        "n_predict": limit,
        "max_tokens": limit,
        "n_probs": params.chances or 0,
        "stop": list(params.stop),
        "ignore_eos": params.ignore_eos,
        "grammar": params.grammar or "",
        "speculative.types": params.proposer if params.speculate else "none",
        "speculative.n_max": params.draft_max,
    }


def progress(piece: Piece) -> Iterator[dict[str, Any]]:
    """Yield the number of prompt tokens that were read, step by step."""
    started = piece.reply.started
    for read, ms in piece.read:
        assert started is not None
        said = {"total": started.prompt_n, "cache": started.cached_n}
        yield {"prompt_progress": {**said, "processed": read, "time_ms": int(ms)}}


def ending(reply: Reply, model: str, params: GenerateParams, prompt: Any) -> dict[str, Any]:
    """Return a whole reply, as ``/completion`` answers it."""
    finished = reply.finished
    assert finished is not None
    out = {
        "index": reply.index,
        "content": reply.reasoning + reply.text,
        "tokens": list(finished.token_ids),
        "id_slot": -1 if reply.started is None else reply.started.slot,
        "stop": True,
        "model": model,
        "tokens_predicted": len(finished.token_ids),
        "tokens_evaluated": finished.prompt_n,
        "generation_settings": settings(params),
        "prompt": prompt,
        "has_new_line": "\n" in finished.text,
        "truncated": finished.reason == "context",
        "stop_type": _STOP_TYPES.get(finished.reason, "none"),
        "stopping_word": finished.stop or "",
        "tokens_cached": finished.prompt_n + len(finished.token_ids),
        "timings": timings([reply]),
        "metrics": metrics([reply]),
    }
    if chances := chances_of(reply.rounds):
        out["completion_probabilities"] = in_chat(chances)
    return out


def picked(whole: Mapping[str, Any], fields: Sequence[str] | None) -> Mapping[str, Any]:
    """Return only these fields of an answer, such as ``content`` or ``timings/prompt_n``."""
    if not fields:
        return whole
    out: dict[str, Any] = {}
    for field in fields:
        value: Any = whole
        for name in field.split("/"):
            value = value.get(name) if isinstance(value, Mapping) else None
        if value is not None:
            out[field] = value
    return out
