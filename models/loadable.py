"""The test that llama.cpp can run a file, made from its header alone.

A bad call into llama.cpp ends the process (``GGML_ASSERT``, an exception across the C boundary),
so every condition that it asserts while loading or tokenizing is tested here first and reported as
a sentence. A check that llama.cpp makes itself is repeated only if our sentence is better.
Sources: llama-model.cpp ``load_hparams``, llama-vocab.cpp ``load``, and the mutation test.
"""

from __future__ import annotations

import math
import re
from typing import Literal

from specllama.errors import BadGguf, CannotLoad, PairIncompatible, UnsupportedModel
from specllama.models.companions import HEADS, SIDECARS, advice, kind_of
from specllama.models.gguf import GgufHeader
from specllama.models.gguf_format import DOWNLOAD_AGAIN

Role = Literal["target", "draft", "head"]

MAX_LAYERS = 512
MAX_EXPERTS = 1024
MAX_CONTEXT = 1 << 27
MAX_WIDTH = 1 << 20

# architectures that write no text here, and why; the words go on after the file's name
NO_GENERATORS = {
    "bert modern-bert nomic-bert nomic-bert-moe neo-bert jina-bert-v2 jina-bert-v3 eurobert "
    "gemma-embedding llama-embed t5encoder":
        " is an encoder ({}): it makes embeddings and cannot write text",
    "t5": " is an encoder-decoder model ({}), which specllama does not run",
    "dream llada llada-moe rnd1":
        " is a diffusion model ({}): it does not write from left to right",
    "wavtokenizer-dec qwen3tts pockettts": " is a speech model ({}), not a text model",
    # it gives the first rows of a pass for those asked for
    "cogvlm": ": llama.cpp mixes up the rows of {} models, so their text would be wrong",
    "controlvector": " is a control vector, not a model",
}  # fmt: skip
TOKENIZERS = frozenset(
    {"llama", "bert", "gpt2", "t5", "rwkv", "plamo2", "gemma4", "hybriddna", "whitespace"}
)
ROPE_SCALINGS = frozenset({"none", "linear", "yarn", "longrope"})
UNSPECIFIED = (-1, 2**32 - 1)  # LLAMA_POOLING_TYPE_UNSPECIFIED, as llama.cpp itself saves it
BYTE_TOKEN = 6
# integers, and formats that only ever hold activations
NOT_WEIGHTS = frozenset({"I8", "I16", "I32", "I64", "F64", "Q8_1", "Q8_K"})

_ELEMENTWISE = re.compile(r"(norm[a-z_]*\.weight|\.bias)$")
_LORA_PARTS = (".lora_a", ".lora_b")
_GENERATOR_HINT = "choose a text-generation GGUF: specllama hub search"


class VocabularyOnly(UnsupportedModel):
    """A file with a tokenizer and no weights."""


def check_loadable(header: GgufHeader, role: Role = "target") -> None:
    """Refuse a file that llama.cpp could not run in this role, before loading it.

    Args:
        role: "target" and "draft" must be complete text generators; "head" is a drafting head that
            runs on the target's hidden states.

    Raises:
        UnsupportedModel: a sound file of another kind (projector, encoder, adapter, vocabulary …).
        BadGguf: the header contradicts itself or holds values on which llama.cpp aborts.
    """
    _check_kind(header, role)
    _check_numbers(header)
    _check_experts(header)
    _check_tokenizer(header, role)
    _check_shapes(header)
    _check_types(header)


def _damaged(header: GgufHeader, why: str) -> BadGguf:
    """Return the error for a file with a damaged header; ``why`` goes on after its name."""
    return BadGguf(header.path.name + why, DOWNLOAD_AGAIN)


