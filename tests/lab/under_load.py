"""Exactness under load: replies written side by side at random, each compared with itself alone.

    python tests/lab/under_load.py [-m MODEL] [-d DRAFT] [--requests 300] [--parallel 6]
                                     [--ctx 2048] [--kv-ram MIB] [--seed 1] [--seconds S]

Requests arrive in bursts, share the beginnings of their prompts at random lengths (so lanes are
forked), go on from earlier replies, are cancelled or dropped in the middle, and need more cells
than there are (so idle texts are parked and running ones preempted). Long prompts are read in parts
between the passes of the others. Methods, windows, temperatures and seeds are drawn for each.

What is printed counts all of that. A reply is equal if it has the tokens of the same request alone
in an engine of its own; one that goes on from an earlier reply, if it has those of the conversation
where the engine still had that, else of its text read afresh; one that was cancelled, if it is the
beginning of that. The exit status is 1 where one is not.

With --seconds, requests go on for so long (22 minutes of 4 clients: --parallel 4 --seconds 1320),
only the last ones are compared, and the curve of memory is printed: seconds, MB that parked texts
take, MB of the process. Parked texts never take more than they may; the exit status is 1 if they
do.
"""

from __future__ import annotations

import argparse
import json
import random
import resource
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

from specllama.bench.prompts import load_prompts
from specllama.engine.engine import Engine
from specllama.events import Finished, Started
from specllama.settings.params import EngineOptions, GenerateParams, SamplingParams
from specllama.text_history import common_prefix


@dataclass(frozen=True, eq=False)
class Asked:
    ids: tuple[int, ...]
    params: GenerateParams
    after: Asked | None = None  # the request whose reply it goes on from


