"""Reading GGUF headers: what they say, and every way in which they can lie."""

import random
import shutil
import struct
import time
from pathlib import Path

import gguf as writer
import ggufs
import ggufs_nextn
import pytest

from specllama.errors import BadGguf, CannotLoad, ModelUnavailable, UnsupportedModel
from specllama.models import gguf, strings
from specllama.models.gguf import read_header
from specllama.models.gguf_format import raw_array
from specllama.models.loadable import check_loadable
from specllama.models.strings import Texts, leap

U16, U32, I32 = (writer.GGUFValueType[name] for name in ("UINT16", "UINT32", "INT32"))


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return ggufs.write_llama(tmp_path_factory.mktemp("gguf") / "model-F32.gguf")


def patched(source: Path, target: Path, *patches: tuple[int, bytes]) -> Path:
    data = bytearray(source.read_bytes())
    for offset, value in patches:
        data[offset : offset + len(value)] = value
    target.write_bytes(data)
    return target


def position(source: Path, key: str) -> int:
    """Where the value type of a key stands."""
    return source.read_bytes().index(struct.pack("<Q", len(key)) + key.encode()) + 8 + len(key)


def test_a_header_says_what_was_written(llama: Path) -> None:
    header = read_header(llama)
    tokens, types, merges = ggufs.bpe_tokens()
    assert header.architecture == "llama"
    assert header.block_count == 2
    assert header.context_length == 512
    assert header.embedding_length == 64
    assert (header.head_count, header.head_count_kv) == (2, 1)
    assert header.head_counts_kv == (1, 1)
    assert header.key_length == header.value_length == 32
    assert header.feed_forward_length == 128
    assert header.vocab_size == len(tokens)
    assert [text.decode("utf-8", "replace") for text in header.token_bytes] == tokens
    assert header.token_types() == types
    assert header.merges_count == len(merges)
    assert header.special_id("bos") == 0
    assert header.special_id("eos") == 2
    assert header.special_id("eot") is None
    assert header.chat_template == ggufs.CHATML
    assert header.quantization == "F32"
    assert header.file_bytes == llama.stat().st_size
    assert header.n_params == sum(t.n_elements for t in header.tensors)
    assert header.parts == (llama,)
    check_loadable(header)


def test_it_agrees_with_the_reference_reader(llama: Path) -> None:
    reference = writer.GGUFReader(llama)
    header = read_header(llama)
    assert header.n_tensors == len(reference.tensors)
    for ours, theirs in zip(header.tensors, reference.tensors, strict=True):
        assert ours.name == theirs.name
        assert list(ours.shape) == [int(n) for n in theirs.shape]
        assert ours.n_bytes == int(theirs.n_bytes)
        assert header.data_offset + ours.offset == int(theirs.data_offset)


def test_a_large_vocabulary_is_read_fast_and_small(tmp_path: Path) -> None:
    import tracemalloc

    tokens = [f"token{i}" for i in range(150_000)]
    path = ggufs.write_vocab_only(
        tmp_path / "v.gguf", tokens, merges=[f"a{i} b{i}" for i in range(150_000)]
    )
    best = min(_timed(path) for _ in range(5))
    assert best < 0.5  # 40 ms of processor time when nothing else runs; decoding takes 8 s
    tracemalloc.start()
    header = read_header(path)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 8 * path.stat().st_size
    assert header.merges_count == 150_000
    assert header.token_bytes[149_999] == b"token149999"


def _timed(path: Path) -> float:
    started = time.process_time()
    read_header(path)
    return time.process_time() - started


