"""The ways to draft of a pair: which of them it has, and why not the others."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from specllama.interface import MethodInfo
from specllama.speculative.drafting import registry
from specllama.speculative.drafting.method import Facts

if TYPE_CHECKING:
    from specllama.backend.base import Context
    from specllama.speculative.drafting.drafter import Proposer
    from specllama.speculative.drafting.translate import RetokenizeProposer


def make_proposers(
    target: Context,
    draft: Context | RetokenizeProposer | None,
    *,
    past: Iterable[Sequence[int]] = (),
    remember: Callable[[Sequence[int]], None] | None = None,
    extra: Mapping[str, Proposer] | None = None,
) -> dict[str, Proposer]:
    """The proposers of a pair of caches, by name.

    Args:
        draft: a draft model that speaks the target's token ids, or a proposer that translates
            the text of one that does not, or None.
        past: earlier texts to copy from.
        remember: told every text that ended.
        extra: proposers of the target's own heads.
    """
    from specllama.speculative.drafting.copying import Reader
    from specllama.speculative.drafting.draft_model import DraftModelProposer
    from specllama.speculative.drafting.draft_tree import DraftTreeProposer
    from specllama.speculative.drafting.lookahead import LookaheadProposer
    from specllama.speculative.drafting.merged import MergedProposer
    from specllama.speculative.drafting.mixed import MixedProposer
    from specllama.speculative.drafting.ngram import NgramProposer
    from specllama.speculative.drafting.suffix import SuffixProposer
    from specllama.speculative.drafting.translate import RetokenizeProposer

    heads = dict(extra or {})
    reader = Reader()
    trees = target.max_leaves > 1
    proposers: dict[str, Proposer] = {
        "ngram": NgramProposer(reader=reader),
        "suffix": SuffixProposer(past=past, remember=remember, reader=reader),
    }
    copiers = [proposers["suffix"], proposers["ngram"]]
    if trees:
        proposers["lookahead"] = LookaheadProposer()
    if isinstance(draft, RetokenizeProposer):
        proposers["draft"] = draft
    elif draft is not None:
        batch = min(512, draft.n_batch)
        chain = DraftModelProposer(draft, n_vocab=target.n_vocab, batch=batch)
        proposers["draft"] = chain
        if trees:
            tree = DraftTreeProposer(draft, n_vocab=target.n_vocab, batch=batch)
            proposers["tree"] = tree
            proposers["merged"] = MergedProposer(NgramProposer(n_min=3), tree)
    name = paid_source({*proposers, *heads})
    paid = [{**proposers, **heads}[name]] if name else []
    proposers["mixed"] = MixedProposer([*copiers, *paid])
    return {**proposers, **heads}


def paid_source(available: Container[str]) -> str:
    """The source beside copies of the text that a mixture asks, "" for none."""
    paid = (method for method in registry.methods() if method.auto and method.cost != "free")
    return next((method.name for method in paid if method.name in available), "")


def methods(facts: Facts) -> tuple[MethodInfo, ...]:
    """All methods that people know, in the order of a menu, and what keeps a pair from each."""
    return tuple(
        MethodInfo(
            method.name,
            method.label,
            method.blurb,
            not (reason := method.why_not(facts)),
            reason,
            method.short,
            method.letter,
        )
        for method in registry.methods()
    )
