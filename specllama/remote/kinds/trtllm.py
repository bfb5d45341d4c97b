"""TensorRT-LLM: it reports nothing of one reply, and reading its ``/metrics`` empties it."""

from __future__ import annotations

from specllama.remote.figures import text
from specllama.remote.kinds import openai
from specllama.remote.kinds.kind import Found, Kind
from specllama.remote.wire import Look


def _recognise(look: Look) -> Found | None:
    version = text(look.object("/version").get("version"))
    owned = openai.models(look, "tensorrt_llm")
    if not owned and (not version or look.text("/prometheus/metrics") is None):
        return None
    return Found(version, models=owned or openai.models(look))


KIND = Kind(
    name="trtllm",
    title="TensorRT-LLM",
    recognise=_recognise,
    body=openai.body,
    read=openai.read,
    fields=openai.MORE_FIELDS,
    thinks=True,
)
