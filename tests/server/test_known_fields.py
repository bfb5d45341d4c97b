"""What other servers know is honoured, refused by name, or changes no text: never dropped."""

import re
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import msgspec
import msgspec.inspect as inspect
import pytest
from servers import Serving

from specllama.server import anthropic, chat_completions, native, ollama_api, responses
from specllama.server.dialect import Job
from specllama.server.refusals import Refusal
from specllama.server.sampling_fields import Sampling, Structured, params_of
from specllama.server.service import KNOWN, REFUSED
from specllama.settings.params import GenerateParams, SamplingParams

TURNS = [{"role": "user", "content": "the rain"}]
FAMILIES: dict[str, tuple[dict[str, Any], type]] = {
    "/v1/chat/completions": ({"messages": TURNS, "max_tokens": 2}, chat_completions.ChatRequest),
    "/v1/completions": (
        {"prompt": "the rain", "max_tokens": 2},
        chat_completions.CompletionRequest,
    ),
    "/v1/responses": ({"input": "the rain", "max_output_tokens": 2}, responses.ResponsesRequest),
    "/v1/messages": ({"messages": TURNS, "max_tokens": 2}, anthropic.MessagesRequest),
    "/completion": ({"prompt": "the rain", "n_predict": 2}, native.NativeCompletion),
    "/api/chat": ({"messages": TURNS, "stream": False}, ollama_api.OllamaChat),
    "/api/generate": ({"prompt": "the rain", "stream": False}, ollama_api.GenerateRequest),
}
# what asks for something, and values that ask for nothing
ASKS: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "mirostat": (2, (0, None)),
    "dynatemp_range": (0.5, (0, 0.0)),
    "top_n_sigma": (1.5, (-1, 0)),
    "adaptive_target": (0.5, (-1.0,)),
    "tfs_z": (0.9, (1, 1.0)),
    "min_keep": (3, (0, 1)),
    "lora": ([{"id": 0, "scale": 0.5}], ([],)),
    "image_data": ([{"id": 1, "data": ""}], ([],)),
    "grammar_lazy": (True, (False,)),
    "parse_tool_calls": (False, (True,)),
    "min_tokens": (5, (0,)),
    "stop_token_ids": ([3], ([],)),
    "include_stop_str_in_output": (True, (False,)),
    "allowed_token_ids": ([3], ([],)),
    "bad_words": (["rain"], ([],)),
    "structural_tag": ("{}", ()),
    "guided_whitespace_pattern": (" ", ()),
    "prompt_logprobs": (1, (False,)),
    "truncate_prompt_tokens": (5, ()),
    "use_beam_search": (True, (False,)),
    "length_penalty": (2.0, (1.0,)),
    "skip_special_tokens": (False, (True,)),
    "return_tokens_as_token_ids": (True, (False,)),
    "chat_template": ("{{ messages }}", ()),
    "documents": ([{"text": "a"}], ([],)),
    "logits_processors": (["a"], ([],)),
    "vllm_xargs": ({"a": 1}, ({},)),
    "functions": ([{"name": "f"}], ([],)),
    "function_call": ({"name": "f"}, ("auto", "none")),
    "audio": ({"voice": "alloy"}, ()),
    "modalities": (["text", "audio"], (["text"],)),
    "web_search_options": ({"a": 1}, ()),
    "conversation": ("conv_1", ()),
    "mcp_servers": ([{"name": "a"}], ([],)),
    "container": ("c", ()),
    "template": ("{{ .Prompt }}", ("",)),
    "context": ([1, 2], ([],)),
    "grammar_triggers": ([{"type": 0, "value": "a"}], ([],)),
    "preserved_tokens": (["<a>"], ([],)),
    "generation_prompt": ("<a>", ("",)),
    "chat_parser": ("x", ("",)),
    "reasoning_format": ("none", ("auto", "deepseek")),
    "reasoning_budget_message": ("enough", ("",)),
    "reasoning_budget_start_tag": ("<a>", ("",)),
    "reasoning_budget_end_tag": ("</a>", ("",)),
    "reasoning_budget_end_tags": (["</a>"], ([],)),
    "reasoning_control": (True, (False,)),
    "echo": (True, (False,)),
    "continue_final_message": (True, (False,)),
    "n_cmpl": (2, (1,)),
    "n_probs": (2, (0,)),
    "post_sampling_probs": (True, (False,)),
    "response_fields": (["content"], ([],)),
    "min_new_tokens": (5, (0,)),
    "stop_regex": ("a+", ("",)),
    "no_stop_trim": (True, (False,)),
    "ebnf": ("root ::= a", ("",)),
    "regex": ("a+", ("",)),
    "custom_logit_processor": ("x", ("",)),
    "lora_path": ("a", ("",)),
    "image": ({"size": "a"}, ({},)),
    "moderation": ({"model": "a"}, ({},)),
    "background_options": ({"a": 1}, ({},)),
    "prompt": ({"id": "pmpt_1"}, ()),
    "personality": ("friendly", ("",)),
    "top_logprobs": (3, (0,)),
    "compaction": ({"enabled": True}, ({},)),
    "width": (64, (0,)),
    "height": (64, (0,)),
    "steps": (4, (0,)),
}


