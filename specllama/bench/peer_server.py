"""llama-server as an arm of a comparison, started for it."""

from __future__ import annotations

import json
import socket
import subprocess
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from time import perf_counter
from typing import Any
from urllib.error import URLError
from urllib.request import Request, urlopen

from specllama.bench.arms import RunFigures, Task
from specllama.engine.engine import Engine
from specllama.errors import EngineError
from specllama.settings.params import SamplingParams

TIMEOUT_S = 600.0
_STOP_S = 10.0


class StartedServer:
    """A llama-server of the user's, started with the engine's files and settings at first use.

    It drafts with the engine's draft model, if there is one, and is ended by ``close``.

    Args:
        path: the program.
        extra: further arguments, say the draft length.
    """

    def __init__(
        self,
        path: Path,
        engine: Engine,
        sampling: SamplingParams,
        *,
        extra: Sequence[str] = (),
        name: str = "",
    ) -> None:
        port = _free_port()
        self.name = name or "llama-server"
        self.url = f"http://127.0.0.1:{port}"
        self._engine = engine
        self._sampling = sampling
        info = engine.info
        threads = str(info.threads)
        self._command = [
            str(path),
            *("-m", info.target.path, "-c", str(info.target.n_ctx), "-np", "1"),
            *("-t", threads, "-tb", threads, "-fa", "on" if info.flash_attn else "off"),
            *("--host", "127.0.0.1", "--port", str(port)),
        ]
        if info.draft is not None:
            self._command += ["-md", info.draft.path, "--spec-type", "draft-simple"]
        self._command += extra
        self._log = tempfile.TemporaryFile()  # noqa: SIM115  # closed with the server
        self._process: subprocess.Popen[bytes] | None = None

    def run(self, task: Task, repetition: int) -> RunFigures:
        if self._process is None:
            self._start()
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
        return RunFigures.told(
            self.name,
            task,
            repetition,
            tokens=tokens,
            # its predicted_ms covers the tokens after the first
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
            self.url + path,
            data=json.dumps(body).encode(),
            headers={"Content-Type": "application/json"},
        )
        try:
            with urlopen(request, timeout=TIMEOUT_S) as response:
                answer: dict[str, Any] = json.loads(response.read())
        except (URLError, OSError, ValueError) as error:
            raise EngineError(f"no usable answer from {self.url}: {error}") from None
        return answer

    def close(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.terminate()
            try:
                process.wait(_STOP_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self._log.close()

    def _start(self) -> None:
        try:
            self._process = subprocess.Popen(
                self._command, stdin=subprocess.DEVNULL, stdout=self._log, stderr=self._log
            )
        except OSError as error:
            raise EngineError(f"{self._command[0]} could not be run: {error}") from None
        deadline = time.monotonic() + TIMEOUT_S
        while self._process.poll() is None:
            try:
                with urlopen(f"{self.url}/health", timeout=5.0):
                    return
            except (URLError, OSError):  # not listening yet, or still loading
                if time.monotonic() > deadline:
                    raise EngineError(f"{self.name} did not become ready in time") from None
                time.sleep(0.1)
        raise EngineError(f"{self.name} exited at once: {self._last_line()}")

    def _last_line(self) -> str:
        self._log.seek(0)
        lines = self._log.read().decode("utf-8", "replace").strip().splitlines()
        return lines[-1] if lines else "no output"


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port