@dataclass
class Storm:
    """Random requests to an engine.

    Args:
        texts: token ids that prompts are made of.
        methods: that may draft.
        longest: tokens of a reply.
    """

    engine: Engine
    texts: Sequence[Sequence[int]]
    methods: Sequence[str]
    rng: random.Random
    longest: int = 48

    def __post_init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.done: list[tuple[Asked, Finished]] = []
        self.lengths: dict[Asked, int] = {}  # of their texts, as far as lanes hold them
        self.went_on: set[Asked] = set()  # with the cells of the earlier reply
        self.curve: list[tuple[float, float, float]] = []  # seconds, MB parked, MB of the process
        self.watched = False
        self._begun = time.monotonic()
        pool: Any = self.engine.target.pool
        for name in ("fork", "park", "resume"):
            self._counted(pool, name)

    def _counted(self, pool: Any, name: str) -> None:
        real: Callable[..., Any] = getattr(pool, name)

        def call(*args: Any, **more: Any) -> Any:
            out = real(*args, **more)
            self.counts[name] += 1
            return out

        setattr(pool, name, call)

    def asked(self) -> Asked:
        rng = self.rng
        params = GenerateParams(
            seed=rng.randrange(1000),
            max_tokens=rng.randrange(1, self.longest),
            ignore_eos=rng.random() < 0.5,
            proposer=rng.choice(["none", *self.methods]),
            window=rng.choice(("auto", "fixed")),
            draft_max=rng.randrange(1, 9),
            min_speculative_tokens=0,
            sampling=SamplingParams(temperature=rng.choice((0.0, 0.8))),
        )
        whole = [one for one in self.done if one[1].reason in ("length", "stop_token")]
        tail = tuple(rng.choice(self.texts)[: rng.randrange(1, 60)])
        if whole and rng.random() < 0.25:
            self.counts["goes on"] += 1
            before, reply = rng.choice(whole)
            if len(ids := (*before.ids, *reply.token_ids, *tail)) < self.engine.target.n_ctx // 2:
                return Asked(ids, params, before)
        head = rng.choice(self.texts)
        head = head[: rng.randrange(1, len(head))]
        return Asked((*head, *tail)[: self.engine.target.n_ctx // 2], params)

    def run(self, requests: int) -> None:
        engine, rng, running = self.engine, self.rng, dict[int, Asked]()
        left = requests
        while left or running:
            burst = rng.randrange(1, 5) if left and (not running or rng.random() < 0.02) else 0
            while burst and left and engine.free:
                one = self.asked()
                running[engine.submit(one.ids, one.params)] = one
                burst, left = burst - 1, left - 1
                self.counts["requests"] += 1
                self.counts["most at once"] = max(self.counts["most at once"], len(running))
            self._look()
            for id, said in engine.step():
                if isinstance(said, Exception):
                    raise said
                if isinstance(said, Started):
                    self.counts["tokens not read again"] += said.cached_n
                    if (before := running[id].after) and said.cached_n >= self.lengths[before]:
                        self.went_on.add(running[id])
                elif isinstance(said, Finished):
                    self.done.append((one := running.pop(id), said))
                    self.lengths[one] = len(one.ids) + len(said.token_ids) - 1
                    self.counts[said.reason] += 1
                    self.counts["tokens"] += len(said.token_ids)
                    self.counts["drafted"] += said.draft_n
                    self.counts["accepted"] += said.draft_n_accepted
                    self.counts["near-ties"] += said.near_ties
            if running and rng.random() < 0.002:
                engine.cancel(rng.choice(list(running)))
            if running and rng.random() < 0.001:
                engine.drop(gone := rng.choice(list(running)))
                del running[gone]
                self.counts["dropped"] += 1
        figures = engine.figures()
        self.counts["preempted"] = figures.preemptions
        self.counts["compacted"] = figures.compactions

    def _look(self) -> None:
        """Another point of the curve, once a second; Linux only."""
        now_s = time.monotonic() - self._begun
        if self.watched and (not self.curve or now_s - self.curve[-1][0] >= 1):
            pages = int(Path("/proc/self/statm").read_text("ascii").split()[1])
            parked, resident = self.engine.figures().parked_bytes, pages * resource.getpagesize()
            self.curve.append((round(now_s, 1), parked / 1e6, resident / 1e6))

    def go_on(self, seconds: float, requests: int = 60) -> None:
        """Requests for so long, of which the last ones are kept to be compared."""
        self.watched = True
        while time.monotonic() < self._begun + seconds:
            self.done.clear()
            self.lengths.clear()
            self.went_on.clear()
            self.run(requests)

    def check(self, alone: Engine) -> list[str]:
        """What is wrong: replies that are not those of the same request alone."""
        wrong: list[str] = []
        for one, reply in self.done:
            n = len(reply.token_ids) if reply.reason == "cancelled" else None
            due = self.written(alone, one)[:n]
            self.counts["equal"] += due == reply.token_ids
            self.counts["as the conversation"] += one in self.went_on
            if due != reply.token_ids:
                at = common_prefix(due, reply.token_ids)
                wrong.append(f"token {at} differs behind {len(one.ids)}: {one}")
        return wrong

    def written(self, alone: Engine, one: Asked) -> tuple[int, ...]:
        """Its reply, plainly: behind the earlier turns if their cells were there, else afresh."""
        if one.after is not None and one in self.went_on:
            self.written(alone, one.after)
        else:
            alone.reset()
        *_, last = alone.generate(one.ids, one.params.replace(proposer="none"))
        assert isinstance(last, Finished)
        return last.token_ids


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("-m", "--model", default="tiny")
    parser.add_argument("-d", "--draft")
    parser.add_argument("--requests", type=int, default=300)
    parser.add_argument("--parallel", type=int, default=6)
    parser.add_argument("--ctx", type=int, default=2048)
    parser.add_argument("--kv-ram", type=int)
    parser.add_argument("--seconds", type=float, default=0.0)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    options = EngineOptions(n_ctx=args.ctx, threads=args.threads)
    many = EngineOptions(
        n_ctx=args.ctx, threads=args.threads, parallel=args.parallel, kv_ram=args.kv_ram
    )
    with (
        Engine.load(args.model, args.draft, many) as engine,
        Engine.load(args.model, args.draft, options) as alone,
    ):
        engine.measure()
        texts = [ids for p in load_prompts()[::9] if len(ids := engine.encode(p.content)[0]) > 1]
        texts += [[*chain(*texts[i : i + 6])] for i in range(0, len(texts), 6)]  # long ones
        methods = [name for name in engine.drafters if name != "none"]
        storm = Storm(engine, texts, methods, random.Random(args.seed))
        if args.seconds:
            storm.go_on(args.seconds)
        else:
            storm.run(args.requests)
        wrong = storm.check(alone)
        most = many.idle_bytes(engine.info.n_bytes) / 1e6
    print(json.dumps({"exactness": engine.info.exactness, **storm.counts}))
    if args.seconds:
        for point in storm.curve[:: max(1, len(storm.curve) // 24)]:
            print("{:8.1f} s {:8.2f} MB parked {:8.1f} MB".format(*point))
        parked = max(mb for _, mb, _ in storm.curve)
        print(f"at most {parked:.2f} MB were parked, of {most:.2f} MB that may be")
        wrong += ["more is parked than may be"] if parked > most else []
    for one in wrong:
        print(one, file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    raise SystemExit(main())
