"""DFlash, DFlash2 and DSpark files: checks that llama.cpp can run one.

The format is llama.cpp's own (``general.architecture = "dflash"`` for all three). A few layers read
the target's hidden states as keys and values, and a block of masks behind the last token guesses
what stands there, all places at once. The tensors show the additions of the other two:

    DSpark     markov_w1, markov_w2: a bias by the token before; conf_proj: how sure a guess is
    DFlash2    convolutions over the block; selector_*: candidates, and how well they follow others

Whatever llama.cpp would abort on, or turn into nonsense, is refused.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from specllama.errors import BadGguf, PairIncompatible, UnsupportedModel
from specllama.models.gguf import GgufHeader
from specllama.models.heads import Head
from specllama.models.layer_inputs import (
    HINT,
    HeadFacts,
    check_target,
    draft_vocab,
    memory,
    read_layers,
)
from specllama.models.loadable import check_loadable

ARCHITECTURE = "dflash"
MOST_LAYERS, MOST_PLACES = 64, 64  # that are read, and of a block
_USUAL_BLOCK = 16  # llama.cpp's, where a file does not say
_ACTIVATIONS = (None, "silu", "gelu", "gelu_pytorch_tanh")
_FLOATS = ("F32", "F16", "BF16")

Kind = Literal["dflash", "dflash2", "dspark"]


@dataclass(frozen=True, slots=True)
class DflashFacts(HeadFacts):
    """Facts in a drafter's file.

    Attributes:
        kind: see above.
        block: places of a block, that of the last token among them.
        mask: the token that stands where one is to be guessed.
        causal: whether a place of the block sees those before it only.
        anchored: the place of the last token guesses what follows it; else the masks guess
            what stands in their own places.
        candidates: tokens among which each place of a DFlash2 chooses.
        confident: whether it reports how sure its guesses are.
        scale, cap: of its logits, where llama.cpp leaves that to others; 0 for no cap.
    """

    kind: Kind
    block: int
    mask: int
    causal: bool
    anchored: bool
    candidates: int
    confident: bool
    scale: float
    cap: float

    @property
    def guesses(self) -> int:
        """The most tokens of a draft."""
        return self.block if self.anchored else self.block - 1


def read_facts(header: GgufHeader) -> DflashFacts:
    """Read the facts of a drafter's file.

    Raises:
        PairIncompatible: the file is none.
        BadGguf, UnsupportedModel: it is one that llama.cpp cannot run.
    """
    name, tensors = header.path.name, header.by_name
    if header.architecture != ARCHITECTURE:
        raise PairIncompatible(
            f"{name} is a {header.architecture or 'nameless'} file, not a DFlash drafter", HINT
        )
    check_loadable(header, "head")
    if header.integer("dflash.hyper_connection.count"):
        raise UnsupportedModel(
            f"{name} is made of DeepSeek-V4 blocks, which specllama does not know",
            "draft with --proposer ngram, suffix or a draft model",
        )
    if header.key_length != header.value_length or header.key_length < 1 or not header.head_count:
        raise BadGguf(f"{name}: its attention heads have no size, or K and V of different ones")
    rope = "dflash.rope.dimension_sections"
    sections = header.array(rope) if rope in header.arrays else []
    if not 0 <= sum(n for n in sections if isinstance(n, int)) <= header.key_length:
        raise BadGguf(f"{name}: more of its keys turns than there is of them")
    if header.integer("dflash.rope.dimension_count") == 0:
        raise BadGguf(f"{name}: nothing of its keys turns, on which llama.cpp never ends")
    if header.text("dflash.hidden_activation") not in _ACTIVATIONS:
        raise BadGguf(f"{name}: llama.cpp does not know its activation function")
    layers = read_layers(header, MOST_LAYERS)
    width = header.embedding_length
    fusion = tensors.get("fc.weight")
    if fusion is None or fusion.shape != (len(layers) * width, width):
        raise BadGguf(f"{name}: its fusion matrix (fc.weight) does not fit the widths it states")
    mask = header.special_id("mask")
    if mask is None:
        raise BadGguf(f"{name} has no mask token", "convert it again with its target's tokenizer")
    kind = _kind(header)
    block = header.integer("dflash.block_size") or (_USUAL_BLOCK if kind == "dflash" else 0)
    if not 2 <= block <= MOST_PLACES:
        raise BadGguf(f"{name}: dflash.block_size must be 2 to {MOST_PLACES}")
    candidates = _candidates(header) if kind == "dflash2" else 0
    _check_types(header)
    return DflashFacts(
        width=width,
        target_width=width,
        layers=layers,
        draft_vocab=draft_vocab(header),
        own_embedding="token_embd.weight" in tensors,
        own_output="output.weight" in tensors or "token_embd.weight" in tensors,
        kind=kind,
        block=block,
        mask=mask,
        causal=bool(header.flag("dflash.attention.causal")),
        anchored=kind == "dspark" and header.flag("dflash.sample_from_anchor") is not False,
        candidates=candidates,
        confident="conf_proj.weight" in tensors,
        scale=_positive(header, "dflash.logit_scale") or 1.0 if kind == "dflash" else 1.0,
        cap=_positive(header, "dflash.final_logit_softcapping") if kind == "dflash" else 0.0,
    )


def _kind(header: GgufHeader) -> Kind:
    if "selector_hidden.weight" in header.by_name:
        if _is_dspark(header):
            raise BadGguf(f"{header.path.name} is both a DSpark and a DFlash2 drafter")
        return "dflash2"
    return "dspark" if _is_dspark(header) else "dflash"


def _is_dspark(header: GgufHeader) -> bool:
    return "markov_w1.weight" in header.by_name


def _candidates(header: GgufHeader) -> int:
    """Return the number of tokens that a place of a DFlash2 chooses among."""
    most = header.integer("dflash.selector_top_k") or 0
    numbers = ("conv_kernel_size", "conv_group_size", "selector_rank")
    group = header.integer("dflash.conv_group_size") or 1
    sound = all((header.integer(f"dflash.{number}") or 0) > 0 for number in numbers)
    if not sound or not 0 < most <= header.vocab_size or header.embedding_length % group:
        raise BadGguf(f"{header.path.name}: impossible sizes of its convolutions or its selector")
    if most * (most + 1) > header.embedding_length:
        raise BadGguf(f"{header.path.name}: {most} candidates in a width that is too small")
    return most


def _positive(header: GgufHeader, key: str) -> float:
    value = header.number(key) or 0.0
    if not 0.0 <= value < 1e6:
        raise BadGguf(f"{header.path.name}: {key} is {value:g}")
    return value


def _check_types(header: GgufHeader) -> None:
    """Refuse types on which llama.cpp's CPU operations abort in the middle of a pass."""
    for tensor in header.tensors:
        known = ("F32",) if "sinks" in tensor.name else _FLOATS
        alone = tensor.name.endswith(("conv_base", "output_scale.weight", "sinks.weight"))
        if alone and tensor.type not in known:
            raise BadGguf(
                f"{header.path.name}: tensor {tensor.name!r} has the type {tensor.type}, with "
                "which llama.cpp cannot compute"
            )


def check(head: GgufHeader, target: GgufHeader) -> DflashFacts:
    """Check that a head belongs to a target, see ``models.heads.Head``."""
    facts = read_facts(head)
    check_target(facts, head, target)
    return facts


def _recognise(header: GgufHeader, kind: str) -> bool:
    return header.architecture == ARCHITECTURE and (kind == "dspark") is _is_dspark(header)


HEAD = Head(
    check=check,
    open="specllama.backend.heads.dflash:open_dflash",
    memory=memory,
    recognise=_recognise,
    convert="specllama.models.convert_dflash:convert_dflash",
    published=("dflash", "dflash2", "dspark"),
)
