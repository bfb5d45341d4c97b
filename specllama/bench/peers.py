"""Peers as arms of a comparison: llama-server over HTTP, llama.cpp's tools as programs.

A peer gets the same prompt tokens (as ids, or as the text they spell), the same limits, seed and
sampler settings. The user starts the server, or names the program; nothing is fetched or built.
"""

from __future__ import annotations

import json
import re
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from time import perf_counter
from typing import Any
from urllib.error import URLError
from urllib.parse import urlsplit
from urllib.request import Request, urlopen

from specllama.bench.arms import Run, Task
from specllama.engine import Engine
from specllama.errors import EngineError, UsageError
from specllama.params import SamplingParams

KINDS = ("plain", "llama-server", "llama-cli", "llama-speculative-simple")
_TIMEOUT_S = 600.0


class ServerPeer:
    """A running llama-server; whether it speculates is up to how it was started."""

    exact = False

    def __init__(self, url: str, engine: Engine, sampling: SamplingParams, name: str = "") -> None:
        if urlsplit(url).scheme not in ("http", "https"):
            raise UsageError(f"{url!r} is not the address of a server", "http://127.0.0.1:8080")
        self.name = name or "llama-server"
        self._url = url.rstrip("/")
        self._engine = engine
        self._sampling = sampling

    def run(self, task: Task, repetition: int) -> Run:
        ids = self._engine.encode(task.prompt.content)[0]
        s = self._sampling
        body: dict[str, Any] = {
            "prompt": ids,
            "n_predict": task.max_tokens,
            "temperature": task.temperature,
            "top_k": s.top_k,
            "top_p": s.top_p,
            "min_p": s.min_p,
            "repeat_penalty": s.repeat_penalty,
            "seed": task.seed % 2**31,
            "ignore_eos": task.ignore_eos,
            "cache_prompt": False,
            "return_tokens": True,
        }
        begin = perf_counter()
        answer = self._post("/completion", body)
        total = perf_counter() - begin
        t = answer.get("timings", {})
        tokens = int(answer.get("tokens_predicted", t.get("predicted_n", 0)))
        return Run(
            arm=self.name,
            prompt=task.prompt.id,
            slice=task.prompt.slice,
            temperature=task.temperature,
            repetition=repetition,
            tokens=tokens,
            # its predicted_ms covers the tokens behind the first
            decode_s=float(t.get("predicted_ms", 0.0)) / 1e3,
            total_s=total,
            ttft_s=float(t.get("prompt_ms", 0.0)) / 1e3,
            drafted=int(t.get("draft_n", 0)),
            accepted=int(t.get("draft_n_accepted", 0)),
            token_ids=tuple(int(i) for i in answer.get("tokens", ())),
            text=str(answer.get("content", "")),
        )

    def _post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        request = Request(
            self._url + path,
            data=json.dumps(body).encode(),
            headers={"Content-Type": "application/json"},
        )
        try:
            with urlopen(request, timeout=_TIMEOUT_S) as response:
                answer: dict[str, Any] = json.loads(response.read())
        except (URLError, OSError, ValueError) as error:
            raise EngineError(f"no usable answer from {self._url}: {error}") from None
        return answer

    def close(self) -> None:
        pass


_SPECULATIVE = re.compile(r"decoded\s+(\d+) tokens in\s+([\d.]+) seconds")
_DRAFTED = re.compile(r"n_drafted\s*=\s*(\d+)")
_ACCEPTED = re.compile(r"n_accept\s*=\s*(\d+)")
_EVAL = re.compile(r"(?<!prompt )eval time\s*=\s*([\d.]+) ms /\s*(\d+) (?:runs|tokens)")
_PROMPT = re.compile(r"prompt eval time\s*=\s*([\d.]+) ms")


