"""Several models behind one server: loaded when named, unloaded when idle or for another."""

import contextlib
import json
import os
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from servers import Serving, served, table, until
from table_model import LoadTable

from specllama.engine.engine import Engine
from specllama.engine.host import EngineHost
from specllama.errors import DoesNotFit
from specllama.interface import Message, Stepped
from specllama.server import routes
from specllama.server.loaded_models import Models
from specllama.server.request_queue import RequestQueue
from specllama.server.served import ServedModel
from specllama.server.service import Service
from specllama.settings.params import GenerateParams, SamplingParams

GB = 10**9
NAMES = ("first", "second", "third")
SIZES = {"first": 3 * GB, "second": 4 * GB, "third": 5 * GB, "huge": 20 * GB}
ROOM = 8 * GB


@dataclass(frozen=True)
class Sized(LoadTable):
    """A table that needs so much of ``ROOM``, whose others hold ``beside``; it loads once its
    gate is there."""

    size: int = 0
    gate: str = ""

    def __call__(self, progress: Any, /) -> Stepped:
        while self.gate and not Path(self.gate).exists():
            time.sleep(0.01)
        free = ROOM - self.beside
        if self.size > free:
            raise DoesNotFit(
                f"this needs about {self.size / 1e9:.1f} GB of memory, {free / 1e9:.1f} GB are "
                "free", needed=self.size, free=free,
            )  # fmt: skip
        return super().__call__(progress)


class Weighed(ServedModel):
    """Knows what it holds."""

    def weigh(self) -> None:
        self.holds = self.maps = self.recipe.size


def made(folder: Path, name: str, *, seed: int, gate: str = "", **more: Any) -> ServedModel:
    folder = folder / name
    folder.mkdir()
    plain = table(folder)
    for path in folder.glob("*.table"):
        path.write_text(json.dumps({**json.loads(path.read_text("utf-8")), "seed": seed}), "utf-8")
    recipe = Sized(plain.target, plain.draft, plain.options, size=SIZES[name], gate=gate)
    queue = RequestQueue(EngineHost(recipe, close_grace_s=1.0), name, lanes=4)
    return Weighed(queue, recipe=recipe, also=frozenset({f"maker/{name}"}), **more)


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SPECLLAMA_HOME", str(tmp_path / "home"))
    return tmp_path


@pytest.fixture
def server(home: Path) -> Iterator[Serving]:
    with serving_all(home) as running:
        yield running


def serving_all(home: Path, **more: Any) -> Any:
    models = [made(home, name, seed=i) for i, name in enumerate((*NAMES, "huge"))]
    return served(Service(Models(models, **more)))


def loaded(server: Serving) -> list[str]:
    return [model["name"] for model in server.http.get("/api/ps").json()["models"]]


def text(server: Serving, model: str | None, **more: Any) -> str:
    named = {} if model is None else {"model": model}
    reply = server.chat(seed=3, **named, **more)
    assert reply["model"] == model or model is None
    return str(reply["choices"][0]["message"]["content"])


def test_a_request_names_its_model(server: Serving) -> None:
    assert loaded(server) == ["first"], "the first is loaded at once"
    assert text(server, None) == text(server, "first")
    second = text(server, "second")
    assert second != text(server, "first")
    assert loaded(server) == ["first", "second"]
    assert server.models.all["first"].queue.host.pid != server.models.all["second"].queue.host.pid
    target = server.models.all["second"].recipe
    assert isinstance(target, LoadTable)
    with Engine.load(target.target, target.draft, target.options) as alone:
        asked = [Message("user", "the rain")]
        params = GenerateParams(seed=3, max_tokens=24, sampling=SamplingParams())
        *_, end = alone.generate(asked, params.on_card(alone.info.target.card))
    assert second == getattr(end, "text", None)


