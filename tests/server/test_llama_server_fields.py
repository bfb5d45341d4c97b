"""What users of llama-server ask for beyond the fields that others have, too."""

from collections.abc import Iterator
from typing import Any

import pytest
from servers import Serving, serving, table

ASKED = {"seed": 3, "temperature": 0.7, "logit_bias": [[0, False]]}
TURNS = [{"role": "user", "content": "the rain"}]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    with serving(table(tmp_path_factory.mktemp("models"))) as running:
        yield running


def complete(server: Serving, prompt: Any, **fields: Any) -> Any:
    answer = server.post("/completion", {"prompt": prompt, "n_predict": 8, **ASKED, **fields})
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_a_prompt_may_mix_texts_and_tokens(server: Serving) -> None:
    ids = server.post("/tokenize", {"content": "the rain"}).json()["tokens"]
    text = complete(server, "the rain")["content"]
    assert complete(server, ids)["content"] == text
    assert complete(server, [*ids[:3], " rain"])["content"] == text
    assert complete(server, ["the ", *ids[4:]])["content"] == text
    assert complete(server, {"prompt_string": "the rain"})["content"] == text
    many = complete(server, [ids, "the rain", ["the", *ids[3:]], {"prompt_string": "the rain"}])
    assert [one["content"] for one in many] == [text] * 4
    image = {"prompt_string": "the rain", "multimodal_data": ["aGk="]}
    assert server.post("/completion", {"prompt": image}).status_code == 501
    for wrong in ([], [[{"prompt_string": "the"}]], [1, {"prompt_string": "the"}]):
        assert server.post("/completion", {"prompt": wrong}).status_code == 400


def test_a_bias_of_words(server: Serving) -> None:
    [a] = server.post("/tokenize", {"content": "a"}).json()["tokens"]
    by_id = complete(server, "the rain", logit_bias=[[a, -100]])
    for bias in ([["a", -100]], {"a": -100}, {str(a): -100}):
        assert complete(server, "the rain", logit_bias=bias)["content"] == by_id["content"]
    assert by_id["generation_settings"]["logit_bias"] == [{"token": a, "bias": -100.0}]
    assert "a" not in by_id["content"]


def test_a_prompt_that_is_only_read(server: Serving) -> None:
    read = complete(server, "a long prompt to be read", n_predict=0)
    assert (read["content"], read["tokens_predicted"], read["tokens"]) == ("", 0, [])
    assert read["stop_type"] == "limit"
    assert complete(server, "a long prompt to be read")["timings"]["cache_n"] > 20
    asked = {"prompt": "the rain", "max_tokens": 0, "echo": True}
    [choice] = server.post("/v1/completions", asked).json()["choices"]
    assert (choice["text"], choice["finish_reason"]) == ("the rain", "length")
    chat = server.chat("a chat to be read", n_predict=0, samplers=[])
    assert (chat["choices"][0]["message"]["content"], chat["usage"]["completion_tokens"]) == ("", 0)
    three = server.chat("a chat to be read", n_predict=3, ignore_eos=True)
    assert three["usage"]["completion_tokens"] == 3


def test_a_prompt_that_is_only_read_has_no_step_of_its_own(server: Serving) -> None:
    """The last row of the prompt gives one token, which is dropped; nothing is decoded for more."""
    before = _figures(server)
    complete(server, "a prompt for a later request", n_predict=0)
    after = _figures(server)
    assert after["tokens_predicted_total"] - before["tokens_predicted_total"] == 1


def test_the_word_that_stopped_a_reply_is_told(server: Serving) -> None:
    text = complete(server, "the rain")["content"]
    cut = complete(server, "the rain", stop=["no such word", text[3:5]])
    assert (cut["stop_type"], cut["stopping_word"]) == ("word", text[3:5])
    assert complete(server, "the rain")["stopping_word"] == ""
    asked = {"messages": TURNS, "max_tokens": 8, "seed": 3, "stop_sequences": ["zzzz", text[3:5]]}
    assert server.post("/v1/messages", {**asked, "temperature": 0.7}).json()["stop_sequence"] in (
        None,
        text[3:5],
    )


def test_fields_of_an_answer_can_be_chosen(server: Serving) -> None:
    fields = ["content", "timings/predicted_n", "generation_settings/n_predict", "nothing/at/all"]
    few = complete(server, "the rain", response_fields=fields)
    assert few.keys() == set(fields[:3])
    assert few["generation_settings/n_predict"] == few["timings/predicted_n"] == 8


