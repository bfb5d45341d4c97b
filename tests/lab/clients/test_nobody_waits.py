"""No request holds others up: each of these is sent beside a running stream and ``/health``.

A row of ``TABLE``: a name, what is sent (see ``beside.Request``), the statuses that answer it.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest
from beside import CHAT, HELLO, Request, Running, Stood, beside, server

Row = tuple[str, Request, tuple[int, ...]]

FINE = (200,)
REFUSED = (400,)
MANY = (413,)


def chat(within_s: float = 60.0, **fields: Any) -> Request:
    """A chat; its client goes away after ``within_s``."""
    return lambda running: running.post(CHAT, {**HELLO, **fields}, within_s)


def doubling(depth: int) -> dict[str, Any]:
    """A schema of which 2^depth places can be visited."""
    defs: dict[str, Any] = {
        f"d{i}": {"allOf": [{"$ref": f"#/$defs/d{i + 1}"}] * 2} for i in range(depth)
    }
    return {"$defs": {**defs, f"d{depth}": {"type": "string"}}, "$ref": "#/$defs/d0"}


def to(path: str, **fields: Any) -> Request:
    return lambda running: running.post(path, fields)


def flood(path: str, clients: int, seconds: float = 3.0, **fields: Any) -> Request:
    """So many clients, each asking again as soon as it was answered; the worst status."""

    def send(running: Running) -> int:
        until = time.monotonic() + seconds
        heard: list[int] = []

        def ask() -> None:
            while time.monotonic() < until:
                heard.append(running.post(path, fields))

        threads = [threading.Thread(target=ask, daemon=True) for _ in range(clients)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return max(heard)

    return send


def said(text: str, n: int = 1) -> dict[str, Any]:
    roles = ("user", "assistant")
    return {"messages": [{"role": roles[i % 2], "content": text} for i in range(n)]}


def pattern(text: str, **more: Any) -> dict[str, Any]:
    return {"type": "string", "pattern": text, **more}


def properties(n: int) -> dict[str, Any]:
    return {"type": "object", "properties": {f"p{i}": {"type": "integer"} for i in range(n)}}


EMPTY = (("root", "a"), ("a", "b"), ("b", "c"), ("c", "d"))
CHAIN = [f"r{i} ::= r{i + 1}" for i in range(9000)]
WORDS = "the rain falls "
COUNT, COMPLETION = "/v1/messages/count_tokens", "/completion"

TABLE: list[Row] = [
    ("nothing odd", chat(), FINE),
    ("a schema that doubles", chat(json_schema=doubling(40)), FINE),
    ("a list of 20,000 values", chat(json_schema={"enum": [f"v{i}" for i in range(20_000)]}), FINE),
    (
        "60,000 values in a text",
        chat(json_schema=json.dumps({"enum": [f"v{i}" for i in range(60_000)]})),
        REFUSED,
    ),
    ("counts in counts", chat(json_schema=pattern("^(a{1,50}){1,50}$", maxLength=20)), FINE),
    ("deeper counts", chat(json_schema=pattern("^(((a|b|ab){1,500}){1,500}){1,500}$")), FINE),
    ("a pattern of a megabyte", chat(json_schema=pattern("ab" * 400_000)), (200, 400)),
    (
        "20 patterns in one place",
        chat(json_schema={"allOf": [pattern(f"a{{{i},{2 * i}}}b.*c") for i in range(1, 21)]}),
        REFUSED,
    ),
    ("20,000 properties", chat(json_schema=properties(20_000)), REFUSED),
    ("1,000 properties", chat(json_schema=properties(1000)), FINE),
    ("hidden left recursion", chat(grammar='root ::= e root "a" | "b"\ne ::= "x"?'), FINE),
    (
        "4,096 empty words",
        chat(grammar="\n".join([f"{a} ::=" + f" {b}" * 8 for a, b in EMPTY]) + '\nd ::= "x"?'),
        FINE,
    ),
    ("480 optional parts", chat(grammar="root ::= " + '"a"? ' * 480), (200, 400)),
    ("480 parts of any kind", chat(grammar="root ::= " + ".? " * 480), (200, 400)),
    (
        "a chain of 9,000 rules",
        chat(grammar="\n".join(["root ::= r0", *CHAIN, 'r9000 ::= "a"'])),
        FINE,
    ),
    ("a dead end", chat(json_schema={"$ref": "#"}), REFUSED),
    ("all tokens banned", chat(logit_bias={str(i): False for i in range(4096)}), REFUSED),
    ("a class without an end", chat(grammar='root ::= "a" ' + "[" * 16_000), REFUSED),
    ("many texts are tokenized", flood("/tokenize", 4, content=WORDS * 1300), FINE),
    ("many short texts are tokenized", flood("/tokenize", 8, content=WORDS * 33), FINE),
    ("long texts are tokenized", flood("/tokenize", 4, content=WORDS * 6700), REFUSED),
    (
        "many prompts are counted",
        flood(COUNT, 8, model="m", max_tokens=1, **said(WORDS * 340)),
        FINE,
    ),
    ("20,000 messages", chat(**said("a", 20_001)), MANY),
    ("3,001 messages", chat(**said("a", 3001)), REFUSED),
    ("100,000 ends of a turn", chat(**said("<|im_end|>" * 100_000)), REFUSED),
    ("6,000 ends of a turn", chat(**said("<|im_end|>" * 6000)), REFUSED),
    ("100,000 ends, raw", to(COMPLETION, prompt="<|im_end|>" * 100_000, n_predict=1), REFUSED),
    ("8 MB of spaces", chat(**said(" " * 8_000_000)), REFUSED),
    ("8 MB of words", chat(**said(WORDS * 530_000)), REFUSED),
    ("8 MB to be tokenized", to("/tokenize", content=WORDS * 530_000), REFUSED),
    ("8 MB to be rendered", to("/apply-template", **said(WORDS * 530_000)), REFUSED),
    ("a biased word of 7 MB", chat(logit_bias={"rain " * 1_400_000: 1}), REFUSED),
    ("30,000 biased words", chat(logit_bias={f"rain{i}": 1 for i in range(30_000)}), REFUSED),
    ("50,000 biases", chat(logit_bias={str(i): 0.1 for i in range(50_000)}), REFUSED),
    ("4,000 biases", chat(logit_bias={str(i): 0.1 for i in range(4000)}), FINE),
    ("a bias of 5,000 digits", chat(logit_bias={"9" * 5000: 1}), REFUSED),
    (
        "2,000 breakers",
        chat(dry_multiplier=0.5, dry_sequence_breakers=[f"b{i}" for i in range(2000)]),
        REFUSED,
    ),
    (
        "32 breakers",
        chat(dry_multiplier=0.5, dry_sequence_breakers=[f"b{i}" for i in range(32)]),
        FINE,
    ),
    ("long stop strings", chat(stop=["a" * 100_000]), REFUSED),
    ("a megabyte of grammar", chat(grammar='root ::= "a" ' + "[" * 10**6), REFUSED),
    ("16,000 messages", chat(**said("a", 16_001)), REFUSED),
    (
        "5,000 tools",
        chat(tools=[{"type": "function", "function": {"name": f"f{i}"}} for i in range(5000)]),
        REFUSED,
    ),
    ("10,000 arguments", chat(chat_template_kwargs={f"a{i}": 1 for i in range(10_000)}), REFUSED),
    (
        "30,000 tools",
        chat(tools=[{"type": "function", "function": {"name": f"f{i}"}} for i in range(30_000)]),
        MANY,
    ),
    (
        "90,000 arguments of a template",
        chat(chat_template_kwargs={f"a{i}": 1 for i in range(90_000)}),
        MANY,
    ),
    ("a million lists", chat(chat_template_kwargs={"a": [[]] * 1_000_000}), MANY),
    (
        "calls that never end",
        chat(
            messages=[
                {"role": "user", "content": "hi"},
                {"role": "assistant", "content": "<tool_call>\n" * 4000},
                {"role": "user", "content": "hi"},
            ],
            tools=[{"type": "function", "function": {"name": "f", "parameters": {}}}],
        ),
        (200, 400),
    ),
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
    try:
        status = beside(serving(), request_)
    except Stood:  # once may be another program's doing; what a request does comes again
        status = beside(serving(), request_)
    assert status in statuses