# -- files that are no models ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("data", "error", "words"),
    [
        (b"", BadGguf, "is empty"),
        (
            b"version https://git-lfs.github.com/spec/v1\noid sha256:aa\n",
            BadGguf,
            "Git LFS pointer",
        ),
        (b"<!DOCTYPE html><html>not found</html>", BadGguf, "web page"),
        (b"\n <html></html>", BadGguf, "web page"),
        (b'{"error": "gone"}', BadGguf, "JSON"),
        (b"GGUF", BadGguf, "truncated"),
        (b"GGUF\x03\x00\x00\x00", BadGguf, "truncated"),
        (b"tjgg" + bytes(40), UnsupportedModel, "before GGUF"),
        (b"PK\x03\x04" + bytes(40), UnsupportedModel, "ZIP"),
        (struct.pack("<Q", 60) + b'{"__metadata__":{}}', UnsupportedModel, "safetensors"),
        (bytes(100), BadGguf, "zeros"),
        (b"hello, world, this is text", BadGguf, "not a GGUF"),
        (b"GGUF\x00\x00\x00\x03" + bytes(40), UnsupportedModel, "big-endian"),
        (b"GGUF" + struct.pack("<IQQ", 1, 0, 0), UnsupportedModel, "version 1"),
        (b"GGUF" + struct.pack("<IQQ", 99, 0, 0), UnsupportedModel, "version 99"),
        (b"GGUF" + struct.pack("<IQQ", 3, 2**60, 0), BadGguf, "tensors"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 2**63), BadGguf, "keys"),
    ],
)
def test_foreign_files_are_named(
    tmp_path: Path, data: bytes, error: type[Exception], words: str
) -> None:
    path = tmp_path / "x.gguf"
    path.write_bytes(data)
    with pytest.raises(error, match=words) as caught:
        read_header(path)
    assert caught.value.exit_code == 5  # type: ignore[attr-defined]
    assert "\n" not in str(caught.value)


def test_missing_and_folders(tmp_path: Path) -> None:
    with pytest.raises(ModelUnavailable, match="no such file"):
        read_header(tmp_path / "none.gguf")
    with pytest.raises(CannotLoad, match="folder"):
        read_header(tmp_path)
    with pytest.raises(ModelUnavailable, match=r"not a file name"):
        read_header("a\0b.gguf")


@pytest.mark.parametrize("fraction", [0.001, 0.01, 0.016, 0.5, 0.9])
def test_truncation_anywhere_is_found(llama: Path, tmp_path: Path, fraction: float) -> None:
    data = llama.read_bytes()
    path = tmp_path / "cut.gguf"
    path.write_bytes(data[: int(len(data) * fraction)])
    with pytest.raises(BadGguf):
        read_header(path)


def test_one_missing_byte_is_found(llama: Path, tmp_path: Path) -> None:
    path = tmp_path / "cut.gguf"
    header = read_header(llama)
    last = header.tensors[-1]
    path.write_bytes(llama.read_bytes()[: header.data_offset + last.offset + last.n_bytes - 1])
    with pytest.raises(BadGguf, match="truncated"):
        read_header(path)


def test_lengths_that_lie(llama: Path, tmp_path: Path) -> None:
    at = position(llama, "general.name")
    for length in (2**63, 2**40, 17 << 20, 2**64 - 1):
        bad = patched(llama, tmp_path / "x.gguf", (at + 4, struct.pack("<Q", length)))
        with pytest.raises(BadGguf):
            read_header(bad)
    at = position(llama, "tokenizer.ggml.tokens")
    for count in (2**50, 2**64 - 1, 10**6):
        bad = patched(llama, tmp_path / "x.gguf", (at + 8, struct.pack("<Q", count)))
        with pytest.raises(BadGguf):
            read_header(bad)
    for kind in (9, 13, 200):  # nested arrays, unknown types
        bad = patched(llama, tmp_path / "x.gguf", (at + 4, struct.pack("<I", kind)))
        with pytest.raises(BadGguf):
            read_header(bad)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("dims", "dimensions"),
        ("shape", "impossible shape|truncated|row"),
        ("type", "type 9999"),
        ("block", "not a multiple of 256"),
        ("offset", "lies at"),
    ],
)
def test_tensors_that_lie(llama: Path, tmp_path: Path, change: str, words: str) -> None:
    name = b"output_norm.weight"
    at = llama.read_bytes().index(struct.pack("<Q", len(name)) + name) + 8 + len(name)
    value = {
        "dims": (at, struct.pack("<I", 5)),
        "shape": (at + 4, struct.pack("<Q", 2**62)),
        "type": (at + 12, struct.pack("<I", 9999)),
        "block": (at + 12, struct.pack("<I", 12)),
        "offset": (at + 16, struct.pack("<Q", 32)),
    }[change]
    with pytest.raises((BadGguf, UnsupportedModel), match=words):
        read_header(patched(llama, tmp_path / "x.gguf", value))


@pytest.mark.parametrize("alignment", [0, 3, 33, 2**31])
def test_odd_alignments(tmp_path: Path, alignment: int) -> None:
    path = ggufs.write_llama(tmp_path / "m.gguf", keys={"general.alignment": 32})
    at = position(path, "general.alignment")
    with pytest.raises(BadGguf, match=r"alignment|lies at|truncated"):
        read_header(patched(path, tmp_path / "x.gguf", (at + 4, struct.pack("<I", alignment))))


