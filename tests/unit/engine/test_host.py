import asyncio
import io
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import Pipe
from pathlib import Path
from typing import Any

import pytest
from fakes import AbortingRecipe, Reply, ScriptedEngine, ScriptedRecipe, engine_info
from script import OneAtATime

from specllama.cancel import Cancel
from specllama.engine import serving
from specllama.engine.host import EngineHost, LoadEngine
from specllama.engine.process import last_words
from specllama.engine.pulse import Pulse
from specllama.engine.serving import Link
from specllama.errors import BadGguf, EngineDied, EngineError, PromptTooLong
from specllama.events import Event, Finished, LoadProgress, Notice, TextDelta
from specllama.interface import EngineInfo, Message, Stepped
from specllama.settings.params import GenerateParams

LONG = " ".join(f"word{i}" for i in range(400))
PARAMS = GenerateParams(seed=1)


@dataclass(frozen=True)
class Refuses:
    def __call__(self, progress: Callable[[Event], None], /) -> Stepped:
        raise BadGguf("the file is cut short", "pull it again")


@dataclass(frozen=True)
class Hangs:
    """An engine that hears neither close nor SIGTERM."""

    def __call__(self, progress: Callable[[Event], None], /) -> Stepped:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        return HungEngine()


class HungEngine(OneAtATime):
    info: EngineInfo = engine_info()

    def generate(
        self,
        prompt: str | Sequence[int] | Sequence[Message],
        params: GenerateParams,
        *,
        cancel: threading.Event | None = None,
    ) -> Iterator[Event]:
        yield Notice("hangs from here on")
        while True:
            time.sleep(60)

    def count_tokens(self, prompt: str | Sequence[Message]) -> int:
        return 0

    def close(self) -> None:
        while True:
            time.sleep(60)


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return True
    return stat.rsplit(")", 1)[1].split()[0] != "Z"


def wait_until(true: Callable[[], bool], limit_s: float = 20.0) -> None:
    end = time.monotonic() + limit_s
    while not true():
        assert time.monotonic() < end, "waited too long"
        time.sleep(0.01)


def kill_after(host: EngineHost, n: int) -> None:
    for i, _ in enumerate(host.generate("Hi", PARAMS)):
        if i == n:
            os.kill(host.pid or 0, signal.SIGKILL)


def text_of(events: list[Event]) -> str:
    return "".join(e.text for e in events if isinstance(e, TextDelta))


def test_events_cross_the_pipe_unchanged() -> None:
    here = list(ScriptedEngine(["Hello there."]).generate("Hi", PARAMS))
    seen: list[Event] = []
    with EngineHost(ScriptedRecipe(), on_event=seen.append) as host:
        assert host.start().target.name == "scripted target"
        assert list(host.generate("Hi", PARAMS)) == here
        assert host.count_tokens("one two") == 2
    assert seen == [LoadProgress("target", "scripted.gguf", 1.0)]


def test_errors_of_the_engine_keep_their_type_and_the_engine_goes_on() -> None:
    refused = Reply(raise_first=PromptTooLong("too long", "shorten it"))
    with EngineHost(ScriptedRecipe((refused, Reply("x", raise_at_round=0), "Fine."))) as host:
        with pytest.raises(PromptTooLong, match="too long") as caught:
            list(host.generate("Hi", PARAMS))
        assert caught.value.hint == "shorten it"
        with pytest.raises(EngineError, match="scripted engine failed"):
            list(host.generate("Hi", PARAMS))
        assert text_of(list(host.generate("Hi", PARAMS))) == "Fine."


def test_cancel_ends_within_a_round() -> None:
    with EngineHost(ScriptedRecipe((Reply(LONG, delay_s=0.01), "Next."))) as host:
        cancel = Cancel()
        events: list[Event] = []
        for event in host.generate("Hi", PARAMS, cancel=cancel):
            events.append(event)
            if isinstance(event, TextDelta):
                cancel.set()
        assert isinstance(events[-1], Finished)
        assert events[-1].reason == "cancelled"
        assert text_of(events) == events[-1].text != ""
        assert text_of(list(host.generate("Hi", PARAMS))) == "Next."


def test_closing_the_generator_early_leaves_the_engine_ready() -> None:
    with EngineHost(ScriptedRecipe((Reply(LONG, delay_s=0.01), "Next."))) as host:
        stream = host.generate("Hi", PARAMS)
        next(e for e in stream if isinstance(e, TextDelta))
        stream.close()  # type: ignore[attr-defined]
        assert text_of(list(host.generate("Hi", PARAMS))) == "Next."


