"""GGUF files with a NextN block, written from scratch with random weights."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from ggufs import _Writer, bpe_tokens

CONV, STATE, GROUPS, RANK = 4, 32, 1, 2  # of the linear attention


def write_qwen35(
    path: Path,
    *,
    width: int = 64,
    blocks: int = 4,
    nextn: int = 1,
    heads: int = 2,
    head: int = 32,
    hidden: int = 96,
    state: int = STATE,
    groups: int = GROUPS,
    rank: int = RANK,
    experts: int = 0,
    context: int = 512,
    seed: int = 1,
    without: str = "",
) -> Path:
    """A random `qwen35` model: three blocks of linear attention, one of attention, NextN blocks.

    Args:
        blocks: of the trunk, every fourth with attention.
        state, groups, rank: of the linear attention.
        experts: some make it a `qwen3next` model, which uses two of them for a token.
        without: leave out tensors whose name contains this.
    """
    rng = np.random.default_rng(seed)
    tokens, types, merges = bpe_tokens()
    kind = "qwen3next" if experts else "qwen35"
    w = _Writer(path, kind)
    w.add_name(path.stem)
    w.add_context_length(context)
    w.add_embedding_length(width)
    w.add_block_count(blocks + nextn)
    w.add_feed_forward_length(hidden)
    w.add_head_count(heads)
    w.add_head_count_kv(1)
    w.add_key_length(head)
    w.add_value_length(head)
    w.add_layer_norm_rms_eps(1e-6)
    w.add_rope_dimension_count(head // 2)
    w.add_rope_dimension_sections([head // 4, head // 8, head // 8, 0])
    w.add_rope_freq_base(10000.0)
    w.add_ssm_conv_kernel(CONV)
    w.add_ssm_state_size(state)
    w.add_ssm_group_count(groups)
    w.add_ssm_time_step_rank(rank)
    w.add_ssm_inner_size(state * rank)
    w.add_uint32(f"{kind}.full_attention_interval", 4)
    if experts:
        w.add_expert_count(experts)
        w.add_expert_used_count(2)
        w.add_expert_feed_forward_length(hidden)
        w.add_expert_shared_feed_forward_length(hidden)
    if nextn:
        w.add_nextn_predict_layers(nextn)
    w.add_file_type(0)
    w.add_tokenizer_model("gpt2")
    w.add_tokenizer_pre("gpt-2")
    w.add_token_list(tokens)
    w.add_token_types(types)
    w.add_token_merges(merges)
    w.add_bos_token_id(0)
    w.add_eos_token_id(2)
    w.add_add_bos_token(False)

    def add(name: str, *shape: int) -> None:
        if without and without in name:
            return
        if name.endswith("norm.weight"):
            values = np.ones(shape, np.float32)
        elif name.endswith("ssm_a"):
            values = -rng.uniform(0.1, 1.0, shape).astype(np.float32)
        else:
            values = rng.normal(0, shape[-1] ** -0.5, shape).astype(np.float32)
        w.add_tensor(name, values)

    add("token_embd.weight", len(tokens), width)
    add("output_norm.weight", width)
    add("output.weight", len(tokens), width)
    for i in range(blocks + nextn):
        block = f"blk.{i}."
        add(block + "attn_norm.weight", width)
        add(block + "post_attention_norm.weight", width)
        if i >= blocks or (i + 1) % 4 == 0:
            add(block + "attn_q.weight", 2 * heads * head, width)
            add(block + "attn_k.weight", head, width)
            add(block + "attn_v.weight", head, width)
            add(block + "attn_output.weight", width, heads * head)
            add(block + "attn_q_norm.weight", head)
            add(block + "attn_k_norm.weight", head)
        else:
            keys, values = state * groups, state * rank
            add(block + "attn_qkv.weight", 2 * keys + values, width)
            add(block + "attn_gate.weight", values, width)
            add(block + "ssm_conv1d.weight", 2 * keys + values, CONV)
            add(block + "ssm_dt.bias", rank)
            add(block + "ssm_a", rank)
            if experts:
                add(block + "ssm_ba.weight", 2 * rank, width)
            else:
                add(block + "ssm_beta.weight", rank, width)
                add(block + "ssm_alpha.weight", rank, width)
            add(block + "ssm_norm.weight", state)
            add(block + "ssm_out.weight", width, values)
        if experts:
            add(block + "ffn_gate_inp.weight", experts, width)
            add(block + "ffn_gate_inp_shexp.weight", width)
            add(block + "ffn_gate_exps.weight", experts, hidden, width)
            add(block + "ffn_up_exps.weight", experts, hidden, width)
            add(block + "ffn_down_exps.weight", experts, width, hidden)
        shared = "_shexp" if experts else ""
        add(f"{block}ffn_gate{shared}.weight", hidden, width)
        add(f"{block}ffn_up{shared}.weight", hidden, width)
        add(f"{block}ffn_down{shared}.weight", width, hidden)
        if i >= blocks:
            add(block + "nextn.eh_proj.weight", width, 2 * width)
            add(block + "nextn.enorm.weight", width)
            add(block + "nextn.hnorm.weight", width)
    w.finish()
    return path
