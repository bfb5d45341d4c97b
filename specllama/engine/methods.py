"""The ways to draft of a pair: which of them it has, and why not the others."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from specllama.interface import MethodInfo
from specllama.speculative.drafting import registry
from specllama.speculative.drafting.method import Facts

if TYPE_CHECKING:
    from specllama.backend.base import Context
    from specllama.speculative.drafting.drafter import Drafter
    from specllama.speculative.drafting.translate import RetokenizingDrafter


def make_drafters(
    target: Context,
    draft: Context | RetokenizingDrafter | None,
    *,
    past: Iterable[Sequence[int]] = (),
    remember: Callable[[Sequence[int]], None] | None = None,
    extra: Mapping[str, Drafter] | None = None,
) -> dict[str, Drafter]:
    """The drafters of a pair of caches, by name.

    Args:
        draft: a draft model that speaks the target's token ids, or a proposer that translates
            the text of one that does not, or None.
        past: earlier texts to copy from.
        remember: told every text that ended.
        extra: drafters of the target's own heads.
    """
    from specllama.speculative.drafting.copying import Reader
    from specllama.speculative.drafting.draft_model import ChainDrafter
    from specllama.speculative.drafting.draft_tree import TreeDrafter
    from specllama.speculative.drafting.lookahead import LookaheadDrafter
    from specllama.speculative.drafting.merged import MergedDrafter
    from specllama.speculative.drafting.mixed import MixedDrafter
    from specllama.speculative.drafting.ngram import NgramDrafter
    from specllama.speculative.drafting.suffix import SuffixDrafter
    from specllama.speculative.drafting.translate import RetokenizingDrafter

    heads = dict(extra or {})
    reader = Reader()
    trees = target.max_leaves > 1
    drafters: dict[str, Drafter] = {
        "ngram": NgramDrafter(reader=reader),
        "suffix": SuffixDrafter(past=past, remember=remember, reader=reader),
    }
    copiers = [drafters["suffix"], drafters["ngram"]]
    if trees:
        drafters["lookahead"] = LookaheadDrafter()
    if isinstance(draft, RetokenizingDrafter):
        drafters["draft"] = draft
    elif draft is not None:
        batch = min(512, draft.n_batch)
        chain = ChainDrafter(draft, n_vocab=target.n_vocab, batch=batch)
        drafters["draft"] = chain
        if trees:
            tree = TreeDrafter(draft, n_vocab=target.n_vocab, batch=batch)
            drafters["tree"] = tree
            drafters["merged"] = MergedDrafter(NgramDrafter(n_min=3), tree)
    name = paid_source({*drafters, *heads})
    paid = [{**drafters, **heads}[name]] if name else []
    drafters["mixed"] = MixedDrafter([*copiers, *paid])
    return {**drafters, **heads}


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
