"""The frame around the commands: help, versions, errors, exit codes, no heavy imports."""

import io
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import pytest

from specllama import cli as cli_package
from specllama.cli import SUMMARIES, chat, diagnostics, group
from specllama.errors import (
    BadGguf,
    ConfigError,
    DoesNotFit,
    EngineDied,
    ModelUnavailable,
    PairIncompatible,
    PromptTooLong,
    SpecllamaError,
    StoreError,
    UsageError,
)

HEAVY = ("numpy", "llama_cpp", "textual", "huggingface_hub", "rich", "jinja2")


def run(*args: str, **kwargs) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "specllama", *args],
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
        timeout=60,
        **kwargs,
    )


def test_help_imports_nothing_heavy() -> None:
    for args in (["--help"], ["--version"], ["run", "--help"], ["log", "--help"]):
        program = (
            "import sys\nfrom specllama.cli import invoke\n"
            f"code = invoke({args!r})\n"
            f"bad = [m for m in {HEAVY!r} if m in sys.modules]\n"
            "print(bad, file=sys.stderr)\nsys.exit(code or bool(bad))"
        )
        done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
        assert done.returncode == 0, (args, done.stderr)


def test_version_and_help() -> None:
    done = run("--version")
    assert done.returncode == 0
    assert done.stdout.startswith("specllama 0.")
    assert "llama-cpp-python 0." in done.stdout
    shown = run("-h").stdout
    assert "Examples:" in shown
    for name in ("run", "chat", "log", "config", "completion"):
        assert f"\n  {name} " in shown


@pytest.mark.parametrize("words", [[], ["run"], ["hub"], ["hub", "pull"], ["pull"], ["stop"]])
def test_help_is_a_command(cli, words: list[str]) -> None:
    shown = cli("help", *words)
    assert (shown.code, shown.err) == (0, "")
    assert shown.out == cli(*words, "--help").out
    assert cli("--offline", "help", *words).out == shown.out


def test_help_of_no_command_is_refused_with_a_hint(cli) -> None:
    shown = cli("help", "rnu")
    assert shown.code == 2
    assert "did you mean run?" in shown.err


def every_command(
    group: click.Group, context: click.Context, path: tuple[str, ...] = ()
) -> Iterator[tuple[str, ...]]:
    yield path
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        if isinstance(command, click.Group):
            yield from every_command(command, context, (*path, name))
        else:
            yield (*path, name)