def test_names_that_mean_the_same_model_and_none(server: Serving) -> None:
    for name in ("second:latest", "maker/second"):
        assert server.chat(model=name)["model"] == "second"
    wrong = server.post("/v1/chat/completions", {"model": "gpt-5", "messages": []})
    assert wrong.status_code == 404
    error = wrong.json()["error"]
    assert (error["code"], error["param"]) == ("model_not_found", "model")
    assert "first, second, third, huge" in error["message"]
    turns = [{"role": "user", "content": "x"}]
    claude = server.post("/v1/messages", {"model": "claude", "messages": turns, "max_tokens": 1})
    assert claude.json()["error"]["type"] == "not_found_error"
    asked = server.post("/api/chat", {"model": "mistral", "messages": turns})
    assert "model 'mistral' not found" in asked.json()["error"]


def test_the_longest_idle_makes_room(server: Serving) -> None:
    text(server, "second")
    text(server, "first")  # so that second is idle for longer
    text(server, "third")
    assert loaded(server) == ["first", "third"]


def test_what_does_not_fit_is_refused_with_the_figures(server: Serving) -> None:
    text(server, "second")
    answer = server.post("/v1/chat/completions", {"model": "huge", "messages": [
        {"role": "user", "content": "the rain"}]})  # fmt: skip
    assert answer.status_code == 507
    assert answer.headers["x-should-retry"] == "false"
    error = answer.json()["error"]
    assert error["code"] == "does_not_fit"
    assert error["needed_bytes"] == 20 * GB
    assert error["free_bytes"] == 1 * GB
    assert error["held_bytes"] == {"first": 3 * GB, "second": 4 * GB}
    for said in ("huge", "20.0 GB", "1.0 GB", "first 3.0 GB", "second 4.0 GB"):
        assert said in error["message"]
    assert loaded(server) == ["first", "second"], "nothing was unloaded in vain"
    [huge] = [one for one in server.http.get("/models").json()["data"] if one["id"] == "huge"]
    assert huge["status"]["failed"] is True
    assert "20.0 GB" in huge["status"]["error"]


def test_as_many_as_are_allowed(home: Path) -> None:
    with serving_all(home, most=1) as server:
        for name in ("second", "first", "third"):
            text(server, name)
            assert loaded(server) == [name]


def test_a_model_in_use_ends_its_reply_first(server: Serving) -> None:
    """And new requests for it wait: they do not keep the other one out."""
    first, third = server.models.all["first"], server.models.all["third"]
    text(server, "second")
    endless = {"max_tokens": 1500, "logit_bias": {"0": -100}}
    with ThreadPoolExecutor(3) as pool:
        long = [pool.submit(text, server, name, **endless) for name in ("first", "second")]
        until(lambda: all(server.models.all[n].queue.running for n in ("first", "second")))
        other = pool.submit(text, server, "third")
        until(lambda: third.loading is not None)
        assert [len(reply.result()) > 1000 for reply in long] == [True, True]
        assert other.result()
    assert "third" in loaded(server)
    assert not first.leaving


def test_requests_wait_for_one_load(home: Path) -> None:
    gate = home / "gate"
    models = [made(home, "first", seed=1), made(home, "second", seed=2, gate=str(gate))]
    with served(Service(Models(models))) as server, ThreadPoolExecutor(4) as pool:
        asked = [pool.submit(text, server, "second") for _ in range(3)]
        until(lambda: models[1].loading is not None)
        [_, second] = server.http.get("/v1/models").json()["data"]
        assert second["status"]["value"] == "loading"
        assert text(server, "first"), "the others go on meanwhile"
        assert server.http.get("/health").status_code == 200
        gate.touch()
        assert len({reply.result() for reply in asked}) == 1
        assert models[1].queue.host._starts == 1


def test_a_crash_costs_one_model(server: Serving) -> None:
    text(server, "second")
    first, second = (server.models.all[name].queue for name in ("first", "second"))
    assert second.host.pid is not None
    pid = first.host.pid
    os.kill(second.host.pid, signal.SIGKILL)
    assert text(server, "first")
    until(lambda: second.restarts == 1 and second.ready)
    assert text(server, "second")
    assert (first.host.pid, first.restarts, second.restarts) == (pid, 0, 1)


