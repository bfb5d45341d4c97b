"""A battery on real files: the same text in every way, what they can do, how fast they are.

    make real MODELS=FOLDER [ARGS="--quick"] [LLAMA_SERVER=PROGRAM] [LLAMA_BENCH=PROGRAM]

Files that FOLDER lacks are fetched (``real_models.py``). Every part runs in a process of its own:
one that dies is a row of the table. What is done is kept in build/real.json at once, and not done
again for the same sources, so a run that was stopped goes on. Status 1: a text parted without being
explained, a part died, or something did not work. Speeds alone never fail it.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import httpx2
from peer_server import LlamaServer, server_command
from real_models import MODELS, ROOT, put_together, sources
from real_tools import battery
from replayed import replayed
from servers import serving

from specllama.bench.prompts import BenchPrompt
from specllama.bench.proof import Case, available, prove
from specllama.engine.engine import Engine
from specllama.engine.host import LoadEngine
from specllama.interface import Message
from specllama.settings.params import EngineOptions, GenerateParams
from specllama.told import Told

SUBJECTS = ("T", "G", "S")
READ = "The river runs through the old town, past the mill and the market. "
CODE = '''def area(width, height):
    """The area of a rectangle."""
    return width * height


def volume(width, height, depth):
    """The volume of a box."""
    return area(width, height) * depth
'''
ASKED = (
    f"Rename `width` to `breadth` everywhere, and write the whole file:\n```python\n{CODE}```",
    "Explain in three sentences why the sky is blue.",
    "Write a JSON list of three rivers, each with a name and a length in km.",
)
GREEDY = GenerateParams(seed=1, ignore_eos=True).choose("temperature", 0.0)
RAW = (CODE + "\n\ndef surface(width, height, depth):\n", "The capital of France is", "1, 2, 3, 5,")
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 20},
        "km": {"type": "integer", "minimum": 1, "maximum": 9999},
    },
    "required": ["name", "km"],
    "additionalProperties": False,
}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": what,
            "parameters": {
                "type": "object",
                "properties": {"path": {"type": "string", "maxLength": 40}},
                "required": ["path"],
            },
        },
    }
    for name, what in (("read_file", "Read a file."), ("list_dir", "List a folder."))
]
# the five calls of the binding: what no program can do without
BARE = """
import ctypes, sys, time
import llama_cpp as ll
quiet = ll.llama_log_callback(lambda *a: None)
ll.llama_log_set(quiet, None)
begin = time.perf_counter()
path, threads, n, text = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4].encode()
params = ll.llama_model_default_params()
params.use_extra_bufts = False
model = ll.llama_model_load_from_file(path.encode(), params)
shape = ll.llama_context_default_params()
shape.n_ctx, shape.n_batch, shape.n_ubatch = 2048, 512, 512
shape.n_threads = shape.n_threads_batch = threads
ctx = ll.llama_init_from_model(model, shape)
vocab = ll.llama_model_get_vocab(model)
tokens = (ll.llama_token * 1024)()
k = ll.llama_tokenize(vocab, text, len(text), tokens, 1024, True, True)
sampler = ll.llama_sampler_init_greedy()
assert ll.llama_decode(ctx, ll.llama_batch_get_one(tokens, k)) == 0
steps = []
for _ in range(n):
    tokens[0] = ll.llama_sampler_sample(sampler, ctx, -1)
    at = time.perf_counter()
    assert ll.llama_decode(ctx, ll.llama_batch_get_one(tokens, 1)) == 0
    steps.append(time.perf_counter() - at)
