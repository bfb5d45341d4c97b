"""Draft models of fewer words: what they do not know of real replies, what a step costs, and how
many tokens a pass writes.

    python tests/lab/draft_words.py FOLDER [--pair T+D] [--words 16384 32768] [--kinds code]
    python tests/lab/draft_words.py FOLDER --seeds 1 20 --kinds Chinese

FOLDER is that of ``real_models.py``. With ``--seeds``, the target writes a reply with each of them
at temperature 0.8, and only the tokens of these are counted that copies do not know. Else it writes
replies of five kinds, two at temperature 0 and one at 0.8. The whole draft model reads them once; a
copy computes the same rows for the words that it has, bit for bit, so the guesses of every copy
follow from these rows, and with them the tokens a pass of drafts of three under ``match``: exactly,
and without a clock. Steps of the whole model and of its copies are timed in turn.
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
        "写一封邮件，向老板请三天假，并说明理由。",
        "请列出五种健康的早餐，并说明每一种的做法。",
        "请比较火车和飞机两种旅行方式的优缺点。",
        "请用中文说明如何给初学者讲解什么是数据库。",
        "写一首关于秋天的现代诗。",
        "请介绍三位唐代诗人和他们的代表作。",
        "请解释为什么海水是咸的。",
    ),
    "JSON": (
        "Write a JSON array of five books with title, author, year, genres and price.",
        "Write an OpenAPI fragment in JSON for an endpoint that creates a user.",
        "Write a JSON configuration of a web server with three virtual hosts, logging and TLS.",
        "Write a JSON object of an order with customer, address, four items and a total.",
        "Write GeoJSON of three European capitals with their names and populations.",
        "Write a package.json of a small web app with scripts and ten dependencies.",
        "Write a JSON Schema of a user profile with required fields, enums and patterns.",
        "Write a week's weather forecast of Oslo as JSON.",
        "Write a JSON array of three recipes with ingredients, amounts and steps.",
        "Write a JSON log of six requests with time, method, path, status and latency.",
    ),
    # for models that do not chat
    "continued English": (
        "The old lighthouse stood at the end of the pier, and every evening",
        "The city council voted on Tuesday to",
        "Photosynthesis is the process by which",
        "Dear Anna,\n\nThank you for your letter. Since I last wrote,",
        "To make the soup, first",
        "The Battle of Hastings was fought in",
        "In this article, we describe a new method for",
        '"I never said that," she answered, and',
        "The history of the bicycle begins",
        "When you start a small business, the most important thing is",
    ),
    "continued code": (
        "import argparse\n\ndef main() -> None:\n    parser =",
        "class LinkedList:\n    def __init__(self):",
        "function debounce(callback, delay) {\n",
        "SELECT customers.name, COUNT(orders.id) AS n\nFROM",
        "#include <stdio.h>\n\nint main(int argc, char **argv) {\n",
        "def quicksort(items):\n",
        "package main\n\nimport (\n",
        "<!DOCTYPE html>\n<html>\n<head>\n",
        "fn read_lines(path: &Path) -> io::Result<Vec<String>> {\n",
        "# Installation\n\n```bash\n",
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


def written(
    target: Path, kinds: Sequence[str], tokens: int, threads: int, seeds: Sequence[int] = ()
) -> Iterator[Reply]:
    options = EngineOptions(threads=threads, n_ctx=1024, kv_disk="off")
    with Engine.load(target, None, options) as engine:
        for kind in kinds:
            texts = PROMPTS[kind]
            ways = [(seed, texts[seed % len(texts)], 0.8) for seed in seeds]
            usual = zip((1, 2, 3), texts, TEMPERATURES, strict=False)
            for seed, prompt, t in ways or usual:
                params = GenerateParams(seed=seed, max_tokens=tokens, proposer="none")
                params = params.choose("temperature", t)
                chats = not kind.startswith("continued")
                asked = [Message("user", prompt)] if chats else prompt
                last = list(engine.generate(asked, params))[-1]
                assert isinstance(last, Finished)
                yield Reply(kind, params, engine.encode(asked)[0], [*last.token_ids])


def opened(header: GgufHeader, threads: int, rows: int) -> CellLane:
    read = Embedding(header) if header.rows else None
    model = LlamaModel(header.path, embedding=read, gpu_layers="0")
    options = EngineOptions().resolved(on_gpu=False)
    made = {"n_ctx": 1024, "max_rows": rows, "threads": threads, "flash": options.flash_attn}
    return open_pool(model, options=options, any_width=False, **made).open()


def count(replies: Sequence[Reply], whole: GgufHeader, words: Sequence[int]) -> None:
    """Print, by kind, how many tokens copies do not know."""
    known = {n: {*trimmed.choose(whole, n, {}).tolist()} for n in words}
    for kind in dict.fromkeys(reply.kind for reply in replies):
        mine = [reply.tokens for reply in replies if reply.kind == kind]
        total = sum(map(len, mine))
        print(f"{kind} T=0.8, {len(mine)} replies, {total} tokens")
        for n, some in known.items():
            unknown = sum(token not in some for tokens in mine for token in tokens)
            print(f"  {n:7,} words: {unknown} unknown, {unknown / total:.1%}")


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
    parser.add_argument("--kinds", nargs="*", choices=PROMPTS, default=[*PROMPTS][:5])
    parser.add_argument("--seeds", type=int, nargs=2, metavar=("FIRST", "LAST"))
    parser.add_argument("--tokens", type=int, default=100)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--only", choices=["steps", "replies"])
    given = parser.parse_args()
    files = [given.folder / MODELS[name].file for name in given.pair.split("+")]
    target, whole = files[0], read_header(files[-1])
    if given.seeds:
        seeds = range(given.seeds[0], given.seeds[1] + 1)
        some = written(target, given.kinds, given.tokens, given.threads, seeds)
        count([*some], whole, given.words)
        return
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
