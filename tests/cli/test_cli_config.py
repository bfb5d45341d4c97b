"""Settings: precedence, origins, editing files in place, completion scripts."""

import dataclasses
import os
import subprocess
import sys
import tomllib
from dataclasses import replace
from pathlib import Path

import ggufs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from specllama.errors import ConfigError, UsageError
from specllama.paths import config_file
from specllama.settings.config_file import load_settings, write_setting
from specllama.settings.hardware import PlaceOptions
from specllama.settings.params import EngineOptions, GenerateParams, SamplingParams
from specllama.settings.schema import BY_NAME, GONE, SCHEMA
from specllama.settings.setting import variable_of


def write(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def test_precedence_and_origin(tmp_path: Path) -> None:
    user = write(config_file(), "seed = 1\ntop-k = 1\nmin-p = 0.1\ndraft_max = 1\n")
    project = write(tmp_path / "specllama.toml", "seed = 2\ntop-k = 2\nmin-p = 0.2\n")
    environ = {"SPECLLAMA_SEED": "3", "SPECLLAMA_TOP_K": "3", "SPECLLAMA_HOME": "x"}
    settings = load_settings(environ=environ, project=project).with_flags({"seed": 4})
    assert [settings[name] for name in ("seed", "top-k", "min-p", "draft-max")] == [4, 3, 0.2, 1]
    assert settings.origin("seed") == "flag"
    assert settings.origin("top-k") == "SPECLLAMA_TOP_K"
    assert settings.origin("min-p") == str(project)
    assert settings.origin("draft-max") == str(user)
    assert settings.origin("top-p") == "default"


def test_defaults_are_those_of_the_parameters() -> None:
    settings = load_settings(environ={})
    assert settings.engine_options() == EngineOptions()
    params = settings.generate_params()
    assert params.replace(from_card=()) == GenerateParams()
    # no logit bias, and no sampler that only requests name
    assert len(params.from_card) == len(dataclasses.fields(SamplingParams)) - 2


def test_every_field_that_should_be_is_a_setting() -> None:
    fields = {setting.field for setting in SCHEMA}
    for room, kind, left_out in (
        ("engine", EngineOptions, {"max_rows", "max_leaves", "parallel", "swa_full", "place"}),
        ("place", PlaceOptions, set()),
        ("sampling", SamplingParams, {"logit_bias", "infill"}),
        (
            "generate",
            GenerateParams,
            {
                "sampling",
                "from_card",
                "grammar",
                "json_schema",
                "regex",
                "calls",
                "chances",
                "spelled",
                "scope",
                "fresh",
                "owner",
                "slot",
                "ahead",
                "prediction",
                "at_suffix",
                "repeats",
                "indent",
                "most_ms",
                "min_speculative_tokens",
            },
        ),
    ):
        names = {f.name for f in dataclasses.fields(kind)} - left_out
        assert {f"{room}.{name}" for name in names} <= fields
    assert len(fields) == len(BY_NAME) == len(SCHEMA)
    for setting in SCHEMA:
        assert setting.help.endswith(".")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("temprature = 1", "did you mean temperature?"),
        ("[sampling]\ntemperature = 1", "there is no setting 'sampling'"),
        ("seed = ", "is not TOML"),
        ("seed = true", "seed must be a whole number"),
        ("seed = 1.5", "seed must be a whole number"),
        ("temperature = '1'", "temperature must be a number"),
        ("temperature = nan", "temperature must be a finite number"),
        ("speculate = 1", "speculate must be true or false"),
        ("stop = 'x'", "stop must be a list of texts"),
        ("stop = [1]", "stop must be a list of texts"),
        ("proposer = 'nobody'", "proposer must be one of"),
        ("model = 3", "model must be a text"),
        ("yarn_ext_factor = 1", "the model's file says it"),
    ],
)
def test_wrong_files(text: str, words: str) -> None:
    path = write(config_file(), text)
    with pytest.raises(ConfigError) as caught:
        load_settings(environ={})
    assert words in f"{caught.value.message} {caught.value.hint}"
    assert str(path) in caught.value.message