@pytest.mark.parametrize("after", [0, 1, 5, 17])
def test_a_killed_child_is_one_error_and_the_next_request_works(after: int) -> None:
    with EngineHost(ScriptedRecipe((Reply(LONG, delay_s=0.005),))) as host:
        host.start()
        first = host.pid
        with pytest.raises(EngineDied, match=r"SIGKILL: out of memory\?") as caught:
            kill_after(host, after)
        assert "next message" in (caught.value.hint or "")
        again = list(host.generate("Hi", PARAMS.replace(max_tokens=8)))
        assert isinstance(again[0], Notice)
        assert isinstance(again[-1], Finished)
        assert host.pid != first


def test_an_event_loop_takes_what_a_child_says_until_it_dies() -> None:
    """In its own thread, and from each further child as from the first."""

    async def ask(host: EngineHost, *, kill: bool) -> str:
        ended = asyncio.Event()
        await asyncio.to_thread(host.start)
        kinds: list[tuple[str, int]] = []
        loop = asyncio.get_running_loop()

        def on_message(message: tuple[str, Any]) -> None:
            kind, _ = message
            kinds.append((kind, threading.get_ident()))
            if kill and kind == "events":
                os.kill(host.pid or 0, signal.SIGKILL)
            if kind != "events":
                loop.call_soon_threadsafe(ended.set)

        host.send("Hi", PARAMS, on_message)
        await ended.wait()
        assert {thread for kind, thread in kinds if kind == "events"} == {threading.get_ident()}
        return kinds[-1][0]

    async def twice() -> list[str]:
        with EngineHost(ScriptedRecipe((Reply(LONG, delay_s=0.002),))) as host:
            loop = asyncio.get_running_loop()
            assert isinstance(loop, asyncio.SelectorEventLoop)
            host.loop = loop
            said = [await ask(host, kill=kill) for kill in (True, False, True, False)]
            await asyncio.to_thread(host.close)
            return said

    assert asyncio.run(twice()) == ["error", "end", "error", "end"]


def test_abort_on_load_names_the_signal_and_repeats_the_last_words() -> None:
    host = EngineHost(AbortingRecipe("ggml.c:123: GGML_ASSERT(n > 0) failed \x1b[2J"))
    with host, pytest.raises(EngineDied) as caught:
        host.start()
    assert "SIGABRT" in caught.value.message
    assert "GGML_ASSERT(n > 0) failed" in caught.value.message
    assert "\x1b" not in caught.value.message
    assert "while loading" in caught.value.message


def test_a_refused_load_keeps_its_type() -> None:
    with EngineHost(Refuses()) as host:
        with pytest.raises(BadGguf, match="cut short"):
            host.start()
        with pytest.raises(EngineError, match="no model is loaded"):
            _ = host.info


def test_switch_goes_back_when_the_new_one_cannot_be_loaded() -> None:
    with EngineHost(ScriptedRecipe(("Old.",))) as host:
        host.start()
        assert host.switch(ScriptedRecipe(("New.",))).target.name
        assert text_of(list(host.generate("Hi", PARAMS))) == "New."
        with pytest.raises(BadGguf):
            host.switch(Refuses())
        assert text_of(list(host.generate("Hi", PARAMS))) == "New."


def test_a_hung_child_is_killed_on_close() -> None:
    host = EngineHost(Hangs(), close_grace_s=0.2)
    host.start()
    pid = host.pid
    assert pid is not None
    host.close()
    assert not alive(pid)
    host.close()
    with pytest.raises(EngineError, match="closed"):
        host.start()


def test_close_interrupts_a_waiting_request() -> None:
    host = EngineHost(Hangs(), close_grace_s=0.2)
    host.start()
    threading.Timer(0.1, host.close).start()
    with pytest.raises(EngineError, match="closed"):
        list(host.generate("Hi", PARAMS))


PARENT = """
import sys, time
sys.path[:0] = {path!r}
from fakes import Reply, ScriptedRecipe
from specllama.engine.host import EngineHost
from specllama.settings.params import GenerateParams
if __name__ == "__main__":
    host = EngineHost(ScriptedRecipe((Reply({text!r}, delay_s=0.01),)))
    host.start()
    print(host.pid, flush=True)
    for event in host.generate("Hi", GenerateParams(seed=1)):
        pass
"""


