"""Every engine that is spoken to, as scripted servers: one contract that all of them pass."""

import itertools
import json
import random
import re
import threading
from collections import Counter
from typing import Any

import pytest
from other_engines import SCRIPTS, OtherEngine, running, script

from specllama.cancel import Cancel
from specllama.cli import invoke, ps
from specllama.errors import EngineDied, EngineError, PromptTooLong, SpecllamaError, UsageError
from specllama.events import Event, Finished, Notice, Started, event_from_dict
from specllama.figures import Figures
from specllama.interface import Message
from specllama.remote import board
from specllama.remote.address import Address
from specllama.remote.answers import Counters
from specllama.remote.board import Gauges, event_of
from specllama.remote.foreign import ForeignEngine
from specllama.remote.remote_engine import KINDS, open_remote, watched
from specllama.settings.params import GenerateParams, SamplingParams
from specllama.told import Told

CARD = ("min_p", "temperature", "top_k", "top_p")  # what nobody chose
PLAIN = GenerateParams(from_card=CARD)
GREEDY = PLAIN.choose("temperature", 0.0)
TURNS = [Message("user", "What is a draft model?")]


def opened(engine: OtherEngine) -> ForeignEngine:
    return open_remote(Address(engine.url, model=engine.script.get("model", "")))


def generated(engine: ForeignEngine, params: GenerateParams = PLAIN, **more: Any) -> Told:
    return Told.of(engine.generate(TURNS, params, **more))


def test_every_kind_has_a_script_and_ten_versions_are_recorded() -> None:
    assert {*Counter(script(name)["kind"] for name in SCRIPTS), "specllama"} == set(KINDS)
    made = [script(name)["made"] for name in SCRIPTS]
    assert all(words.startswith(("recorded from ", "shaped")) for words in made)
    recorded = {found[1] for words in made
                if (found := re.match(r"recorded from (.+?\d[\w.]*)", words))}  # fmt: skip
    assert len(recorded) >= 10, recorded


@pytest.mark.parametrize("name", SCRIPTS)
def test_an_engine_is_recognised_and_chats(name: str) -> None:
    with running(name) as server, opened(server) as engine:
        told, tells = server.script, server.script["tells"]
        assert engine.kind.name == told["kind"]
        assert len(server.gets) == len(set(server.gets)), "each is asked for once"
        assert len(server.gets) <= 14
        assert engine.flags == told.get("flags", engine.flags)
        reply = generated(engine)
        assert (engine.version, reply.text) == (told["version"], tells["text"])
        assert reply.reasoning == tells.get("reasoning", "")
        end = reply.end
        assert end.reason == ("context" if tells.get("finish") == "length" else "stop_token")
        assert (end.text, end.tokens) == (tells["text"], tells["tokens"])
        assert end.engine.startswith(KINDS[told["kind"]].title)
        drafted = tells["drafted"] or [None, None]
        assert [end.known("draft_n"), end.known("draft_n_accepted")] == drafted
        assert end.draft_at_most == tells.get("at_most", False)
        assert {"rounds", "cut"} <= end.unknown
        assert reply.started is not None
        assert reply.rounds == []
        assert end.known("cached_n") == tells.get("cached", end.known("cached_n"))
        # what is not told is null, and stays so
        data = json.loads(json.dumps(end.to_dict()))
        assert data["rounds"] is None
        assert data["draft_n"] == drafted[0]
        assert event_from_dict(data) == end
        [(_, body, _)] = server.asked
        assert not {*CARD, "seed"} & {*body, *body.get("options", ())}, "nobody chose them"


