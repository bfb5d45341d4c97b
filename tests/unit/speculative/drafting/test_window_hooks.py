"""Every proposer asks the window on its way, and takes the answers."""

import pytest
from engines import FakeContext
from table_model import FakeTable
from toys import FULL, LETTERS, OURS, Setup, V, Words, is_eog, started
from windows import Answers

from specllama.settings.params import VerifyRule
from specllama.speculative.drafting.draft_tree import TreeDrafter
from specllama.speculative.drafting.drafter import Drafter, Request
from specllama.speculative.drafting.lookahead import LookaheadDrafter
from specllama.speculative.drafting.merged import MergedDrafter
from specllama.speculative.drafting.ngram import NgramDrafter
from specllama.speculative.drafting.translate import RetokenizingDrafter, TokenMap
from specllama.speculative.effects import run_alone
from specllama.speculative.rules import MATCH, RandomCoins, rule_of
from specllama.speculative.sampling import SamplerChain
from specllama.speculative.types import Draft, DraftJudge, Room

TEXT = [1, 2, 3, 4, 5, 1, 2, 3]


class Asked(DraftJudge):
    """Counts the questions, answers as told."""

    def __init__(
        self, n: int = 8, *, read: bool = True, take: int = 99, beside: bool = True
    ) -> None:
        self.begun: list[tuple[str, int]] = []
        self.tokens: list[int | None] = []
        self.steps = self.side = 0
        self._read, self._take, self._beside = read, take, beside
        self.room = Room(n, self)

    def read(self, source: str, tokens: int) -> int:
        self.begun.append((source, tokens))
        return tokens if self._read else 0

    def further(self, likely: float | None = None, rows: int = 0) -> bool:
        self.steps += likely is None
        return True

    def take(self, confidence: float | None, lead: float | None, token: int | None) -> bool:
        self.tokens.append(token)
        return len(self.tokens) <= self._take

    def row(self, likely: float, *, keep: bool = True) -> bool:
        assert 0.0 <= likely <= 1.0
        self.side += 1
        return self._beside


def tree() -> TreeDrafter:
    table = FakeTable(V, seed=6, sharpness=1.5, of=Setup().table, agreement=0.6)
    return TreeDrafter(FakeContext(table, n_ctx=256), n_vocab=V)


def propose(proposer: Drafter, asked: Asked, rule: VerifyRule = "match") -> Draft:
    proposer.start(
        Request(
            seed=3, rule=rule_of(rule), coins=RandomCoins(1), is_eog=is_eog, leaves=8, pass_rows=65
        )
    )
    return run_alone(proposer.draft(TEXT, SamplerChain(FULL, seed=3, tokens=TEXT), asked.room))


@pytest.mark.parametrize("rule", ["match", "rejection"])
def test_a_tree_asks_for_every_row(rule: VerifyRule) -> None:
    assert len(propose(tree(), asked := Asked(), rule)) == 8
    assert asked.begun == [("tree", len(TEXT))]
    assert asked.steps >= 1
    assert asked.side >= 1
    # under rejection the question comes before the token is drawn
    assert all((token is None) is (rule == "rejection") for token in asked.tokens)

    assert not len(propose(tree(), asked := Asked(read=False), rule))
    assert not asked.tokens

    assert not len(propose(tree(), Asked(take=0, beside=False), rule))

    narrow = propose(tree(), Asked(beside=False), rule)
    assert len(narrow)
    assert narrow.is_chain


def test_the_trunk_ends_where_the_window_says() -> None:
    draft = propose(tree(), Asked(take=2, beside=False))
    assert len(draft) == 2
    assert draft.is_chain


def test_a_branch_is_kept_out_where_the_window_wants_the_copy_alone() -> None:
    draft = propose(MergedDrafter(NgramDrafter(n_min=3), tree()), Asked(n=2, read=False))
    assert draft.tokens == (4, 5)
    assert set(draft.sources) == {"ngram"}


@pytest.mark.parametrize("most", [5, 9, 20, 40])
def test_lookahead_keeps_to_the_rows_it_is_given(most: int) -> None:
    proposer = started(LookaheadDrafter())
    chain = SamplerChain(FULL, tokens=TEXT)
    draft = run_alone(
        proposer.draft(TEXT, chain, Room(8, Answers(read=lambda source, rows: min(rows, most - 1))))
    )
    assert len(draft) + 1 <= most


def test_of_a_backlog_in_other_tokens_the_newest_are_read_too() -> None:
    words = Words([*LETTERS, "ab", "cd", " "])
    context = FakeContext(FakeTable(words.n_tokens, seed=4), n_ctx=256)
    proposer = RetokenizingDrafter(context, OURS, words, TokenMap(OURS, words))
    proposer.start(Request(seed=1, rule=MATCH, coins=RandomCoins(1), is_eog=is_eog))
    chain = SamplerChain(FULL, tokens=TEXT)
    lags: list[int] = []

    def begin(source: str, lag: int) -> int:
        lags.append(lag)
        return 3

    drafts = [
        run_alone(proposer.draft(TEXT, chain, Room(4, Answers(read=begin)))) for _ in range(2)
    ]
    assert lags == [5, 1]  # all but the last token stay read
    assert drafts[0] == drafts[1]
    assert context.tokens[:3] == proposer._ids[-3:]
