"""How soon a conversation goes on whose state is on disk, against reading it again.

    python -m specllama.models.recipe.scale OUT --to 1b
    python tests/lab/reopen.py -m OUT/TARGET.gguf [-d OUT/DRAFT.gguf] [--tokens 1500] [--runs 3]

A conversation is written and kept; then engines that know nothing of it go on with it: one finds
its state, one reads it. Each is timed from the request to the first token, its model loaded before.
Both must write the same, unless the target's own near-ties part them, which is said.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from dataclasses import dataclass, replace
from itertools import chain, cycle, islice

from specllama.bench.prompts import load_prompts
from specllama.engine.engine import Engine
from specllama.events import Finished, RoundDone, Started, TextDelta
from specllama.paths import HOME_VARIABLE
from specllama.settings.params import SERVER, EngineOptions, GenerateParams
from specllama.store import states


@dataclass(frozen=True)
class Timed:
    first_s: float  # from the request to the first token
    cached: int
    ids: tuple[int, ...]


def timed(engine: Engine, prompt: list[int], length: int) -> Timed:
    params = GenerateParams(max_tokens=length, seed=1, ignore_eos=True, owner=SERVER)
    begun, first_s, cached = time.perf_counter(), 0.0, 0
    for event in engine.generate(prompt, params):
        if isinstance(event, Started):
            cached = event.cached_n
        elif not first_s and isinstance(event, RoundDone | TextDelta):
            first_s = time.perf_counter() - begun
        if isinstance(event, Finished):
            return Timed(first_s or time.perf_counter() - begun, cached, event.token_ids)
    raise AssertionError("a reply has an end")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("-m", "--model", required=True)
    parser.add_argument("-d", "--draft", default="none")
    parser.add_argument("--tokens", type=int, default=1500)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--threads", type=int)
    args = parser.parse_args()
    n_ctx = args.tokens + 256
    options = EngineOptions(n_ctx=n_ctx, threads=args.threads, kv_disk="4G")
    read, found = list[Timed](), list[Timed]()
    with tempfile.TemporaryDirectory() as home:
        os.environ[HOME_VARIABLE] = home
        with Engine.load(args.model, args.draft, options) as engine:
            texts = [engine.encode(one.content)[0] for one in load_prompts()]
            prompt = list(islice(chain.from_iterable(cycle(texts)), args.tokens))
            prompt += timed(engine, prompt, 16).ids
        size = states.size()
        prompt += prompt[:8]
        for _ in range(args.runs):
            for runs, kept in ((read, "off"), (found, "4G")):
                with Engine.load(args.model, args.draft, replace(options, kv_disk=kept)) as engine:
                    timed(engine, prompt[40:0:-1], 2)  # what the first pass sets up
                    runs.append(timed(engine, prompt, 16))
    read_s, found_s = (statistics.median(one.first_s for one in some) for some in (read, found))
    told = {
        "tokens": len(prompt),
        "not read again": found[0].cached,
        "state bytes": size,
        "read s": round(read_s, 4),
        "reopened s": round(found_s, 4),
        "ratio": round(found_s / read_s, 4),
        "same text": all(one.ids == read[0].ids for one in (*read, *found)),
    }
    print(json.dumps(told))
    return 0 if found[0].cached >= args.tokens else 1


if __name__ == "__main__":
    raise SystemExit(main())
