"""From model references to the parts of an engine: check headers, load files, state exactness."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any

from specllama.errors import CannotLoad
from specllama.events import Event, LoadProgress
from specllama.interface import EngineInfo, MethodInfo, ModelInfo
from specllama.params import EngineOptions, GenerateParams

if TYPE_CHECKING:
    from specllama.backend.llama import LlamaContext, LlamaModel
    from specllama.models.gguf import GgufHeader

DEFAULT_CTX = 8192


def load_parts(
    target_ref: str | Path,
    draft_ref: str | Path | None,
    options: EngineOptions,
    on_progress: Callable[[Event], None] | None,
) -> dict[str, Any]:
    """Keyword arguments for ``Engine``. Headers are checked before llama.cpp sees a file."""
    from specllama.models.gguf import exact_rows, read_header
    from specllama.models.loadable import check_loadable
    from specllama.models.memory import estimate_pair, require_fit
    from specllama.models.pairing import require_pair
    from specllama.models.refs import resolve_pair

    begin = perf_counter()
    target_path, draft_path = resolve_pair(
        str(target_ref), None if draft_ref is None else str(draft_ref)
    )
    target_header = read_header(target_path)
    check_loadable(target_header, "target")
    draft_header = None
    if draft_path is not None:
        draft_header = read_header(draft_path)
        check_loadable(draft_header, "draft")
        require_pair(
            target_header,
            draft_header,
            # a target that cannot cut its cache replays from a checkpoint once a round; a draft
            # model would have to after every token
            allow_checkpoints=not (draft_header.is_recurrent or draft_header.is_hybrid),
        )
    if options.check_memory:
        require_fit(
            estimate_pair(
                target_header,
                draft_header,
                n_ctx=_context_length(options.n_ctx, target_header),
                type_k=options.kv_type_k,
                type_v=options.kv_type_v,
                n_ubatch=options.n_batch,
                n_outputs=options.max_rows,
                flash_attn=options.flash_attn == "on",
            )
        )

    # importing llama.cpp takes a quarter of a second; a bad file is refused before that
    from specllama.backend import llama
    from specllama.spec.proposer import Proposer
    from specllama.profiles import open_profile, window_maker
    from specllama.spec.proposers.draft_model import DraftModelProposer
    from specllama.spec.proposers.mixed import MixedProposer
    from specllama.spec.proposers.ngram import NgramProposer

    def report(role: str, path: Path) -> Callable[[float], None]:
        def progress(fraction: float) -> None:
            if on_progress is not None:
                on_progress(LoadProgress(role=role, path=str(path), fraction=fraction))  # type: ignore[arg-type]

        return progress

    opened: list[LlamaModel] = []

    def close_all() -> None:
        for model in opened:
            model.close()

    def open_model(header: GgufHeader, role: str, layers: str) -> LlamaModel:
        model = llama.LlamaModel(
            header.path,
            pre=header.pre_tokenizer or "",
            gpu_layers=layers,
            use_mmap=options.use_mmap,
            use_mlock=options.use_mlock,
            progress=report(role, header.path),
        )
        opened.append(model)
        return model

    def flash(model: LlamaModel) -> str:
        if options.flash_attn != "auto":
            return options.flash_attn
        quantized_v = options.kv_type_v not in ("f16", "f32", "bf16")
        # on CPU it is no faster, and splits a query over threads differently by batch width
        return "auto" if model.gpu_layers or quantized_v else "off"

    threads = options.threads or llama.default_threads()
    try:
        target_model = open_model(target_header, "target", options.gpu_layers)
        target = target_model.context(
            n_ctx=_context_length(options.n_ctx, target_header),
            max_rows=options.max_rows,
            threads=threads,
            options=options,
            flash=flash(target_model),
        )
        proposers: dict[str, Proposer] = {"ngram": NgramProposer()}
        draft: LlamaContext | None = None
        draft_model: LlamaModel | None = None
        if draft_header is not None:
            draft_model = open_model(draft_header, "draft", options.draft_gpu_layers)
            draft = draft_model.context(
                n_ctx=min(
                    options.draft_ctx or target.n_ctx, draft_header.context_length or target.n_ctx
                ),
                max_rows=1,
                threads=options.draft_threads or threads,
                options=options,
                flash=flash(draft_model),
            )
            proposers["draft"] = DraftModelProposer(
                draft, n_vocab=target.n_vocab, batch=min(512, draft.n_batch)
            )
            # the n-gram source of a mixture only speaks on longer matches: the model is at hand
            proposers["mixed"] = MixedProposer([NgramProposer(n_min=3), proposers["draft"]])
    except BaseException:
        close_all()
        raise

    bitwise = target_model.gpu_layers == 0 and target.flash == "off" and target_model.can_roll_back
    rows = exact_rows(target_header) if bitwise and _plain_kv(options) else 1
    info = EngineInfo(
        target=_model_info(target_header, target_model, target, options),
        draft=(
            None
            if draft_header is None or draft_model is None or draft is None
            else _model_info(draft_header, draft_model, draft, options)
        ),
        exactness=f"bitwise up to {rows} rows" if rows > 1 else "near-ties possible",
        exact_rows=rows,
        device="GPU" if target_model.gpu_layers else "CPU",
        threads=threads,
        flash_attn=target.flash != "off",
        load_ms=(perf_counter() - begin) * 1e3,
        has_chat_template=target_header.chat_template is not None,
        methods=_methods(draft_header is not None),
    )
    vocab = target_model.vocab

    def make_constraint(params: GenerateParams) -> Any:
        if params.grammar is not None:
            return llama.LlamaGrammar(vocab, params.grammar)
        if params.json_schema is not None:
            return llama.LlamaGrammar.from_json_schema(vocab, params.json_schema)
        return None

    return {
        "make_window": window_maker(open_profile(info), info),
        "target": target,
        "vocab": vocab,
        "info": info,
        "proposers": proposers,
        "template": target_header.chat_template,
        "bos": vocab.bos_text,
        "eos": vocab.eos_text,
        "make_constraint": make_constraint,
        "on_close": close_all,
    }


def _context_length(asked: int | None, header: GgufHeader) -> int:
    trained = header.context_length
    if asked is not None:
        return asked
    if trained <= 0:
        raise CannotLoad(
            f"{header.path.name} does not say how long a context it was trained for",
            "choose one with --ctx-size",
        )
    return min(trained, DEFAULT_CTX)


def _plain_kv(options: EngineOptions) -> bool:
    return options.kv_type_k in ("f16", "f32") and options.kv_type_v in ("f16", "f32")


def _model_info(
    header: GgufHeader, model: LlamaModel, context: LlamaContext, options: EngineOptions
) -> ModelInfo:
    from specllama.models.memory import kv_bytes

    return ModelInfo(
        path=str(header.path),
        name=header.name,
        architecture=header.architecture,
        quantization=header.quantization,
        n_params=model.n_params,
        file_bytes=header.file_bytes,
        n_ctx=context.n_ctx,
        n_ctx_train=model.n_ctx_train,
        n_vocab=context.n_vocab,
        kv_bytes=kv_bytes(
            header, context.n_ctx, type_k=options.kv_type_k, type_v=options.kv_type_v
        ),
        gpu_layers=min(model.gpu_layers, model.n_layer + 1),
    )


_LATER = "not built yet"


def _methods(has_draft: bool) -> tuple[MethodInfo, ...]:
    """Every way to draft that people know, and which of them can be used now."""
    need = "" if has_draft else "no draft model loaded (-d)"
    return (
        MethodInfo(
            "draft",
            "Draft model",
            "A small model of the same vocabulary writes ahead; the target checks. "
            "The classic: best on chat and stories.",
            has_draft,
            need,
        ),
        MethodInfo(
            "ngram",
            "N-gram / prompt lookup",
            "Copies what followed the last few tokens the last time they occurred. "
            "Costs nothing; shines on edits, quotes and code.",
            True,
        ),
        MethodInfo(
            "mixed",
            "Mixed",
            "N-gram where a long match exists, the draft model everywhere else.",
            has_draft,
            need,
        ),
        MethodInfo(
            "suffix",
            "Suffix decoding",
            "Longest match of any length in this and earlier conversations, "
            "with the most frequent continuation.",
            False,
            _LATER,
        ),
        MethodInfo(
            "eagle3",
            "EAGLE-3",
            "A one-layer head reads the target's hidden states and drafts a tree. "
            "Needs a head trained for the target.",
            False,
            _LATER,
        ),
        MethodInfo(
            "medusa",
            "Medusa",
            "Extra output heads guess several tokens at once. Needs heads trained for the target.",
            False,
            _LATER,
        ),
        MethodInfo(
            "mtp",
            "MTP / NextN",
            "Heads that some models were trained with predict the tokens after the next.",
            False,
            _LATER,
        ),
        MethodInfo(
            "lookahead",
            "Lookahead",
            "The target guesses ahead in parallel (Jacobi) and checks itself. "
            "Pays on GPUs with spare compute, not on CPUs.",
            False,
            _LATER,
        ),
        MethodInfo(
            "self",
            "Self-speculative",
            "The target drafts with some of its own layers. Pays when a few layers go a long way.",
            False,
            _LATER,
        ),
        MethodInfo(
            "tree",
            "Token trees",
            "Several branches are checked in one pass; pays where extra rows are cheap.",
            False,
            _LATER,
        ),
    )
