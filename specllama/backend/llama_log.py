"""The start of llama.cpp; its log goes to the ``specllama.llama`` logger and nowhere else."""

from __future__ import annotations

import collections
import ctypes
import logging
import os
import re
import signal
from functools import cache

os.environ.setdefault("GGML_NO_BACKTRACE", "1")  # an abort must not fork a debugger

import llama_cpp as ll

from specllama.backend import trial
from specllama.backend.devices import ggml
from specllama.errors import CannotLoad

logger = logging.getLogger("specllama.llama")
# without this handler, logging would print warnings to stderr, across the terminal app
logging.getLogger("specllama").addHandler(logging.NullHandler())

ABORTED = 134  # the exit status by which a shell says SIGABRT
_LEVELS = {1: logging.DEBUG, 2: logging.INFO, 3: logging.WARNING, 4: logging.ERROR}
recent: collections.deque[str] = collections.deque(maxlen=64)


@ll.llama_log_callback  # type: ignore[untyped-decorator]
def _on_log(level: int, text: bytes | None, user_data: object) -> None:
    line = (text or b"").decode("utf-8", "replace").rstrip("\n")
    if not line.strip(". "):
        return
    if level in (3, 4):
        recent.append(line)
    logger.log(_LEVELS.get(level, logging.DEBUG), "%s", line)


@ctypes.CFUNCTYPE(None, ctypes.c_char_p)  # type: ignore[untyped-decorator]
def _on_abort(text: bytes) -> None:
    """Report why llama.cpp gives up, and exit: without this, the shell reports a core dump."""
    why = re.sub(r"^.*[/\\]", "", text.decode("utf-8", "replace")).strip()
    lost = "RPC" in why
    said = f"error: {'a worker (--rpc) is gone' if lost else 'llama.cpp gave up'}: {why}\n"
    if lost:
        said += "  start the worker again, then this program; specllama doctor --rpc asks it\n"
    os.write(2, said.encode())
    os._exit(ABORTED)


@ctypes.CFUNCTYPE(None, ctypes.c_int)  # type: ignore[untyped-decorator]
def _on_illegal(number: int) -> None:
    """Report an instruction that fails though the trial went well, remember it, and exit."""
    said = "llama.cpp met an instruction that fails on this processor (SIGILL)"
    new = trial.distrust("SIGILL")
    text = f"{trial.LATER}\n  start again" if new else f"{said}\n  {trial.mend()}"
    os.write(2, f"error: {text}\n".encode())
    os._exit(CannotLoad.exit_code)


def _catch_illegal() -> None:
    """Take the signal, unless the process has a handler of its own."""
    catch = ctypes.CDLL(None).signal
    catch.restype = ctypes.c_void_p
    catch.argtypes = ctypes.c_int, ctypes.c_void_p
    before = catch(signal.SIGILL, ctypes.cast(_on_illegal, ctypes.c_void_p))
    if before is not None:
        catch(signal.SIGILL, before)


@cache
def start() -> None:
    ll.llama_log_set(_on_log, ctypes.c_void_p(0))
    ggml("ggml_set_abort_callback", None, ctypes.c_void_p)(_on_abort)
    ll.llama_backend_init()
    _catch_illegal()


def last_words(skip: int = 0) -> str:
    """Return the newest error line of llama.cpp, cleaned for people."""
    for line in reversed(list(recent)[skip:]):
        cleaned = re.sub(r"^\w+:\s*", "", line).strip()
        if cleaned and "failed to load model" not in cleaned:
            return cleaned
    return ""
