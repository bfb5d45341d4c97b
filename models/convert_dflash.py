"""Published DFlash, DFlash2 and DSpark drafters as files of llama.cpp's ``dflash`` format.

Its authors' repositories keep what is not a layer in ``dflash_config`` and count the layers whose
outputs are read; the ``speculators`` format has it at the top and counts those whose inputs are.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from specllama.models.dflash_file import MOST_LAYERS, check
from specllama.models.gguf import GgufHeader
from specllama.models.gguf_writer import Tensor, Value
from specllama.models.published import LAYER, Published, Shape

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
        "fc.weight": (None, None),
        "enc.output_norm.weight": (head.width,),
        "output_norm.weight": (head.width,),
        "output.weight": (None, head.width),
        "token_embd.weight": (None, head.width),
        **dict.fromkeys(_TABLES, (None, None)),
    }
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
        _fit_markov(
            head, tensors, target.vocab_size, target.vocab_size if ids is None else len(ids)
        )
    elif said.get("sample_from_anchor"):
        raise head.bad("the place of its last token guesses, which llama.cpp has for DSpark only")
    if "selector_hidden.weight" in tensors:
        values |= {key: head.number(key, None, said) for key in _SELECTOR}
        for name in ("selector_predecessor.weight", "selector_successor.weight"):
            if name in tensors:
                tensors[name] = head.rows(tensors[name], target.vocab_size)
    if target.own("rope.dimension_sections") in target.arrays:  # its positions have several parts
        values["rope.dimension_sections"] = np.array([head.size // 2, 0, 0, 0], np.int32)

    belongs = partial(check, target=target)
    head.write(destination, target, kind, "dflash", values, tensors, ids, belongs)


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
