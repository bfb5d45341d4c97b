"""Draft models of fewer words: what they do not know of real replies, what a step costs, and how
many tokens a pass writes.

    python tests/lab/draft_words.py FOLDER [--pair T+D] [--words 16384 32768] [--kinds code]

FOLDER is that of ``real_models.py``. The target writes replies of five kinds, two at temperature 0
and one at 0.8. The whole draft model reads them once; a copy computes the same rows for the words
that it has, bit for bit, so the guesses of every copy follow from these rows, and with them the
tokens a pass of drafts of three under ``match``: exactly, and without a clock. Steps of the whole
model and of its copies are timed in turn.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter

import numpy as np
import numpy.typing as npt
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
from specllama.speculative.noise import draw
from specllama.speculative.sampling import SamplerChain

BoolArray = npt.NDArray[np.bool_]

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
ROWS = 16  # of the draft model in one pass


@dataclass
class Reply:
    """A reply of the target, and the rows of the draft model before each of its tokens."""

    kind: str
    params: GenerateParams
    prompt: list[int]
    tokens: list[int]

    def guesses(self, lane: CellLane, masks: Mapping[int, BoolArray]) -> dict[int, list[int]]:
        """What drafts of so many words guess at each place, given all tokens before."""
        found: dict[int, list[int]] = {n: [] for n in masks}
        lane.rollback(0)
        lane.forward(self.prompt[:-1], outputs="none")
        read = [self.prompt[-1], *self.tokens[:-1]]
        for begin in range(0, len(read), ROWS):
            rows = lane.forward(read[begin : begin + ROWS], outputs="all")
            for i, row in enumerate(rows, begin):
                chain = SamplerChain(self.params.sampling, seed=self.params.seed or 0, position=i)
                for n, mask in masks.items():
                    law = chain.law(np.where(mask, row, np.float32(-np.inf)))
                    found[n].append(draw(law, self.params.seed or 0, i)[0])
        return found


def tokens_a_pass(tokens: Sequence[int], guesses: Sequence[int]) -> tuple[int, int]:
    """Return the tokens and the passes of drafts of ``WINDOW`` tokens."""
    at, passes = 1, 0  # the first token is the prompt's
    while at < len(tokens):
        kept = 0
        while kept < WINDOW and at + kept < len(tokens) and guesses[at + kept] == tokens[at + kept]:
            kept += 1
        at, passes = at + kept + 1, passes + 1
    return len(tokens) - 1, passes


def written(target: Path, kinds: Sequence[str], tokens: int, threads: int) -> Iterator[Reply]:
    options = EngineOptions(threads=threads, n_ctx=1024, kv_disk="off")
    with Engine.load(target, None, options) as engine:
        for kind in kinds:
            for seed, (prompt, t) in enumerate(zip(PROMPTS[kind], TEMPERATURES, strict=True), 1):
                params = GenerateParams(seed=seed, max_tokens=tokens, proposer="none")
                params = params.choose("temperature", t)
                asked = [Message("user", prompt)]
                last = list(engine.generate(asked, params))[-1]
                assert isinstance(last, Finished)
                yield Reply(kind, params, engine.encode(asked)[0], [*last.token_ids])


def opened(header: GgufHeader, threads: int, rows: int) -> CellLane:
    read = Embedding(header) if header.rows else None
    model = LlamaModel(header.path, embedding=read, gpu_layers="0")
    options = EngineOptions().resolved(on_gpu=False)
    made = {"n_ctx": 1024, "max_rows": rows, "threads": threads, "flash": options.flash_attn}
    return open_pool(model, options=options, any_width=False, **made).open()


def report(replies: Sequence[Reply], draft: GgufHeader, words: Sequence[int], threads: int) -> None:
    """Print, by kind and temperature, what copies do not know, and tokens a pass."""
    lane = opened(draft, threads, ROWS)
    masks = {draft.vocab_size: np.ones(lane.n_vocab, np.bool_)}
    for n in words:
        masks[n] = np.zeros(lane.n_vocab, np.bool_)
        masks[n][trimmed.choose(draft, n, {})] = True
    sums: dict[tuple[str, float], dict[int, list[int]]] = {}
    for reply in replies:
        by_n = sums.setdefault((reply.kind, reply.params.sampling.temperature), {})
        for n, guesses in reply.guesses(lane, masks).items():
            unknown = int((~masks[n][reply.tokens]).sum())
            some = (len(reply.tokens), unknown, *tokens_a_pass(reply.tokens, guesses))
            by_n[n] = [a + b for a, b in zip(by_n.get(n, [0] * 4), some, strict=True)]
    for (kind, temperature), by_n in sums.items():
        print(f"{kind} T={temperature:g}, {by_n[draft.vocab_size][0]} tokens")
        for n, (tokens, unknown, made, passes) in by_n.items():
            whole = by_n[draft.vocab_size]
            rate = made / passes
            print(
                f"  {n:7,} words: {unknown / tokens:6.1%} unknown, {rate:.2f} tokens a pass, "
                f"{rate / (whole[2] / whole[3]) - 1:+.1%}"
            )


def steps(files: list[tuple[str, GgufHeader]], threads: int) -> None:
    """Print the time that a tenth of the steps beat, timed in turn: others use the processors."""
    lanes = [opened(header, threads, 1) for _, header in files]
    for lane in lanes:
        lane.forward([*range(100, 200)], outputs="none")
    took: list[list[float]] = [[] for _ in lanes]
    for i in range(STEPS):
        for lane, times in zip(lanes, took, strict=True):
            begin = perf_counter()
            lane.forward([300 + i], outputs="last")
            times.append((perf_counter() - begin) * 1e3)
    fast = [statistics.quantiles(times[5:], n=10)[0] for times in took]
    for (name, _), ms in zip(files, fast, strict=True):
        print(f"step of {name}: {ms:.1f} ms, {ms / fast[0]:.2f} of {files[0][0]}'s")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--pair", default="T+D")
    parser.add_argument("--words", type=int, nargs="*", default=[8192, 16384, 32768, 49152, 65536])
    parser.add_argument("--kinds", nargs="*", choices=PROMPTS, default=[*PROMPTS])
    parser.add_argument("--tokens", type=int, default=100)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--only", choices=["steps", "replies"])
    given = parser.parse_args()
    files = [given.folder / MODELS[name].file for name in given.pair.split("+")]
    target, whole = files[0], read_header(files[-1])
    if given.only != "replies":
        with tempfile.TemporaryDirectory() as folder:
            timed = [(path.stem, read_header(path)) for path in dict.fromkeys(files)]
            for n in given.words:
                says = trimmed.choose(whole, n, {})
                copy = trimmed.write(whole, Path(folder, f"{n}.gguf"), says)
                timed.append((f"{n:,} words", copy))
            steps(timed, given.threads)
    if given.only != "steps":
        replies = [*written(target, given.kinds, given.tokens, given.threads)]
        report(replies, whole, given.words, given.threads)


if __name__ == "__main__":
    main()