def test_help_fits_into_eighty_columns(cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    for flag in ("--help", "-h"):
        for path in every_command(group, click.Context(group)):
            lines = cli(*path, flag).out.splitlines()
            assert [line for line in lines if len(line) > 80] == [], path


def test_a_group_alone_shows_its_help_in_lines(cli) -> None:
    result = cli("hub")
    assert result.code == 2
    assert "\nCommands:\n" in result.err
    assert "error" not in result.err


@pytest.mark.parametrize("line", [("--help",), ("hub", "-h"), ("bench", "-h"), ("log", "-h")])
def test_no_summary_of_a_command_is_cut(cli, line: tuple[str, ...]) -> None:
    assert "..." not in cli(*line).out.partition("Commands:")[2].partition("Examples:")[0]


@pytest.mark.parametrize("line", ["run", "chat", "serve", "prove", "bench run"])
def test_the_usual_options_fit_on_one_screen(cli, monkeypatch, line: str) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    shown = cli(*line.split(), "-h").out
    assert f"specllama {line} --help\n" in shown
    assert len(shown.splitlines()) < 24


def test_help_names_the_proposer_in_a_word(cli) -> None:
    shown = cli("run", "--help").out
    assert "--proposer METHOD" in shown
    assert max(map(len, shown.splitlines())) <= 100
    assert "'ngram'" in cli("run", "--proposer", "help", "Hi").err


def test_alone_without_a_terminal_shows_help_and_fails() -> None:
    done = run()
    assert done.returncode == 2
    assert "Commands:" in done.stdout


def test_summaries_list_exactly_the_commands_there_are() -> None:
    assert group.list_commands(click.Context(group)) == list(SUMMARIES)
    for name in SUMMARIES:
        command = group.get_command(click.Context(group), name)
        assert command.name == name
        assert command.help
        if name in ("run", "chat", "log", "config", "prove", "hub"):
            assert "Examples:" in (command.epilog or "")


@pytest.mark.parametrize(
    ("args", "model", "n"),
    [
        (["-m", "a.gguf"], "a.gguf", None),
        (["--model=a.gguf", "-n", "3"], "a.gguf", 3),
        (["--model", "a.gguf"], "a.gguf", None),
        (["-ma.gguf"], "a.gguf", None),
        (["./folder/a.gguf", "-n", "3"], "./folder/a.gguf", 3),
        (["--offline", "a.gguf"], "a.gguf", None),
        (["tiny"], "tiny", None),
        (["user/repo:Q4_K_M"], "user/repo:Q4_K_M", None),
        (["-n", "3"], None, 3),
    ],
)
def test_a_model_without_a_command_opens_the_app(
    cli, monkeypatch: pytest.MonkeyPatch, args: list[str], model: str | None, n: int | None
) -> None:
    opened: list[Any] = []
    monkeypatch.setenv("SPECLLAMA_OFFLINE", "1")
    monkeypatch.setattr(cli_package, "_need_terminal", lambda words: None)
    monkeypatch.setattr(chat, "_can_draw", lambda: True)
    monkeypatch.setattr(chat, "_terminal_app", lambda settings, *rest: opened.append(settings) or 0)
    assert cli(*args).code == 0
    assert (opened[0]["model"], opened[0]["max-tokens"]) == (model, n)


@pytest.mark.parametrize("args", [["-m", "gone.gguf"], ["./gone.gguf"], ["-d", "gone.gguf"]])
def test_a_file_that_is_not_there_is_said_before_the_app_opens(
    cli, monkeypatch: pytest.MonkeyPatch, args: list[str]
) -> None:
    monkeypatch.setattr(cli_package, "_need_terminal", lambda words: None)
    monkeypatch.setattr(chat, "_can_draw", lambda: True)
    result = cli(*args)
    assert result.code == 3
    assert "gone.gguf" in result.err
    assert "specllama hub ls" in result.err


@pytest.mark.parametrize("args", [["-m", "a.gguf"], ["a.gguf"]])
def test_a_model_without_a_terminal_gets_the_next_command(cli, args: list[str]) -> None:
    result = cli(*args)
    assert result.code == 2
    assert 'specllama run -m a.gguf "…"' in result.err
    assert cli(*args, "--plain").code == 0  # a chat line by line needs none


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["proove"], "did you mean prove?"),
        (["tell me a joke"], "specllama run"),
        (["xyzzy"], "there is no command 'xyzzy'"),
        (["--nope"], "No such option"),
        (["run", "--draft-maks", "3", "x"], "--draft-max"),
        (["config", "nope"], "No such command"),
    ],
)
def test_wrong_words_get_one_line_and_a_hint(cli, args: list[str], words: str) -> None:
    result = cli(*args)
    assert result.code == 2
    assert words in result.err
    assert result.out == ""
    assert "Traceback" not in result.err
    assert result.err.startswith("error: ")


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (SpecllamaError("x"), 1),
        (EngineDied("x"), 1),
        (StoreError("x"), 1),
        (UsageError("x"), 2),
        (ConfigError("x"), 2),
        (PromptTooLong("x"), 2),
        (click.UsageError("x"), 2),
        (ModelUnavailable("x"), 3),
        (PairIncompatible("x"), 4),
        (BadGguf("x"), 5),
        (DoesNotFit("x"), 5),
        (MemoryError(), 5),
        (KeyboardInterrupt(), 130),
        (diagnostics.Interrupted(), 130),
        (PermissionError(13, "Permission denied", "/x"), 1),
        (ImportError("no numpy"), 5),
        (ZeroDivisionError("x"), 1),
    ],
)
def test_exit_codes(error: BaseException, code: int, capsys, monkeypatch) -> None:
    assert diagnostics.report(error) == code
    assert "Traceback" not in capsys.readouterr().err
    monkeypatch.setenv("SPECLLAMA_DEBUG", "1")
    diagnostics.report(error)
    assert type(error).__name__ in capsys.readouterr().err


