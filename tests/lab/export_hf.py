"""A GGUF model as a Hugging Face folder, float32, for engines that do not read GGUF.

    PYTHONPATH=tests/support:tests/lab python -m export_hf tiny tiny-draft build/hf

Llama models with a byte-level BPE vocabulary of GPT-2's pattern, such as the bundled pair. The
matrices are dequantized, so an engine over the folder computes what llama.cpp computes over the
file, up to rounding.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from published_heads import save_safetensors

from specllama.models.gguf import GgufHeader, read_header
from specllama.models.refs import resolve_pair
from specllama.models.tensors import read_tensor

Floats = npt.NDArray[np.float32]

TOP = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
IN_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
CONTROL = 3


def by_halves(matrix: Floats, heads: int) -> Floats:
    """The rows of a query or key matrix in the order that turns halves against each other.

    llama.cpp's files turn neighbours: rows 2i and 2i + 1 of a head are rows i and i + half here.
    """
    pairs = matrix.reshape(heads, -1, 2, matrix.shape[1])
    return pairs.swapaxes(1, 2).reshape(matrix.shape)


def weights(model: GgufHeader) -> dict[str, Floats]:
    """Every tensor, by the name that it has in ``LlamaForCausalLM``.

    Raises:
        KeyError: the model has a tensor that this architecture has none of.
    """
    heads = {"attn_q": model.head_count, "attn_k": model.head_count_kv}
    out: dict[str, Floats] = {}
    for name in model.by_name:
        values = np.asarray(read_tensor(model, name), np.float32)
        if name in TOP:
            out[TOP[name]] = values
            continue
        _, layer, part, kind = name.split(".")
        if part in heads:
            values = by_halves(values, heads[part])
        out[f"model.layers.{layer}.{IN_LAYER[part]}.{kind}"] = values
    return out


def config(model: GgufHeader, *, tied: bool) -> dict[str, Any]:
    """What ``config.json`` says; ``tied`` models read their output from the embedding."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "torch_dtype": "float32",
        "vocab_size": model.vocab_size,
        "hidden_size": model.embedding_length,
        "intermediate_size": model.feed_forward_length,
        "num_hidden_layers": model.block_count,
        "num_attention_heads": model.head_count,
        "num_key_value_heads": model.head_count_kv,
        "head_dim": model.key_length,
        "max_position_embeddings": model.context_length,
        "rms_norm_eps": model.number(model.own("attention.layer_norm_rms_epsilon")),
        "rope_theta": model.number(model.own("rope.freq_base")),
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": tied,
        **special_ids(model),
    }


def special_ids(model: GgufHeader) -> dict[str, int]:
    """The ids that a generation begins with, ends with and is filled up with, as far as named."""
    names = {"bos_token_id": "bos", "eos_token_id": "eos", "pad_token_id": "padding"}
    found = {ours: model.special_id(theirs) for ours, theirs in names.items()}
    return {name: token for name, token in found.items() if token is not None}


def tokenizer(model: GgufHeader) -> dict[str, Any]:
    """What ``tokenizer.json`` says: the vocabulary with its merges, on bytes."""
    tokens = [text.decode("utf-8", "replace") for text in model.token_bytes]
    merges = [merge.decode().split(" ", 1) for merge in model.array("tokenizer.ggml.merges")]
    on_bytes = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
    marks = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    special = [i for i, kind in enumerate(model.token_types()) if kind == CONTROL]
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {"id": i, "content": tokens[i], **marks, "special": True} for i in special
        ],
        "normalizer": None,
        "pre_tokenizer": {**on_bytes, "use_regex": True},
        "post_processor": None,
        "decoder": {**on_bytes, "use_regex": True},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "vocab": {token: i for i, token in enumerate(tokens)},
            "merges": merges,
        },
    }


def export(source: Path, folder: Path) -> Path:
    """Write the model into ``folder``, which is made.

    Raises:
        ValueError: the model is of another architecture, or its vocabulary of another kind.
    """
    model = read_header(source)
    kind = (model.architecture, model.tokenizer_model, model.pre_tokenizer)
    if kind != ("llama", "gpt2", "gpt-2"):
        raise ValueError(f"only llama models with GPT-2's vocabulary can be written, not {kind}")
    folder.mkdir(parents=True, exist_ok=True)
    tensors = weights(model)
    save_safetensors(folder / "model.safetensors", tensors, "F32")
    ids = special_ids(model)
    tokens = [text.decode("utf-8", "replace") for text in model.token_bytes]
    said = {name.removesuffix("_id"): tokens[token] for name, token in ids.items()}
    template = model.chat_template or ""
    written = {
        "config": config(model, tied="lm_head.weight" not in tensors),
        "generation_config": ids,
        "tokenizer": tokenizer(model),
        "tokenizer_config": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "model_max_length": model.context_length,
            "clean_up_tokenization_spaces": False,
            "chat_template": template,
            **said,
        },
    }
    for name, content in written.items():
        (folder / f"{name}.json").write_text(json.dumps(content, indent=1), "utf-8")
    (folder / "chat_template.jinja").write_text(template, "utf-8")
    return folder


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("target", help="a model by path or name, such as tiny")
    parser.add_argument("draft", help="its draft model, or none")
    parser.add_argument("out", type=Path, help="gets the folders target and draft")
    asked = parser.parse_args()
    target, draft = resolve_pair(asked.target, asked.draft)
    print(export(target, asked.out / "target"))
    if draft is not None:
        print(export(draft, asked.out / "draft"))


if __name__ == "__main__":
    main()
