"""Small GGUF files for tests, written from scratch: nothing is downloaded, nothing is committed.

    write_llama(path)                   a random model of about 0.5 MB that loads and generates
    write_llama(path, blocks=1, seed=2) a smaller draft with the same tokenizer
    write_mamba, write_bert, write_clip, write_lora, write_split, write_vocab_only

Every writer takes ``keys`` (metadata to add or replace; None removes) so that a test can break one
thing at a time. Needs the ``gguf`` package, which is a test dependency only.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import gguf
import numpy as np

CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
WORDS = ("the", "and", "ing", "ion", "er", "model", "token", "draft", "target", "def", "return")

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, BYTE = 1, 2, 3, 4, 6


def byte_alphabet() -> list[str]:
    """The 256 printable stand-ins of byte-level BPE (GPT-2), in byte order."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    spare = iter(range(256, 512))
    return [chr(b) if b in plain else chr(next(spare)) for b in range(256)]


def bpe_tokens(extra: Sequence[str] = ()) -> tuple[list[str], list[int], list[str]]:
    """A byte-level BPE vocabulary: (tokens, types, merges). Merges build every listed word."""
    tokens = list(SPECIALS) + byte_alphabet()
    types = [CONTROL] * len(SPECIALS) + [NORMAL] * 256
    merges: list[str] = []
    for word in (*WORDS, *("Ġ" + word for word in WORDS), *extra):
        piece = word[0]
        for letter in word[1:]:
            merge = f"{piece} {letter}"
            piece += letter
            if merge not in merges:
                merges.append(merge)
            if piece not in tokens:
                tokens.append(piece)
                types.append(NORMAL)
    return tokens, types, merges


def spm_tokens() -> tuple[list[str], list[int], list[float]]:
    """A SentencePiece vocabulary with byte fallback: (tokens, types, scores)."""
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256))]
    types = [UNKNOWN, CONTROL, CONTROL] + [BYTE] * 256
    tokens += ["▁", *(f"▁{word}" for word in WORDS), *"abcdefghijklmnopqrstuvwxyz"]
    types += [NORMAL] * (len(tokens) - len(types))
    return tokens, types, [-float(i) for i in range(len(tokens))]