def test_messages_are_safe_for_a_terminal(capsys) -> None:
    diagnostics.report(UsageError("bad\x1b]0;title\x07 name\nsecond", "hint\x9b"))
    shown = capsys.readouterr().err
    assert "\x1b" not in shown
    assert "\x9b" not in shown
    assert shown.splitlines() == ["error: bad␛]0;title␇ name second", "  hint⟦9B⟧"]


def test_a_line_is_one_write_so_that_threads_do_not_mix_theirs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    written: list[str] = []

    class Stderr(io.StringIO):
        def write(self, text: str) -> int:
            written.append(text)
            return len(text)

    monkeypatch.setattr(sys, "stderr", Stderr())
    diagnostics.note("tiny is served at an address")
    assert written == ["tiny is served at an address\n"]


def test_a_piece_of_a_thought_cannot_go_back_in_the_line(capsys) -> None:
    diagnostics.write("\rso\x1b[2K")
    assert capsys.readouterr().err == "␍so␛[2K"


def test_a_second_signal_is_a_hard_end() -> None:
    program = (
        "import os, signal, threading, time\n"
        "from specllama.signals import stop_on_signals\n"
        "cancel = threading.Event()\n"
        "with stop_on_signals(cancel) as got:\n"
        "    os.kill(os.getpid(), signal.SIGINT)\n"
        "    assert cancel.is_set() and got == [130]\n"
        "    os.kill(os.getpid(), signal.SIGINT)\n"
        "    time.sleep(30)\n"
    )
    assert subprocess.run([sys.executable, "-c", program], timeout=20).returncode == 130


def test_sigterm_unwinds(tmp_path: Path) -> None:
    program = (
        "import os, signal, sys\n"
        "import specllama.cli as cli\n"
        "import click\n"
        "@click.command()\n"
        "def wait():\n"
        "    try:\n"
        "        os.kill(os.getpid(), signal.SIGTERM); import time; time.sleep(30)\n"
        "    finally:\n"
        "        print('closed')\n"
        "cli.group.get_command = lambda ctx, name: wait\n"
        "sys.exit(cli.invoke(['run']))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=20
    )
    assert (done.returncode, done.stdout) == (128 + signal.SIGTERM, "closed\n")
    assert "Traceback" not in done.stderr


# -- Ctrl-C and SIGTERM at awkward moments --


BOTH = pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
ALL = pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])

# A call that no signal interrupts and that lets other threads run, as a pass of llama.cpp does.
LONG = "hashlib.pbkdf2_hmac('sha256', b'', b'', 2_000_000_000)"
# libc calls back into Python, which loses what is raised there.
CALLBACKS = """
compare = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)
values = (ctypes.c_int * 400)(*range(400, 0, -1))
def sort(body):
    def call(a, b):
        body()
        return 1
    ctypes.CDLL(None).qsort(values, 400, 4, compare(call))
"""


def ended(program: str, number: int, *, cli: bool = True) -> tuple[int, str, str]:
    """Run a program as a command; it signals itself with ``soon()``, in 0.2 s from a thread."""
    whole = (
        "import ctypes, hashlib, os, signal, sys, threading, time\n"
        "signal.signal(signal.SIGHUP, signal.SIG_DFL)\n"  # the tests may run under nohup
        f"def now(): os.kill(os.getpid(), {int(number)})\n"
        "def soon(): threading.Timer(0.2, now).start()\n"
    )
    if cli:
        whole += "import click\nimport specllama.cli as cli\nfrom specllama import signals\n"
    done = subprocess.run(
        [sys.executable, "-c", whole + program], capture_output=True, text=True, timeout=60
    )
    assert "Traceback" not in done.stderr, done.stderr
    assert "ignored" not in done.stderr, done.stderr
    return done.returncode, done.stdout, done.stderr


