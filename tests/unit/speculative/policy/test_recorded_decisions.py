"""Recorded traces replay to the same decisions: how far each round drafts, and why.

Simulated pairs at given costs, alone and several at once, with every kind of source. One line a
round: guesses allowed, sent and accepted, tokens read first, the shape of a tree, the reason. The
recording is ``tests/data/decisions.json``; ``SPECLLAMA_RECORD=1`` writes it anew, which only a
change of the policy that is meant may do.
"""

from __future__ import annotations

import json
import os
import random
from collections.abc import Callable, Generator, Sequence
from pathlib import Path
from typing import Any

import pytest
from engines import FakeContext
from replay import Blind, Spot, VirtualClock, _Copies, _Model, replay
from table_model import FakeTable
from traces import CLIFF, CPU, DEAR, GPU, MEASURED, Script, talk, trace
from windows import Pair, booking

from specllama.backend.base import Shared
from specllama.events import RoundDone
from specllama.settings.params import SamplingParams, VerifyRule
from specllama.speculative.budget import allocate
from specllama.speculative.drafting.draft_model import ChainDrafter
from specllama.speculative.drafting.draft_tree import TreeDrafter
from specllama.speculative.drafting.drafter import Drafter, Request
from specllama.speculative.drafting.lookahead import LookaheadDrafter
from specllama.speculative.drafting.merged import MergedDrafter
from specllama.speculative.drafting.mixed import MixedDrafter
from specllama.speculative.drafting.ngram import NgramDrafter
from specllama.speculative.drafting.suffix import SuffixDrafter
from specllama.speculative.effects import Offer, Pass, perform
from specllama.speculative.round import Rounds
from specllama.speculative.rules import RandomCoins, rule_of
from specllama.speculative.sampling import SamplerChain

RECORDING = Path(__file__).parents[3] / "data" / "decisions.json"
V = 64
CHEAP = [0.0, *(1 + 0.05 * n for n in range(80))]


def line(done: RoundDone) -> str:
    shape = "" if done.is_chain else ",".join(map(str, done.parents)) + " "
    sent = f"{done.draft_max} {len(done.drafted)} {done.accepted} {done.read}"
    return f"{sent} {shape}{done.window_reason}"


def balances(pair: Pair) -> str:
    """What the pair knows in the end."""
    ledger, costs = pair.ledger, pair.costs
    own = " ".join(f"{name}={own:.6f}" for name, own in sorted(ledger.own.items()))
    pace = " ".join(f"{x:.6f}" for x in pair.learned.pace)
    level = costs.target.level or 0.0
    return f"spare={ledger.spare:.6f} {own} pace={pace} level={level:.6f}"


# -- recorded guesses, in plain steps -----------------------------------------------------------


class Head(_Model):
    """A head whose first step gives all guesses of a round, as Medusa's does."""

    name = "medusa"


class Watched:
    """A window that writes down what becomes of each of its rounds."""

    def __init__(self, window: Any, lines: list[str]) -> None:
        self._window, self._lines = window, lines

    def __getattr__(self, name: str) -> Any:
        return getattr(self._window, name)

    def observe(self, done: RoundDone, verify_ms: float, shared: Shared | None = None) -> None:
        self._lines.append(f"{len(done.drafted)} {done.accepted} {len(done.emitted)}")
        self._window.observe(done, verify_ms, shared)


def guesses(
    spots: Sequence[Spot],
    verify: Sequence[float],
    step: float,
    *,
    method: str = "mixed",
    peek: bool = True,
    prompt: int = 0,
    replies: int = 2,
    tuned: bool = False,
) -> list[str]:
    lines: list[str] = []
    pair = Pair()
    pair.costs.draft_share = step
    if tuned:
        pair.tuned(verify, step)
    for _ in range(replies):
        clock = VirtualClock()
        window = pair.window(clock, peek=peek, draft_max=15, tokens=len(spots))
        window.drafts_with(booking(method))
        drafter: Drafter | None = None
        if method == "medusa":
            drafter = MixedDrafter([_Copies(spots, max(prompt, 1)), Head(spots, 1, peek=peek)])
        if method == "lookahead":
            drafter = Blind(spots, 1)
        done = replay(
            spots, Watched(window, lines), clock,
            verify=verify, draft=step, prompt=prompt, peek=peek,
            use_model=method not in ("ngram", "lookahead"), drafter=drafter,
        )  # fmt: skip
        window.finish()
        lines += [f"{reason}: {n}" for reason, n in sorted(done.reasons.items())]
    return [*lines, balances(pair)]


