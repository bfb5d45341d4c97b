"""Every command that loads a pair takes it from the same settings."""

from pathlib import Path
from typing import Any

import pytest
from engines import engine_over

from specllama.cli import invoke, loading
from specllama.engine.engine import Engine
from specllama.errors import ModelUnavailable
from specllama.paths import config_file
from specllama.settings.params import EngineOptions, GenerateParams

COMMANDS = (["run", "Hi"], ["chat", "--plain"], ["prove"], ["tune"], ["bench", "run"])


@pytest.fixture
def loads(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, Any, EngineOptions]]:
    """What ``loading.load`` was asked for; it never answers."""
    asked: list[tuple[Any, Any, EngineOptions]] = []

    def load(target: Any, draft: Any, options: EngineOptions, **more: Any) -> Engine:
        asked.append((target, draft, options))
        raise ModelUnavailable("far enough")

    monkeypatch.setattr(loading, "load", load)
    return asked


@pytest.fixture(autouse=True)
def layers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A setting from each source: user file, project file, environment."""
    monkeypatch.chdir(tmp_path)
    config_file().parent.mkdir(parents=True)
    config_file().write_text('draft-model = "small.gguf"\nctx-size = 512\nthreads = 1\n')
    (tmp_path / "specllama.toml").write_text('ctx-size = 1024\nhead = ["head.gguf"]\n')
    monkeypatch.setenv("SPECLLAMA_MODEL", "big.gguf")
    monkeypatch.setenv("SPECLLAMA_CACHE_TYPE_K", "q8_0")


@pytest.mark.parametrize("command", COMMANDS, ids=lambda words: words[0])
def test_variables_and_files_name_the_pair(
    command: list[str], loads: list[tuple[Any, Any, EngineOptions]]
) -> None:
    assert invoke(command) == 3
    target, draft, options = loads[0]
    assert (target, draft) == ("big.gguf", "small.gguf")
    assert options == EngineOptions(n_ctx=1024, threads=1, heads=("head.gguf",), kv_type_k="q8_0")


@pytest.mark.parametrize("command", COMMANDS, ids=lambda words: words[0])
def test_a_typed_flag_wins(command: list[str], loads: list[tuple[Any, Any, EngineOptions]]) -> None:
    assert invoke([*command, "-m", "mine.gguf", "-c", "2048"]) == 3
    assert loads[0][0] == "mine.gguf"
    assert loads[0][2].n_ctx == 2048


@pytest.mark.parametrize("command", COMMANDS[2:], ids=lambda words: words[0])
def test_a_measurement_names_what_it_rests_on(
    command: list[str],
    loads: list[tuple[Any, Any, EngineOptions]],
    capsys: pytest.CaptureFixture[str],
) -> None:
    invoke([*command, "-c", "2048"])
    said = capsys.readouterr().err
    assert "model = 'big.gguf' (SPECLLAMA_MODEL)" in said
    assert f"draft-model = 'small.gguf' ({config_file()})" in said
    assert "ctx-size" not in said


def test_a_wrong_setting_is_refused_before_anything_is_loaded(
    monkeypatch: pytest.MonkeyPatch, loads: list[tuple[Any, Any, EngineOptions]]
) -> None:
    monkeypatch.setenv("SPECLLAMA_THREADS", "many")
    assert [invoke(command) for command in COMMANDS] == [2] * len(COMMANDS)
    assert not loads


def test_prove_draws_as_the_settings_say(monkeypatch: pytest.MonkeyPatch) -> None:
    from engines import FakeContext
    from table_model import FakeTable

    from specllama.bench import proof, rounding

    seen: list[dict[str, Any]] = []

    def prove(engine: Engine, prompts: Any, **arguments: Any) -> list[Any]:
        seen.append(arguments)
        return []

    def load(target: Any, draft: Any, options: Any, **more: Any) -> Engine:
        table = FakeTable(seed=3, order=1)
        return engine_over(FakeContext(table, n_ctx=2048))

    monkeypatch.setattr(loading, "load", load)
    monkeypatch.setattr(proof, "prove", prove)
    monkeypatch.setattr(rounding, "probe_stated_rows", lambda engine, prompts: [])
    monkeypatch.setattr(proof, "available", lambda engine, wanted: (tuple(wanted), {}))
    monkeypatch.setenv("SPECLLAMA_TOP_K", "7")
    monkeypatch.setenv("SPECLLAMA_TEMPERATURE", "0.3")
    monkeypatch.setenv("SPECLLAMA_PROPOSER", "ngram")
    monkeypatch.setenv("SPECLLAMA_SPECULATE", "no")
    monkeypatch.setenv("SPECLLAMA_DRAFT_MAX", "0")
    assert invoke(["prove", "-n", "1"]) == 0
    assert invoke(["prove", "-n", "1", "--temperature", "0", "--proposer", "suffix"]) == 0
    first, second = seen
    assert isinstance(first["base"], GenerateParams)
    assert first["base"].sampling.top_k == 7
    assert (first["temperatures"], first["proposers"]) == ((0.3,), ("ngram",))
    assert first["draft_max"] == (4,), "a proof without drafts would prove nothing"
    assert (second["temperatures"], second["proposers"]) == ((0.0,), ("suffix",))