def test_a_crash_ends_its_own_replies_alone(server: Serving) -> None:
    endless = {"max_tokens": 800, "logit_bias": {"0": -100}}
    turns = [{"role": "user", "content": "the rain"}]
    server.http.timeout = 120
    alone = text(server, "first", **endless)
    text(server, "second")
    first, second = (server.models.all[name].queue for name in ("first", "second"))
    with ThreadPoolExecutor(2) as pool:
        asked = {
            name: pool.submit(
                server.post, "/v1/chat/completions",
                {"model": name, "messages": turns, "seed": 3, **endless, "max_tokens": n},
            )
            for name, n in (("first", 800), ("second", 1900))  # it dies long before its end
        }  # fmt: skip
        until(lambda: bool(first.running and second.running))
        assert second.host.pid is not None
        os.kill(second.host.pid, signal.SIGKILL)
        lost, kept = asked["second"].result(), asked["first"].result()
    assert lost.status_code >= 500
    assert lost.json()["error"]["message"]
    assert kept.json()["choices"][0]["message"]["content"] == alone


# -- how long a model stays --


def test_it_is_unloaded_when_nobody_uses_it(home: Path) -> None:
    models = [made(home, "first", seed=1), made(home, "second", seed=2)]
    with served(Service(Models(models))) as server:
        process = models[0].queue.host.pid
        before = text(server, "first", keep_alive="300ms")
        until(lambda: loaded(server) == [])
        assert process is not None
        until(lambda: not Path(f"/proc/{process}").exists() or os.name == "nt")
        assert server.http.get("/health").status_code == 200
        assert server.http.get("/props").json()["is_sleeping"] is True
        assert loaded(server) == [], "asking about it does not load it"
        assert text(server, "first", keep_alive=-1) == before
        time.sleep(0.5)
        assert loaded(server) == ["first"]
        assert server.http.get("/props").json()["is_sleeping"] is False


def test_it_does_not_go_while_it_writes(home: Path) -> None:
    models = [made(home, "first", seed=1, usual_s=0.05)]
    with served(Service(Models(models))) as server:
        asked = {"max_tokens": 1500, "logit_bias": {"0": -100}, "stream": True}
        frames = server.frames("/v1/chat/completions", {
            "messages": [{"role": "user", "content": "the rain"}], **asked})  # fmt: skip
        assert frames[-1] == "[DONE]"
        until(lambda: loaded(server) == [])


@pytest.mark.parametrize(
    ("field", "value"), [("keep_alive", "tomorrow"), ("ttl", "1 week"), ("keep_alive", True),
                         ("keep_alive", [5])]
)  # fmt: skip
def test_durations_that_are_none(server: Serving, field: str, value: Any) -> None:
    asked = {"messages": [{"role": "user", "content": "x"}], field: value}
    answer = server.post("/v1/chat/completions", asked)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == field


def test_no_draft_model_is_wanted(server: Serving) -> None:
    asked = {"seed": 3, "specllama": {"proposer": "draft", "window": "fixed", "draft_max": 4}}
    drafted, plain = server.chat(**asked), server.chat(**asked, draft_model="none")
    assert drafted["timings"]["draft_n"] > 0
    assert "draft_n" not in plain["timings"]
    assert drafted["choices"] == plain["choices"]


# -- as documented by others --