def _check_kind(header: GgufHeader, role: Role) -> None:
    file, arch = header.path.name, header.architecture
    if header.rows and role != "draft":
        raise UnsupportedModel(
            f"{file} knows only {header.rows:,} of its tokens: a model that drafts, and writes no "
            "text",
            "give it beside its target: specllama chat -m TARGET -d FILE",
        )
    sidecar = kind_of(header)
    if sidecar and not (role == "head" and sidecar in HEADS):
        raise UnsupportedModel(
            f"{file} is {SIDECARS[sidecar]}, not a model of its own", advice(sidecar)
        )
    if header.kind == "adapter" or "adapter.type" in header.metadata:
        raise UnsupportedModel(
            f"{file} is a {header.text('adapter.type') or 'LoRA'} adapter, not a whole model",
            "give it to its base model: --lora FILE",
        )
    if not arch:
        raise _damaged(header, " does not say its architecture (general.architecture)")
    why = next((why for names, why in NO_GENERATORS.items() if arch in names.split()), "")
    if not why and header.n_tensors == 0:
        raise VocabularyOnly(f"{file} holds a vocabulary only, no weights", _GENERATOR_HINT)
    if header.flag(header.own("attention.causal")) is False and role != "head":
        why = why or " is an encoder (attention is not causal): it cannot write text"
    if header.integer(header.own("pooling_type")) not in (None, 0, *UNSPECIFIED):
        why = why or " is an embedding or ranking model (its output is pooled)"
    if why:
        raise UnsupportedModel(file + why.format(arch), _GENERATOR_HINT)


def _u32(
    header: GgufHeader, name: str, low: int, high: int, *, required: bool = True
) -> int | None:
    """Read a 32-bit key of the architecture; check its presence, type and range."""
    key = header.own(name)
    if key not in header.kinds:
        if required:
            raise _damaged(header, f": {key} is missing")
        return None
    if (kind := header.kinds[key]) != "u32":
        raise BadGguf(f"{header.path.name}: {key} has the type {kind}, llama.cpp needs u32")
    value = header.integer(key)
    assert value is not None
    if not low <= value <= high:
        raise _damaged(header, f": {key} is {value}; it must be {low} to {high}")
    return value


def _layered(header: GgufHeader, name: str, high: int) -> tuple[int, ...]:
    """Read a number, or one per layer: u32 or i32, as llama.cpp's get_key_or_arr demands."""
    key, file = header.own(name), header.path.name
    array = header.arrays.get(key)
    if array is None:
        value = _u32(header, name, 0, high, required=False)
        return () if value is None else (value,)
    if array.kind not in ("u32", "i32"):
        raise BadGguf(f"{file}: {key} is an array of {array.kind}, not of 32-bit numbers")
    if array.count != header.block_count:
        raise BadGguf(f"{file}: {key} has {array.count} values for {header.block_count} layers")
    values = tuple(header.array(key))
    if any(not 0 <= value <= high for value in values):
        raise _damaged(header, f": {key} holds a value outside 0 to {high}")
    return values


def _check_numbers(header: GgufHeader) -> None:
    file = header.path.name
    _u32(header, "block_count", 1, MAX_LAYERS)
    _u32(header, "context_length", 1, MAX_CONTEXT)
    width = _u32(header, "embedding_length", 1, MAX_WIDTH) or 0
    _layered(header, "feed_forward_length", 1 << 24)
    heads = _layered(header, "attention.head_count", 1 << 16)
    heads_kv = _layered(header, "attention.head_count_kv", 1 << 16)
    for i, (n, n_kv) in enumerate(zip(heads, heads_kv, strict=False)):
        if n_kv and n % n_kv:
            raise _damaged(header, f": layer {i} shares {n_kv} KV heads among {n} heads")
    if heads and heads[0] > width:
        raise _damaged(header, f": {heads[0]} heads in a width of {width}")
    _check_rotations(header)
    _u32(header, "nextn_predict_layers", 0, header.block_count, required=False)
    ratios = header.own("attention.compress_ratios")
    if header.architecture == "deepseek4" and not any(header.array(ratios)):
        raise BadGguf(f"{file}: {ratios} is 0 for every layer, by which llama.cpp would divide")
    scaling = header.own("rope.scaling.type")
    if scaling in header.kinds and header.text(scaling) not in ROPE_SCALINGS:
        said = header.metadata.get(scaling)
        raise BadGguf(f"{file}: {scaling} is {said!r}, which llama.cpp aborts on")
    for name, positive in (
        ("attention.layer_norm_rms_epsilon", False),
        ("attention.layer_norm_epsilon", False),
        ("rope.freq_base", True),
        ("rope.scaling.factor", False),
    ):
        key = header.own(name)
        if key not in header.kinds:
            continue
        value = header.number(key)
        if header.kinds[key] != "f32" or value is None or not math.isfinite(value):
            raise _damaged(header, f": {key} is not a finite 32-bit float")
        if value < 0 or (positive and value == 0):
            raise _damaged(header, f": {key} is {value:g}, which llama.cpp aborts on")