# -- real drafters over tables, some conversations at a time --------------------------------------


def together(
    methods: Sequence[str],
    verify: Sequence[float],
    step: float,
    *,
    rule: VerifyRule = "match",
    temperature: float = 0.0,
    length: int = 60,
    draft_ctx: int = 512,
    rate: float = 0.9,
    busy: float = 0.0,
) -> list[str]:
    """One conversation a method, of one pair, in passes that they share."""
    pair, clock = Pair(), VirtualClock()
    lines: list[str] = []
    pair.costs.draft_share = step
    rng = random.Random(f"{methods} {rule} {rate}")
    sampling = SamplingParams(temperature=temperature)

    def begin(id: int, method: str) -> Rounds:
        spoken = talk(rng, [("quote", 20, rate), ("new", 20, rate), ("new", 40, 0.2)])
        text = spoken.prompt + spoken.reply + spoken.prompt[:40]
        right = [True] * len(spoken.prompt) + spoken.right + [False] * 40
        script = Script(text, right)
        table: FakeTable = Script(text)
        guess: FakeTable = script
        if temperature > 0.0:
            table = FakeTable(V, seed=id)
            guess = FakeTable(V, seed=id + 50, of=table, agreement=rate)
        draft, lane = FakeContext(guess, n_ctx=draft_ctx), FakeContext(table)
        tokens = list(spoken.prompt)
        lane.forward(tokens[:-1], outputs="none")
        tree = TreeDrafter(draft, n_vocab=V)
        model = ChainDrafter(draft, n_vocab=V)
        script.start = lambda: (tree if method in ("tree", "merged") else model)._start
        drafter: Drafter = {
            "draft": lambda: model,
            "tree": lambda: tree,
            "merged": lambda: MergedDrafter(NgramDrafter(n_min=3), tree),
            "mixed": lambda: MixedDrafter([SuffixDrafter(), NgramDrafter(), model]),
            "suffix": SuffixDrafter,
            "lookahead": LookaheadDrafter,
        }[method]()
        law = rule_of(rule, greedy=temperature == 0.0)
        coins = RandomCoins(id)
        drafter.start(
            Request(seed=id, rule=law, coins=coins, is_eog=_never, leaves=8, pass_rows=64,
                    n_ctx=4096)
        )  # fmt: skip
        window = pair.window(clock, peek=law.peek, tokens=length)
        window.drafts_with(booking(method))
        window.prefilled(len(tokens), len(tokens))
        return Rounds(
            target=lane, drafter=drafter, tokens=tokens, window=window,
            chain=SamplerChain(sampling, seed=id, tokens=tokens), rule=law, seed=id, coins=coins,
            is_stop=_never, clock=clock,
        )  # fmt: skip

    loops = [begin(id, method) for id, method in enumerate(methods)]
    left = dict.fromkeys(range(len(loops)), length)
    going: dict[int, Generator[Any, Any, RoundDone]] = {}
    asks: dict[int, Any] = {}

    def slow() -> float:
        return 3.0 if busy and rng.random() < busy else 1.0

    def answer(id: int, answered: object) -> None:
        """Let one go on until it waits for others, or its round is over."""
        while True:
            try:
                ask = going[id].send(answered)
            except StopIteration as over:
                done: RoundDone = over.value
                lines.append(f"{id} {line(done)}")
                left[id] -= len(done.emitted)
                del going[id], asks[id]
                return
            answered, asks[id] = None, ask
            if isinstance(ask, Offer) or (isinstance(ask, Pass) and ask.lane is loops[id].target):
                return
            if isinstance(ask, Pass):
                clock.steps(step * (1 + 0.35 * (len(ask.tokens) - 1)) * slow())
            answered = perform(ask)

    while any(n > 0 for n in left.values()):
        for id, n in left.items():
            if n > 0:
                going[id] = loops[id].round(n - 1)
                asks[id] = None
                answer(id, None)
        offers = {id: ask for id, ask in asks.items() if isinstance(ask, Offer)}
        if offers:
            given = [offer.size for offer in offers.values()]
            if len(asks) > 1:
                most = sum(given)
                bids = [offer.bid(offer) for offer in offers.values()]
                v = max((bid.passes(len(asks) + most) for bid in bids), key=lambda v: v[-1])
                given = allocate(bids, v, taken=len(asks))[0]
            for id, n in zip(list(offers), given, strict=True):
                answer(id, n)
        passes = {id: ask for id, ask in asks.items() if isinstance(ask, Pass)}
        rows = sum(len(ask.tokens) for ask in passes.values())
        sent = rows - len(passes)
        ms = verify[min(rows, len(verify) - 1)] * slow()
        clock.steps(ms)
        for nth, (id, ask) in enumerate(passes.items()):
            shared = Shared(len(passes), rows, ms, nth == 0, sent) if len(passes) > 1 else None
            perform(ask)
            ask.shared = shared
            answer(id, ask)
    for loop in loops:
        loop.window.finish()
    return [*lines, balances(pair)]


