"""The transcript of a client's session, without its vendor's texts, for `tests/data/clients`.

    python tests/lab/client_transcript.py EXCHANGES.jsonl CLIENT VERSION DATE --ours TEXT …

EXCHANGES is what `record_clients.py --record` wrote. What stays: the order, names of fields and
tools, kinds, ids, sizes, and texts named by `--ours`. Any other text becomes its length and a
digest, so that equal texts stay equal; `tests/support/client_answers.py` fills them up again.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))

from client_answers import heard

HEADERS = ("accept", "anthropic-beta", "anthropic-version", "authorization", "content-type",
           "originator", "user-agent", "x-api-key", "x-app")  # fmt: skip
WORD = re.compile(r"[\w.:/@^$*+?\\()|\[\]{}<>,;=#-]{0,80}")
KEPT = re.compile(r"x-anthropic-billing-header: [\w.:=; -]+")


def trimmed(value: Any, ours: set[str], key: str = "") -> Any:
    if isinstance(value, dict):
        call = isinstance(value.get("name"), str) and value.keys() & {"input", "arguments"}
        kept = call or ()
        return {k: v if k in kept else trimmed(v, ours, k) for k, v in value.items()}
    if isinstance(value, list):
        return [trimmed(one, ours, key) for one in value]
    if not isinstance(value, str) or value in ours or KEPT.fullmatch(value):
        return value
    if key not in ("description", "instructions") and WORD.fullmatch(value):
        return re.sub(r"[0-9a-f]{32,}", lambda found: "0" * len(found[0]), value)
    return f"<{len(value)} {hashlib.sha256(value.encode()).hexdigest()[:6]}>"


def shared(body: dict[str, Any], before: list[dict[str, Any]]) -> dict[str, Any]:
    """Replace what an earlier body has, too, by its number."""
    out = {}
    for name, value in body.items():
        for i, other in enumerate(before):
            had = other.get(name)
            if not isinstance(value, list) or not isinstance(had, list) or len(value) < 2:
                continue
            same = next(
                (k for k, (a, b) in enumerate(zip(value, had, strict=False)) if a != b), None
            )
            same = min(len(value), len(had)) if same is None else same
            if same > 1 and same > out.get(name, {}).get("first", 1):
                out[name] = {"of": i, "first": same, "more": value[same:]}
        out.setdefault(name, value)
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("exchanges", type=Path)
    for name in ("client", "version", "date"):
        parser.add_argument(name)
    parser.add_argument("--ours", action="append", default=[])
    parser.add_argument(
        "--path", action="append", default=[], help="a path of this machine=another"
    )
    parser.add_argument("--most", type=int, default=2, help="of routes that write nothing")
    given = parser.parse_args()
    text = given.exchanges.read_text("utf-8")
    for pair in given.path:
        text = text.replace(*pair.split("=", 1))
    ours = {one.encode().decode("unicode_escape") for one in given.ours}
    bodies: list[dict[str, Any]] = []
    exchanges: list[dict[str, Any]] = []
    headers: dict[str, str] = {}
    silent: dict[str, int] = {}
    for line in text.splitlines():
        asked = json.loads(line)
        reply = heard(asked["path"], asked["answer"]) if asked["status"] == 200 else None
        if reply is None:
            silent[asked["path"]] = silent.get(asked["path"], 0) + 1
            if silent[asked["path"]] > given.most:
                continue
        path = "?".join(filter(None, (asked["path"], asked["query"])))
        one = {"method": asked["method"], "path": path, "status": asked["status"]}
        if asked["body"]:
            body = trimmed(asked["body"], ours)
            one["body"] = shared(body, bodies)
            headers = headers or {h: asked["headers"][h] for h in HEADERS if h in asked["headers"]}
            bodies.append(body)
        if reply is not None:
            one["heard"] = vars(reply)
        exchanges.append(one)
    client, version, date = given.client
    told = {"client": client, "version": version, "date": date, "headers": headers}
    lines = ",\n  ".join(json.dumps(one, ensure_ascii=False) for one in exchanges)
    print(json.dumps(told)[:-1] + f', "exchanges": [\n  {lines}\n]}}')


if __name__ == "__main__":
    main()
