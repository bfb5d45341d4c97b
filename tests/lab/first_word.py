"""How long until the first word: specllama beside five calls of the binding, on the same files.

    python tests/lab/first_word.py FILE[,DRAFT] [FILE[,DRAFT] …] [--rounds 5] [--json OUT]

Arms take turns, each a process of its own: ``bare`` (the binding alone: load, context, tokenize,
one pass, four steps), ``run`` (``specllama run --no-spec -n 4 hi``, everything measured already),
``first`` and ``second`` (16 tokens, with the draft model where there is one, in an empty home and
again in the same), ``app`` (the window: drawn, ready). ``tiny`` names the bundled pair. Printed are
medians of seconds from the start of the process, with the spread, and how often ``bare`` they are.
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
from collections import defaultdict
from contextlib import nullcontext
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))

from terminals import terminal

PROGRAM = [sys.executable, "-P", "-m", "specllama"]
ASK, STEPS, LONG = "hi", 4, 16
# how the same is asked of the binding, and of what it is told
SETTINGS = """
import json, sys
from specllama import Engine, EngineOptions, GenerateParams, Message
path, n_ctx, ask = sys.argv[1], int(sys.argv[2]), sys.argv[3]
with Engine.load(path, "none", EngineOptions(n_ctx=n_ctx)) as engine:
    text = ask
    if engine.info.has_chat_template:
        text = engine.render([Message("user", ask)], GenerateParams())
    info, target = engine.info, engine.info.target
    print(json.dumps([target.path, target.n_ctx, info.threads, target.repacked, text]))
"""
BARE = """
import json, sys, time
import llama_cpp as ll, numpy
path, n_ctx, threads, repacked, text = json.loads(sys.argv[1])
silent = ll.llama_log_callback(lambda *_: None)
ll.llama_log_set(silent, None)
ll.llama_backend_init()
params = ll.llama_model_default_params()
params.n_gpu_layers, params.use_extra_bufts = 0, repacked
model = ll.llama_model_load_from_file(path.encode(), params)
params = ll.llama_context_default_params()
params.n_ctx, params.n_threads, params.n_threads_batch = n_ctx, threads, threads
params.n_batch = params.n_ubatch = 256
context = ll.llama_init_from_model(model, params)
ready, vocab = time.monotonic(), ll.llama_model_get_vocab(model)
ids = (ll.llama_token * 4096)()
n = ll.llama_tokenize(vocab, text.encode(), len(text.encode()), ids, 4096, True, True)
words, piece = ll.llama_vocab_n_tokens(vocab), ll.ctypes.create_string_buffer(256)
ll.llama_decode(context, ll.llama_batch_get_one(ids, n))
word = None
for step in range(int(sys.argv[2])):
    row = ll.llama_get_logits_ith(context, -1)
    best = int(numpy.ctypeslib.as_array(row, (words,)).argmax())
    ll.llama_token_to_piece(vocab, best, piece, 256, 0, False)
    word = word or time.monotonic()
    one = (ll.llama_token * 1)(best)
    ll.llama_decode(context, ll.llama_batch_get_one(one, 1))
print(json.dumps({"ready": ready, "word": word}))
"""
Times = dict[str, float]


def environment(home: str) -> dict[str, str]:
    # as installed: bytecode is kept, and nothing of the caller's settings counts
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("SPECLLAMA_", "PYTHONDONT"))}
    return {**kept, "SPECLLAMA_HOME": home}


def bare(settings: str) -> Times:
    begun = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-c", BARE, settings, str(STEPS)], capture_output=True, check=True
    )
    ended = time.monotonic()
    return {k: t - begun for k, t in {**json.loads(done.stdout), "end": ended}.items()}


def run(words: list[str], home: str) -> Times:
    begun = time.monotonic()
    process = subprocess.Popen(
        [*PROGRAM, "run", "--temperature", "0", "--seed", "1", *words, ASK],
        env=environment(home), stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    assert process.stdout is not None
    process.stdout.read(1)
    word = time.monotonic()
    _, errors = process.communicate()
    ended = time.monotonic()
    if process.returncode:
        raise SystemExit(errors.decode())
    return {"word": word - begun, "end": ended - begun}


def app(words: list[str], home: str) -> Times:
    os.environ.update(environment(home))
    folder = Path(home)
    for typed_before in folder.rglob("unsent*"):
        typed_before.unlink()
    begun = time.monotonic()
    with terminal(folder, command=[*PROGRAM, "chat", *words], size=(120, 36)) as t:
        t.until(lambda: "Enter sends" in t.words)
        drawn = time.monotonic() - begun
        t.type("zq")
        t.until(lambda: "zq" in t.words)
        typed = time.monotonic() - begun
        t.until(lambda: "● CPU" in t.words)
        return {"drawn": drawn, "typed": typed, "ready": time.monotonic() - begun}


def measure(
    target: str, draft: str, rounds: int, arms: list[str], kept: str | None
) -> dict[str, list[Times]]:
    found: dict[str, list[Times]] = defaultdict(list)
    n_ctx = "2048"
    loaded = ["-m", target, "-c", n_ctx]
    pair = [*loaded, *(["-d", draft] if draft else [])]
    with nullcontext(kept) if kept else tempfile.TemporaryDirectory() as warm:
        command = [sys.executable, "-c", SETTINGS, target, n_ctx, ASK]
        told = subprocess.run(command, env=environment(warm), capture_output=True, check=True)
        settings = told.stdout.decode()
        run([*loaded, "--no-spec", "-n", str(STEPS)], warm)
        for _ in range(rounds):
            for arm in arms:
                if arm == "bare":
                    found[arm].append(bare(settings))
                elif arm == "run":
                    found[arm].append(run([*loaded, "--no-spec", "-n", str(STEPS)], warm))
                elif arm == "app":
                    found[arm].append(app(loaded, warm))
                else:
                    with tempfile.TemporaryDirectory() as empty:
                        for name in ("first", "second"):
                            found[name].append(run([*pair, "-n", str(LONG)], empty))
    return found


def table(name: str, found: dict[str, list[Times]]) -> None:
    bare = found.get("bare", [])
    base = {k: statistics.median(t[k] for t in bare) for k in bare[0]} if bare else {}
    print(f"\n{name}\n{'arm':8} {'':6} {'median':>7}  {'spread':15} {'of bare':>7}")
    for arm, times in found.items():
        for what in times[0]:
            values = [one[what] for one in times]
            median = statistics.median(values)
            spread = f"{min(values):.2f} to {max(values):.2f}"
            ratio = f"{median / base[what]:7.2f}" if arm in ("run", "app") and what in base else ""
            if arm == "second":  # as a part of it
                first = statistics.median(one[what] for one in found["first"])
                ratio = f"first: {first / median:.2f}"
            print(f"{arm:8} {what:6} {median:7.2f}  {spread:15} {ratio}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("pairs", nargs="*", default=["tiny"], metavar="FILE[,DRAFT]")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--arms", default="bare,run,pair,app", help="pair is first and second")
    parser.add_argument("--home", help="where what is measured once is kept for another time")
    parser.add_argument("--json", type=Path, metavar="FILE")
    given = parser.parse_args()
    kept = {}
    for pair in given.pairs:
        target, _, draft = pair.partition(",")
        arms, name = given.arms.split(","), Path(target).name
        kept[name] = measure(target, draft, given.rounds, arms, given.home)
        table(name, kept[name])
        if given.json is not None:
            given.json.write_text(json.dumps(kept, indent=1))


if __name__ == "__main__":
    main()