def test_duplicate_keys(llama: Path, tmp_path: Path) -> None:
    bad = llama.read_bytes().replace(b"tokenizer.ggml.bos_token_id", b"tokenizer.ggml.eos_token_id")
    path = tmp_path / "x.gguf"
    path.write_bytes(bad)
    with pytest.raises(BadGguf, match="twice"):
        read_header(path)


def test_names_that_are_no_text(llama: Path, tmp_path: Path) -> None:
    data = llama.read_bytes()
    path = tmp_path / "x.gguf"
    path.write_bytes(data.replace(b"general.name", b"general.\xff\xfe\xff\xfe"))
    with pytest.raises(BadGguf, match="not UTF-8"):
        read_header(path)
    path.write_bytes(data.replace(b"model-F32", b"\xff\xfe\xff\xfe\xff\xfe\xff\xfe\xff"))
    told = read_header(path).text("general.name") or ""
    assert "�" in told  # a broken value is no reason to refuse


def test_a_model_is_called_as_its_file_is(llama: Path, tmp_path: Path) -> None:
    assert read_header(shutil.copy(llama, tmp_path / "mine-F32.gguf")).name == "mine-F32"
    assert read_header(ggufs.write_split(tmp_path / "big-Q4_0.gguf")[0]).name == "big-Q4_0"
    blob = shutil.copy(llama, tmp_path / "sha256-0b1c")  # as Ollama keeps it
    assert read_header(blob).name == "model-F32"


# -- split files -----------------------------------------------------------------------------------


def test_split_models_are_one(tmp_path: Path) -> None:
    whole = read_header(ggufs.write_llama(tmp_path / "whole.gguf"))
    parts = ggufs.write_split(tmp_path / "part.gguf")
    assert len(parts) == 3
    header = read_header(parts[0])
    assert header.parts == tuple(parts)
    assert header.n_params == whole.n_params
    assert header.file_bytes == sum(part.stat().st_size for part in parts)
    check_loadable(header)


def test_split_models_that_are_not_whole(tmp_path: Path) -> None:
    parts = ggufs.write_split(tmp_path / "part.gguf")
    with pytest.raises(BadGguf, match="open a split model at part 1"):
        read_header(parts[1])
    renamed = tmp_path / "other.gguf"
    renamed.write_bytes(parts[0].read_bytes())
    with pytest.raises(BadGguf, match="its name does not say"):
        read_header(renamed)
    swapped = parts[1].read_bytes()
    parts[1].write_bytes(parts[2].read_bytes())
    with pytest.raises(BadGguf, match=r"is not part 2"):
        read_header(parts[0])
    parts[1].write_bytes(swapped)
    parts[2].unlink()
    with pytest.raises(ModelUnavailable, match=r"1 of 3 parts are missing"):
        read_header(parts[0])
    parts[2].write_bytes(b"")
    with pytest.raises(BadGguf, match="is empty"):
        read_header(parts[0])


# -- sound files of the wrong kind, and values that llama.cpp aborts on ----------------------------


@pytest.mark.parametrize(
    ("write", "words"),
    [
        (ggufs.write_bert, "is an encoder"),
        (ggufs.write_clip, "vision projector"),
        (ggufs.write_lora, "adapter"),
    ],
)
def test_other_kinds_are_refused_with_the_reason(tmp_path: Path, write: object, words: str) -> None:
    header = read_header(write(tmp_path / "m.gguf"))  # type: ignore[operator]
    with pytest.raises(UnsupportedModel, match=words) as caught:
        check_loadable(header)
    assert caught.value.hint


def test_a_vocabulary_alone_is_no_model(tmp_path: Path) -> None:
    header = read_header(ggufs.write_vocab_only(tmp_path / "v.gguf", ["a", "b"]))
    with pytest.raises(UnsupportedModel, match="no weights"):
        check_loadable(header)


def test_recurrent_models_load_and_are_known(tmp_path: Path) -> None:
    header = read_header(ggufs.write_mamba(tmp_path / "m.gguf"))
    check_loadable(header)
    assert header.is_recurrent


@pytest.mark.parametrize("pooling", [0, 2**32 - 1])
def test_files_that_llama_cpp_saved_itself_are_no_embedding_models(
    tmp_path: Path, pooling: int
) -> None:
    keys = {"llama.pooling_type": pooling}
    check_loadable(read_header(ggufs.write_llama(tmp_path / "m.gguf", keys=keys)))


