"""Placement, threads, adapters and position scaling with llama.cpp itself, on this processor."""

import logging
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import ggufs
import numpy as np
import pytest

from specllama.backend.llama import LlamaModel, buffer_type
from specllama.backend.llama_pool import open_pool
from specllama.engine.engine import Engine
from specllama.errors import CannotLoad, PairIncompatible, UsageError
from specllama.events import Finished
from specllama.settings.hardware import PlaceOptions
from specllama.settings.params import EngineOptions, GenerateParams, SamplingParams

Write = Callable[..., list[int]]


@pytest.fixture
def write(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Write:
    monkeypatch.setenv("SPECLLAMA_HOME", str(tmp_path / "home"))

    def run(
        path: Path, *, prompt: str = "the model and the token", n: int = 24, **options: Any
    ) -> list[int]:
        settings = {"threads": 1, "n_ctx": 256, **options}
        with Engine.load(path, None, EngineOptions(**settings)) as engine:
            params = GenerateParams(
                sampling=SamplingParams(temperature=0.7),
                seed=7,
                max_tokens=n,
                proposer="ngram",
                window="fixed",
                ignore_eos=True,
            )
            (*_, finished) = engine.generate(prompt, params)
            return list(finished.token_ids)

    return run


def test_experts_stay_in_ram(
    write: Write, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The list of overrides is llama.cpp's own: it says of each tensor where it went."""
    model = ggufs.write_llama(tmp_path / "moe.gguf", experts=4, quant="Q4_0")
    plain = write(model)
    with caplog.at_level(logging.DEBUG, logger="specllama.llama"):
        moved = PlaceOptions(overrides=(r"blk\.1\.ffn_(up|down)_exps=CPU", r"attn_q=CPU"))
        assert write(model, place=moved) == plain
    said = [line for line in caplog.messages if "overridden to" in line]
    assert sorted({line.split()[1] for line in said}) == [
        "blk.0.attn_q.weight",
        "blk.1.attn_q.weight",
        "blk.1.ffn_down_exps.weight",
        "blk.1.ffn_up_exps.weight",
    ]


@pytest.mark.parametrize(
    "place",
    [
        PlaceOptions(overrides=("attn_q=CUDA7",)),
        PlaceOptions(overrides=("no_such_tensor=CPU",)),
        PlaceOptions(devices="CUDA7"),
        PlaceOptions(tensor_split="1,1"),
        PlaceOptions(cpu_moe=True),
    ],
)
def test_what_llama_cpp_would_end_the_process_on_is_refused(
    write: Write, tmp_path: Path, place: PlaceOptions
) -> None:
    model = ggufs.write_llama(tmp_path / "m.gguf")
    with pytest.raises(UsageError):
        write(model, place=place)


def test_the_processor_alone(write: Write, tmp_path: Path) -> None:
    model = ggufs.write_llama(tmp_path / "m.gguf")
    assert write(model, place=PlaceOptions(devices="none")) == write(model)


def test_a_device_that_is_not_there_has_no_buffers() -> None:
    assert buffer_type("CPU")
    with pytest.raises(UsageError, match="CUDA7"):
        buffer_type("CUDA7")


@pytest.mark.parametrize("options", [{"threads": 2}, {"n_batch": 128}])
def test_threads_and_widths_change_no_text(
    write: Write, tmp_path: Path, options: dict[str, Any]
) -> None:
    model = ggufs.write_llama(tmp_path / "m.gguf")
    prompt = "the model and the token " * 12
    assert write(model, prompt=prompt, **options) == write(model, prompt=prompt)


def test_an_adapter_changes_the_text_as_far_as_its_strength(write: Write, tmp_path: Path) -> None:
    model = ggufs.write_llama(tmp_path / "m.gguf")
    adapter = ggufs.write_adapter(tmp_path / "a.gguf")
    plain = write(model)
    assert write(model, loras=(f"{adapter}:0",)) == plain
    worn = write(model, loras=(str(adapter),))
    assert worn != plain
    assert write(model, loras=(f"{adapter}:0.5", f"{adapter}:0.5")) == worn


def test_adapters_that_do_not_fit(write: Write, tmp_path: Path) -> None:
    model = ggufs.write_llama(tmp_path / "m.gguf")
    other = ggufs.write_adapter(tmp_path / "o.gguf", keys={"general.architecture": "qwen2"})
    with pytest.raises(PairIncompatible, match="adapter for qwen2"):
        write(model, loras=(str(other),))
    with pytest.raises(CannotLoad, match="not a LoRA adapter"):
        write(model, loras=(str(model),))
    # llama.cpp would end the process on this one
    odd = ggufs.write_adapter(tmp_path / "k.gguf", keys={"adapter.lora.alpha": 8})
    with pytest.raises(CannotLoad, match="alpha"):
        write(model, loras=(str(odd),))
    wide = ggufs.write_adapter(tmp_path / "w.gguf", width=128)
    with pytest.raises(CannotLoad, match="cannot use the adapter"):
        write(model, loras=(str(wide),))


def test_positions_can_be_scaled(write: Write, tmp_path: Path) -> None:
    model = ggufs.write_llama(tmp_path / "m.gguf", context=64)
    plain = write(model, n=100)
    assert write(model, n=100, rope_scale=4.0) != plain
    assert write(model, n=100, rope_scale=1.0) == plain


def test_windows_alone_write_the_same_text(write: Write, tmp_path: Path) -> None:
    """Longer than the cache of windowed layers: cells that left the window are taken again."""
    model = ggufs.write_windows(tmp_path / "w.gguf", context=2048)
    prompt = "the model and the token " * 40
    options = {"n_ctx": 2048, "n_batch": 64}
    full = write(model, prompt=prompt, n=400, **options)
    assert write(model, prompt=prompt, n=400, swa_full=False, **options) == full


@pytest.mark.parametrize("full", [False, True])
def test_conversations_take_turns_beside_windows(tmp_path: Path, full: bool) -> None:
    """A text that others parked goes on as a whole, or is read again; where all cells are kept, as
    from any place of it."""
    model = ggufs.write_windows(tmp_path / "w.gguf", context=2048)
    options = EngineOptions(n_ctx=2048, n_batch=64, threads=1, swa_full=full, check_memory=False)
    heads = [[3 + i * i % 200 for i in range(n)] for n in (300, 260, 280)]
    tails = [(7, 8, 9), (40, 41), (50,)]

    def reply(engine: Engine, prompt: list[int]) -> Finished:
        params = GenerateParams(seed=3, max_tokens=30, ignore_eos=True, proposer="none")
        *_, last = engine.generate(prompt, params)
        assert isinstance(last, Finished)
        return last

    def turns(engine: Engine, head: list[int], tail: tuple[int, ...]) -> Iterator[Finished]:
        yield (first := reply(engine, head))
        yield reply(engine, [*head, *first.token_ids, *tail])

    with Engine.load(model, None, options) as alone:
        expected = []
        for head, tail in zip(heads, tails, strict=True):
            alone.reset()
            expected.append(list(turns(alone, head, tail)))
    with Engine.load(model, None, replace(options, parallel=2)) as engine:
        assert engine.info.lanes == 1 + full
        each = [turns(engine, head, tail) for head, tail in zip(heads, tails, strict=True)]
        mixed = [[next(replies) for replies in each] for _ in range(2)]
        assert engine.figures().parked_bytes > 0
    for i, (first, second) in enumerate(expected):
        assert mixed[0][i].token_ids == first.token_ids
        assert mixed[1][i].token_ids == second.token_ids
        assert mixed[1][i].cached_n == second.cached_n > len(heads[i])


def test_a_window_that_is_gone_is_read_again(tmp_path: Path) -> None:
    model = LlamaModel(ggufs.write_windows(tmp_path / "w.gguf", context=2048), pre="gpt-2")
    text = [3 + i * i % 200 for i in range(700)]

    def row(read: int, kept: int, *, full: bool) -> np.ndarray:
        """The row of a token after ``kept`` of ``read`` tokens."""
        options = EngineOptions(n_ctx=2048, n_batch=64, swa_full=full)
        pool = open_pool(model, n_ctx=2048, max_rows=17, threads=1, options=options, flash="on")
        lane = pool.open()
        for i in range(0, read, 64):
            lane.forward(text[i : min(i + 64, read)], outputs="none")
        lane.rollback(kept)
        assert lane.n_past == kept
        rows = np.array(lane.forward([5], outputs="last"))
        model.drop(pool)
        return rows

    try:
        for kept in (690, 650, 460, 100, 20):  # there, partly gone, and long gone
            away = row(700, kept, full=False) - row(kept, kept, full=True)
            assert float(np.abs(away).max()) < 0.05, kept  # reading again takes other kernels
    finally:
        model.close()
