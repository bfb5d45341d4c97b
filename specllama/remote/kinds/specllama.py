"""Our own server, asked as other clients ask it; ``remote.engine`` speaks its own language."""

from __future__ import annotations

import json

from specllama.remote.figures import Json, of, text
from specllama.remote.kinds import llama_server
from specllama.remote.kinds.kind import Found, Kind, Question, Served
from specllama.remote.wire import Look


def _recognise(look: Look) -> Found | None:
    target = of(look.object("/specllama/info").get("target"))
    if name := text(target.get("name")):
        return Found(models=(Served(name),))
    return Found() if _turns_away(look) else None


def _turns_away(look: Look) -> bool:
    """True if it is our server, but loads its model or needs a key."""
    status, _, answer = look.get("/specllama/info")
    try:
        error = of(of(json.loads(answer)).get("error")) if status in (401, 503) else {}
    except (ValueError, RecursionError):
        return False
    return error.get("code") in ("loading", "invalid_api_key")


def _body(kind: Kind, asked: Question) -> Json:
    out = llama_server.body(kind, asked)
    if asked.params.regex is not None:
        out["structured_outputs"] = {"regex": asked.params.regex}
    if asked.speculate is not None:
        out["specllama"] = {"proposer": asked.params.proposer if asked.speculate else "none"}
    return out


KIND = Kind(
    name="specllama",
    title="specllama",
    recognise=_recognise,
    body=_body,
    read=llama_server.read,
    fields=llama_server.FIELDS,
    constraints=frozenset({"json_schema", "grammar", "regex"}),
    continues={},
    switches=True,
    counters=llama_server.counters,
    thinks=True,
)
