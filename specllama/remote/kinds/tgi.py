"""Text Generation Inference, which is archived: recognised, and good for a chat."""

from __future__ import annotations

from specllama.remote.figures import text, whole
from specllama.remote.kinds import openai
from specllama.remote.kinds.kind import Found, Kind, Served
from specllama.remote.wire import Look


def _recognise(look: Look) -> Found | None:
    info = look.object("/info")
    model, version = text(info.get("model_id")), text(info.get("version"))
    if not model or not version:
        return None
    n_ctx = whole(info.get("max_total_tokens")) or 0
    return Found(version, models=(Served(model, n_ctx),))


KIND = Kind(
    name="tgi",
    title="TGI",
    recognise=_recognise,
    body=openai.body,
    read=openai.read,
    raw="",
    fields=openai.FIELDS,
    constraints=frozenset(),
)
