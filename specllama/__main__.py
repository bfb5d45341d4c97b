"""The console script."""

import gc
import os
import signal
import sys


def main() -> None:
    """Run the command line; signals already work while it is being imported."""
    gc.disable()  # a fifth of what the imports take; ``cli`` enables it again
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda number, frame: os._exit(128 + number))
    _open_closed_streams()
    from specllama import signals
    from specllama.cli import invoke

    code = invoke()
    signals.end_at_once()
    gc.freeze()  # there is nothing to look for at the exit
    raise SystemExit(code)


def _open_closed_streams() -> None:
    """Replace a closed stream (``<&-``): an empty input, or an output that is thrown away.

    Otherwise the next file that is opened would take its number. With stdout closed, nothing is
    run at all.
    """
    if sys.stdin is None:
        sys.stdin = os.fdopen(_devnull(0, os.O_RDONLY), encoding="utf-8")
    if sys.stderr is None:
        sys.stderr = os.fdopen(_devnull(2, os.O_WRONLY), "w", encoding="utf-8")
    if sys.stdout is None:
        print("error: standard output is closed", file=sys.stderr)
        raise SystemExit(1)


def _devnull(number: int, mode: int) -> int:
    found = os.open(os.devnull, mode)
    if found != number:
        os.dup2(found, number)
        os.close(found)
    return number


if __name__ == "__main__":
    main()
