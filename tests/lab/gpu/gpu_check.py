"""``make gpu-check``, the driver: runs the parts of ``gpu_parts`` in turn, keeps what each found.

Its report is also its state: it is written after every part, and a check goes on from the one that
it finds. So a check may be stopped at any time. A part that fails is kept with its last words, the
next ones run, and a later call tries it again behind those that never ran; one that two calls were
stopped in comes behind those that were not begun, too.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from gpu_parts import Part
from gpu_report import to_markdown
from peer_server import LlamaServer  # which ``gpu_parts`` makes findable

from specllama.errors import EngineError
from specllama.paths import replace_file

SCHEMA = "specllama.gpu-check.v1"
NAME = "gpu-check"
PART_S = 600.0
LEAST_S = 15.0  # no part is begun with less time than this
LAST_WORDS = 12  # lines
# what takes room in answers and is in no figure of the report
DROPPED = frozenset({"runs", "token_ids", "text", "events", "arguments", "check"})


@dataclass(frozen=True, slots=True)
class Done:
    """What came of a command. ``status`` None: it was stopped because its time was over."""

    status: int | None
    seconds: float
    output: str = ""
    errors: str = ""


Run = Callable[[Sequence[str], float], Done]
Free = Callable[[], int]


@dataclass(slots=True)
class Check:
    """A check that goes on in some folders.

    Attributes:
        folders: where the report is written; the first that has one is continued.
        facts: provenance; a report of another build or device is not continued.
        run: runs a command for so many seconds at most.
        free: bytes that are free on the devices.
        say: is told what happens.
    """

    folders: Sequence[Path]
    facts: Mapping[str, Any]
    run: Run
    free: Free = lambda: 0
    say: Callable[[str], None] = print
    state: dict[str, Any] = field(init=False)

    def __post_init__(self) -> None:
        self.state = {"schema": SCHEMA, "parts": {}, "begun": {}}
        for folder in self.folders:
            with suppress(OSError, ValueError):
                known = json.loads((folder / f"{NAME}.json").read_text("utf-8"))
                if known["schema"] == SCHEMA and known["facts"]["build"] == self.facts["build"]:
                    self.state = known
                    break
        self.state["facts"] = dict(self.facts)

    def go(self, parts: Iterable[Part], deadline: float) -> bool:
        """Run what is left to run until the deadline (monotonic); whether all of it ran."""
        known, begun = self.state["parts"], self.state["begun"]
        queue = sorted(
            (part for part in parts if not known.get(_key(part), {}).get("ok")),
            key=lambda part: (_key(part) in known, begun.get(_key(part), 0) > 1, part.more),
        )
        fresh = True  # nothing ran yet: this part has all the time that there is
        while queue:
            part = queue[0]
            left = deadline - time.monotonic()
            if left < LEAST_S:
                self.say(f"{len(queue)} parts are left; the same command goes on with them")
                return False
            self.say(f"{part.step}: {part.name}")
            begun[_key(part)] = begun.get(_key(part), 0) + 1
            self.write()
            found = self._try(part, min(left, PART_S))
            if found["status"] is None and left < PART_S and not fresh:
                continue  # stopped by the deadline alone: a later call has more time for it
            fresh = False
            known[_key(part)] = found
            if not found["ok"]:
                self.say(f"  failed: {found['said'][-1] if found['said'] else found['status']}")
            queue.pop(0)
            self.write()
            # what comes much later makes them again: only one pair's files are there at a time
            soon = (rest.pair for rest in queue if rest.more == part.more)
            if part.pair.folder and part.pair not in soon:
                shutil.rmtree(part.pair.folder, ignore_errors=True)
        return True

    def _try(self, part: Part, seconds: float) -> dict[str, Any]:
        """Make the pair's files if they are not there, then run the part."""
        begin = time.monotonic()
        for file, argv in part.pair.makers:
            if not Path(file).exists():
                script = (sys.executable, "-P", *argv)
                command = script if argv[0].endswith(".py") else specllama(argv)
                done = self.run(command, seconds - (time.monotonic() - begin))
                if done.status != 0:
                    return self._found(part, done, making=argv)
        argv = (part.tool, *part.argv) if part.tool else specllama(part.argv)
        with Lowest(self.free) as lowest, ExitStack() as opened:
            if part.peer:
                server = LlamaServer(Path(part.peer[0]).name, part.peer)
                opened.callback(server.close)
                try:
                    server.start()
                except EngineError as error:
                    return self._found(part, Done(1, time.monotonic() - begin, errors=str(error)))
                argv = (*argv, "--against", server.url)
            done = self.run(argv, max(seconds - (time.monotonic() - begin), 1.0))
        return {**self._found(part, done), "taken": lowest.taken}

    @staticmethod
    def _found(part: Part, done: Done, making: Sequence[str] = ()) -> dict[str, Any]:
        answer = [] if making else kept(done.output)
        proved = part.argv[0] == "prove" and bool(answer) and answer[-1].get("finished")
        said = (done.errors.strip() or done.output.strip()).splitlines()[-LAST_WORDS:]
        if done.status is None:
            said.append(f"stopped after {done.seconds:.0f} s")
        return {
            "step": part.step,
            "pair": part.pair.name,
            "command": " ".join(making or (Path(part.tool or "specllama").name, *part.argv)),
            "ok": done.status == 0 or (proved and done.status == 1),
            "status": done.status,
            "seconds": round(done.seconds, 1),
            "when": datetime.now(UTC).isoformat(timespec="seconds"),
            "answer": answer,
            "said": [line[:300] for line in said] if done.status != 0 else [],
        }

    def write(self) -> list[Path]:
        """The report as JSON and as Markdown, in every folder."""
        written = []
        texts = {"json": json.dumps(self.state, indent=1), "md": to_markdown(self.state)}
        for folder in self.folders:
            folder.mkdir(parents=True, exist_ok=True)
            for suffix, text in texts.items():
                written.append(folder / f"{NAME}.{suffix}")
                replace_file(written[-1], text.encode())
        return written


