"""What SIGHUP reads again: keys, limits, idle times, what requests leave open."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from servers import Serving, served, table, until

from specllama.cli.reload import Reload, ServerSettings
from specllama.cli.served import Serves
from specllama.engine.host import EngineHost
from specllama.errors import UsageError
from specllama.server.guard import Access
from specllama.server.log import ServerLog
from specllama.server.models import Models
from specllama.server.request_queue import RequestQueue
from specllama.server.served import ServedModel
from specllama.server.service import Service
from specllama.settings.config import load_settings
from specllama.settings.params import EngineOptions

CHAT = "/v1/chat/completions"
HELLO = {"messages": [{"role": "user", "content": "the rain"}], "max_tokens": 4, "seed": 1}


class Files:
    """A server over a table, and what its files say."""

    def __init__(self, server: Serving, reload: Reload, log: Path) -> None:
        self.server, self._reload, self._log = server, reload, log
        self.variables: dict[str, str] = {}
        self.keys: tuple[str, ...] = ("first",)
        self.wrong = ""

    def read(self) -> ServerSettings:
        if self.wrong:
            raise UsageError(self.wrong)
        return ServerSettings(load_settings(environ=self.variables), self.keys)

    def said(self) -> str:
        """Ask for a reload; returns what was logged of it."""
        before = len(self._log.read_text("utf-8")) if self._log.exists() else 0
        self._reload.ask()
        end = time.monotonic() + 20
        while not (text := self._log.read_text("utf-8")[before:]):
            assert time.monotonic() < end
            time.sleep(0.01)
        return text[20:].strip()

    def asks(self, key: str) -> int:
        headers = {"Authorization": f"Bearer {key}"}
        return int(self.server.post(CHAT, HELLO, headers=headers).status_code)


@pytest.fixture
def files(tmp_path: Path) -> Iterator[Files]:
    recipe = table(tmp_path)
    queue = RequestQueue(EngineHost(recipe, close_grace_s=1.0), "table", lanes=2)
    model = ServedModel(queue, recipe=recipe, usual_s=600.0)
    service = Service(Models([model]), Access(keys=("first",)))
    log = ServerLog(tmp_path / "serve.log", requests=False)
    made: list[Files] = []
    told = ServerSettings(load_settings(environ={}), ("first",))
    serves = Serves.of(told.settings, None, parallel=2, kv_ram=7)
    reload = Reload(lambda: made[0].read(), told, serves, service, log)
    with served(service) as server:
        made.append(Files(server, reload, tmp_path / "serve.log"))
        begun = threading.Event()

        async def begin() -> None:
            reload.begin()
            begun.set()

        loop = queue._loop
        assert isinstance(loop, asyncio.AbstractEventLoop)
        asyncio.run_coroutine_threadsafe(begin(), loop)
        assert begun.wait(20)
        yield made[0]
    log.close()


def test_keys_change_and_running_replies_go_on(files: Files) -> None:
    assert [files.asks(key) for key in ("first", "second")] == [200, 401]
    queue = files.server.queue
    long = {**HELLO, "max_tokens": 1500, "logit_bias": {"0": -100}}
    with ThreadPoolExecutor(1) as pool:
        headers = {"Authorization": "Bearer first"}
        reply = pool.submit(files.server.post, CHAT, long, headers=headers)
        until(lambda: queue.running)
        files.keys = ("second",)
        said = files.said()
        assert queue.running, "the reply is being written"
        assert [files.asks(key) for key in ("first", "second")] == [401, 200]
        assert len(reply.result().json()["choices"][0]["message"]["content"]) > 1000
    assert said == "the settings were read again; changed: 1 key"
    assert files.said() == "the settings were read again; changed: nothing"


def test_what_requests_leave_open_and_limits(files: Files) -> None:
    model = files.server.models.first
    assert model.keep_s == 600.0
    files.variables = {
        "SPECLLAMA_TEMPERATURE": "0.25", "SPECLLAMA_QUEUE": "3", "SPECLLAMA_ACCESS_LOG": "off",
        "SPECLLAMA_IDLE_UNLOAD": "30m", "SPECLLAMA_CTX_SIZE": "512", "SPECLLAMA_KV_DISK": "off",
        "SPECLLAMA_MODEL": "other", "SPECLLAMA_THOUGHTS": "hide",
    }  # fmt: skip
    said = files.said()
    assert said.startswith("the settings were read again; changed: ")
    at_once, later, after = said.partition("changed: ")[2].split("; ")
    assert set(at_once.split(", ")) == {"temperature", "queue", "access-log", "idle-unload"}
    assert later in ("ctx-size, kv-disk (when a model is loaded next)",
                     "kv-disk, ctx-size (when a model is loaded next)")  # fmt: skip
    assert after == "model (after a restart)"
    assert model.base.sampling.temperature == 0.25
    assert (model.queue.most, model.usual_s, model.keep_s) == (3, 1800.0, 1800.0)
    recipe = model.recipe
    assert recipe is not None
    wanted = EngineOptions(n_ctx=512, kv_disk="off", parallel=2, kv_ram=7)
    assert recipe.options == wanted, "how many share an engine is the command line's"


def test_a_time_that_a_request_said_stays(files: Files) -> None:
    model = files.server.models.first
    headers = {"Authorization": "Bearer first"}
    files.server.post(CHAT, {**HELLO, "keep_alive": "1h"}, headers=headers)
    files.variables = {"SPECLLAMA_IDLE_UNLOAD": "100ms"}
    files.said()
    time.sleep(0.3)
    assert model.queue.loaded
    assert (model.usual_s, model.keep_s) == (0.1, 3600.0)


def test_an_idle_model_leaves_by_the_new_time(files: Files) -> None:
    files.variables = {"SPECLLAMA_IDLE_UNLOAD": "50ms"}
    files.said()
    until(lambda: not files.server.models.first.queue.loaded)


def test_wrong_files_change_nothing(files: Files) -> None:
    files.keys, files.wrong = ("second",), "the key file holds no key"
    assert files.said() == "the settings stay as they were: the key file holds no key"
    assert files.asks("first") == 200
    files.wrong, files.variables = "", {"SPECLLAMA_QUEUE": "many"}
    assert "SPECLLAMA_QUEUE: queue must be a whole number" in files.said()
    assert files.asks("first") == 200
