"""Ours beside llama.cpp's server on real files: every mode, in turn, on the same prompts.

    python tests/lab/beside_llama.py MODELS --llama-server PROGRAM [--pair T+D] [--quick]

Arms: plain, ``auto``, ``auto --repack on``, and llama-server plain, as stored, and in each of its
modes; one process each, of which one computes at a time. ``--serve`` has several clients ask
``serve`` and llama-server as well. What is measured is kept in build/beside.json at once, for the
same sources and settings, so a run that was stopped goes on. It prints a table by prompt, or with
``--markdown`` README's; with ``--show`` from what is kept, without measuring.

The *oracle* is arithmetic: what the target's passes and the draft's steps cost, timed before, and
how many of eight guesses in a row were kept in each prompt, tell the speed of every draft length.
The best of them, or none, is the oracle's; it knows each prompt, and switches never. That of copies
knows how often they are right in the very text.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from beside_arms import (
    Ground,
    Kept,
    KeptArm,
    answers,
    arms_of,
    figures,
    say,
    size,
    timed,
)
from beside_tables import (
    ARMS,
    AUTO,
    EIGHT,
    PLAIN,
    REPACKED,
    THEIRS,
    Beside,
    load_table,
)
from peer_server import LlamaServer
from real_models import MODELS, ROOT, put_together, sources

from specllama.bench.experiment import RunFigures
from specllama.bench.prompts import BenchPrompt
from specllama.bench.report import Comparison

CLIENTS, SERVED_TOKENS = (1, 2, 4, 8), 64


# -- several clients --


def served(on: Ground, kept: Kept, mode: str, *, show: bool) -> Iterator[list[Any]]:
    """Rows of ``serve``, plain and ``auto``, and of llama-server, plain and in its best mode."""

    def key(n: int) -> str:
        return f"serve {mode}, {n} clients, T={on.temperature:g}, {on.rounds} rounds"

    lanes = max(CLIENTS)
    todo = [n for n in CLIENTS[:: 2 if on.quick else 1] if key(n) not in kept.found]
    if todo and not show:
        assert on.llama_server is not None
        words = ["-c", str(lanes * 1024), "-t", str(on.threads), "--kv-disk", "off"]
        ours = [sys.executable, "-P", "-m", "specllama", "serve", "-m", str(on.target), *words]
        ours += ["-d", str(on.draft or "none"), "--parallel", str(lanes)]
        theirs = [on.peer(name) for name in (THEIRS, mode)]
        for command in theirs:
            command[command.index("-c") + 1] = str(lanes * 1024)
            command[command.index("-np") + 1] = str(lanes)
        # each arm has a server of its own: in one, the second would find the first one's prompts
        arms = (
            (PLAIN, "#none", ours),
            (AUTO, "#auto", ours),
            (REPACKED, "#auto", [*ours, "--repack", "on"]),
            (THEIRS, "", theirs[0]),
            (mode, "", theirs[1]),
        )
        servers = [LlamaServer(name, command) for name, _, command in arms]
        with ExitStack() as over:
            for server in servers:
                over.callback(server.close)
                server.start()
            quiet()
            urls = {one.url + way: name for one, (name, way, _) in zip(servers, arms, strict=True)}
            for n in todo:
                kept.of(key(n), lambda n=n: loaded(on, urls, n))
    for n in CLIENTS:
        if key(n) in kept.found:
            yield kept.found[key(n)]


def loaded(on: Ground, urls: dict[str, str], clients: int) -> list[dict[str, Any]]:
    """The rows of ``load_servers.py`` for so many clients, each with the name of its arm."""
    with tempfile.TemporaryDirectory() as folder:
        prompts = Path(folder, "prompts.jsonl")
        lines = [json.dumps(request(task.prompt)) for task in on.tasks()]
        prompts.write_text("\n".join(lines), "utf-8")
        command = [sys.executable, str(ROOT / "tests/lab/load_servers.py"), *urls, "--json"]
        command += ["--clients", str(clients), "-n", str(max(4, 2 * clients)), "--alone", "0"]
        command += ["-r", str(on.rounds), "--max-tokens", str(min(SERVED_TOKENS, on.tokens))]
        command += ["--temperature", str(on.temperature), "--prompts", str(prompts)]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return [{**row, "arm": urls[row["arm"]]} for row in json.loads(done.stdout)["rows"]]


def request(prompt: BenchPrompt) -> dict[str, Any]:
    turns = [{"role": turn.role, "content": turn.content} for turn in prompt.messages]
    return {"messages": turns} if turns else {"prompt": prompt.text}


def quiet(patience_s: float = 60.0) -> None:
    """Wait until the machine rests for longer than what is measured at rest waits for."""
    begin = still = time.monotonic()
    seen = busy_ticks()
    while time.monotonic() - still < 4.0 and time.monotonic() - begin < patience_s:
        time.sleep(0.5)
        now = busy_ticks()
        still, seen = (still if now - seen < 5 else time.monotonic()), now


def busy_ticks() -> int:
    """Hundredths of seconds that all processors have computed."""
    user, nice, system, *_ = map(int, Path("/proc/stat").read_text().split()[1:8])
    return user + nice + system


# -- the run --


def measured(on: Ground, arms: Sequence[KeptArm], *, show: bool) -> list[RunFigures]:
    """Run what is not kept; return the runs of all that is. Eight guesses are drafted once."""
    tasks, rounds = on.tasks(), {arm.name: 1 if arm.name == EIGHT else on.rounds for arm in arms}
    todo = [arm for arm in arms if not show and arm.lacks(tasks, rounds[arm.name])]
    with ExitStack() as over:
        for arm in arms:
            over.callback(arm.close)
        if todo:
            n = sum(arm.lacks(tasks, rounds[arm.name]) for arm in todo)
            left = n * one_answer(on, todo[0].kept)
            say(f"{n} answers of {len(todo)} arms: about {left / 60:.1f} min and loading")
            begin = time.monotonic()

            def moved(done: int, of: int) -> None:
                took = time.monotonic() - begin
                say(f"{done} of {of}, {took / 60:.1f} min", end="\r" if done < of else "\n")

            for eights in (False, True):
                if some := [arm for arm in todo if (arm.name == EIGHT) == eights]:
                    n = rounds[some[0].name]
                    Comparison.of(some, tasks, repetitions=n, progress=moved)
    found = [arm.key(task, n) for n in range(on.rounds) for task in tasks for arm in arms]
    return [figures(told) for key in found if (told := arms[0].kept.found.get(key))]


def one_answer(on: Ground, kept: Kept) -> float:
    """Seconds, as those took that are kept; without any, weights are read at 30 GB/s for each
    token, and a prompt like 40 tokens."""
    took = [one["total_s"] for key, one in kept.found.items() if " | T=" in key]
    return sum(took) / len(took) if took else (on.tokens + 40) * size(on.target) / 30e9 + 0.3


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
        1 if asked.quick else asked.rounds, asked.tokens, asked.threads, peer, asked.out.parent,
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
    parser.add_argument("--tokens", type=int, default=128, help="of a reply, at most")
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
            for answer in answers(on, asked.child):
                print(json.dumps(answer), flush=True)
            return 0
        kept = Kept(asked.out, f"{on.pair} {on.threads} threads {on.tokens} tokens {code}")
        if not asked.show:
            if not kept.found:
                shutil.rmtree(home, ignore_errors=True)  # nothing is known of the pair
            kept.of("about", on.about)
            for layout in ("auto", "on"):
                kept.of(f"costs {layout}", lambda layout=layout: timed(words, layout))
        runs = measured(on, arms_of(on, kept, asked, words), show=asked.show)
        if not runs:
            say("nothing is kept of that")
            return 1
        beside = Beside(runs, kept.found)
        print(*(beside.readme() if asked.markdown else beside.whole()), "", sep="\n")
        print(*beside.sentences(), "", sep="\n")
        for arm in (AUTO, REPACKED, EIGHT) if asked.why else ():
            print(*beside.why(arm), "", sep="\n")
        if asked.serve:
            print(*load_table(list(served(on, kept, beside.mode(), show=asked.show))), sep="\n")
    return 0


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # servers end, too
    sys.exit(main(sys.argv[1:]))
