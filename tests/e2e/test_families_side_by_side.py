"""Conversations beside each other over caches of every kind: each writes what it writes alone."""

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
from engines import measured
from ggufs import write_mamba, write_windows
from ggufs_gemma4 import write_gemma4
from ggufs_nextn import write_nextn

from specllama.backend.pool import CellPool
from specllama.engine.engine import Engine
from specllama.events import Finished
from specllama.models.quantization import prepare, run
from specllama.settings.params import EngineOptions, GenerateParams, SamplingParams

FAMILIES: dict[str, Callable[..., Path]] = {
    "windows": write_windows,
    "gemma4": write_gemma4,
    "qwen35": write_nextn,
    "mamba": write_mamba,
}
METHODS = ("none", "ngram", "draft", "suffix", "mtp")
LANES = 3
OPTIONS = EngineOptions(n_ctx=1024, threads=1, repack="off", check_memory=False)

Key = tuple[int, int, float]


@dataclass
class Talk:
    """A conversation of some turns, each with more behind the replies before it."""

    which: int
    seed: int
    temperature: float
    method: str
    turns: int = 2
    said: list[Finished] = field(default_factory=list)

    @property
    def key(self) -> Key:
        return self.which, self.seed, self.temperature

    @property
    def prompt(self) -> list[int]:
        """Some share a beginning; some are long enough to be read in tiles."""
        head = [10 + (i * i + i % (3 + self.which % 2)) % 180 for i in range(40)]
        text = [*head, *(20 + (i * 7 + self.which) % 150 for i in range(9 + 30 * self.which))]
        for done in self.said:
            text += [*done.token_ids, 11, 12, 13 + self.which]
        return text

    @property
    def params(self) -> GenerateParams:
        return GenerateParams(
            proposer=self.method,
            seed=self.seed,
            window="fixed",
            draft_max=4,
            max_tokens=20,
            ignore_eos=True,
            sampling=SamplingParams(temperature=self.temperature),
        )


@pytest.fixture(scope="module", params=FAMILIES)
def target(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Path]:
    """Its weights are of a type whose rows have the same bits in passes of any width."""
    folder = tmp_path_factory.mktemp("family")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SPECLLAMA_HOME", str(folder))
        write = FAMILIES[request.param]
        run(prepare(write(folder / "whole.gguf"), folder / "q4_0.gguf", "q4_0", pure=True))
        write(folder / "draft.gguf", seed=2)
        yield folder / "q4_0.gguf"


@pytest.fixture(scope="module")
def alone(target: Path) -> Iterator[Callable[[Talk], list[tuple[int, ...]]]]:
    """The replies of a conversation, each kept once it was written."""
    known: dict[Key, list[tuple[int, ...]]] = {}
    with measured(target, None, OPTIONS) as engine:

        def replies(talk: Talk) -> list[tuple[int, ...]]:
            if talk.key not in known:
                engine.reset()
                plain = Talk(*talk.key, "none")
                for _ in range(talk.turns):
                    *_, done = engine.generate(plain.prompt, plain.params)
                    assert isinstance(done, Finished)
                    plain.said.append(done)
                known[talk.key] = [done.token_ids for done in plain.said]
            return known[talk.key]

        yield replies


def several(target: Path, n_ctx: int = 1024) -> Engine:
    """Its draft model is another random one, and wrong most of the time."""
    options = replace(OPTIONS, n_ctx=n_ctx, parallel=LANES)
    return measured(target, target.with_name("draft.gguf"), options)


def write(
    engine: Engine, talks: Sequence[Talk], rng: random.Random, *, cancels: float = 0.0
) -> list[tuple[Talk, Finished]]:
    """All conversations, as many at once as there are lanes; those that were cut off."""
    waiting, running = list(talks), dict[int, Talk]()
    cut: list[tuple[Talk, Finished]] = []
    while waiting or running:
        while waiting and engine.free:
            talk = waiting.pop(0)
            running[engine.submit(talk.prompt, talk.params)] = talk
        for id, event in engine.step():
            assert not isinstance(event, Exception), event
            if not isinstance(event, Finished):
                continue
            talk = running.pop(id)
            if event.reason == "cancelled":
                cut.append((talk, event))
                continue
            talk.said.append(event)
            if len(talk.said) < talk.turns:
                waiting.insert(rng.randrange(len(waiting) + 1), talk)
        if running and rng.random() < cancels:
            engine.cancel(rng.choice(list(running)))
    return cut


