"""A child's end of the pipe: what waits for whom, and who writes."""

from __future__ import annotations

import threading
from contextlib import suppress
from multiprocessing import Pipe

import pytest

from specllama.engine import serving
from specllama.engine.serving import Link
from specllama.events import TextDelta
from specllama.settings.params import GenerateParams


def test_constrained_requests_wait_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    class Over(Exception):
        pass

    def ends(code: int) -> None:
        raise Over

    def listen() -> None:
        with suppress(Over):
            link.listen()

    monkeypatch.setattr("os._exit", ends)
    parent, child = Pipe()
    link = Link(child)
    thread = threading.Thread(target=listen, daemon=True)
    thread.start()
    free, bound = GenerateParams(), GenerateParams(grammar='root ::= "a"')
    schema = GenerateParams(json_schema="{}")
    for id, params in enumerate((bound, free, schema), 1):
        parent.send(("generate", id, "me", "hello", params))
    parent.send(("call", 4, "me", "figures", ()))
    assert link.requests.get() == (2, "hello", free)
    assert link.constrained.get() == (1, "hello", bound)
    assert link.constrained.get() == (3, "hello", schema)
    assert link.calls.get() == (4, "figures", ())
    parent.close()
    thread.join()
    child.close()


def test_events_are_written_by_the_thread_that_makes_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """To wake another one would cost more; only what follows closely waits for it."""
    monkeypatch.setattr(serving, "GATHER_S", 60.0)  # the machine is up for longer
    parent, child = Pipe()
    link = Link(child)
    link.event(1, TextDelta("a"))
    link.event(2, TextDelta("x"))
    link.event(1, TextDelta("b"))
    link.flush()
    assert parent.recv() == ("events", 1, [TextDelta("a"), TextDelta("b")])
    assert parent.recv() == ("events", 2, [TextDelta("x")])
    link.event(1, TextDelta("c"))
    link.flush()
    assert not parent.poll()
    writing = threading.Thread(target=link.write)
    writing.start()
    link.event(1, TextDelta("d"))
    link.end(1)
    assert parent.recv() == ("events", 1, [TextDelta("c"), TextDelta("d")])
    assert parent.recv() == ("end", 1, None)
    link.close(writing)
    assert not writing.is_alive()
    parent.close()
    child.close()
