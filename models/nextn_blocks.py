"""NextN blocks (multi-token prediction) of a model file: their place, and checks that they run.

They are the last ``nextn_predict_layers`` of ``block_count`` blocks. llama.cpp leaves them out of
the target's passes and runs one of them at a time in a separate context. That needs a graph which
only some architectures have, and a tensor that is missing ends the process when the graph is built.
So both are checked here, from the header (``src/models/*.cpp`` with ``graph_mtp``).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from specllama.models.gguf import GgufHeader

# names in a block, without ".weight"; "a|b" is one or the other
_JOINT = ("nextn.eh_proj", "nextn.enorm", "nextn.hnorm", "attn_norm")
_HEADS = ("attn_q|attn_qkv", "attn_k|attn_qkv", "attn_v|attn_qkv", "attn_output")
_NORMED = (*_HEADS, "attn_q_norm", "attn_k_norm")
_LATENT_KV = ("attn_kv_a_mqa", "attn_kv_a_norm", "attn_k_b", "attn_v_b", "attn_output")
_LATENT = ("attn_q_a", "attn_q_a_norm", "attn_q_b", *_LATENT_KV)
_INDEXER = (
    "indexer.k_norm", "indexer.k_norm.bias", "indexer.proj", "indexer.attn_k", "indexer.attn_q_b",
)  # fmt: skip
_DENSE = ("ffn_gate", "ffn_up", "ffn_down")
_ROUTED = ("ffn_gate_inp", "ffn_gate_exps", "ffn_up_exps", "ffn_down_exps")
_FUSED = (
    "ffn_gate_inp", "ffn_gate_exps|ffn_gate_up_exps", "ffn_up_exps|ffn_gate_up_exps",
    "ffn_down_exps",
)  # fmt: skip
_SHARED = ("ffn_gate_shexp", "ffn_up_shexp", "ffn_down_shexp")
_STREAMS = tuple(
    f"hc_{part}_{what}" for part in ("attn", "ffn") for what in ("fn", "base", "scale")
)


@dataclass(frozen=True, slots=True)
class Graph:
    """llama.cpp's graph of an architecture's NextN block.

    Attributes:
        attention: tensors of a block, with the norm before the feed-forward net.
        nets: tensors of its feed-forward net; of several kinds, the first whose first tensor is in
            the file.
        chained: each further drafted token has a block of its own; else there is one block.
        outputs_only: it gives states of the rows with logits away, else of every row.
        narrow: keys and values must be of one width.
    """

    attention: tuple[str, ...]
    nets: tuple[tuple[str, ...], ...]
    chained: bool = False
    outputs_only: bool = False
    narrow: bool = False


GRAPHS: dict[str, Graph] = {
    "bailingmoe3": Graph(
        ("attn_q_a|attn_q", "attn_q_a_norm|attn_q", "attn_q_b|attn_q", *_LATENT_KV, "attn_gate",
         "ffn_norm", "layer_output_norm"),
        ((*_ROUTED, "exp_probs_b.bias", *_SHARED),),
    ),
    "cohere2moe": Graph(_HEADS, ((*_SHARED, *_FUSED), _FUSED), narrow=True),
    "deepseek2": Graph((*_LATENT, "ffn_norm"), ((*_FUSED, *_SHARED),)),
    "deepseek32": Graph((*_LATENT, *_INDEXER, "ffn_norm"), ((*_ROUTED, *_SHARED),)),
    "deepseek4": Graph(
        ("attn_q_a", "attn_q_a_norm", "attn_q_b", "attn_kv", "attn_kv_a_norm", "attn_sinks",
         "attn_output_a", "attn_output_b", *_STREAMS, "ffn_norm"),
        ((*_ROUTED, "exp_probs_b.bias", *_SHARED),),
        outputs_only=True,
    ),
    "glm-dsa": Graph((*_LATENT, "ffn_norm"), ((*_ROUTED, *_SHARED),)),
    "glm4moe": Graph((*_HEADS, "post_attention_norm"), ((*_ROUTED, *_SHARED),), narrow=True),
    "hy_v3": Graph(
        (*_NORMED, "ffn_norm"), ((*_FUSED, *_SHARED), _DENSE), chained=True, narrow=True
    ),
    "mimo2": Graph(
        ("attn_qkv", "attn_output", "ffn_norm"), (_DENSE,), chained=True, outputs_only=True
    ),
    "nemotron_h_moe": Graph(
        (*_HEADS, "post_attention_norm", "nextn.shared_head_norm"),
        (("ffn_gate_inp", "exp_probs_b.bias", "ffn_up_exps", "ffn_down_exps", "ffn_up_shexp",
          "ffn_down_shexp"),),
        narrow=True,
    ),
    "qwen35": Graph((*_NORMED, "post_attention_norm"), (_DENSE,), narrow=True),
    "qwen35moe": Graph(
        (*_NORMED, "post_attention_norm"), ((*_FUSED, *_SHARED, "ffn_gate_inp_shexp"),), narrow=True
    ),
    "qwen3next": Graph(
        (*_NORMED, "post_attention_norm"), ((*_FUSED, *_SHARED, "ffn_gate_inp_shexp"),),
        outputs_only=True, narrow=True,
    ),
    "step35": Graph(
        (*_HEADS, "ffn_norm"), ((*_ROUTED, *_SHARED), _DENSE), chained=True, outputs_only=True
    ),
}  # fmt: skip


def nextn_blocks(header: GgufHeader) -> int:
    """Return the number of NextN blocks that the file declares."""
    declared = header.integer(header.own("nextn_predict_layers")) or 0
    return declared if 0 < declared < header.block_count else 0


def trunk_blocks(header: GgufHeader) -> int:
    """Return the number of blocks that a pass of the target runs."""
    return header.block_count - nextn_blocks(header)


def lacks_trunk(header: GgufHeader) -> bool:
    """True if the only blocks in the file are NextN layers."""
    if not nextn_blocks(header):
        return False
    blocks = {name.split(".")[1] for name in header.by_name if name.startswith("blk.")}
    numbers = [int(block) for block in blocks if block.isdigit()]
    return bool(numbers) and min(numbers) >= trunk_blocks(header)


def why_not(header: GgufHeader) -> str:
    """Return why this file cannot draft with its own NextN blocks; empty if it can."""
    blocks, arch = nextn_blocks(header), header.architecture
    if blocks == 0:
        return "the target's file has no NextN layers"
    graph = GRAPHS.get(arch)
    if graph is None:
        return f"llama.cpp does not run the NextN layers of {arch} models"
    if blocks > 1 and not graph.chained:
        return f"llama.cpp runs one NextN layer of {arch} models, this file has {blocks}"
    for block in range(trunk_blocks(header), header.block_count):
        for name in _lacking(header, graph, f"blk.{block}."):
            return f"its NextN layer lacks the tensor {name}"
        joint, its = header.by_name[f"blk.{block}.nextn.eh_proj.weight"], header.embedding_length
        if joint.shape != (2 * its, its):
            return f"its NextN layer joins a width of {joint.shape[0] // 2}, the model's is {its}"
    if graph.narrow and header.key_length != header.value_length:
        return "its keys and values differ in width, which llama.cpp's NextN graph cannot take"
    return _unlike_the_trunk(header)


def _lacking(header: GgufHeader, graph: Graph, block: str) -> Iterator[str]:
    """Yield the tensors that a block should hold and does not, by the first name of each."""

    def full(name: str) -> str:
        return block + (name if name.endswith(".bias") else name + ".weight")

    def holds(name: str) -> bool:
        return any(full(one) in header.by_name for one in name.split("|"))

    net = next((net for net in graph.nets if holds(net[0])), graph.nets[0])
    for name in (*_JOINT, *graph.attention, *net):
        if not holds(name):
            yield full(name.partition("|")[0])


def _unlike_the_trunk(header: GgufHeader) -> str:
    """Return a feature of the trunk that the architecture's NextN graph lacks; "" if none."""
    arch = header.architecture
    if arch == "glm4moe" and any(header.array(header.own("rope.dimension_sections"))[1:]):
        return "its positions have sections (for images), which llama.cpp's NextN graph cannot take"
    if arch == "deepseek2" and header.number(header.own("attention.temperature_scale")):
        return "its attention has a temperature, which llama.cpp's NextN graph cannot take"
    if arch == "deepseek4" and any(
        header.per_layer(header.own("attention.compress_ratios"))[trunk_blocks(header) :]
    ):
        return "its NextN layer compresses its cache, which llama.cpp's graph of it cannot take"
    return ""