def test_with_chances_a_stream_comes_token_by_token(server: Serving) -> None:
    asked = {"prompt": "the rain", "n_predict": 8, "n_probs": 2, "stream": True, **ASKED}
    asked["specllama"] = {"proposer": "draft", "window": "fixed", "draft_max": 4}
    *frames, end = server.frames("/completion", asked)
    assert [len(frame["completion_probabilities"]) for frame in frames] == [1] * 8
    assert [len(frame["tokens"]) for frame in frames] == [1] * 8
    assert "".join(frame["content"] for frame in frames) == complete(server, "the rain")["content"]
    assert "completion_probabilities" not in end


@pytest.mark.parametrize("path", ["/completion", "/v1/chat/completions", "/v1/responses"])
def test_progress_and_timings_come_with_a_stream(server: Serving, path: str) -> None:
    text = "one two three " * 40
    asked = {
        "/completion": {"prompt": text, "n_predict": 4},
        "/v1/chat/completions": {"messages": [{"role": "user", "content": text}], "max_tokens": 4},
        "/v1/responses": {"input": text, "max_output_tokens": 4},
    }[path]
    more = {"stream": True, "return_progress": True, "timings_per_token": True, **ASKED}
    frames = [f for f in server.frames(path, {**asked, **more}) if isinstance(f, dict)]
    told = [frame["prompt_progress"] for frame in frames if "prompt_progress" in frame]
    assert told[0]["processed"] == told[0]["cache"]
    assert told[-1]["processed"] == told[-1]["total"] == len(text)
    assert sorted(told, key=lambda one: int(one["processed"])) == told
    timed = [frame["timings"] for frame in frames if "timings" in frame]
    assert len(timed) > 1
    assert all(value is not None for one in timed for value in one.values())


def test_prompts_are_counted(server: Serving) -> None:
    chat = server.post("/v1/chat/completions/input_tokens", {"messages": TURNS}).json()
    assert chat == {"object": "response.input_tokens", "input_tokens": 8}
    assert server.post("/v1/responses/input_tokens", {"input": "the rain"}).json() == chat


def test_the_prompt_of_a_chat_is_shown(server: Serving) -> None:
    told = server.chat(verbose=True)["__verbose"]
    assert told["prompt"] == "the rain"
    assert (
        told["content"]
        == server.chat(seed=told["generation_settings"]["seed"])["choices"][0]["message"]["content"]
    )
    assert "__verbose" not in server.chat()


def test_a_gap_is_only_filled_by_models_that_can(server: Serving) -> None:
    for path, body in (
        ("/infill", {"input_prefix": "a", "input_suffix": "b"}),
        ("/v1/completions", {"prompt": "a", "suffix": "b"}),
        ("/api/generate", {"prompt": "a", "suffix": "b"}),
    ):
        answer = server.post(path, body)
        assert answer.status_code == 501
        assert "no tokens for a gap" in answer.text
    for extra in ({}, {"filename": "a"}, {"filename": 5, "text": "a"}):
        body = {"input_prefix": "a", "input_suffix": "b", "input_extra": [extra]}
        assert server.post("/infill", body).status_code == 400
    assert server.post("/v1/completions", {"prompt": [1, 2], "suffix": "b"}).status_code == 400


def test_figures_have_the_names_of_llama_server(server: Serving) -> None:
    before = _figures(server)
    done = complete(server, "figures of a prompt")
    after = _figures(server)
    grown = {name: after[name] - before[name] for name in after}
    assert grown["prompt_tokens_total"] == done["timings"]["prompt_n"]
    assert grown["tokens_predicted_total"] == 8
    assert grown["n_decode_total"] > 0
    assert after["requests_processing"] == after["requests_deferred"] == 0
    assert after["n_tokens_max"] >= len("figures of a prompt") + 8


def _figures(server: Serving) -> dict[str, float]:
    answer = server.http.get("/metrics")
    assert int(answer.headers["Process-Start-Time-Unix"]) > 10**9
    lines = [line for line in answer.text.splitlines() if line.startswith("llamacpp:")]
    return {line.split()[0].partition(":")[2]: float(line.split()[1]) for line in lines}


def test_vllms_way_to_count_tokens(server: Serving) -> None:
    ids = server.post("/tokenize", {"content": "the rain"}).json()["tokens"]
    told = server.post("/tokenize", {"prompt": "the rain", "return_token_strs": True}).json()
    assert (told["tokens"], told["count"]) == (ids, len(ids))
    assert "".join(told["token_strs"]) == "the rain"
    assert told["max_model_len"] > 0
    assert server.post("/detokenize", {"tokens": ids}).json()["prompt"] == "the rain"
    assert server.post("/tokenize", {"messages": TURNS}).json()["tokens"] == ids
    assert server.http.get("/version").json()["version"]
    assert server.http.get("/load").json() == {"server_load": 0}