class _Writer(gguf.GGUFWriter):  # type: ignore[misc]
    """A GGUFWriter whose keys can be replaced or removed afterwards."""

    def describe(
        self,
        path: Path,
        *,
        width: int,
        blocks: int,
        hidden: int,
        heads: int,
        heads_kv: int | Sequence[int] = 1,
        size: int | None = None,
        rope: int | None = None,
        context: int = 512,
        eps: float = 1e-5,
        base: float = 10000.0,
        file_type: int = 0,
    ) -> None:
        """Add the sizes of a model; ``size``: of keys and values, where they are named."""
        self.add_name(path.stem)
        self.add_context_length(context)
        self.add_embedding_length(width)
        self.add_block_count(blocks)
        self.add_feed_forward_length(hidden)
        self.add_head_count(heads)
        self.add_head_count_kv(heads_kv)
        if size is not None:
            self.add_key_length(size)
            self.add_value_length(size)
        self.add_layer_norm_rms_eps(eps)
        self.add_rope_dimension_count(rope or size or width // heads)
        self.add_rope_freq_base(base)
        self.add_file_type(file_type)

    def speak(
        self,
        tokens: Sequence[str],
        types: Sequence[int] | None,
        merges: Sequence[str],
        template: str | None = None,
    ) -> None:
        """Add a byte-level BPE tokenizer, whose tokens 0 and 2 begin and end texts."""
        self.add_tokenizer_model("gpt2")
        self.add_tokenizer_pre("gpt-2")
        self.add_token_list(list(tokens))
        if types is not None:
            self.add_token_types(list(types))
        self.add_token_merges(list(merges))
        self.add_bos_token_id(0)
        self.add_eos_token_id(2)
        self.add_add_bos_token(False)
        if template is not None:
            self.add_chat_template(template)

    def change(self, keys: Mapping[str, Any]) -> None:
        for key, value in keys.items():
            self.kv_data[0].pop(key, None)
            if value is None:
                continue
            if isinstance(value, tuple):  # (value, GGUFValueType) for an exact type
                self.add_key_value(key, value[0], value[1])
            elif isinstance(value, bool):
                self.add_bool(key, value)
            elif isinstance(value, int):
                self.add_uint32(key, value)
            elif isinstance(value, float):
                self.add_float32(key, value)
            elif isinstance(value, str):
                self.add_string(key, value)
            else:
                self.add_array(key, value)

    def finish(self) -> None:
        self.write_header_to_file()
        self.write_kv_data_to_file()
        self.write_tensors_to_file()
        self.close()


def _quantizer(kind: str) -> Callable[[np.ndarray], tuple[np.ndarray, Any]]:
    target = gguf.GGMLQuantizationType[kind]

    def quantize(weights: np.ndarray) -> tuple[np.ndarray, Any]:
        return gguf.quants.quantize(weights.astype(np.float32), target), target

    return quantize


def write_llama(
    path: Path,
    *,
    width: int = 64,
    blocks: int = 2,
    heads: int = 2,
    heads_kv: int = 1,
    hidden: int = 128,
    context: int = 512,
    quant: str = "F32",
    file_type: int | None = None,
    seed: int = 1,
    scale: float = 0.5,
    architecture: str = "llama",
    tokens: Sequence[str] | None = None,
    types: Sequence[int] | None = None,
    merges: Sequence[str] | None = None,
    template: str | None = CHATML,
    tied: bool = False,
    experts: int = 0,
    omit: Sequence[str] = (),
    split_tensors: int = 0,
    keys: Mapping[str, Any] | None = None,
    weights: Callable[[str, np.ndarray], np.ndarray] | None = None,
) -> Path:
    """A random ``llama`` model with a byte-level BPE tokenizer and a ChatML template.

    Args:
        quant: tensor type of the matrices ("F32", "F16", "Q8_0", "Q4_0", "Q5_1" …).
        scale: standard deviation of the random output matrix: larger is more certain.
        tied: leave ``output.weight`` out, so that the embedding table is the output matrix.
        experts: how many feed-forwards each block has, of which a token uses two; 0 is one.
        omit: leave tensors with one of these in their names out.
        split_tensors: tensors per part; 0 writes one file.
        keys: metadata to add, replace, or (None) remove; (value, GGUFValueType) sets the type.
        weights: called with (name, values) for each tensor; returns what to write instead.
    """
    rng = np.random.default_rng(seed)
    if tokens is None:
        tokens, types, merges = bpe_tokens()
    n_vocab = len(tokens)
    head = width // heads
    writer = _Writer(path, architecture, split_max_tensors=split_tensors)
    default_type = {"F32": 0, "F16": 1, "Q4_0": 2, "Q4_1": 3, "Q8_0": 7, "Q5_0": 8, "Q5_1": 9}
    file_type = default_type.get(quant, 1024) if file_type is None else file_type
    sizes = {"width": width, "blocks": blocks, "hidden": hidden, "heads": heads}
    writer.describe(path, **sizes, heads_kv=heads_kv, context=context, file_type=file_type)
    if experts:
        writer.add_expert_count(experts)
        writer.add_expert_used_count(2)
    writer.speak(tokens, types, merges or [], template)
    writer.add_pad_token_id(0)
    writer.change(keys or {})

    quantize = _quantizer(quant)

    def add(name: str, *shape: int, deviation: float | None = None) -> None:
        if any(part in name for part in omit):
            return
        if len(shape) == 1:
            values = np.ones(shape, np.float32)
        else:
            values = rng.normal(0.0, deviation or shape[-1] ** -0.5, shape).astype(np.float32)
        if weights is not None:
            values = weights(name, values)
        if values.ndim == 1 or quant == "F32":
            writer.add_tensor(name, values)
        else:
            packed, kind = quantize(values)
            writer.add_tensor(name, packed, raw_dtype=kind)

    add("token_embd.weight", n_vocab, width, deviation=1.0)
    for i in range(blocks):
        add(f"blk.{i}.attn_norm.weight", width)
        add(f"blk.{i}.attn_q.weight", heads * head, width)
        add(f"blk.{i}.attn_k.weight", heads_kv * head, width)
        add(f"blk.{i}.attn_v.weight", heads_kv * head, width)
        add(f"blk.{i}.attn_output.weight", width, heads * head)
        add(f"blk.{i}.ffn_norm.weight", width)
        if experts:
            add(f"blk.{i}.ffn_gate_inp.weight", experts, width)
            add(f"blk.{i}.ffn_gate_exps.weight", experts, hidden, width)
            add(f"blk.{i}.ffn_up_exps.weight", experts, hidden, width)
            add(f"blk.{i}.ffn_down_exps.weight", experts, width, hidden)
        else:
            add(f"blk.{i}.ffn_gate.weight", hidden, width)
            add(f"blk.{i}.ffn_up.weight", hidden, width)
            add(f"blk.{i}.ffn_down.weight", width, hidden)
    add("output_norm.weight", width)
    if not tied:
        add("output.weight", n_vocab, width, deviation=scale)
    writer.finish()
    return path


def write_split(path: Path, *, tensors_per_part: int = 8, **options: Any) -> list[Path]:
    """A ``write_llama`` model in several files, in order; ``path`` is the name unsplit."""
    write_llama(path, split_tensors=tensors_per_part, **options)
    return sorted(path.parent.glob(f"{path.stem}-*-of-*.gguf"))


def write_spm(path: Path, *, specials: Mapping[str, int] | None = None, **options: Any) -> Path:
    """A ``llama`` model with a SentencePiece tokenizer; ``specials`` are more tokens by type."""
    tokens, types, scores = spm_tokens()
    for text, kind in (specials or {}).items():
        tokens, types, scores = [*tokens, text], [*types, kind], [*scores, 0.0]
    keys = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.pre": None,
        "tokenizer.ggml.merges": None,
        "tokenizer.ggml.scores": scores,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.add_bos_token": True,
        **options.pop("keys", {}),
    }
    return write_llama(path, tokens=tokens, types=types, keys=keys, **options)


