"""States on disk with llama.cpp: a conversation that reopens writes what it writes going on, with
caches of every kind and whatever drafts."""

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from engines import measured
from ggufs import write_llama, write_mamba, write_windows
from ggufs_nextn import write_nextn
from requests_made import asked

from specllama.engine.engine import Engine
from specllama.events import Event, Notice, RoundDone, Started
from specllama.interface import Message
from specllama.paths import states_dir
from specllama.settings.params import SERVER, EngineOptions, GenerateParams, SamplingParams

OPTIONS = EngineOptions(n_ctx=1024, threads=1, check_memory=False, kv_disk="1G")
KINDS: dict[str, tuple[Callable[[Path], Path], Sequence[str]]] = {
    "tiny": (lambda path: Path("tiny"), ("none", "draft", "mixed", "eagle3", "medusa", "tree")),
    "f16": (lambda path: write_llama(path, quant="F16"), ("none", "ngram")),
    "windows": (write_windows, ("none", "ngram")),
    "qwen35": (lambda path: write_nextn(path, "qwen35"), ("none", "mtp", "ngram")),
    "qwen3next": (lambda path: write_nextn(path, "qwen3next"), ("none", "ngram")),
    "mamba": (write_mamba, ("none", "ngram")),
}


@dataclass(frozen=True)
class Said:
    ids: tuple[int, ...]
    cached: int
    drafted: int
    told: tuple[str, ...]
    near_ties: int


def write(engine: Engine, prompt: list[int], method: str, temperature: float, turn: int) -> Said:
    params = asked(method, temperature, seed=7 + turn, max_tokens=30, owner=SERVER)
    events = list(engine.generate(prompt, params))
    [started] = [event for event in events if isinstance(event, Started)]
    done = events[-1]
    told = tuple(event.message for event in events if isinstance(event, Notice))
    return Said(done.token_ids, started.cached_n, done.draft_n, told, done.near_ties)


@pytest.fixture(scope="module", params=KINDS)
def kind(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SPECLLAMA_HOME", str(tmp_path_factory.mktemp("home")))
        yield request.param


def opened(kind: str, folder: Path, kv_disk: str = "1G") -> Engine:
    path = folder / f"{kind}.gguf"
    target = path if path.exists() else KINDS[kind][0](path)
    draft = "tiny-draft" if kind == "tiny" else None
    return Engine.load(target, draft, replace(OPTIONS, kv_disk=kv_disk))


def test_a_conversation_reopens_as_if_it_had_gone_on(
    kind: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("files")
    asked = [(method, t) for method in KINDS[kind][1] for t in (0.0, 0.8)]
    texts = {
        one: [20 + (i * i + 3 * n) % 90 for i in range(n, 150 + n)] for n, one in enumerate(asked)
    }
    first: dict[tuple[str, float], Said] = {}
    on: dict[tuple[str, float], Said] = {}
    with opened(kind, folder, kv_disk="off") as engine:
        for one in asked:
            first[one] = write(engine, texts[one], *one, 0)
            texts[one] += [*first[one].ids, 31, 32, 33]
            on[one] = write(engine, texts[one], *one, 1)
    with opened(kind, folder) as engine:
        for one in asked:
            assert write(engine, texts[one][:150], *one, 0).ids == first[one].ids
    assert len(list(states_dir().glob("*/*.state"))) == len(asked)
    with opened(kind, folder) as engine:
        for one in asked:
            said = write(engine, texts[one], *one, 1)
            assert said.ids == on[one].ids, one
            assert said.cached == on[one].cached > 150, one
            assert said.near_ties == on[one].near_ties, one
            assert not [text for text in said.told if "again" in text], one
            assert (said.drafted > 0) is (one[0] != "none") or not on[one].drafted, one


# -- a conversation that is read while it is typed --


WORDS = (Path(__file__).parents[2] / "LICENSE").read_text("utf-8").split()


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
    rounds = [event.chances for event in events if isinstance(event, RoundDone)]
    return started.prompt_n - started.cached_n, last.token_ids, rounds


@pytest.mark.parametrize(
    ("proposer", "temperature"),
    [("none", 0.8), ("draft", 0.0), ("mixed", 0.8), ("eagle3", 0.8), ("lookahead", 0.0)],
)
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
