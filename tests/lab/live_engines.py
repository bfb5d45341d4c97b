"""Other engines that are installed, each started over the bundled pair, asked, timed and proved.

    make engines LLAMA_SERVER=PROGRAM MLX_LM=VENV TRANSFORMERS=VENV VLLM=VENV [WAYS="mlx-draft …"]

One row for every way to start one (``engine_ways.py``): whether the texts at temperature 0 are
those of plain decoding here, the speed, what its replies and its counters say was accepted, and
what ``bench run --against`` and ``prove --against`` say. Nothing here is part of the suite.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from time import monotonic, sleep

import httpx2
from engine_ways import WAYS, Place, Way

from specllama.bench.prompts import BenchPrompt, load_prompts
from specllama.engine.engine import Engine
from specllama.errors import SpecllamaError
from specllama.events import Finished
from specllama.models.refs import resolve_pair
from specllama.remote.foreign import ForeignEngine
from specllama.remote.remote_engine import open_remote
from specllama.settings.params import EngineOptions, GenerateParams, SamplingParams
from specllama.told import Told

READY_S = 600.0
GREEDY = GenerateParams(
    sampling=SamplingParams(temperature=0.0, top_k=0, top_p=1.0, min_p=0.0),
    speculate=False,
    max_tokens=96,
    seed=1,
)


@dataclass(slots=True)
class Row:
    """What came of one way; None is what the engine does not tell."""

    way: str
    engine: str
    ready_s: float
    equal: int
    of: int
    tok_per_s: float
    replies: tuple[int | None, int | None]  # accepted, drafted: added up over the replies
    counters: tuple[int | None, int | None]  # the same, counted by the server
    behind: int | None  # accepted behind the ends of the replies
    bench: str = ""
    prove: str = ""


@contextmanager
def started(way: Way, place: Place, port: int) -> Iterator[tuple[str, float]]:
    """(URL, seconds until it answered) of an engine, which is ended afterwards.

    Raises:
        RuntimeError: it ended, or did not answer in time; with its last words.
    """
    url, begin = f"http://127.0.0.1:{port}", monotonic()
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(
            way.command(place, port), env=way.variables(place), stdin=subprocess.DEVNULL,
            stdout=log, stderr=log,
        )  # fmt: skip
        try:
            while not _answers(url):
                if process.poll() is not None or monotonic() - begin > READY_S:
                    log.seek(0)
                    last = log.read().decode("utf-8", "replace").strip().splitlines()[-3:]
                    raise RuntimeError(f"{way.name} did not start: {' | '.join(last)}")
                sleep(0.2)
            yield url, monotonic() - begin
        finally:
            process.terminate()
            process.wait(60.0)


def _answers(url: str) -> bool:
    try:
        return httpx2.get(f"{url}/health", timeout=5.0, trust_env=False).status_code == 200
    except httpx2.HTTPError:
        return False


def plain_replies(prompts: Sequence[BenchPrompt]) -> list[Finished]:
    """What the bundled target writes to each prompt, undrafted."""
    with Engine.load(*resolve_pair("tiny"), EngineOptions()) as engine:
        return [Told.of(engine.generate(prompt.content, GREEDY)).end for prompt in prompts]


def asked(
    way: Way, engine: ForeignEngine, prompts: Sequence[BenchPrompt], plain: Sequence[Finished]
) -> Row:
    """Every prompt once, streamed, one after another."""
    before = engine.counters()
    switch = True if way.switched and engine.kind.switches else None
    answers = [
        engine.ask(prompt.content, GREEDY, stream=True, speculation=switch) for prompt in prompts
    ]
    sleep(1.0)  # counters follow behind the replies
    after = engine.counters()
    told = [answer.draft for answer in answers if answer.draft is not None]
    replies = counters = (None, None)
    behind = None
    if told:
        replies = (sum(d.accepted or 0 for d in told), sum(d.drafted or 0 for d in told))
    if before and after and after.accepted is not None and after.drafted is not None:
        counters = (after.accepted - (before.accepted or 0), after.drafted - (before.drafted or 0))
        if before.drafts is not None or after.drafts is not None:
            passes = (after.drafts or 0) - (before.drafts or 0)
            tokens = sum(answer.tokens or 0 for answer in answers)
            behind = max(len(answers) + passes + counters[0] - tokens, 0)
    seconds = sum(answer.seconds - (answer.first_s or 0.0) for answer in answers)
    pairs = list(zip(answers, plain, strict=True))
    lengths = [len(own.token_ids) if a.tokens is None else a.tokens for a, own in pairs]
    decoded = sum(max(length - 1, 0) for length in lengths)
    same = sum(a.text.strip() == own.text.strip() for a, own in pairs)
    return Row(way.name, engine.name, 0.0, same, len(pairs), decoded / seconds, replies, counters,
               behind)  # fmt: skip


def command(*arguments: str) -> tuple[int, str]:
    """Exit status and stdout of ``specllama``; of an error its last line."""
    done = subprocess.run(
        [sys.executable, "-P", "-m", "specllama", *arguments], capture_output=True, text=True,
        check=False, stdin=subprocess.DEVNULL,
    )  # fmt: skip
    last = (done.stderr.strip().splitlines() or [""])[-1]
    return done.returncode, done.stdout if done.stdout.strip() else last


def benched(url: str) -> str:
    """ "0.84×", of plain decoding here, or what went wrong."""
    status, out = command("bench", "run", "-m", "tiny", "--against", url, "-n", "4", "-r", "1",
                          "--max-tokens", "48", "--temperature", "0", "--no-ignore-eos",
                          "--json")  # fmt: skip
    if status:
        return out[:100]
    summaries = json.loads(out)["summaries"]
    theirs = [s for s in summaries if s["group"] == "all"][2:]
    return ", ".join(f"{s['ratio']:.2f}×" if s["ratio"] else "–" for s in theirs)


def proved(url: str) -> str:
    """The verdict, with our own engine over the same weights as a witness."""
    asked = ("-m", "tiny", "-n", "8", "--temperature", "0", "--json")
    _, out = command("prove", "--against", url, *asked)
    last = (out.strip().splitlines() or [""])[-1]
    return str(json.loads(last).get("verdict")) if last.startswith("{") else last[:100]


def pair(told: tuple[int | None, int | None]) -> str:
    return "–" if told[0] is None else f"{told[0]} of {told[1]}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("ways", nargs="*", help="default: all that are installed")
    parser.add_argument("-n", "--count", type=int, default=20, help="prompts")
    parser.add_argument("--port", type=int, default=9700)
    parser.add_argument("--json", type=Path, help="write the rows there, too")
    chosen = parser.parse_args()
    ways = [way for way in WAYS if way.at and way.name in (chosen.ways or [w.name for w in WAYS])]
    if not ways:
        sys.exit("no engine is here: LLAMA_SERVER, MLX_LM, TRANSFORMERS and VLLM say where")
    with tempfile.TemporaryDirectory(prefix="specllama-engines-") as home:
        os.environ["SPECLLAMA_HOME"] = home
        prompts = load_prompts()[: chosen.count]
        place, plain, rows = Place.make(), plain_replies(prompts), []
        for way in ways:
            try:
                with started(way, place, chosen.port) as (url, ready_s):
                    with open_remote(url) as engine:
                        row = asked(way, engine, prompts, plain)
                    row.ready_s, row.bench, row.prove = ready_s, benched(url), proved(url)
            except (RuntimeError, SpecllamaError) as error:
                print(f"{way.name:13} {error}", flush=True)
                continue
            rows.append(row)
            behind = "–" if row.behind is None else row.behind
            print(
                f"{row.way:13} {row.engine:28} {row.ready_s:4.0f} s  {row.equal:2}/{row.of} texts"
                f"  {row.tok_per_s:6.1f} tok/s  replies {pair(row.replies)},"
                f" counters {pair(row.counters)}, behind {behind}"
                f"  bench {row.bench}  prove: {row.prove}"
                + (f"  (expected: {way.wrong})" if way.wrong else ""),
                flush=True,
            )
    if chosen.json:
        chosen.json.write_text(json.dumps([asdict(row) for row in rows], indent=1), "utf-8")


if __name__ == "__main__":
    main()