def _check_rotations(header: GgufHeader) -> None:
    """Check that each head turns pairs of values, and no more than there are; with windows or
    without."""
    turned = 0
    for suffix in ("", "_swa"):
        for part in ("key", "value"):
            _u32(header, f"attention.{part}_length{suffix}", 0, MAX_WIDTH, required=False)
        size = header.integer(header.own("attention.key_length" + suffix)) or 0
        key = "rope.dimension_count" + suffix
        # what is not said is as without windows, and there all of a head
        turned = _u32(header, key, 0, MAX_WIDTH, required=False) or turned or size
        if turned % 2:
            raise _damaged(header, f": {header.own(key)} is odd ({turned})")
        if size and turned > size:
            raise _damaged(header, f": {turned} values turn in heads of {size}")


def _check_experts(header: GgufHeader) -> None:
    experts, groups, groups_used = (
        _u32(header, f"expert_{name}count", 0, MAX_EXPERTS, required=False) or 0
        for name in ("", "group_", "group_used_")
    )
    used = max(_layered(header, "expert_used_count", MAX_EXPERTS), default=0)
    if header.architecture in ("hunyuan-dense", "hunyuan_vl") and experts <= 1:
        return
    sound = (0 < used <= experts and groups < experts) if experts else used == groups == 0
    if groups > 1:
        sound = sound and experts % groups == 0 and 0 < groups_used < groups
    if not sound:
        counts = f"{used} of {experts} used, {groups_used} of {groups} groups"
        raise _damaged(header, f": impossible expert counts ({counts})")


def _check_tokenizer(header: GgufHeader, role: Role) -> None:
    file, model = header.path.name, header.tokenizer_model
    if model is None or model in ("no_vocab", "none"):
        if role == "head" and model is not None:
            return
        raise UnsupportedModel(
            f"{file} has no tokenizer, so it cannot read or write text", _GENERATOR_HINT
        )
    if model not in TOKENIZERS:
        raise UnsupportedModel(f"{file}: llama.cpp does not know the tokenizer {model!r}")
    tokens = header.arrays.get("tokenizer.ggml.tokens")
    if tokens is None or tokens.kind != "str" or tokens.count == 0:
        raise _damaged(header, " has no token list (tokenizer.ggml.tokens)")
    for key, kinds in (
        ("tokenizer.ggml.scores", ("f32", "i32")),
        ("tokenizer.ggml.token_type", ("i32",)),
    ):
        if key not in header.kinds:
            continue
        array = header.arrays.get(key)
        if array is None or array.kind not in kinds:
            raise _damaged(header, f": {key} is not an array of {' or '.join(kinds)}")
        if array.count < tokens.count:
            raise _damaged(header, f": {key} has {array.count} values for {tokens.count} tokens")
    merges = header.arrays.get("tokenizer.ggml.merges")
    if model in ("gpt2", "gemma4") and header.pre_tokenizer != "kimi-k2" and merges is None:
        raise _damaged(header, " has a BPE tokenizer without merges")
    if "tokenizer.ggml.merges" in header.kinds and (merges is None or merges.kind != "str"):
        raise _damaged(header, ": tokenizer.ggml.merges is not a list of strings")
    for name in ("bos", "eos"):
        value, size = header.integer(f"tokenizer.ggml.{name}_token_id"), header.vocab_size
        # -1 stored unsigned means "none"
        if value not in (None, *UNSPECIFIED) and not 0 <= (value or 0) < size:
            raise _damaged(
                header, f": the {name} token is {value}, outside the vocabulary of {size}"
            )
    _check_token_texts(header, model)


