"""Headers of models of real size, without files: for plans on machines that do not exist."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from specllama.backend.devices import Device
from specllama.backend.placement import OffloadPlan
from specllama.backend.planning import plan_offload
from specllama.models.ggml_types import TENSOR_TYPES
from specllama.models.gguf import GgufArray, GgufHeader, TensorInfo
from specllama.settings.params import EngineOptions

_TYPES = {kind.name: (number, kind) for number, kind in TENSOR_TYPES.items()}


def sketch(
    name: str,
    *,
    architecture: str = "llama",
    blocks: int,
    width: int,
    hidden: int,
    heads: int,
    heads_kv: int,
    head: int = 128,
    vocab: int,
    context: int,
    quant: str = "Q4_K",
    experts: int = 0,
    used: int = 0,
    tied: bool = False,
) -> GgufHeader:
    """The header of a model; ``hidden`` is the width of one expert where there are some."""
    tensors: list[TensorInfo] = []

    def add(tensor: str, *shape: int, kind: str = quant) -> None:
        number, info = _TYPES[kind if len(shape) > 1 else "F32"]
        count = 1
        for extent in shape:
            count *= extent
        size = -(-count // info.block) * info.size
        tensors.append(TensorInfo(tensor, shape, info.name, number, 0, size))

    add("token_embd.weight", width, vocab)
    for i in range(blocks):
        block = f"blk.{i}"
        add(f"{block}.attn_norm.weight", width)
        add(f"{block}.attn_q.weight", width, heads * head)
        add(f"{block}.attn_k.weight", width, heads_kv * head)
        add(f"{block}.attn_v.weight", width, heads_kv * head)
        add(f"{block}.attn_output.weight", heads * head, width)
        if experts:
            add(f"{block}.ffn_gate_inp.weight", width, experts, kind="F32")
            for part in ("gate", "up"):
                add(f"{block}.ffn_{part}_exps.weight", width, hidden, experts)
            add(f"{block}.ffn_down_exps.weight", hidden, width, experts)
        else:
            for part in ("gate", "up"):
                add(f"{block}.ffn_{part}.weight", width, hidden)
            add(f"{block}.ffn_down.weight", hidden, width)
    add("output_norm.weight", width)
    if not tied:
        add("output.weight", width, vocab, kind="Q6_K" if quant == "Q4_K" else quant)
    facts: dict[str, Any] = {
        "block_count": blocks,
        "context_length": context,
        "embedding_length": width,
        "feed_forward_length": 0 if experts else hidden,
        "attention.head_count": heads,
        "attention.head_count_kv": heads_kv,
        "attention.key_length": head,
        "attention.value_length": head,
    }
    if experts:
        facts |= {
            "expert_count": experts,
            "expert_used_count": used,
            "expert_feed_forward_length": hidden,
        }
    metadata = {f"{architecture}.{key}": value for key, value in facts.items()}
    tokens = GgufArray("str", vocab, 0, 0)
    size = sum(tensor.n_bytes for tensor in tensors)
    return GgufHeader(
        path=Path(f"{name}.gguf"),
        version=3,
        alignment=32,
        data_offset=0,
        file_bytes=size,
        metadata={"general.architecture": architecture, "general.name": name, **metadata},
        kinds={},
        arrays={"tokenizer.ggml.tokens": tokens, "tokenizer.ggml.merges": tokens},
        tensors=tuple(tensors),
        parts=(Path(f"{name}.gguf"),),
    )


def llama_8b() -> GgufHeader:
    return sketch(
        "llama-8b", blocks=32, width=4096, hidden=14336, heads=32, heads_kv=8,
        vocab=128256, context=131072,
    )  # fmt: skip


def llama_1b() -> GgufHeader:
    return sketch(
        "llama-1b", blocks=16, width=2048, hidden=8192, heads=32, heads_kv=8, head=64,
        vocab=128256, context=131072, tied=True,
    )  # fmt: skip


def llama_70b() -> GgufHeader:
    return sketch(
        "llama-70b", blocks=80, width=8192, hidden=28672, heads=64, heads_kv=8,
        vocab=128256, context=131072,
    )  # fmt: skip


def qwen_30b_a3b() -> GgufHeader:
    return sketch(
        "qwen-30b-a3b", architecture="qwen3moe", blocks=48, width=2048, hidden=768, heads=32,
        heads_kv=4, vocab=151936, context=262144, experts=128, used=8,
    )  # fmt: skip


def qwen_600m() -> GgufHeader:
    return sketch(
        "qwen-0.6b", architecture="qwen3", blocks=28, width=1024, hidden=3072, heads=16,
        heads_kv=8, vocab=151936, context=40960, quant="Q8_0", tied=True,
    )  # fmt: skip


def qwen_32b() -> GgufHeader:
    return sketch(
        "qwen-32b", architecture="qwen3", blocks=64, width=5120, hidden=25600, heads=64,
        heads_kv=8, vocab=151936, context=40960,
    )  # fmt: skip


def gpt_oss_120b() -> GgufHeader:
    return sketch(
        "gpt-oss-120b", architecture="gpt-oss", blocks=36, width=2880, hidden=2880, heads=64,
        heads_kv=8, head=64, vocab=201088, context=131072, quant="MXFP4", experts=128, used=4,
    )  # fmt: skip


def plan_of(
    target: GgufHeader,
    draft: GgufHeader | None,
    found: Sequence[Device],
    *,
    n_ctx: int | None = None,
    **options: Any,
) -> OffloadPlan:
    """Where a pair goes with these options; those of passes are small."""
    given = EngineOptions(**{"max_rows": 16, "max_leaves": 16, **options})
    return plan_offload(target, draft, found, given, n_ctx=n_ctx)
