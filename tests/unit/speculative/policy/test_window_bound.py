"""The bound on drafting: one ledger for a pair, whatever is drafted, asked or tuned in between.

Random sequences of short replies by every kind of method, at every rule and temperature, with
prompts, restarts and tunings between them, in simulated time. What was written for the user must
never be more than 8 plain steps and 1 % behind plain decoding, at any token.

``SPECLLAMA_SEQUENCES=1000`` tries so many of them.
"""

from __future__ import annotations

import os
import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path

import pytest
from replay import Blind, Spot, VirtualClock, replay
from traces import CLIFF, CPU, DEAR, GPU, KINDS, MEASURED, trace
from windows import booking

from specllama.engine.profiles import Profile, band
from specllama.settings.params import GenerateParams, SamplingParams, VerifyRule
from specllama.speculative.policy.constants import BEHIND, EPSILON
from specllama.speculative.policy.policy import Policy

SEQUENCES = int(os.environ.get("SPECLLAMA_SEQUENCES", "60"))
MACHINES = {
    "cpu": (CPU, 0.1),
    "gpu": (GPU, 0.1),
    "dear": (DEAR, 0.6),
    "cliff": (CLIFF, 0.08),
    "measured": (MEASURED[:17], 0.19),
}
METHODS = ("draft", "mixed", "ngram", "eagle3", "lookahead")
LAWS: tuple[tuple[VerifyRule, float], ...] = (
    ("match", 0.0),
    ("match", 0.4),
    ("match", 0.9),
    ("match", 1.5),
    ("rejection", 0.9),
    ("block", 1.1),
)


@dataclass
class User:
    """A pair in use: its replies in a row, in simulated time."""

    verify: Sequence[float]
    step: float
    path: Path
    share: float  # what a draft step is first thought to cost, of what it does
    tokens: int = 0
    time: float = 0.0
    behind: float = 0.0  # plain steps beyond 1 %, at worst
    profile: Profile = field(init=False)

    def __post_init__(self) -> None:
        self.profile = Profile(self.path)
        self.restart()

    def restart(self) -> None:
        """The program ends and starts again."""
        self.profile.save()
        self.profile = Profile(self.path)
        self.profile.costs.draft_share = self.share * self.step

    def reply(
        self, spots: list[Spot], method: str, rule: VerifyRule, temperature: float, prompt: int
    ) -> None:
        for n, took in self.write(spots, method, rule, temperature, prompt):
            self.tokens += n
            self.time += took
            self.behind = max(self.behind, self.time - (1.0 + EPSILON) * self.tokens)

    def write(
        self, spots: list[Spot], method: str, rule: VerifyRule, temperature: float, prompt: int
    ) -> list[tuple[int, float]]:
        """(tokens, plain steps) of every round of a reply."""
        params = GenerateParams(sampling=SamplingParams(temperature=temperature), verify=rule)
        peek = rule == "match" or temperature == 0.0
        clock = VirtualClock()
        window = Policy(
            self.profile.learned(band(params)),
            self.profile.costs,
            self.profile.ledger,
            draft_max=15,
            peek=peek,
            tokens=len(spots),
            clock=clock,
        )
        window.drafts_with(booking(method))
        if prompt:
            window.prefilled(prompt, prompt)
        told = [replace(s, copy=None) for s in spots] if method in ("draft", "eagle3") else spots
        blind = method == "lookahead"
        done = replay(
            told, window, clock, verify=self.verify, draft=self.step, prompt=0 if blind else prompt,
            peek=peek, use_model=method != "ngram", drafter=Blind(spots, 1) if blind else None,
        )  # fmt: skip
        window.finish()
        return [(n - m, t - s) for (m, s), (n, t) in pairwise(done.progress)]

    def tune(self, rng: random.Random) -> None:
        """Careful measurements and lessons, as ``specllama tune`` takes them."""
        costs = self.profile.costs
        for rows in range(1, len(self.verify)):
            costs.target.set(rows, self.verify[rows])
        for n in (1, 2, 16, 64, 128):
            costs.draft.set(n, self.step * (1 + 0.35 * (n - 1)))
        with self.profile.practice():
            for _ in range(4):
                self.write(text(rng, 40), "mixed", *rng.choice(LAWS), 40)
                self.profile.forgive()


def text(rng: random.Random, n: int) -> list[Spot]:
    """A stretch of one of the hostile traces, the confident and wrong draft among them."""
    return trace(rng.choice(KINDS), rng.randrange(50), n)


@pytest.mark.parametrize("machine", MACHINES)
def test_no_sequence_of_replies_is_ever_further_behind(machine: str, tmp_path: Path) -> None:
    verify, step = MACHINES[machine]
    for seed in range(SEQUENCES // len(MACHINES)):
        rng = random.Random(f"{machine} {seed}")
        user = User(verify, step, tmp_path / f"{seed}.json", rng.choice((0.5, 1.0, 2.0)))
        only = rng.choice((None, None, "liar"))
        for _ in range(rng.randrange(4, 24)):
            event = rng.random()
            if event < 0.08:
                user.tune(rng)
            elif event < 0.16:
                user.restart()
            else:
                n = rng.randrange(4, 48)
                spots = trace(only, rng.randrange(50), n) if only else text(rng, n)
                prompt = rng.choice((0, 20, 150, 600))
                user.reply(spots, rng.choice(METHODS), *rng.choice(LAWS), prompt)
        assert user.behind <= BEHIND + 1e-6, f"sequence {seed}"


@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize("method", ["draft", "mixed"])
def test_a_confident_and_wrong_draft_is_paid_for_once(
    machine: str, method: str, tmp_path: Path
) -> None:
    """Not once a method, rule and temperature: six short replies lose no more than the first."""
    verify, step = MACHINES[machine]
    user = User(verify, step, tmp_path / "profile.json", 1.0)
    for i, law in enumerate(LAWS):
        user.restart()
        user.reply(trace("liar", i, 30), method, *law, 20)
        if i == 0:
            first = user.behind
    user.tune(random.Random(machine))
    for i, law in enumerate(LAWS):
        user.reply(trace("liar", i, 30), "eagle3" if i % 2 else method, *law, 20)
    assert user.tokens == 12 * 29
    assert 0.0 <= first <= user.behind <= BEHIND