def write_mamba(path: Path, *, width: int = 64, blocks: int = 2, seed: int = 1) -> Path:
    """A random recurrent model: it loads and generates, but cannot roll back."""
    rng = np.random.default_rng(seed)
    tokens, types, merges = bpe_tokens()
    inner, state, conv, rank = 2 * width, 16, 4, max(width // 16, 1)
    writer = _Writer(path, "mamba")
    writer.add_name(path.stem)
    writer.add_context_length(1024)
    writer.add_embedding_length(width)
    writer.add_feed_forward_length(0)
    writer.add_head_count(0)
    writer.add_block_count(blocks)
    writer.add_ssm_conv_kernel(conv)
    writer.add_ssm_inner_size(inner)
    writer.add_ssm_state_size(state)
    writer.add_ssm_time_step_rank(rank)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_file_type(0)
    writer.speak(tokens, types, merges)

    def add(name: str, *shape: int) -> None:
        writer.add_tensor(name, rng.normal(0, 0.1, shape).astype(np.float32))

    add("token_embd.weight", len(tokens), width)
    for i in range(blocks):
        writer.add_tensor(f"blk.{i}.attn_norm.weight", np.ones(width, np.float32))
        add(f"blk.{i}.ssm_in.weight", 2 * inner, width)
        add(f"blk.{i}.ssm_conv1d.weight", inner, conv)
        add(f"blk.{i}.ssm_conv1d.bias", inner)
        add(f"blk.{i}.ssm_x.weight", rank + 2 * state, inner)
        add(f"blk.{i}.ssm_dt.weight", inner, rank)
        add(f"blk.{i}.ssm_dt.bias", inner)
        writer.add_tensor(f"blk.{i}.ssm_a", -np.ones((inner, state), np.float32))
        writer.add_tensor(f"blk.{i}.ssm_d", np.ones(inner, np.float32))
        add(f"blk.{i}.ssm_out.weight", width, inner)
    writer.add_tensor("output_norm.weight", np.ones(width, np.float32))
    writer.finish()
    return path


def _simple(path: Path, architecture: str, keys: Mapping[str, Any]) -> Path:
    writer = _Writer(path, architecture)
    writer.add_name(path.stem)
    writer.change(keys)
    writer.add_tensor("dummy.weight", np.zeros((4, 32), np.float32))
    writer.finish()
    return path


def write_bert(path: Path) -> Path:
    """The header of an embedding model (an encoder)."""
    return _simple(
        path,
        "bert",
        {
            "bert.block_count": 2,
            "bert.context_length": 512,
            "bert.embedding_length": 32,
            "bert.pooling_type": 1,
            "bert.attention.causal": False,
            "tokenizer.ggml.model": "bert",
            "tokenizer.ggml.tokens": ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "a"],
        },
    )


def write_clip(path: Path) -> Path:
    """The header of a vision projector (mmproj)."""
    return _simple(path, "clip", {"general.type": "mmproj", "clip.has_vision_encoder": True})


def write_lora(path: Path) -> Path:
    """The header of a LoRA adapter."""
    return _simple(path, "llama", {"general.type": "adapter", "adapter.type": "lora"})


def write_windows(path: Path, *, window: int = 32, **options: Any) -> Path:
    """A random ``cohere2`` model: three of four layers see only a window."""
    keys = {
        "cohere2.attention.sliding_window": window,
        "cohere2.logit_scale": 1.0,
        "cohere2.attention.layer_norm_epsilon": 1e-5,
    }
    return write_llama(
        path, architecture="cohere2", blocks=4, tied=True, omit=["ffn_norm"], keys=keys, **options
    )


