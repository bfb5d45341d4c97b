"""Every engine that we can ask, in the order in which they are recognised.

Some answer as others do: SGLang has Ollama's paths, everybody has OpenAI's.
"""

from __future__ import annotations

from specllama.errors import EngineError, UsageError
from specllama.remote.kinds import (
    llama_server,
    lmstudio,
    mlx_lm,
    ollama,
    openai,
    sglang,
    specllama,
    tgi,
    transformers,
    trtllm,
    vllm,
)
from specllama.remote.kinds.kind import Found, Kind
from specllama.remote.wire import KEY_HINT, Look

KINDS: dict[str, Kind] = {
    file.KIND.name: file.KIND
    for file in (
        specllama,
        llama_server,
        sglang,
        lmstudio,
        vllm,
        trtllm,
        tgi,
        ollama,
        mlx_lm,
        transformers,
        openai,
    )
}
AUTO = "auto"


def recognise(look: Look, name: str = AUTO) -> tuple[Kind, Found]:
    """Find the kind of engine that answers, and its report of itself; trust ``name`` if it is
    given.

    Raises:
        UsageError: there is no such kind.
        EngineDied: nobody answers. EngineError: nothing that answers there is known.
    """
    if name != AUTO:
        if name not in KINDS:
            raise UsageError(f"there is no kind of server {name!r}", f"one of {', '.join(KINDS)}")
        return KINDS[name], KINDS[name].recognise(look) or Found()
    for kind in KINDS.values():
        found = kind.recognise(look)
        if found is None:
            continue
        if kind.name == "openai" and not found.models:
            break
        return kind, found
    if look.locked:
        raise EngineError(f"the server at {look.address.url} wants a key", KEY_HINT)
    raise EngineError(
        f"what answers at {look.address.url} is no engine that is known",
        "check the address; if it speaks as OpenAI does: --remote-kind openai --remote-model ID",
    )