print(time.perf_counter() - begin, sorted(steps)[n // 2])
"""


@dataclass
class Row:
    """What came of a part. ``ok`` is None where it only measures."""

    subject: str
    part: str
    ok: bool | None
    words: str
    figures: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Ground:
    """What the parts are run on."""

    folder: Path
    quick: bool
    threads: int

    def file(self, name: str) -> Path:
        return self.folder / MODELS[name].file

    def draft(self, name: str) -> Path | None:
        return self.file(MODELS[name].draft) if MODELS[name].draft else None

    def prompts(self, name: str) -> list[BenchPrompt]:
        n = 1 if self.quick else 2
        if MODELS[name].chats:
            return [BenchPrompt(t[:12], "own", (Message("user", t),)) for t in ASKED[:n]]
        return [BenchPrompt(text[:12], "own", text=text) for text in RAW[:n]]

    def options(self, n_ctx: int = 2048, **more: Any) -> EngineOptions:
        return EngineOptions(n_ctx=n_ctx, threads=self.threads, kv_disk="off", **more)

    def engine(self, name: str, **more: Any) -> Engine:
        engine = Engine.load(self.file(name), self.draft(name), self.options(**more))
        engine.measure()
        return engine


# -- the same text --


def texts(on: Ground, name: str, repack: str, kv: str) -> Row:
    """Every method against plain decoding of the same layout and cache types."""
    part = f"texts, {'repacked' if repack == 'on' else 'as stored'}, {kv}"
    kinds = {} if kv == "f16" else {"kv_type_k": kv, "kv_type_v": kv}
    with on.engine(name, repack=repack, **kinds) as engine:
        wanted = ("draft", "suffix", "auto") if on.quick or kv != "f16" else (
            "draft", "ngram", "suffix", "lookahead", "tree", "mixed", "auto",
        )  # fmt: skip
        cases = list(
            prove(
                engine,
                on.prompts(name),
                proposers=available(engine, wanted)[0],
                temperatures=(0.0,) if on.quick else (0.0, 0.8),
                max_tokens=24 if on.quick else 32,
                draft_max=(4,),
            )
        )
        return judged(name, part, cases, engine.info.exactness)


def together(on: Ground, name: str) -> Row:
    """Several conversations at once against each alone."""
    with on.engine(name, parallel=3) as engine:
        names = available(engine, ("draft", "suffix") if on.quick else ("draft", "suffix", "mixed"))
        cases = list(
            prove(
                engine,
                on.prompts(name),
                proposers=(*names[0], "none"),
                temperatures=(0.0,) if on.quick else (0.0, 0.8),
                draft_max=(3,),
                max_tokens=16 if on.quick else 32,
                seed=1,
                base=GenerateParams(),
                beside=True,
            )
        )
        return judged(name, "texts, 3 at once", cases, engine.info.exactness)


def judged(name: str, part: str, cases: Sequence[Case], exactness: str) -> Row:
    gaps = [case.difference.gap for case in cases if case.difference is not None]
    wrong = sum(not case.ok for case in cases)
    words = f"{len(cases) - len(gaps)} of {len(cases)} the same"
    if gaps:
        words += f", {len(gaps) - wrong} near-ties, {wrong} not explained (gaps to {max(gaps):.3f})"
    figures = {"cases": [case.to_dict() for case in cases]}
    return Row(name, part, wrong == 0, f"{words}; {exactness}", figures)


def again(on: Ground, name: str) -> Row:
    """The passes of drafted replies again, with other guesses in refused places, where the layout
    makes them round: what rounds by its width alone has the same bits."""
    same = of = 0
    greedy = GREEDY.replace(window="fixed", draft_max=6, chances=0)
    with on.engine(name, repack="on") as engine:
        for proposer in ("suffix", "mixed"):
            for prompt in on.prompts(name):
                wish = greedy.replace(max_tokens=48, proposer=proposer)
                ids = engine.encode(prompt.content)[0]
                engine.reset()
                pairs = replayed(engine, ids, Told.of(engine.generate(ids, wish)))
                same, of = same + sum(a == b for a, b in pairs), of + len(pairs)
        words = f"{same} of {of} rows the same bits; {engine.info.exactness}"
        return Row(name, "passes, other guesses", same == of, words)


# -- what it can do --


def served(on: Ground, name: str) -> Iterator[Row]:
    """Tools, schemas and infilling over HTTP."""
    draft = on.draft(name)
    load = LoadEngine(str(on.file(name)), draft and str(draft), on.options(parallel=4))
    with serving(load, wait=False) as server:
        server.http.timeout = httpx2.Timeout(300)
        while server.http.get("/health").status_code != 200:
            time.sleep(0.2)
        if MODELS[name].chats:
            yield from _tools(server, on, name)
        yield _schema(server, name)
        if MODELS[name].infill:
            yield _infill(server, name)


def calls(on: Ground, name: str) -> Iterator[Row]:
    """Calls of tools as the model writes them, and how many arrive."""
    if MODELS[name].draft:
        options = replace(on.options(), n_ctx=16384)
        with Engine.load(on.file(name), None, options) as engine:
            for row in battery(engine, quick=on.quick):
                yield Row(name, *row)


def _tools(server: Any, on: Ground, name: str) -> Iterator[Row]:
    asked = ("Read notes.txt.", "What is in the folder src?")[: 1 if on.quick else 2]
    for choice in ("required", "auto"):
        right, told = 0, []
        for text in asked:
            asking = {"tools": TOOLS, "tool_choice": choice, "temperature": 0, "max_tokens": 60}
            answer = server.chat(text, **asking)
            message = answer["choices"][0]["message"]
            calls = message.get("tool_calls") or []
            told.append(calls[0]["function"] if calls else message["content"])
            right += len(calls) == 1 and set(json.loads(told[-1]["arguments"])) == {"path"}
        # without being forced, whether a small model calls is its own affair
        ok = right == len(asked) if choice == "required" else None
        yield Row(name, f"tools, {choice}", ok, f"{right} of {len(asked)} called", {"told": told})


def _schema(server: Any, name: str) -> Row:
    """The same reply that fits, drafted and not."""
    body = {"prompt": "The Danube as JSON:", "json_schema": SCHEMA, "n_predict": 60}
    said = {}
    for proposer in ("none", "auto"):
        asked = {**body, "temperature": 0, "specllama": {"proposer": proposer}}
        said[proposer] = server.post("/completion", asked).json()["content"]
    fits = {key: set(json.loads(text)) == {"name", "km"} for key, text in said.items()}
    same = "the same text" if said["none"] == said["auto"] else "two texts"
    return Row(name, "schema", all(fits.values()), f"fits, {same}: {said['none'][:40]}", said)


def _infill(server: Any, name: str) -> Row:
    body = {
        "input_prefix": "def add(a, b):\n    ",
        "input_suffix": "\n\nprint(add(1, 2))\n",
        "prompt": "",
        "n_predict": 12,
        "temperature": 0,
    }
    said, ways = {}, {"none": {}, "auto": {}, "draft": {"window": "fixed"}}
    for proposer in ("none", "auto", *(["draft"] if MODELS[name].draft else [])):
        asked = {**body, "specllama": {"proposer": proposer, **ways[proposer]}}
        told = server.post("/infill", asked).json()
        said[proposer] = told["content"]
    ok = "a + b" in said["none"] and (proposer == "auto" or told["timings"]["draft_n"] > 0)
    same = "the same text" if len({*said.values()}) == 1 else "two texts"
    return Row(name, "infill", ok, f"{same}: {said['none'].strip()[:40]!r}", said)


# -- how fast --


def start(on: Ground, name: str) -> Row:
    """``run`` of four tokens, in a new home and again, over the five calls of the binding."""
    run = [sys.executable, "-P", "-m", "specllama", "run", "-q", "--no-spec", "-n", "4"]
    run += ["-c", "2048", "-t", str(on.threads), "-m", str(on.file(name)), "hi"]
    bare = [sys.executable, "-c", BARE, str(on.file(name)), str(on.threads), "4", "hi"]
    with tempfile.TemporaryDirectory() as home:
        env = {**os.environ, "SPECLLAMA_HOME": home}
        _seconds(bare, env)  # the file is read into memory
        first = _seconds(run, env)
        pairs = [(_seconds(run, env), _seconds(bare, env)) for _ in range(1 if on.quick else 3)]
    second, alone = (statistics.median(times) for times in zip(*pairs, strict=True))
    words = f"first {first:.1f} s, again {second:.1f} s, the bare calls {alone:.1f} s"
    figures = {"first_s": first, "second_s": second, "bare_s": alone, "ratio": second / alone}
    return Row(name, "start", None, f"{words}: {second / alone:.2f}", figures)


def _seconds(command: Sequence[str], env: dict[str, str]) -> float:
    begin = time.perf_counter()
    subprocess.run(command, env=env, check=True, capture_output=True)
    return time.perf_counter() - begin


def reading(on: Ground, name: str) -> Row:
    """Prompts of some lengths, read by us and by llama-bench in turn."""
    lengths = (30, 324) if on.quick else (30, 89, 324, 1258, 2513)
    program = os.environ.get("LLAMA_BENCH")
    ours: dict[int, list[float]] = {n: [] for n in lengths}
    theirs: dict[int, list[float]] = {n: [] for n in lengths if program}
    with on.engine(name, n_ctx=4096) as engine:
        ids = engine.tokenize(READ * 300, False, False)
        for _ in range(1 if on.quick else 3):
            for n, rates in ours.items():
                engine.reset()
                end = Told.of(engine.generate(ids[:n], GREEDY.replace(max_tokens=1))).end
                rates.append(n / end.timings.prefill_ms * 1e3)
            if program:
                command = [program, "-m", on.file(name), "-t", str(on.threads), "-n", "0"]
                command += ["-p", ",".join(map(str, lengths)), "-r", "1", "-o", "json"]
                done = subprocess.run(command, check=True, capture_output=True)
                for test in json.loads(done.stdout):
                    theirs[test["n_prompt"]].append(test["avg_ts"])
    words, figures = [], {}
    for n, rates in ours.items():
        rate = figures[f"read_{n}"] = statistics.median(rates)
        words.append(f"{n}: {rate:.0f}")
        if program:
            other = figures[f"llama-bench_{n}"] = statistics.median(theirs[n])
            words[-1] += f" ({rate / other:.2f})"
    said = "; in brackets over llama-bench" if program else "; LLAMA_BENCH is not given"
    return Row(name, "reading, tok/s", None, ", ".join(words) + said, figures)


def writing(on: Ground, name: str) -> Iterator[Row]:
    """Writing and the time between passes, ours and llama-server's on the same file."""
    n = 32 if on.quick else 96
    wish = GREEDY.replace(max_tokens=n)
    content = on.prompts(name)[0].content
    theirs = _llama_server(on, name, content if isinstance(content, str) else ASKED[0], n)
    with on.engine(name) as engine:
        rates: dict[str, list[float]] = {"none": [], "auto": []}
        own: dict[str, float] = {}
        for _ in range(1 if on.quick else 2):
            for proposer, found in rates.items():
                engine.reset()
                end = Told.of(engine.generate(content, wish.replace(proposer=proposer))).end
                found.append(end.timings.tok_per_s or 0.0)
                own[proposer] = end.timings.other_ms / max(end.rounds, 1)
        plain, auto = (statistics.median(found) for found in rates.values())
        words = [f"plain {plain:.1f}, auto {auto:.1f}: {auto / plain:.2f}", *theirs[0]]
        figures = {"plain": plain, "auto": auto, **theirs[1]}
        yield Row(name, "writing, tok/s", None, ", ".join(words), figures)
        text = ", ".join(f"{proposer} {ms:.2f}" for proposer, ms in own.items())
        yield Row(name, "own time, ms a pass", None, text, own)


def _llama_server(on: Ground, name: str, prompt: str, n: int) -> tuple[list[str], dict[str, float]]:
    """Its speed plainly, and with the draft model; nothing where the program is not named."""
    program = os.environ.get("LLAMA_SERVER")
    if not program:
        return ["llama-server: LLAMA_SERVER is not given"], {}
    words, figures = [], {}
    draft = on.draft(name)
    for way, more in (("plain", []), ("drafting", ["-md", str(draft)])):
        if way == "drafting" and draft is None:
            continue
        command = [*server_command(Path(program), on.file(name), 2048, on.threads), *more]
        with closing(LlamaServer(way, command)) as server:
            body = {"prompt": prompt, "n_predict": n, "temperature": 0, "ignore_eos": True}
            took = server.ask("/completion", body)["timings"]
            figures[f"llama-server {way}"] = took["predicted_per_second"]
            words.append(f"llama-server {way} {took['predicted_per_second']:.1f}")
    return words, figures


# -- the run --

PARTS: dict[str, Callable[[Ground, str], Any]] = {
    "start": start,
    "stored f16": lambda on, name: texts(on, name, "off", "f16"),
    "repacked f16": lambda on, name: texts(on, name, "on", "f16"),
    "stored q8_0": lambda on, name: texts(on, name, "off", "q8_0"),
    "repacked q8_0": lambda on, name: texts(on, name, "on", "q8_0"),
    "again": again,
    "together": together,
    "served": served,
    "reading": reading,
    "writing": writing,
    "calls": calls,
}
WHOLE_ONLY = ("repacked q8_0",)


def in_process(on: Ground, name: str, part: str) -> list[Row]:
    """A part in a process of its own; one that dies is a row that says so."""
    command = [sys.executable, __file__, str(on.folder), "--threads", str(on.threads)]
    command += ["--one", name, part, *(["--quick"] if on.quick else [])]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    if done.returncode == 0:
        return [Row(**row) for row in json.loads(done.stdout.splitlines()[-1])]
    how = f"signal {-done.returncode}" if done.returncode < 0 else f"status {done.returncode}"
    return [Row(name, part, False, f"ended by {how}")]


def show(rows: Sequence[Row]) -> None:
    widths = [max(len(getattr(row, key)) for row in rows) for key in ("subject", "part")]
    for row in rows:
        mark = {True: "✓", False: "✗", None: " "}[row.ok]
        head = f"{row.subject:{widths[0]}}  {row.part:{widths[1]}}"
        print(f"{head}  {mark} {row.words}", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--quick", action="store_true", help="fewer prompts, methods and tokens")
    parser.add_argument("--only", nargs="*", choices=SUBJECTS, default=SUBJECTS)
    parser.add_argument("--threads", type=int, default=min(os.cpu_count() or 1, 8))
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "real.json")
    parser.add_argument("--one", nargs=2, metavar=("NAME", "PART"), help=argparse.SUPPRESS)
    asked = parser.parse_args()
    on = Ground(asked.folder, asked.quick, asked.threads)
    if asked.one:
        name, part = asked.one
        found = PARTS[part](on, name)
        rows = [found] if isinstance(found, Row) else list(found)
        print(json.dumps([asdict(row) for row in rows]))
        return 0
    for name in {*asked.only, *(MODELS[name].draft for name in asked.only)} - {""}:
        put_together(MODELS[name], on.folder)
    out: Path = asked.out
    out.parent.mkdir(parents=True, exist_ok=True)
    os.environ["SPECLLAMA_HOME"] = str(out.parent / "real-home")  # a file is measured once
    kept: dict[str, Any] = json.loads(out.read_text()) if out.exists() else {}
    code = sources("specllama", "models", "tests/lab")
    key = f"{code} {'quick' if on.quick else 'whole'} {on.threads} threads"
    done: dict[str, list[dict[str, Any]]] = kept.setdefault(key, {})
    begin = time.monotonic()
    for name in asked.only:
        for part in PARTS:
            if f"{name} {part}" in done or (on.quick and part in WHOLE_ONLY):
                continue
            print(f"{time.monotonic() - begin:5.0f} s  {name} {part}", file=sys.stderr, flush=True)
            done[f"{name} {part}"] = [asdict(row) for row in in_process(on, name, part)]
            out.write_text(json.dumps(kept, indent=1))
    found = [row for name in asked.only for part in PARTS for row in done.get(f"{name} {part}", ())]
    rows = [Row(**row) for row in found]
    show(rows)
    print(f"{time.monotonic() - begin:.0f} s; all of it in {out}")
    return 1 if any(row.ok is False for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
