"""The models of a pair of GGUF files, loaded by llama.cpp, with their pools."""

from __future__ import annotations

import logging
import threading
from contextlib import ExitStack
from importlib import import_module
from typing import Any, Literal

import msgspec

from specllama.backend import llama, llama_log, verdicts
from specllama.backend.base import Opened, OpenedPair, Own
from specllama.backend.cores import crowded, physical_cores
from specllama.backend.embedding import Embedding
from specllama.backend.exactness import Exactness
from specllama.backend.llama_pool import LoadedModel, open_pool
from specllama.backend.symbols import can_switch
from specllama.cancel import Cancel
from specllama.engine import fewer_words
from specllama.engine.gguf_pair import Pair
from specllama.engine.probing import exactness_of, state_key
from specllama.errors import CannotLoad
from specllama.events import LoadProgress, Notice, Report
from specllama.interface import ModelInfo
from specllama.models.gguf import GgufHeader
from specllama.models.memory import kv_bytes
from specllama.models.nextn_blocks import why_not
from specllama.replies.card import read_card
from specllama.settings.hardware import Adapter
from specllama.settings.params import EngineOptions

logger = logging.getLogger("specllama.engine.gguf_models")

_SCHEMA = "specllama.threads.v1"
_NOT_LOCKED = (
    "mlock on: the system lets this process keep less in memory than the model takes, so parts of "
    "it may be swapped out; ulimit -l raises that"
)


def _shown(one: LoadedModel) -> Opened:
    """Return a model's pool with the facts for people, and the key of its states on disk."""
    header, model, pool, options = one.header, one.model, one.pool, one.options
    kinds = options.kv_type_k, options.kv_type_v
    n_bytes = kv_bytes(header, pool.n_ctx, type_k=kinds[0], type_v=kinds[1], max_rows=pool.max_rows)
    info = ModelInfo(
        path=str(header.path), name=header.name, architecture=header.architecture,
        quantization=header.quantization, n_params=model.n_params, file_bytes=header.file_bytes,
        n_ctx=pool.n_ctx, n_ctx_train=model.n_ctx_train, n_vocab=pool.n_vocab, kv_bytes=n_bytes,
        gpu_layers=min(model.gpu_layers, model.n_layer + 1), kv_types="/".join(kinds),
        repacked=model.repacks, kernels=model.kernels, card=read_card(header.metadata).values,
        sha256=header.contents or None, draft_tokens=header.rows or None,
    )  # fmt: skip
    key = state_key(one) if options.kv_disk != "off" else ""
    return Opened(pool, model.vocab, info, key, (header, *one.adapters))


def open_models(pair: Pair, on_progress: Report, stop: Cancel) -> OpenedPair:
    """Load the files; free everything if that fails."""
    with ExitStack() as closing:
        target, draft = _load(pair, on_progress, stop, closing)
        closing.callback(target.on_close.close)  # before the models
        options = target.options
        if options.use_mlock and on_progress and any("mlock" in line for line in llama_log.recent):
            on_progress(Notice(_NOT_LOCKED, "warning", "settings"))
        for one in (target, draft):
            if one is not None:
                lane = one.pool.open()  # fetches the weights, starts the threads
                lane.forward([0], outputs="last")
                lane.close()

        def measure(report: Report, now: bool = True) -> Exactness:
            return exactness_of(target, report, now=now)

        exactness = measure(on_progress, options.exact != "off")
        for one in (target, draft):
            if one is not None and options.threads is None:
                _choose_threads(one)

        def own() -> Own:
            from specllama.engine.target_heads import open_own

            return open_own(target, options.heads)

        maker = None
        # its steps are timed on the CPU
        if draft is not None and draft.model.gpu_layers == 0 and not pair.translated:
            whole = pair.whole or draft.header
            maker = fewer_words.DraftMaker(whole, options, target.model.vocab)
        return OpenedPair(
            target=_shown(target),
            draft=None if draft is None else _shown(draft),
            translated=pair.translated,
            exactness=exactness,
            measure=measure,
            maker=maker,
            own=own,
            template=target.header.chat_template,
            bos=target.model.vocab.bos_text,
            eos=target.model.vocab.eos_text,
            here=verdicts.name_of(verdicts.here()),
            close=closing.pop_all().close,
        )


