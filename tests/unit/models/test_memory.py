"""The arithmetic of memory. Measured sizes are compared in tests/e2e and in the note."""

from pathlib import Path
from typing import Any

import ggufs
import numpy as np
import pytest
from ggufs_nextn import GROUPS, HEAD, STATE, TIME_RANK, write_nextn

from specllama.engine.target_heads import bundled_heads
from specllama.errors import CannotLoad, DoesNotFit, UsageError
from specllama.models import memory, running_state
from specllama.models.context import LEAST, choose, within_share
from specllama.models.gguf import GgufHeader, read_header
from specllama.models.judgement import pair_memory
from specllama.models.medusa_file import write_heads
from specllama.models.memory import estimate_model
from specllama.models.refs import bundled
from specllama.settings.params import EngineOptions
from specllama.text import size


@pytest.fixture
def header(tmp_path: Path) -> GgufHeader:
    return read_header(ggufs.write_llama(tmp_path / "m.gguf", quant="Q8_0"))


def with_keys(tmp_path: Path, **keys: Any) -> GgufHeader:
    named = {f"llama.{key.replace('__', '.')}": value for key, value in keys.items()}
    return read_header(ggufs.write_llama(tmp_path / "k.gguf", blocks=6, keys=named))


@pytest.mark.parametrize(("asked", "given"), [(1, 256), (256, 256), (257, 512), (8192, 8192)])
def test_contexts_are_padded_as_llama_cpp_does(asked: int, given: int) -> None:
    assert memory.padded_ctx(asked) == given


@pytest.mark.parametrize(
    ("kind", "per_value"), [("f16", 2.0), ("f32", 4.0), ("q8_0", 34 / 32), ("q4_0", 18 / 32)]
)
def test_kv_is_layers_times_heads_times_tokens(
    header: GgufHeader, kind: str, per_value: float
) -> None:
    layers, heads, width = 2, 1, 32
    expected = layers * heads * 512 * 2 * width * per_value
    assert memory.kv_bytes(header, 500, type_k=kind, type_v=kind) == expected


def test_an_unknown_cache_type(header: GgufHeader) -> None:
    with pytest.raises(UsageError, match="fp8"):
        memory.kv_bytes(header, 256, type_k="fp8")


def test_windowed_layers_keep_every_cell(tmp_path: Path) -> None:
    header = with_keys(
        tmp_path,
        attention__sliding_window=256,
        attention__sliding_window_pattern=[True, True, False] * 2,
    )
    assert memory.kv_bytes(header, 4096) == 6 * 4096 * 2 * 32 * 2


def test_layers_without_attention_have_no_cache(tmp_path: Path) -> None:
    header = with_keys(tmp_path, attention__head_count_kv=[1, 0, 0, 1, 0, 0])
    assert memory.kv_bytes(header, 256) == 2 * 256 * 2 * 32 * 2


def test_recurrent_states_do_not_grow_with_the_context(tmp_path: Path) -> None:
    header = read_header(ggufs.write_mamba(tmp_path / "m.gguf"))
    assert memory.kv_bytes(header, 256) == memory.kv_bytes(header, 65536) > 0


def test_several_conversations_share_a_cache_and_read_in_a_second_one(
    header: GgufHeader, tmp_path: Path
) -> None:
    one, three = (pair_memory(header, header, EngineOptions(parallel=n), 512) for n in (1, 3))
    assert one.target.reading == 0
    assert three.target.reading == one.target.kv + one.target.compute
    assert three.required - one.required >= three.target.reading
    assert three.target.kv == one.target.kv
    windows = read_header(ggufs.write_windows(tmp_path / "w.gguf"))
    assert pair_memory(windows, None, EngineOptions(parallel=3), None).target.reading > 0
    running = read_header(ggufs.write_mamba(tmp_path / "m.gguf"))  # each has states of its own
    one, three = (
        pair_memory(running, None, EngineOptions(parallel=n), None).target for n in (1, 3)
    )
    assert (one.reading, three.reading) == (0, 0)
    assert (three.kv, three.checkpoints) == (3 * one.kv, 3 * one.checkpoints)


