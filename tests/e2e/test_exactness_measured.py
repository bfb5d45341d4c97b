"""Exactness on real files: measured when it is asked for, once, and again when something else."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import ggufs
import pytest
from engines import measured
from ggufs_latent import write_latent
from ggufs_nextn import write_nextn

from specllama.backend import devices, probe
from specllama.cancel import Cancel
from specllama.engine.engine import Engine
from specllama.events import Event
from specllama.models.quantization import prepare, run
from specllama.models.refs import bundled
from specllama.settings.params import EngineOptions, GenerateParams

pytestmark = pytest.mark.e2e

TARGET = bundled("tiny-target")


def info(path: Path = TARGET, **options: Any) -> Any:
    chosen = EngineOptions(**{"threads": 1, "n_ctx": 512, **options})
    with measured(path, None, chosen) as engine:
        return engine.info


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    counted: list[int] = []
    measure = probe.probe

    def counting(*arguments: Any, **more: Any) -> Any:
        counted.append(1)
        return measure(*arguments, **more)

    monkeypatch.setattr(probe, "probe", counting)
    return counted


def test_it_is_measured_once_for_a_file_a_build_a_machine_and_its_settings(
    calls: list[int], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    file = ggufs.write_llama(tmp_path / "small.gguf")
    first = info(file)
    assert info(file, n_ctx=1024).measured == first.measured
    assert len(calls) == 1
    for i, changed in enumerate(
        ({"threads": 2}, {"kv_type_k": "q8_0"}, {"flash_attn": "off"}, {"use_mmap": False}), 2
    ):
        info(file, **changed)
        assert len(calls) == i
    monkeypatch.setattr(devices, "cpu_features", lambda: "another machine")
    info(file)
    monkeypatch.setattr(devices, "library_files", lambda: ["another build"])
    info(file)
    info(file)
    assert len(calls) == 7


def test_products_that_differ_are_seen_where_logits_hide_it() -> None:
    """Without flash attention a last bit reaches the logits in a few rows of a hundred."""
    found = info(flash_attn="off", kv_type_k="f32", kv_type_v="f32")
    assert found.exactness == "near-ties possible"
    assert found.exact_rows == 1
    assert not found.exact_trees


@pytest.mark.parametrize("arch", ["mamba", "qwen35", "qwen3next"])
def test_running_states_are_measured_like_any_other(tmp_path: Path, arch: str) -> None:
    model = tmp_path / f"{arch}.gguf"
    if arch == "mamba":
        ggufs.write_mamba(model)
    else:
        write_nextn(model, arch)
    found = info(model)
    assert found.exactness == "near-ties possible"  # of F32 weights
    assert found.measured.startswith("passes of 2")
    smaller = tmp_path / f"{arch}-q8_0.gguf"
    run(prepare(model, smaller, "q8_0", pure=True))
    assert info(smaller).measured.startswith("passes of 2")


def test_latent_attention_is_measured_like_any_other(tmp_path: Path) -> None:
    simple = info(write_latent(tmp_path / "latent.gguf", width=64, quant="Q8_0"))
    assert simple.measured.startswith("passes of 2")


def test_a_load_measures_nothing_unless_it_has_to(calls: list[int]) -> None:
    options = EngineOptions(threads=1, n_ctx=512)
    with Engine.load(TARGET, None, options) as engine:
        assert engine.info.exact_rows == 0
        assert engine.info.exactness == "near-ties possible (not measured yet)"
        assert "specllama tune" in engine.info.measured
        assert not calls
        assert engine.measure()
        assert engine.info.exactness.startswith("bitwise up to")
        assert engine.measure()
    with Engine.load(TARGET, None, options) as engine:
        assert engine.info.exact_rows > 1
    assert len(calls) == 1
    with Engine.load(TARGET, None, replace(options, exact="on")):  # passes are kept to widths
        assert len(calls) == 2


def test_a_measurement_that_is_stopped_keeps_nothing_and_begins_anew(home: Path) -> None:
    cancel, told = Cancel(), []

    def report(event: Event) -> None:
        told.append(event)
        if len(told) == 5:
            cancel.set()

    with Engine.load(TARGET, None, EngineOptions(threads=1, n_ctx=512)) as engine:
        assert not engine.measure(report, cancel=cancel)
        assert len(told) == 5
        assert engine.info.exact_rows == 0
        assert not list(home.rglob("exactness/*.json"))
        assert list(engine.generate("It writes as ever.", GenerateParams(max_tokens=4)))
        assert engine.measure()
        assert list(home.rglob("exactness/*.json"))


def test_a_failed_measurement_claims_nothing_and_loads(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: Any, **more: Any) -> Any:
        raise probe.EngineError("no passes today")

    monkeypatch.setattr(probe, "probe", refuse)
    found = info()
    assert found.exact_rows == 1
    assert "no passes today" in found.measured
