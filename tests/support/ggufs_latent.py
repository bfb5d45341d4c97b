"""A random model with multi-head latent attention, whose K and V lie in one cache."""

from __future__ import annotations

from pathlib import Path

import ggufs
import numpy as np


def write_latent(path: Path, *, width: int = 64, blocks: int = 2, quant: str = "F32") -> Path:
    """A dense ``deepseek2`` model of the layout that DeepSeek V2 and later have."""
    rng = np.random.default_rng(1)
    tokens, types, merges = ggufs.bpe_tokens()
    heads, rank, rope, plain, value, hidden = 2, 64, 32, 32, 32, 2 * width
    arch = "deepseek2"
    writer = ggufs._Writer(path, arch)
    kind = {"F32": 0, "Q8_0": 7, "Q4_0": 2}[quant]
    sizes = {"width": width, "blocks": blocks, "hidden": hidden, "heads": heads, "rope": rope}
    writer.describe(path, **sizes, context=2048, file_type=kind)
    writer.add_expert_feed_forward_length(hidden)
    writer.add_expert_shared_count(0)
    writer.add_leading_dense_block_count(blocks)
    writer.add_kv_lora_rank(rank)
    writer.add_q_lora_rank(rank)
    writer.add_key_length(rank + rope)
    writer.add_value_length(rank)
    writer.add_uint32(f"{arch}.attention.key_length_mla", plain + rope)
    writer.add_uint32(f"{arch}.attention.value_length_mla", value)
    writer.speak(tokens, types, merges)

    quantize = ggufs._quantizer(quant)

    def add(name: str, *shape: int) -> None:
        if len(shape) == 1:
            writer.add_tensor(name, np.ones(shape, np.float32))
            return
        values = rng.normal(0.0, shape[-1] ** -0.5, shape).astype(np.float32)
        if quant == "F32" or len(shape) > 2:
            writer.add_tensor(name, values)
        else:
            packed, kind = quantize(values)
            writer.add_tensor(name, packed, raw_dtype=kind)

    add("token_embd.weight", len(tokens), width)
    for i in range(blocks):
        add(f"blk.{i}.attn_norm.weight", width)
        add(f"blk.{i}.attn_q_a.weight", rank, width)
        add(f"blk.{i}.attn_q_a_norm.weight", rank)
        add(f"blk.{i}.attn_q_b.weight", heads * (plain + rope), rank)
        add(f"blk.{i}.attn_kv_a_mqa.weight", rank + rope, width)
        add(f"blk.{i}.attn_kv_a_norm.weight", rank)
        add(f"blk.{i}.attn_k_b.weight", heads, rank, plain)
        add(f"blk.{i}.attn_v_b.weight", heads, value, rank)
        add(f"blk.{i}.attn_output.weight", width, heads * value)
        add(f"blk.{i}.ffn_norm.weight", width)
        for part in ("gate", "up"):
            add(f"blk.{i}.ffn_{part}.weight", hidden, width)
        add(f"blk.{i}.ffn_down.weight", width, hidden)
    add("output_norm.weight", width)
    add("output.weight", len(tokens), width)
    writer.finish()
    return path
