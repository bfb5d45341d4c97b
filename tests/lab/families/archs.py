"""Every architecture that llama.cpp can save, drafted by every method, against plain decoding.

    python tests/lab/families/archs.py FOLDER [--quant q4_0] [--only qwen35] [--rpc HOST:PORT]

FOLDER holds small random models, as llama.cpp's ``test-llama-archs -o FOLDER`` writes them. They
have no tokenizer; each gets one here. A model is checked in a process of its own, so that an abort
of llama.cpp is counted instead of ending the run.

For each model, at temperature 0 and 0.8, plain decoding is compared token by token with: the model
as its own draft model (nearly all is accepted), another model as draft model (nearly all is
rejected), trees of both, copies, its own layers, and heads of random weights that read the inputs
of its layers, where llama.cpp gives them away; then a second turn that goes back into the first
reply, and a text that outgrows its context; and several conversations side by side, by several
methods. A difference that begins in a round
which said that it was a near-tie is counted apart. The exit status is 1 when a text differs
otherwise or llama.cpp ends the process.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2] / "support"))

import gguf
import numpy as np
from dflash_files import write_dflash
from eagle_files import write_eagle3
from ggufs import _Writer, bpe_tokens

from specllama.backend.llama_log import ABORTED
from specllama.engine.engine import Engine
from specllama.errors import SpecllamaError
from specllama.events import Finished, Notice, RoundDone
from specllama.models.gguf import read_header
from specllama.models.layer_inputs import LAYER_INPUT_ARCHITECTURES
from specllama.models.quantization import prepare, run
from specllama.settings.params import EngineOptions, GenerateParams, SamplingParams

OTHER = "llama-dense"  # drafts for the others
# arrays by layer that llama.cpp's saver writes whether the architecture has them or not
SAVED_FOR_ALL = ("swiglu_clamp_exp", "swiglu_clamp_shexp", "deepstack_mapping")
TEMPERATURES = (0.0, 0.8)
TOKENS = 20
SECONDS = 300.0

Written = tuple[Finished, list[bool]]


def dressed(source: Path, out: Path) -> Path:
    """The model with a byte-level tokenizer of as many tokens as it has rows."""
    reader = gguf.GGUFReader(source)
    arch = reader.fields["general.architecture"].contents()
    size = int(reader.fields[f"{arch}.vocab_size"].contents())
    trunk, nextn = blocks(reader, arch)
    tokens, types, _ = bpe_tokens()
    tokens = (tokens + [f"extra{i}" for i in range(size)])[:size]
    types = (types + [1] * size)[:size]
    w = _Writer(out, arch)
    for key, field in reader.fields.items():
        if key.startswith(("GGUF.", "tokenizer.")) or key == "general.architecture":
            continue
        kind = field.types[0]
        sub = field.types[-1] if kind == gguf.GGUFValueType.ARRAY else None
        value = field.contents()
        if trunk and arch == "glm4moe" and key.endswith(".dimension_sections"):
            continue  # a text model has none
        empty = value == [] or (key.endswith(SAVED_FOR_ALL) and max(value) <= 0)
        if trunk and isinstance(value, list) and len(value) == trunk:  # llama.cpp wants all layers
            value += [0 if key.endswith("recurrent_layers") else max(value)] * nextn
        if not empty:  # cannot be written, or keeps layers from being dropped
            w.add_key_value(key, value, kind, sub)
    w.add_tokenizer_model("gpt2")
    w.add_tokenizer_pre("gpt-2")
    w.add_token_list(tokens)
    w.add_token_types(types)
    w.add_token_merges([f"{tokens[5]} {tokens[6]}"])
    w.add_eos_token_id(0)
    parts: dict[str, list[Any]] = {}
    for tensor in reader.tensors:
        block = re.match(r"(blk\.(\d+)\.attn_)[qkv](\.weight|\.bias)$", tensor.name)
        if trunk and tensor.name.endswith("scale"):
            continue  # which llama.cpp only counts where it loads these blocks
        if arch == "mimo2" and trunk and block and int(block[2]) >= trunk:
            parts.setdefault(f"{block[1]}qkv{block[3]}", []).append(tensor.data)  # one matrix
        else:
            w.add_tensor(tensor.name, np.array(tensor.data), raw_dtype=tensor.tensor_type)
    for name, matrices in parts.items():
        w.add_tensor(name, np.concatenate(matrices))
    w.finish()
    return out


def blocks(reader: gguf.GGUFReader, arch: str) -> tuple[int, int]:
    """Blocks before the NextN blocks, and these; (0, 0) for a model without any."""
    field = reader.fields.get(f"{arch}.nextn_predict_layers")
    nextn = int(field.contents()) if field else 0
    return nextn and int(reader.fields[f"{arch}.block_count"].contents()) - nextn, nextn


# ---- one model, in a process of its own


def cases(target: Path, other: Path, rpc: str) -> Iterator[dict[str, Any]]:
    """What came of each comparison: {case, outcome: equal | near-tie | differs | refused, why}."""
    heads = heads_for(target)
    for name, draft, methods in (
        ("copies", None, ("ngram", "suffix", "lookahead", "self", "mtp")),
        ("itself", target, ("draft", "tree", "mixed")),
        ("another", other, ("draft", "tree", "mixed")),
        *([("heads", None, ("eagle3", "dflash"))] if heads else []),
    ):
        options = EngineOptions(
            n_ctx=256,
            threads=1,
            rpc=rpc,
            check_memory=False,
            heads=tuple(map(str, heads)) if name == "heads" else (),
        )
        try:
            engine = Engine.load(target, draft, options)
        except SpecllamaError as error:
            yield {"case": f"load, drafts by {name}", "outcome": "refused", "why": str(error)}
            continue
        with engine:
            engine.measure()
            exact = engine.info.exactness
            yield {"case": f"load, drafts by {name}", "outcome": "equal", "why": exact}
            for temperature in TEMPERATURES:
                plain = dict(conversation(engine, "none", temperature))
                for method in methods:
                    label = f"{method}, drafts by {name}", f"T {temperature}"
                    try:
                        for kind, (got, ties) in conversation(engine, method, temperature):
                            case = {"case": f"{label[0]}, {kind}, {label[1]}"}
                            yield {**case, **compared(plain[kind][0], got, ties)}
                    except SpecllamaError as error:
                        yield {"case": ", ".join(label), "outcome": "refused", "why": str(error)}
            if name == "itself":
                yield from side_by_side(target, rpc)


def side_by_side(target: Path, rpc: str) -> Iterator[dict[str, Any]]:
    """Conversations in one pass, whose prompts share beginnings, against each of them alone."""
    options = EngineOptions(n_ctx=512, threads=1, rpc=rpc, check_memory=False, parallel=4, kv_ram=8)
    with Engine.load(target, target, options) as engine:
        engine.measure()
        exact, lanes = engine.info.exactness, engine.info.lanes
        yield {"case": "load, side by side", "outcome": "equal", "why": f"{exact}, {lanes} lanes"}
        asked = [
            ([10 + i % (7 + n % 2) for i in range(21 + 9 * n)], wish(method, temperature))
            for temperature in TEMPERATURES
            for n, method in enumerate(("none", "none", "none", "draft", "ngram", "tree"))
            if method in engine.drafters
        ]
        alone = []
        for prompt, params in asked:
            engine.reset()
            alone.append(reply_of(list(engine.generate(prompt, params.replace(proposer="none")))))
        engine.reset()
        waiting, events = list(asked), dict[int, list[Any]]()
        while waiting or len(engine._scheduler):
            while waiting and engine.free:
                events[engine.submit(*waiting.pop(0))] = []
            for id, said in engine.step():
                if isinstance(said, Exception):
                    raise said
                events[id].append(said)
        pairs = zip(asked, alone, events.values(), strict=True)
        for (prompt, params), (plain, _), told in pairs:
            case = f"{params.proposer}, side by side, T {params.sampling.temperature}"
            yield {"case": f"{case}, {len(prompt)}", **compared(plain, *reply_of(told))}


def heads_for(target: Path) -> list[Path]:
    """Heads of random weights for a model whose layer inputs llama.cpp gives away."""
    header = read_header(target)
    if header.architecture not in LAYER_INPUT_ARCHITECTURES:
        return []
    width, last = header.embedding_length, header.block_count - 1
    eagle = write_eagle3(
        target.with_suffix(".eagle3"),
        target_width=width,
        width=width,
        layers=(0, last // 2, last),
        tokens=[text.decode("utf-8", "replace") for text in header.token_bytes],
        own_embedding=True,
        own_output=True,
    )
    block = write_dflash(
        target.with_suffix(".dflash"), target, kind="dspark", layers=(0, last), own_embedding=True
    )
    return [eagle, block]


def compared(plain: Finished, got: Finished, ties: list[bool]) -> dict[str, str]:
    if got.token_ids == plain.token_ids:
        share = f"{got.draft_n_accepted} of {got.draft_n} accepted"
        return {"outcome": "equal", "why": share}
    pairs = zip(plain.token_ids, got.token_ids, strict=False)
    first = next((i for i, (a, b) in enumerate(pairs) if a != b), -1)
    return {
        "outcome": "near-tie" if ties[first] else "differs",
        "why": f"plain {plain.token_ids}, drafted {got.token_ids}",
    }


def conversation(engine: Engine, method: str, temperature: float) -> Iterator[tuple[str, Written]]:
    """(kind, reply) of some prompts. Each begins where it begins for every other method: what is in
    the cache may have been read in other pieces, which some models round otherwise."""
    engine.reset()
    first = [10 + i % 7 for i in range(30)]
    reply = written(engine, first, method, temperature, TOKENS, "stop")
    yield "first turn", reply
    second = [*first, *reply[0].token_ids[: TOKENS // 2], 11, 12, 13]
    yield "second turn", written(engine, second, method, temperature, TOKENS, "stop")
    engine.reset()
    long = [10 + i % 9 for i in range(235)]
    yield "full context", written(engine, long, method, temperature, 40, "shift")


def written(
    engine: Engine, prompt: list[int], method: str, temperature: float, n: int, full: Any
) -> Written:
    """A reply, and of each of its tokens whether its round was a near-tie."""
    return reply_of(list(engine.generate(prompt, wish(method, temperature, n, full))))


def wish(method: str, temperature: float, n: int = TOKENS, full: Any = "stop") -> GenerateParams:
    return GenerateParams(
        sampling=SamplingParams(temperature=temperature),
        seed=7,
        max_tokens=n,
        ignore_eos=True,
        proposer=method,
        window="fixed",
        draft_max=4,
        on_full=full,
    )


def reply_of(events: list[Any]) -> Written:
    *before, last = events
    refusal = next((e.message for e in before if isinstance(e, Notice) and "shift" in e.topic), "")
    if not isinstance(last, Finished):
        raise SpecllamaError(refusal or f"ended with {last}")
    rounds = [event for event in before if isinstance(event, RoundDone)]
    return last, [done.near_tie for done in rounds for _ in done.emitted]


# ---- all models


def check(file: Path, other: Path, work: Path, kind: str | None, rpc: str) -> list[dict[str, Any]]:
    target = dressed(file, work / file.name)
    if kind is not None:
        smaller = work / f"{file.stem}-{kind}.gguf"
        try:
            run(prepare(target, smaller, kind, pure=True))
        except SpecllamaError as error:
            return [{"case": "quantize", "outcome": "refused", "why": str(error)}]
        target.unlink()
        target = smaller
    command = [sys.executable, __file__, "--one", str(target), str(other), "--rpc", rpc]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS)
    except subprocess.TimeoutExpired:
        return [{"case": "all", "outcome": "slow", "why": f"longer than {SECONDS:.0f} s"}]
    finally:
        for beside in target.parent.glob(f"{target.stem}.*"):
            beside.unlink()
    rows = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode < 0 or done.returncode == ABORTED:
        why = f"{done.returncode}: {done.stderr.strip()[-300:]}"
        rows.append({"case": "all", "outcome": "aborted", "why": why})
    elif done.returncode:
        rows.append({"case": "all", "outcome": "failed", "why": done.stderr.strip()[-400:]})
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("other", type=Path, nargs="?")
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--quant")
    parser.add_argument("--only", default="")
    parser.add_argument("--rpc", default="", help="workers; one program at a time")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    if args.one:
        for row in cases(args.folder, args.other, args.rpc):
            print(json.dumps(row), flush=True)
        return 0
    total: Counter[str] = Counter()
    kept: dict[str, list[dict[str, Any]]] = {}
    with tempfile.TemporaryDirectory() as name, ThreadPoolExecutor(args.jobs) as pool:
        work = Path(name)
        other = dressed(args.folder / f"{OTHER}.gguf", work / "other.gguf")
        files = sorted(f for f in args.folder.glob("*.gguf") if args.only in f.stem)
        begun = time.monotonic()
        checked = pool.map(lambda file: check(file, other, work, args.quant, args.rpc), files)
        for file, rows in zip(files, checked, strict=True):
            counts = Counter(row["outcome"] for row in rows)
            total += counts
            kept[file.stem] = rows
            print(f"{file.stem:28}", *(f"{n} {what}" for what, n in sorted(counts.items())))
            reasons = Counter(
                (r["outcome"], r["why"][:300]) for r in rows if r["outcome"] != "equal"
            )
            for (what, why), n in reasons.most_common(4):
                print(f"    {what} {n}x: {why}")
            sys.stdout.flush()
        if args.out:
            args.out.write_text(json.dumps(kept, indent=1))
    print(f"{len(kept)} models in {time.monotonic() - begun:.0f} s:", dict(total))
    return int(any(total[what] for what in ("differs", "aborted", "failed", "slow")))


if __name__ == "__main__":
    sys.exit(main())
