"""EAGLE-3 head files: whether llama.cpp can run one, and whether it belongs to a target.

The format is llama.cpp's own (``general.architecture = "eagle3"``), as its converter writes it from
published checkpoints: one decoder layer that reads the target's token embeddings beside a fusion of
three of its hidden states. Whatever llama.cpp would abort on, or turn into nonsense, is refused.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from specllama.errors import BadGguf, PairIncompatible
from specllama.models.gguf import GgufHeader
from specllama.models.loadable import check_loadable

ARCHITECTURE = "eagle3"
LAYERS_READ = 3
# asked for the layer inputs of any other architecture, llama.cpp ends the process
LAYER_INPUT_ARCHITECTURES = frozenset({
    "llama", "qwen3", "qwen3moe", "qwen3next", "qwen35", "qwen35moe", "qwen4exp", "gemma4",
    "gpt-oss", "lfm2", "nemotron_h", "nemotron_h_moe", "bailingmoe3", "deepseek4", "hunyuan_vl",
    "mimo2", "minimax-01", "minimax-m2", "muse-glimmer", "nanbeige",
})  # fmt: skip
_SAME_TEXTS = 0.99  # of the token ids; a head's converter copies the target's tokenizer
_HINT = "use a head that was trained for this target"


@dataclass(frozen=True, slots=True)
class EagleFacts:
    """What a head file says about itself.

    Attributes:
        width: of the head's own hidden state.
        target_width: of the target's hidden states that it fuses.
        layers: it reads the residual stream as it enters these layers of the target.
        vocab: tokens of the target.
        draft_vocab: tokens that the head can say.
        own_embedding, own_output: whether it brings the matrix or borrows the target's.
    """

    width: int
    target_width: int
    layers: tuple[int, ...]
    vocab: int
    draft_vocab: int
    own_embedding: bool
    own_output: bool


def read_facts(header: GgufHeader) -> EagleFacts:
    """Facts of a head file.

    Raises:
        PairIncompatible: the file is no EAGLE-3 head.
        BadGguf, UnsupportedModel: it is one that llama.cpp cannot run.
    """
    name = header.path.name
    if header.architecture != ARCHITECTURE:
        raise PairIncompatible(
            f"{name} is a {header.architecture or 'nameless'} file, not an EAGLE-3 head", _HINT
        )
    check_loadable(header, "head")
    if header.block_count != 1:
        raise BadGguf(f"{name}: an EAGLE-3 head has one layer, this one {header.block_count}")
    if header.key_length != header.value_length or header.key_length < 1 or not header.head_count:
        raise BadGguf(f"{name}: its attention heads have no size, or K and V of different ones")
    layers = header.arrays.get("eagle3.target_layers")
    if layers is None or layers.kind not in ("u32", "i32") or layers.count != LAYERS_READ:
        raise BadGguf(f"{name}: eagle3.target_layers is not a list of {LAYERS_READ} layers")
    target_width = header.integer("eagle3.target_hidden_size") or 0
    fusion = header.by_name.get("fc.weight")
    if fusion is None or fusion.shape != (LAYERS_READ * target_width, header.embedding_length):
        raise BadGguf(f"{name}: its fusion matrix (fc.weight) does not fit the widths it states")
    own_output = "output.weight" in header.by_name
    draft_vocab = header.vocab_size
    if "d2t" in header.by_name:
        ids = read_draft_ids(header)
        draft_vocab = len(ids)
        if not own_output:
            raise BadGguf(f"{name}: a draft vocabulary without an output matrix")
        if ids.min() < 0 or ids.max() >= header.vocab_size or len(np.unique(ids)) != len(ids):
            raise BadGguf(
                f"{name}: d2t is not a list of different tokens below {header.vocab_size}",
                "convert it again with llama.cpp's convert_hf_to_gguf.py",
            )
    return EagleFacts(
        width=header.embedding_length,
        target_width=target_width,
        layers=tuple(int(layer) for layer in header.array("eagle3.target_layers")),
        vocab=header.vocab_size,
        draft_vocab=draft_vocab,
        own_embedding="token_embd.weight" in header.by_name,
        own_output=own_output,
    )


def read_draft_ids(header: GgufHeader) -> npt.NDArray[np.int64]:
    """The target token of every row of the head's output matrix.

    Raises:
        BadGguf: the tensor d2t is not a vector of 64-bit integers, or the file is cut short.
    """
    info = header.by_name["d2t"]
    if info.type != "I64" or len(info.shape) != 1 or info.shape[0] < 1 or len(header.parts) > 1:
        raise BadGguf(f"{header.path.name}: d2t is not a vector of 64-bit integers")
    with header.path.open("rb") as file:
        file.seek(header.data_offset + info.offset)
        data = file.read(info.n_bytes)
    if len(data) != info.n_bytes:
        raise BadGguf(f"{header.path.name} is cut short", "download it again")
    return np.frombuffer(data, "<i8")


def check_target(facts: EagleFacts, head: GgufHeader, target: GgufHeader) -> None:
    """Refuse a head made for another target, or for one whose layers llama.cpp does not expose.

    Raises:
        PairIncompatible: with the first difference found.
    """
    name = head.path.name
    if target.architecture not in LAYER_INPUT_ARCHITECTURES:
        raise PairIncompatible(
            f"llama.cpp does not expose the layer inputs of {target.architecture} models, which "
            f"{name} reads",
            "draft with --proposer ngram, suffix or a draft model",
        )

    def refuse(why: str) -> None:
        raise PairIncompatible(f"{name} was made for another target: {why}", _HINT)

    if facts.target_width != target.embedding_length:
        refuse(
            f"it reads hidden states of width {facts.target_width}, "
            f"{target.path.name} has {target.embedding_length}"
        )
    if facts.vocab != target.vocab_size:
        refuse(
            f"it knows {facts.vocab:,} tokens, {target.path.name} {target.vocab_size:,}",
        )
    beyond = [layer for layer in facts.layers if not 0 <= layer < target.block_count]
    if beyond:
        refuse(
            f"it reads the input of layer {beyond[0]}, "
            f"{target.path.name} has {target.block_count} layers"
        )
    if not (facts.own_embedding and facts.own_output) and facts.width != target.embedding_length:
        refuse(
            f"it borrows matrices of width {facts.width}, those of {target.path.name} are "
            f"{target.embedding_length} wide"
        )
    if head.tokenizer_model not in (None, "no_vocab", "none"):
        pairs = list(zip(head.token_bytes, target.token_bytes, strict=True))
        other = [i for i, (a, b) in enumerate(pairs) if a != b]
        if len(other) > (1 - _SAME_TEXTS) * len(pairs):
            a, b = pairs[other[0]]
            refuse(
                f"{len(other):,} of {len(pairs):,} tokens have another text, for example "
                f"{other[0]}: {a.decode('utf-8', 'replace')!r} and {b.decode('utf-8', 'replace')!r}"
            )
