"""What an agent's session needs of a server, turn after turn."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from servers import Serving, serving, table

from specllama.interface import Message
from specllama.server.dialect import Job
from specllama.server.left_out import steadied
from specllama.settings.params import GenerateParams

HEAD = "x-anthropic-billing-header: cc_version=2.1.{0}.3a3; cc_entrypoint=cli; cch={0:05x};"
SYSTEM = "you write short letters about the rain and the sea. " * 6
ASKED = [{"role": "user", "content": "the rain"}]


def text(part: str) -> dict[str, str]:
    return {"type": "text", "text": part}


def turns(system: Any, role: str = "system") -> dict[str, Any]:
    return {"messages": [{"role": role, "content": system}, *ASKED], "max_tokens": 3}


def messages(system: Any) -> dict[str, Any]:
    return {"system": system, "messages": ASKED, "max_tokens": 3}


def items(**fields: Any) -> dict[str, Any]:
    return {"input": ASKED, "max_output_tokens": 3, **fields}


SHAPES: dict[str, tuple[str, Any]] = {
    "blocks": ("/v1/messages", lambda head: messages([text(head), text(SYSTEM)])),
    "block with line end": ("/v1/messages", lambda h: messages([text(h + "\n"), text(SYSTEM)])),
    "second block": ("/v1/messages", lambda h: messages([text("Claude."), text(h), text(SYSTEM)])),
    "first line": ("/v1/messages", lambda head: messages(f"{head}\r\n{SYSTEM}")),
    "same line": ("/v1/messages", lambda head: messages(f"{head}{SYSTEM}")),
    "system turn": ("/v1/messages", lambda head: turns(f"{head}\n{SYSTEM}")),
    "chat": ("/v1/chat/completions", lambda head: turns(f"{head}\n{SYSTEM}")),
    "parts": ("/v1/chat/completions", lambda h: turns([text(h), text(SYSTEM)], "developer")),
    "own turn": (
        "/v1/chat/completions",
        lambda head: {
            **turns(SYSTEM),
            "messages": [*turns(head)["messages"][:1], *turns(SYSTEM)["messages"]],
        },
    ),
    "instructions": ("/v1/responses", lambda head: items(instructions=f"{head}\n{SYSTEM}")),
    "item": (
        "/v1/responses",
        lambda h: items(input=[{"role": "developer", "content": f"{h}\n{SYSTEM}"}, *ASKED]),
    ),
    "ollama": (
        "/api/chat",
        lambda h: {
            "messages": turns(f"{h}\n{SYSTEM}")["messages"],
            "stream": False,
            "options": {"num_predict": 3},
        },
    ),
}


def figures(server: Serving, path: str, body: dict[str, Any]) -> dict[str, Any]:
    answer = server.post(path, body)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()["timings"]
    return found


@pytest.fixture(scope="module")
def literal(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    with serving(
        table(tmp_path_factory.mktemp("tables")), params=GenerateParams(steady_prompts=False)
    ) as running:
        yield running


@pytest.mark.parametrize("shape", SHAPES)
def test_a_changing_head_costs_nothing(server: Serving, literal: Serving, shape: str) -> None:
    path, body = SHAPES[shape]
    for running, most in ((server, 1), (literal, 3000)):
        figures(running, path, body(HEAD.format(1)))
        again = figures(running, path, body(HEAD.format(2)))
        assert again["prompt_n"] <= most
        assert again["cache_n"] + again["prompt_n"] > len(SYSTEM)
    assert again["prompt_n"] > 300, "as it was sent, nothing behind the head is found"


@pytest.mark.parametrize(
    ("system", "left"),
    [
        (HEAD, None),
        (f"{HEAD}\n\n", None),
        (f"be brief\n{HEAD}\nbe kind", "be brief\nbe kind"),
        ("x-anthropic-billing-header: cch=1; cc=2\nbe kind", "be kind"),
        ("x-anthropic-billing-header: 123;\nbe kind; be brief", "be kind; be brief"),
        (f"the line {HEAD} is sent", f"the line {HEAD} is sent"),
        ("", ""),
        (SYSTEM, SYSTEM),
    ],
)
def test_only_that_line_is_left_out(system: str, left: str | None) -> None:
    asked = Message("user", f"{HEAD}\nwhat is this?")
    [prompt] = steadied(Job(((Message("system", system), asked),), GenerateParams())).prompts
    assert prompt == (*([] if left is None else [Message("system", left)]), asked)
    for other in ("the rain", (1, 2)):
        assert steadied(Job((other,), GenerateParams())).prompts == (other,)


def test_templates_show_what_a_model_gets(server: Serving) -> None:
    told = server.post("/apply-template", turns(f"{HEAD}\n{SYSTEM}")).json()["prompt"]
    assert told == server.post("/apply-template", turns(SYSTEM)).json()["prompt"]