def test_ollama_loads_keeps_and_unloads(server: Serving) -> None:
    """The examples of its documentation of ``/api/generate`` and ``/api/ps``."""
    answer = server.post("/api/generate", {"model": "second"}).json()
    assert (answer["model"], answer["response"], answer["done"]) == ("second", "", True)
    assert answer["done_reason"] == "load"
    names = [model["name"] for model in server.http.get("/api/tags").json()["models"]]
    assert names == [*NAMES, "huge"]
    server.post("/api/chat", {"model": "second", "messages": [], "keep_alive": "5m"})
    [_, second] = server.http.get("/api/ps").json()["models"]
    ends = datetime.fromisoformat(second["expires_at"].replace("Z", "+00:00"))
    assert 290 < (ends - datetime.now(UTC)).total_seconds() <= 300
    assert second["size"] == 4 * GB
    asked = {"model": "second", "prompt": "the rain", "stream": False, "keep_alive": -1}
    assert server.post("/api/generate", asked).json()["done"] is True
    assert server.http.get("/api/ps").json()["models"][1]["keep_alive_seconds"] is None
    answer = server.post("/api/generate", {"model": "second", "keep_alive": 0}).json()
    assert (answer["done"], answer["done_reason"], answer["response"]) == (True, "unload", "")
    until(lambda: loaded(server) == ["first"])
    answer = server.post("/api/chat", {"model": "first", "messages": [], "keep_alive": "0"}).json()
    assert answer["message"] == {"role": "assistant", "content": ""}
    until(lambda: loaded(server) == [])
    asked = {"model": "second", "prompt": "the rain", "stream": False, "keep_alive": 0}
    assert server.post("/api/generate", asked).json()["response"]
    until(lambda: loaded(server) == [])
    assert server.post("/api/show", {"model": "third"}).status_code == 200
    assert server.post("/api/show", {"model": "fourth"}).status_code == 404


def test_how_long_a_model_stays_in_lm_studios_word(server: Serving) -> None:
    asked = {"model": "second", "ttl": 300, "messages": [{"role": "user", "content": "Hi"}]}
    assert server.post("/v1/chat/completions", {**asked, "max_tokens": 4}).status_code == 200
    [_, second] = server.http.get("/api/ps").json()["models"]
    assert second["keep_alive_seconds"] == 300


def test_llama_servers_router(server: Serving) -> None:
    def values() -> dict[str, str]:
        listed = server.http.get("/models").json()["data"]
        return {model["id"]: model["status"]["value"] for model in listed}

    assert values() == {"first": "loaded", **dict.fromkeys(("second", "third", "huge"), "unloaded")}
    assert server.post("/models/load", {"model": "second"}).json() == {"success": True}
    until(lambda: values()["second"] == "loaded")
    assert server.post("/models/load", {"model": "second"}).status_code == 400
    assert server.post("/models/load", {"model": "fourth"}).status_code == 404
    assert server.post("/models/unload", {"model": "second"}).json() == {"success": True}
    until(lambda: values()["second"] == "unloaded")
    assert server.post("/models/unload", {"model": "second"}).status_code == 400
    assert server.http.get("/props", params={"model": "first"}).json()["model_alias"] == "first"
    assert server.http.get("/props", params={"model": "fourth"}).status_code == 404
    assert len(server.http.get("/slots", params={"model": "first"}).json()) == 4


def test_what_happens_to_models_is_told(home: Path) -> None:
    models = [made(home, "first", seed=1), made(home, "second", seed=2)]
    with (
        served(Service(Models(models))) as server,
        server.http.stream("GET", "/models/sse") as answer,
    ):
        lines = answer.iter_lines()
        assert next(lines).startswith(":")
        server.post("/models/load", {"model": "second"})
        told: list[Any] = []
        for line in lines:
            if line.startswith("data: "):
                told.append(json.loads(line[6:]))
                if told[-1]["data"]["status"] == "loaded":
                    break
        assert {one["model"] for one in told} == {"second"}
        assert {one["event"] for one in told} == {"model_status"}
        assert told[0]["data"]["status"] == "loading"


def test_figures_are_by_model(server: Serving) -> None:
    text(server, "first")
    text(server, "second")
    told = server.http.get("/metrics").text.splitlines()
    for name, there in (("first", 1), ("second", 1), ("third", 0)):
        assert f'specllama:model_loaded{{model_name="{name}"}} {there}' in told
    assert sum(line.startswith("# TYPE specllama:kv_cells ") for line in told) == 1
    for name in ("first", "second"):
        line = f'specllama:kv_cells{{model_name="{name}",state="live"}}'
        assert any(one.startswith(line) for one in told)


