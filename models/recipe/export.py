"""Export of a trained checkpoint as GGUF: F32, or with every matrix as Q4_0 or Q8_0.

Q4_0 and Q8_0 are the types whose products llama.cpp computes bit-identically for one row and for
a small batch on CPU. So the shipped files hold no K-quants and no F16: embeddings and output are
Q8_0, the matrices of the blocks Q4_0 (target) or Q8_0 (draft), norms F32. The blocks are packed
with the `gguf` package, whose rounding is llama.cpp's reference rounding.

``python -m specllama.models.recipe.export runs/target.pt runs/tokenizer.json OUT.gguf --type q4_0``
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as Q
from gguf.quants import quantize

from specllama.models.recipe.model import Tiny
from specllama.models.recipe.scale import LlamaShape
from specllama.models.recipe.tokenizer import CHAT_TEMPLATE, SPECIAL

TYPES = {"f32": Q.F32, "q4_0": Q.Q4_0, "q8_0": Q.Q8_0}
EDGE = {"token_embd.weight", "output.weight"}
AUTHOR = "the specllama contributors"
DESCRIPTION = (
    "A very small language model for demos and tests of speculative decoding, trained on "
    "generated text about four kinds of tasks. Not a useful assistant."
)


def load_checkpoint(path: Path) -> tuple[Tiny, dict[str, Any]]:
    """Load the model of a checkpoint and the notes of its training run."""
    data = torch.load(path, map_location="cpu", weights_only=True)
    model = Tiny(LlamaShape(**data["shape"]))
    model.load_state_dict(data["weights"])
    model.eval()
    return model, dict(data["info"])


def tensor_type(name: str, kind: Q) -> Q:
    """Return the type a tensor is stored in when the matrices of the blocks are of `kind`."""
    if "norm" in name or kind == Q.F32:
        return Q.F32
    return Q.Q8_0 if name in EDGE else kind


def add_hyperparameters(w: gguf.GGUFWriter, s: LlamaShape) -> None:
    """Add the keys of llama.cpp's `llama` architecture."""
    w.add_context_length(s.context)
    w.add_embedding_length(s.width)
    w.add_block_count(s.layers)
    w.add_feed_forward_length(s.hidden)
    w.add_head_count(s.heads)
    w.add_head_count_kv(s.kv_heads)
    w.add_key_length(s.head_size)
    w.add_value_length(s.head_size)
    w.add_rope_dimension_count(s.head_size)
    w.add_rope_freq_base(s.rope_base)
    w.add_layer_norm_rms_eps(s.eps)
    w.add_vocab_size(s.vocab)


def add_tokenizer(w: gguf.GGUFWriter, path: Path, pre: str = "gpt-2") -> None:
    """Add tokens, merges, special ids and the chat template; `pre` is llama.cpp's name of the
    split."""
    data = json.loads(path.read_text())
    vocab: dict[str, int] = data["model"]["vocab"]
    tokens = sorted(vocab, key=lambda t: vocab[t])
    merges = [m if isinstance(m, str) else " ".join(m) for m in data["model"]["merges"]]
    bos, _, im_end = (vocab[mark] for mark in SPECIAL)
    control, normal = int(gguf.TokenType.CONTROL), int(gguf.TokenType.NORMAL)
    w.add_tokenizer_model("gpt2")
    w.add_tokenizer_pre(pre)
    w.add_token_list(tokens)
    w.add_token_types([control if t in SPECIAL else normal for t in tokens])
    w.add_token_merges(merges)
    w.add_bos_token_id(bos)
    w.add_eos_token_id(im_end)
    w.add_eot_token_id(im_end)
    w.add_pad_token_id(bos)
    w.add_add_bos_token(False)
    w.add_add_eos_token(False)
    w.add_chat_template(CHAT_TEMPLATE)


def export(
    checkpoint: Path, tokenizer: Path, out: Path, kind: str, name: str, pre: str = "gpt-2"
) -> None:
    """Write `out`, whole or not at all."""
    model, info = load_checkpoint(checkpoint)
    part = out.with_suffix(".part")
    w = gguf.GGUFWriter(part, "llama")
    w.add_name(name)
    w.add_author(AUTHOR)
    w.add_license("MIT")
    w.add_description(DESCRIPTION)
    w.add_uint32("specllama.trained_tokens", int(info["tokens"]))
    w.add_uint32("specllama.trained_steps", int(info["step"]))
    w.add_file_type(
        {
            "f32": gguf.LlamaFileType.ALL_F32,
            "q4_0": gguf.LlamaFileType.MOSTLY_Q4_0,
            "q8_0": gguf.LlamaFileType.MOSTLY_Q8_0,
        }[kind]
    )
    w.add_quantization_version(gguf.GGML_QUANT_VERSION)
    add_hyperparameters(w, model.s)
    add_tokenizer(w, tokenizer, pre)
    for key, value in model.state_dict().items():
        to = tensor_type(key, TYPES[kind])
        data = value.float().numpy()
        if to == Q.F32:
            w.add_tensor(key, np.ascontiguousarray(data))
        else:
            w.add_tensor(key, quantize(data, to), raw_dtype=to)
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_tensors_to_file()
    w.close()
    part.replace(out)


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("tokenizer", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--type", choices=sorted(TYPES), default="q4_0")
    parser.add_argument("--name", default="")
    a = parser.parse_args()
    export(a.checkpoint, a.tokenizer, a.out, a.type, a.name or a.out.stem)


if __name__ == "__main__":
    main()
