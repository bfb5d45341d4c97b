"""A pair of GGUF files opened with llama.cpp: check headers, load them, state exactness."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from specllama.cancel import StopFlag
from specllama.errors import CannotLoad
from specllama.events import Event, LoadProgress
from specllama.interface import ModelInfo
from specllama.params import EngineOptions, GenerateParams

if TYPE_CHECKING:
    from specllama.backend.base import OpenedPair, Own, Pool
    from specllama.backend.devices import OffloadPlan, Placement
    from specllama.backend.lane import CellLane
    from specllama.backend.llama import LlamaModel
    from specllama.backend.llama_pool import LlamaPool
    from specllama.models.gguf import GgufHeader
    from specllama.speculative.sampling import Constraint

logger = logging.getLogger("specllama.engine.open_gguf")

DEFAULT_CTX = 8192
LANES = 4  # conversations that a pool has room for


def open_pair(
    target_path: Path,
    draft_path: Path | None,
    options: EngineOptions,
    on_progress: Callable[[Event], None] | None,
    stop: StopFlag,
) -> OpenedPair:
    """See ``base.Opener``. Headers are checked before llama.cpp sees a file."""
    from specllama.models.gguf import read_header
    from specllama.models.loadable import check_loadable
    from specllama.models.memory import estimate_pair, require_fit
    from specllama.models.nextn import why_not
    from specllama.models.pairing import require_pair

    target_header = read_header(target_path)
    check_loadable(target_header, "target")
    draft_header = None
    translated = False
    if draft_path is not None:
        draft_header = read_header(draft_path)
        check_loadable(draft_header, "draft")
        translated = options.allow_other_vocab and _only_vocabularies_differ(
            target_header, draft_header
        )
        if not translated:
            require_pair(target_header, draft_header)
    plan = _offload(target_header, draft_header, options)
    on_gpu = plan is not None and plan.target.layers > 0
    draft_options = options.resolved(
        on_gpu=on_gpu, one_kv_type=draft_header is not None and draft_header.one_kv_type
    )
    fitted = options.resolved(on_gpu=on_gpu, one_kv_type=target_header.one_kv_type)

    def require_ram(plan: OffloadPlan | None) -> None:
        """What the GPUs do not take has to fit in RAM."""
        if not options.check_memory:
            return
        need = estimate_pair(
            target_header,
            draft_header,
            n_ctx=_context_length(options.n_ctx, target_header),
            type_k=fitted.kv_type_k,
            type_v=fitted.kv_type_v,
            n_ubatch=options.batch(on_gpu=on_gpu),
            n_outputs=options.max_rows,
            flash_attn=options.flash_attn != "off",
        )
        if plan is not None:
            from specllama.backend.devices import left_in_ram

            need = left_in_ram(need, plan, target_header, draft_header)
        require_fit(need)

    require_ram(plan)

    # importing llama.cpp takes a quarter of a second; a bad file is refused before that
    from specllama.backend import llama
    from specllama.backend.attention import can_switch
    from specllama.backend.base import Opened, OpenedPair
    from specllama.backend.cores import physical_cores
    from specllama.backend.devices import fewer_layers
    from specllama.backend.llama_grammar import LlamaGrammar
    from specllama.backend.llama_pool import open_pool
    from specllama.backend.loaded_target import LoadedTarget
    from specllama.engine.heads import open_own
    from specllama.engine.probing import exactness_of
    from specllama.store.corpus import tokenizer_key

    def report(role: str, path: Path) -> Callable[[float], None]:
        def progress(fraction: float) -> None:
            if on_progress is not None:
                on_progress(LoadProgress(role=role, path=str(path), fraction=fraction))  # type: ignore[arg-type]

        return progress

    opened: list[LlamaModel] = []
    heads_open = ExitStack()

    def close_all() -> None:
        heads_open.close()
        for model in opened:
            model.close()

    def open_model(header: GgufHeader, role: str, place: Placement | None) -> LlamaModel:
        model = llama.LlamaModel(
            header.path,
            pre=header.pre_tokenizer or "",
            gpu_layers=str(place.layers) if place else "0",
            split=place.split if place else (),
            use_mmap=options.use_mmap,
            use_mlock=options.use_mlock,
            load_mtp=role == "target" and not why_not(header),
            progress=report(role, header.path),
            stop=stop,
        )
        opened.append(model)
        return model

    options = options.resolved(
        on_gpu=on_gpu, one_kv_type=target_header.one_kv_type, apart=not can_switch()
    )
    threads = options.threads or physical_cores()

    def load(
        plan: OffloadPlan | None,
    ) -> tuple[LlamaModel, LlamaPool, LlamaModel | None, LlamaPool | None]:
        target_model = open_model(target_header, "target", plan.target if plan else None)
        target = open_pool(
            target_model,
            lanes=max(LANES, options.parallel),
            n_ctx=_context_length(options.n_ctx, target_header),
            max_rows=options.max_rows,
            threads=threads,
            options=options,
            flash=options.flash_attn,
            max_leaves=options.max_leaves,
        )
        if draft_header is None:
            return target_model, target, None, None
        draft_model = open_model(draft_header, "draft", plan.draft if plan else None)
        draft = open_pool(
            draft_model,
            lanes=max(LANES, options.parallel),
            n_ctx=min(
                options.draft_ctx or target.n_ctx, draft_header.context_length or target.n_ctx
            ),
            max_rows=1,
            threads=options.draft_threads or threads,
            options=draft_options,
            flash=options.flash_attn,
            alike=False,  # nothing asks a draft model for that
        )
        return target_model, target, draft_model, draft

    try:
        while True:
            try:
                target_model, target, draft_model, draft = load(plan)
                break
            except CannotLoad as refused:
                # the estimate was short of what the card needs: give it less and try again
                fewer = fewer_layers(plan) if plan is not None else None
                if fewer is None:
                    raise
                logger.warning("%s; trying with fewer layers on the GPU", refused)
                close_all()
                opened.clear()
                plan = fewer
                require_ram(plan)
        for pool in (target, draft):
            if pool is not None:
                _warm_up(pool)
        exactness = exactness_of(target_header, target_model, target, options)
        target.kernels = replace(
            target.kernels, exact_rows=exactness.rows, exact_trees=exactness.trees
        )
        if options.threads is None:
            target.choose_threads()
            if draft is not None and options.draft_threads is None:
                draft.choose_threads()
    except BaseException:
        close_all()
        raise

    vocab = target_model.vocab

    def own(lane: CellLane) -> Own:
        return open_own(
            LoadedTarget(target_header, target_model, target, lane, options, threads, heads_open),
            options.heads,
        )

    def constraint(params: GenerateParams) -> Constraint | None:
        if params.grammar is not None:
            return LlamaGrammar(vocab, params.grammar)
        if params.json_schema is not None:
            return LlamaGrammar.from_json_schema(vocab, params.json_schema)
        return None

    beside = None
    if draft_header is not None and draft_model is not None and draft is not None:
        info = _model_info(draft_header, draft_model, draft, options)
        beside = Opened(draft, draft_model.vocab, info)
    return OpenedPair(
        target=Opened(target, vocab, _model_info(target_header, target_model, target, options)),
        draft=beside,
        translated=translated,
        exactness=exactness,
        own=own,
        constraint=constraint,
        template=target_header.chat_template,
        bos=vocab.bos_text,
        eos=vocab.eos_text,
        vocabulary=tokenizer_key(target_header.token_bytes) if options.keep_texts else "",
        close=close_all,
    )


def _offload(
    target: GgufHeader, draft: GgufHeader | None, options: EngineOptions
) -> OffloadPlan | None:
    """How many layers go to the GPUs; None when there is none, or none is wanted."""
    from specllama.backend.devices import devices, gpus, plan_offload

    if options.gpu_layers == "0" and options.draft_gpu_layers in ("0", "auto"):
        return None
    found = devices()
    if not gpus(found):
        return None
    plan = plan_offload(
        target,
        draft,
        found,
        gpu_layers=options.gpu_layers,
        draft_gpu_layers=options.draft_gpu_layers,
        n_ctx=_context_length(options.n_ctx, target),
        n_ubatch=options.batch(on_gpu=True),
        n_outputs=options.max_rows,
        flash_attn=options.flash_attn != "off",
        type_k=options.kv_type_k,
        type_v=options.kv_type_v,
    )
    for line in plan.lines():
        logger.info("%s", line)
    return plan


def _only_vocabularies_differ(target: GgufHeader, draft: GgufHeader) -> bool:
    """Whether the pair would fit if the draft spoke the target's tokens."""
    from specllama.models.pairing import VOCABULARY_KINDS, compare

    kinds = {problem.kind for problem in compare(target, draft).problems}
    return bool(kinds) and kinds <= VOCABULARY_KINDS