def test_the_child_ends_when_its_parent_is_killed(tmp_path: Path) -> None:
    script = tmp_path / "parent.py"
    script.write_text(PARENT.format(path=sys.path, text=LONG))
    command = [sys.executable, str(script)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as parent:
        pid = int(parent.stdout.readline())
        parent.kill()
    wait_until(lambda: not alive(pid))


def test_the_parent_never_imports_llama_cpp() -> None:
    code = (
        "import sys; sys.path[:0] = {path!r}\n"
        "import specllama.engine.host, specllama.tui\n"
        "sys.exit('llama_cpp' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code.format(path=sys.path)], check=False)
    assert done.returncode == 0


def test_last_words_prefers_the_reason_over_what_follows() -> None:
    said = b"loading\nerror: tensor 'x' out of bounds\nbye\nFatal Python error: Aborted\n x"
    assert last_words(io.BytesIO(said)) == "error: tensor 'x' out of bounds"
    assert last_words(io.BytesIO()) == ""


def test_the_recipe_of_the_real_engine_pickles() -> None:
    import pickle

    recipe = LoadEngine("tiny", None)
    assert pickle.loads(pickle.dumps(recipe)) == recipe


@dataclass(frozen=True)
class TwoSlots:
    """An engine over tables that writes two replies at once."""

    def __call__(self, progress: Callable[[Event], None], /) -> Stepped:
        from side_by_side import engine_of

        return engine_of(2)


def test_two_replies_are_written_at_once() -> None:
    from side_by_side import alone, params

    prompts = {1: [1, 2, 3], 2: [7, 8, 9, 7, 8]}
    asked = {seed: params("mixed", seed, ends=False) for seed in prompts}
    texts: dict[int, tuple[int, ...]] = {}
    with EngineHost(TwoSlots()) as host:
        host.start()

        def ask(seed: int) -> None:
            for event in host.generate(prompts[seed], asked[seed]):
                if isinstance(event, Finished):
                    texts[seed] = event.token_ids

        threads = [threading.Thread(target=ask, args=(seed,)) for seed in prompts]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
    assert texts == {seed: alone(prompts[seed], asked[seed]) for seed in prompts}


# -- a child's end of the pipe --


def test_constrained_requests_wait_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    class Over(Exception):
        pass

    def ends(code: int) -> None:
        raise Over

    def listen() -> None:
        with suppress(Over):
            link.listen()

    monkeypatch.setattr("os._exit", ends)
    parent, child = Pipe()
    link = Link(child, Pulse())
    thread = threading.Thread(target=listen, daemon=True)
    thread.start()
    free, bound = GenerateParams(), GenerateParams(grammar='root ::= "a"')
    schema = GenerateParams(json_schema="{}")
    for id, params in enumerate((bound, free, schema), 1):
        parent.send(("generate", id, "me", "hello", params))
    parent.send(("call", 4, "me", "figures", ()))
    assert link.requests.get() == (2, "hello", free)
    assert link.constrained.get() == (1, "hello", bound)
    assert link.constrained.get() == (3, "hello", schema)
    assert link.calls.get() == (4, "figures", ())
    parent.close()
    thread.join()
    child.close()


def test_events_are_written_by_the_thread_that_makes_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """To wake another one would cost more; only what follows closely waits for it."""
    monkeypatch.setattr(serving, "GATHER_S", 60.0)  # the machine is up for longer
    parent, child = Pipe()
    link = Link(child, Pulse())
    link.event(1, TextDelta("a"))
    link.event(2, TextDelta("x"))
    link.event(1, TextDelta("b"))
    link.flush()
    assert parent.recv() == ("events", 1, [TextDelta("a"), TextDelta("b")])
    assert parent.recv() == ("events", 2, [TextDelta("x")])
    link.event(1, TextDelta("c"))
    link.flush()
    assert not parent.poll()
    writing = threading.Thread(target=link.write)
    writing.start()
    link.event(1, TextDelta("d"))
    link.end(1)
    assert parent.recv() == ("events", 1, [TextDelta("c"), TextDelta("d")])
    assert parent.recv() == ("end", 1, None)
    link.close(writing)
    assert not writing.is_alive()
    parent.close()
    child.close()


def test_the_temporary_folder_holds_nothing_of_an_engine_that_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So nothing is left, whichever process is killed."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with EngineHost(ScriptedRecipe()) as host:
        assert [*host.generate("hello", PARAMS)]
        assert [*tmp_path.iterdir()] == []