def test_sentencepiece_models_load(tmp_path: Path) -> None:
    check_loadable(read_header(ggufs.write_spm(tmp_path / "m.gguf")))


TOKENS = ggufs.bpe_tokens()[0]


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"llama.block_count": 0}, "block_count is 0"),
        ({"llama.block_count": 513}, "block_count is 513"),
        ({"llama.block_count": None}, "block_count is missing"),
        ({"llama.block_count": (2, I32)}, "type i32"),
        ({"llama.context_length": 0}, "context_length is 0"),
        ({"llama.context_length": 2**31}, "context_length is"),
        ({"llama.embedding_length": 128}, "width 64 in a model of width 128"),
        ({"llama.attention.head_count_kv": 3}, "shares 3 KV heads among 2"),
        ({"llama.attention.head_count": [2, 2, 2]}, "3 values for 2 layers"),
        ({"llama.rope.dimension_count": 31}, "odd"),
        ({"llama.rope.scaling.type": "spiral"}, "aborts"),
        ({"llama.rope.freq_base": 0.0}, "aborts"),
        ({"llama.rope.freq_base": float("nan")}, "finite"),
        ({"llama.attention.layer_norm_rms_epsilon": -1e-5}, "aborts"),
        ({"llama.nextn_predict_layers": 3}, "nextn_predict_layers"),
        ({"llama.expert_count": 4, "llama.expert_used_count": 5}, "expert"),
        ({"llama.expert_count": 2000}, "expert_count"),
        ({"llama.pooling_type": 1}, "pooled"),
        ({"llama.attention.causal": False}, "not causal"),
        ({"tokenizer.ggml.model": None}, "no tokenizer"),
        ({"tokenizer.ggml.model": "no_vocab"}, "no tokenizer"),
        ({"tokenizer.ggml.model": "martian"}, "does not know the tokenizer"),
        ({"tokenizer.ggml.tokens": None}, "no token list"),
        ({"tokenizer.ggml.tokens": TOKENS[:-1]}, "embedding rows"),
        ({"tokenizer.ggml.tokens": [*TOKENS[:-1], TOKENS[5]]}, "are both"),
        ({"tokenizer.ggml.tokens": [*TOKENS[:-1], TOKENS[5] + "\0x"]}, "are both"),
        ({"tokenizer.ggml.token_type": [1, 1]}, "2 values for"),
        ({"tokenizer.ggml.merges": None}, "without merges"),
        ({"tokenizer.ggml.merges": [1, 2]}, "not a list of strings|without merges"),
        ({"tokenizer.ggml.bos_token_id": 99999}, "bos token is 99999"),
        ({"tokenizer.ggml.eos_token_id": 2**31}, "eos token"),
        ({"general.architecture": ""}, "architecture"),
        ({"general.type": "imatrix"}, "importance matrix"),
        ({"general.architecture": "dream"}, "diffusion"),
        ({"general.architecture": "cogvlm"}, "mixes up the rows"),
        ({"general.architecture": "eagle3"}, "EAGLE-3 head"),
    ],
)
def test_values_that_llama_cpp_refuses_or_aborts_on(
    tmp_path: Path, keys: dict[str, object], words: str
) -> None:
    header = read_header(ggufs.write_llama(tmp_path / "m.gguf", keys=keys))
    with pytest.raises(CannotLoad, match=words) as caught:
        check_loadable(header)
    assert caught.value.exit_code == 5
    assert "\n" not in str(caught.value)


def test_a_deepseek4_whose_cache_nothing_compresses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ggufs_nextn, "_ratio", lambda block: 0)
    header = read_header(ggufs_nextn.write_nextn(tmp_path / "m.gguf", "deepseek4"))
    with pytest.raises(BadGguf, match="0 for every layer"):
        check_loadable(header)


def test_no_special_token_is_written_as_minus_one(tmp_path: Path) -> None:
    path = ggufs.write_llama(tmp_path / "m.gguf", keys={"tokenizer.ggml.bos_token_id": 2**32 - 1})
    header = read_header(path)
    check_loadable(header)
    assert header.special_id("bos") is None


def test_sentencepiece_needs_its_byte_tokens(tmp_path: Path) -> None:
    tokens, _, _ = ggufs.spm_tokens()
    broken = [token if token != "<0x41>" else "<0xZZ>" for token in tokens]
    header = read_header(
        ggufs.write_spm(tmp_path / "m.gguf", keys={"tokenizer.ggml.tokens": broken})
    )
    with pytest.raises(BadGguf, match="byte token"):
        check_loadable(header)