def talks_of(engine: Engine, rng: random.Random, n: int) -> list[Talk]:
    methods = [method for method in METHODS if method in engine.drafters]
    return [
        Talk(rng.randrange(5), rng.randrange(3), rng.choice((0.0, 0.8)), methods[i % len(methods)])
        for i in range(n)
    ]


def pool_of(engine: Engine) -> CellPool:
    found = engine.target.pool
    assert isinstance(found, CellPool)
    return found


def test_each_writes_what_it_writes_alone(
    target: Path, alone: Callable[[Talk], list[tuple[int, ...]]]
) -> None:
    """Two turns, parked in between, with drafts, rejects and cancelled neighbours."""
    rng = random.Random(0)
    with several(target) as engine:
        talks = talks_of(engine, rng, 24)
        alike = pool_of(engine).alike
        assert engine.info.lanes == LANES
        cut = write(engine, talks, rng, cancels=0.01)
        assert engine.figures().parked_bytes > 0
    for talk in talks:
        assert [done.token_ids for done in talk.said] == alone(talk)[: len(talk.said)], talk
    for talk, event in cut:
        assert event.token_ids == alone(talk)[len(talk.said)][: len(event.token_ids)]
    said = [done for talk in talks for done in talk.said]
    accepted, drafted = sum(x.draft_n_accepted for x in said), sum(x.draft_n for x in said)
    assert accepted > 0
    assert drafted - accepted > 20 or alike == 0
    second = [talk.said[1] for talk in talks if len(talk.said) > 1]
    assert len(second) > 8
    assert sum(done.cached_n > 40 for done in second) > len(second) // 2


def test_where_cells_run_out_the_youngest_waits(
    target: Path, alone: Callable[[Talk], list[tuple[int, ...]]]
) -> None:
    """It is parked in the midst of its reply, and goes on as if nothing had been; beside running
    states each has cells of its own."""
    talks = [Talk(4, seed, 0.8, method, 1) for seed, method in enumerate(METHODS[:LANES])]
    with several(target, 512) as engine:
        write(engine, talks, random.Random(1))
        assert (engine.figures().preemptions > 0) is not pool_of(engine).shape.apart
    for talk in talks:
        assert talk.said[0].token_ids == alone(talk)[0]


def widths(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The rows of each pass of the library from now on."""
    cache = pool_of(engine).cache
    ran: list[int] = []
    decode = cache.decode

    def counted(*, tiled: bool) -> None:
        ran.append(cache.batch.n)
        decode(tiled=tiled)

    monkeypatch.setattr(cache, "decode", counted)
    return ran


def test_two_of_three_lanes_share_passes(target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Wherever a conversation begins: lanes of running states share them with neighbours only."""
    with several(target) as engine:
        ran = widths(engine, monkeypatch)
        running = begun = 0
        while begun < 12 or running:
            while begun < 12 and running < 2:
                prompt = [20 + (7 * begun + i * i) % 150 for i in range(24)]
                talk = Talk(0, begun, 0.8, "none", 1)
                engine.submit(prompt, talk.params.replace(max_tokens=12 + 5 * (begun % 3)))
                running, begun = running + 1, begun + 1
            for _, event in engine.step():
                running -= isinstance(event, Finished)
    assert ran.count(2) > 3 * ran.count(1)


def test_conversations_share_passes(target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """None waits for another."""
    with several(target) as engine:
        ran = widths(engine, monkeypatch)
        talks = [Talk(0, seed, 0.8, "none", 1) for seed in range(LANES)]
        write(engine, talks, random.Random(1))
    tokens = sum(len(talk.said[0].token_ids) for talk in talks)
    print(f"{len(ran)} passes of the library for {tokens} tokens of {LANES} conversations")
    assert ran.count(LANES) >= 15
    assert len(ran) < 0.5 * tokens
