"""The models of a pair of GGUF files, loaded by llama.cpp, with their pools."""

from __future__ import annotations

import logging
import threading
from contextlib import ExitStack
from dataclasses import dataclass
from importlib import import_module
from typing import Literal

import msgspec

from specllama.backend import llama, verdicts
from specllama.backend.attention import can_switch
from specllama.backend.base import Opened, OpenedPair, Own
from specllama.backend.cores import crowded, physical_cores
from specllama.backend.exactness import Exactness
from specllama.backend.llama_pool import LlamaPool, open_pool
from specllama.backend.loaded_target import LoadedTarget
from specllama.cancel import StopFlag
from specllama.engine.gguf_pair import Pair
from specllama.engine.probing import exactness_of, state_key
from specllama.engine.repacking import repacks
from specllama.errors import CannotLoad
from specllama.events import LoadProgress, Report
from specllama.interface import ModelInfo
from specllama.models.gguf import GgufHeader
from specllama.models.memory import kv_bytes
from specllama.models.nextn import why_not
from specllama.replies.card import read_card
from specllama.settings.hardware import Adapter
from specllama.settings.params import EngineOptions

logger = logging.getLogger("specllama.engine.gguf_models")

_SCHEMA = "specllama.threads.v1"


@dataclass(frozen=True, slots=True)
class _Model:
    """A model with its pool."""

    header: GgufHeader
    model: llama.LlamaModel
    pool: LlamaPool
    options: EngineOptions

    @property
    def shown(self) -> Opened:
        kept = self.options.kv_disk != "off"
        key = state_key(self.header, self.model, self.pool, self.options) if kept else ""
        return Opened(self.pool, self.model.vocab, self._info, key)

    @property
    def _info(self) -> ModelInfo:
        header, options, n_ctx = self.header, self.options, self.pool.n_ctx
        kinds = options.kv_type_k, options.kv_type_v
        return ModelInfo(
            path=str(header.path),
            name=header.name,
            architecture=header.architecture,
            quantization=header.quantization,
            n_params=self.model.n_params,
            file_bytes=header.file_bytes,
            n_ctx=n_ctx,
            n_ctx_train=self.model.n_ctx_train,
            n_vocab=self.pool.n_vocab,
            kv_bytes=kv_bytes(
                header, n_ctx, type_k=kinds[0], type_v=kinds[1], max_rows=self.pool.max_rows
            ),
            gpu_layers=min(self.model.gpu_layers, self.model.n_layer + 1),
            kv_types="/".join(kinds),
            repacked=self.model.repacks,
            card=read_card(header.metadata).values,
        )


def open_models(pair: Pair, on_progress: Report, stop: StopFlag) -> OpenedPair:
    """Load the files; free everything if that fails."""
    with ExitStack() as closing:
        target, draft = _load(pair, on_progress, stop, closing)
        heads = closing.enter_context(ExitStack())  # freed before the models
        header, model, pool, options = target.header, target.model, target.pool, target.options
        for one in (target, draft):
            if one is not None:
                _warm_up(one.pool)

        def measure(report: Report, now: bool = True) -> Exactness:
            return exactness_of(header, model, pool, options, report, now=now)

        exactness = measure(on_progress, options.exact != "off")
        for one in (target, draft):
            if one is not None and options.threads is None:
                _choose_threads(one)

        def own() -> Own:
            from specllama.engine.heads import open_own

            threads = pool.kernels.threads
            return open_own(
                LoadedTarget(header, model, pool, options, threads, heads), options.heads
            )

        return OpenedPair(
            target=target.shown,
            draft=None if draft is None else draft.shown,
            translated=pair.translated,
            exactness=exactness,
            measure=measure,
            own=own,
            template=header.chat_template,
            bos=model.vocab.bos_text,
            eos=model.vocab.eos_text,
            close=closing.pop_all().close,
        )


def _prepare(template: str | None) -> None:
    """Import and derive modules early that are needed once the weights are there."""
    import_module("specllama.replies.marks").derive(template)
    import_module("specllama.models.pruned")


def _load(
    pair: Pair, on_progress: Report, stop: StopFlag, closing: ExitStack
) -> tuple[_Model, _Model | None]:
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
    pair: Pair, on_progress: Report, stop: StopFlag, closing: ExitStack
) -> tuple[_Model, _Model | None]:
    plan, options = pair.plan, pair.resolved(apart=not can_switch())
    threads = options.threads or physical_cores()

    def open_model(
        header: GgufHeader, role: Literal["target", "draft"], repack: bool
    ) -> llama.LlamaModel:
        def progress(fraction: float) -> None:
            if on_progress is not None:
                on_progress(LoadProgress(role, str(header.path), fraction))

        progress(0.0)
        place = None if plan is None else plan.target if role == "target" else plan.draft
        model = llama.LlamaModel(
            header.path,
            pre=header.pre_tokenizer or "",
            longest=header.longest_token,
            gpu_layers="0",
            place=place,
            loras=[Adapter.read(text) for text in options.loras] if role == "target" else (),
            use_mmap=options.use_mmap,
            use_mlock=options.use_mlock,
            repack=repack,
            load_mtp=role == "target" and not why_not(header),
            progress=progress,
            stop=stop,
        )
        closing.callback(model.close)
        return model

    threading.Thread(target=_prepare, args=(pair.target.chat_template,), daemon=True).start()
    model = open_model(pair.target, "target", repacks(pair))
    pool = open_pool(
        model,
        lanes=options.parallel,
        n_ctx=pair.n_ctx,
        max_rows=options.max_rows,
        threads=threads,
        options=options,
        flash=options.flash_attn,
        max_leaves=options.max_leaves,
    )
    target = _Model(pair.target, model, pool, options)
    if pair.draft is None:
        return target, None
    model = open_model(pair.draft, "draft", options.repack != "off")
    pool = open_pool(
        model,
        lanes=options.parallel,
        n_ctx=min(pool.n_ctx, pair.draft.context_length or pool.n_ctx),
        max_rows=options.max_leaves,
        max_leaves=options.max_leaves,
        threads=threads,
        options=pair.draft_options,
        flash=pair.draft_options.flash_attn,
        any_width=False,  # nothing asks a draft model for that
    )
    return target, _Model(pair.draft, model, pool, pair.draft_options)


class _Count(msgspec.Struct, frozen=True):
    """The number of threads that proved fastest."""

    count: int


def _choose_threads(one: _Model) -> None:
    """Begin with the number of threads that earlier runs found fastest, and keep the one that this
    run finds; a crowded minute says nothing about the next run."""
    key = {**verdicts.circumstances(one.header), "most": one.pool.kernels.threads}
    kept = verdicts.known(_SCHEMA, key, _Count) or _Count(0)

    def found(count: int) -> None:
        nonlocal kept
        if count != kept.count and not crowded():
            kept = _Count(count)
            verdicts.keep(_SCHEMA, key, kept)

    one.pool.choose_threads(kept.count, found)


def _warm_up(pool: LlamaPool) -> None:
    """Run one pass to fetch the weights and start the threads: a first reply is timed, too."""
    lane = pool.open()
    lane.forward([0], outputs="last")
    lane.close()
