"""llama.cpp's server as an arm of a comparison: it gets the tokens, limits, seeds and sampler
settings that ours get."""

from __future__ import annotations

import json
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from time import perf_counter
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

from specllama.bench.experiment import RunFigures, Task
from specllama.errors import EngineError
from specllama.settings.params import SamplingParams

TIMEOUT_S = 600.0
_STOP_S = 10.0


def server_command(
    program: Path, target: str | Path, n_ctx: int, threads: int | None = None
) -> list[str]:
    """List the words that start llama-server on a file, undrafted, without its port.

    Args:
        threads: None leaves them to it.
    """
    words = [str(program), "-m", str(target), "-c", str(n_ctx), "-np", "1", "--no-webui"]
    return words if threads is None else [*words, "-t", str(threads), "-tb", str(threads)]


class LlamaServer:
    """A server like llama-server, started at first use and again after ``close``."""

    def __init__(self, name: str, command: Sequence[str]) -> None:
        self.name = name
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        self._command = [*command, "--host", "127.0.0.1", "--port", str(port)]
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def open(self) -> bool:
        return self._process is not None

    def ask(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """Post a question.

        Raises:
            EngineError: it cannot be started, or did not answer; with what it says.
        """
        self.start()
        kind = {"Content-Type": "application/json"}
        request = Request(self.url + path, json.dumps(body).encode(), kind)
        try:
            with urlopen(request, timeout=TIMEOUT_S) as response:
                answer: dict[str, Any] = json.loads(response.read())
        except HTTPError as error:
            text = error.read().decode("utf-8", "replace")
            with suppress(ValueError, KeyError, TypeError):
                text = json.loads(text)["error"]["message"]
            raise EngineError(" ".join(text.split())[:200]) from None
        except (OSError, ValueError) as error:
            raise EngineError(f"no usable answer from {self.name}: {error}") from None
        return answer

    def start(self) -> None:
        """Start it, unless it runs, and wait until it has loaded.

        Raises:
            EngineError: it cannot be run, or ended; with its last words.
        """
        if self._process is not None:
            return
        with tempfile.TemporaryFile() as log:
            try:
                process = self._process = subprocess.Popen(
                    self._command, stdin=subprocess.DEVNULL, stdout=log, stderr=log
                )
            except OSError as error:
                raise EngineError(f"{self._command[0]} could not be run: {error}") from None
            deadline = time.monotonic() + TIMEOUT_S
            while process.poll() is None:
                with suppress(OSError), urlopen(f"{self.url}/health", timeout=5.0):
                    return
                if time.monotonic() > deadline:  # not listening yet, or still loading
                    self.close()
                    raise EngineError(f"{self.name} did not become ready in time")
                time.sleep(0.1)
            self._process = None
            log.seek(0)
            lines = log.read().decode("utf-8", "replace").strip().splitlines()
            said = [line for line in lines if "error" in line.lower()] or lines or ["no output"]
            raise EngineError(f"{self.name} ended at once: {said[-1][:200]}")

    def close(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.terminate()
            try:
                process.wait(_STOP_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


class PeerServer(LlamaServer):
    """A llama-server as an arm.

    Args:
        ids: the tokens of a prompt.
    """

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        ids: Callable[[Task], Sequence[int]],
        sampling: SamplingParams,
    ) -> None:
        super().__init__(name, command)
        self._ids, self._sampling = ids, sampling

    def run(self, task: Task, repetition: int) -> RunFigures:
        s = self._sampling
        body: dict[str, Any] = {
            "prompt": list(self._ids(task)),
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
        self.start()
        begin = perf_counter()
        answer = self.ask("/completion", body)
        total = perf_counter() - begin
        t = answer.get("timings", {})
        return RunFigures.told(
            self.name,
            task,
            repetition,
            tokens=int(answer.get("tokens_predicted", t.get("predicted_n", 0))),
            # its predicted_ms covers the tokens after the first
            decode_s=float(t.get("predicted_ms", 0.0)) / 1e3,
            total_s=total,
            ttft_s=float(t.get("prompt_ms", 0.0)) / 1e3,
            drafted=int(t.get("draft_n", 0)),
            accepted=int(t.get("draft_n_accepted", 0)),
            token_ids=tuple(int(i) for i in answer.get("tokens", ())),
            text=str(answer.get("content", "")),
        )