def _prepare(template: str | None) -> None:
    """Import and derive modules early that are needed once the weights are there."""
    import_module("specllama.replies.marks").derive(template)
    import_module("specllama.models.pruned")


def _load(
    pair: Pair, on_progress: Report, stop: Cancel, closing: ExitStack
) -> tuple[LoadedModel, LoadedModel | None]:
    """Load the models of a pair, with fewer layers on the GPUs if it asks for too much."""
    while True:
        try:
            return _load_as(pair, on_progress, stop, closing)
        except CannotLoad as refused:
            # the estimate was short of what the GPU needs: give it less and try again
            fewer = pair.with_fewer_layers()
            if fewer is None:
                raise
            logger.warning("%s; trying with fewer layers on the GPU", refused)
            closing.close()
            pair = fewer


def _load_as(
    pair: Pair, on_progress: Report, stop: Cancel, closing: ExitStack
) -> tuple[LoadedModel, LoadedModel | None]:
    plan, options = pair.plan, pair.resolved(apart=not can_switch())
    threads = options.threads or physical_cores()

    def load(
        header: GgufHeader, role: Literal["target", "draft"], own: EngineOptions, **shape: Any
    ) -> LoadedModel:
        def progress(fraction: float) -> None:
            if on_progress is not None:
                on_progress(LoadProgress(role, str(header.path), fraction))

        progress(0.0)
        is_target = role == "target"
        model = llama.LlamaModel(
            header.path,
            embedding=Embedding(header) if header.rows else None,
            pre=header.pre_tokenizer or "",
            longest=header.longest_token,
            gpu_layers="0",
            place=None if plan is None else plan.target if is_target else plan.draft,
            loras=[Adapter.read(text) for text in options.loras] if is_target else (),
            use_mmap=options.use_mmap,
            use_mlock=options.use_mlock,
            repack=pair.repacks if is_target else options.repack != "off",
            kernels=bool(pair.kernels),
            load_mtp=is_target and not why_not(header),
            progress=progress,
            stop=stop,
        )
        closing.callback(model.close)
        shape |= {"lanes": options.parallel, "threads": threads, "max_leaves": options.max_leaves}
        pool = open_pool(model, options=own, **shape)
        return LoadedModel(header, model, pool, own, pair.adapters if is_target else ())

    threading.Thread(target=_prepare, args=(pair.target.chat_template,), daemon=True).start()
    target = load(pair.target, "target", options, n_ctx=pair.n_ctx, max_rows=options.max_rows)
    if pair.draft is None:
        return target, None
    n_ctx = min(target.pool.n_ctx, pair.draft.context_length or target.pool.n_ctx)
    most = options.max_leaves
    # nothing asks a draft model for passes of any width
    own = pair.draft_options
    return target, load(pair.draft, "draft", own, n_ctx=n_ctx, max_rows=most, any_width=False)


class _Count(msgspec.Struct, frozen=True):
    """The number of threads that proved fastest."""

    count: int


def _choose_threads(one: LoadedModel) -> None:
    """Begin with the number of threads that earlier runs found fastest, and keep the one that this
    run finds; a crowded minute says nothing about the next run."""
    key = {"file": one.header.fingerprint, **verdicts.here(), "most": one.pool.kernels.threads}
    kept = verdicts.known(_SCHEMA, key, _Count) or _Count(0)

    def found(count: int) -> None:
        nonlocal kept
        if count != kept.count and not crowded():
            kept = _Count(count)
            verdicts.keep(_SCHEMA, key, kept)

    one.pool.choose_threads(kept.count, found)