def command(body: str) -> str:
    """A program that runs ``body`` as a command of the command line."""
    lines = "".join(f"    {line}\n" for line in body.splitlines())
    return (
        f"{CALLBACKS}\n@click.command()\ndef work():\n{lines}"
        "cli.group.get_command = lambda ctx, name: work\nsys.exit(cli.invoke(['run']))\n"
    )


@BOTH
def test_a_signal_in_a_callback_of_the_loader_stops_the_load(number: int) -> None:
    body = (
        "from specllama.errors import Cancelled\n"
        "with signals.stop_loading() as cancel:\n"
        "    soon()\n"
        "    for _ in range(100):\n"
        "        sort(lambda: time.sleep(0.001))\n"
        "        if cancel.is_set():\n"
        "            raise Cancelled('loading was stopped')\n"
        "print('loaded')"
    )
    code, out, err = ended(command(body), number)
    assert (code, out, err.strip()) == (128 + number, "", "")


@BOTH
def test_a_load_that_does_not_listen_is_left(number: int) -> None:
    body = f"with signals.stop_loading():\n    soon()\n    {LONG}"
    assert ended(command(body), number)[0] == 128 + number


@BOTH
def test_what_a_callback_loses_is_raised_again(number: int) -> None:
    """Where nothing has taken signals over: the log of llama.cpp, weak references, finalizers."""
    body = (
        "once = []\n"
        "def interrupted():\n"
        "    if not once:\n"
        "        once.append(1)\n"
        "        now()\n"
        "    for _ in range(1000): pass\n"
        "try:\n"
        "    sort(interrupted)\n"
        "    for _ in range(2000): time.sleep(0.01)\n"
        "    print('lost')\n"
        "finally:\n"
        "    print('closed')"
    )
    code, out, _ = ended(command(body), number)
    assert (code, out) == (128 + number, "closed\n")


@BOTH
def test_a_running_pass_is_stopped_so_that_the_main_thread_can_raise(number: int) -> None:
    body = (
        "running = threading.Event()\n"
        "def stop():\n"
        "    os.write(1, b'stopped\\n')\n"
        "    os._exit(7)\n"  # the call below cannot be stopped; a pass can
        "signals.stops(stop)\n"
        f"soon()\n{LONG}"
    )
    assert ended(command(body), number)[:2] == (7, "stopped\n")


@ALL
def test_a_request_hears_of_a_signal_while_the_main_thread_computes(number: int) -> None:
    body = (
        "from specllama.cancel import Cancel\n"
        "cancel = Cancel()\n"
        "def told():\n"
        "    os.write(1, b'told\\n')\n"
        "    os._exit(7)\n"
        "with signals.stop_on_signals(cancel), cancel.calling(told):\n"
        f"    soon()\n    {LONG}"
    )
    assert ended(command(body), number)[:2] == (7, "told\n")


@BOTH
def test_a_signal_during_the_imports_ends_the_process(number: int) -> None:
    program = (
        "class Finder:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name == 'click':\n"
        "            now()\n"
        "            for _ in range(1000): pass\n"
        "sys.meta_path.insert(0, Finder())\n"
        "import specllama.__main__\n"
        "sys.argv = ['specllama', '--version']\n"
        "specllama.__main__.main()\n"
    )
    assert ended(program, number, cli=False) == (128 + number, "", "")


@ALL
def test_a_signal_before_a_block_ends_is_not_lost(number: int) -> None:
    """The thread may hear of it too late: the handler counts as well, and one signal is one."""
    body = (
        "for _ in range(200):\n"
        "    with signals.stop_on_signals(threading.Event()) as received:\n"
        "        now()\n"
        "    assert received, 'lost'\n"
        "print('all heard')"
    )
    code, out, _ = ended(command(body), number)
    assert (code, out) == (0, "all heard\n")


def test_what_ignores_a_closed_terminal_goes_on() -> None:
    body = (
        "import signal\n"
        "signal.signal(signal.SIGHUP, signal.SIG_IGN)\n"  # as nohup leaves it
        "with signals.stop_on_signals(threading.Event()) as received:\n"
        "    now()\n"
        "print(received)"
    )
    assert ended(command(body), signal.SIGHUP)[:2] == (0, "[]\n")