def _never(token: int) -> bool:
    return False


LONG = [0.0, *(1 + 0.12 * n for n in range(80))]

SCENARIOS: dict[str, Callable[[], list[str]]] = {
    "draft, good, cold": lambda: guesses(trace("good", 1, 150), GPU, 0.1, method="draft"),
    "draft, liar, dear": lambda: guesses(trace("liar", 1, 150), DEAR, 0.6, method="draft"),
    "draft, unseen": lambda: guesses(
        trace("alternating", 2, 260), CPU, 0.1, method="draft", peek=False, prompt=40
    ),
    "draft, long prompt": lambda: guesses(trace("good", 3, 150), CLIFF, 0.08, prompt=600),
    "mixed, copies": lambda: guesses(trace("short copies", 1, 150), CPU, 0.2, tuned=True),
    "mixed, false copies": lambda: guesses(trace("false copies", 1, 150), GPU, 0.1),
    "mixed, lure": lambda: guesses(trace("lure", 1, 500), CPU, 0.1, replies=1),
    "copies alone": lambda: guesses(trace("short copies", 2, 150), GPU, 0.1, method="ngram"),
    "head, at once": lambda: guesses(trace("good", 4, 150), CLIFF, 0.3, method="medusa"),
    "head, stepwise": lambda: guesses(trace("good", 5, 150), CPU, 0.2, method="eagle3"),
    "scouts": lambda: guesses(trace("good", 6, 150), GPU, 0.1, method="lookahead"),
    "scouts, dear": lambda: guesses(trace("liar", 6, 150), DEAR, 0.1, method="lookahead"),
    "alone: tree": lambda: together(["tree"], LONG, 0.05),
    "alone: merged": lambda: together(["merged"], CHEAP, 0.05),
    "alone: tree, rejection": lambda: together(
        ["tree"], CHEAP, 0.05, rule="rejection", temperature=0.8
    ),
    "alone: tree, hot": lambda: together(["tree"], CHEAP, 0.05, temperature=0.9, rate=0.8),
    "alone: mixed": lambda: together(["mixed"], MEASURED, 0.19, length=80),
    "alone: lookahead": lambda: together(["lookahead"], CHEAP, 0.05),
    "alone: short memory": lambda: together(["draft"], LONG, 0.05, draft_ctx=40),
    "alone: busy": lambda: together(["draft"], LONG, 0.1, busy=0.1, length=80),
    "three share": lambda: together(["draft", "mixed", "suffix"], LONG, 0.05),
    "four share, dear": lambda: together(["draft"] * 4, MEASURED, 0.19, length=40),
    "trees share": lambda: together(["tree", "tree"], CHEAP, 0.05, length=40),
    "blocks share": lambda: together(
        ["draft", "draft"], CHEAP, 0.05, rule="block", temperature=0.8, length=40
    ),
}


@pytest.mark.parametrize("name", SCENARIOS)
def test_recorded_traces_replay_to_the_same_decisions(name: str) -> None:
    recorded = json.loads(RECORDING.read_text("utf-8"))
    lines = SCENARIOS[name]()
    assert unpacked(recorded["lines"], recorded["scenarios"][name]) == lines


def unpacked(table: list[str], numbers: list[int]) -> list[str]:
    return [table[n] for n in numbers]


def record() -> None:
    """Write what is decided today; every different line once."""
    table: dict[str, int] = {}
    scenarios = {
        name: [table.setdefault(text, len(table)) for text in scenario()]
        for name, scenario in SCENARIOS.items()
    }
    parts = ",\n".join(
        f" {json.dumps(name)}: {json.dumps(numbers, separators=(',', ':'))}"
        for name, numbers in scenarios.items()
    )
    lines = ",\n".join(f" {json.dumps(text)}" for text in table)
    RECORDING.write_text(f'{{"scenarios": {{\n{parts}\n}},\n"lines": [\n{lines}\n]}}\n', "utf-8")


if os.environ.get("SPECLLAMA_RECORD"):
    record()
