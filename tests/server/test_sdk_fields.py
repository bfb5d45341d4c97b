"""Every field that the official clients can send is done, refused by name, or known to be moot."""

import re
from pathlib import Path
from typing import Any, get_type_hints

import msgspec
import pytest

from specllama.server import anthropic, chat_completions, native, ollama_api, responses
from specllama.server.dialect import Job
from specllama.server.service import KNOWN, NAMING, REFUSED, refuse_known
from specllama.settings.params import GenerateParams

SERVER_MD = Path(__file__).parents[2] / ".github" / "server.md"
TURNS = [{"role": "user", "content": "the rain"}]
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
OWN_TOOL = {"type": "function", "name": "look", "parameters": {"type": "object"}}
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}

CHAT, TEXT, ITEMS = "chat/completions", "completions", "responses"
MESSAGES, COMPLETION, OLLAMA, GENERATE = "messages", "completion", "api/chat", "api/generate"
ROUTES: dict[str, tuple[type, Any, dict[str, Any]]] = {
    CHAT: (chat_completions.ChatRequest, chat_completions.parse_chat, {"messages": TURNS}),
    TEXT: (chat_completions.CompletionRequest, chat_completions.parse_completion, {"prompt": "a"}),
    ITEMS: (responses.ResponsesRequest, responses.parse, {"input": "the rain"}),
    MESSAGES: (
        anthropic.MessagesRequest,
        anthropic.parse,
        {"messages": TURNS, "max_tokens": 9},
    ),
    COMPLETION: (native.NativeCompletion, native.parse, {"prompt": "a"}),
    OLLAMA: (ollama_api.OllamaChat, ollama_api.parse_chat, {"messages": TURNS}),
    GENERATE: (ollama_api.GenerateRequest, ollama_api.parse_generate, {"prompt": "the rain"}),
}

# llama-server reads the same fields on every route that writes (server-schema.cpp there)
LLAMA_SERVER = set(
    """verbose timings_per_token stream stream_options cache_prompt return_tokens return_progress
    sse_ping_interval n_predict max_completion_tokens max_tokens n_indent n_keep n_discard n_cmpl n
    n_cache_reuse t_max_predict_ms response_fields top_k top_p min_p top_n_sigma xtc_probability
    xtc_threshold typical_p temperature dynatemp_range dynatemp_exponent repeat_last_n
    repeat_penalty frequency_penalty presence_penalty dry_multiplier dry_base dry_allowed_length
    dry_penalty_last_n mirostat mirostat_tau mirostat_eta adaptive_target adaptive_decay seed
    n_probs logprobs min_keep backend_sampling post_sampling_probs lora dry_sequence_breakers
    json_schema grammar grammar_lazy reasoning_format generation_prompt parse_tool_calls chat_parser
    continue_final_message echo preserved_tokens grammar_triggers reasoning_control
    reasoning_budget_tokens reasoning_budget_start_tag reasoning_budget_end_tags
    reasoning_budget_end_tag reasoning_budget_message logit_bias ignore_eos stop samplers prompt
    id_slot""".split()  # noqa: SIM905
)
LLAMA_CHAT = set(
    """messages tools tool_choice parallel_tool_calls response_format json_schema grammar
    add_generation_prompt chat_template_kwargs thinking_budget_tokens reasoning_effort
    top_logprobs""".split()  # noqa: SIM905
)


def sent() -> dict[str, set[str]]:
    """The fields that each route's clients can send."""
    completion_params = pytest.importorskip("openai.types.completion_create_params")
    chat_params = pytest.importorskip("openai.types.chat.completion_create_params")
    response_params = pytest.importorskip("openai.types.responses.response_create_params")
    compact = pytest.importorskip("openai.types.responses.response_compact_params")
    counted = pytest.importorskip("openai.types.responses.input_token_count_params")
    message = pytest.importorskip("anthropic.types.message_create_params")
    tokens = pytest.importorskip("anthropic.types.message_count_tokens_params")
    beta = pytest.importorskip("anthropic.types.beta.message_create_params")
    theirs = pytest.importorskip("ollama._types")

    def of(*kinds: Any) -> set[str]:
        return {name for kind in kinds for name in get_type_hints(kind)}

    options = set(theirs.Options.model_fields)
    return {
        CHAT: of(chat_params.CompletionCreateParamsBase) | LLAMA_SERVER | LLAMA_CHAT,
        TEXT: of(completion_params.CompletionCreateParamsBase) | LLAMA_SERVER,
        ITEMS: of(
            response_params.ResponseCreateParamsBase,
            compact.ResponseCompactParams,
            counted.InputTokenCountParams,
        ),
        MESSAGES: of(
            message.MessageCreateParamsBase,
            tokens.MessageCountTokensParams,
            beta.MessageCreateParamsBase,
        )
        | {"output_format"},
        COMPLETION: LLAMA_SERVER,
        OLLAMA: (set(theirs.ChatRequest.model_fields) | options) - {"options"},
        GENERATE: (set(theirs.GenerateRequest.model_fields) | options) - {"options"},
    }


def done(route: str) -> set[str]:
    kind = ROUTES[route][0]
    fields = {*kind.__struct_fields__, *NAMING}
    return fields | set(ollama_api.Options.__struct_fields__) if "api/" in route else fields