def test_the_table_is_tried_whole() -> None:
    assert ASKS.keys() == REFUSED.keys()
    assert not KNOWN.passed.keys() & REFUSED.keys()


@pytest.mark.parametrize("path", FAMILIES)
def test_what_is_not_offered_is_refused_by_name(server: Serving, path: str) -> None:
    body, kind = FAMILIES[path]
    for name, (asks, _) in ASKS.items():
        if name in kind.__struct_fields__:
            continue
        answer = server.post(path, {**body, name: asks})
        assert answer.status_code == 501, name
        assert name in answer.text


@pytest.mark.parametrize("path", FAMILIES)
def test_what_asks_for_nothing_is_no_matter(server: Serving, path: str) -> None:
    body, kind = FAMILIES[path]
    theirs = {name: idle for name, (_, idle) in ASKS.items() if name not in kind.__struct_fields__}
    for nth in range(max(map(len, theirs.values()))):
        fields = {name: idle[nth] for name, idle in theirs.items() if nth < len(idle)}
        answer = server.post(path, {**body, **fields})
        assert answer.status_code == 200, answer.text


def test_what_is_harmless_changes_no_text(server: Serving) -> None:
    plain = server.chat(seed=4)["choices"][0]["message"]
    left = KNOWN.passed.keys() - set(chat_completions.ChatRequest.__struct_fields__) - {"metadata"}
    for value in (0, 7, "x", {}):
        assert server.chat(seed=4, **dict.fromkeys(left, value))["choices"][0]["message"] == plain


def test_options_of_ollama_are_looked_at_too(server: Serving) -> None:
    for name, value in (("mirostat", 1), ("tfs_z", 0.5), ("lora", [1])):
        answer = server.post("/api/chat", {"messages": TURNS, "options": {name: value}})
        assert answer.status_code == 501
        assert name in answer.json()["error"]


def test_ollamas_logprobs(server: Serving) -> None:
    asked = {"messages": TURNS, "logprobs": True, "top_logprobs": 2, "options": {"num_predict": 3}}
    whole = server.post("/api/chat", {**asked, "stream": False}).json()
    assert [len(one["top_logprobs"]) for one in whole["logprobs"]] == [2] * whole["eval_count"]
    written = "".join(one["token"] for one in whole["logprobs"])
    assert written.startswith(whole["message"]["content"])
    assert "logprobs" not in server.post("/api/chat", {**asked, "logprobs": None}).text


def test_vllms_constraints_are_ours() -> None:
    base = GenerateParams()
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    ours = params_of(Sampling(json_schema=schema), base).json_schema
    for asked in (
        Sampling(guided_json=schema),
        Sampling(structured_outputs=Structured(json=schema)),
    ):
        assert params_of(asked, base).json_schema == ours
    assert params_of(Sampling(structured_outputs=Structured(json_object=True)), base).json_schema
    words = ['a "b"', "c\\d\n"]
    grammar = r'root ::= "a \"b\"" | "c\\d\n"'
    for asked in (
        Sampling(guided_choice=words),
        Sampling(structured_outputs=Structured(choice=words)),
    ):
        assert params_of(asked, base).grammar == grammar
    own = 'root ::= "a"'
    assert params_of(Sampling(guided_grammar=own), base).grammar == own
    for asked in (Sampling(guided_regex="a+"), Sampling(structured_outputs=Structured(regex="a+"))):
        assert params_of(asked, base).regex == "a+"
    with pytest.raises(Refusal, match="only one"):
        params_of(Sampling(guided_regex="a+", json_schema=schema), base)


@pytest.mark.parametrize(
    ("regex", "whole"),
    [("[0-9]{4}", r"[0-9]{4}"), ("^[a-c]{3}$", r"[a-c]{3}"), (r"yes|no", r"yes|no")],
)
def test_a_reply_matches_its_regular_expression(server: Serving, regex: str, whole: str) -> None:
    for seed in range(3):
        said = server.chat(guided_regex=regex, seed=seed, max_tokens=20)["choices"][0]
        assert said["finish_reason"] == "stop"
        assert re.fullmatch(whole, said["message"]["content"])


def test_samplers_that_are_left_out_are_off() -> None:
    base = GenerateParams()
    every = ["penalties", "dry", "top_n_sigma", "top_k", "typ_p", "top_p", "min_p", "xtc"]
    assert params_of(Sampling(samplers=[*every, "temperature"]), base).sampling == base.sampling
    few = params_of(Sampling(samplers=["top_k", "temperature"]), base).sampling
    assert few == SamplingParams(top_p=1.0, min_p=0.0)
    assert params_of(Sampling(samplers=["xtc", "top_k", "temp"]), base).sampling == few
    assert params_of(Sampling(samplers=[]), base).sampling.temperature == 1.0
    editor = params_of(Sampling(samplers=["top_k", "top_p", "infill"]), base).sampling
    assert (editor.infill, editor.temperature, few.infill) == (True, 1.0, False)
    after = ["infill", "top_k"]
    for wrong in (["temperature", "top_k"], ["min_p", "top_p"], after, ["nothing"], "kt"):
        with pytest.raises(Refusal, match="samplers"):
            params_of(Sampling(samplers=wrong), base)


