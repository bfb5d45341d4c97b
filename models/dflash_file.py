"""DFlash, DFlash2 and DSpark files: checks that llama.cpp can run one, and their conversion.

The format is llama.cpp's own (``general.architecture = "dflash"`` for all three). A few layers read
the target's hidden states as keys and values, and a block of masks behind the last token guesses
what stands there, all places at once. The tensors show the additions of the other two:

    DSpark     markov_w1, markov_w2: a bias by the token before; conf_proj: how sure a guess is
    DFlash2    convolutions over the block; selector_*: candidates, and how well they follow others

Whatever llama.cpp would abort on, or turn into nonsense, is refused.

Its authors' repositories keep what is not a layer in ``dflash_config`` and count the layers whose
outputs are read; the ``speculators`` format has it at the top and counts those whose inputs are.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np

from specllama.errors import BadGguf, UnsupportedModel
from specllama.models.companions import Head, require_architecture
from specllama.models.conversion import LAYER, Published, Shape
from specllama.models.gguf import GgufHeader
from specllama.models.gguf_writer import Tensor, Value
from specllama.models.layer_inputs import HINT, HeadFacts, check_target, memory, read_common

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
    require_architecture(header, ARCHITECTURE, "a DFlash drafter", HINT)
    if header.integer("dflash.hyper_connection.count"):
        raise UnsupportedModel(
            f"{name} is made of DeepSeek-V4 blocks, which specllama does not know",
            "draft with --proposer ngram, suffix or a draft model",
        )
    rope = "dflash.rope.dimension_sections"
    sections = header.array(rope) if rope in header.arrays else []
    if not 0 <= sum(n for n in sections if isinstance(n, int)) <= header.key_length:
        raise BadGguf(f"{name}: more of its keys turns than there is of them")
    if header.integer("dflash.rope.dimension_count") == 0:
        raise BadGguf(f"{name}: nothing of its keys turns, on which llama.cpp never ends")
    if header.text("dflash.hidden_activation") not in _ACTIVATIONS:
        raise BadGguf(f"{name}: llama.cpp does not know its activation function")
    common = read_common(header, MOST_LAYERS, header.embedding_length)
    mask = header.special_id("mask")
    if mask is None:
        raise BadGguf(f"{name} has no mask token", "convert it again with its target's tokenizer")
    kind = _kind(header)
    block = header.integer("dflash.block_size") or (_USUAL_BLOCK if kind == "dflash" else 0)
    if not 2 <= block <= MOST_PLACES:
        raise BadGguf(f"{name}: dflash.block_size must be 2 to {MOST_PLACES}")
    candidates = _candidates(header) if kind == "dflash2" else 0
    _check_types(header)
    common = replace(common, own_output=common.own_output or common.own_embedding)
    return DflashFacts(
        **asdict(common), kind=kind, block=block, mask=mask,
        causal=bool(header.flag("dflash.attention.causal")),
        anchored=kind == "dspark" and header.flag("dflash.sample_from_anchor") is not False,
        candidates=candidates, confident="conf_proj.weight" in tensors,
        scale=_positive(header, "dflash.logit_scale") or 1.0 if kind == "dflash" else 1.0,
        cap=_positive(header, "dflash.final_logit_softcapping") if kind == "dflash" else 0.0,
    )  # fmt: skip


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
    """Check that a head belongs to a target, see ``companions.Head``."""
    facts = read_facts(head)
    check_target(facts, head, target)
    return facts


def _recognise(header: GgufHeader, kind: str) -> bool:
    return header.architecture == ARCHITECTURE and (kind == "dspark") is _is_dspark(header)


# ---------------------------------------------------------------------- conversion

TOP = {
    "fc.weight": "fc.weight",
    "hidden_norm.weight": "enc.output_norm.weight",
    "norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
    "embed_tokens.weight": "token_embd.weight",
    "markov_head.markov_w1.weight": "markov_w1.weight",
    "markov_head.markov_w2.weight": "markov_w2.weight",
    "confidence_head.proj.weight": "conf_proj.weight",
    "confidence_head.proj.bias": "conf_proj.bias",
    "candidate_selector.predecessor_codebook": "selector_predecessor.weight",
    "candidate_selector.successor_codebook": "selector_successor.weight",
    "candidate_selector.hidden_projection.weight": "selector_hidden.weight",
}
IN_LAYER = LAYER | {
    "self_attn.q_norm.weight": "attn_q_norm.weight",
    "self_attn.k_norm.weight": "attn_k_norm.weight",
    "attention_conv.base_kernel": "attn_conv_base",
    "attention_conv.kernel_projection.weight": "attn_conv_proj.weight",
    "mlp_conv.base_kernel": "ffn_conv_base",
    "mlp_conv.kernel_projection.weight": "ffn_conv_proj.weight",
}
_TABLES = ("markov_w1.weight", "selector_predecessor.weight", "selector_successor.weight")
_MAY_LACK = ("output.weight", "token_embd.weight", *_TABLES)
_SELECTOR = ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k")
# what changes the numbers and is not said to llama.cpp here
_UNTRIED = (
    "attention_value_scale", "output_multiplier", "final_logit_softcapping", "swa_window_size",
    "input_embedding_scale", "attention_bias",
)  # fmt: skip


def convert_dflash(
    folder: Path, config: Mapping[str, Any], destination: Path, target: GgufHeader, kind: str
) -> None:
    """Write a published DFlash, DFlash2 or DSpark drafter for ``target``, see ``convert``."""
    head = Published(folder, config, ("qwen3", "llama"))
    said = {**head.layer, **config, **head.part("dflash_config")}
    for key in _UNTRIED:
        if said.get(key):
            raise head.bad(f"its {key} is {said[key]!r}, which specllama does not know")
    if said.get("use_sliding_window") or "sliding" in str(said.get("layer_types")):
        raise head.bad("some of its layers see a window only, which specllama does not know")
    if said.get("rope_is_neox_style") is False:
        raise head.bad("neighbouring values of its heads turn together")
    if said.get("markov_head_type", "vanilla") != "vanilla":
        raise head.bad(
            f"its Markov head is {said['markov_head_type']!r}; llama.cpp has the vanilla"
        )
    tensors = head.read(TOP, IN_LAYER)
    if "output.weight" not in tensors:  # both are the target's
        tensors.pop("token_embd.weight", None)
    layers = _layers(head, said)
    shapes: dict[str, Shape] = {
        "fc.weight": (None, None), "enc.output_norm.weight": (head.width,),
        "output_norm.weight": (head.width,), "output.weight": (None, head.width),
        "token_embd.weight": (None, head.width), **dict.fromkeys(_TABLES, (None, None)),
    }  # fmt: skip
    for i in range(head.blocks):
        shapes |= head.attention(f"blk.{i}.", head.width)
        shapes |= {f"blk.{i}.attn_{part}_norm.weight": (head.size,) for part in "qk"}
    head.require(tensors, shapes, _MAY_LACK)
    head.require_fusion(tensors["fc.weight"], len(layers), target)
    ids = head.fit_vocabulary(tensors, target.vocab_size)
    dspark = "markov_w1.weight" in tensors
    values: dict[str, Value] = {
        "target_layers": layers,
        "block_size": head.number("block_size", None, said),
        "attention.causal": bool(said.get("is_causal", said.get("causal"))),
        "tokenizer.ggml.mask_token_id": _mask(head, said, target),
    }
    anchored = said.get("sample_from_anchor", "transformer_layer_config" not in config)
    if dspark:
        values["sample_from_anchor"] = bool(anchored)
        values["has_confidence_head"] = "conf_proj.weight" in tensors
        guessed = target.vocab_size if ids is None else len(ids)
        _fit_markov(head, tensors, target.vocab_size, guessed)
    elif said.get("sample_from_anchor"):
        raise head.bad("the place of its last token guesses, which llama.cpp has for DSpark only")
    if "selector_hidden.weight" in tensors:
        values |= {key: head.number(key, None, said) for key in _SELECTOR}
        for name in ("selector_predecessor.weight", "selector_successor.weight"):
            if name in tensors:
                tensors[name] = head.rows(tensors[name], target.vocab_size)
    if target.own("rope.dimension_sections") in target.arrays:  # its positions have several parts
        values["rope.dimension_sections"] = np.array([head.size // 2, 0, 0, 0], np.int32)
    head.write(destination, target, kind, "dflash", values, tensors, ids)


def _layers(head: Published, said: Mapping[str, Any]) -> Any:
    """Return the layers of the target whose inputs it reads."""
    if (inputs := said.get("aux_hidden_state_layer_ids")) is not None:
        return head.layers(inputs, MOST_LAYERS)
    return head.layers(said.get("target_layer_ids"), MOST_LAYERS) + 1


def _mask(head: Published, said: Mapping[str, Any], target: GgufHeader) -> int:
    mask = said.get("mask_token_id")
    if type(mask) is not int or not 0 <= mask < target.vocab_size:
        raise head.bad(f"its mask token is {mask!r}, of {target.vocab_size:,} tokens")
    return mask


def _fit_markov(head: Published, tensors: dict[str, Tensor], vocab: int, said: int) -> None:
    """Cut padding off the Markov head, whose bias is for as many tokens as the drafter declares."""
    tensors["markov_w1.weight"] = head.rows(tensors["markov_w1.weight"], vocab)
    rank = tensors["markov_w1.weight"].shape[1]
    if said == vocab and "markov_w2.weight" in tensors:
        tensors["markov_w2.weight"] = head.rows(tensors["markov_w2.weight"], vocab)
    shapes: dict[str, Shape] = {
        "markov_w2.weight": (said, rank),
        "conf_proj.weight": (1, head.width + rank),
        "conf_proj.bias": (1,),
    }
    head.require(tensors, shapes, ("conf_proj.weight", "conf_proj.bias"))


HEAD = Head(
    check=check, open="specllama.backend.heads.llama_heads:open_dflash", memory=memory,
    recognise=_recognise, convert=convert_dflash, published=("dflash", "dflash2", "dspark"),
)  # fmt: skip