@pytest.mark.parametrize("route", ROUTES)
def test_every_field_of_the_clients_has_an_answer(route: str) -> None:
    known = done(route) | REFUSED.keys() | KNOWN.passed.keys()
    assert sent()[route] - known == set()


# what a field of a route asks for, where the job shows that; the others are tried elsewhere
ASKS: dict[str, Any] = {
    "temperature": 0.3, "top_p": 0.5, "top_k": 7, "min_p": 0.3, "typical_p": 0.5,
    "repeat_penalty": 1.3, "repeat_last_n": 7, "presence_penalty": 0.5, "frequency_penalty": 0.5,
    "dry_multiplier": 0.5, "dry_base": 2.0, "dry_allowed_length": 5, "dry_penalty_last_n": 7,
    "dry_sequence_breakers": ["x"], "xtc_probability": 0.5, "xtc_threshold": 0.3, "seed": 5,
    "stop": ["x"], "logit_bias": {"5": 1.0}, "ignore_eos": True, "json_schema": SCHEMA,
    "grammar": 'root ::= "a"', "samplers": ["temperature"], "id_slot": 1, "cache_prompt": False,
    "n_indent": 3, "t_max_predict_ms": 500, "reasoning_effort": "low",
    "thinking_budget_tokens": 5, "thinking_budget": 5, "reasoning_budget_tokens": 5,
    "reasoning_budget": 5, "thinking_token_budget": 5, "enable_thinking": False,
    "prediction": {"type": "content", "content": "x"},
    "max_tokens": 5, "max_completion_tokens": 5, "max_output_tokens": 5, "n_predict": 5,
    "num_predict": 5, "n": 2, "n_cmpl": 2, "stream": True, "logprobs": True, "n_probs": 2,
    "tools": [TOOL], "response_format": {"type": "json_object"},
    "chat_template_kwargs": {"a": 1}, "prompt": "other", "messages": [*TURNS, *TURNS],
    "input": "other", "instructions": "be brief", "system": "be brief",
    "reasoning": {"effort": "low"}, "thinking": {"type": "enabled", "budget_tokens": 2000},
    "text": {"format": {"type": "json_schema", "name": "n", "schema": SCHEMA}},
    "output_config": {"format": {"type": "json_schema", "schema": SCHEMA}},
    "output_format": {"type": "json_schema", "schema": SCHEMA},
    "stop_sequences": ["x"], "format": "json", "think": False, "raw": True,
    "repetition_penalty": 1.3,
}  # fmt: skip
# read by the route or by the spelling of its answer, or asked with another field
ELSEWHERE = {
    "model", "keep_alive", "stream_options", "metadata", "timings_per_token", "return_progress",
    "verbose", "echo", "best_of", "suffix", "tool_choice", "parallel_tool_calls", "top_logprobs",
    "add_generation_prompt", "continue_final_message", "return_tokens", "response_fields",
    "post_sampling_probs", "images", "num_ctx", "background", "previous_response_id", "thread",
    "max_tokens",
}  # fmt: skip


def job(route: str, fields: dict[str, Any]) -> Job:
    kind, parse, body = ROUTES[route]
    asked = {**body, "seed": 3, **fields}
    if "api/" in route:
        names = set(ollama_api.Options.__struct_fields__) - set(kind.__struct_fields__)
        asked["options"] = {name: asked.pop(name) for name in names & asked.keys()}
    read: Job = parse(msgspec.json.decode(msgspec.json.encode(asked), type=kind), GenerateParams())
    return read


@pytest.mark.parametrize("route", ROUTES)
def test_what_is_done_changes_the_job(route: str) -> None:
    """A field in a request's struct that nothing reads would be dropped in silence."""
    own = {ITEMS: {"tools": [OWN_TOOL]}, MESSAGES: {"tools": [{"name": "look"}]},
           OLLAMA: {"stream": False}, GENERATE: {"stream": False},
           COMPLETION: {"logprobs": 2}}.get(route, {})  # fmt: skip
    raw = {"reasoning_effort", *(name for name in ASKS if "budget" in name)}
    plain = job(route, {})
    for name in sorted(sent()[route] & done(route)):
        asks = {**ASKS, **own}.get(name)
        if asks is None or (name in raw and route in (TEXT, COMPLETION)):
            assert name in ELSEWHERE | raw, name
            continue
        assert job(route, {name: asks}) != plain, name


@pytest.mark.parametrize("route", [ITEMS, CHAT, MESSAGES])
def test_a_refused_field_of_a_client_is_named(route: str) -> None:
    kind, _, body = ROUTES[route]
    for name in sent()[route] & REFUSED.keys() - done(route):
        value = {"id": "x"} if REFUSED[name].objects else "something"
        number = 5 if REFUSED[name].most is not None else value
        with pytest.raises(Exception, match=name):
            refuse_known(msgspec.json.encode({**body, name: number}), kind)


def test_the_page_has_the_table() -> None:
    """Every name of the data stands on the page, so that people find why."""
    page = SERVER_MD.read_text("utf-8")
    table = page[page.index("## Fields") :]
    words = set(re.findall(r"`([\w.]+)`", table))
    assert (KNOWN.passed.keys() | REFUSED.keys()) - words == set()