@pytest.mark.parametrize("name", SCRIPTS)
def test_one_plain_question(name: str) -> None:
    with running(name) as server, opened(server) as engine:
        tells = server.script["tells"]
        whole = engine.ask(TURNS, GREEDY)
        assert whole.text == tells.get("whole_text", tells["text"])
        assert whole.tokens == tells.get("whole_tokens", tells["tokens"])
        assert whole.first_s is None
        streamed = engine.ask(TURNS, GREEDY, stream=True)
        assert (streamed.text, streamed.reasoning) == (tells["text"], whole.reasoning)
        assert streamed.first_s is not None
        assert streamed.first_s <= streamed.seconds
        for answer, asked in ((whole, tells.get("whole", tells["drafted"])),
                              (streamed, tells["drafted"])):  # fmt: skip
            drafted = answer.draft and [answer.draft.drafted, answer.draft.accepted]
            assert (drafted or [None, None]) == (asked or [None, None])
        if "logprobs" in server.script:
            likely = engine.ask(TURNS, GREEDY.replace(chances=3)).logprobs
            assert likely
            assert len(likely[0].top) == 3
            # llama-server says nothing of tokens that a draft guessed: 0, and no others
            assert all(one.logprob <= 0 and len(one.top) in (0, 3) for one in likely)


@pytest.mark.parametrize("name", SCRIPTS)
def test_unknown_fields_and_strange_types_break_nothing(name: str) -> None:
    """A newer server says more, and says it differently."""

    def changed(text: str) -> str:
        lines = []
        for line in text.splitlines(keepends=True):
            head, data = (line[:6], line[6:]) if line.startswith("data: {") else ("", line)
            if data.startswith("{"):
                found = json.loads(data)
                found |= {"future": {"a": [1]}, "usage": found.get("usage", [])}
                found.setdefault("metrics", "none")
                line = head + json.dumps(found) + "\n"
            lines.append(line)
        return "".join(lines)

    told = script(name)
    told["stream"] = {path: changed(text) for path, text in told["stream"].items()}
    with running(told) as server, opened(server) as engine:
        assert generated(engine).text == told["tells"]["text"]


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_stop_closes_the_connection(name: str) -> None:
    cancel = Cancel()
    with running(name) as server, opened(server) as engine:
        on = threading.Event()

        def hold(number: int) -> None:
            """The stream is never over."""
            if number == 0 and server.asked:
                on.set()
            if number > 2 and server.asked:
                server.left.wait(0.005)

        path = next(path for path in server.script["stream"] if "chat" in path)
        server.script["stream"][path] = _longer(server.script["stream"][path])
        server.hold = hold
        events: list[Event] = []
        for event in engine.generate(TURNS, PLAIN, cancel=cancel):
            events.append(event)
            if event.type in ("text_delta", "reasoning_delta"):
                cancel.set()
        end = events[-1]
        assert end.reason == "cancelled"
        assert end.tokens is None
        assert server.left.wait(10)


def _longer(text: str) -> str:
    """The same with its first pieces said very often."""
    lines = text.splitlines(keepends=True)
    first = next(i for i, line in enumerate(lines) if '"A' in line and "{" in line)
    return "".join([*lines[: first + 1], *(["\n", lines[first]] * 400)])


def test_a_stop_before_the_first_token_waits_for_nobody() -> None:
    cancel, held = Cancel(), threading.Event()
    with running("vllm-0.32.0-draft") as server, opened(server) as engine:
        post = server.post

        def silent(*args: Any) -> tuple[int, bytes]:
            threading.Timer(0.05, cancel.set).start()
            held.wait(20)
            return post(*args)

        server.post = silent  # type: ignore[method-assign]
        [end] = list(engine.generate(TURNS, PLAIN, cancel=cancel))
        held.set()
    assert end.reason == "cancelled"


SAYS = {
    400: '{"error":{"message":"min_p is not yet supported with speculative decoding","code":400}}',
    401: '{"error":"Unauthorized"}',
    404: '{"error":{"message":"The model `x` does not exist."}}',
    413: '{"detail":"too large"}',
    422: '{"detail":[{"msg":"Field required","loc":["body"]}]}',
    429: '{"error":{"message":"slow down"}}',
    500: "Internal Server Error",
    503: '{"error":{"message":"Loading model","code":503}}',
}  # fmt: skip


@pytest.mark.parametrize("status", SAYS)
@pytest.mark.parametrize("name", ["vllm-0.32.0-draft", "ollama-0.33.0"])
def test_a_refusal_is_one_clear_line(name: str, status: int) -> None:
    with running(name) as server, opened(server) as engine:
        server.script["errors"] = {engine.kind.chat: [status, SAYS[status]]}
        with pytest.raises(SpecllamaError) as caught:
            generated(engine)
        assert "\n" not in caught.value.message
        assert engine.kind.title in caught.value.message
        expected = UsageError if status in (400, 404, 413, 422) else EngineError
        assert isinstance(caught.value, expected)
        assert caught.value.hint or status in (400, 413, 422)


