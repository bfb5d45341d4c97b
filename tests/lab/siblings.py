"""What replies to one prompt gain where they copy from each other while they are written.

They are written side by side, once each for a key of its own, so that none sees the others, and
once for one key. Told are the tokens a pass of all of them, which no clock changes.

    python tests/lab/siblings.py --method suffix --n 2 4 8
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Sequence

from specllama.bench.prompts import BenchPrompt, load_prompts
from specllama.engine.engine import Engine
from specllama.events import Event, Finished, RoundDone
from specllama.server.exchange import seed_of
from specllama.settings.params import EngineOptions, GenerateParams


def written(
    engine: Engine, prompts: Sequence[BenchPrompt], base: GenerateParams, n: int, *, apart: bool
) -> tuple[float, list[tuple[int, ...]]]:
    """Tokens a pass of ``n`` replies to each prompt, and the replies."""
    passes, texts = 0, []
    for seed, prompt in enumerate(prompts):
        engine.reset()
        asked = [
            base.replace(seed=seed_of(seed, i), scope=f"key {i}" if apart else "") for i in range(n)
        ]
        engine.submit(prompt.content, asked.pop(0))
        last: dict[int, Event | Exception] = {}
        for events in iter(engine.step, []):
            last.update(events)
            if any(isinstance(event, RoundDone) for _, event in events):
                while asked:  # as a server does: they go on from the prompt that the first has read
                    engine.submit(prompt.content, asked.pop(0))
        for _, event in sorted(last.items()):
            assert isinstance(event, Finished), event
            passes += event.rounds
            texts.append(event.token_ids)
    return sum(map(len, texts)) / passes, texts


def main() -> None:
    shape = argparse.RawTextHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=shape)
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--method", default="suffix")
    parser.add_argument("--count", type=int, default=4)
    parser.add_argument("--n", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.3, 0.7, 1.0])
    args = parser.parse_args()
    prompts = random.Random(2).sample(load_prompts(), args.count)
    base = GenerateParams(max_tokens=48, proposer=args.method, window="fixed", draft_max=8)
    for n in args.n:
        with Engine.load(args.model, None, EngineOptions(threads=1, parallel=n)) as engine:
            for temperature in args.temperatures:
                asked = base.choose("temperature", temperature)
                alone, texts = written(engine, prompts, asked, n, apart=True)
                together, same = written(engine, prompts, asked, n, apart=False)
                print(
                    f"{args.method}, n = {n}, T {temperature:g}: {alone:.2f} tokens a pass each by "
                    f"itself, {together:.2f} together ({together / alone - 1:+.1%}), texts "
                    + ("equal" if texts == same else "DIFFER"),
                    flush=True,
                )


if __name__ == "__main__":
    main()
