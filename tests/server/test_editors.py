"""Requests as editors' plug-ins send them to fill a gap, and a day's typing in one.

Taken from the sources of llama.vim, llama.vscode, minuet-ai.nvim, Zed and Continue.
"""

import json
import time
from collections.abc import Iterator
from typing import Any

import pytest
from servers import Serving, serving, table

BEFORE = "def add(a, b):\n    total = a + b\n"
LINE = "    return "
AFTER = "\n\nprint(add(1, 2))\n"
MARKED = f"<|fim_prefix|>{BEFORE}{LINE}<|fim_suffix|>{AFTER}<|fim_middle|>"
CHUNKS = [
    {"text": f"part {n} of the ring of chunks\n" * 6, "time": 3, "filename": f"m{n}.py"}
    for n in range(4)
]
AHEAD = {"input_prefix": "", "input_suffix": "", "prompt": "", "n_predict": 0, "samplers": []}
STOPS = ["<|endoftext|>", "<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>"]
CONTINUE = [*STOPS, "<|fim_pad|>", "<|repo_name|>", "<|file_sep|>", "<|im_start|>", "<|im_end|>",
            "\n\n", "\r\n\r\n", "/src/", "#- coding: utf-8", "```"]  # fmt: skip
GAP = {"input_prefix": BEFORE, "input_suffix": AFTER, "prompt": LINE, "id_slot": 0}
VIM = {
    "top_k": 40,
    "top_p": 0.9,
    "samplers": ["top_k", "top_p", "infill"],
    "stream": False,
    "cache_prompt": True,
    "t_max_prompt_ms": 500,
}
REQUESTS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama.vim": (
        "/infill",
        {
            **GAP,
            **VIM,
            "input_extra": CHUNKS,
            "n_predict": 128,
            "stop": [],
            "n_indent": 4,
            "t_max_predict_ms": 250,
            "response_fields": ["content", "timings/prompt_n", "truncated", "tokens_cached"],
        },
    ),
    "llama.vim reads ahead": (
        "/infill",
        {
            **AHEAD,
            "id_slot": 0,
            "input_extra": CHUNKS,
            "temperature": 0.0,
            "stream": False,
            "cache_prompt": True,
            "t_max_prompt_ms": 1,
            "t_max_predict_ms": 1,
            "response_fields": [""],
        },
    ),
    "llama.vscode": (
        "/infill",
        {
            **GAP,
            **VIM,
            "input_extra": CHUNKS,
            "n_predict": 128,
            "n_cmpl": 3,
            "top_p": 0.99,
            "n_indent": 4,
            "t_max_predict_ms": 2500,
            "model": "table",
        },
    ),
    "llama.vscode reads ahead": (
        "/infill",
        {**AHEAD, "input_extra": CHUNKS, "t_max_prompt_ms": 500, "t_max_predict_ms": 1},
    ),
    "minuet, a suffix": (
        "/v1/completions",
        {
            "model": "qwen2.5-coder:7b",
            "stream": True,
            "max_tokens": 56,
            "top_p": 0.9,
            "prompt": f"# language: python\n# indentation: use 4 spaces for a tab\n{BEFORE}{LINE}",
            "suffix": AFTER,
        },
    ),
    "minuet, marks": (
        "/v1/completions",
        {"model": "PLACEHOLDER", "stream": True, "max_tokens": 56, "prompt": MARKED},
    ),
    "Zed": (
        "/v1/completions",
        {
            "model": "table",
            "prompt": MARKED,
            "max_tokens": 64,
            "temperature": None,
            "stop": STOPS,
            "environment": None,
        },
    ),
    "Zed, by Ollama": (
        "/api/generate",
        {
            "model": "table",
            "prompt": MARKED,
            "raw": True,
            "stream": False,
            "options": {"num_predict": 64, "temperature": 0.2, "stop": STOPS},
        },
    ),
    "Continue": (
        "/completion",
        {"prompt": MARKED, "stream": True, "n_predict": 256, "stop": CONTINUE, "temperature": 0.01},
    ),
    "Continue, by Ollama": (
        "/api/generate",
        {
            "model": "table",
            "prompt": BEFORE + LINE,
            "suffix": AFTER,
            "options": {"temperature": 0.01, "num_predict": 256, "stop": CONTINUE, "num_ctx": 1024},
            "keep_alive": 1800,
            "stream": True,
        },
    ),
}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    with serving(table(tmp_path_factory.mktemp("models"), gap=True, n_ctx=4096)) as running:
        yield running


@pytest.mark.parametrize("name", REQUESTS)
def test_what_an_editor_sends_is_answered(server: Serving, name: str) -> None:
    path, body = REQUESTS[name]
    answer = server.post(path, body)
    assert answer.status_code == 200, answer.text
    lines = [line.removeprefix("data: ") for line in answer.text.splitlines()]
    told = [json.loads(line) for line in lines if line.startswith(("{", "[{"))]
    replies = told[0] if isinstance(told[0], list) else told
    assert len(replies) == body.get("n_cmpl", len(replies))
    for reply in replies:
        assert "<|fim" not in str([reply.get(key) for key in ("content", "response", "choices")])


