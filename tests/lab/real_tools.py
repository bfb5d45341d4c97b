"""Calls of tools as a real model writes them: how many of the right ones reach the client.

A part of ``real.py``. The model answers each prompt once, at temperature 0; its text then goes
through the server in four dialects, whole and streamed. What is right is judged apart from the
server's reader: an object somewhere in the text that names an offered tool and whose arguments
fit its schema (by jsonschema).
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterator, Sequence
from typing import Any

import jsonschema
from scripted_server import Rule, Rules
from servers import Serving, serving

from specllama.engine.engine import Engine
from specllama.interface import Message
from specllama.server.tools import Tool, equipped, tool_use
from specllama.settings.params import GenerateParams
from specllama.told import Told

ROUTES = ("/v1/chat/completions", "/v1/messages", "/api/chat", "/v1/responses")
WAYS = tuple(itertools.product(ROUTES, (False, True)))


def tool(name: str, what: str, needed: str, optional: str = "") -> Tool:
    """A tool of parameters such as "path n:integer"."""
    kinds = [one.partition(":")[::2] for one in f"{needed} {optional}".split()]
    properties = {key: {"type": kind or "string"} for key, kind in kinds}
    required = [one.partition(":")[0] for one in needed.split()]
    return Tool(name, what, {"type": "object", "properties": properties, "required": required})


BASE = (
    tool("read_file", "Read a text file.", "path"),
    tool("list_dir", "List a folder.", "path", "recursive:boolean"),
    tool("run_command", "Run a shell command.", "command", "timeout:integer"),
)
MANY = (
    *BASE,
    tool("write_file", "Write a text file.", "path content"),
    tool("get_weather", "The weather of a city today.", "city", "unit"),
    tool("send_mail", "Send a mail.", "to subject body"),
    tool("search_web", "Search the web.", "query", "count:integer"),
    tool("create_event", "Put an event into the calendar.", "title date", "place"),
    tool("delete_file", "Delete a file.", "path"),
    tool("translate", "Translate a text.", "text language"),
    tool("convert_money", "Convert an amount of money.", "amount:number source target"),
    tool("set_timer", "Start a timer.", "minutes:integer", "label"),
)
WORDS = (
    *("size", "owner", "age", "kind", "place", "host", "port", "user", "group", "mode"),
    *("name", "date", "state", "color", "price"),
)  # so many that the forty take 10,000 tokens
FILLER = " ".join(
    f"Case {i}: state the {word} before the call, and repeat nothing that was done."
    for i, word in enumerate(WORDS)
)
FORTY = (*MANY, *(tool(f"archive_{i}", f"Archive number {i}. {FILLER}", "key") for i in range(28)))
# what is asked, and which tool is meant; "" where a text is
ONE = (
    ("Open notes.txt and tell me its first line.", "read_file"),
    ("Read README.md.", "read_file"),
    ("What is in the file src/main.py?", "read_file"),
    ("Please show me /etc/hostname.", "read_file"),
    ("Which version does pyproject.toml name?", "read_file"),
    ("Summarize docs/intro.md for me.", "read_file"),
    ("Is there a bug in app/server.js? Have a look.", "read_file"),
    ("Read a.txt and b.txt.", "read_file"),
    ('Look into "my notes.txt".', "read_file"),
    ("Compare old.cfg with new.cfg.", "read_file"),
    ("Say hello.", ""),
    ("What is seven times eight?", ""),
    ("Explain in one sentence what a file is.", ""),
    ("Write a Python function that adds two numbers, and nothing else.", ""),
)
THREE = (
    ("List the folder src.", "list_dir"),
    ("Which files are in the current folder?", "list_dir"),
    ("Show everything below docs, folders in folders too.", "list_dir"),
    ("Run the tests with pytest.", "run_command"),
    ("How much space is left on the disk? Use df -h.", "run_command"),
    ("Run make build, but for no longer than 60 seconds.", "run_command"),
    ("Commit everything in git with the message 'first'.", "run_command"),
    ("Read setup.cfg.", "read_file"),
    ("List src and then list tests.", "list_dir"),
    ("Read the Makefile and run make help.", "read_file"),
    ("Thanks, that is all.", ""),
    ("What does the command ls do? Answer in one sentence.", ""),
    ("Write a haiku about rain.", ""),
    ("Give me a JSON object with the name and age of a person.", ""),
)
LONG = (
    ("What is the weather in Paris?", "get_weather"),
    ("Send a mail to ann@example.org that says the build is done.", "send_mail"),
    ("Search the web for llama.cpp releases.", "search_web"),
    ("Set a timer of 5 minutes for the tea.", "set_timer"),
    ("Translate 'good morning' into Spanish.", "translate"),
    ("Convert 20.5 euros to dollars.", "convert_money"),
    ("Delete tmp/old.log.", "delete_file"),
    ("Write the text 'hello' into hello.txt.", "write_file"),
    ("Put lunch with Bob on 2026-12-01 into my calendar.", "create_event"),
    ("Read notes.txt.", "read_file"),
    ("Good evening!", ""),
    ("What is the capital of France?", ""),
)
SETS = (("1 tool", BASE[:1], ONE), ("3 tools", BASE, THREE), ("40 tools", FORTY, LONG))
MOST = 72  # tokens of a reply; calls are shorter


def written(engine: Engine, tools: Sequence[Tool], asked: str) -> Told:
    """What the model answers, with the marks of its calls."""
    use = tool_use(tools, None)
    assert use is not None
    plain = GenerateParams(seed=1, max_tokens=MOST, proposer="auto").choose("temperature", 0.0)
    messages, params = equipped([Message("user", asked)], plain, use, engine.tool_syntax())
    return Told.of(engine.generate(messages, params))


def right_calls(text: str, tools: Sequence[Tool]) -> list[dict[str, Any]]:
    """Objects in a text that are calls: name and arguments, each found by itself."""
    schemas, found, at = {one.name: one.schema for one in tools}, [], 0
    while start := re.compile(r"\{(?=\s*\")").search(text, at):
        at = start.end()
        try:
            said, end = json.JSONDecoder(strict=False).raw_decode(text, start.start())
        except ValueError:
            continue
        given = said.get("arguments", said.get("parameters"))
        known = said.get("name") in schemas and isinstance(given, dict)
        if known and jsonschema.Draft202012Validator(schemas[said["name"]]).is_valid(given):
            found.append({"name": said["name"], "arguments": given})
        at = end
    return found


def asked_of(path: str, asked: str, tools: Sequence[Tool], stream: bool) -> dict[str, Any]:
    functions = [
        {"name": t.name, "description": t.description, "parameters": t.schema} for t in tools
    ]
    body: dict[str, Any] = {"stream": stream, "messages": [{"role": "user", "content": asked}]}
    if path == "/v1/messages":
        own = [{"name": f["name"], "input_schema": f["parameters"]} for f in functions]
        return {**body, "max_tokens": 2000, "tools": own}
    if path == "/v1/responses":
        own = [{"type": "function", **f} for f in functions]
        return {"stream": stream, "input": asked, "tools": own}
    return {**body, "tools": [{"type": "function", "function": f} for f in functions]}


def delivered(server: Serving, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    """The calls in an answer."""
    answer = server.post(path, body)
    assert answer.status_code == 200, answer.text
    if not body["stream"]:
        frames = [answer.json()]
    else:
        lines = (line.removeprefix("data: ") for line in answer.text.splitlines())
        frames = [json.loads(line) for line in lines if line.startswith("{")]
    if path == "/v1/chat/completions":
        deltas = (c.get("message") or c["delta"] for f in frames for c in f["choices"])
        parts: dict[int, list[str]] = {}
        for i, call in enumerate(c for d in deltas for c in d.get("tool_calls") or ()):
            one = parts.setdefault(call.get("index", i), ["", ""])
            one[0] += call["function"].get("name", "")
            one[1] += call["function"]["arguments"]
        return [{"name": name, "arguments": json.loads(said)} for name, said in parts.values()]
    if path == "/api/chat":
        calls = [c["function"] for f in frames for c in f["message"].get("tool_calls") or ()]
        return [{"name": c["name"], "arguments": c["arguments"]} for c in calls]
    if path == "/v1/responses":
        last = frames[-1].get("response", frames[-1])
        items = [item for item in last["output"] if item["type"] == "function_call"]
        return [{"name": i["name"], "arguments": json.loads(i["arguments"])} for i in items]
    if not body["stream"]:
        used = [block for block in frames[0]["content"] if block["type"] == "tool_use"]
        return [{"name": block["name"], "arguments": block["input"]} for block in used]
    names = [f["content_block"]["name"] for f in frames
             if f.get("content_block", {}).get("type") == "tool_use"]  # fmt: skip
    said = [f["delta"]["partial_json"] for f in frames
            if f.get("delta", {}).get("type") == "input_json_delta"]  # fmt: skip
    return [{"name": n, "arguments": json.loads(s)} for n, s in zip(names, said, strict=True)]


def battery(engine: Engine, *, quick: bool) -> Iterator[tuple[str, bool, str, dict[str, Any]]]:
    """For each number of tools: part, whether it went well, words and figures."""
    for label, tools, prompts in SETS[: 2 if quick else None]:
        chosen = (*prompts[:3], prompts[-1]) if quick else prompts
        replies = {text: written(engine, tools, text) for text, _ in chosen}
        tokens = max(reply.end.prompt_n for reply in replies.values())
        yield judged(label, tools, chosen, {k: v.end.text for k, v in replies.items()}, tokens)


def judged(
    label: str,
    tools: Sequence[Tool],
    prompts: Sequence[tuple[str, str]],
    texts: dict[str, str],
    tokens: int,
) -> tuple[str, bool, str, dict[str, Any]]:
    """How many of the right calls in these texts are delivered, in all dialects."""
    rules = tuple(Rule(texts[text], re.escape(text)) for text, _ in prompts)
    right = came = meant = extra = same = 0
    told = []
    with serving(Rules(rules)) as server:
        for text, name in prompts:
            calls = right_calls(texts[text], tools)
            got = [
                delivered(server, path, asked_of(path, text, tools, stream))
                for path, stream in WAYS
            ]
            right += len(calls)
            came += sum(all(call in one for one in got) for call in calls)
            extra += max(len(one) for one in got) if not (calls or name) else 0
            meant += bool(name) and any(call["name"] == name for call in calls)
            same += all(one == got[0] for one in got)
            told.append({"asked": text, "text": texts[text], "right": calls, "got": got[0]})
    words = (
        f"{came} of {right} right calls delivered, {extra} where a text was meant, "
        f"{same} of {len(prompts)} the same in 8 ways; the tool that was meant in {meant} of "
        f"{sum(bool(name) for _, name in prompts)}; up to {tokens} tokens"
    )
    ok = came == right and not extra and same == len(prompts)
    return f"calls, {label}", ok, words, {"told": told, "right": right, "came": came}
