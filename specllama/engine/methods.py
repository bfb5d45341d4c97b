"""Every way to draft: which of them a loaded pair has, and why not the others."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from specllama.interface import MethodInfo

if TYPE_CHECKING:
    from specllama.backend.base import Context
    from specllama.speculative.drafting.drafter import Proposer
    from specllama.speculative.drafting.translate import RetokenizeProposer

NO_DRAFT = "no draft model loaded (-d)"
CHAINS_ONLY = "this target takes chains only"
NO_HEAD = "no head of the target loaded (--head)"
NOT_PRUNABLE = "layers cannot be dropped from this architecture"
NO_LAYERS = "the target's file has no NextN layers"
OTHER_WORDS = "the draft model's text is cut into tokens anew: no laws to branch on"


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
    """The source beside copies of the text that a mixture asks, "" for none.

    A draft model that was given comes first; layers that the target was trained with need no
    choice, and a head that keeps its own states drafts further than one that does not.
    """
    return next((name for name in ("draft", "mtp", "eagle3", "medusa") if name in available), "")


def methods(
    available: Iterable[str], *, trees: bool = True, reasons: Mapping[str, str] | None = None
) -> tuple[MethodInfo, ...]:
    """All methods that people know, in the order of a menu.

    Args:
        available: names of the proposers that were made.
        trees: whether the target takes token trees.
        reasons: why a method that was looked for is not there, by name.
    """
    have, known = set(available), reasons or {}
    return tuple(
        MethodInfo(
            name,
            label,
            text,
            name in have,
            "" if name in have else known.get(name) or _why(name, have, trees),
        )
        for name, label, text in _METHODS
    )


def _why(name: str, have: set[str], trees: bool) -> str:
    if name == "draft":
        return NO_DRAFT
    if name in ("tree", "merged"):
        if "draft" in have and trees:
            return OTHER_WORDS
        return NO_DRAFT if trees else CHAINS_ONLY
    if name in ("eagle3", "medusa"):
        return NO_HEAD
    if name == "mtp":
        return NO_LAYERS
    return CHAINS_ONLY if name == "lookahead" else NOT_PRUNABLE


_METHODS = (
    (
        "draft",
        "Draft model",
        "A small model of the same vocabulary writes ahead; the target checks. "
        "The classic: best on chat and stories.",
    ),
    (
        "ngram",
        "N-gram / prompt lookup",
        "Copies what followed the last few tokens the last time they occurred. "
        "Costs nothing; shines on edits, quotes and code.",
    ),
    (
        "mixed",
        "Mixed",
        "Suffix and n-gram copies compete with the draft model (or a head of the target): "
        "every round goes to what promises most for its time.",
    ),
    (
        "suffix",
        "Suffix decoding",
        "Longest match of any length in this text (and, if you let it keep them, earlier ones), "
        "with the most frequent continuation.",
    ),
    (
        "tree",
        "Token trees",
        "The draft model's likeliest branches are checked in one pass; "
        "pays where extra rows are cheap.",
    ),
    (
        "merged",
        "Merged",
        "A copied branch and the draft model's branches in one tree.",
    ),
    (
        "lookahead",
        "Lookahead",
        "The target guesses ahead in parallel (Jacobi) and checks itself. "
        "Pays on GPUs with spare compute, not on CPUs.",
    ),
    (
        "eagle3",
        "EAGLE-3",
        "A one-layer head reads the target's hidden states and drafts a tree. "
        "Needs a head trained for the target.",
    ),
    (
        "medusa",
        "Medusa",
        "Extra output heads guess several tokens at once. Needs heads trained for the target.",
    ),
    (
        "mtp",
        "MTP / NextN",
        "Heads that some models were trained with predict the tokens after the next.",
    ),
    (
        "self",
        "Self-speculative",
        "The target drafts with some of its own layers. Pays when a few layers go a long way.",
    ),
)
