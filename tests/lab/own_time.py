"""Our own time between two passes of the target, where it is spent: beside real passes.

    python tests/lab/own_time.py [-m MODEL] [--child] [--cold MB] -- --json
    python tests/lab/own_time.py --table FILE...
    python tests/lab/own_time.py [-m MODEL] --objects

Runs ``specllama run`` with these words (with ``--child``: a reply of the app's engine process) and
prints, in milliseconds, the time from the end of a pass to the beginning of the next one, and the
processor time of the thread in it, which other programs lengthen less: median, tenth and ninetieth
of a hundred. ``--cold`` empties the processor's caches behind each pass, as a large model does, by
copying that many megabytes. Standard output of the command is thrown away.

``--table`` writes a reply with each model at each of some settings, logged as ``run`` does, and
prints the median time between passes, that of the processor in it, and ``timings.other_ms`` by
token.

``--objects`` counts the objects of our classes that are made for one plain token and for a round of
the draft model.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from time import perf_counter, thread_time
from types import FrameType
from typing import Any

import numpy as np

from specllama.backend import llama_cache
from specllama.cli import invoke
from specllama.engine.host import EngineHost, LoadEngine
from specllama.events import Event, Finished, RoundDone
from specllama.interface import Stepped
from specllama.settings.params import GenerateParams, SamplingParams
from specllama.store.rounds import Logged

ASK = "Tell me a long story about a fox and a crow."
REPORT, COLD = "OWN_TIME_REPORT", "OWN_TIME_COLD"


Gap = tuple[float, float]  # milliseconds, and of these of the processor


def watch(cold_mb: int) -> list[Gap]:
    """The gaps, as they come."""
    gaps: list[Gap] = []
    ended = (0.0, 0.0)
    decode = llama_cache.ll.llama_decode
    much = np.ones(cold_mb * 2**20, np.uint8)
    copy = np.empty_like(much)

    def timed(*args: Any) -> Any:
        nonlocal ended
        begun, spent = perf_counter(), thread_time()
        if ended[0]:
            gaps.append((1e3 * (begun - ended[0]), 1e3 * (spent - ended[1])))
        try:
            return decode(*args)
        finally:
            np.copyto(copy, much)
            ended = perf_counter(), thread_time()

    llama_cache.ll.llama_decode = timed
    return gaps


def report(gaps: list[Gap]) -> str:
    steps = gaps[8:-1]  # behind the prompt, and the first rounds, which load what they need
    told = []
    for name, times in zip(("", "of the processor "), zip(*steps, strict=True), strict=True):
        low, *_, high = statistics.quantiles(times, n=10)
        told.append(f"{name}{statistics.median(times):.3f} ({low:.3f} to {high:.3f}) ms")
    return f"{', '.join(told)}, {len(steps)} times"


class Watched(LoadEngine):
    """In the child: writes the figures to a file when that ends."""

    def __call__(self, progress: Callable[[Event], None], /) -> Stepped:
        gaps = watch(int(os.environ[COLD]))
        engine = LoadEngine.__call__(self, progress)
        close = engine.close

        def closed() -> None:
            Path(os.environ[REPORT]).write_text(report(gaps))
            close()

        engine.close = closed  # type: ignore[method-assign]
        return engine


def by_child(model: str, tokens: int, temperature: float) -> str:
    with tempfile.TemporaryDirectory() as folder:
        os.environ[REPORT] = str(Path(folder) / "figures")
        params = GenerateParams(
            seed=1,
            max_tokens=tokens,
            speculate=False,
            sampling=SamplingParams(temperature=temperature),
        )
        with EngineHost(Watched(model)) as host:
            host.start()
            for _ in host.generate(ASK, params):
                pass
        return Path(os.environ[REPORT]).read_text()


OPEN = {"top_k": 0, "top_p": 1.0, "min_p": 0.0}
SETTINGS: dict[str, dict[str, Any]] = {
    "T = 0": {"temperature": 0.0},
    "T = 0.8, top-k 40": {**OPEN, "temperature": 0.8, "top_k": 40},
    "T = 0.8, no filters": {**OPEN, "temperature": 0.8},
    "T = 0.8, repeat penalty 1.1": {"temperature": 0.8, "repeat_penalty": 1.1},
}


def table(models: list[str], tokens: int, cold_mb: int) -> None:
    gaps = watch(cold_mb)
    print(f"{'':34}{'between passes':>16}{'processor':>11}{'other_ms':>10}  ms by token")
    for model in models:
        engine = LoadEngine(model)(lambda event: None)
        with tempfile.TemporaryDirectory() as folder:
            logged = Logged(engine, command="run", folder=Path(folder))
            for name, sampling in SETTINGS.items():
                other, rounds, seed = 0.0, 0, 0
                while rounds < tokens:
                    params = GenerateParams(
                        seed=seed,
                        max_tokens=tokens,
                        speculate=False,
                        ignore_eos=True,
                        sampling=SamplingParams(**sampling),
                    )
                    *_, end = logged.generate(ASK, params)
                    assert isinstance(end, Finished)
                    if seed:  # the first one opens the log and loads what it needs
                        other, rounds = other + end.timings.other_ms, rounds + end.rounds
                    else:
                        gaps.clear()
                    seed += 1
                between, spent = map(statistics.median, zip(*gaps, strict=True))
                figures = f"{between:16.3f}{spent:11.3f}{other / rounds:10.3f}"
                print(f"{Path(model).stem[:5]:6}{name:28}{figures}")
            logged.close()
        engine.close()


def objects(model: str) -> None:
    """The objects of our classes that are made between two rounds, by class."""
    made: Counter[str] = Counter()

    def count(frame: FrameType, event: str, arg: Any) -> None:
        code = frame.f_code
        name = str(frame.f_globals.get("__name__", ""))
        ours = name.startswith(("specllama", "namedtuple_"))
        makes = ("__init__", "__new__", "<lambda>" if "namedtuple_" in name else "fork")
        if event == "call" and ours and code.co_name in makes:
            first = frame.f_locals[code.co_varnames[0]]
            made[(first if isinstance(first, type) else type(first)).__name__] += 1

    engine = LoadEngine(model)(lambda event: None)
    for name, proposer in {"plain token": "none", "drafted round": "draft"}.items():
        counts: list[Counter[str]] = []
        params = GenerateParams(
            seed=1,
            max_tokens=40,
            proposer=proposer,
            window="fixed",
            draft_max=4,
            ignore_eos=True,
            sampling=SamplingParams(temperature=0.8),
        )
        for event in engine.generate(ASK, params):
            if isinstance(event, RoundDone):
                sys.setprofile(None)
                counts.append(made.copy())
                made.clear()
                sys.setprofile(count)
        sys.setprofile(None)
        usual = sorted(counts[3:-1], key=Counter.total)[len(counts[3:-1]) // 2]
        told = ", ".join(f"{n} {kind}" for kind, n in usual.most_common())
        print(f"{name}: {usual.total()} objects ({told})")
    engine.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("-m", "--model", default="tiny")
    parser.add_argument("--child", action="store_true")
    parser.add_argument("--cold", type=int, default=0, metavar="MB")
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--table", nargs="+", metavar="FILE")
    parser.add_argument("--objects", action="store_true")
    parser.add_argument("words", nargs="*", help="further options of run")
    asked = parser.parse_args()
    os.environ[COLD] = str(asked.cold)
    if asked.table:
        table(asked.table, asked.tokens, asked.cold)
        return
    if asked.objects:
        objects(asked.model)
        return
    if asked.child:
        print(by_child(asked.model, asked.tokens, asked.temperature))
        return
    gaps, out = watch(asked.cold), os.dup(1)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    words = ["run", "-m", asked.model, "-d", "none", "--no-spec", "--seed", "1"]
    words += ["-n", str(asked.tokens), "--temperature", str(asked.temperature)]
    sys.argv = ["specllama", *words, *asked.words, ASK]
    invoke()
    os.write(out, f"{report(gaps)}\n".encode())


if __name__ == "__main__":
    main()
