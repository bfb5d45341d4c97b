"""Our kernels in llama.cpp: used at once, alike in any width, and off where anything is unusual."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from specllama import kernels
from specllama.backend import trial
from specllama.backend.base import Lane
from specllama.backend.llama import LlamaModel
from specllama.backend.llama_pool import open_pool
from specllama.cancel import Cancel
from specllama.engine.engine import Engine
from specllama.errors import Cancelled
from specllama.events import Finished
from specllama.models.quantization import prepare, run
from specllama.models.refs import bundled
from specllama.settings.params import EngineOptions, GenerateParams, SamplingParams

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.skipif(bool(kernels.missing()), reason="built without kernels"),
    pytest.mark.timeout(200),
]
TEXT = [5, 9, 200, 31, 77, 1024, 8, 300, 12, 13, 14, 15, 600, 17, 18, 19, 20]


def load(**options: Any) -> Engine:
    return Engine.load("tiny-target", "tiny-draft", EngineOptions(n_ctx=512, **options))


def written(engine: Engine, proposer: str, temperature: float = 0.0) -> tuple[int, ...]:
    engine.reset()
    sampling = SamplingParams(temperature=temperature)
    params = GenerateParams(max_tokens=40, seed=3, proposer=proposer, sampling=sampling)
    finished = list(engine.generate("Tell me of the river.", params))[-1]
    assert isinstance(finished, Finished)
    return finished.token_ids


def opened(model: LlamaModel, threads: int) -> Lane:
    options = EngineOptions().resolved(on_gpu=False, one_kv_type=False)
    return open_pool(model, n_ctx=512, max_rows=17, threads=threads, options=options).open()


def rows(model: LlamaModel, threads: int, width: int) -> np.ndarray[Any, Any]:
    """The rows of a text that is read in passes of one width."""
    lane = opened(model, threads)
    found = [
        lane.forward(TEXT[at : at + width], outputs="all").copy()
        for at in range(0, len(TEXT), width)
    ]
    lane.close()
    return np.concatenate(found)


def test_they_are_used_and_drafts_change_no_text() -> None:
    with load(threads=1) as engine:
        assert engine.info.target.kernels == kernels.best()
        assert engine.info.draft is not None
        assert engine.info.draft.kernels
        assert engine.info.target.to_dict()["kernels"]
        for temperature in (0.0, 0.8):
            plain = written(engine, "none", temperature)
            assert written(engine, "draft", temperature) == plain
            assert written(engine, "ngram", temperature) == plain


def test_off_is_llama_cpp_alone() -> None:
    for options in ({"kernels": "off"}, {"repack": "on"}, {"repack": "off"}):
        with load(threads=1, **options) as engine:
            assert not engine.info.target.kernels


@pytest.mark.parametrize("kind", ["q4_k_s", "q6_k", "iq4_xs", "q5_1", "q8_0", "bf16"])
def test_a_row_is_a_row(tmp_path: Path, kind: str) -> None:
    """In any width, with any number of threads, mapped or read, and beside another model; one type
    of each family of kernels (``unit/kernels/test_bits.py`` has them all)."""
    path = tmp_path / f"tiny-{kind}.gguf"
    run(prepare(bundled("tiny-target"), path, kind, requantize=True, pure=True, threads=1))
    first = LlamaModel(path, gpu_layers="0", kernels=True)
    expected = rows(first, 1, 1)
    assert np.isfinite(expected).all()
    # few passes where there may be more threads than processors: each waits for the others
    for threads, width in ((1, 3), (1, 5), (1, 8), (2, 17), (3, 9), (4, 17)):
        assert np.array_equal(rows(first, threads, width), expected), (threads, width)
    second = LlamaModel(path, gpu_layers="0", kernels=True, use_mmap=False)
    stored = LlamaModel(path, gpu_layers="0", repack=False)
    first.close()
    assert np.array_equal(rows(second, 2, 9), expected)
    assert np.abs(rows(stored, 1, 1) - expected).max() < 0.35 * np.abs(expected).max()
    second.close()
    stored.close()


def test_a_pass_can_be_stopped_and_another_follows() -> None:
    stop = Cancel()
    model = LlamaModel(bundled("tiny-target"), gpu_layers="0", kernels=True, stop=stop)
    lane = opened(model, 2)
    lane.forward(TEXT, outputs="last")
    threading.Thread(target=lambda: (time.sleep(0.02), stop.set())).start()

    def go_on() -> None:
        while True:
            lane.forward(TEXT * 8, outputs="last")
            lane.rollback(len(TEXT))

    with pytest.raises(Cancelled):
        go_on()
    stop.clear()
    lane.rollback(0)
    assert lane.forward(TEXT, outputs="all").shape[0] == len(TEXT)
    model.close()


ALONE = """
from specllama import kernels
found = kernels.install()
assert found.name, found.why
import ctypes, sys, llama_cpp
log = []
keep = llama_cpp.llama_log_callback(lambda level, text, user: log.append(text))
llama_cpp.llama_log_set(keep, ctypes.c_void_p(0))
llama = llama_cpp.Llama(sys.argv[1], n_ctx=256, n_threads=1, verbose=False, logits_all=True)
llama_cpp.llama_log_set(keep, ctypes.c_void_p(0))
print(llama.create_completion("Tell me of", max_tokens=8, temperature=0)["choices"][0]["text"])
print(kernels.install().name)
"""


def test_any_program_over_the_binding_has_them_by_one_line() -> None:
    command = [sys.executable, "-c", ALONE, str(bundled("tiny-target"))]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.splitlines()[-1] == kernels.best()


@pytest.fixture
def unchecked(monkeypatch: pytest.MonkeyPatch, home: Path) -> None:
    monkeypatch.setattr(trial, "_checked", {})
    monkeypatch.setattr(trial.verdicts, "known", lambda *args: None)
    monkeypatch.setattr(trial.verdicts, "keep", lambda *args: None)


@pytest.mark.parametrize(
    ("script", "why"),
    [
        ("print('none: llama.cpp is another build: ggml 9.9')", "another build"),
        ("print('Q4_K, 3 rows'); print('different: Q4_K, 3 rows')", "their results are wrong here"),
        ("print('Q6_K, 1 rows', flush=True); import os; os.abort()", "ended by SIGABRT here: Q6_K"),
        ("print('they are loaded'); raise SystemExit(1)", "ended here: they are loaded"),
        ("", "nothing was logged"),
    ],
)
def test_whatever_is_unexpected_leaves_llama_cpp(
    unchecked: None, monkeypatch: pytest.MonkeyPatch, script: str, why: str
) -> None:
    ended = trial._ended
    monkeypatch.setattr(trial, "_ended", lambda folder, *arguments: ended(folder, "-c", script))
    found = trial.kernels()
    assert not found.name
    assert why in found.why
    with load(threads=1) as engine:
        assert not engine.info.target.kernels
        assert written(engine, "draft") == written(engine, "none")


def test_the_check_goes_well_here(unchecked: None) -> None:
    assert trial.kernels().name == kernels.best()


def test_another_build_of_ggml_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "GGML", ("0.0.1", "abc"))
    monkeypatch.setattr(kernels, "_installed", None)
    found = kernels.install()
    assert not found.name
    assert found.why.startswith("llama.cpp is another build: ggml 0.25")