def write_adapter(
    path: Path, *, width: int = 64, rank: int = 4, keys: Mapping[str, Any] | None = None
) -> Path:
    """A random LoRA adapter for the query matrix of the first block of ``write_llama``'s model."""
    rng = np.random.default_rng(3)
    writer = _Writer(path, "llama")
    writer.add_type("adapter")
    writer.add_string("adapter.type", "lora")
    writer.add_float32("adapter.lora.alpha", 8.0)
    writer.change(keys or {})
    for part, shape in (("a", (rank, width)), ("b", (width, rank))):
        values = rng.normal(0.0, 1.0, shape).astype(np.float32)
        writer.add_tensor(f"blk.0.attn_q.weight.lora_{part}", values)
    writer.finish()
    return path


def write_vocab_only(path: Path, tokens: Sequence[str], **keys: Any) -> Path:
    """A tokenizer without weights. Keyword arguments replace ``tokenizer.ggml.*`` keys."""
    writer = _Writer(path, "llama")
    writer.add_name(path.stem)
    writer.speak(tokens, [NORMAL] * len(tokens), [])
    writer.change({"tokenizer.ggml.bos_token_id": None, "tokenizer.ggml.eos_token_id": None})
    writer.change({"tokenizer.ggml.add_bos_token": None})
    writer.change({f"tokenizer.ggml.{key}": value for key, value in keys.items()})
    writer.finish()
    return path


# -- a bundled model with other tokens --


_IDS = tuple(f"tokenizer.ggml.{name}_token_id" for name in ("bos", "eos", "eot", "padding"))
_ROWS = ("token_embd.weight", "output.weight")


def with_tokens(
    source: Path,
    out: Path,
    order: Sequence[int],
    renamed: Sequence[int] = (),
    names_of: str = "unheard{}",
) -> Path:
    """Write ``source`` with token ``order[i]`` as number i.

    Args:
        renamed: old numbers of tokens that get a text that no tokenizer here has: ``names_of``.
    """
    reader = gguf.GGUFReader(source)
    names = {key: field.contents() for key, field in reader.fields.items()}
    tokens = list(names["tokenizer.ggml.tokens"])
    for old in renamed:
        tokens[old] = names_of.format(old)
    place = {old: new for new, old in enumerate(order)}
    w = _Writer(out, names["general.architecture"])
    for key, field in reader.fields.items():
        if key.startswith("GGUF.") or key == "general.architecture":
            continue
        kind, value = field.types[0], names[key]
        if key == "tokenizer.ggml.tokens":
            w.add_token_list([tokens[old] for old in order])
        elif key == "tokenizer.ggml.token_type":
            w.add_token_types([value[old] for old in order])
        elif kind == gguf.GGUFValueType.ARRAY:
            w.add_array(key, value)
        else:
            w.add_key_value(key, place[value] if key in _IDS else value, kind)
    for tensor in reader.tensors:
        data = np.array(tensor.data)
        if tensor.name in _ROWS:
            data = data[np.array(order)]
        w.add_tensor(tensor.name, data, raw_dtype=tensor.tensor_type)
    w.finish()
    return out


def with_tensor(source: Path, out: Path, name: str, kind: str = "F32") -> Path:
    """Write ``source`` with one more tensor, four rows of 64 ones as ``kind``."""
    w = _copy(source, out)
    packed = gguf.GGMLQuantizationType[kind]
    w.add_tensor(name, gguf.quantize(np.ones((4, 64), np.float32), packed), raw_dtype=packed)
    w.finish()
    return out


def with_template(source: Path, out: Path, template: str) -> Path:
    """Write ``source`` with another chat template."""
    _copy(source, out, {"tokenizer.chat_template": template}).finish()
    return out


def _copy(source: Path, out: Path, changed: Mapping[str, Any] = MappingProxyType({})) -> _Writer:
    """``source`` with values of its header changed, not finished yet."""
    reader = gguf.GGUFReader(source)
    w = _Writer(out, reader.fields["general.architecture"].contents())
    for key, field in reader.fields.items():
        if key.startswith("GGUF.") or key == "general.architecture":
            continue
        sub = field.types[-1] if field.types[0] == gguf.GGUFValueType.ARRAY else None
        w.add_key_value(key, changed.get(key, field.contents()), field.types[0], sub)
    for tensor in reader.tensors:
        w.add_tensor(tensor.name, np.array(tensor.data), raw_dtype=tensor.tensor_type)
    return w


# -- a random model with multi-head latent attention --


def write_latent(path: Path, *, width: int = 64, blocks: int = 2, quant: str = "F32") -> Path:
    """A dense ``deepseek2`` model of the layout that DeepSeek V2 and later have."""
    rng = np.random.default_rng(1)
    tokens, types, merges = bpe_tokens()
    heads, rank, rope, plain, value, hidden = 2, 64, 32, 32, 32, 2 * width
    arch = "deepseek2"
    writer = _Writer(path, arch)
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

    quantize = _quantizer(quant)

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