def _check_token_texts(header: GgufHeader, model: str) -> None:
    if header.token_texts is None or not header.token_texts.differ():
        texts = header.token_bytes
        index = dict(zip(texts, range(len(texts)), strict=True))
        if len(index) != len(texts):
            first = next(i for i, text in enumerate(texts) if index[text] != i)
            both = f"the tokens {first} and {index[texts[first]]} are both"
            raise _damaged(header, f": {both} {texts[first].decode('utf-8', 'replace')!r}")
    if model not in ("llama", "t5"):
        return
    # SentencePiece falls back to byte tokens and looks them up without a check
    for i in header.tokens_of_type(BYTE_TOKEN):
        text = header.token_text(i)
        if len(text) != 6 or not text.startswith(b"<0x") or not text.endswith(b">"):
            raise _damaged(header, f": byte token {i} is {text.decode('utf-8', 'replace')!r}")
    if model == "llama":
        known = header.texts_of_bytes()
        for byte in range(256):
            if b"<0x%02X>" % byte not in known and bytes([byte]) not in known:
                raise _damaged(header, f": its tokenizer lacks the byte token <0x{byte:02X}>")


def elementwise(name: str) -> bool:
    """True if a tensor is multiplied or added value by value, which CPUs do in F32 alone."""
    return _ELEMENTWISE.search(name) is not None


def _check_types(header: GgufHeader) -> None:
    """Refuse types on which llama.cpp's CPU operations abort in the middle of a pass."""
    for tensor in header.tensors:
        if tensor.name == "d2t":
            continue
        if tensor.type in NOT_WEIGHTS or (elementwise(tensor.name) and tensor.type != "F32"):
            said = f"tensor {tensor.name!r} has the type {tensor.type}"
            raise _damaged(header, f": {said}, with which llama.cpp cannot compute")


def _check_shapes(header: GgufHeader) -> None:
    table, width = "token_embd.weight", header.embedding_length
    tokens = header.rows or header.vocab_size
    if table not in header.by_name:
        return
    shape = header.by_name[table].shape
    if len(shape) != 2 or shape[1] != tokens:
        rows = shape[1] if len(shape) > 1 else 1
        raise _damaged(header, f": {rows} embedding rows for {tokens} tokens")
    if shape[0] != width:
        raise _damaged(header, f": embeddings of width {shape[0]} in a model of width {width}")


def check_adapter(adapter: GgufHeader, target: GgufHeader) -> None:
    """Refuse an adapter that llama.cpp would refuse, or on which it would end the process.

    Raises:
        CannotLoad: it is no LoRA adapter, or a damaged one.
        PairIncompatible: it is one of another model.
    """
    file = adapter.path.name
    if adapter.kind != "adapter" or adapter.text("adapter.type") != "lora":
        raise CannotLoad(f"{file} is not a LoRA adapter", "choose the file of one with --lora")
    if adapter.kinds.get("adapter.lora.alpha", "f32") != "f32":
        raise CannotLoad(f"{file}: adapter.lora.alpha is not a 32-bit float")
    if any(key.startswith("adapter.alora.") for key in (*adapter.kinds, *adapter.arrays)):
        raise CannotLoad(f"{file} is an activated LoRA, which is not supported")
    if adapter.architecture != target.architecture:
        raise PairIncompatible(
            f"{file} is an adapter for {adapter.architecture or 'another'} models, "
            f"{target.path.name} is {target.architecture}"
        )
    if not adapter.tensors:
        raise CannotLoad(f"{file} holds no tensors")
    for tensor in adapter.tensors:
        name = next(
            (tensor.name.removesuffix(p) for p in _LORA_PARTS if tensor.name.endswith(p)), ""
        )
        if name and name not in target.by_name:
            raise PairIncompatible(f"{file} changes {name}, which {target.path.name} does not have")
