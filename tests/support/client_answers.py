"""What clients of four dialects read in an answer, as strictly as the strictest of them."""

import json
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass
class Heard:
    """A reply as its client has it.

    Attributes:
        calls: name and arguments of each call, in order.
    """

    thought: str = ""
    text: str = ""
    calls: list[list[Any]] = field(default_factory=list)

    def written(self) -> str:
        """Return what a model writes to say this."""
        calls = [json.dumps({"name": name, "arguments": given}) for name, given in self.calls]
        thought = f"<think>{self.thought}</think>" if self.thought else ""
        tagged = (f"<tool_call>\n{call}\n</tool_call>" for call in calls)
        return thought + "\n".join(filter(None, (self.text, *tagged)))


def heard(path: str, answer: str) -> Heard | None:
    """Return what a client reads, or None if the route writes no reply."""
    for end, read in READERS.items():
        if path.partition("?")[0].endswith(end):
            return read(answer)
    return None


def _events(answer: str) -> list[dict[str, Any]]:
    """Return the events of a stream; comments are passed over, as clients do."""
    lines = (line for block in answer.split("\n\n") for line in block.splitlines())
    told = [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]
    return [json.loads(one) for one in told if one != "[DONE]"]


def _chat(answer: str) -> Heard:
    if not answer.startswith(("data:", ":")):
        [choice] = json.loads(answer)["choices"]
        return _message(choice["message"])
    assert answer.rstrip().endswith("data: [DONE]")
    reply, end = Heard(), None
    calls: list[list[str]] = []
    for event in _events(answer):
        for choice in event["choices"]:
            assert end is None, "something came behind the end"
            delta, end = choice["delta"], choice["finish_reason"]
            reply.thought += delta.get("reasoning_content") or ""
            reply.text += delta.get("content") or ""
            for part in delta.get("tool_calls") or ():
                if part["index"] == len(calls):
                    assert part["id"]
                    assert part["type"] == "function"
                    calls.append([part["function"]["name"], ""])
                calls[part["index"]][1] += part["function"].get("arguments") or ""
    reply.calls = [[name, json.loads(given)] for name, given in calls]
    assert end == ("tool_calls" if calls else "stop")
    return reply


def _message(message: dict[str, Any]) -> Heard:
    """Read a message of OpenAI's or of Ollama's; Ollama's arguments are no text."""
    calls = []
    for call in message.get("tool_calls") or ():
        given = call["function"]["arguments"]
        given = json.loads(given) if isinstance(given, str) else given
        calls.append([call["function"]["name"], given])
    thought = message.get("reasoning_content") or message.get("thinking") or ""
    return Heard(thought, message.get("content") or "", calls)


def _messages(answer: str) -> Heard:
    if not answer.startswith(("event:", ":")):
        return _blocks(json.loads(answer)["content"])
    events = [event for event in _events(answer) if event["type"] != "ping"]
    assert [events[i]["type"] for i in (0, -2, -1)] == [
        "message_start", "message_delta", "message_stop",
    ]  # fmt: skip
    blocks: list[dict[str, Any]] = []
    open_ = False
    for event in events[1:-2]:
        assert event["index"] == len(blocks) - open_
        if event["type"] == "content_block_start":
            open_, begun = True, event["content_block"]
            blocks.append({**begun, "json": ""})
        elif event["type"] == "content_block_delta":
            assert open_
            delta = dict(event["delta"])
            kind = delta.pop("type").removesuffix("_delta").replace("input_", "")
            key = {"json": "partial_json"}.get(kind, kind)
            blocks[-1][kind] = blocks[-1].get(kind, "") + delta[key]
        else:
            assert (event["type"], open_) == ("content_block_stop", True)
            open_ = False
    assert not open_
    for block in blocks:
        if block["type"] == "tool_use":
            block["input"] = json.loads(block["json"])
    reply = _blocks(blocks)
    end = "tool_use" if reply.calls else "end_turn"
    assert events[-2]["delta"]["stop_reason"] == end
    return reply


def _blocks(blocks: list[dict[str, Any]]) -> Heard:
    reply = Heard()
    for block in blocks:
        reply.thought += block.get("thinking", "")
        reply.text += block.get("text", "")
        if block["type"] == "tool_use":
            assert block["id"]
            reply.calls.append([block["name"], block["input"]])
    return reply


def _responses(answer: str) -> Heard:
    if not answer.startswith(("event:", ":")):
        return _items(json.loads(answer)["output"])
    events = _events(answer)
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert (events[0]["type"], events[-1]["type"]) == ("response.created", "response.completed")
    done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    added = [e["item"]["id"] for e in events if e["type"] == "response.output_item.added"]
    assert added == [item["id"] for item in done]
    assert done == events[-1]["response"]["output"]
    for kind, key in (("output_text", "text"), ("function_call_arguments", "arguments")):
        pieces = [e["delta"] for e in events if e["type"] == f"response.{kind}.delta"]
        wholes = [e[key] for e in events if e["type"] == f"response.{kind}.done"]
        assert "".join(pieces) == "".join(wholes)
    return _items(done)


def _items(items: list[dict[str, Any]]) -> Heard:
    reply = Heard()
    for item in items:
        if item["type"] == "function_call":
            assert item["call_id"]
            reply.calls.append([item["name"], json.loads(item["arguments"])])
        for part in item.get("content") or ():
            if item["type"] == "reasoning":
                reply.thought += part["text"]
            else:
                reply.text += part["text"]
    return reply


def _lines(answer: str) -> Heard:
    lines = [json.loads(line) for line in answer.splitlines()]
    assert [line["done"] for line in lines] == [False] * (len(lines) - 1) + [True]
    reply = Heard()
    for line in lines:
        new = _message(line.get("message", {"content": line.get("response")}))
        calls = line.get("message", {}).get("tool_calls", ())
        assert [call["function"]["index"] for call in calls] == list(range(len(calls)))
        reply.thought += new.thought
        reply.text += new.text
        reply.calls += new.calls
    return reply


READERS = {
    "/chat/completions": _chat,
    "/v1/messages": _messages,
    "/v1/responses": _responses,
    "/api/chat": _lines,
    "/api/generate": _lines,
}


# -- recorded sessions of real clients --


FOLDER = Path(__file__).parents[1] / "data" / "clients"
GAP = re.compile(r"<(\d+) ([0-9a-f]{6})>")


def filled(value: Any) -> Any:
    """Put our own words where a vendor's text was, as many characters, the same for the same."""
    if isinstance(value, dict):
        return {name: filled(one) for name, one in value.items()}
    if isinstance(value, list):
        return [filled(one) for one in value]
    gap = GAP.fullmatch(value) if isinstance(value, str) else None
    if gap is None:
        return value
    size = int(gap[1])
    return (f"{gap[2]} rain falls " * size)[:size]


def session(name: str) -> dict[str, Any]:
    told: dict[str, Any] = json.loads((FOLDER / f"{name}.json").read_text("utf-8"))
    bodies: list[dict[str, Any]] = []
    for exchange in told["exchanges"]:
        if "body" not in exchange:
            continue
        body = exchange["body"] = filled(exchange["body"])
        for key, value in body.items():
            if isinstance(value, dict) and value.keys() == {"of", "first", "more"}:
                body[key] = [*bodies[value["of"]][key][: value["first"]], *value["more"]]
        bodies.append(body)
    return told
