"""Record what a running engine answers, as a script of ``tests/data/engines``.

    python tests/lab/record_engine.py http://127.0.0.1:9701 llama-server-b1 --made "..." [--draft]

Our own client asks through a proxy that keeps every answer: it recognises the engine, chats, asks
for texts and logprobs, streamed and whole, all at temperature 0. Then some bad requests are sent,
and one that must call a tool; ``refusals`` and ``tools`` keep their answers.
"""

from __future__ import annotations

import argparse
import json
import threading
from contextlib import suppress
from http.client import HTTPConnection
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from specllama.errors import SpecllamaError
from specllama.interface import Message
from specllama.remote.address import Address
from specllama.remote.remote_engine import open_remote
from specllama.settings.params import GenerateParams, SamplingParams

ANSWER_S = 60.0
FOLDER = Path(__file__).parents[1] / "data" / "engines"
CHAT = "/v1/chat/completions"
TURNS = [Message("user", "What is a draft model?")]
GREEDY = GenerateParams(
    sampling=SamplingParams(temperature=0.0, top_k=0, top_p=1.0, min_p=0.0), max_tokens=64
)
_READ = (  # lines of /metrics that are kept: those of requests, tokens and drafts
    "vllm:spec_decode", "vllm:num_requests", "vllm:generation_tokens_total", "llamacpp:",
)  # fmt: skip
_LISTED = 9  # tokens of the reply whose logprobs are asked for; of no other
_KEPT_HEADERS = ("server", "x-request-id", "content-type")


class Recorder:
    """A proxy in front of an engine. ``got`` and ``posted`` are what it answered, in order."""

    def __init__(self, url: str) -> None:
        self.host = urlsplit(url).netloc
        self.server = ""
        self.echoes = False
        self.got: dict[str, tuple[int, str]] = {}
        self.posted: list[tuple[str, dict[str, Any], int, str]] = []

    def ask(
        self, verb: str, path: str, body: bytes | None, headers: dict[str, str]
    ) -> tuple[int, dict[str, str], bytes]:
        line = HTTPConnection(self.host, timeout=ANSWER_S)
        line.request(verb, path, body, headers)
        answer = line.getresponse()
        told = {name.lower(): value for name, value in answer.getheaders()}
        content = answer.read()
        line.close()
        self.server = told.get("server", self.server)
        mark = headers.get("x-request-id")
        self.echoes = self.echoes or (mark is not None and told.get("x-request-id") == mark)
        text = content.decode("utf-8", "replace")
        if verb == "GET":
            self.got[path] = answer.status, text
        else:
            self.posted.append((path, json.loads(body or b"{}"), answer.status, text))
        return answer.status, told, content

    def post(self, path: str, body: dict[str, Any]) -> tuple[int, str]:
        """Past the client; 200 and nothing where no answer comes."""
        headers = {"content-type": "application/json"}
        try:
            status, _, content = self.ask("POST", path, json.dumps(body).encode(), headers)
        except OSError:
            return 200, ""
        self.posted.pop()
        return status, content.decode("utf-8", "replace")

    def serve(self) -> ThreadingHTTPServer:
        recorder = self

        class Handler(BaseHTTPRequestHandler):
            def log_message(self, *args: Any) -> None:
                """Nothing."""

            def version_string(self) -> str:
                return recorder.server or "proxy"

            def _pass(self) -> None:
                size = int(self.headers.get("content-length") or 0)
                headers = {n.lower(): v for n, v in self.headers.items() if n.lower() != "host"}
                status, told, content = recorder.ask(
                    self.command, self.path, self.rfile.read(size) or None, headers
                )
                self.send_response(status)
                for name in _KEPT_HEADERS[1:]:
                    if name in told:
                        self.send_header(name, told[name])
                self.end_headers()
                self.wfile.write(content)

            do_GET = do_POST = _pass

        server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        return server


def read_by_hand(stream: str, kind: str) -> dict[str, Any]:
    """What an answer tells, read without our client: text, tokens, finish, what was drafted."""
    out: dict[str, Any] = {"text": "", "tokens": None, "drafted": None, "finish": ""}
    events = [line.removeprefix("data:").strip() for line in stream.splitlines()]
    for line in events:
        if not line.startswith("{"):
            continue
        chunk = json.loads(line)
        for choice in chunk.get("choices") or ():
            said = choice.get("delta") or choice.get("message") or {}
            out["text"] += said.get("content") or choice.get("text") or ""
            out["finish"] = choice.get("finish_reason") or out["finish"]
        if "done" in chunk:  # Ollama's own way
            out["text"] += chunk["message"]["content"]
            out["finish"] = chunk.get("done_reason", "")
            out["tokens"] = chunk.get("eval_count", out["tokens"])
        if (usage := chunk.get("usage")) and usage.get("completion_tokens") is not None:
            out["tokens"] = usage["completion_tokens"]
        timings = chunk.get("timings") or {}
        if "draft_n" in timings and "done" not in chunk:
            out["drafted"] = [timings["draft_n"], timings["draft_n_accepted"]]
        told = (chunk.get("metrics") or {}).get("speculative_decoding")
        if told and kind == "vllm":
            out["drafted"] = [told["num_draft_tokens"], told["num_accepted_draft_tokens"]]
        if "cache_n" in timings and "done" not in chunk:
            out["cached"] = timings["cache_n"]
    return out


