"""llama.cpp's programs beside ours on one pair, as arms of a comparison.

    python tests/lab/llama_peers.py -m FILE -d FILE [-n 8] [-r 3] [--temperature 0 …]
        [--length 2 …] --against "llama-server PATH [ARG…]" --against "llama-cli PATH"
        --against "llama-speculative-simple PATH [ARG…]" [--out OUT]

A peer gets the same prompt tokens (as ids, or as the text they spell), the same limits, seed and
sampler settings. It prints the table of ``specllama bench run`` as Markdown.
"""

from __future__ import annotations

import argparse
import json
import re
import shlex
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

from specllama.bench.experiment import Arm, EngineArm, RunFigures, Task, tasks_of
from specllama.bench.prompts import half, load_prompts
from specllama.bench.report import Comparison, provenance, report_document, write_reports
from specllama.engine.engine import Engine
from specllama.engine.profiles import Profile
from specllama.errors import EngineError, UsageError
from specllama.settings.params import EngineOptions, GenerateParams, SamplingParams

KINDS = ("llama-server", "llama-cli", "llama-speculative-simple")
DRAFT_LENGTH = "--spec-draft-n-max"

_SPECULATIVE = re.compile(r"decoded\s+(\d+) tokens in\s+([\d.]+) seconds")
_DRAFTED = re.compile(r"n_drafted\s*=\s*(\d+)")
_ACCEPTED = re.compile(r"n_accept\s*=\s*(\d+)")
_EVAL = re.compile(r"(?<!prompt )eval time\s*=\s*([\d.]+) ms /\s*(\d+) (?:runs|tokens)")
_PROMPT = re.compile(r"prompt eval time\s*=\s*([\d.]+) ms")
TIMEOUT_S = 600.0
_STOP_S = 10.0


class Peer:
    """A program of the user's that answers with the engine's files and settings.

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
        self.name = name or path.name
        self._path = path
        self._engine = engine
        self._sampling = sampling
        self._extra = list(extra)


class StartedServer(Peer):
    """A llama-server of the user's, started with the engine's files and settings at first use.

    It drafts with the engine's draft model, if there is one, and is ended by ``close``.
    """

    def __init__(self, path: Path, engine: Engine, *more: Any, **named: Any) -> None:
        super().__init__(path, engine, *more, **named)
        port = _free_port()
        self.url = f"http://127.0.0.1:{port}"
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
        self._command += self._extra
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


class ProgramPeer(Peer):
    """One of llama.cpp's command-line tools, started for every answer; its own clock counts.

    Args:
        kind: llama-cli or llama-speculative-simple.
    """

    def __init__(self, kind: str, path: Path, *more: Any, **named: Any) -> None:
        if not path.is_file():
            raise UsageError(f"there is no program {path}")
        super().__init__(path, *more, **named)
        self._kind = kind

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

    def run(self, task: Task, repetition: int) -> RunFigures:
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
                    timeout=TIMEOUT_S,
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
        return RunFigures.told(
            self.name,
            task,
            repetition,
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
    raise EngineError("the peer printed no timings that specllama can read")


def _number(pattern: re.Pattern[str], log: str) -> int:
    found = pattern.search(log)
    return int(found[1]) if found else 0


def make_peers(
    text: str, engine: Engine, sampling: SamplingParams, lengths: Sequence[int] = ()
) -> list[Arm]:
    """Peers from one ``--against`` (see ``parse_peer``).

    Args:
        lengths: draft lengths to time a program at, one arm each, unless its own arguments say
            how far it drafts.

    Raises:
        UsageError: it names no peer, or no draft model is there for one that drafts.
    """
    kind, path, extra = parse_peer(text)
    name = " ".join([kind, *extra])
    ways = [(f"{name} {n}", [*extra, DRAFT_LENGTH, str(n)]) for n in lengths]
    if not lengths or kind == "llama-cli" or DRAFT_LENGTH in extra:
        ways = [(name, extra)]
    if kind == "llama-server":
        return [StartedServer(path, engine, sampling, extra=e, name=name) for name, e in ways]
    return [ProgramPeer(kind, path, engine, sampling, extra=e, name=name) for name, e in ways]


def parse_peer(text: str) -> tuple[str, Path, list[str]]:
    """(kind, program, further arguments) of "KIND PATH [ARG…]".

    Raises:
        UsageError: it names no peer, or a program that is not there.
    """
    try:
        parts = shlex.split(text)
    except ValueError as error:
        raise UsageError(f"cannot read the peer {text!r}: {error}") from None
    if len(parts) < 2 or parts[0] not in KINDS:
        raise UsageError(
            f"cannot compare with {text!r}",
            "write 'llama-server PATH', 'llama-cli PATH' or 'llama-speculative-simple PATH'",
        )
    kind, path, extra = parts[0], Path(parts[1]).expanduser(), parts[2:]
    if not path.is_file():
        raise UsageError(f"there is no program {path}", f"the path of a {kind} that you have")
    return kind, path, extra


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("-m", "--model", default="tiny")
    parser.add_argument("-d", "--draft-model")
    parser.add_argument("-c", "--ctx-size", type=int, default=1024)
    parser.add_argument("-t", "--threads", type=int)
    parser.add_argument("-n", "--count", type=int, default=8)
    parser.add_argument("-r", "--repetitions", type=int, default=3)
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--temperature", type=float, nargs="+", default=[0.0])
    parser.add_argument("--length", type=int, nargs="+", default=[])
    parser.add_argument("--against", action="append", required=True)
    parser.add_argument("--proposer", default="auto")
    parser.add_argument("--no-ignore-eos", dest="whole", action="store_false")
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    options = EngineOptions(n_ctx=asked.ctx_size, threads=asked.threads)
    with Engine.load(asked.model, asked.draft_model, options) as engine:
        engine.measure()
        base = GenerateParams(proposer=asked.proposer)
        key = engine.windows.profile.key
        arms: list[Arm] = [
            EngineArm("plain", engine, base.replace(speculate=False)),
            EngineArm(asked.proposer, engine, base, begin=lambda: Profile(key=key)),
        ]
        for k in asked.length:
            arms.append(EngineArm(f"fixed {k}", engine, base.replace(window="fixed", draft_max=k)))
        sampling = base.on_card(engine.info.target.card).sampling  # peers know no card
        for text in asked.against:
            arms += make_peers(text, engine, sampling, asked.length)
        prompts = half(load_prompts(), "bench")[: asked.count]
        tasks = tasks_of(prompts, asked.temperature, asked.max_tokens, ignore_eos=asked.whole)
        try:
            result = Comparison.of(arms, tasks, repetitions=asked.repetitions)
        finally:
            for arm in arms:
                arm.close()
        result.provenance = provenance(engine.info)
        print(report_document(result))
        if asked.out:
            write_reports(result, asked.out)


if __name__ == "__main__":
    main()