def test_models_that_come_later_are_found(home: Path) -> None:
    there: list[ServedModel] = []
    first = made(home, "first", seed=1)
    with served(Service(Models([first], more=lambda: there))) as server:
        assert server.post("/api/show", {"model": "second"}).status_code == 404
        there.append(made(home, "second", seed=2))
        server.models._looked_s = 0.0  # as if it were a while ago
        assert text(server, "second")
        assert loaded(server) == ["first", "second"]


def test_nothing_is_loaded_at_the_start(home: Path) -> None:
    models = [made(home, name, seed=1) for name in ("first", "second")]
    with served(Service(Models(models)), load=False) as server:
        assert server.http.get("/health").status_code == 200
        assert loaded(server) == []
        assert text(server, "second")
        assert loaded(server) == ["second"]


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages", "/specllama/generate"])
def test_a_stream_tells_of_the_load(home: Path, monkeypatch: pytest.MonkeyPatch, path: str) -> None:
    monkeypatch.setattr(routes, "HEAD_S", 0.05)
    gate = home / "gate"
    models = [made(home, "first", seed=1), made(home, "second", seed=2, gate=str(gate))]
    turns = [{"role": "user", "content": "the rain"}]
    asked = {"model": "second", "messages": turns, "max_tokens": 8, "stream": True, "params": {}}
    with served(Service(Models(models))) as server:
        with server.http.stream("POST", path, json=asked) as answer:
            assert answer.status_code == 200
            lines = answer.iter_lines()
            first = next(lines)
            gate.touch()
            said = "\n".join([first, *lines])
        if path == routes.OWN:
            assert '"load_progress"' in first
            assert '"finish"' in said
        else:
            assert first == ": loading second 0%"
            assert "message_stop" in said or "[DONE]" in said
        until(lambda: not models[1].uses)


def test_a_load_that_fails_in_a_stream(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(routes, "HEAD_S", 0.05)
    gate = home / "gate"
    models = [made(home, "first", seed=1), made(home, "huge", seed=2, gate=str(gate))]
    turns = [{"role": "user", "content": "the rain"}]
    with served(Service(Models(models))) as server:
        for path in ("/v1/chat/completions", "/v1/messages", "/specllama/generate"):
            asked = {"model": "huge", "messages": turns, "max_tokens": 8, "stream": True}
            gate.unlink(missing_ok=True)
            with server.http.stream("POST", path, json=asked) as answer:
                lines = answer.iter_lines()
                next(lines)
                gate.touch()
                told = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
            assert "needs about 20.0 GB" in told[-1]["error"]["message"]
        whole = server.post("/v1/chat/completions", {"model": "huge", "messages": turns})
        assert whole.status_code == 507


@pytest.mark.skipif(not Path("/proc/self/schedstat").exists(), reason="counts wakeups on Linux")
def test_a_server_at_rest_sleeps(home: Path) -> None:
    """No thread looks now and then whether there is something to do."""

    def wakeups(pid: int) -> int:
        found = 0
        for task in Path(f"/proc/{pid}/task").iterdir():
            with contextlib.suppress(OSError):  # it ended meanwhile
                lines = (task / "status").read_text("ascii").splitlines()
                found += int(next(one for one in lines if one.startswith("voluntary")).split()[1])
        return found

    with served(Service(Models([made(home, "first", seed=1)]))) as server:
        text(server, "first")
        engine = server.host.pid
        assert engine is not None
        time.sleep(0.5)
        before = wakeups(os.getpid()), wakeups(engine)
        time.sleep(2.0)
        after = wakeups(os.getpid()), wakeups(engine)
        assert after[0] - before[0] < 8  # this test's own sleep among them
        assert after[1] - before[1] < 4
