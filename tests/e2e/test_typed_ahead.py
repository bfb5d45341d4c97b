"""A conversation that is read while it is typed, with the bundled pair: the same tokens and logits
as when every message comes at once."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest
from engines import measured

from specllama.engine.engine import Engine
from specllama.events import Event, Finished, RoundDone, Started
from specllama.interface import Message
from specllama.settings.params import EngineOptions, GenerateParams, SamplingParams

pytestmark = pytest.mark.e2e
WORDS = (Path(__file__).parents[2] / "README.md").read_text("utf-8").split()


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Engine, Engine]]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SPECLLAMA_HOME", str(tmp_path_factory.mktemp("home")))
        options = EngineOptions(threads=1, repack="off")
        with measured("tiny", None, options) as a, measured("tiny", None, options) as b:
            yield a, b


def typed(rng: random.Random, message: str) -> Iterator[str]:
    """What stands now and then while it is typed, with words that are taken back."""
    words = message.split()
    for n in sorted(rng.sample(range(1, len(words)), k=min(6, len(words) - 1))):
        if rng.random() < 0.4:
            yield " ".join([*words[:n], "no", "not", "thi"])
        yield " ".join(words[:n]) + rng.choice((" ", "", "x"))


def told(events: list[Event]) -> tuple[int, tuple[int, ...], list[object]]:
    """Tokens read for it, the reply, and its logits."""
    started, last = events[0], events[-1]
    assert isinstance(started, Started)
    assert isinstance(last, Finished)
    rounds = [event.chances for event in events if isinstance(event, RoundDone)]
    return started.prompt_n - started.cached_n, last.token_ids, rounds


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("proposer", ["none", "draft", "mixed", "eagle3", "lookahead"])
def test_the_same_reply_sooner(
    pairs: tuple[Engine, Engine], proposer: str, temperature: float
) -> None:
    ahead, once = pairs
    rng = random.Random(f"{proposer}{temperature}")
    read, without, turns = 0, 0, list[Message]()
    for engine in pairs:
        engine.reset()
    for turn, n in enumerate((130, 30, 75)):
        at = rng.randrange(len(WORDS) - n)
        message = " ".join(WORDS[at : at + n])
        params = GenerateParams(
            proposer=proposer,
            seed=turn,
            max_tokens=8,
            window="fixed",
            draft_max=4,
            chances=1,
            sampling=SamplingParams(temperature=temperature),
        )
        for some in typed(rng, message):
            list(ahead.generate([*turns, Message("user", some)], params.replace(ahead=True)))
        turns.append(Message("user", message))
        events = list(ahead.generate(turns, params))
        unread, *reply = told(events)
        unread_once, *reply_once = told(list(once.generate(turns, params)))
        assert reply == reply_once
        read, without = read + unread, without + unread_once
        turns.append(Message("assistant", events[-1].text))  # type: ignore[attr-defined]
    assert read < 0.6 * without
