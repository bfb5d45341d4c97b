"""Draft models of fewer words: what they do not know of real replies, what a step costs, and how
many tokens a pass writes.

    python tests/lab/bench/draft_words.py FOLDER [--pair T+D] [--words 16384 32768] [--tokens 120]

FOLDER is that of ``real_models.py``. The target writes replies of five kinds, two at temperature 0
and one at 0.8; counted is the share of their tokens that a copy of so many words does not know.
Steps of the whole model and of its copies are timed in turn. Tokens a pass are those of drafts of
three, over the same prompts: they depend on no clock.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Iterator
from pathlib import Path
from time import perf_counter

from real_models import MODELS

from specllama.backend.embedding import Embedding
from specllama.backend.lane import CellLane
from specllama.backend.llama import LlamaModel
from specllama.backend.llama_pool import open_pool
from specllama.engine.engine import Engine
from specllama.events import Finished
from specllama.interface import Message
from specllama.models import trimmed
from specllama.models.gguf import GgufHeader, read_header
from specllama.settings.params import EngineOptions, GenerateParams

PROMPTS = {
    "code": (
        "Write a Python class for an LRU cache with get and put, with type hints and docstrings.",
        "Write a JavaScript function that debounces another one; show its use in a search field.",
        "Write a SQL query and a Rust function that count orders per customer.",
    ),
    "English": (
        "Tell a short story about a lighthouse keeper who finds a letter.",
        "Explain to a student why the sky is blue and sunsets are red.",
        "Write a friendly email that declines an invitation to a conference.",
    ),
    "German": (
        "Erkläre auf Deutsch, wie ein Verbrennungsmotor funktioniert.",
        "Schreibe eine kurze Geschichte auf Deutsch über einen Hund, der nach Hause findet.",
        "Fasse auf Deutsch die Vorteile des Radfahrens in der Stadt zusammen.",
    ),
    "Chinese": (
        "请用中文介绍一下北京的历史。",
        "请用中文写一个关于小猫的短故事。",
        "请用中文解释什么是快速排序算法。",
    ),
    "JSON": (
        "Write a JSON array of five books with title, author, year, genres and price.",
        "Write an OpenAPI fragment in JSON for an endpoint that creates a user.",
        "Write a JSON configuration of a web server with three virtual hosts, logging and TLS.",
    ),
}
TEMPERATURES = (0.0, 0.0, 0.8)
STEPS = 40
WINDOW = 3


def replies(engine: Engine, tokens: int, proposer: str) -> Iterator[tuple[str, float, Finished]]:
    """Each kind, the temperature and the reply."""
    for kind, prompts in PROMPTS.items():
        for seed, (prompt, temperature) in enumerate(zip(prompts, TEMPERATURES, strict=True)):
            params = GenerateParams(
                seed=seed, max_tokens=tokens, window="fixed", draft_max=WINDOW
            ).choose("temperature", temperature)
            asked = [Message("user", prompt)]
            for event in engine.generate(asked, params.replace(proposer=proposer)):
                if isinstance(event, Finished):
                    yield kind, temperature, event


def unknown(draft: GgufHeader, written: list[tuple[str, tuple[int, ...]]], n: int) -> None:
    """Print the share of tokens that a copy of ``n`` words does not know, by kind."""
    says = {*trimmed.choose(draft, n, {}).tolist()}
    shares = []
    for kind in PROMPTS:
        ids = [token for its, some in written if its == kind for token in some]
        shares.append(f"{kind} {sum(token not in says for token in ids) / max(len(ids), 1):.1%}")
    print(f"not among {n:,} words: {', '.join(shares)}")


def steps(files: list[tuple[str, GgufHeader]], threads: int) -> None:
    """Print medians of steps that were timed in turn."""
    lanes: list[CellLane] = []
    for _, header in files:
        read = Embedding(header) if header.rows else None
        model = LlamaModel(header.path, embedding=read, gpu_layers="0")
        options = EngineOptions().resolved(on_gpu=False)
        made = {"n_ctx": 512, "max_rows": 1, "threads": threads, "flash": options.flash_attn}
        lanes.append(open_pool(model, options=options, any_width=False, **made).open())
        lanes[-1].forward([*range(100, 200)], outputs="none")
    took: list[list[float]] = [[] for _ in lanes]
    for i in range(STEPS):
        for lane, times in zip(lanes, took, strict=True):
            begin = perf_counter()
            lane.forward([300 + i], outputs="last")
            times.append((perf_counter() - begin) * 1e3)
    medians = [statistics.median(times[5:]) for times in took]
    for (name, _), ms in zip(files, medians, strict=True):
        print(f"step of {name}: {ms:.1f} ms, {ms / medians[0]:.2f} of {files[0][0]}'s")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--pair", default="T+D")
    parser.add_argument("--words", type=int, nargs="*", default=[8192, 16384, 32768, 65536])
    parser.add_argument("--pass-words", type=int, nargs="*", default=[32768])
    parser.add_argument("--tokens", type=int, default=100)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--steps-only", action="store_true")
    given = parser.parse_args()
    files = [given.folder / MODELS[name].file for name in given.pair.split("+")]
    target, draft = files[0], files[-1]
    whole = read_header(draft)
    made: dict[int, Path] = {}
    for n in {*given.words, *given.pass_words}:
        made[n] = draft.with_name(f"{draft.stem}-{n}-words.gguf")
        if not made[n].exists():
            trimmed.write(whole, made[n], trimmed.choose(whole, n, {}))
    named = [(target.stem, read_header(target)), (draft.stem, whole)]
    timed = named if target != draft else named[:1]
    steps([*timed, *((f"{n:,} words", read_header(made[n])) for n in given.words)], given.threads)
    if given.steps_only:
        return
    options = EngineOptions(threads=given.threads, n_ctx=1024, kv_disk="off", draft_tokens="all")
    written: list[tuple[str, tuple[int, ...]]] = []
    passes: dict[str, dict[str, list[int]]] = {}
    for name, file in [("all words", draft), *((f"{n:,}", made[n]) for n in given.pass_words)]:
        with Engine.load(target, file, options) as engine:
            for kind, temperature, last in replies(engine, given.tokens, "draft"):
                sums = passes.setdefault(f"{kind} T={temperature}", {}).setdefault(name, [0, 0])
                sums[0] += len(last.token_ids)
                sums[1] += last.rounds
                if file == draft:
                    written.append((kind, tuple(last.token_ids)))
    for n in given.words:
        unknown(whole, written, n)
    for kind, by_file in passes.items():
        said = (f"{name} {tokens / rounds:.2f}" for name, (tokens, rounds) in by_file.items())
        print(f"tokens a pass, {kind}: {', '.join(said)}")
    print(json.dumps({"tokens": sum(len(ids) for _, ids in written)}))


if __name__ == "__main__":
    main()