REFUSALS = [(name, what) for name in SCRIPTS for what in script(name).get("refusals", ())]


@pytest.mark.parametrize(("name", "what"), REFUSALS)
def test_what_an_engine_really_refused_is_one_clear_line(name: str, what: str) -> None:
    with running(name) as server, opened(server) as engine:
        server.script["errors"] = {engine.kind.chat: server.script["refusals"][what]}
        with pytest.raises(SpecllamaError) as caught:
            generated(engine)
        assert "\n" not in caught.value.message
        assert engine.kind.title in caught.value.message
        if what == "a prompt that is too long" and server.script["refusals"][what][0] == 400:
            assert isinstance(caught.value, PromptTooLong)


def test_a_stream_that_counts_pieces_is_not_believed() -> None:
    """transformers says 36 of 41 tokens when prompt lookup is on and the reply is streamed."""
    with running("transformers-5.23.0-lookup") as server, opened(server) as engine:
        assert engine.ask(TURNS, GREEDY, stream=True, speculation=True).tokens is None
        assert engine.ask(TURNS, GREEDY, speculation=True).tokens == 41
    with running("transformers-5.23.0-plain") as server, opened(server) as engine:
        assert engine.ask(TURNS, GREEDY, stream=True, speculation=False).tokens == 41


def test_a_prompt_that_is_too_long_is_that() -> None:
    words = "This model's maximum context length is 1024 tokens. However, you requested 2000."
    with running("vllm-0.32.0-plain") as server, opened(server) as engine:
        server.script["errors"] = {engine.kind.chat: [400, json.dumps({"message": words})]}
        with pytest.raises(PromptTooLong, match="1024"):
            generated(engine)


@pytest.mark.parametrize(
    ("text", "url"),
    [
        ("127.0.0.1:18802", "http://127.0.0.1:18802"),
        ("localhost", "http://localhost:8484"),
        (" box:1 ", "http://box:1"),
        (":8000", "http://127.0.0.1:8000"),
        ("0.0.0.0", "http://127.0.0.1:8484"),
        ("http://0.0.0.0:7/v1", "http://127.0.0.1:7"),
        ("::1", "http://[::1]:8484"),
        ("[::1]:99", "http://[::1]:99"),
        ("http://[::]:99/", "http://[::1]:99"),
        ("box:8000/v1", "http://box:8000"),
        ("https://box.example", "https://box.example"),
        ("HTTPS://box.example/api/", "https://box.example/api"),
        ("ftp://x", "ftp://x"),
        ("", ""),
    ],
)
def test_an_address_is_written_as_people_write_it(text: str, url: str) -> None:
    assert Address(text).url == url


@pytest.mark.parametrize(
    ("host", "url"),
    [
        ("", "http://127.0.0.1:8484"),
        ("127.0.0.1:18802", "http://127.0.0.1:18802"),
        ("0.0.0.0", "http://127.0.0.1:11434"),
        ("https://box", "https://box"),
    ],
)
def test_the_variable_of_ollama_says_which_server_is_asked(
    monkeypatch: pytest.MonkeyPatch, host: str, url: str
) -> None:
    monkeypatch.setenv("OLLAMA_HOST", host)
    asked: list[str] = []

    def loaded(server: Address) -> list[dict[str, Any]]:
        asked.append(server.url)
        raise EngineDied("nobody")

    monkeypatch.setattr(ps, "loaded", loaded)
    for arguments in (["ps"], ["stop", "m"]):
        assert invoke(arguments) == EngineDied("").exit_code
    assert asked == [url, url]


