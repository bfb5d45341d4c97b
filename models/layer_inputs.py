"""Heads that read the residual stream as it enters some layers of their target.

What EAGLE-3 and DFlash files have in common: the facts by which such a file belongs to a target.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from specllama.arrays import FINAL
from specllama.errors import BadGguf, PairIncompatible
from specllama.models.companions import other_tokens, require_same_target
from specllama.models.gguf import GgufHeader
from specllama.models.loadable import check_loadable
from specllama.models.memory import HEAD_BATCH, ModelMemory, estimate_model
from specllama.models.tensors import read_bytes

# asked for the layer inputs of any other architecture, llama.cpp ends the process (qwen4exp has
# several streams in a layer, which its buffers do not hold)
LAYER_INPUT_ARCHITECTURES = frozenset({
    "llama", "qwen3", "qwen3moe", "qwen3next", "qwen35", "qwen35moe", "gemma4", "gpt-oss",
    "lfm2", "nemotron_h", "nemotron_h_moe", "bailingmoe3", "deepseek4", "hunyuan_vl",
    "mimo2", "minimax-01", "minimax-m2", "muse-glimmer", "nanbeige",
})  # fmt: skip
HINT = "use a head that was trained for this target"


@dataclass(frozen=True, slots=True)
class HeadFacts:
    """Facts in a head's file.

    Attributes:
        width: of the head's own hidden state.
        target_width: of the target's hidden states that it reads.
        layers: it reads the residual stream as it enters these layers of the target; FINAL is its
            last state.
        draft_vocab: tokens that the head can guess.
        own_embedding, own_output: whether it brings the matrix or borrows the target's.
    """

    width: int
    target_width: int
    layers: tuple[int, ...]
    draft_vocab: int
    own_embedding: bool
    own_output: bool


def read_common(header: GgufHeader, most_layers: int, target_width: int) -> HeadFacts:
    """Read the facts that such files share.

    Raises:
        BadGguf, UnsupportedModel: it is one that llama.cpp cannot run.
    """
    name, tensors, width = header.path.name, header.by_name, header.embedding_length
    check_loadable(header, "head")
    if header.key_length != header.value_length or header.key_length < 1 or not header.head_count:
        raise BadGguf(f"{name}: its attention heads have no size, or K and V of different ones")
    layers = read_layers(header, most_layers)
    fusion = tensors.get("fc.weight")
    if fusion is None or fusion.shape != (len(layers) * target_width, width):
        raise BadGguf(f"{name}: its fusion matrix (fc.weight) does not fit the widths it states")
    return HeadFacts(
        width=width, target_width=target_width, layers=layers, draft_vocab=draft_vocab(header),
        own_embedding="token_embd.weight" in tensors, own_output="output.weight" in tensors,
    )  # fmt: skip


def read_layers(header: GgufHeader, most: int) -> tuple[int, ...]:
    """Read the layers of the target whose inputs a head reads: at least one, at most ``most``.

    Raises:
        BadGguf: there is no such list, or it is damaged.
    """
    key = header.own("target_layers")
    layers = header.arrays.get(key)
    if layers is None or layers.kind not in ("u32", "i32") or not 0 < layers.count <= most:
        raise BadGguf(f"{header.path.name}: {key} is not a list of layers")
    found = tuple(int(layer) for layer in header.array(key))
    if min(found) < 0:
        raise BadGguf(f"{header.path.name}: {key} has a negative number")
    return found


def read_draft_ids(header: GgufHeader) -> npt.NDArray[np.int64]:
    """Read the target token of every row of the head's output matrix.

    Raises:
        BadGguf: the tensor d2t is not a list of different tokens in 64-bit integers, the file is
            cut short, or it has no output matrix for them.
    """
    name, info = header.path.name, header.by_name["d2t"]
    if info.type != "I64" or len(info.shape) != 1 or info.shape[0] < 1 or len(header.parts) > 1:
        raise BadGguf(f"{name}: d2t is not a vector of 64-bit integers")
    ids = read_bytes(header, "d2t").view("<i8")
    if "output.weight" not in header.by_name:
        raise BadGguf(f"{name}: a draft vocabulary without an output matrix")
    if ids.min() < 0 or ids.max() >= header.vocab_size or len(np.unique(ids)) != len(ids):
        raise BadGguf(
            f"{name}: d2t is not a list of different tokens below {header.vocab_size}",
            "convert it again with llama.cpp's convert_hf_to_gguf.py",
        )
    return ids


def draft_vocab(header: GgufHeader) -> int:
    """Count the tokens that a head can guess.

    Raises:
        BadGguf: see ``read_draft_ids``.
    """
    return len(read_draft_ids(header)) if "d2t" in header.by_name else header.vocab_size


def memory(head: GgufHeader, target: GgufHeader, n_ctx: int) -> ModelMemory:
    """Estimate the memory of such a head, whose passes return a row for each token."""
    return estimate_model(head, n_ctx=n_ctx, n_ubatch=HEAD_BATCH, n_outputs=HEAD_BATCH)


def unexposed(architecture: str, then: str) -> PairIncompatible:
    """Return the error for a target that does not give its layer inputs away.

    Args:
        then: the words behind that.
    """
    return PairIncompatible(
        f"llama.cpp does not expose the layer inputs of {architecture} models{then}",
        "draft with --proposer ngram, suffix or a draft model",
    )


def check_target(facts: HeadFacts, head: GgufHeader, target: GgufHeader) -> None:
    """Refuse a head made for another target, or for one whose layers llama.cpp does not expose.

    Raises:
        PairIncompatible: with the first difference found.
    """
    name = head.path.name
    layers = [layer for layer in facts.layers if layer != FINAL]
    if layers and target.architecture not in LAYER_INPUT_ARCHITECTURES:
        raise unexposed(target.architecture, f", which {name} reads")

    of, width, why = target.path.name, target.embedding_length, ""
    beyond = [layer for layer in layers if not 0 <= layer < target.block_count]
    if facts.target_width != width:
        why = f"it reads hidden states of width {facts.target_width}, {of} has {width}"
    elif beyond:
        why = f"it reads the input of layer {beyond[0]}, {of} has {target.block_count} layers"
    elif not (facts.own_embedding and facts.own_output) and facts.width != width:
        why = f"it borrows matrices of width {facts.width}, those of {of} are {width} wide"
    require_same_target(head, why or other_tokens(head, target), HINT)