def test_files_that_are_not_text() -> None:
    write(config_file(), "").write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="is not TOML"):
        load_settings(environ={})
    config_file().unlink()
    config_file().mkdir()
    with pytest.raises(ConfigError, match="cannot read"):
        load_settings(environ={})


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("seed", "5", 5),
        ("temperature", "0", 0.0),
        ("speculate", "no", False),
        ("log", "ON", True),
        ("stop", "END", ("END",)),
        ("stop", '["a", "b"]', ("a", "b")),
        ("gpu-layers", "3", "3"),
        ("model-dirs", f"/a{os.pathsep}/b c{os.pathsep}", ("/a", "/b c")),
        ("model", "x y", "x y"),
    ],
)
def test_environment(name: str, text: str, value: object) -> None:
    assert load_settings(environ={variable_of(name): text})[name] == value


@pytest.mark.parametrize("name", GONE)
def test_settings_that_are_gone(name: str) -> None:
    assert name not in BY_NAME
    with pytest.raises(ConfigError) as caught:
        load_settings(environ={variable_of(name): "1"})
    assert (caught.value.message, caught.value.hint) == (
        f"{variable_of(name)}: the setting {name} is gone",
        GONE[name],
    )


def test_what_is_gone_can_be_taken_out(cli) -> None:
    write(config_file(), 'numa = "distribute"\nyarn_ext_factor = 1\nseed = 3\n')
    refused = cli("config", "show")
    assert (refused.code, "the setting numa is gone; take it out" in refused.err) == (2, True)
    assert cli("config", "unset", "numa").code == 0
    assert cli("config", "unset", "yarn-ext-factor").code == 0
    assert cli("config", "show").out == "seed = 3\n"
    assert "the setting numa is gone" in cli("config", "unset", "numa").err


@pytest.mark.parametrize(("name", "text"), [("seed", "x"), ("speculate", "maybe"), ("top-p", "2")])
def test_wrong_environment(name: str, text: str) -> None:
    with pytest.raises(ConfigError, match=variable_of(name)):
        load_settings(environ={variable_of(name): text})


def test_set_keeps_comments_and_other_lines(tmp_path: Path) -> None:
    path = write(
        tmp_path / "c.toml", '# mine\nmodel = "a"  # the good one\n\ndraft_max = 3\n# end\n'
    )
    write_setting(path, "model", "b # c")
    write_setting(path, "draft-max", 4)
    write_setting(path, "stop", ("x", '"q"\n'))
    assert path.read_text() == (
        '# mine\nmodel = "b # c"  # the good one\n\ndraft_max = 4\n# end\n'
        'stop = ["x", "\\"q\\"\\n"]\n'
    )
    write_setting(path, "model", None)
    assert tomllib.loads(path.read_text()) == {"draft_max": 4, "stop": ["x", '"q"\n']}
    assert [p.name for p in tmp_path.glob("*c.toml*")] == ["c.toml"]


@given(text=st.text(max_size=30), number=st.floats(0, 100))
def test_whatever_is_set_is_read(tmp_path_factory, text: str, number: float) -> None:
    path = tmp_path_factory.mktemp("c") / "c.toml"
    text = text.encode("utf-8", "replace").decode()
    write_setting(path, "system", text)
    write_setting(path, "temperature", number)
    write_setting(path, "system", text + "x")
    assert tomllib.loads(path.read_text("utf-8")) == {"system": text + "x", "temperature": number}


def test_a_value_over_several_lines_is_left_to_an_editor(tmp_path: Path) -> None:
    path = write(tmp_path / "c.toml", "stop = [\n  'a',\n]\n")
    before = path.read_text()
    with pytest.raises(ConfigError, match="several lines"):
        write_setting(path, "stop", ("b",))
    assert path.read_text() == before
    with pytest.raises(UsageError):
        write_setting(path, "temperature", -1.0)