def _key(part: Part) -> str:
    return f"{part.step}: {part.name}"


def specllama(argv: Sequence[str]) -> tuple[str, ...]:
    return (sys.executable, "-P", "-m", "specllama", *argv)  # never a checkout in this folder


def kept(output: str) -> list[Any]:
    """What a command printed as JSON, one object a line or all as one, without what is bulky."""
    try:
        documents = [json.loads(output)]
    except ValueError:
        documents = []
        for line in output.splitlines():
            with suppress(ValueError):
                documents.append(json.loads(line))
    kinds = [d.get("type") for d in documents if isinstance(d, dict)]
    if "summary" in kinds:  # a proof: of its cases, those that differ
        documents = [d for d in documents if d.get("type") == "summary" or d.get("difference")]
        documents = [*documents[:20], *documents[20:][-1:]]
    elif len(documents) > 1:  # of a stream of events, what it ends with
        documents = documents[-1:]
    return [_without(document) for document in documents]


def _without(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _without(inner) for name, inner in value.items() if name not in DROPPED}
    return [_without(inner) for inner in value] if isinstance(value, list) else value


class Lowest(threading.Thread):
    """Watches how much a device has free while something runs.

    Attributes:
        taken: the most that was missing of what was free before, in bytes.
    """

    def __init__(self, free: Free) -> None:
        super().__init__(daemon=True)
        self._free = free
        self._over = threading.Event()
        self._before = free()
        self.taken = 0

    def run(self) -> None:
        while not self._over.wait(0.2):
            self.taken = max(self.taken, self._before - self._free())

    def __enter__(self) -> Lowest:
        self.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._over.set()
        self.join()


def run(argv: Sequence[str], seconds: float, environment: Mapping[str, str]) -> Done:
    """Run a command to its end, or ask it to end when its time is over."""
    begin = time.monotonic()
    with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as errors:
        try:
            process = subprocess.Popen(
                argv,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=errors,
                env={**os.environ, **environment},
            )
        except OSError as error:
            return Done(127, 0.0, errors=f"{argv[0]} could not be run: {error}")
        status: int | None
        try:
            status = process.wait(max(seconds, 1.0))
        except subprocess.TimeoutExpired:
            status = None
        finally:
            _end(process)
        texts = []
        for file in (output, errors):
            file.seek(0)
            texts.append(file.read().decode("utf-8", "replace"))
    return Done(status, time.monotonic() - begin, *texts)


def _end(process: subprocess.Popen[bytes]) -> None:
    """Interrupt it, so that it ends what it started; then without asking."""
    if process.poll() is None:
        process.send_signal(signal.SIGINT)
        try:
            process.wait(15.0)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