def test_nobody_no_engine_and_no_key() -> None:
    with pytest.raises(EngineDied, match="no server answers"):
        open_remote("http://127.0.0.1:9")
    with pytest.raises(UsageError, match="no address"):
        open_remote("ftp://here")
    with running({"get": {"/": "<html>"}, "headers": {}}) as server:
        with pytest.raises(EngineError, match="no engine that is known"):
            open_remote(server.url)
        with pytest.raises(UsageError, match="no kind of server 'vlm'"):
            open_remote(Address(server.url, kind="vlm"))
        server.script["errors"] = {"/v1/models": [401, "{}"]}
        with pytest.raises(EngineError, match="wants a key") as caught:
            open_remote(server.url)
        assert "--api-key-file" in str(caught.value.hint)


def test_the_key_goes_with_every_request() -> None:
    with (
        running("vllm-0.32.0-draft") as server,
        open_remote(Address(f"{server.url}/v1/", "secret")) as engine,
    ):
        generated(engine)
        [(_, _, headers)] = server.asked
        assert headers["authorization"] == "Bearer secret"


def test_several_models_and_none_named_is_said_with_the_command() -> None:
    with running("llama-server-router") as server:
        with pytest.raises(UsageError, match="several models: qwen3-8b, gemma-4") as caught:
            open_remote(server.url)
        assert caught.value.hint == (f"name one: --remote {server.url} --remote-model qwen3-8b")


def test_what_it_is_may_be_said_and_is_then_not_looked_for() -> None:
    with (
        running("vllm-0.32.0-draft") as server,
        open_remote(Address(server.url, kind="openai", model="tiny")) as engine,
    ):
        assert server.gets == ["/v1/models"]
        assert generated(engine).end.known("draft_n") is None


def test_vllm_that_drafts_refuses_min_p_before_it_is_asked() -> None:
    with running("vllm-0.32.0-draft") as server, opened(server) as engine:
        with pytest.raises(UsageError, match="refuses --min-p while it speculates") as caught:
            generated(engine, PLAIN.choose("min_p", 0.1))
        assert "leave out --min-p" in str(caught.value.hint)
        assert server.asked == []
        biased = SamplingParams(logit_bias={5: 1.0})
        with pytest.raises(UsageError, match="refuses --logit-bias"):
            generated(engine, PLAIN.replace(sampling=biased))
    with running("vllm-0.32.0-plain") as server, opened(server) as engine:
        generated(engine, PLAIN.choose("min_p", 0.1))
        assert server.asked[0][1]["min_p"] == 0.1


def test_what_an_engine_cannot_be_told_is_said_once() -> None:
    params = PLAIN.choose("min_p", 0.1).choose("top_k", 7).replace(speculate=False)
    with running("openai") as server, opened(server) as engine:
        notices = [[n.message for n in generated(engine, params).notices] for _ in range(2)]
        assert notices == [["the server cannot be told --top-k, --min-p, --no-spec: it goes on "
                            "without"], []]  # fmt: skip
        assert "top_k" not in server.asked[0][1]


def test_speculation_is_switched_where_a_request_can() -> None:
    def body(name: str, on: bool | None) -> dict[str, Any]:
        with running(name) as server, opened(server) as engine:
            assert engine.kind.switches
            engine.ask(TURNS, GREEDY, speculation=on)
            return server.asked[0][1]

    assert body("mlx-lm-0.32.2-draft", False)["num_draft_tokens"] == 0
    assert "num_draft_tokens" not in body("mlx-lm-0.32.2-draft", True)
    looked = json.loads(body("transformers-5.23.0-lookup", True)["generation_config"])
    assert looked["prompt_lookup_num_tokens"] > 0
    plain = json.loads(body("transformers-5.23.0-lookup", False)["generation_config"])
    assert "prompt_lookup_num_tokens" not in plain
    assert body("ollama-0.33.0", False)["options"]["draft_num_predict"] == 0
    for name in ("vllm-0.32.0-draft", "lmstudio-0.4.1", "openai"):
        with running(name) as server, opened(server) as engine:
            assert not engine.kind.switches


# ---- acceptance by counters


def _page(drafts: int, drafted: int, accepted: int, tokens: int, running: int = 0) -> str:
    return (
        f"vllm:num_requests_running {running}\nvllm:num_requests_waiting 0\n"
        f"vllm:spec_decode_num_drafts_total {drafts}\n"
        f"vllm:spec_decode_num_draft_tokens_total {drafted}\n"
        f"vllm:spec_decode_num_accepted_tokens_total {accepted}\n"
        f'vllm:spec_decode_num_accepted_tokens_per_pos_total{{position="0"}} {accepted}\n'
        f"vllm:generation_tokens_total {tokens}\n"
    )