def test_values_of_other_servers() -> None:
    base = GenerateParams()
    for every in (0, -1, -9):  # llama-server takes any of them
        assert params_of(Sampling(top_k=every), base).sampling.top_k == 0
    assert 0 < params_of(Sampling(top_p=0), base).sampling.top_p < 1e-9
    whole = params_of(Sampling(repetition_penalty=1.2), base).sampling
    assert (whole.repeat_penalty, whole.repeat_last_n) == (1.2, -1)


def test_logprobs_of_completions_are_a_number_or_true(server: Serving) -> None:
    asked = FAMILIES["/v1/completions"][0]
    for given, n in ((0, 1), (True, 1), (2, 2)):
        [choice] = server.post("/v1/completions", {**asked, "logprobs": given}).json()["choices"]
        for token, top in zip(
            choice["logprobs"]["tokens"], choice["logprobs"]["top_logprobs"], strict=True
        ):
            assert token in top
            assert n <= len(top) <= n + 1
    [choice] = server.post("/v1/completions", {**asked, "logprobs": False}).json()["choices"]
    assert choice["logprobs"] is None


def test_a_function_is_a_tool_of_old(server: Serving) -> None:
    turns = [*TURNS, {"role": "function", "name": "f", "content": "rain"}]
    assert server.post("/v1/chat/completions", {"messages": turns}).status_code == 200


def test_a_response_tells_what_was_asked(server: Serving) -> None:
    tool = {"type": "function", "name": "f", "strict": True, "parameters": {"type": "object"}}
    form = {"type": "json_schema", "name": "n", "strict": True, "schema": {"type": "object"}}
    named = {"type": "function", "name": "f"}
    asked = {
        "temperature": 0.5,
        "top_p": 0.9,
        "metadata": {"a": "b"},
        "max_output_tokens": 60,
        "tools": [tool],
        "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [named]},
        "parallel_tool_calls": False,
        "instructions": "Be short.",
    }
    told = server.post("/v1/responses", {"input": "the rain", **asked}).json()
    assert {name: told.get(name) for name in asked} == asked
    assert told["truncation"] == "disabled"
    told = server.post("/v1/responses", {"input": "the rain", "max_output_tokens": 2}).json()
    assert (told["tools"], told["tool_choice"], told["parallel_tool_calls"]) == ([], "auto", True)
    assert told["temperature"] == SamplingParams().temperature
    assert told["text"] == {"format": {"type": "text"}}
    text = {"format": form, "verbosity": "low"}
    body = msgspec.convert({"input": "x", "text": text}, responses.ResponsesRequest)
    model: Any = SimpleNamespace(name="m")
    [created, _] = responses.ResponsesDialect(body, Job(("",), GenerateParams()), model).begun([])
    assert isinstance(created.data, dict)
    assert created.data["response"]["text"] == text


# -- clients in Go write null for a field that was not given --


REQUESTS = (
    anthropic.MessagesRequest,
    chat_completions.ChatRequest,
    chat_completions.CompletionRequest,
    native.NativeCompletion,
    native.InfillRequest,
    native.TokenizeRequest,
    native.DetokenizeRequest,
    native.TemplateRequest,
    ollama_api.OllamaChat,
    ollama_api.GenerateRequest,
    ollama_api.ShowRequest,
    responses.ResponsesRequest,
)


def structs(kind: Any, seen: set[type]) -> Iterator[inspect.StructType]:
    """A type and every struct in it."""
    if isinstance(kind, inspect.StructType):
        if kind.cls in seen:
            return
        seen.add(kind.cls)
        yield kind
        for field in kind.fields:
            yield from structs(field.type, seen)
    elif isinstance(kind, inspect.UnionType):
        for one in kind.types:
            yield from structs(one, seen)
    elif isinstance(kind, inspect.ListType):
        yield from structs(kind.item_type, seen)


def takes_null(kind: inspect.Type) -> bool:
    if isinstance(kind, inspect.UnionType):
        return any(map(takes_null, kind.types))
    return isinstance(kind, (inspect.NoneType, inspect.AnyType))


@pytest.mark.parametrize("request_type", REQUESTS, ids=lambda kind: kind.__module__ + kind.__name__)
def test_every_optional_field_is_null_or_left_out(request_type: type) -> None:
    found = list(structs(inspect.type_info(request_type), set()))
    refused = [
        f"{struct.cls.__name__}.{field.name}"
        for struct in found
        for field in struct.fields
        if not field.required and not (field.default is None and takes_null(field.type))
    ]
    assert refused == []


def test_ollamas_go_client_loads_a_model(server: Serving) -> None:
    for path, field in (("/api/chat", "messages"), ("/api/generate", "prompt")):
        asked = {"model": "m", field: None, "stream": None, "options": None, "keep_alive": None}
        assert server.post(path, asked).json()["done_reason"] == "load"
