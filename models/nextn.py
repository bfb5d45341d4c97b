"""NextN blocks (multi-token prediction) of a model file: where they are, and who can run them.

They are the last ``nextn_predict_layers`` of ``block_count`` blocks. llama.cpp leaves them out of
the target's passes and runs the first of them in a separate context. That needs a graph which only
some architectures have, and a missing tensor ends the process when the graph is built. So both are
checked here, from the header (``src/models/*.cpp`` with ``graph_mtp``).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from specllama.models.gguf import GgufHeader

_JOINT = ("nextn.eh_proj.weight", "nextn.enorm.weight", "nextn.hnorm.weight")
_ROUTED = ("ffn_gate_inp.weight",)
_SHARED = ("ffn_gate_shexp.weight", "ffn_up_shexp.weight", "ffn_down_shexp.weight")
_DENSE = ("ffn_gate.weight", "ffn_up.weight", "ffn_down.weight")

# architecture -> what its NextN block must hold besides the two norms and their joint matrix. Our
# tests run glm4moe and qwen35; the other two share their graph but for the experts. llama.cpp has
# graphs of more architectures, with windowed or compressed attention, which nobody tried here.
RUNNABLE: dict[str, tuple[str, ...]] = {
    "glm4moe": (*_ROUTED, *_SHARED),
    "qwen35": _DENSE,
    "qwen35moe": _ROUTED,
    "qwen3next": _ROUTED,
}


def nextn_blocks(header: GgufHeader) -> int:
    """How many NextN blocks the file declares."""
    declared = header.integer(header.own("nextn_predict_layers")) or 0
    return declared if 0 < declared < header.block_count else 0


def trunk_blocks(header: GgufHeader) -> int:
    """How many blocks a pass of the target runs."""
    return header.block_count - nextn_blocks(header)


def lacks_trunk(header: GgufHeader) -> bool:
    """Whether the only blocks in the file are NextN layers."""
    if not nextn_blocks(header):
        return False
    blocks = {name.split(".")[1] for name in header.by_name if name.startswith("blk.")}
    numbers = [int(block) for block in blocks if block.isdigit()]
    return bool(numbers) and min(numbers) >= trunk_blocks(header)


def why_not(header: GgufHeader) -> str:
    """Why this file cannot draft with its own NextN blocks; empty if it can."""
    blocks, arch = nextn_blocks(header), header.architecture
    if blocks == 0:
        return "the target's file has no NextN layers"
    if arch not in RUNNABLE:
        return f"specllama does not run the NextN layers of {arch} models"
    if blocks > 1:
        return f"llama.cpp runs one NextN layer of {arch} models, this file has {blocks}"
    first = f"blk.{trunk_blocks(header)}."
    for name in (*_JOINT, *RUNNABLE[arch]):
        if first + name not in header.by_name:
            return f"its NextN layer lacks the tensor {first + name}"
    if header.key_length != header.value_length:
        return "its keys and values differ in width, which llama.cpp's NextN graph cannot take"
    width = header.by_name[first + _JOINT[0]].shape
    if width != (2 * header.embedding_length, header.embedding_length):
        return f"its NextN layer joins a width of {width[0] // 2}, the model's is " + str(
            header.embedding_length
        )
    return ""