def test_the_defaults_are_those_of_the_engine() -> None:
    options = EngineOptions()
    assert options.batch(on_gpu=False) == memory.PASS_TOKENS
    assert options.max_rows == memory.PASS_ROWS


def test_flash_attention_needs_no_scores(header: GgufHeader) -> None:
    off = memory.compute_bytes(header, 8192, flash_attn=False)
    on = memory.compute_bytes(header, 8192, flash_attn=True)
    assert off - on >= memory.PASS_TOKENS * 8192 * header.head_count * 4


def test_a_pair_is_its_parts(header: GgufHeader) -> None:
    pair = pair_memory(header, header, EngineOptions(), 512)
    assert pair.total == pair.target.total + pair.draft.total + pair.process
    assert pair.target.n_ctx == 512
    assert pair.target.weights == header.tensor_bytes
    assert pair_memory(header, None, EngineOptions(), None).draft is None


def test_weights_that_are_rearranged_count_twice_in_the_resident_size(tmp_path: Path) -> None:
    header = read_header(ggufs.write_llama(tmp_path / "q.gguf", quant="Q4_0"))
    blocks = sum(
        t.n_bytes for t in header.tensors if t.type == "Q4_0" and t.name != "token_embd.weight"
    )
    # the output matrix of the fixture has 332 rows, which is no multiple of 8
    odd = sum(t.n_bytes for t in header.tensors if t.name == "output.weight" and t.shape[1] % 8)
    assert memory.repacked_bytes(header, frozenset({"Q4_0"})) == blocks - odd
    assert memory.repacked_bytes(header, frozenset()) == 0
    need = memory.estimate_model(header)
    assert need.total == need.required + need.repacked


def test_the_default_context_is_the_engines(header: GgufHeader) -> None:
    assert memory.estimate_model(header).n_ctx == 512  # trained for less than the 8192 default


def test_fit_is_judged_with_a_margin(header: GgufHeader, monkeypatch: pytest.MonkeyPatch) -> None:
    need, free = memory.estimate_model(header), 0  # unknown
    monkeypatch.setattr(memory, "available_memory", lambda: free)
    assert memory.fits(need)
    free = need.required * 2
    assert memory.fits(need)
    free = need.required
    assert not memory.fits(need)
    with pytest.raises(DoesNotFit, match="of memory") as caught:
        memory.require_fit(need)
    assert caught.value.exit_code == 5
    assert "-c" in (caught.value.hint or "")


def test_this_machine_has_memory() -> None:
    assert 0 < memory.available_memory() <= memory.total_memory()


def test_heads_beside_a_pair_count() -> None:
    target, draft = (read_header(bundled(name)) for name in ("tiny-target", "tiny-draft"))
    heads = [read_header(path) for path in bundled_heads(target)]
    assert {head.architecture for head in heads} == {"eagle3", "medusa"}
    alone = pair_memory(target, draft, EngineOptions(), 512)
    beside = pair_memory(target, draft, EngineOptions(), 512, heads=heads)
    assert beside.required - alone.required == sum(head.required for head in beside.heads)
    assert len(beside.to_dict()["heads"]) == 2
    for head, need in zip(heads, beside.heads, strict=True):
        assert need.required > head.tensor_bytes
        assert bool(need.kv) is (head.architecture == "eagle3"), "Medusa heads keep no cache"


def test_medusa_heads_without_a_matrix_copy_the_targets_rows(tmp_path: Path) -> None:
    target = read_header(ggufs.write_llama(tmp_path / "t.gguf", width=64))
    arrays = {"head.0.proj.weight": np.ones((64, 64), np.float32)}
    facts = {"name": "h", "heads": 1, "blocks": 0, "width": 64, "vocab": target.vocab_size}
    write_heads(tmp_path / "all.gguf", arrays, **facts)
    write_heads(tmp_path / "some.gguf", arrays | {"ids": np.arange(10, dtype=np.int32)}, **facts)
    whole, some = (
        memory.estimate_head(read_header(tmp_path / name), target, n_ctx=256).weights
        for name in ("all.gguf", "some.gguf")
    )
    output = target.by_name["output.weight"]
    assert whole == output.n_bytes + read_header(tmp_path / "all.gguf").tensor_bytes
    assert some < whole - output.n_bytes * 0.9


