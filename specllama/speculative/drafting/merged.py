"""A copy of the text and a draft model in one tree.

What was copied (an n-gram or suffix match) is a branch of point masses alongside the draft model's
own branches; where both agree they share nodes. The likeliest nodes join first, so a sure copy
fills the tree, a doubtful one takes a row or two, and the model continues where the copy ends.
"""

from __future__ import annotations

from collections.abc import Sequence

from specllama.speculative.drafting.draft_tree import TreeDrafter, grow, why_no_tree
from specllama.speculative.drafting.drafter import Drafter, Joined, Request, written
from specllama.speculative.drafting.method import Kit, Method
from specllama.speculative.drafting.ngram import NgramDrafter
from specllama.speculative.effects import Steps
from specllama.speculative.sampling import SamplerChain
from specllama.speculative.types import EMPTY_DRAFT, Draft, Room, Verdict
from specllama.text_history import common_prefix


class MergedDrafter(Joined):
    """A drafter of one tree from two sources.

    Args:
        copier: a source of chains that cost nothing, with confidences.
        model: grows the tree around them.
    """

    name = "merged"

    def __init__(self, copier: Drafter, model: TreeDrafter) -> None:
        super().__init__((copier, model))
        self._copier, self._model = copier, model
        self._guess = EMPTY_DRAFT

    def start(self, request: Request) -> None:
        super().start(request)
        self._guess = EMPTY_DRAFT

    def draft(self, tokens: Sequence[int], chain: SamplerChain, room: Room) -> Steps[Draft]:
        self._guess = yield from self._copier.draft(tokens, chain, room)
        return (yield from grow(self._model, tokens, chain, room, self._guess))

    def commit(self, tokens: Sequence[int], draft: Draft, verdict: Verdict) -> None:
        """Report to each source how its own guess ended: joined, beaten or left out."""
        if len(self._guess):
            agreed = common_prefix(self._guess.tokens, tuple(written(tokens, verdict)))
            own = Verdict(tuple(range(agreed)), verdict.target_token, verdict.kind)
            self._copier.commit(tokens, self._guess, own)
            self._guess = EMPTY_DRAFT
        self._model.commit(tokens, draft, verdict)


def _open(kit: Kit) -> Drafter:
    tree = kit.drafter("tree")
    assert isinstance(tree, TreeDrafter)
    return MergedDrafter(NgramDrafter(n_min=3), tree)


METHOD = Method(
    name="merged", label="Merged", short="merged", letter="",
    blurb="One tree that joins copied text with the draft model's branches.",
    cost="draft model", why_not=why_no_tree, open=_open, branches="may",
)  # fmt: skip
