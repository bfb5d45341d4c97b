"""No request holds others up: each of these is sent beside a running stream and ``/health``.

A row of ``TABLE``: a name, what is sent (see ``beside.Request``), the statuses that answer it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest
from beside import CHAT, HELLO, Request, Running, beside, server

Row = tuple[str, Request, tuple[int, ...]]

FINE = (200,)
REFUSED = (400,)


def chat(within_s: float = 60.0, **fields: Any) -> Request:
    """A chat; its client goes away after ``within_s``."""
    return lambda running: running.post(CHAT, {**HELLO, **fields}, within_s)


def doubling(depth: int) -> dict[str, Any]:
    """A schema of which 2^depth places can be visited."""
    defs: dict[str, Any] = {
        f"d{i}": {"allOf": [{"$ref": f"#/$defs/d{i + 1}"}] * 2} for i in range(depth)
    }
    return {"$defs": {**defs, f"d{depth}": {"type": "string"}}, "$ref": "#/$defs/d0"}


TABLE: list[Row] = [
    ("nothing odd", chat(), FINE),
    ("a schema that doubles", chat(json_schema=doubling(40)), FINE),
    ("a class without an end", chat(grammar='root ::= "a" ' + "[" * 16_000), REFUSED),
    ("a megabyte of grammar", chat(grammar='root ::= "a" ' + "[" * 10**6), REFUSED),
]


@pytest.fixture(scope="module")
def serving(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[], Running]]:
    """Gives the server, a new one where a request stopped the old one."""
    with ExitStack() as stack:
        running: list[Running] = []

        def get() -> Running:
            if not running or not running[-1].well():
                if running:
                    running[-1].end()
                new = server(tmp_path_factory.mktemp("beside"))
                running.append(stack.enter_context(new))
            return running[-1]

        yield get


@pytest.mark.parametrize(
    ("request_", "statuses"), [row[1:] for row in TABLE], ids=[row[0] for row in TABLE]
)
def test_nobody_waits(
    serving: Callable[[], Running], request_: Request, statuses: tuple[int, ...]
) -> None:
    assert beside(serving(), request_) in statuses