def test_a_running_state_says_what_it_takes(tmp_path: Path) -> None:
    qwen = read_header(write_nextn(tmp_path / "q.gguf", nextn=0))
    state = running_state.state_bytes(qwen)
    # three of four layers: a convolution over three more tokens, and a matrix a head
    inner = STATE * TIME_RANK
    assert state == 3 * 4 * (3 * (inner + 2 * GROUPS * STATE) + inner * STATE)
    assert memory.kv_bytes(qwen, 256) == 256 * 2 * HEAD * 2 + state  # one layer has attention
    assert memory.kv_bytes(qwen, 256, max_rows=4) - memory.kv_bytes(qwen, 256) == 3 * state
    assert memory.kv_bytes(qwen, 256, max_rows=65) - memory.kv_bytes(qwen, 256) == 6 * state
    mamba = read_header(ggufs.write_mamba(tmp_path / "m.gguf"))
    assert memory.kv_bytes(mamba, 256, max_rows=65) == memory.kv_bytes(mamba, 256)
    assert running_state.line(qwen, 65) == (
        f"running state: {size(state)}; 6 earlier ones to undo guesses, {size(6 * state)}; "
        f"up to 8 copies to go back to, {size(8 * state)}"
    )
    assert "earlier" not in running_state.line(mamba, 65)
    assert running_state.line(read_header(ggufs.write_llama(tmp_path / "l.gguf")), 65) == ""


# -- the context length that is taken when nobody says --


WHY = "memory"


@pytest.fixture
def trained(tmp_path: Path) -> GgufHeader:
    return read_header(ggufs.write_llama(tmp_path / "m.gguf", context=40960))


@pytest.mark.parametrize(
    ("room", "tokens"), [(0, LEAST), (16384, 16384), (40959, 32768), (40960, 40960), (10**9, 40960)]
)
def test_it_doubles_as_long_as_it_fits(trained: GgufHeader, room: int, tokens: int) -> None:
    length = choose(None, trained, lambda n: n <= room, WHY)
    assert length.tokens == tokens
    assert (WHY in length.line()) == (tokens < 40960)


def test_what_is_asked_for_is_taken(trained: GgufHeader) -> None:
    def never(n: int) -> bool:
        raise AssertionError(n)

    assert choose(512, trained, never, WHY).tokens == 512
    assert choose(0, trained, never, WHY).tokens == 40960
    assert choose(512, trained, never, WHY).line() == "context: 512 tokens, as asked"
    beyond = "context: 50,000 tokens, as asked; it was trained for 40,960"
    assert choose(50_000, trained, never, WHY).line() == beyond


def test_a_short_model_and_one_that_does_not_say(tmp_path: Path) -> None:
    short = read_header(ggufs.write_llama(tmp_path / "s.gguf", context=512))
    length = choose(None, short, lambda n: False, WHY)
    assert (length.tokens, length.line()) == (512, "context: 512 tokens, the trained length")
    silent = read_header(
        ggufs.write_llama(tmp_path / "n.gguf", keys={"llama.context_length": None})
    )
    with pytest.raises(CannotLoad, match="how long a context"):
        choose(None, silent, lambda n: True, WHY)
    assert choose(1024, silent, lambda n: True, WHY).tokens == 1024


def test_a_context_leaves_half_of_the_memory_to_others(trained: GgufHeader) -> None:
    def need(n_ctx: int) -> int:
        return estimate_model(trained, n_ctx=n_ctx).required

    bare, whole = need(256), need(40960)
    enough = int((bare + 2 * (whole - bare)) / 0.95) + 1000
    assert within_share(need, enough)(40960)
    assert not within_share(need, enough - 1_000_000)(40960)
    assert not within_share(need, 0)(LEAST)
