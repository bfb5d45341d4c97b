"""What has to be compiled waits apart: a request without a grammar does not wait for it."""

from __future__ import annotations

import threading
from contextlib import suppress
from multiprocessing import Pipe

import pytest

from specllama.engine.serving import Link
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
