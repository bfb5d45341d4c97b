"""From model references to the parts of an engine: who opens the files, what every slot gets."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING

from specllama.cancel import StopFlag
from specllama.engine.loaded import Loaded
from specllama.engine.methods import methods
from specllama.engine.slot import Slot
from specllama.errors import CannotLoad, StoreError
from specllama.events import Event
from specllama.interface import EngineInfo
from specllama.params import EngineOptions

if TYPE_CHECKING:
    from specllama.backend.base import Context, Opener
    from specllama.speculative.drafting.drafter import Drafter

logger = logging.getLogger("specllama.engine.loading")

BACKENDS = {  # by what a target's file name ends with: who opens it
    ".gguf": "specllama.engine.open_gguf:open_pair",
    ".table": "specllama.backend.fake:open_pair",
}
PAST_TOKENS = 32768  # of kept texts, read when a model is loaded


def load_parts(
    target_ref: str | Path,
    draft_ref: str | Path | None,
    options: EngineOptions,
    on_progress: Callable[[Event], None] | None,
    stop: StopFlag,
) -> Loaded:
    """Open the files of a pair and make the slots of its conversations.

    Setting ``stop`` ends it with Cancelled; later, the passes of every context look at it.
    """
    from specllama.engine.drafters import Drafters
    from specllama.engine.profiles import Windows, open_profile
    from specllama.models.refs import resolve_pair
    from specllama.speculative.drafting.translate import join_vocabularies

    begin = perf_counter()
    path, draft_path = resolve_pair(str(target_ref), None if draft_ref is None else str(draft_ref))
    opened = _opener(path)(path, draft_path, options, on_progress, stop)
    target, draft = opened.target, opened.draft
    try:
        if options.parallel > target.pool.lanes:
            raise CannotLoad(
                f"{path.name} takes one conversation at a time",
                "load it without parallel conversations",
            )
        past, remember = _corpus(opened.vocabulary) if opened.vocabulary else ((), None)

        def open_draft() -> Context | Drafter | None:
            if draft is None:
                return None
            beside = draft.pool.open()
            if opened.translated:
                return join_vocabularies(beside, target.vocab, draft.vocab)
            return beside

        def open_slot() -> Slot:
            """A further slot; what is the target's own drafts for the first one only."""
            lane = target.pool.open()
            why_not = {**own.reasons, **dict.fromkeys(own.parts, "it drafts for one conversation")}
            made = Drafters(lane, open_draft(), past, remember, reasons=why_not).all()
            return Slot(lane, made, why_not)

        lane, speaker = target.pool.open(), open_draft()
        own = opened.own(lane)
        drafters = Drafters(lane, speaker, past, remember, own.parts, own.reasons)
        made = drafters.all()
        more = tuple(open_slot() for _ in range(options.parallel - 1))
    except BaseException:
        opened.close()
        raise

    kernels = target.pool.kernels
    info = EngineInfo(
        target=target.info,
        draft=None if draft is None else draft.info,
        exactness=opened.exactness.label,
        exact_rows=kernels.exact_rows,
        exact_trees=kernels.exact_trees,
        measured=opened.exactness.measured,
        device="CPU" if kernels.on_cpu else "GPU",
        threads=kernels.threads,
        flash_attn=kernels.flash != "off",
        load_ms=(perf_counter() - begin) * 1e3,
        has_chat_template=opened.template is not None,
        methods=methods(drafters.facts),
    )
    return Loaded(
        target=lane,
        vocab=target.vocab,
        info=info,
        drafters=made,
        more=more,
        make_window=Windows(open_profile(info), info),
        make_constraint=opened.constraint,
        template=opened.template,
        bos=opened.bos,
        eos=opened.eos,
        on_close=opened.close,
    )


def _opener(path: Path) -> Opener:
    """Who opens such a file: GGUF files may have any name."""
    module, _, name = BACKENDS.get(path.suffix, BACKENDS[".gguf"]).partition(":")
    opener: Opener = getattr(import_module(module), name)
    return opener


def _corpus(vocabulary: str) -> tuple[list[list[int]], Callable[[Sequence[int]], None]]:
    """Earlier texts in the tokens of this vocabulary, and how to keep a further one."""
    from specllama.store.corpus import Corpus

    corpus = Corpus()

    def remember(text: Sequence[int]) -> None:
        try:
            corpus.add(vocabulary, text)
        except StoreError as error:  # a full disk must not end a conversation
            logger.warning("%s", error)

    return corpus.texts(vocabulary, most=PAST_TOKENS), remember
