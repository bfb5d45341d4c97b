"""Ours beside llama.cpp's server on real files: every mode, in turn, on the same prompts.

    python tests/lab/beside_llama.py MODELS --llama-server PROGRAM [--pair T+D] [--quick]

Arms: plain, ``auto``, ``auto --repack on``, and llama-server plain and in each of its modes; one
process each, of which one computes at a time. ``--serve`` asks ``serve`` and llama-server by
several clients instead. What is measured is kept in build/beside.json at once, for the same
sources and settings, so a run that was stopped goes on. It prints a table by prompt, or with
``--markdown`` README's; both from what is kept, with ``--show`` without measuring.

The *best fixed length* is arithmetic: what the target's passes and the draft's steps cost here,
timed before, and how many of eight guesses in a row were kept in each prompt, tell the speed of
every length; the best of them, or none, is the oracle's. It knows each prompt, and switches never.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

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
    Beside,
    load_table,
)
from peer_server import LlamaServer, PeerServer, server_command
from real_models import MODELS, ROOT, put_together, sources

from specllama.backend.cores import crowded
from specllama.backend.devices import cpu_name
from specllama.bench.experiment import EngineArm, RunFigures, Task, compare, tasks_of
from specllama.bench.load import ClientLoad
from specllama.bench.processes import cpu_seconds
from specllama.bench.prompts import BenchPrompt, load_prompts
from specllama.bench.remote_arm import load_arm
from specllama.bench.report import Comparison
from specllama.engine.host import EngineHost, LoadEngine
from specllama.models.memory import available_memory
from specllama.settings.params import EngineOptions, GenerateParams
from specllama.store.rounds import package_versions
from specllama.verdict import TimedRound

TOKENS, N_CTX = 128, 2048
CLIENTS, SERVED_TOKENS = (1, 2, 4, 8), 64
SPARE = 2 << 30  # bytes that stay free
EMPTY = GenerateParams(max_tokens=1, speculate=False, proposer="none", seed=1)


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
    threads: int
    llama_server: Path | None
    build: Path

    def options(self, layout: str) -> EngineOptions:
        return EngineOptions(n_ctx=N_CTX, threads=self.threads, kv_disk="off", repack=layout)

    def load(self, layout: str) -> LoadEngine:
        return LoadEngine(str(self.target), str(self.draft or "none"), self.options(layout))

    def logs(self, arm: str) -> Path:
        return self.build / "beside-rounds" / self.target.stem / arm

    def prompts(self) -> list[BenchPrompt]:
        """The prompts, as text for a model that does not chat."""
        found = [one for name in SETS for one in load_prompts(PROMPTS / f"{name}.jsonl")]
        if not self.chats:
            found = [replace(p, messages=(), text=p.messages[-1].content) for p in found]
        return found

    def tasks(self) -> list[Task]:
        some = tasks_of(self.prompts(), [self.temperature], TOKENS, ignore_eos=not self.chats)
        return [task for task in some if not self.quick or task.prompt.id in ("edit", "json")]

    def peer(self, name: str) -> list[str]:
        """List the words that start llama-server in a mode."""
        assert self.llama_server is not None
        words = server_command(self.llama_server, self.target, self.threads, N_CTX)
        drafts = ["-md", str(self.draft)] if name.startswith("draft") else []
        return [*words, *drafts, *MODES.get(name, ["--no-repack"] if name == STORED else ())]

    def about(self) -> dict[str, Any]:
        """What the figures depend on, for people."""
        return {
            "target": self.target.name,
            "draft": self.draft and self.draft.name,
            "processor": cpu_name(),
            "threads": self.threads,
            "tokens": TOKENS,
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

    def run(self, task: Task, repetition: int) -> RunFigures:
        def made() -> dict[str, Any]:
            self.ready()
            return told(self.arm.run(task, repetition))

        return figures(self.kept.of(self.key(task, repetition), made))

    def close(self) -> None:
        self.arm.close()


def told(run: RunFigures) -> dict[str, Any]:
    return run.to_dict(texts=True) | {"passes": run.passes, "crowded": crowded()}


def figures(told: dict[str, Any]) -> RunFigures:
    told = {name: value for name, value in told.items() if name != "crowded"}
    told["passes"] = [TimedRound(*one) for one in told["passes"]]
    return RunFigures(**told | {"token_ids": tuple(told["token_ids"])})


# -- the arms --


def arms_of(on: Ground, kept: Kept, only: Sequence[str], over: ExitStack) -> list[KeptArm]:
    """All arms that were asked for, and plain decoding, which the others are compared with."""
    residents, arms = Residents(), list[KeptArm]()
    ids, wanted = kept.found.get("costs auto", {}).get("ids", {}), {PLAIN, *(only or ARMS)}
    hosts = {layout: over.enter_context(EngineHost(on.load(layout))) for layout in ("auto", "on")}
    base = GenerateParams()
    ways = {PLAIN: base.replace(speculate=False), AUTO: base, REPACKED: base}

    def opened(host: EngineHost) -> None:
        residents.use(host.unload, size(on.target, on.draft), loaded=host.ready)
        if not host.ready:
            host.start()
            host.skip()  # nothing computes while another arm does
        for _ in host.generate(".", EMPTY):
            pass  # nothing of the prompt is left in the cache

    for name, params in ways.items():
        if name in wanted:
            host = hosts["on" if name == REPACKED else "auto"]
            arm = EngineArm(name, host, params, logs=on.logs(name))
            arms.append(KeptArm(arm, kept, lambda host=host: opened(host)))
    for name in (THEIRS, STORED, *MODES) if on.llama_server else ():
        if name not in wanted or (name.startswith("draft") and on.draft is None):
            continue
        drafts = on.draft if name.startswith("draft") else None
        peer = PeerServer(name, on.peer(name), lambda t: ids[t.prompt.id], base.sampling)

        def started(peer: PeerServer = peer, n: int = size(on.target, drafts)) -> None:
            residents.use(peer.close, n, loaded=peer.open)
            peer.start()

        arms.append(KeptArm(peer, kept, started))
    return arms


def size(*files: Path | None) -> int:
    return sum(file.stat().st_size for file in files if file is not None)


def costs(on: Ground, layout: str) -> dict[str, Any]:
    """Time the passes of a pair in a layout, after all that is measured at rest: whoever opens it
    later has nothing to measure. Tokens of the prompts come along."""
    from specllama.bench.tuning import TEXT, pass_costs
    from specllama.engine.engine import Engine
    from specllama.speculative.drafting.draft_model import ChainDrafter

    with Engine.load(on.target, on.draft or "none", on.options(layout)) as engine:
        engine.measure()
        ids = {p.id: [*map(int, engine.encode(p.content)[0])] for p in on.prompts()}
        drafter = engine.drafter("draft") if "draft" in engine.drafters else None
        lane: Any = drafter.lane if isinstance(drafter, ChainDrafter) else None
        text = [token for some in ids.values() for token in some][:TEXT]
        found = pass_costs(engine.target, lane, text, repetitions=2)
        about = {"exactness": engine.info.exactness, "repacked": engine.info.target.repacked}
        return {"ids": ids, **about, **found.to_dict()}


def eight(on: Ground) -> list[dict[str, Any]]:
    """Draft so many guesses in every round of each reply; the pair learns nothing from them."""
    from specllama.engine.engine import Engine
    from specllama.engine.profiles import Profile

    params = GenerateParams(proposer="draft", window="fixed", draft_max=LONGEST)
    with Engine.load(on.target, on.draft, on.options("auto")) as engine:
        key = engine.windows.profile.key
        arm = EngineArm(EIGHT, engine, params, lambda: Profile(key=key), on.logs(EIGHT))
        return [told(run) for run in compare([arm], on.tasks(), repetitions=1, warm_up=0)]


# -- several clients --


def served(on: Ground, kept: Kept, mode: str) -> Iterator[list[Any]]:
    """Rows of ``serve``, plain and ``auto``, and of llama-server, plain and in its best mode."""

    def key(n: int) -> str:
        return f"serve {mode}, {n} clients, T={on.temperature:g}"

    lanes = max(CLIENTS)
    todo = [n for n in CLIENTS[:: 2 if on.quick else 1] if key(n) not in kept.found]
    if todo:
        assert on.llama_server is not None
        words = ["-c", str(lanes * 1024), "-t", str(on.threads), "--kv-disk", "off"]
        ours = [sys.executable, "-m", "specllama", "serve", "-m", str(on.target), *words]
        ours += ["-d", str(on.draft or "none"), "--parallel", str(lanes)]
        theirs = [on.peer(name) for name in (THEIRS, mode)]
        for command in theirs:
            command[command.index("-c") + 1] = str(lanes * 1024)
            command[command.index("-np") + 1] = str(lanes)
        servers = [
            LlamaServer(name, command)
            for name, command in zip(("serve", THEIRS, mode), (ours, *theirs), strict=True)
        ]
        params = GenerateParams()
        with ExitStack() as over:
            for server in servers:
                over.callback(server.close)
                server.start()
            quiet(os.getpid())
            urls = {f"{PLAIN} 1": f"{servers[0].url}#none", AUTO: f"{servers[0].url}#auto"}
            urls |= {server.name: server.url for server in servers[1:]}
            arms = [replace(load_arm(url, params), name=name) for name, url in urls.items()]
            for arm in arms:
                over.callback(arm.close)
            tasks = [replace(task, max_tokens=SERVED_TOKENS) for task in on.tasks()]
            for n in todo:
                load = ClientLoad(arms, tasks, max(4, 2 * n))
                rows = load.rows([n], on.rounds)
                kept.of(key(n), lambda rows=rows: [row.to_dict() for row in rows])
    for n in CLIENTS:
        if key(n) in kept.found:
            yield kept.found[key(n)]


def quiet(pid: int, patience_s: float = 180.0) -> None:
    """Wait until a process and its children compute nothing for longer than what is measured at
    rest waits for."""
    end, still = time.monotonic() + patience_s, time.monotonic()
    before = cpu_seconds(pid)
    while time.monotonic() - still < 4.0 and time.monotonic() < end:
        time.sleep(0.5)
        now = cpu_seconds(pid)
        still, before = (still if now - before < 0.05 else time.monotonic()), now


# -- the run --


def estimate(on: Ground, arms: Sequence[KeptArm], tasks: Sequence[Task]) -> float:
    """Seconds that the answers will take that are not kept."""
    n = 0
    for arm in arms:
        keys = [arm.key(task, i) for task in tasks for i in range(on.rounds)]
        n += sum(key not in arm.kept.found for key in keys)
    took = [one["total_s"] for key, one in arms[0].kept.found.items() if " | T=" in key]
    # without any: weights are read at 30 GB/s for each token; a prompt is read like 40 tokens
    one = sum(took) / len(took) if took else (TOKENS + 40) * size(on.target) / 30e9 + 0.3
    return n * one


def measured(on: Ground, kept: Kept, only: Sequence[str], *, show: bool) -> list[RunFigures]:
    """Run what is not kept; return the runs of all that is."""
    tasks = on.tasks()
    with ExitStack() as over:
        arms = arms_of(on, kept, only, over)
        for arm in arms:
            over.callback(arm.close)
        if not show:
            left = estimate(on, arms, tasks)
            say(f"{len(arms)} arms, {len(tasks)} prompts: about {left / 60:.1f} min and loading")
            begin = time.monotonic()

            def moved(done: int, of: int) -> None:
                took = time.monotonic() - begin
                say(f"{done} of {of}, {took / 60:.1f} min", end="\r" if done < of else "\n")

            Comparison.of(arms, tasks, repetitions=on.rounds, warm_up=0, progress=moved)
        return [
            figures(told)
            for number in range(on.rounds)
            for task in tasks
            for arm in arms
            if (told := kept.found.get(arm.key(task, number)))
        ]


def say(text: str, end: str = "\n") -> None:
    print(f"{text:70}", end=end, file=sys.stderr, flush=True)


def in_process(asked: Sequence[str], what: str) -> Any:
    """What a process of its own finds out: nothing of the pair stays."""
    say(what)
    command = [sys.executable, __file__, *asked, "--child", what]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def ground(asked: argparse.Namespace, temperature: float) -> Ground:
    """Read what was asked: one of the known pairs, or TARGET[,DRAFT]."""
    chats, files = True, [Path(name) for name in asked.pair.split(",")]
    names = asked.pair.split("+")
    if all(name in MODELS for name in names):
        chats = MODELS[names[0]].chats
        files = [put_together(MODELS[name], asked.models) for name in names]
    draft = files[1] if len(files) > 1 else None
    peer = asked.llama_server
    return Ground(
        asked.pair, files[0], draft, chats, temperature, asked.quick,
        1 if asked.quick else asked.rounds, asked.threads, peer, asked.out.parent,
    )  # fmt: skip


def parsed(words: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("models", type=Path, help="a folder of real files, or one for them")
    peer = os.environ.get("LLAMA_SERVER")
    parser.add_argument("--llama-server", type=Path, default=peer and Path(peer))
    parser.add_argument("--pair", default="T+D", help="T+D, S, G, or TARGET[,DRAFT] as files")
    parser.add_argument("--temperature", type=float, nargs="+", default=[0.0])
    parser.add_argument("--quick", action="store_true", help="two prompts, one round")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", nargs="+", default=[], metavar="ARM",
                        choices=ARMS)  # fmt: skip
    parser.add_argument("--serve", action="store_true", help="by several clients, too")
    parser.add_argument("--markdown", action="store_true", help="README's table")
    parser.add_argument("--why", action="store_true", help="where the time of ours went, too")
    parser.add_argument("--show", action="store_true", help="measure nothing")
    parser.add_argument("--threads", type=int, default=min(os.cpu_count() or 1, 8))
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "beside.json")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    return parser.parse_args(words)


def main(words: Sequence[str]) -> int:
    asked = parsed(words)
    for temperature in asked.temperature:
        on = ground(asked, temperature)
        code = sources("specllama", "models", "tests/lab/beside_prompts")
        home = on.build / "beside-home" / f"{on.target.stem} {code}"  # a file is measured once
        os.environ["SPECLLAMA_HOME"] = str(home)
        if asked.child:
            which, layout, *_ = f"{asked.child} ".split(" ")
            print(json.dumps(costs(on, layout) if which == "costs" else eight(on)))
            return 0
        kept = Kept(asked.out, f"{on.pair} {on.threads} threads {code}")
        if not kept.found and not asked.show:
            shutil.rmtree(home, ignore_errors=True)  # nothing is known of the pair
        if not asked.show:
            kept.of("about", on.about)
        guesses = f"{EIGHT}{' quick' if on.quick else ''}, T={temperature:g}"
        for what in ("costs auto", "costs on") if not asked.show else ():
            kept.of(what, lambda what=what: in_process(words, what))
        runs = measured(on, kept, asked.only, show=asked.show)
        if on.draft and not asked.show and (not asked.only or EIGHT in asked.only):
            kept.of(
                guesses, lambda t=temperature: in_process([*words, "--temperature", str(t)], EIGHT)
            )
        runs += map(figures, kept.found.get(guesses, ()))
        if not runs:
            say("nothing is kept of that")
            return 1
        beside = Beside(runs, kept.found)
        print(*(beside.readme() if asked.markdown else beside.whole()), "", sep="\n")
        print(*beside.sentences(), "", sep="\n")
        for arm in (AUTO, REPACKED, EIGHT) if asked.why else ():
            print(*beside.why(arm), "", sep="\n")
        if asked.serve:
            print(*load_table(list(served(on, kept, beside.mode()))), sep="\n")
    return 0


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # servers end, too
    sys.exit(main(sys.argv[1:]))