def infill(server: Serving, **fields: Any) -> dict[str, Any]:
    body = {"input_prefix": BEFORE, "input_suffix": AFTER, "prompt": LINE, "n_predict": 60}
    answer = server.post("/infill", {**body, "seed": 5, "temperature": 1, **fields})
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


DRAFTED = {"proposer": "draft", "window": "fixed", "draft_max": 4}


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"n_indent": 2},
        {"t_max_predict_ms": 60_000},
        {"samplers": ["top_k", "top_p", "infill"]},
        {"input_extra": CHUNKS},
        {"temperature": 0, "ignore_eos": True},
    ],
)
def test_a_drafted_reply_is_the_plain_one(
    server: Serving, fields: dict[str, Any], seed: int
) -> None:
    plain = infill(server, **fields, seed=seed, specllama={"proposer": "none"})
    drafted = infill(server, **fields, seed=seed, specllama=DRAFTED)
    assert drafted["content"] == plain["content"]
    assert drafted["stop_type"] == plain["stop_type"]
    assert drafted["tokens_predicted"] < 3 or drafted["timings"]["draft_n"] > 0


def test_a_reply_ends_at_its_indentation_and_at_the_line_when_time_is_up(server: Serving) -> None:
    long = infill(server, ignore_eos=True, n_predict=300)["content"]
    assert long.count("\n") > 1
    cut = infill(server, ignore_eos=True, n_predict=300, n_indent=1)
    first, rest = long.split("\n", 1)
    assert cut["stop_type"] == "limit"
    assert cut["content"] == (f"{first}\n" if rest[0] not in " \t" else cut["content"])
    assert long.startswith(cut["content"])
    late = infill(server, ignore_eos=True, n_predict=300, t_max_predict_ms=0.001)
    assert (late["content"], late["stop_type"]) == (f"{first}\n", "limit")


@pytest.mark.parametrize("specllama", [{"proposer": "none"}, DRAFTED])
@pytest.mark.parametrize("path", ["/infill", "/v1/completions", "/api/generate"])
def test_a_reply_ends_before_it_repeats_what_is_behind_the_gap(
    server: Serving, specllama: dict[str, Any], path: str
) -> None:
    """The gap's own prompt has 64 tokens of what is behind it: the rest can be chosen freely."""

    def filled(after: str, **more: Any) -> str:
        fixed = {"seed": 5, "temperature": 1, "ignore_eos": True, "top_k": 0}
        asked = {**fixed, "specllama": {**specllama, **more}}
        if path == "/infill":
            return str(infill(server, **asked, input_suffix=after, n_predict=500)["content"])
        body = {"prompt": BEFORE + LINE, "suffix": after, "max_tokens": 500, **asked}
        if path == "/api/generate":
            body = {**body, "stream": False, "options": {**fixed, "num_predict": 500}}
        told = server.post(path, body).json()
        return str(told["response"] if path == "/api/generate" else told["choices"][0]["text"])

    start = "\n" * 70
    text = filled(start, at_suffix=False)
    line = next(one for one in text.split("\n")[2:-1] if len(one.strip()) > 8)
    after = f"{start}{line}\nand more\n"
    assert filled(after, at_suffix=False) == text
    assert filled(after) == text[: text.index(f"\n{line}\n")]


def test_what_was_read_ahead_is_not_read_again(server: Serving) -> None:
    chunks = [{"text": "x = compute(1)\n" * 60, "filename": "far.py"}]
    assert server.post("/infill", {**AHEAD, "input_extra": chunks}).json()["content"] == ""
    timings = infill(server, input_extra=chunks)["timings"]
    assert timings["cache_n"] > 900 > 200 > timings["prompt_n"]


@pytest.mark.parametrize("typed", ["prompt", "input_prefix"])
def test_twenty_keys_each_of_which_cancels_the_one_before(server: Serving, typed: str) -> None:
    around = {
        "input_prefix": "".join(f"def f{n}(a):\n    return a + {n}\n" for n in range(90)),
        "input_suffix": "".join(f"\nprint(f{n}(1))" for n in range(120)),
        "prompt": "",
        "ignore_eos": True,
    }
    keys = "if a:\n    return f2(a)"
    infill(server, **around, n_predict=1)
    for n in range(1, 21):
        asked = {**around, typed: around[typed] + keys[:n], "n_predict": 400, "stream": True}
        with server.http.stream("POST", "/infill", json=asked) as answer:
            assert answer.status_code == 200
            next(answer.iter_bytes())
            time.sleep(0.02)
    last = {**around, typed: around[typed] + keys}
    told = infill(server, **last)
    assert 0 < told["timings"]["prompt_n"] < 100
    assert told["timings"]["cache_n"] > 2000
    assert infill(server, **last, specllama=DRAFTED)["content"] == told["content"]