def record(url: str, as_kind: str, *, draft: bool | None, model: str | None) -> dict[str, Any]:
    """The script, without what says where it was made."""
    recorder = Recorder(url)
    proxy = recorder.serve()
    here = f"http://127.0.0.1:{proxy.server_address[1]}"
    wish = GREEDY.replace(seed=1)
    with open_remote(Address(here, kind=as_kind, model=model or "")) as engine:
        kind, raw = engine.kind, engine.kind.raw
        for stream in (True, False):
            engine.ask(TURNS, wish, stream=stream, speculation=draft)
        for stream in (True, False) if raw else ():
            with suppress(SpecllamaError):
                engine.ask("A draft model is", wish.replace(max_tokens=32), stream=stream)
        with suppress(SpecllamaError):
            engine.ask(TURNS, wish.replace(max_tokens=_LISTED, chances=3))
        with suppress(SpecllamaError):
            engine.counters()
        version, flags, chosen = engine.version, engine.flags, engine.model.id
    proxy.shutdown()
    said: dict[str, Any] = {"stream": {}, "whole": {}}
    for path, body, status, text in recorder.posted:
        if status != 200:
            continue
        if _LISTED in (body.get("max_tokens"), body.get("options", {}).get("num_predict")):
            if '"top_logprobs"' in text:
                said["logprobs"] = text
        else:
            said["stream" if body.get("stream") else "whole"][path] = text
    tells = read_by_hand(said["stream"][kind.chat], kind.name)
    whole = read_by_hand(said["whole"][kind.chat], kind.name)
    tells |= {f"whole_{name}": whole[name] for name in ("text", "tokens")
              if whole[name] != tells[name]}  # fmt: skip
    if whole["drafted"] != tells["drafted"]:
        tells["whole"] = whole["drafted"]
    if tells["finish"] != "length":
        del tells["finish"]
    named = {"model": chosen} if chosen else {}
    bad: dict[str, dict[str, Any]] = {
        "a prompt that is too long": {"messages": [{"role": "user", "content": "word " * 2500}]},
        "no messages": {},
        "a model that is not there": {"model": "no/such-model",
                                      "messages": [{"role": "user", "content": "Hi"}]},
        "a temperature below 0": {"temperature": -1,
                                  "messages": [{"role": "user", "content": "Hi"}]},
    }  # fmt: skip
    refusals = {}
    for what, body in bad.items():
        status, text = recorder.post(kind.chat, {**named, "max_tokens": 4, "stream": False} | body)
        if status != 200:
            refusals[what] = [status, text[:2000]]
    place = {"type": "object", "properties": {"at": {"enum": ["sea"]}}, "required": ["at"]}
    tool = {"type": "function", "function": {"name": "look", "parameters": place}}
    status, text = recorder.post(kind.chat, {
        "model": chosen, "stream": True, "temperature": 0, "max_tokens": 48, "tools": [tool],
        "tool_choice": "required", "messages": [{"role": "user", "content": "Look at the sea."}],
    })  # fmt: skip
    tools = {"tools": text} if status == 200 and '"tool_calls"' in text else {}
    got = {p: _page(p, t) for p, (s, t) in recorder.got.items() if s == 200}
    failed = {p: [s, t[:200]] for p, (s, t) in recorder.got.items() if s not in (200, 404)}
    return {
        "kind": kind.name, "version": version, **({"flags": flags} if flags else {}), "get": got,
        **({"errors": failed} if failed else {}), **({"echo": True} if recorder.echoes else {}),
        **said, "refusals": refusals, **tools, "headers": {"server": recorder.server},
        "tells": tells,
    }  # fmt: skip


def _page(path: str, text: str) -> str:
    if path.endswith("/metrics"):
        return "".join(f"{line}\n" for line in text.splitlines() if line.startswith(_READ))
    with suppress(ValueError):
        found = json.loads(text)
        if isinstance(found, dict) and "chat_template" in found:
            return json.dumps({k: v for k, v in found.items() if "template" not in k})
    return text


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("url")
    parser.add_argument("name", help="of the file, without .json")
    parser.add_argument(
        "--made", required=True, help="which engine this is, and how it was started"
    )
    parser.add_argument("--draft", action="store_true", help="ask it to draft, in the request")
    parser.add_argument("--model", help="of several, which")
    parser.add_argument("--kind", default="auto", help="what it is asked as")
    parser.add_argument("--hide", action="append", default=[], metavar="FOLDER",
                        help="is written as MODELS")  # fmt: skip
    asked = parser.parse_args()
    script = record(asked.url, asked.kind, draft=asked.draft or None, model=asked.model)
    text = json.dumps({"made": f"recorded from {asked.made}", **script}, indent=1)
    for folder in asked.hide:
        text = text.replace(folder, "MODELS")
    (FOLDER / f"{asked.name}.json").write_text(f"{text}\n", "utf-8")
    tells = script["tells"]
    print(f"{asked.name}: {script['kind']} {script['version']}, {tells}, refuses "
          f"{list(script['refusals'])}{', calls tools' if 'tools' in script else ''}")  # fmt: skip


if __name__ == "__main__":
    main()
