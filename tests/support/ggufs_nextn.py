"""GGUF files with NextN blocks, written from scratch with random weights: every kind of graph.

A trunk's blocks are those of the architecture; a NextN block is one of its blocks with attention
and whatever joins tokens and states. Few tokens are likely, so that some drafts are right.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from ggufs import _Writer, bpe_tokens

HEADS, HEAD, HIDDEN = 2, 32, 96
EXPERTS, USED, EXPERT = 4, 2, 32  # the shared one is as wide as any
RANK, Q_RANK, ROPE, PLAIN, VALUE = 64, 24, 32, 16, 16  # of latent attention
CONV, STATE, GROUPS, TIME_RANK = 4, 32, 1, 2  # of linear attention
INDEXERS, INDEXER = 4, 64
STREAMS, GROUPED, GROUP_RANK = 4, 2, 16  # of deepseek4
WINDOW = 12
LIKELY = 12  # tokens

QWEN = ("qwen35", "qwen35moe", "qwen3next")
LATENT = ("bailingmoe3", "deepseek2", "deepseek32", "glm-dsa")
INDEXED = ("deepseek32", "glm-dsa")
CHAINED = ("hy_v3", "mimo2", "step35")
ARCHITECTURES = (
    *QWEN, *LATENT, *CHAINED, "cohere2moe", "deepseek4", "glm4moe", "nemotron_h_moe",
)  # fmt: skip
LAST_NORM = {"bailingmoe3": "layer_output_norm"}
PARTED = ("mimo2", "step35")  # values narrower than keys

Shapes = dict[str, tuple[int, ...]]


def value_size(arch: str) -> int:
    return HEAD // 2 if arch in PARTED else HEAD


def _attention(arch: str, width: int) -> Shapes:
    value = value_size(arch)
    if arch in LATENT:
        found: Shapes = {
            "attn_q_a.weight": (Q_RANK, width),
            "attn_q_a_norm.weight": (Q_RANK,),
            "attn_q_b.weight": (HEADS * (PLAIN + ROPE), Q_RANK),
            "attn_kv_a_mqa.weight": (RANK + ROPE, width),
            "attn_kv_a_norm.weight": (RANK,),
            "attn_k_b.weight": (HEADS, RANK, PLAIN),
            "attn_v_b.weight": (HEADS, VALUE, RANK),
            "attn_output.weight": (width, HEADS * VALUE),
        }
        if arch == "bailingmoe3":
            found["attn_gate.weight"] = (HEADS, width)
        if arch in INDEXED:
            found |= {
                "indexer.k_norm.weight": (INDEXER,),
                "indexer.k_norm.bias": (INDEXER,),
                "indexer.proj.weight": (INDEXERS, width),
                "indexer.attn_k.weight": (INDEXER, width),
                "indexer.attn_q_b.weight": (INDEXERS * INDEXER, Q_RANK),
            }
        return found
    if arch == "deepseek4":
        return {
            "attn_q_a.weight": (Q_RANK, width),
            "attn_q_a_norm.weight": (Q_RANK,),
            "attn_q_b.weight": (HEADS * HEAD, Q_RANK),
            "attn_kv.weight": (HEAD, width),
            "attn_kv_a_norm.weight": (HEAD,),
            "attn_sinks.weight": (HEADS,),
            "attn_output_a.weight": (GROUPED * GROUP_RANK, HEADS * HEAD // GROUPED),
            "attn_output_b.weight": (width, GROUPED * GROUP_RANK),
        } | {
            f"hc_{net}_{name}.weight": shape
            for net in ("attn", "ffn")
            for name, shape in (
                ("fn", ((2 + STREAMS) * STREAMS, STREAMS * width)),
                ("base", ((2 + STREAMS) * STREAMS,)),
                ("scale", (3,)),
            )
        }
    rows = {"q": HEADS * HEAD, "k": HEAD, "v": value}
    if arch in QWEN:
        rows["q"] *= 2  # with a gate
    found = {f"attn_{name}.weight": (n, width) for name, n in rows.items()}
    if arch == "mimo2":
        found = {"attn_qkv.weight": (sum(rows.values()), width), "attn_sinks.weight": (HEADS,)}
    if arch == "step35":
        found["attn_gate.weight"] = (HEADS, width)
    if arch in QWEN or arch in ("hy_v3", "step35"):
        found |= {"attn_q_norm.weight": (HEAD,), "attn_k_norm.weight": (HEAD,)}
    return found | {"attn_output.weight": (width, HEADS * value)}


def _linear(arch: str, width: int) -> Shapes:
    """Layers that keep a running state instead of keys and values."""
    keys, values = STATE * GROUPS, STATE * TIME_RANK
    if arch == "bailingmoe3":
        inner = STATE * HEADS
        return {
            **{f"ssm_conv1d_{name}.weight": (1, inner, 1, CONV) for name in "qkv"},
            **{f"attn_{name}.weight": (inner, width) for name in "qkv"},
            "attn_output.weight": (width, inner),
            "ssm_f_a.weight": (inner, width),
            "ssm_g_a.weight": (inner, width),
            "ssm_beta.weight": (HEADS, width),
            "ssm_a": (HEADS, 1),
            "ssm_dt.bias": (inner,),
            "ssm_norm.weight": (STATE,),
        }
    found: Shapes = {
        "ssm_conv1d.weight": (2 * keys + values, CONV),
        "ssm_dt.bias": (TIME_RANK,),
        "ssm_out.weight": (width, values),
    }
    if arch == "nemotron_h_moe":
        return found | {
            "ssm_in.weight": (2 * values + 2 * keys + TIME_RANK, width),
            "ssm_a": (TIME_RANK, 1),
            "ssm_d": (TIME_RANK, 1),
            "ssm_conv1d.bias": (2 * keys + values,),
            "ssm_norm.weight": (GROUPS, values // GROUPS),
        }
    if arch == "qwen3next":
        found["ssm_ba.weight"] = (2 * TIME_RANK, width)
    else:
        found |= {"ssm_beta.weight": (TIME_RANK, width), "ssm_alpha.weight": (TIME_RANK, width)}
    return found | {
        "attn_qkv.weight": (2 * keys + values, width),
        "attn_gate.weight": (values, width),
        "ssm_a": (TIME_RANK,),
        "ssm_norm.weight": (STATE,),
    }


def _net(arch: str, width: int) -> Shapes:
    gated = ("gate", "up") if arch != "nemotron_h_moe" else ("up",)
    if arch in ("qwen35", "mimo2"):
        found: Shapes = {f"ffn_{part}.weight": (HIDDEN, width) for part in gated}
        return found | {"ffn_down.weight": (width, HIDDEN)}
    found = {"ffn_gate_inp.weight": (EXPERTS, width)}
    for part in gated:
        found[f"ffn_{part}_exps.weight"] = (EXPERTS, EXPERT, width)
        found[f"ffn_{part}_shexp.weight"] = (EXPERT, width)
    found["ffn_down_exps.weight"] = (EXPERTS, width, EXPERT)
    found["ffn_down_shexp.weight"] = (width, EXPERT)
    if arch in ("qwen35moe", "qwen3next"):
        found["ffn_gate_inp_shexp.weight"] = (width,)
    elif arch not in ("cohere2moe", "hy_v3"):
        found["exp_probs_b.bias"] = (EXPERTS,)
    return found


def _ratio(block: int) -> int:
    """How many keys of a `deepseek4` block become one."""
    return (0, 4, 128, 0)[block % 4]


def _compressor(ratio: int, width: int) -> Shapes:
    size = HEAD * (2 if ratio == 4 else 1)
    found: Shapes = {
        "attn_compressor_kv.weight": (size, width),
        "attn_compressor_gate.weight": (size, width),
        "attn_compressor_ape.weight": (ratio, size),
        "attn_compressor_norm.weight": (HEAD,),
    }
    if ratio != 4:
        return found
    return found | {
        "indexer.proj.weight": (INDEXERS, width),
        "indexer.attn_q_b.weight": (INDEXERS * INDEXER, Q_RANK),
        "indexer_compressor_kv.weight": (2 * INDEXER, width),
        "indexer_compressor_gate.weight": (2 * INDEXER, width),
        "indexer_compressor_ape.weight": (ratio, 2 * INDEXER),
        "indexer_compressor_norm.weight": (INDEXER,),
    }


def _keys(arch: str, n: int, nextn: int) -> Mapping[str, Any]:
    """Metadata of an architecture with ``n`` blocks, ``nextn`` of them NextN blocks."""
    routed: dict[str, Any] = {
        "expert_count": EXPERTS,
        "expert_used_count": USED,
        "expert_feed_forward_length": EXPERT,
        "expert_shared_count": 1,
        "expert_shared_feed_forward_length": EXPERT,
        "expert_weights_norm": True,
        "expert_weights_scale": 1.5,
        "leading_dense_block_count": 0,
    }
    ssm = {
        "ssm.conv_kernel": CONV,
        "ssm.state_size": STATE,
        "ssm.group_count": GROUPS,
        "ssm.time_step_rank": TIME_RANK,
        "ssm.inner_size": STATE * TIME_RANK,
    }
    latent = {
        "attention.q_lora_rank": Q_RANK,
        "attention.kv_lora_rank": RANK,
        "attention.key_length": RANK + ROPE,
        "attention.value_length": RANK,
        "attention.key_length_mla": PLAIN + ROPE,
        "attention.value_length_mla": VALUE,
        "rope.dimension_count": ROPE,
        "expert_gating_func": 2,
    }
    indexer = {
        "attention.indexer.head_count": INDEXERS,
        "attention.indexer.key_length": INDEXER,
        "attention.indexer.top_k": 1 << 17,
    }
    window = {"attention.sliding_window": WINDOW, "rope.freq_base_swa": 5000.0}
    if arch in QWEN:
        linear = ssm | {"full_attention_interval": 4}
        if arch != "qwen3next":
            linear["rope.dimension_sections"] = [HEAD // 4, HEAD // 8, HEAD // 8, 0]
        return linear if arch == "qwen35" else linear | routed
    if arch == "bailingmoe3":
        return routed | latent | {
            "attention.head_count_kv": [int(i % 2 == 0 or i >= n - nextn) for i in range(n)],
            "ssm.conv_kernel": CONV,
            "kda.head_dim": STATE,
            "kda.safe_gate": True,
            "kda.gate_lower_bound": -5.0,
        }  # fmt: skip
    if arch in LATENT:
        return routed | latent | (indexer if arch in INDEXED else {})
    pattern = [i % 2 == 0 for i in range(n)]
    if arch == "mimo2":
        every = [i % 2 == 0 or i >= n - nextn for i in range(n)]
        return routed | window | {
            "attention.sliding_window_pattern": every, "attention.value_scale": 0.7
        }  # fmt: skip
    if arch == "step35":
        return routed | window | {"attention.sliding_window_pattern": pattern}
    if arch == "cohere2moe":
        return routed | window | {
            "attention.sliding_window_pattern": pattern,
            "attention.layer_norm_epsilon": 1e-5,
            "attention.layer_norm_rms_epsilon": None,
            "rope.dimension_count": HEAD,
            "logit_scale": 0.5,
        }  # fmt: skip
    if arch == "deepseek4":
        return routed | indexer | {
            "attention.q_lora_rank": Q_RANK,
            "attention.sliding_window": WINDOW,
            "attention.output_group_count": GROUPED,
            "attention.output_lora_rank": GROUP_RANK,
            "attention.compress_rope_freq_base": 160000.0,
            "attention.compress_ratios": [_ratio(i) for i in range(n - nextn)] + [0] * nextn,
            "hyper_connection.count": STREAMS,
            "hyper_connection.sinkhorn_iterations": 2,
            "hyper_connection.epsilon": 1e-6,
            "hash_layer_count": 0,
            "swiglu_clamp_exp": [10.0] * n,
            "expert_gating_func": 4,
        }  # fmt: skip
    if arch == "nemotron_h_moe":
        kinds = _nemotron(n - nextn)
        return routed | ssm | {
            "feed_forward_length": [EXPERT * (k == "net") for k in kinds] + [EXPERT] * nextn,
            "attention.head_count_kv": [int(k == "attention") for k in kinds] + [1] * nextn,
            "attention.layer_norm_epsilon": 1e-5,
        }  # fmt: skip
    return routed | ({"rope.dimension_count": HEAD} if arch == "hy_v3" else {})


def _nemotron(blocks: int) -> list[str]:
    return [("linear", "attention", "net")[i % 3] for i in range(blocks)]


def write_nextn(
    path: Path,
    arch: str = "qwen35",
    *,
    width: int = 64,
    blocks: int = 4,
    nextn: int = 1,
    seed: int = 1,
    trunk: bool = True,
) -> Path:
    """A random model with NextN blocks.

    Args:
        blocks: of the trunk; of `qwen*`, every fourth has attention, the others a running state.
        trunk: whether they are in the file, which is else one for ``--head``.
    """
    rng = np.random.default_rng(seed)
    tokens, types, merges = bpe_tokens()
    w = _Writer(path, arch)
    w.add_name(path.stem)
    w.add_file_type(0)
    keys: dict[str, Any] = {
        "context_length": 512,
        "embedding_length": width,
        "block_count": blocks + nextn,
        "nextn_predict_layers": nextn or None,
        "feed_forward_length": HIDDEN,
        "attention.head_count": HEADS,
        "attention.head_count_kv": 1,
        "attention.key_length": HEAD,
        "attention.value_length": value_size(arch),
        "attention.layer_norm_rms_epsilon": 1e-6,
        "rope.dimension_count": HEAD // 2,
        "rope.freq_base": 10000.0,
    } | dict(_keys(arch, blocks + nextn, nextn))
    w.change({f"{arch}.{key}": value for key, value in keys.items()})
    w.speak(tokens, types, merges)

    def add(name: str, shape: Sequence[int]) -> None:
        values = rng.normal(0, shape[-1] ** -0.5, shape).astype(np.float32)
        if "norm." in name or name.endswith("ssm_norm.weight"):
            values = 1 + rng.normal(0, 0.2, shape).astype(np.float32)
        elif name.endswith("ssm_a"):
            values = -rng.uniform(0.1, 1.0, shape).astype(np.float32)
        elif name == "output.weight":
            values[3 + LIKELY :] *= 0.02
        if trunk or not name.startswith("blk.") or int(name.split(".")[1]) >= blocks:
            w.add_tensor(name, values)

    after = "post_attention_norm.weight"
    before_net = {"cohere2moe": "", "glm4moe": after} | dict.fromkeys(QWEN, after)
    add("token_embd.weight", (len(tokens), width))
    add("output_norm.weight", (width,))
    add("output.weight", (len(tokens), width))
    if arch == "deepseek4":
        add("output_hc_fn.weight", (STREAMS, STREAMS * width))
        add("output_hc_base.weight", (STREAMS,))
        add("output_hc_scale.weight", (1,))
    for i in range(blocks + nextn):
        block: Shapes = {"attn_norm.weight": (width,)}
        kind = _nemotron(blocks)[i] if arch == "nemotron_h_moe" and i < blocks else "whole"
        if i < blocks and (
            kind == "linear" or (arch in QWEN and (i + 1) % 4) or (arch == "bailingmoe3" and i % 2)
        ):
            block |= _linear(arch, width)
        elif kind != "net":
            block |= _attention(arch, width)
        if kind in ("whole", "net"):
            block |= _net(arch, width)
        if arch == "deepseek4" and i < blocks and _ratio(i):
            block |= _compressor(_ratio(i), width)
        if kind == "whole":
            norm = after if arch == "nemotron_h_moe" else before_net.get(arch, "ffn_norm.weight")
            block |= {norm: (width,)} if norm else {}
        if i >= blocks:
            block["nextn.eh_proj.weight"] = (width, 2 * width)
            for name in (
                "nextn.enorm",
                "nextn.hnorm",
                LAST_NORM.get(arch, "nextn.shared_head_norm"),
            ):
                block[f"{name}.weight"] = (width,)
        for name, shape in block.items():
            add(f"blk.{i}.{name}", shape)
    w.finish()
    return path
