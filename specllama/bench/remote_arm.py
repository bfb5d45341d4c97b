"""Other engines as arms of a comparison: servers that run already, used as a client uses them.

They get the same messages, limits, seeds and sampler settings; each puts the messages into its own
chat template. Times are those of the client, from the request on.
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from urllib.parse import urldefrag, urlsplit

from specllama.bench.experiment import RunFigures, Task
from specllama.errors import UsageError
from specllama.remote.address import Address
from specllama.remote.foreign import ForeignEngine
from specllama.remote.remote_engine import open_remote
from specllama.settings.params import PROPOSERS, GenerateParams

_LISTENS = "0A"
_FOLDER = re.compile(r"(?:/[\w.+~-]+)+/(?=[\w.+~-])")
_SECRET = re.compile(r"^--?\S*(key|token(?!s|iz)|secret|password)", re.I)
_PROC = Path("/proc")


def server_of(url: str) -> int | None:
    """Return the process that listens at a port of this machine; None if we may not see it."""
    parts = urlsplit(url)
    port = parts.port or {"http": 80, "https": 443}.get(parts.scheme, 0)
    if parts.hostname not in ("127.0.0.1", "localhost", "::1"):
        return None
    sockets = {
        f"socket:[{inode}]"
        for table in ("tcp", "tcp6")
        for _, local, _, state, *_, inode in _connections(_PROC / "net" / table)
        if state == _LISTENS and int(local.rpartition(":")[2], 16) == port
    }
    for process in _PROC.glob("[0-9]*"):
        with suppress(OSError):
            # unlike readlink, realpath passes over one that was closed since it was listed
            if any(Path(os.path.realpath(fd)).name in sockets for fd in (process / "fd").iterdir()):
                return int(process.name)
    return None


def _connections(table: Path) -> Iterator[list[str]]:
    with suppress(OSError):
        for line in table.read_text().splitlines()[1:]:
            yield line.split()[:10]


def command_of(url: str) -> str:
    """Return the command of the server at a port of this machine, its program first; "" for others.

    Folders are left out, and so are the values of arguments that may be secret.
    """
    pid, words = server_of(url), list[str]()
    with suppress(OSError):
        words = (_PROC / str(pid) / "cmdline").read_bytes().decode("utf-8", "replace").split("\0")
    words = [_FOLDER.sub("", word) for word in words if word]
    for at, word in enumerate(words):
        if _SECRET.search(word):
            flag, equals, _ = word.partition("=")
            words[at] = flag + equals + ("…" if equals else "")
            if not equals and at + 1 < len(words):
                words[at + 1] = "…"
    return re.sub(r"'(\S*…)'", r"\1", shlex.join(words))


def cpu_seconds(pid: int) -> float:
    """Return the processor seconds of a process and its descendants since they began."""
    told: dict[int, tuple[int, int]] = {}  # parent, ticks
    for process in _PROC.glob("[0-9]*"):
        with suppress(OSError, IndexError):
            said = (process / "stat").read_text().rpartition(")")[2].split()
            told[int(process.name)] = int(said[1]), int(said[11]) + int(said[12])
    family, found = {pid}, [pid]
    while found:  # numbers of processes begin anew some time: a child's may be the smaller one
        found = [one for one, (parent, _) in told.items() if parent in found and one not in family]
        family.update(found)
    ticks = sum(told[one][1] for one in family if one in told)
    return ticks / os.sysconf("SC_CLK_TCK")


LONG = 24  # tokens of a reply whose pace tells something: an event may hold a whole round
Count = Callable[[str], int]
# what changes nothing at temperature 0, and is refused by some engines while they draft
IDLE: dict[str, Any] = {"top_k": 0, "top_p": 1.0, "min_p": 0.0}


@dataclass(slots=True)
class RemoteArm:
    """A server under some parameters.

    Args:
        params: sampling; temperature, seed and length come from the task.
        speculation: on or off, where a request can say so; None leaves it to the server.
        count: tokens of a text, for replies that the server does not count.
    """

    engine: ForeignEngine
    params: GenerateParams
    speculation: bool | None = None
    name: str = ""
    count: Count | None = None

    def __post_init__(self) -> None:
        state = {None: "", False: " plain", True: " drafting"}[self.speculation]
        self.name = self.name or self.engine.kind.title + state
        self.params = self.params.replace(from_card=())

    def run(self, task: Task, repetition: int) -> RunFigures:
        """Run a task alone: the server's counters replace figures that the answer lacks."""
        return self.answer(task, repetition, alone=True)

    def answer(self, task: Task, repetition: int, *, alone: bool = False) -> RunFigures:
        chosen = {"temperature": task.temperature} | ({} if task.temperature else IDLE)
        params = task.prompt.bound(self.params).replace(
            sampling=replace(self.params.sampling, **chosen),
            max_tokens=task.max_tokens,
            seed=task.seed,
            ignore_eos=task.ignore_eos,
        )
        answered = self.engine.ask(
            task.prompt.content, params, stream=True, speculation=self.speculation, counted=alone
        )
        first_s, draft = answered.first_s or answered.seconds, answered.draft
        text, tokens = answered.reasoning + answered.text, answered.tokens
        if tokens is None:
            tokens = 0 if self.count is None else self.count(text)
        return RunFigures.told(
            self.name,
            task,
            repetition,
            tokens=tokens,
            decode_s=answered.seconds - first_s if tokens >= LONG else 0.0,
            total_s=answered.seconds,
            ttft_s=first_s,
            drafted=None if draft is None else draft.drafted,
            accepted=None if draft is None else draft.accepted,
            text=text,
        )

    def close(self) -> None:
        self.engine.close()

    def to_dict(self) -> dict[str, str]:
        """Describe the server, as far as it reports itself: for the provenance of a report."""
        engine = self.engine
        return {
            "arm": self.name,
            "url": engine.address.url,
            "engine": engine.name,
            "model": engine.model.id,
            "flags": command_of(engine.address.url) or engine.flags,
        }


def load_arm(text: str, params: GenerateParams, key: str = "") -> RemoteArm:
    """Open an arm from ``URL`` or ``URL#METHOD``, which names the method to draft with.

    Raises:
        UsageError: it is something else, or that server cannot be told to draft so.
        SpecllamaError: nobody answers there.
    """
    url, proposer = urldefrag(text)
    if not url or proposer not in ("", *PROPOSERS):
        raise UsageError(
            f"cannot read the server {text!r}", "for example http://127.0.0.1:8484#none"
        )
    engine = open_remote(Address(url, key))
    if proposer and not engine.switches:
        engine.close()
        raise UsageError(
            f"{engine.kind.title} cannot be told how to draft", f"leave out #{proposer}"
        )
    params = params.replace(proposer=proposer or params.proposer)
    speculation = proposer != "none" if proposer else None
    return RemoteArm(engine, params, speculation=speculation, name=text)


def remote_arms(
    server: Address, params: GenerateParams, *, ignore_eos: bool, count: Count | None = None
) -> list[RemoteArm]:
    """Open an arm for a server; two, plain and drafting, if a request can switch it.

    Raises:
        SpecllamaError: nobody answers there.
        UsageError: it ends its replies before the length that every arm is to write.
    """
    engine = open_remote(server)
    if ignore_eos and "ignore_eos" not in engine.kind.fields:
        engine.close()
        raise UsageError(
            f"{engine.kind.title} ends a reply where its model does, and the other arms go on",
            "compare whole replies: --no-ignore-eos",
        )
    ways = (False, True) if engine.switches else (None,)
    return [RemoteArm(engine, params, speculation=way, count=count) for way in ways]
