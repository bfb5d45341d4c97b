"""Servers that write from tables, right or wrong in a known way: as an arm, or over HTTP."""

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import numpy as np
from table_model import FakeTable, FakeVocab

from specllama.arrays import FloatArray
from specllama.bench.prompts import BenchPrompt
from specllama.remote.answers import Likely
from specllama.remote.kinds.kind import Heard
from specllama.settings.params import GenerateParams, SamplingParams

# a law and the draft's, to the law that is drawn from
Law = Callable[[FloatArray, FloatArray], FloatArray]


def right(p: FloatArray, q: FloatArray) -> FloatArray:
    return p


def toward_draft(share: float) -> Law:
    return lambda p, q: (1.0 - share) * p + share * q


def noise(p: FloatArray, q: FloatArray) -> FloatArray:
    return np.full_like(p, 1.0 / len(p))


class TableServer:
    """Writes from a table, by ``law``; asked as a remote engine is.

    Args:
        lists: it gives logprobs. spoil: changes the text of its nth reply to a prompt.
        fixed: its draws repeat for each prompt.
    """

    def __init__(
        self,
        target: FakeTable,
        draft: FakeTable | None = None,
        law: Law = right,
        *,
        lists: bool = True,
        spoil: Callable[[int, str], str] = lambda n, text: text,
        fixed: bool = False,
        seed: int = 0,
    ) -> None:
        self.vocab = FakeVocab(target.n_vocab)
        self.target, self.draft, self.law = target, draft or target, law
        self.lists, self.spoil, self.fixed = lists, spoil, fixed
        self.asked: dict[str, int] = {}
        self._rng = np.random.default_rng(seed)
        self._lock = threading.Lock()

    def __call__(self, prompt: BenchPrompt, params: GenerateParams) -> Heard:
        text = prompt.text or "".join(turn.content for turn in prompt.messages)
        with self._lock:
            return self.answer(text, params)

    def answer(self, prompt: str, params: GenerateParams) -> Heard:
        rng = np.random.default_rng(3) if self.fixed else self._rng
        if params.seed is not None:
            rng = np.random.default_rng(params.seed)
        ids = self.vocab.tokenize(prompt, add_special=True, parse_special=True)
        n, temperature = len(ids), params.sampling.temperature
        told: list[Likely] = []
        finish = "length"
        for _ in range(params.max_tokens or 16):
            p, q = (chances(table.row(ids), temperature or 1.0) for table in self._tables)
            law = self.law(p, q) if temperature else np.eye(len(p))[np.argmax(p)]
            token = int(rng.choice(len(law), p=law))
            if self.vocab.is_eog(token):
                finish = "stop"
                break
            ids.append(token)
            log = np.log(chances(self.target.row(ids[:-1]), 1.0))
            top = [int(t) for t in np.argsort(-log)[: params.chances or 0]]
            spelling = [self._piece(t) for t in top]
            told.append(Likely(self._piece(token), float(log[token]), tuple(
                (word, float(log[t])) for word, t in zip(spelling, top, strict=True)
            )))  # fmt: skip
        count = self.asked[prompt] = self.asked.get(prompt, 0) + 1
        text = self.spoil(count, "".join(one.text for one in told))
        listed = told if self.lists and params.chances is not None else []
        return Heard(text, finish=finish, tokens=len(told), prompt_n=n, logprobs=listed)

    @property
    def _tables(self) -> tuple[FakeTable, FakeTable]:
        return self.target, self.draft

    def _piece(self, token: int) -> str:
        return self.vocab.piece(token, special=True).decode()


def chances(row: Any, temperature: float) -> FloatArray:
    z = np.asarray(row, np.float64) / temperature
    p = np.exp(z - z.max())
    return np.asarray(p / p.sum())


@contextmanager
def over_http(server: TableServer) -> Iterator[str]:
    """Its address; it speaks OpenAI's dialect and nothing else."""

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *args: object) -> None:
            pass

        def _say(self, status: int, body: Any) -> None:
            data = json.dumps(body).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def do_GET(self) -> None:
            if self.path == "/v1/models":
                self._say(200, {"object": "list", "data": [{"id": "table"}]})
            else:
                self._say(404, {"error": {"message": "there is no such path"}})

        def do_POST(self) -> None:
            asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            text = "".join(turn["content"] for turn in asked.get("messages", ()))
            sampling = SamplingParams(temperature=asked.get("temperature", 1.0))
            params = GenerateParams(
                sampling=sampling, max_tokens=asked.get("max_tokens"), seed=asked.get("seed"),
                chances=asked.get("top_logprobs", asked.get("logprobs")),
            )  # fmt: skip
            with server._lock:
                reply = server.answer(asked.get("prompt") or text, params)
            listed = None
            if reply.logprobs:
                listed = {"content": [
                    {"token": one.text, "logprob": one.logprob, "bytes": [*one.text.encode()],
                     "top_logprobs": [{"token": t, "logprob": log} for t, log in one.top]}
                    for one in reply.logprobs
                ]}  # fmt: skip
            self._say(200, {
                "object": "chat.completion",
                "choices": [{
                    "index": 0, "finish_reason": reply.finish, "logprobs": listed,
                    "message": {"role": "assistant", "content": reply.text},
                }],
                "usage": {
                    "prompt_tokens": reply.prompt_n, "completion_tokens": reply.tokens,
                },
            })  # fmt: skip

    httpd = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=httpd.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{httpd.server_port}"
    finally:
        httpd.shutdown()
        httpd.server_close()
        thread.join(5)
