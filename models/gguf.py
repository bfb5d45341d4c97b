"""The header of a GGUF file, read without loading the model.

    header = read_header(path)          # milliseconds, bounded memory

``read_header`` checks the container (``gguf_format``), not its contents: ``loadable`` says whether
llama.cpp can run it.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from specllama.errors import BadGguf, ModelUnavailable
from specllama.models.contents import SHORT, Check, Stamp, known, read, stamp_of
from specllama.models.ggml_types import FILE_TYPES
from specllama.models.gguf_format import (
    SPLIT,
    Container,
    GgufArray,
    TensorInfo,
    decode_array,
    parse,
    part_names,
    raw_array,
)
from specllama.models.strings import Texts

__all__ = ["GgufArray", "GgufHeader", "TensorInfo", "read_header"]

MAX_PARTS = 1024
GUESSED = 1024
_PIECES = 64  # of the weights, hashed into a fingerprint
_PIECE = 1 << 14
# before the tokenizer's keys where llama.cpp should not read them (``trimmed``)
OURS = "specllama."

# every n-th layer has full attention in architectures that do not spell the pattern out
_PERIODS = {"gemma2": 2, "gemma3": 6, "gemma3n": 5, "gpt-oss": 2, "cohere2": 4, "exaone4": 4}

# sets of llama.cpp's llama-arch.cpp (llm_arch_is_recurrent, llm_arch_is_hybrid)
RECURRENT = frozenset({"mamba", "mamba2", "rwkv6", "rwkv6qwen2", "rwkv7", "arwkv7"})
HYBRID = frozenset(
    {
        "jamba", "falcon-h1", "plamo2", "granitehybrid", "lfm2", "lfm2moe", "nemotron_h",
        "nemotron_h_moe", "qwen3next", "kimi-linear", "bailingmoe3", "kimi-k3", "glm5-next",
        "qwen35", "qwen35moe", "qwen4exp", "deepseek4", "minimax-01",
    }
)  # fmt: skip


@dataclass(frozen=True)
class GgufHeader(Container):
    """The header of a model: of all its parts when it is split.

    Attributes:
        tensors: of all parts; offsets count from the data start of their own part.
        file_bytes: of all parts together.
        parts: every file of the model; one for a model that is not split.
        stamps: of the parts, from before they were read.
    """

    parts: tuple[Path, ...] = field(repr=False)
    stamps: tuple[Stamp | None, ...] = field(default=(), repr=False, compare=False)

    # -- access ------------------------------------------------------------------------------------

    def text(self, key: str) -> str | None:
        value = self.metadata.get(key)
        return value if isinstance(value, str) else None

    def integer(self, key: str) -> int | None:
        value = self.metadata.get(key)
        return value if isinstance(value, int) and not isinstance(value, bool) else None

    def number(self, key: str) -> float | None:
        value = self.metadata.get(key)
        return float(value) if isinstance(value, (int, float)) else None

    def flag(self, key: str) -> bool | None:
        value = self.metadata.get(key)
        return value if isinstance(value, bool) else None

    def own(self, key: str) -> str:
        """Return the full name of an architecture key: ``own("block_count")`` is
        "llama.block_count"."""
        return f"{self.architecture}.{key}"

    def array(self, key: str) -> list[Any]:
        """Return the values of an array (strings as bytes); empty when there is none.

        Raises:
            BadGguf: the file changed since its header was read.
        """
        found = self.arrays.get(key)
        return [] if found is None else list(decode_array(self.path, found))

    def per_layer(self, key: str, default: int = 0) -> tuple[int, ...]:
        """Return a number per layer from a key that may hold one number or an array."""
        n = self.block_count
        if key in self.arrays:
            values = tuple(int(v) for v in self.array(key) if isinstance(v, (int, float)))
            return (values + (0,) * n)[:n]
        value = self.integer(key)
        return (default if value is None else value,) * n

    def most(self, key: str) -> int:
        """Return the largest number of a layer from a key of the architecture; 0 without it."""
        return max(self.per_layer(self.own(key)), default=0)

    # -- the model ---------------------------------------------------------------------------------

    @property
    def n_tensors(self) -> int:
        return len(self.tensors)

    @property
    def architecture(self) -> str:
        return self.text("general.architecture") or ""

    @property
    def name(self) -> str:
        """The file's name: names inside files are often another model's. A store that names files
        by their sums leaves only those."""
        stem = SPLIT.sub("", self.path.name) if SPLIT.search(self.path.name) else self.path.stem
        return self.text("general.name") or stem if stem.startswith("sha256-") else stem

    @property
    def kind(self) -> str:
        """``general.type``: "model", "mmproj", "adapter", "imatrix", "vocab"."""
        return self.text("general.type") or "model"

    @property
    def block_count(self) -> int:
        return max(0, min(self.integer(self.own("block_count")) or 0, 512))

    @property
    def context_length(self) -> int:
        return self.integer(self.own("context_length")) or 0

    @property
    def embedding_length(self) -> int:
        return self.integer(self.own("embedding_length")) or 0

    @property
    def feed_forward_length(self) -> int:
        return self.most("feed_forward_length")

    @cached_property
    def head_counts(self) -> tuple[int, ...]:
        return self.per_layer(self.own("attention.head_count"))

    @cached_property
    def head_counts_kv(self) -> tuple[int, ...]:
        key = self.own("attention.head_count_kv")
        given = key in self.arrays or key in self.metadata
        return self.per_layer(key) if given else self.head_counts

    @property
    def head_count(self) -> int:
        return max(self.head_counts, default=0)

    @property
    def head_count_kv(self) -> int:
        return max(self.head_counts_kv, default=0)

    @property
    def key_length(self) -> int:
        """Width of one head's keys."""
        given = self.integer(self.own("attention.key_length"))
        return given if given is not None else self.embedding_length // max(self.head_count, 1)

    @property
    def value_length(self) -> int:
        given = self.integer(self.own("attention.value_length"))
        return given if given is not None else self.embedding_length // max(self.head_count, 1)

    @property
    def sliding_window(self) -> int:
        """Tokens seen by windowed layers; 0 without windows."""
        return self.integer(self.own("attention.sliding_window")) or 0

    @cached_property
    def windowed_layers(self) -> tuple[bool, ...]:
        """For each layer: it sees only a window."""
        n, key = self.block_count, self.own("attention.sliding_window_pattern")
        if not self.sliding_window:
            return (False,) * n
        if key in self.arrays:
            return (*map(bool, self.array(key)), *(False,) * n)[:n]
        period = self.integer(key) or _PERIODS.get(self.architecture, 1)
        if period == 1:
            return (self.architecture in _PERIODS,) * n
        return tuple((i + 1) % period != 0 for i in range(n))

    @property
    def experts_used(self) -> int:
        """Experts that a token uses in a layer."""
        return self.most("expert_used_count")

    @property
    def is_recurrent(self) -> bool:
        return self.architecture in RECURRENT

    @property
    def is_hybrid(self) -> bool:
        return self.architecture in HYBRID

    @property
    def one_kv_type(self) -> bool:
        """True if K and V lie in one cache (multi-head latent attention): llama.cpp wants one
        type."""
        widths = [
            self.integer(self.own(f"attention.{part}_length_mla")) for part in ("key", "value")
        ]
        return self.architecture == "deepseek4" or all(widths)

    @cached_property
    def n_params(self) -> int:
        return sum(tensor.n_elements for tensor in self.tensors)

    @cached_property
    def tensor_bytes(self) -> int:
        return sum(tensor.n_bytes for tensor in self.tensors)

    @property
    def step_bytes(self) -> int:
        """The bytes that a step reads: all layers and the output; of embeddings it reads a row."""
        table = self.by_name.get("token_embd.weight")
        apart = table is not None and "output.weight" in self.by_name
        return self.tensor_bytes - (table.n_bytes if table and apart else 0)

    @cached_property
    def tensor_types(self) -> dict[str, int]:
        """The number of tensors of each type, most bytes first."""
        size, count = Counter[str](), Counter(tensor.type for tensor in self.tensors)
        for tensor in self.tensors:
            size[tensor.type] += tensor.n_bytes
        return {name: count[name] for name, _ in size.most_common()}

    @property
    def quantization(self) -> str:
        """The usual label: from ``general.file_type``, else the type of most bytes."""
        declared = self.integer("general.file_type")
        if declared is not None and declared & ~GUESSED in FILE_TYPES:
            return FILE_TYPES[declared & ~GUESSED]
        return next(iter(self.tensor_types), "?")

    @cached_property
    def by_name(self) -> dict[str, TensorInfo]:
        return {tensor.name: tensor for tensor in self.tensors}

    @cached_property
    def fingerprint(self) -> str:
        """A guess at the contents that takes no time: header and pieces of the weights, hashed."""
        digest = hashlib.sha256()
        for part in self.parts:
            size = part.stat().st_size
            digest.update(size.to_bytes(8, "little"))
            with part.open("rb") as file:
                digest.update(file.read(self.data_offset))
                for i in range(_PIECES):
                    file.seek(size * i // _PIECES)
                    digest.update(file.read(_PIECE))
        return digest.hexdigest()[:SHORT]

    @property
    def contents(self) -> str:
        """A name for all bytes that it was opened with; "" until they were read."""
        return known(self.stamps)

    def read_contents(self, check: Check = lambda: None) -> str:
        """Return the same; read them where that was not done.

        Raises:
            ModelUnavailable: they cannot be read, or the file has changed since it was opened.
            what ``check`` raises.
        """
        return read(zip(self.parts, self.stamps, strict=True), check)

    # -- the tokenizer -----------------------------------------------------------------------------

    @property
    def tokenizer_model(self) -> str | None:
        """ "gpt2" is byte-level BPE, "llama" SentencePiece BPE, "bert" WordPiece, "t5" unigram."""
        return self.text("tokenizer.ggml.model")

    @property
    def pre_tokenizer(self) -> str | None:
        return self.text("tokenizer.ggml.pre")

    @property
    def vocab_size(self) -> int:
        tokens = self.arrays.get("tokenizer.ggml.tokens")
        if tokens is not None:
            return tokens.count
        declared = self.integer(self.own("vocab_size"))
        if declared is not None:
            return declared
        table = self.by_name.get("token_embd.weight")
        return table.shape[1] if table is not None and len(table.shape) > 1 else 0

    @cached_property
    def token_texts(self) -> Texts | None:
        """Token texts as arrays; None where they are odd: see ``Texts``."""
        tokens = self.arrays.get("tokenizer.ggml.tokens")
        if tokens is None or tokens.kind != "str":
            return None
        return Texts.of(raw_array(self.path, tokens), tokens.count)

    @property
    def longest_token(self) -> int:
        """Bytes of the longest token text: none stands for more of a prompt."""
        if (texts := self.token_texts) is not None:
            return int(texts.sizes.max())
        return max(map(len, self.token_bytes), default=0)

    def token_text(self, token: int) -> bytes:
        texts = self.token_texts
        return self.token_bytes[token] if texts is None else texts[token]

    def texts_of_bytes(self) -> set[bytes]:
        """Return every text that may stand for one byte, perhaps among others."""
        texts = self.token_texts
        return set(self.token_bytes) if texts is None else texts.of_bytes()

    @cached_property
    def token_bytes(self) -> tuple[bytes, ...]:
        """Token texts as llama.cpp sees them: cut at a NUL byte; an empty one gets a name."""
        if self.token_texts is not None:
            return tuple(self.array("tokenizer.ggml.tokens"))
        texts: list[bytes] = []
        for i, text in enumerate(self.array("tokenizer.ggml.tokens")):
            visible = text.partition(b"\0")[0] if isinstance(text, bytes) else b""
            texts.append(visible or b"[EMPTY_%d]" % i)
        return tuple(texts)

    def token_types(self) -> list[int]:
        """Return 1 normal, 2 unknown, 3 control, 4 user-defined, 5 unused, 6 byte for each token;
        empty if not given."""
        return [int(kind) for kind in self.array("tokenizer.ggml.token_type")]

    def tokens_of_type(self, kind: int) -> list[int]:
        import numpy as np

        types = self.arrays.get("tokenizer.ggml.token_type")
        if types is None:
            return []
        found = np.frombuffer(raw_array(self.path, types), "<i4")[: self.vocab_size] == kind
        return [int(token) for token in np.flatnonzero(found)]

    @property
    def rows(self) -> int:
        """Tokens that it can guess, where these are not all; else 0."""
        return self.arrays["specllama.says"].count if OURS + "embedding" in self.kinds else 0

    @property
    def merges_count(self) -> int:
        merges = self.arrays.get("tokenizer.ggml.merges")
        return merges.count if merges is not None else 0

    def special_id(self, name: str) -> int | None:
        """Return the id of a special token ("bos", "eos", "eot", "unknown", "padding"), None if
        unset."""
        value = self.integer(f"tokenizer.ggml.{name}_token_id")
        return value if value is not None and 0 <= value < self.vocab_size else None

    @property
    def chat_template(self) -> str | None:
        return self.text("tokenizer.chat_template")

    # -- parts -------------------------------------------------------------------------------------

    def to_dict(self) -> dict[str, Any]:
        """Return the summary that ``--json`` listings show."""
        same = (
            "name", "architecture", "quantization", "n_params", "file_bytes", "context_length",
            "block_count", "embedding_length", "vocab_size",
        )  # fmt: skip
        return {
            "path": str(self.path), **{name: getattr(self, name) for name in same},
            "tokenizer": self.tokenizer_model, "pre_tokenizer": self.pre_tokenizer,
            "has_chat_template": self.chat_template is not None, "parts": len(self.parts),
            "draft_tokens": self.rows or None,
        }  # fmt: skip


def read_header(path: str | Path) -> GgufHeader:
    """Read the header of a model file, and of its other parts when it is split.

    Raises:
        ModelUnavailable: no such file, or a part of a split model is missing.
        CannotLoad: not a GGUF, damaged, truncated, lying, or of an unknown version.
    """
    path = Path(path)
    stamps = [stamp_of(path)]
    first = parse(path)
    whole = {**vars(first), "parts": _parts(first)}
    if OURS + "embedding" in first.kinds:
        for name in ("metadata", "kinds", "arrays"):
            whole[name] = _own_names(whole[name])
    for number, part in enumerate(whole["parts"][1:], start=1):
        stamps.append(stamp_of(part))
        other = parse(part)
        if _split_number(other, "split.no") != number:
            name, count = part.name, len(whole["parts"])
            raise BadGguf(f"{name} is not part {number + 1} of {count}, as its name says")
        seen = {tensor.name for tensor in whole["tensors"]}
        if twice := next((one.name for one in other.tensors if one.name in seen), ""):
            raise BadGguf(f"{part.name}: the tensor {twice!r} is in two parts")
        whole["tensors"] += other.tensors
        whole["file_bytes"] += other.file_bytes
    expected, found = first.metadata.get("split.tensors.count"), len(whole["tensors"])
    if len(whole["parts"]) > 1 and isinstance(expected, int) and expected != found:
        raise BadGguf(f"{path.name} announces {expected} tensors, its parts hold {found}")
    return GgufHeader(**whole, stamps=tuple(stamps))


def _own_names(keys: dict[str, Any]) -> dict[str, Any]:
    """Give a tokenizer that llama.cpp should not read the names of one that it does."""
    of = OURS + "tokenizer."
    kept = {key: value for key, value in keys.items() if not key.startswith((of, of[len(OURS) :]))}
    return kept | {key[len(OURS) :]: value for key, value in keys.items() if key.startswith(of)}


def _split_number(container: Container, key: str) -> int | None:
    """Read a split field; llama.cpp reads it as u16 and aborts on other types."""
    if key not in container.kinds:
        return None
    value = container.metadata.get(key)
    if container.kinds[key] != "u16" or not isinstance(value, int):
        raise BadGguf(f"{container.path.name}: {key} has the type {container.kinds[key]}, not u16")
    return value


def _parts(first: Container) -> tuple[Path, ...]:
    path, count = first.path, _split_number(first, "split.count") or 0
    number = _split_number(first, "split.no")
    if count <= 1:
        return (path,)
    if count > MAX_PARTS:
        raise BadGguf(f"{path.name} claims to be one of {count} parts")
    named = SPLIT.search(path.name)
    if named is None:
        raise BadGguf(
            f"{path.name} belongs to a split model of {count} files; its name does not say which",
            f"restore its name, which ends in -{(number or 0) + 1:05d}-of-{count:05d}.gguf",
        )
    names = part_names(f"{path.name[: named.start()]}-00001-of-{count:05d}.gguf")
    paths = tuple(path.with_name(name) for name in names)
    missing = [p.name for p in paths if not p.is_file()]
    if missing:
        raise ModelUnavailable(
            f"{path.name}: {len(missing)} of {count} parts are missing ({', '.join(missing[:3])}"
            f"{' …' if len(missing) > 3 else ''})",
            "put all parts in one folder, or pull the model again: specllama hub pull",
        )
    if number != 0:
        raise BadGguf(
            f"{path.name} is part {(number or 0) + 1} of {count}; open a split model at part 1",
            f"use {paths[0].name}",
        )
    if path.name != paths[0].name:
        raise BadGguf(f"{path.name} holds part 1 of {count}, which its name does not say")
    return paths
