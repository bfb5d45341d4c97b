"""Ctrl-C and SIGTERM at awkward moments: in callbacks from C, in long calls, in imports."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

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
