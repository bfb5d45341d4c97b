"""mlx-lm: a draft model and its length may be named in a request; it reports no drafting."""

from __future__ import annotations

import re

from specllama.remote.figures import Json
from specllama.remote.kinds import openai
from specllama.remote.kinds.kind import LONGEST, Found, Kind, Question, Served
from specllama.remote.wire import Look

_FINGERPRINT = re.compile(r"(\d+\.\d+\.\d+)-\d+\.\d+")  # of mlx-lm, then of mlx


def _recognise(look: Look) -> Found | None:
    """Detect it by Python's own web server; its version comes with the first reply."""
    if not look.server("/health").startswith("BaseHTTP"):
        return None
    if look.object("/health").get("status") != "ok":
        return None
    return Found(models=openai.models(look) or (Served("default_model"),))


def _body(kind: Kind, asked: Question) -> Json:
    out = openai.body(kind, asked)
    out.setdefault("max_tokens", LONGEST)  # else it ends at 512
    if asked.speculate is False:
        out["num_draft_tokens"] = 0
    elif asked.draft_model:
        out["draft_model"] = asked.draft_model
    return out


def _version(fingerprint: str) -> str:
    found = _FINGERPRINT.match(fingerprint)
    return "" if found is None else found[1]


KIND = Kind(
    name="mlx-lm",
    title="mlx-lm",
    recognise=_recognise,
    body=_body,
    read=openai.read,
    fields={
        **openai.FIELDS,
        "top_k": "top_k",
        "min_p": "min_p",
        "repeat_penalty": "repetition_penalty",
        "xtc_probability": "xtc_probability",
        "xtc_threshold": "xtc_threshold",
    },
    constraints=frozenset(),
    switches=True,
    thinks=True,
    version_of=_version,
)
