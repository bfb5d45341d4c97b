"""Programs as arms of a comparison: llama.cpp's server and its command-line tools.

A peer gets the same prompt tokens (as ids, or as the text they spell), the same limits, seed and
sampler settings. The user names a program; nothing is fetched or built.
"""

from __future__ import annotations

import re
import shlex
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from time import perf_counter

from specllama.bench.arms import Arm, RunFigures, Task
from specllama.bench.peer_server import TIMEOUT_S, StartedServer
from specllama.engine.engine import Engine
from specllama.errors import EngineError, UsageError
from specllama.settings.params import SamplingParams

KINDS = ("plain", "llama-server", "llama-cli", "llama-speculative-simple")
DRAFT_LENGTH = "--spec-draft-n-max"

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
    if len(parts) < 2 or parts[0] not in KINDS[1:]:
        raise UsageError(
            f"cannot compare with {text!r}",
            "write plain, the URL of a server, 'llama-server PATH', 'llama-cli PATH' or "
            "'llama-speculative-simple PATH'",
        )
    kind, path, extra = parts[0], Path(parts[1]).expanduser(), parts[2:]
    if not path.is_file():
        raise UsageError(f"there is no program {path}", f"the path of a {kind} that you have")
    return kind, path, extra