def test_split_number_of_another_type(tmp_path: Path) -> None:
    path = ggufs.write_llama(tmp_path / "m.gguf", keys={"split.count": (2, U32)})
    with pytest.raises(BadGguf, match="not u16"):
        read_header(path)
    assert U16


# -- lists of strings, looked through at a glance --


def packed(texts: list[bytes]) -> bytes:
    return b"".join(struct.pack("<Q", len(text)) + text for text in texts)


def words(n: int, seed: int = 1) -> list[bytes]:
    rng = random.Random(seed)
    return [rng.randbytes(rng.randrange(12)).replace(b"\0", b"z") + b"x%d" % i for i in range(n)]


ODD = {
    "plain": [],
    "an empty one": [b""],
    "two empty ones": [b"", b""],
    "NUL in front": [b"\0ab"],
    "NUL within": [b"a\0\0\0\0\0\0\0\0\0b"],
    "of 256 bytes": [b"y" * 256],
    "of 65,535 bytes": [b"y" * 65535],
    "of 70,000 bytes": [b"y" * 70000],
    "like a length": [b"\5\0\0\0\0\0\0\0hello"],
    "before a length of 256": [b"", b"y" * 256],
}


@pytest.mark.parametrize("odd", ODD)
@pytest.mark.parametrize("at", [0, 3000, 6000])
@pytest.mark.parametrize("window", [1 << 14, 8 << 20])
def test_it_never_skips_what_is_no_string(
    odd: str, at: int, window: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(strings, "MANY", 1)
    monkeypatch.setattr(strings, "WINDOW", window)
    texts = words(6000)
    texts[at:at] = ODD[odd]
    ends = [0]
    for text in texts:
        ends.append(ends[-1] + 8 + len(text))
    n, size = leap(bytearray(b"head" + packed(texts) + bytes(20)), 4, len(texts))
    assert size == ends[n]
    assert n == len(texts) if odd in ("plain", "of 256 bytes") else n >= min(at, 1)
    assert leap(packed(texts), 0, 100)[0] <= 100


@pytest.mark.parametrize("odd", ODD)
def test_a_table_is_whole_or_none(odd: str) -> None:
    texts = [*words(50), b"<0x41>", b"a", *ODD[odd], b"end"]
    found = Texts.of(packed(texts), len(texts))
    if found is None:
        assert odd not in ("plain", "of 256 bytes", "of 65,535 bytes")
        return
    assert [found[i] for i in range(len(texts))] == texts
    assert all(texts)
    assert not any(b"\0" in text for text in texts)
    names = {text for text in texts if len(text) == 1 or (len(text) == 6 and text[:1] == b"<")}
    assert found.of_bytes() == names
    assert Texts.of(packed(texts), len(texts) - 1) is None
    assert Texts.of(packed(texts)[:-1], len(texts)) is None


@pytest.mark.parametrize("size", [1, 7, 8, 9, 16, 300])
def test_texts_that_are_there_twice_are_seen(size: int) -> None:
    texts = [*words(500), b"a" * size, b"a" * (size - 1) + b"b", b"b" + b"a" * (size - 1)]
    texts = list(dict.fromkeys(texts))
    assert Texts.of(packed(texts), len(texts)).differ()
    assert not Texts.of(packed([*texts, b"a" * size]), len(texts) + 1).differ()


def test_a_header_says_the_same_of_its_tokens_either_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = ggufs.write_spm(tmp_path / "m.gguf")
    glance, walked = read_header(path), read_header(path)
    with monkeypatch.context() as patch:
        patch.setattr(gguf.Texts, "of", lambda raw, count: None)
        assert walked.token_texts is None
    assert glance.token_texts is not None
    assert glance.token_bytes == walked.token_bytes
    assert glance.longest_token == walked.longest_token == max(map(len, walked.token_bytes))
    assert b"<0x41>" in glance.texts_of_bytes() <= walked.texts_of_bytes()
    assert glance.tokens_of_type(6) == [i for i, k in enumerate(walked.token_types()) if k == 6]
    assert [glance.token_text(i) for i in range(9)] == list(walked.token_bytes[:9])
    tokens = glance.arrays["tokenizer.ggml.tokens"]
    assert len(raw_array(path, tokens)) == sum(8 + len(text) for text in walked.token_bytes)
