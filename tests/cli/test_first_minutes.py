"""What a newcomer types first, and what others leave in a folder."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from fakes import Reply

from specllama import cli as command_line
from specllama import paths
from specllama.cli import ELSEWHERE, SHORT, chat, diagnostics, invoke
from specllama.cli.run import read_prompt
from specllama.models.gguf import read_header
from specllama.models.memory import context_length
from specllama.models.refs import bundled, parse_hub, plain, resolve


@pytest.mark.parametrize("key", ["rpc", "draft-from"])
def test_a_folder_does_not_decide_where_texts_go(
    cli, key: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    value = '["box:1"]' if key == "draft-from" else '"box:1"'
    Path("specllama.toml").write_text(f"{key} = {value}\n")
    result = cli("run", "Hi")
    assert result.code == 2
    assert f"{key} cannot come from the file of a folder" in result.err
    os.rename("specllama.toml", "mine.toml")
    paths.config_file().parent.mkdir(parents=True)
    paths.config_file().write_text(f"{key} = {value}\n".replace("box", "127.0.0.1"))
    assert cli("run", "Hi").code == 0


def test_what_a_folder_sets_is_named(cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("specllama.toml").write_text('system = "You are a pirate."\n')
    assert "specllama.toml: system = 'You are a pirate.'" in cli("run", "Hi").err
    assert "pirate" in cli("chat", "--plain", stdin=b"Hi\n").err
    assert "pirate" not in cli("run", "-q", "Hi").err


def test_input_and_prompt_are_joined() -> None:
    read, write = os.pipe()
    os.write(write, b"some notes\n")
    os.close(write)
    code = "from specllama.cli.run import read_prompt; print(read_prompt('Sum up.', raw=False))"
    done = subprocess.run([sys.executable, "-c", code], stdin=read, capture_output=True, text=True)
    assert done.stdout == "some notes\n\nSum up.\n"
    done = subprocess.run(
        [sys.executable, "-c", code], stdin=subprocess.DEVNULL, capture_output=True, text=True
    )
    assert done.stdout == "Sum up.\n"
    assert read_prompt("Sum up.", raw=True) == "Sum up."


def test_input_that_is_slow_is_read_whole_and_said() -> None:
    """A pipe that is left open is waited for, as the prompt's half may still come; a line says
    so."""
    code = (
        "import specllama.cli.run as run; run.WAITS_S = 0.05; "
        "print(run.read_prompt('Sum up.', raw=False))"
    )
    done = subprocess.Popen(
        [sys.executable, "-c", code],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert "from standard input" in done.stderr.readline()
    done.stdin.write("late notes\n")
    out, err = done.communicate()
    assert (out, err) == ("late notes\n\nSum up.\n", "")


@pytest.mark.parametrize(
    "words", [["history", "ls"], ["log", "ls"], ["run", "Hi"], ["hub", "ls"], ["config", "show"]]
)
def test_a_home_that_cannot_be_written_to_is_named_in_every_command(
    cli, words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    assert "nothing can be kept" not in cli(*words).err
    monkeypatch.setenv("SPECLLAMA_HOME", str(tmp_path / "file" / "home"))
    said = cli(*words).err
    assert f"{tmp_path / 'file'} is no folder" in said
    assert "SPECLLAMA_HOME=FOLDER specllama" in said


def test_a_folder_is_barred_by_what_it_lies_in(tmp_path: Path) -> None:
    assert paths.barred(tmp_path / "a" / "b") == ""
    (tmp_path / "file").touch()
    assert "is no folder" in paths.barred(tmp_path / "file" / "b")
    assert list(tmp_path.iterdir()) == [tmp_path / "file"], "nothing is made"


def test_a_library_that_cannot_be_mapped_is_no_bug(tmp_path: Path) -> None:
    """Short of memory, or damaged: the binding raises the same."""
    name = {"darwin": "libllama.dylib", "win32": "llama.dll"}.get(sys.platform, "libllama.so")
    (tmp_path / name).write_bytes(b"\x7fELF")
    done = subprocess.run(
        [sys.executable, "-m", "specllama", "run", "-n", "4", "Hi"],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        env={**os.environ, "LLAMA_CPP_LIB_PATH": str(tmp_path)},
    )
    assert done.returncode == 5, done.stderr
    assert "llama.cpp cannot be loaded: " in done.stderr
    assert "bug" not in done.stderr


def test_a_worker_speaks_when_it_can_be_one(cli) -> None:
    from specllama.backend import rpc
    from specllama.errors import CannotLoad

    try:
        rpc._backend_function("ggml_backend_rpc_start_server")
    except CannotLoad:
        result = cli("rpc-worker")
        assert (result.code, result.out) == (5, "")


@pytest.mark.parametrize("kind", ["--json-schema", "--grammar"])
def test_a_reply_that_was_cut_before_its_schema_was_satisfied_fails(cli, kind: str) -> None:
    value = '{"type": "array"}' if kind == "--json-schema" else 'root ::= "a"+'
    cli.reply(Reply("[1, 2, 3", reason="context"))
    cut = cli("run", kind, value, "x")
    assert (cut.code, cut.out) == (1, "[1, 2, 3\n")
    assert "was satisfied; next: more room" in cut.err
    cli.reply(Reply("[1, 2, 3]"))
    assert cli("run", kind, value, "x").code == 0
    cli.reply(Reply("[1, 2, 3", reason="context"))
    assert cli("run", "x").code == 0


def test_a_bias_of_no_token_is_refused() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "specllama", "run", "-n", "9", "--logit-bias", "999999=1", "Hi"],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2
    assert "token 999999 is outside the vocabulary" in done.stderr


def test_lines_to_copy_have_quotes_that_a_shell_knows() -> None:
    """Around a title, in a sentence, they may be curly; never in a line that is a command."""
    for path in Path(command_line.__file__).parent.glob("*.py"):
        for line in path.read_text("utf-8").splitlines():
            if "“" in line and path.name != "output.py":
                assert "specllama " not in line.split("“")[0], (path.name, line)


def test_a_prompt_that_is_not_utf8_has_a_next_step(cli, tmp_path: Path) -> None:
    file = tmp_path / "from powershell.txt"
    file.write_bytes("Hi".encode("utf-16"))
    result = cli("run", "-f", str(file))
    assert result.code == 2
    assert "iconv -f UTF-16 -t UTF-8 '" in result.err  # quoted for a shell


def test_the_package_shows_its_names() -> None:
    import specllama

    assert {"Engine", "GenerateParams", "Message", "Session"} <= set(dir(specllama))
    assert specllama.Message("user", "Hi").content == "Hi"


def test_a_list_of_a_folder_is_named_as_it_is_written(
    cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("specllama.toml").write_text('lora = ["x.gguf", "y.gguf"]\n')
    assert "lora = 'x.gguf, y.gguf'" in cli("run", "Hi").err


def test_a_models_name_in_the_place_of_the_prompt(cli) -> None:
    assert "specllama run -m qwen3-8b PROMPT" in cli("run", "qwen3-8b").err
    assert "-m" not in cli("run", "Hello").err.replace("choose one with -m", "")
    for args in (("run", "tiny", "hello"), ("chat", "qwen3-8b"), ("serve", "tiny")):
        result = cli(*args)
        assert (result.code, "a model goes with -m" in result.err) == (2, True), args


def test_a_suggestion_is_made_once(cli, nobody_else: Path, tmp_path: Path) -> None:
    assert cli("hub", "path", "tinny").err.count("tiny-draft") == 1
    loop = tmp_path / "loop.gguf"
    loop.symlink_to("loop.gguf")
    assert "did you mean" not in cli("hub", "path", str(loop)).err


def test_more_threads_than_cores_are_warned_of(cli) -> None:
    assert "may compute here" in cli("run", "-t", "1024", "Hi").err
    assert "may compute here" not in cli("run", "-t", "1", "Hi").err


def test_a_local_file_is_verified_by_its_structure(cli, tmp_path: Path) -> None:
    sound = (paths.bundled_dir() / "tiny-draft-q8_0.gguf").read_bytes()
    file = tmp_path / "some.gguf"
    file.write_bytes(sound)
    result = cli("hub", "verify", str(file))
    assert (result.code, "tensor lengths are right" in result.out) == (0, True)
    assert "hashing" not in result.err
    file.write_bytes(sound[: len(sound) // 2])
    result = cli("hub", "verify", str(file))
    assert result.code != 0
    assert "damaged" in result.out
    assert "hashing" not in cli("hub", "verify").err
    assert "comes with specllama" in cli("hub", "rm", "-y", "tiny").err


def test_the_app_alone_gives_its_exit_code(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal:
        def __init__(self, under: object) -> None:
            self._under = under

        def isatty(self) -> bool:
            return True

        def __getattr__(self, name: str) -> object:
            return getattr(self._under, name)

    for name in ("stdin", "stdout", "stderr"):
        monkeypatch.setattr(sys, name, Terminal(getattr(sys, name)))
    monkeypatch.setattr(chat, "_can_draw", lambda: True)
    monkeypatch.setattr(chat, "_terminal_app", lambda *args: diagnostics.Exit.TERMINATED)
    assert command_line.invoke([]) == 143


@pytest.mark.parametrize("name", ["run", "chat", "serve"])
def test_short_help_fits_on_a_screen(cli, name: str) -> None:
    brief, whole = cli(name, "-h"), cli(name, "--help")
    assert (brief.code, whole.code) == (0, 0)
    lines = brief.out.splitlines()
    assert len(lines) <= 24
    assert max(map(len, lines)) <= 80
    for words in ("--model", "--ctx-size", "--set", f"specllama {name} --help", "config show"):
        assert words in brief.out
    for option in ("--top-k", "--draft-max", "--set", "Examples:"):
        assert option in whole.out


# -- habits of other tools get an answer --


def test_numbers_that_mean_none(cli, monkeypatch) -> None:
    monkeypatch.setenv("SPECLLAMA_MAX_TOKENS", "9")
    cli("run", "Hi", "-n", "-1", "-c", "0", "--seed", "-1")
    settings = cli.opened[-1]
    assert settings["max-tokens"] is None
    assert settings["seed"] is None
    assert settings.engine_options().n_ctx == 0
    assert cli("run", "Hi", "-n", "-2").code == 2
    assert cli("run", "Hi", "-c", "-1").code == 2


def test_a_context_of_nought_is_the_trained_one(tmp_path: Path) -> None:
    import ggufs

    header = read_header(ggufs.write_llama(tmp_path / "m.gguf", context=32768))
    assert [context_length(header, asked) for asked in (None, 0, 512)] == [8192, 32768, 512]


def test_prompts_as_options(cli, tmp_path: Path) -> None:
    file = tmp_path / "prompt.txt"
    file.write_text("from a file\n")
    prompts = []
    for words in (["-p", "typed"], ["--prompt", "typed"], ["-f", str(file)]):
        assert cli("run", *words).code == 0
        prompts.append(cli.engine.requests[-1].prompt[-1].content)
    assert prompts == ["typed", "typed", "from a file"]
    assert cli("run", "-p", "a", "b").code == 2
    assert cli("run", "-f", str(tmp_path / "none.txt")).code == 2


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("hf.co/user/repo", "user/repo"),
        ("hf.co/user/repo:Q4_K_M", "user/repo:Q4_K_M"),
        ("huggingface.co/user/repo/", "user/repo"),
        ("https://huggingface.co/user/repo", "user/repo"),
        ("https://hf.co/user/repo/tree/main", "user/repo"),
        ("https://huggingface.co/user/repo/blob/main/sub/m-Q4_0.gguf", "user/repo/sub/m-Q4_0.gguf"),
        ("https://huggingface.co/user/repo/resolve/main/m.gguf?download=true", "user/repo/m.gguf"),
        ("hf:user/repo", "user/repo"),
        ("hf://user/repo", "user/repo"),
        ("user/repo", "user/repo"),
        ("./hf.co/user/repo", "./hf.co/user/repo"),
    ],
)
def test_references_of_other_tools(typed: str, meant: str) -> None:
    assert plain(typed) == meant
    if not typed.startswith("."):
        assert parse_hub(typed) == parse_hub(meant)


def test_a_pulled_model_goes_by_its_long_name() -> None:
    from specllama import paths

    path = paths.models_dir() / "user" / "repo" / "m-Q4_0.gguf"
    path.parent.mkdir(parents=True)
    shutil.copy(bundled("tiny-draft"), path)
    assert resolve("hf.co/user/repo:Q4_0") == path
    assert resolve("https://huggingface.co/user/repo/resolve/main/m-Q4_0.gguf") == path


def test_words_of_other_tools(capsys: pytest.CaptureFixture[str]) -> None:
    for word, (group, verb) in SHORT.items():
        assert invoke([word, "--help"]) == 0
        assert f"Usage: specllama {group} {verb}" in capsys.readouterr().out.replace(word, verb)
    for word, answer in ELSEWHERE.items():
        assert invoke([word]) == 2
        assert answer in capsys.readouterr().err
    assert invoke(["list"]) == 0
    assert "tiny-target" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("typed", "answer"),
    [
        (("--rope-scaling", "yarn"), "--rope-scaling is gone: the model's file says it"),
        (("--numa", "isolate"), "taskset"),
        (("--no-swa-full",), "--no-swa-full is gone"),
        (("--dry-base", "1.8"), "a setting without a flag here: --set dry-base=X"),
        (("--mlock",), "--set mlock=on|off"),
        (("--set", "main_gpu=1"), "the setting main-gpu is gone; take it out"),
        (("--set", "top-q=1"), "did you mean top-p?"),
        (("--set", "top-k"), "write --set NAME=VALUE"),
        (("--no-such-thing",), "No such option"),
    ],
)
def test_flags_that_are_none_here(cli, typed: tuple[str, ...], answer: str) -> None:
    for command in ("run", "chat", "serve"):
        result = cli(command, *typed)
        assert result.code == 2
        assert answer in result.err


def test_info_of_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "mine.gguf"
    shutil.copy(bundled("tiny-target"), path)
    for ref in (str(path), str(tmp_path), "tiny"):
        assert invoke(["show", ref]) == 0
        shown = capsys.readouterr()
        assert "llama, " in shown.out
        assert "Q4_0" in shown.out
        assert "specllama pair" in shown.err
    assert invoke(["hub", "info", str(path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["file"]["architecture"] == "llama"
    assert invoke(["hub", "info", str(tmp_path / "none.gguf")]) == 3


# -- where systems differ --


def install(monkeypatch: pytest.MonkeyPatch, *, pip: bool, active: bool) -> str:
    found = object() if pip else None
    monkeypatch.setattr("importlib.util.find_spec", lambda name: found if name == "pip" else None)
    monkeypatch.setattr(sys, "executable", "/home/me/my tools/bin/python")
    monkeypatch.setenv("VIRTUAL_ENV", sys.prefix if active else "/elsewhere")
    return paths.pip_install("gguf")


@pytest.mark.parametrize(
    ("pip", "active", "command"),
    [
        (True, True, "pip install gguf"),
        (True, False, "'/home/me/my tools/bin/python' -m pip install gguf"),
        (False, True, "uv pip install --python '/home/me/my tools/bin/python' gguf"),
    ],
)
def test_a_package_goes_into_the_environment_that_runs(
    monkeypatch: pytest.MonkeyPatch, pip: bool, active: bool, command: str
) -> None:
    assert install(monkeypatch, pip=pip, active=active) == command