@pytest.mark.parametrize(
    ("after", "kept"),
    [
        (_page(12, 44, 36, 141), (40, 34)),
        (_page(12, 44, 36, 150), None),  # tokens of others
        (_page(12, 44, 36, 141, running=1), None),  # others are served
        (_page(0, 0, 0, 41), None),  # it was started anew
    ],
)
def test_counters_tell_where_nobody_else_was_served(
    after: str, kept: tuple[int, int] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("specllama.remote.foreign.SETTLES_S", (0.0, 0.0))
    told = script("vllm-0.32.0-plain")  # it says nothing of the reply itself
    pages = itertools.chain([_page(2, 4, 2, 100)], itertools.repeat(after))
    with running(told) as server, opened(server) as engine:
        get = server.get
        metrics = lambda path: (200, next(pages).encode()) if path == "/metrics" else get(path)  # noqa: E731
        server.get = metrics  # type: ignore[method-assign]
        end = generated(engine).end
    assert (end.known("draft_n"), end.known("draft_n_accepted")) == (kept or (None, None))
    assert Figures.of(None, (), end).kept_words == ("34 of 40" if kept else "–")


def test_counters_of_a_reply_that_wrote_behind_its_end() -> None:
    """vLLM counts what was accepted behind the end of a reply."""
    before = Counters(136, 544, 484, (130,), 617, 0, 0)
    found = Counters(140, 560, 497, (134,), 630, 0, 0).since(before, 13)
    assert (found.drafted, found.accepted, found.accepted_at) == (16, 13, (4,))


# ---- streams that are cut or malformed


def _spoilt(stream: bytes, rng: random.Random) -> bytes:
    at = rng.randrange(1, len(stream))
    lines = stream.splitlines(keepends=True)
    match rng.randrange(6):
        case 0:  # the connection ends
            return stream[:at]
        case 1:  # a bit falls over
            return stream[:at] + bytes([stream[at] ^ 1 << rng.randrange(8)]) + stream[at + 1 :]
        case 2:  # rubbish comes in between
            return b"".join([*lines[: len(lines) // 2], b"data: {not json}\n\n", *lines[-4:]])
        case 3:  # another kind of JSON
            return b"".join([*lines[: len(lines) // 2], b"data: [1, 2]\n\n"])
        case 4:  # an error in the midst
            return b"".join([*lines[: len(lines) // 2], b'data: {"error": {"message": "out"}}\n\n'])
        case _:  # deep, long, binary
            deep = b"data: " + b"[" * 5000 + b"\n\n"
            return b"".join([*lines[: len(lines) // 2], rng.choice([deep, b"data: \xff\xfe\n\n"])])


def _failure(engine: ForeignEngine, told: Told) -> SpecllamaError | None:
    try:
        for event in engine.generate(TURNS, PLAIN):
            told.take(event)
    except SpecllamaError as error:
        return error
    return None


def test_200_cut_and_malformed_streams_are_one_clear_line_each() -> None:
    rng = random.Random(5)
    names = ["vllm-0.32.0-draft", "llama-server-b9210", "ollama-0.33.0", "sglang-0.5.23"]
    ended = Counter[str]()
    for name in names:
        with running(name) as server, opened(server) as engine:
            path = engine.kind.chat
            whole = server.script["stream"][path].encode()
            text, thought = (server.script["tells"].get(k, "") for k in ("text", "reasoning"))
            for _ in range(50):
                told = Told()
                server.script["stream"][path] = spoilt = _spoilt(whole, rng)
                error = _failure(engine, told)
                ended["whole" if error is None else "said"] += 1
                if error is None:
                    continue
                assert "\n" not in error.message
                assert len(error.message) < 500
                assert error.hint
                if whole.startswith(spoilt):  # all that came before is kept, and nothing else
                    assert text.startswith(told.text)
                    assert thought.startswith(told.reasoning)
    assert sum(ended.values()) == 200
    assert ended["said"] > 120


def test_a_cut_stream_keeps_what_came() -> None:
    with running("vllm-0.32.0-draft") as server, opened(server) as engine:
        stream = server.script["stream"][engine.kind.chat]
        server.script["stream"][engine.kind.chat] = stream[: stream.index(" offers")]
        told = Told()
        events = map(told.take, engine.generate(TURNS, PLAIN))
        with pytest.raises(EngineError, match="sent what is no JSON"):
            list(events)
        assert told.text == "A draft model goes first and"


def test_events_come_in_the_order_of_every_engine() -> None:
    with running("sglang-0.5.23") as server, opened(server) as engine:
        events = list(engine.generate(TURNS, PLAIN.choose("typical_p", 0.5)))
    assert isinstance(events[0], Started)
    assert isinstance(events[1], Notice)
    assert isinstance(events[-1], Finished)
    assert [event.ends for event in events] == [False] * (len(events) - 1) + [True]


# -- a server by its counters --


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """A second goes by with every look."""
    seconds = itertools.count(100.0)
    monkeypatch.setattr(board, "monotonic", lambda: next(seconds))


def lines(watch: Gauges, width: int = 80) -> list[str]:
    found = watch.lines(width)
    assert all(len(line) <= width for line in found)
    return found


def test_acceptance_of_late(clock: None) -> None:
    watch = Gauges("vLLM 0.32.0 at box")
    looks = [Counters(100, 400, 300, (90, 80, 70, 60), 1000, 0, 0),
             Counters(110, 440, 320, (100, 85, 71, 64), 1040, 2, 1),
             Counters(120, 480, 360, (110, 95, 81, 74), 1090, 3, 0)]  # fmt: skip
    for look in looks:
        watch.take(event_of("vLLM 0.32.0", "tiny", look))
    shown = lines(watch)
    assert shown[0] == "vLLM 0.32.0 at box: 3 running, 0 waiting, 45 tok/s"
    assert shown[1] == "of late: kept 75% (60 of 80), 4.00 tokens a pass that drafted"
    assert shown[2] == "since it was started: kept 75% (360 of 480)"
    assert lines(watch, 40)[:2] == ["vLLM 0.32.0 at box", "3 running, 0 waiting, 45 tok/s"]
    assert len(lines(watch, 40)) == len(shown) + 1 == 4


def test_what_is_not_counted_is_not_shown_as_nothing(clock: None) -> None:
    watch = Gauges("SGLang 0.5.23 at box")
    assert lines(watch) == ["SGLang 0.5.23 at box: not heard of yet"]
    watch.take(event_of("", "", Counters(per_round=2.4)))
    shown = lines(watch)
    assert shown[0] == "SGLang 0.5.23 at box: – running, – waiting"
    assert shown[1] == "of late: 2.40 tokens a pass"
    assert shown[2] == "since it was started: kept –"
    anew = Gauges("box")
    anew.take(event_of("", "", Counters(10, 40, 30, (10,), 50, 0, 0)))
    anew.take(event_of("", "", Counters(1, 4, 0, (0,), 5, 0, 0)))  # it was started again
    assert "kept –" in lines(anew)[1]


@pytest.mark.parametrize("name", ["vllm-0.32.0-draft", "llama-server-b9210", "sglang-0.5.23"])
def test_a_server_is_watched(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("specllama.remote.foreign.EVERY_S", 0.0)
    with running(name) as server:
        watch, events = watched(Address(server.url))
        for event in itertools.islice(events, 2):
            watch.take(event)
    assert "0 running, 0 waiting" in watch.lines(100)[0]


def test_one_that_counts_nothing_says_so_and_what_to_do() -> None:
    with running("ollama-0.33.0") as server:
        _, events = watched(Address(server.url))
        with pytest.raises(EngineError, match="tells no figures of its drafting"):
            next(events)
    told = script("llama-server-b9210")
    del told["get"]["/metrics"]
    with running(told) as server:
        _, events = watched(Address(server.url))
        with pytest.raises(EngineError) as caught:
            next(events)
        assert caught.value.hint == "start it with --metrics"