def test_the_command(cli, tmp_path: Path, monkeypatch) -> None:
    assert cli("config", "path").out == f"{config_file()}\n"
    assert "everything is at its default" in cli("config", "show").err
    assert cli("config", "set", "temprature", "1").code == 2
    assert cli("config", "set", "temperature", "-1").code == 2
    assert cli("config", "set", "temperature", "0.5").code == 0
    assert cli("config", "set", "--project", "draft_max", "2").code == 0
    assert cli("config", "show").out == "draft-max = 2\ntemperature = 0.5\n"
    shown = cli("config", "show", "--origin").out
    assert f"# {tmp_path / 'specllama.toml'}" in shown
    assert f"# {config_file()}" in shown
    assert cli("config", "show", "temperature").out == "0.5\n"
    rows = {row["name"]: row for row in cli("config", "show", "--json").json[0]["settings"]}
    assert len(rows) == len(SCHEMA)
    assert rows["temperature"]["origin"] == str(config_file())
    assert rows["top-k"] == {"name": "top-k", "value": 40, "origin": "default", "default": 40}
    monkeypatch.setenv("SPECLLAMA_TEMPERATURE", "1")
    assert (
        "SPECLLAMA_TEMPERATURE sets temperature, too, and wins"
        in cli("config", "set", "temperature", "0.6").err
    )
    monkeypatch.delenv("SPECLLAMA_TEMPERATURE")
    assert cli("config", "unset", "temperature").code == 0
    assert cli("config", "unset", "temperature").code == 2
    every = cli("config", "show", "--all").out
    assert "# seed is not set" in every
    assert all(f"# {setting.help}\n" in every for setting in SCHEMA)


def test_a_folder_that_cannot_be_written(cli, home: Path) -> None:
    home.write_text("in the way")
    result = cli("config", "set", "temperature", "0.5")
    assert result.code == 2
    assert "cannot write" in result.err


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_scripts(cli, shell: str) -> None:
    result = cli("completion", shell)
    assert result.code == 0
    assert "_SPECLLAMA_COMPLETE" in result.out


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("specllama lo", "log"),
        ("specllama run --draft-", "--draft-max"),
        ("specllama run --verify ", "rejection"),
        ("specllama run --model ti", "tiny"),
        ("specllama pair tiny-t", "tiny-target"),
        ("specllama hub info tiny-d", "tiny-draft"),
        ("specllama hub pull qwen3-8", "qwen3-8b"),
        ("specllama config set temp", "temperature"),
        ("specllama config show draft-m", "draft-max"),
        ("specllama log show la", "last"),
        ("specllama history rm la", "last"),
        ("specllama chat --resume la", "last"),
    ],
)
def test_completion_answers(home: Path, words: str, expected: str) -> None:
    env = {
        **os.environ,
        "_SPECLLAMA_COMPLETE": "zsh_complete",
        "COMP_WORDS": words,
        "COMP_CWORD": str(len(words.split(" ")) - 1),
    }
    done = subprocess.run(
        [sys.executable, "-m", "specllama"], env=env, capture_output=True, text=True, timeout=30
    )
    assert expected in done.stdout, done.stderr


# -- what comes from a model's card --


def test_run_samples_as_the_card_says(cli) -> None:
    info = cli.engine.info
    target = replace(info.target, card={"temperature": 0.6, "top_k": 20})
    cli.engine.info = replace(info, target=target)
    assert cli("run", "Hi", "--top-k", "5").code == 0
    sampling = cli.engine.requests[-1].params.sampling
    assert (sampling.temperature, sampling.top_k) == (0.6, 5)


def test_verbose_says_what_was_decided(tmp_path: Path) -> None:
    model = ggufs.write_llama(tmp_path / "m.gguf", keys={"general.sampling.mirostat": 2})
    command = [sys.executable, "-m", "specllama", "-v", "run", "-n", "2", "-t", "1"]
    command += ["-m", str(model), "Hi"]
    said = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stderr
    assert "context: 512 tokens, the trained length" in said
    assert "mirostat" in said
    assert "llama_model_loader" not in said
    quiet = subprocess.run(
        [*command[:3], *command[4:]], capture_output=True, text=True, timeout=120
    )
    assert "context: " not in quiet.stderr
