"""A verification rule in one file: ``match``, but at most one drafted token a round is accepted."""

from specllama.speculative.rules import Coins, IsStop, Rule, Walk, verify_match
from specllama.speculative.types import Draft, Verdict


def judge(draft: Draft, walk: Walk, seed: int, coins: Coins, is_stop: IsStop) -> Verdict:
    return verify_match(draft.first(1), walk, seed, coins, is_stop)


RULE = Rule("one at a time", common_noise=True, chains_only=True, peek=True, judge=judge)
