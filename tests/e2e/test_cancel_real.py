"""Stopping real passes: whenever it comes, the caches agree with the text and the next reply is
the one that would have been written anyway."""

import random
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from ggufs import write_llama, write_mamba
from ggufs_nextn import write_nextn
from requests_made import asked

from specllama.cancel import Cancel
from specllama.engine.engine import Engine
from specllama.errors import Cancelled
from specllama.events import Event, Finished
from specllama.settings.params import EngineOptions

pytestmark = pytest.mark.usefixtures("nothing_on_stderr")
TEXT = "Once upon a time there was a little dog who liked to read. "


def tiny(folder: Path) -> Engine:
    return Engine.load("tiny", None, EngineOptions(threads=1, n_ctx=2048))


def recurrent(folder: Path) -> Engine:
    path = write_mamba(folder / "mamba.gguf", width=256, blocks=4)
    return Engine.load(path, None, EngineOptions(threads=1, n_ctx=2048))


def hybrid(folder: Path) -> Engine:
    path = write_nextn(folder / "hybrid.gguf", width=128)
    return Engine.load(path, None, EngineOptions(threads=1, n_ctx=2048))


def finish(engine: Engine, prompt: str, proposer: str, cancel: Cancel | None = None) -> Finished:
    params = asked(proposer, 0.8, seed=5, window="auto", draft_max=None)
    *_, last = engine.generate(prompt, params, cancel=cancel)
    return last


@pytest.mark.parametrize(
    ("load", "proposer"),
    [(tiny, "none"), (tiny, "draft"), (tiny, "eagle3"), (recurrent, "ngram"), (hybrid, "mtp")],
)
def test_whenever_a_cancel_comes(
    load: Callable[[Path], Engine], proposer: str, tmp_path: Path
) -> None:
    rng = random.Random(1)
    prompt = TEXT * (60 if load is tiny else 20)  # several chunks
    with load(tmp_path) as engine:
        begin = time.perf_counter()
        reference = finish(engine, prompt, proposer)
        took_s = time.perf_counter() - begin
        ids, _ = engine.encode(prompt)
        cancelled = 0
        for n in range(8):
            if n % 2:
                engine.reset()  # else the prompt is cached and the cancel comes in the rounds
            cancel = Cancel()
            timer = threading.Timer(rng.uniform(0, took_s if n % 2 else took_s / 4), cancel.set)
            timer.start()
            stopped = finish(engine, prompt, proposer, cancel)
            timer.join()
            cancelled += stopped.reason == "cancelled"
            assert reference.text.startswith(stopped.text)
            target = engine.target
            assert target.n_past == len(target.tokens)
            assert target.tokens == [*ids, *stopped.token_ids][: len(target.tokens)]
        assert cancelled, "the machine was never too fast for all of them"
        assert finish(engine, prompt, proposer).token_ids == reference.token_ids


def test_loading_stops_on_request(tmp_path: Path) -> None:
    path = write_llama(tmp_path / "many.gguf", blocks=96)
    cancel = Cancel()
    seen: list[float] = []

    def progress(event: Event) -> None:
        seen.append(event.fraction)
        cancel.set()

    with pytest.raises(Cancelled, match=r"many\.gguf"):
        Engine.load(path, None, EngineOptions(threads=1), on_progress=progress, cancel=cancel)
    assert seen
    assert max(seen) < 1