def _warm_up(pool: Pool) -> None:
    """Let one pass fetch the weights and start the threads: a first reply is timed, too."""
    lane = pool.open()
    lane.forward([0], outputs="last")
    lane.close()


def _context_length(asked: int | None, header: GgufHeader) -> int:
    trained = header.context_length
    if asked:
        return asked
    if trained <= 0:
        raise CannotLoad(
            f"{header.path.name} does not say how long a context it was trained for",
            "choose one with --ctx-size",
        )
    return min(trained, DEFAULT_CTX) if asked is None else trained


def _model_info(
    header: GgufHeader, model: LlamaModel, pool: LlamaPool, options: EngineOptions
) -> ModelInfo:
    from specllama.models.memory import kv_bytes

    return ModelInfo(
        path=str(header.path),
        name=header.name,
        architecture=header.architecture,
        quantization=header.quantization,
        n_params=model.n_params,
        file_bytes=header.file_bytes,
        n_ctx=pool.n_ctx,
        n_ctx_train=model.n_ctx_train,
        n_vocab=pool.n_vocab,
        kv_bytes=kv_bytes(header, pool.n_ctx, type_k=options.kv_type_k, type_v=options.kv_type_v),
        gpu_layers=min(model.gpu_layers, model.n_layer + 1),
        kv_types=f"{options.kv_type_k}/{options.kv_type_v}",
    )
