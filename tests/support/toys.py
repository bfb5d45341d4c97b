"""Rounds over a table model: everything that a run depends on, and a grammar made to hurt."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
from engines import FakeContext
from oracle import Oracle, Tokens, Toy, bias
from table_model import FakeTable

from specllama.arrays import IntArray
from specllama.backend.tree_layout import Layout
from specllama.errors import EngineError
from specllama.events import RoundDone
from specllama.settings.params import SamplingParams, VerifyRule
from specllama.speculative.drafting.draft_tree import TreeDrafter
from specllama.speculative.drafting.drafter import Drafter, Request
from specllama.speculative.drafting.lookahead import LookaheadDrafter
from specllama.speculative.effects import Steps, run_alone
from specllama.speculative.round import Rounds
from specllama.speculative.rules import MATCH, Coins, RandomCoins, Rule, rule_of
from specllama.speculative.sampling import SamplerChain
from specllama.speculative.types import Draft, Law, Room, Verdict
from specllama.speculative.window import Window

V = 16
PROMPT = [3, 7, 3, 7, 5, 9, 3, 7]
LENGTH = 30


def is_eog(token: int) -> bool:
    return token == 0


class NotTwice:
    """A grammar: no token may follow itself, and none of the same residue modulo 5.

    Nothing may follow those of ``dead``; ``met`` notes those that somebody went on behind.
    """

    met: ClassVar[list[int]] = []

    def __init__(self, last: int = -1, dead: frozenset[int] = frozenset()) -> None:
        self.last = last
        self.dead = dead

    def allowed(self, ids: IntArray) -> npt.NDArray[np.bool_]:
        if self.last in self.dead:
            self.met.append(self.last)
            return np.zeros(len(ids), np.bool_)
        if self.last < 0:
            return np.ones(len(ids), np.bool_)
        keep: npt.NDArray[np.bool_] = ids % 5 != self.last % 5
        return keep

    def accept(self, token: int) -> None:
        if not self.allowed(np.array([token], np.int32))[0]:
            raise EngineError(f"token {token} is forbidden")  # a draft's branch ends there
        self.last = token

    def fork(self) -> NotTwice:
        return NotTwice(self.last, self.dead)

    def ahead(self, most: int, habits: dict[bytes, dict[bytes, float]]) -> list[tuple[int, float]]:
        """Small numbers in turn, where the last one was small: some of them wrong, or forbidden."""
        if not 0 <= self.last < 3:
            return []
        return [((self.last + 1 + i) % 3, 0.5 if i % 2 else 1.0) for i in range(most)]


@cache
def _table(eog_bias: float) -> FakeTable:
    """Return the table of all setups: it keeps the rows that it has made."""
    return FakeTable(V, seed=5, order=2, sharpness=1.5, eog_bias=eog_bias)


@dataclasses.dataclass
class Setup:
    """Everything a run depends on besides the proposer."""

    sampling: SamplingParams = dataclasses.field(
        default_factory=lambda: SamplingParams(temperature=1.0, top_k=0, top_p=1.0, min_p=0.0)
    )
    seed: int = 1
    rule: VerifyRule = "match"
    draft_max: int = 4
    exact_rows: int = 0
    grammar: bool = False
    dead: frozenset[int] = frozenset()  # tokens behind which the grammar allows nothing
    eog_bias: float = -3.0
    coins: Coins | None = None
    length: int = LENGTH
    table: FakeTable = dataclasses.field(init=False)

    @property
    def judge(self) -> Rule:
        return rule_of(self.rule, greedy=self.sampling.temperature == 0.0)

    def __post_init__(self) -> None:
        self.table = _table(self.eog_bias)

    def loop(
        self, drafter: Drafter, target: FakeContext, tokens: list[int], *, coins: Coins,
        breakers: frozenset[int] = frozenset(), **request: Any,
    ) -> Rounds:  # fmt: skip
        """Return rounds behind a text, of which the target has read all but the last token."""
        target.capture(drafter.needs)
        if tokens[1:]:
            target.forward(tokens[:-1], outputs="none")
        told = {"seed": self.seed, "rule": self.judge, "coins": coins, "is_eog": is_eog}
        drafter.start(Request(**{**told, **request}))
        grammar = NotTwice(dead=self.dead) if self.grammar else None
        chain = SamplerChain(
            self.sampling, seed=self.seed, tokens=tokens, breakers=breakers, constraint=grammar
        )
        return Rounds(
            target=target, drafter=drafter, tokens=tokens, chain=chain, rule=self.judge,
            window=Window(self.draft_max), seed=self.seed, coins=coins, is_stop=is_eog,
        )  # fmt: skip

    def off_by(
        self, make: Callable[[FakeContext], Drafter], table: FakeTable, prompt: Sequence[int],
        length: int, each: Callable[[RoundDone], object] = lambda done: None, **request: Any,
    ) -> float:  # fmt: skip
        """Return how far the loop is from the law of its chain, over all outcomes of coins."""

        def program(oracle: Oracle) -> Tokens:
            target, tokens = FakeContext(table, n_ctx=16), list(prompt)
            loop = self.loop(make(target), target, tokens, coins=oracle, **request)
            while len(tokens) < len(prompt) + length and not is_eog(tokens[-1]):
                each(run_alone(loop.round()))
            return tuple(tokens[len(prompt) :])

        return bias(program, ChainToy(self, table, list(prompt)), length).tv

    def run(
        self,
        proposer: Drafter | None = None,
        each: Callable[[Rounds, RoundDone], None] | None = None,
    ) -> list[int]:
        """Prompt and text. The caches are checked after every round."""
        proposer = proposer or Drafter()
        target = FakeContext(self.table, n_ctx=256)
        tokens = list(PROMPT)
        coins = self.coins or RandomCoins((self.seed, 1))
        breakers = frozenset({9})
        loop = self.loop(proposer, target, tokens, coins=coins, breakers=breakers)
        end = len(PROMPT) + self.length
        while len(tokens) < end and not is_eog(tokens[-1]):
            before = list(tokens)
            room = min(end - len(tokens), self.exact_rows or target.max_rows) - 1
            done = run_alone(loop.round(room))
            assert tokens == [*before, *done.emitted]
            assert target.n_past == len(tokens) - 1
            assert target.tokens == tokens[:-1]
            assert done.n_past == len(before) - 1
            stopped = is_eog(tokens[-1])
            assert len(done.emitted) == len(done.accepted_path) + (done.target_token is not None)
            assert not any(is_eog(t) for t in done.emitted[:-1])
            if not stopped:
                assert loop.chain.position == len(tokens)
            assert len(done.drafted) <= max(done.draft_max, 0) or self.draft_max == 0
            if each is not None:
                each(loop, done)
        assert len(tokens) <= end
        return tokens


def into_dead_ends(proposer: Callable[[Setup], Drafter]) -> None:
    """What is drafted leads where the grammar allows nothing: the text is as without drafts."""
    NotTwice.met.clear()
    for seed in range(4):
        setup = Setup(grammar=True, seed=seed, length=10)
        truth = setup.run()
        setup = dataclasses.replace(setup, dead=frozenset(range(1, V)) - {*truth})
        assert setup.dead
        assert setup.run(proposer(setup)) == truth
    assert NotTwice.met


FULL = SamplingParams(temperature=1.0, top_k=0, top_p=1.0, min_p=0.0)
SAMPLERS = {
    "plain": FULL,
    "usual": SamplingParams(),
    "penalties": dataclasses.replace(
        FULL, repeat_penalty=1.3, frequency_penalty=0.4, presence_penalty=0.3, repeat_last_n=8
    ),
    "dry": dataclasses.replace(FULL, dry_multiplier=2.0, dry_allowed_length=1),
    "xtc": dataclasses.replace(FULL, xtc_probability=0.5, xtc_threshold=0.1),
    "bias": dataclasses.replace(FULL, logit_bias={4: 2.0, 5: -math.inf}),
    "typical": dataclasses.replace(FULL, typical_p=0.6),
}


EXACT = {
    "plain": FULL,
    "truncated": dataclasses.replace(FULL, top_k=2, temperature=0.8),
    "penalties": dataclasses.replace(FULL, repeat_penalty=1.5, presence_penalty=0.5),
}


class ChainToy(Toy):
    """The law that the loop must reproduce: the fake table through the sampler chain."""

    def __init__(self, setup: Setup, table: FakeTable, prompt: list[int]) -> None:
        super().__init__(table.n_vocab, 0, eos=0)
        self._setup, self._table, self._prompt = setup, table, prompt

    def law(self, prefix: Tokens) -> Law:
        tokens = [*self._prompt, *prefix]
        chain = SamplerChain(
            self._setup.sampling,
            tokens=tokens,
            constraint=NotTwice(prefix[-1] if prefix else -1) if self._setup.grammar else None,
        )
        return chain.law(self._table.row(tokens))


class Leaves(Drafter):
    """A proposer on a target that takes trees."""

    def __init__(self, inner: Drafter, leaves: int = 8) -> None:
        self.inner, self._leaves = inner, leaves
        self.name, self.needs = inner.name, inner.needs
        self.drafts: list[Draft] = []

    def start(self, request: Request) -> None:
        self.inner.start(dataclasses.replace(request, leaves=self._leaves, pass_rows=65))

    def draft(self, tokens: Sequence[int], chain: SamplerChain, room: Room) -> Steps[Draft]:
        draft = yield from self.inner.draft(tokens, chain, room)
        assert len(draft) <= room.n
        assert Layout().grown((-1, *(p + 1 for p in draft.parents))).n_leaves <= self._leaves
        assert len(set(zip(draft.parents, draft.tokens, strict=True))) == len(draft)
        self.drafts.append(draft)
        return draft

    def commit(self, tokens: Sequence[int], draft: Draft, verdict: Verdict) -> None:
        self.inner.commit(tokens, draft, verdict)

    def close(self) -> None:
        self.inner.close()


def grower(setup: Setup, agreement: float, siblings: int = 3) -> TreeDrafter:
    table = FakeTable(V, seed=6, sharpness=1.5, of=setup.table, agreement=agreement)
    drafter = TreeDrafter(FakeContext(table, n_ctx=256), n_vocab=V)
    drafter.siblings = siblings
    return drafter


def weights(draft: Draft) -> list[float]:
    """Path probability of every node."""
    found: list[float] = []
    for parent, share in zip(draft.parents, draft.confidence, strict=True):
        assert share is not None
        found.append(share * (found[parent] if parent >= 0 else 1.0))
    return found


def started(proposer: LookaheadDrafter, leaves: int = 32) -> LookaheadDrafter:
    proposer.start(
        Request(
            seed=0,
            rule=MATCH,
            coins=RandomCoins(0),
            is_eog=is_eog,
            leaves=leaves,
            pass_rows=129,
            n_ctx=512,
        )
    )
    return proposer


LETTERS = "abcdefghijklmnopqrstuvwxyz"


class Words:
    """A vocabulary of given texts, cut greedily; token 0 ends a turn."""

    def __init__(self, texts: Sequence[str]) -> None:
        self._pieces = [b"", *(text.encode() for text in texts)]

    @property
    def n_tokens(self) -> int:
        return len(self._pieces)

    def tokenize(self, text: str, *, add_special: bool, parse_special: bool) -> list[int]:
        data, out = text.encode(), []
        while data:
            fits = [t for t, p in enumerate(self._pieces) if p and data.startswith(p)]
            if not fits:
                raise EngineError("the vocabulary cannot express this text")
            best = max(fits, key=lambda t: len(self._pieces[t]))
            out.append(best)
            data = data[len(self._pieces[best]) :]
        return out

    def piece(self, token: int, *, special: bool = False) -> bytes:
        return b"<end>" if special and token == 0 else self._pieces[token]

    def is_eog(self, token: int) -> bool:
        return token == 0


OURS = Words(LETTERS[: V - 1])
WIDTH = 8
LAYERS = (1, 2, 3)
