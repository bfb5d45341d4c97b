"""A day in the life of a server that is left running: nothing is lost, and every reply is the one
that the same conversation gets on a fresh engine.

    python tests/lab/day_in_life.py [--conversations 40] [--turns 3] [--seed 1] [--events N]

One `specllama serve` has three models: the bundled target, the bundled draft model as a target, and
a random model. Conversations go on in a random order, up to three at once. Between them and in the
middle of replies come, N times each: a gap in which every model is unloaded; the kill of an engine
(SIGKILL); the kill of the whole server; a disk on which no state can be written any more; and
sleep, in which all of its processes stand still while the clock goes on.

A client whose reply fails asks again, as people do. A reply is equal if a fresh engine writes it,
plainly, behind the conversation as it went on from one of its turns: states that are lost are read
again, and what is read again may part from what was written at a near-tie (exactness.md). Linux
only.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))

from ggufs import write_llama

from specllama.bench.prompts import load_prompts
from specllama.engine.engine import Engine
from specllama.events import Finished
from specllama.interface import Message
from specllama.paths import bundled_dir
from specllama.settings.params import EngineOptions, GenerateParams, SamplingParams

IDLE_S = 2.0
N_CTX = 512
_PATIENCE_S = 120.0
_FULL_BYTES = 4096  # of the largest file that can be written on the full disk


@dataclass
class Talk:
    """One conversation: what was said so far, and the seeds of its replies."""

    model: str
    temperature: float
    asked: list[str]
    replies: list[str] = field(default_factory=list)
    seed: int = 0

    def messages(self, turn: int) -> list[Message]:
        said: list[Message] = []
        for question, reply in zip(self.asked, [*self.replies[:turn], None], strict=False):
            said.append(Message("user", question))
            if reply is not None:
                said.append(Message("assistant", reply))
        return said[: 2 * turn + 1]

    def params(self, turn: int) -> GenerateParams:
        return GenerateParams(
            seed=self.seed + turn,
            max_tokens=16,
            proposer="none",
            sampling=SamplingParams(temperature=self.temperature),
        )


class Server:
    """`specllama serve` as a process of its own, over files that stay when it is killed."""

    def __init__(self, models: Path, home: Path) -> None:
        self._models, self._home = models, home
        self.http = ""
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        command = [sys.executable, "-P", "-m", "specllama", "serve", "-m", str(self._models), "-q"]
        command += ["--port", "0", "-c", str(N_CTX), "-t", "1", "--parallel", "2"]
        command += ["--idle-unload", f"{IDLE_S:g}s", "--kv-disk", "1G"]
        log = self._home.with_suffix(".log")
        with log.open("wb") as said:
            self._process = subprocess.Popen(
                command,
                stdout=said,
                stderr=said,
                env=os.environ | {"SPECLLAMA_HOME": str(self._home)},
                start_new_session=True,
            )
        until = time.monotonic() + _PATIENCE_S
        while not (found := re.search(r"http://\S+", log.read_text("utf-8", "replace"))):
            alive = self._process.poll() is None and time.monotonic() < until
            assert alive, f"the server does not start: {log.read_text('utf-8')}"
            time.sleep(0.05)
        self.http = found.group()

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def engines(self) -> list[int]:
        """The child processes that hold a model."""
        found = []
        for pid in _children(self.pid):
            with suppress(OSError):
                command = Path(f"/proc/{pid}/cmdline").read_bytes()
                if b"spawn_main" in command:
                    found.append(pid)
        return found

    def memory(self) -> int:
        """What the server and its engines take, in bytes that no other process shares."""
        total = 0
        for pid in (self.pid, *_children(self.pid)):
            with suppress(OSError):
                for line in Path(f"/proc/{pid}/smaps_rollup").read_text("ascii").splitlines():
                    if line.startswith("Private_"):
                        total += int(line.split()[1]) << 10
        return total

    def kill(self, pid: int) -> None:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)

    def sleep(self, seconds: float) -> None:
        """Stand still while the clock goes on."""
        os.killpg(self.pid, signal.SIGSTOP)
        time.sleep(seconds)
        os.killpg(self.pid, signal.SIGCONT)

    def fill_disk(self, full: bool) -> None:
        """Let no process of it write more than a few bytes to a file, or as much as it will."""
        most = _FULL_BYTES if full else resource.RLIM_INFINITY
        for pid in (self.pid, *_children(self.pid)):
            with suppress(ProcessLookupError):
                resource.prlimit(pid, resource.RLIMIT_FSIZE, (most, resource.RLIM_INFINITY))

    def ask(self, talk: Talk) -> str | None:
        """The next reply of a conversation; None where the server failed."""
        turn = len(talk.replies)
        params = talk.params(turn)
        said = [{"role": one.role, "content": one.content} for one in talk.messages(turn)]
        body = {
            "model": talk.model,
            "messages": said,
            "seed": params.seed,
            "temperature": talk.temperature,
            "max_tokens": params.max_tokens,
        }
        request = urllib.request.Request(
            f"{self.http}/v1/chat/completions",
            json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        )
        try:
            with urllib.request.urlopen(request, timeout=_PATIENCE_S) as answer:
                choice = json.load(answer)["choices"][0]
        except (OSError, ValueError, urllib.error.HTTPError):
            return None
        return None if choice["finish_reason"] == "error" else str(choice["message"]["content"])

    def loaded(self) -> int:
        with urllib.request.urlopen(f"{self.http}/api/ps", timeout=_PATIENCE_S) as answer:
            return len(json.load(answer)["models"])

    def stop(self) -> None:
        if self._process is not None:
            with suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)
            self._process.wait()


@dataclass
class Day:
    """Conversations with a server, and what comes in between.

    Args:
        events: how often each kind of trouble comes.
    """

    server: Server
    talks: list[Talk]
    events: int
    turns: int
    rng: random.Random

    def __post_init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.idle: list[int] = []  # bytes, each time that no model was loaded

    def run(self) -> None:
        troubles: dict[str, Callable[[], None]] = {
            "rests": self.rest,
            "engines killed": self.kill_engine,
            "servers killed": self.kill_server,
            "full disks": self.fill_disk,
            "sleeps": self.sleep,
        }
        due = [name for name in troubles for _ in range(self.events)]
        self.rng.shuffle(due)
        rounds = -(-len(self.talks) * self.turns // 3)
        self.rest()
        for i in range(rounds):
            self._some()
            while due and len(due) > len(troubles) * self.events * (1 - (i + 1) / rounds):
                troubles[name := due.pop()]()
                self.counts[name] += 1
        while self._some():
            pass
        self.rest()

    def _some(self, trouble: Callable[[], object] | None = None) -> int:
        """The next replies of up to three conversations, at once; and what comes meanwhile."""
        open_ones = [talk for talk in self.talks if len(talk.replies) < self.turns]
        some = self.rng.sample(open_ones, min(len(open_ones), self.rng.randrange(1, 4)))
        with ThreadPoolExecutor(3) as pool:
            replies = [pool.submit(self._reply, talk) for talk in some]
            if trouble is not None:
                time.sleep(self.rng.uniform(0.0, 0.5))
                trouble()
            for reply in replies:
                reply.result()
        return len(some)

    def _reply(self, talk: Talk) -> None:
        until = time.monotonic() + _PATIENCE_S
        while (text := self.server.ask(talk)) is None:
            self.counts["asked again"] += 1
            assert time.monotonic() < until, "the server does not come back"
            time.sleep(0.2)
        talk.replies.append(text)
        self.counts["replies"] += 1

    def rest(self) -> None:
        """Wait until every model was unloaded."""
        until = time.monotonic() + IDLE_S + _PATIENCE_S
        while self.server.loaded() or self.server.engines():
            assert time.monotonic() < until, "a model stays loaded at rest"
            time.sleep(0.1)
        time.sleep(0.3)
        self.idle.append(self.server.memory())

    def kill_engine(self) -> None:
        def kill() -> None:
            if engines := self.server.engines():
                self.server.kill(self.rng.choice(engines))

        self._some(kill)

    def kill_server(self) -> None:
        def kill() -> None:
            self.server.stop()
            self.server.start()

        self._some(kill)

    def fill_disk(self) -> None:
        self.server.fill_disk(True)
        self._some()
        self.server.fill_disk(False)

    def sleep(self) -> None:
        self._some(lambda: self.server.sleep(2 * IDLE_S))

    # -- what they should have been --

    def check(self, name: str, alone: Engine) -> list[str]:
        """Replies of a model that no fresh engine writes."""
        wrong: list[str] = []
        for talk in self.talks:
            for turn in range(self.turns if talk.model == name else 0):
                begin = next((at for at in range(turn + 1) if _same(alone, talk, at, turn)), None)
                if begin is None:
                    wrong.append(f"turn {turn} of {talk}")
                else:
                    self.counts["equal"] += 1
                    self.counts["read again before"] += begin > 0
        return wrong


def _same(alone: Engine, talk: Talk, begin: int, turn: int) -> bool:
    """Whether a reply is the one of a fresh engine that has read a conversation at one turn and has
    gone on from there; it may be none, where it wrote another reply on the way."""
    alone.reset()
    for at in range(begin, turn + 1):
        *_, last = alone.generate(talk.messages(at), talk.params(at))
        assert isinstance(last, Finished)
        if last.text != talk.replies[at]:
            return False
    return True


def _children(pid: int) -> list[int]:
    found: list[int] = []
    with suppress(OSError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            for child in (task / "children").read_text("ascii").split():
                found += [int(child), *_children(int(child))]
    return found


@contextmanager
def served(folder: Path) -> Iterator[Server]:
    """A server of three models, in a home of its own."""
    models = folder / "models"
    models.mkdir()
    for name, source in (("large", "tiny-target-q4_0.gguf"), ("small", "tiny-draft-q8_0.gguf")):
        shutil.copy(bundled_dir() / source, models / f"{name}.gguf")
    write_llama(models / "random.gguf", context=N_CTX)
    server = Server(models, folder / "home")
    try:
        server.start()
        yield server
    finally:
        server.stop()


def lived(folder: Path, conversations: int, turns: int, events: int, seed: int) -> dict[str, Any]:
    """One day; what came of it, and what was wrong."""
    rng = random.Random(seed)
    texts = [one.messages[0].content[:160] for one in load_prompts()]
    names = ("large", "small", "random")
    talks = [
        Talk(
            names[i % len(names)],
            rng.choice((0.0, 0.8)),
            [rng.choice(texts) for _ in range(turns)],
            seed=10 * i,
        )
        for i in range(conversations)
    ]
    begun = time.monotonic()
    with served(folder) as server:
        day = Day(server, talks, events, turns, rng)
        day.run()
    took = time.monotonic() - begun
    wrong: list[str] = []
    for name in names:
        path = (folder / "models" / f"{name}.gguf").resolve()
        with Engine.load(path, "none", EngineOptions(n_ctx=N_CTX, threads=1)) as alone:
            wrong += day.check(name, alone)
    states = list((folder / "home").rglob("*.state"))
    return {
        **day.counts,
        "seconds": round(took, 1),
        "MB at rest": [round(n / 1e6, 1) for n in day.idle],
        "states on disk": len(states),
        "wrong": wrong,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--conversations", type=int, default=40)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--events", type=int, default=4)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        told = lived(Path(name), args.conversations, args.turns, args.events, args.seed)
    print(json.dumps(told))
    return 1 if told["wrong"] else 0


if __name__ == "__main__":
    sys.exit(main())
