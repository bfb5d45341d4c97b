"""The arms of ``beside_llama.py``: what is asked, who answers, and what is kept of it."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from beside_tables import (
    ARMS,
    AUTO,
    EIGHT,
    LONGEST,
    MODES,
    PLAIN,
    PROMPTS,
    REPACKED,
    SETS,
    STORED,
    THEIRS,
)
from peer_server import PeerServer, server_command

from specllama.backend.cores import crowded
from specllama.backend.devices import cpu_name
from specllama.bench.experiment import EngineArm, RunFigures, Task, tasks_of
from specllama.bench.prompts import BenchPrompt, load_prompts
from specllama.errors import EngineError
from specllama.events import NO_GUESS, RoundDone
from specllama.models.memory import available_memory
from specllama.paths import package_versions
from specllama.settings.params import EngineOptions, GenerateParams

if TYPE_CHECKING:
    from specllama.engine.engine import Engine

N_CTX = 2048
SPARE = 2 << 30  # bytes that stay free
SELF = [sys.executable, str(Path(__file__).with_name("beside_llama.py"))]


@dataclass(frozen=True)
class Ground:
    """What is measured, and how."""

    pair: str
    target: Path
    draft: Path | None
    chats: bool
    temperature: float
    quick: bool
    rounds: int
    tokens: int
    threads: int
    llama_server: Path | None
    build: Path

    def options(self, layout: str) -> EngineOptions:
        return EngineOptions(n_ctx=N_CTX, threads=self.threads, kv_disk="off", repack=layout)

    def logs(self, arm: str) -> Path:
        return self.build / "beside-rounds" / self.target.stem / arm

    def prompts(self) -> list[BenchPrompt]:
        """The prompts, as text for a model that does not chat."""
        found = [one for name in SETS for one in load_prompts(PROMPTS / f"{name}.jsonl")]
        if not self.chats:
            found = [replace(p, messages=(), text=p.messages[-1].content) for p in found]
        return found

    def tasks(self) -> list[Task]:
        some = tasks_of(self.prompts(), [self.temperature], self.tokens, ignore_eos=not self.chats)
        return [task for task in some if not self.quick or task.prompt.id in ("edit", "json")]

    def peer(self, name: str) -> list[str]:
        """List the words that start llama-server in a mode."""
        assert self.llama_server is not None
        words = server_command(self.llama_server, self.target, N_CTX, self.threads)
        drafts = ["-md", str(self.draft)] if name.startswith("draft") else []
        return [*words, *drafts, *MODES.get(name, ["--no-repack"] if name == STORED else ())]

    def about(self) -> dict[str, Any]:
        """What the figures depend on, for people."""
        return {
            "target": self.target.name,
            "draft": self.draft and self.draft.name,
            "processor": cpu_name(),
            "threads": self.threads,
            "tokens": self.tokens,
            "versions": package_versions(),
            "llama-server": self.llama_server and version(self.llama_server),
            "date": f"{datetime.now(UTC):%Y-%m-%d}",
        }


def version(program: Path) -> str:
    done = subprocess.run([program, "--version"], capture_output=True, text=True, check=False)
    lines = (done.stderr + done.stdout).strip().splitlines()
    return next((line for line in lines if "version" in line), "?").removeprefix("version: ")


class Kept:
    """Results in a file, which is written anew with each."""

    def __init__(self, path: Path, key: str) -> None:
        self._path = path
        self._all: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
        self.found: dict[str, Any] = self._all.setdefault(key, {})

    def of(self, name: str, make: Callable[[], Any]) -> Any:
        """Return what is kept under a name; if nothing is, make it first."""
        if name not in self.found:
            self.found[name] = make()
            self._path.parent.mkdir(parents=True, exist_ok=True)
            new = self._path.with_suffix(".new")
            new.write_text(json.dumps(self._all))
            new.replace(self._path)
        return self.found[name]


class Residents:
    """What is loaded; where memory runs out, what was used longest ago is closed."""

    def __init__(self) -> None:
        self._loaded: list[Callable[[], object]] = []

    def use(self, close: Callable[[], object], n_bytes: int, *, loaded: bool) -> None:
        """Make room for what is about to be loaded, unless it is."""
        if loaded:
            self._loaded.remove(close)
        while not loaded and self._loaded and available_memory() < n_bytes + SPARE:
            self._loaded.pop(0)()
        self._loaded.append(close)


@dataclass
class KeptArm:
    """An arm whose answers are kept, and not asked for again.

    Args:
        ready: has it loaded.
    """

    arm: Any
    kept: Kept
    ready: Callable[[], object]

    @property
    def name(self) -> str:
        return str(self.arm.name)

    def key(self, task: Task, repetition: int) -> str:
        return f"{self.name} | {task.prompt.id} | T={task.temperature:g} | {repetition}"

    def lacks(self, tasks: Sequence[Task], rounds: int) -> int:
        """Count the answers that are not kept."""
        keys = {self.key(task, number) for task in tasks for number in range(rounds)}
        return len(keys - self.kept.found.keys())

    def run(self, task: Task, repetition: int) -> RunFigures:
        if repetition < 0:  # warms up what has just been loaded
            self.ready()
            return self.arm.run(replace(task, max_tokens=8), 0)

        def made() -> dict[str, Any]:
            self.ready()
            return told(self.arm.run(task, repetition))

        return figures(self.kept.of(self.key(task, repetition), made))

    def close(self) -> None:
        self.arm.close()


def told(run: RunFigures) -> dict[str, Any]:
    passes = [
        (one.source, len(one.emitted), len(one.drafted), one.accepted, one.judged, one.declined,
         one.read, one.draft_ms, one.pass_ms, one.plain_ms, one.plain_age_s, one.plain_n,
         one.plain_spread)
        for one in run.passes
    ]  # fmt: skip
    return run.to_dict(texts=True) | {"passes": passes, "crowded": crowded()}


def figures(told: dict[str, Any]) -> RunFigures:
    told = {name: value for name, value in told.items() if name != "crowded"}
    told["passes"] = [kept_round(*one) for one in told["passes"]]
    return RunFigures(**told | {"token_ids": tuple(told["token_ids"])})


def kept_round(
    source: str, tokens: int, drafted: int, accepted: int, judged: int, declined: bool,
    read: int, draft_ms: float, pass_ms: float, plain_ms: float | None, *more: Any,
) -> RoundDone:  # fmt: skip
    """Read a round with the figures of it that are kept."""
    age_s, n, spread = more
    nothing = (None,) * drafted
    return RoundDone(
        index=1, t_s=0.0, n_past=0, source=source, draft_max=0 if declined else drafted,
        window_reason="" if declined else NO_GUESS, drafted=(0,) * drafted,
        parents=tuple(range(-1, drafted - 1)), drafted_text=(), confidence=nothing, p=nothing,
        q=nothing, accepted=accepted, accepted_path=tuple(range(accepted)), target_token=None,
        target_text="", target_kind="recovered" if judged > accepted else "bonus",
        emitted=(0,) * tokens, emitted_text=(), cut=0, draft_ms=draft_ms, verify_ms=pass_ms,
        other_ms=0.0, read=read, plain_ms=plain_ms, plain_age_s=age_s, plain_n=n,
        plain_spread=spread,
    )  # fmt: skip


# -- the arms --


class Child:
    """A process of ours with the pair in a layout, started at first use and again after ``close``.
    It answers each line with one.

    Args:
        words: of this program's command line.
    """

    def __init__(self, words: Sequence[str], layout: str) -> None:
        self._command = [*SELF, *words, "--child", layout]
        self._process: subprocess.Popen[str] | None = None

    @property
    def open(self) -> bool:
        return self._process is not None

    def ask(self, *question: object) -> Any:
        if self._process is None:
            pipe = subprocess.PIPE
            self._process = subprocess.Popen(self._command, stdin=pipe, stdout=pipe, text=True)
        talk = self._process
        assert talk.stdin is not None
        assert talk.stdout is not None
        print(json.dumps(question), file=talk.stdin, flush=True)
        if not (line := talk.stdout.readline()):
            self.close()
            raise EngineError(f"a process ended when it was asked for {question[0]}")
        return json.loads(line)

    def close(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.communicate()  # it ends with its input


def answers(on: Ground, layout: str) -> Iterator[Any]:
    """Answer the lines of the input, as a child of this program.

    The layout "eight" is the one that ``auto`` takes, with a profile that is not kept: ``auto``
    learns nothing from eight guesses a round.
    """
    from specllama.engine.engine import Engine
    from specllama.engine.profiles import Profile

    base, apart = GenerateParams(), layout == EIGHT
    options = on.options("auto" if apart else layout)
    with Engine.load(on.target, on.draft or "none", options) as engine:
        if apart:
            engine.windows.use(Profile(key=engine.windows.profile.key))
        ways = {
            PLAIN: base.replace(speculate=False),
            AUTO: base,
            REPACKED: base,
            EIGHT: base.replace(proposer="draft", window="fixed", draft_max=LONGEST),
        }
        arms = {
            name: EngineArm(name, engine, way, logs=on.logs(name)) for name, way in ways.items()
        }
        for line in sys.stdin:
            name, *which = json.loads(line)
            if name == "costs":
                yield costs(on, engine)
                continue
            prompt, temperature, most = which
            tasks = {t.prompt.id: t for t in replace(on, temperature=temperature).tasks()}
            yield told(arms[name].run(replace(tasks[prompt], max_tokens=most), 0))


@dataclass
class OwnArm:
    """An arm of ours, which a child writes."""

    name: str
    child: Child

    def run(self, task: Task, repetition: int) -> RunFigures:
        told = self.child.ask(self.name, task.prompt.id, task.temperature, task.max_tokens)
        return replace(figures(told), repetition=repetition)

    def close(self) -> None:
        self.child.close()


def arms_of(
    on: Ground, kept: Kept, asked: argparse.Namespace, words: Sequence[str]
) -> list[KeptArm]:
    """All arms that were asked for, and plain decoding, which the others are compared with."""
    residents, arms = Residents(), list[KeptArm]()
    ids, wanted = kept.found.get("costs auto", {}).get("ids", {}), {PLAIN, *(asked.only or ARMS)}
    children = {layout: Child(words, layout) for layout in ("auto", "on", EIGHT)}
    for name, layout in ((PLAIN, "auto"), (AUTO, "auto"), (REPACKED, "on"), (EIGHT, EIGHT)):
        if name not in wanted or (name == EIGHT and on.draft is None):
            continue

        def room(child: Child = children[layout], n: int = size(on.target, on.draft)) -> None:
            residents.use(child.close, n, loaded=child.open)

        arms.append(KeptArm(OwnArm(name, children[layout]), kept, room))
    for name in (THEIRS, STORED, *MODES) if on.llama_server else ():
        if name not in wanted or (name.startswith("draft") and on.draft is None):
            continue
        drafts = on.draft if name.startswith("draft") else None
        peer = PeerServer(
            name, on.peer(name), lambda t: ids[t.prompt.id], GenerateParams().sampling
        )

        def started(peer: PeerServer = peer, n: int = size(on.target, drafts)) -> None:
            residents.use(peer.close, n, loaded=peer.open)
            peer.start()

        arms.append(KeptArm(peer, kept, started))
    return arms


def size(*files: Path | None) -> int:
    return sum(file.stat().st_size for file in files if file is not None)


def costs(on: Ground, engine: Engine) -> dict[str, Any]:
    """Time the passes of a pair, after all that is measured at rest: whoever opens it later has
    nothing to measure. Tokens of the prompts come along."""
    from specllama.bench.tuning import TEXT, pass_costs
    from specllama.speculative.drafting.draft_model import ChainDrafter

    engine.measure()
    ids = {p.id: [*map(int, engine.encode(p.content)[0])] for p in on.prompts()}
    drafter = engine.drafters.get("draft")
    lane: Any = drafter.lane if isinstance(drafter, ChainDrafter) else None
    text = [token for some in ids.values() for token in some][:TEXT]
    found = pass_costs(engine.target, lane, text, repetitions=2)
    about = {"exactness": engine.info.exactness, "repacked": engine.info.target.repacked}
    return {"ids": ids, **about, **found.to_dict()}


def say(text: str, end: str = "\n") -> None:
    print(f"{text:70}", end=end, file=sys.stderr, flush=True)


def timed(words: Sequence[str], layout: str) -> Any:
    """The costs of a layout, from a child that ends then."""
    say(f"what passes cost, --repack {layout}")
    with closing(Child(words, layout)) as child:
        return child.ask("costs")
