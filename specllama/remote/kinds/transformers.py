"""``transformers serve``: sampling by a string of JSON; prompt lookup in the request."""

from __future__ import annotations

import json

from specllama.remote.figures import Json
from specllama.remote.kinds import openai
from specllama.remote.kinds.kind import LONGEST, Found, Kind, Question
from specllama.remote.wire import Look

LOOKUP = 4  # tokens that prompt lookup drafts, where a caller turns it on
_IN_CONFIG = ("top_k", "min_p", "typical_p", "repetition_penalty")
_REFUSED = ("stream_options", "logprobs", "top_logprobs")


def _recognise(look: Look) -> Found | None:
    """Detect it; it does not list a model of its command line, and a request need not name it."""
    if look.object("/health").get("status") != "ok" or not look.echoes("/health"):
        return None
    return Found()


def _body(kind: Kind, asked: Question) -> Json:
    out = openai.body(kind, asked)
    config = {name: out.pop(name) for name in _IN_CONFIG if name in out}
    for name in _REFUSED:
        out.pop(name, None)
    out.setdefault("max_tokens", LONGEST)
    if "temperature" in out:
        config["do_sample"] = out["temperature"] > 0
        if not out["temperature"]:
            del out["temperature"]  # it takes none of 0
    if asked.speculate:
        config["prompt_lookup_num_tokens"] = LOOKUP
    return {**out, "generation_config": json.dumps(config)} if config else out


KIND = Kind(
    name="transformers",
    title="transformers",
    recognise=_recognise,
    body=_body,
    read=openai.read,
    fields={
        "temperature": "temperature",
        "top_p": "top_p",
        "frequency_penalty": "frequency_penalty",
        "logit_bias": "logit_bias",
        "top_k": "top_k",
        "min_p": "min_p",
        "typical_p": "typical_p",
        "repeat_penalty": "repetition_penalty",
    },
    constraints=frozenset(),
    switches=True,
    pieces=True,
)