class ProgramPeer:
    """One of llama.cpp's command-line tools, started for every answer; its own clock counts.

    Args:
        kind: llama-cli or llama-speculative-simple.
        path: the program.
        extra: further arguments, say the draft length.
    """

    exact = False

    def __init__(
        self,
        kind: str,
        path: Path,
        engine: Engine,
        sampling: SamplingParams,
        *,
        extra: Sequence[str] = (),
        name: str = "",
    ) -> None:
        if not path.is_file():
            raise UsageError(f"there is no program {path}")
        self.name = name or " ".join([kind, *extra])
        self._kind = kind
        self._path = path
        self._engine = engine
        self._sampling = sampling
        self._extra = list(extra)

    def command(self, task: Task, prompt_file: str) -> list[str]:
        info, s = self._engine.info, self._sampling
        command = [
            str(self._path),
            *("-m", info.target.path, "-f", prompt_file, "-n", str(task.max_tokens)),
            *("-c", str(info.target.n_ctx), "-t", str(info.threads), "-tb", str(info.threads)),
            *(
                "--temp",
                f"{task.temperature:g}",
                "--top-k",
                str(s.top_k),
                "--top-p",
                f"{s.top_p:g}",
            ),
            *("--min-p", f"{s.min_p:g}", "--seed", str(task.seed % 2**31)),
            *("-fa", "on" if info.flash_attn else "off"),
        ]
        if task.ignore_eos:
            command.append("--ignore-eos")
        if self._kind == "llama-speculative-simple":
            if info.draft is None:
                raise UsageError(f"{self._kind} needs a draft model", "give one with -d")
            command += ["-md", info.draft.path, "--spec-type", "draft-simple"]
        else:
            command += ["-no-cnv", "--no-display-prompt", "--perf"]
        return command + self._extra

    def run(self, task: Task, repetition: int) -> Run:
        engine = self._engine
        ids = engine.encode(task.prompt.content)[0]
        pieces = [engine.vocab.piece(t, special=True) for t in ids]
        if getattr(engine.vocab, "adds_bos", False) and pieces:
            pieces = pieces[1:]  # the program adds it again
        with tempfile.TemporaryDirectory() as folder:
            prompt_file = Path(folder) / "prompt.txt"
            prompt_file.write_bytes(b"".join(pieces))
            begin = perf_counter()
            try:
                done = subprocess.run(
                    self.command(task, str(prompt_file)),
                    stdin=subprocess.DEVNULL,
                    capture_output=True,
                    timeout=_TIMEOUT_S,
                    check=False,
                )
            except (OSError, subprocess.TimeoutExpired) as error:
                raise EngineError(f"{self._path.name} could not be run: {error}") from None
            total = perf_counter() - begin
        log = done.stderr.decode("utf-8", "replace") + done.stdout.decode("utf-8", "replace")
        if done.returncode != 0:
            last = log.strip().splitlines()[-1:] or ["no output"]
            raise EngineError(f"{self._path.name} failed: {last[0]}")
        tokens, seconds = read_speed(log)
        drafted, accepted = _number(_DRAFTED, log), _number(_ACCEPTED, log)
        prompt = _PROMPT.search(log)
        return Run(
            arm=self.name,
            prompt=task.prompt.id,
            slice=task.prompt.slice,
            temperature=task.temperature,
            repetition=repetition,
            tokens=tokens + 1,
            decode_s=seconds,
            total_s=total,
            ttft_s=float(prompt[1]) / 1e3 if prompt and "simple" not in self._kind else 0.0,
            drafted=drafted,
            accepted=accepted,
        )

    def close(self) -> None:
        pass


def read_speed(log: str) -> tuple[int, float]:
    """(tokens, seconds) from what a tool printed.

    Raises:
        EngineError: it printed no figures that we know.
    """
    if found := _SPECULATIVE.search(log):
        return int(found[1]), float(found[2])
    if found := _EVAL.search(log):
        return int(found[2]), float(found[1]) / 1e3
    raise EngineError("the peer printed no timing that specllama can read")


def _number(pattern: re.Pattern[str], log: str) -> int:
    found = pattern.search(log)
    return int(found[1]) if found else 0


def make_peer(text: str, engine: Engine, sampling: SamplingParams) -> ServerPeer | ProgramPeer:
    """A peer from ``--against``: "llama-server URL", "llama-cli PATH [ARG…]".

    Raises:
        UsageError: it names no peer.
    """
    import shlex

    parts = shlex.split(text)
    if len(parts) < 2 or parts[0] not in KINDS:
        raise UsageError(
            f"cannot compare with {text!r}",
            "write plain, 'llama-server URL', 'llama-cli PATH' or 'llama-speculative-simple PATH'",
        )
    kind, where, extra = parts[0], parts[1], parts[2:]
    if kind == "llama-server":
        return ServerPeer(where, engine, sampling)
    return ProgramPeer(kind, Path(where).expanduser(), engine, sampling, extra=extra)
