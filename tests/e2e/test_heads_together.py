"""Heads of several conversations: one pass a depth for all, with the numbers each has alone."""

import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from dflash_files import write_dflash
from engines import measured
from ggufs_gemma4 import write_assistant, write_gemma4
from ggufs_nextn import write_nextn
from head_lanes import begin_at
from requests_made import asked

from specllama.arrays import Rows
from specllama.backend.base import Part
from specllama.backend.heads.head_pool import HeadPool
from specllama.backend.heads.medusa_head import GgmlHeads
from specllama.engine.engine import Engine
from specllama.events import Finished
from specllama.models.refs import resolve
from specllama.settings.params import EngineOptions, GenerateParams

N = 4


def bundled(folder: Path) -> tuple[Path, list[Path]]:
    return resolve("tiny-target"), []


def dflash(folder: Path, kind: Any = "dflash") -> tuple[Path, list[Path]]:
    target, head = resolve("tiny-target"), folder / "drafter.gguf"
    return target, [write_dflash(head, target, kind=kind, layers=(1, 3))]


def dflash2(folder: Path) -> tuple[Path, list[Path]]:
    return dflash(folder, "dflash2")


def dspark(folder: Path) -> tuple[Path, list[Path]]:
    return dflash(folder, "dspark")


def nextn(folder: Path) -> tuple[Path, list[Path]]:
    return write_nextn(folder / "nextn.gguf", "glm4moe"), []


def chained(folder: Path) -> tuple[Path, list[Path]]:
    return write_nextn(folder / "three.gguf", "hy_v3", nextn=3), []


def assistant(folder: Path) -> tuple[Path, list[Path]]:
    return write_gemma4(folder / "t.gguf"), [write_assistant(folder / "h.gguf")]


KINDS: dict[str, tuple[str, Callable[[Path], tuple[Path, list[Path]]]]] = {
    "eagle3": ("eagle3", bundled),
    "dflash": ("dflash", dflash),
    "dflash2": ("dflash", dflash2),
    "nextn": ("mtp", nextn),
    "three nextn": ("mtp", chained),
    "assistant": ("mtp", assistant),
}
# blocks of one length only; a pool that keeps nothing and runs no graph of llama.cpp
OTHERS = {"dspark": ("dflash", dspark), "medusa": ("medusa", bundled)}


def opened(folder: Path, kind: str, lanes: int) -> Iterator[tuple[Engine, str]]:
    method, files = (KINDS | OTHERS)[kind]
    target, heads = files(folder)
    options = EngineOptions(
        threads=1, n_ctx=1024, parallel=lanes, heads=tuple(map(str, heads)), swa_full=True
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SPECLLAMA_HOME", str(folder))
        with measured(target, None, options) as engine:
            yield engine, method


@pytest.fixture(scope="module", params=KINDS)
def several(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Engine, str]]:
    yield from opened(tmp_path_factory.mktemp("heads"), request.param, N)


def request(method: str, seed: int) -> GenerateParams:
    # chains: every conversation drafts as deep as every other
    return asked(method, 0.7, seed=seed, draft_max=3, max_tokens=64, verify="block")


def passes_of(engine: Engine, method: str, n: int) -> list[tuple[str, int]]:
    """What the head's pool ran while all ``n`` conversations were writing: the kind of each pass of
    the library (of Medusa the head), and how many lanes were in it."""
    seen: list[tuple[str, int]] = []
    with pytest.MonkeyPatch.context() as patch:
        run = HeadPool._run

        def noted(self: HeadPool, slices: Sequence[Any], flags: Sequence[int]) -> None:
            kinds = {"text" if piece.tree is None else "nodes" for piece, *_ in slices}
            seen.append(("+".join(sorted(kinds)), len(slices)))
            run(self, slices, flags)

        logits = GgmlHeads.logits

        def counted(self: GgmlHeads, hidden: Any, depth: int) -> Any:
            seen.append((f"head {depth}", len(hidden)))
            return logits(self, hidden, depth)

        patch.setattr(HeadPool, "_run", noted)
        patch.setattr(GgmlHeads, "logits", counted)
        for i in range(n):
            engine.submit([5 + i, 6, 7, 8, 9], request(method, i))
        writing: Counter[int] = Counter()
        begun = 0
        while said := engine.step():
            for id, event in said:
                assert not isinstance(event, Exception), event
                writing[id] += type(event).__name__ == "RoundDone"
            if len(writing) == n and min(writing.values()) == 2 and not begun:
                begun = len(seen)
            if len(writing) == n and min(writing.values()) == 5:
                break
        found = seen[begun:]
        while engine.step():
            pass
    return found


def test_at_any_depth_there_is_one_pass_for_all(several: tuple[Engine, str]) -> None:
    engine, method = several
    lanes = len(engine._slots)
    found = passes_of(engine, method, lanes)
    assert len(found) >= 6
    assert {n for _, n in found} == {lanes}, Counter(found)


def lanes_of(engine: Engine, method: str) -> list[Any]:
    drafters: Any = [slot.drafters[method] for slot in engine._slots]
    return [drafter._lane for drafter in drafters]


def close(found: tuple[Rows, Rows], alone: tuple[Rows, Rows]) -> None:
    for a, b in zip(found, alone, strict=True):
        assert a.shape == b.shape
        if a.size:
            said = np.isfinite(b)
            assert (np.isfinite(a) == said).all()
            assert np.abs(a[said] - b[said]).max() <= 0.01 * np.abs(b[said]).max()


def ran(pool: Any, *parts: Part) -> list[tuple[Rows, Rows]]:
    """Rows and states of a pass of these parts."""
    pool.run(parts)
    return [(part.rows.copy(), part.left.copy()) for part in parts]


def test_each_has_the_numbers_that_it_has_alone(several: tuple[Engine, str]) -> None:
    """Texts of several lengths in one pass, then nodes behind some beside the text of others."""
    engine, method = several
    engine.reset()
    lanes, rng, noise = lanes_of(engine, method), random.Random(2), np.random.default_rng(2)
    pool, graph = lanes[0].pool, lanes[0].pool.graph
    assert all(lane.pool is pool for lane in lanes)
    ids = [[rng.randrange(4, 300) for _ in range(n)] for n in (1, 7, 3, 2)][: len(lanes)]
    if graph.borrows:
        for slot, text in zip(engine._slots, ids, strict=True):
            slot.target.forward([7, *text], outputs="none")
    states = [noise.normal(size=(len(text), graph.reads)).astype(np.float32) for text in ids]
    reads = graph.features == 0 and graph.layers  # states alone
    texts: list[Part] = []
    for lane, text, beside in zip(lanes, ids, states, strict=True):
        begin_at(lane, 1 + len(text) if graph.borrows else 0)
        if graph.borrows:
            text, beside = text[-1:], beside[-1:]
        tokens, outputs = ((), "none") if reads else (text, "last")
        texts.append(Part(lane, tokens, outputs, states=beside))  # type: ignore[arg-type]
    together = ran(pool, *texts)
    heads = [min(1, lane.heads - 1) for lane in lanes]
    nodes = [
        Part(
            lane, [9, 11, 12], "all", [-1, 0, 1],
            None if reads else noise.normal(size=(3, graph.reads)).astype(np.float32), head,
        )
        for lane, head in zip(lanes, heads, strict=True)
    ]  # fmt: skip
    more = ran(pool, *nodes)
    for lane in lanes:
        lane.keep_path(())
    for lane, text_part, node_part, first, second in zip(
        lanes, texts, nodes, together, more, strict=True
    ):
        if not graph.borrows:
            begin_at(lane, 0)
            close(first, ran(pool, text_part)[0])
        close(second, ran(pool, node_part)[0])
        lane.keep_path(())
    if graph.borrows:
        for lane, text_part, first, text in zip(lanes, texts, together, ids, strict=True):
            begin_at(lane, 1 + len(text))
            close(first, ran(pool, text_part)[0])
    for lane in lanes:
        lane.rollback(0)
    engine.reset()


def test_nodes_of_one_and_text_of_another_share_a_pass(several: tuple[Engine, str]) -> None:
    engine, method = several
    lanes = lanes_of(engine, method)
    pool, graph = lanes[0].pool, lanes[0].pool.graph
    if len(lanes) < 2 or graph.borrows:
        return
    states = np.random.default_rng(3).normal(size=(9, graph.reads)).astype(np.float32)
    reads = graph.features == 0 and graph.layers
    for lane in lanes[:2]:
        begin_at(lane, 0)
        pool.run([Part(lane, () if reads else [5] * 4, "none", states=states[:4])])
    nodes = Part(lanes[0], [9, 11], "all", [-1, 0], None if reads else states[:2])
    text = Part(lanes[1], () if reads else [8] * 5, "none" if reads else "last", states=states[4:])
    both = ran(pool, nodes, text)
    lanes[0].keep_path(())
    lanes[1].rollback(4)
    for part, out in zip((nodes, text), both, strict=True):
        close(out, ran(pool, part)[0])
    for lane in lanes[:2]:
        lane.rollback(0)


def test_blocks_of_several_lengths_are_drafted_side_by_side(tmp_path: Path) -> None:
    """DSpark's graph ends the process where a pass holds blocks of two lengths."""
    for engine, method in opened(tmp_path, "dspark", 3):
        for longest in (2, 3, 4):
            engine.submit([5 + longest, 6, 7], request(method, longest).replace(draft_max=longest))
        ends = [event for _, event in iter_steps(engine) if isinstance(event, Finished)]
        assert len(ends) == 3
        assert all(end.draft_n > 0 for end in ends)


def iter_steps(engine: Engine) -> Iterator[tuple[int, Any]]:
    while said := engine.step():
        yield from said


def test_a_pass_that_fails_leaves_every_lane_as_it_was(
    several: tuple[Engine, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, method = several
    lanes = lanes_of(engine, method)
    pool, graph = lanes[0].pool, lanes[0].pool.graph
    if len(lanes) < 2 or graph.borrows:
        return
    states = np.ones((4, graph.reads), np.float32)
    reads = graph.features == 0 and graph.layers
    for lane in lanes[:2]:
        begin_at(lane, 0)
        pool.run([Part(lane, () if reads else [5] * 4, "none", states=states)])
    run = HeadPool._run

    def failing(self: HeadPool, *args: Any) -> None:
        run(self, *args)
        raise RuntimeError("cut")

    free = pool.free_leaves
    with monkeypatch.context() as patch:
        patch.setattr(HeadPool, "_run", failing)
        parents = [-1, -1] if free else [-1, 0]
        nodes = Part(lanes[0], [9, 11], "all", parents, None if reads else states[:2])
        text = Part(lanes[1], () if reads else [8] * 4, "none", states=states)
        with pytest.raises(RuntimeError):
            pool.run([nodes, text])
    assert pool.free_leaves == free
    for lane in lanes[:2]:
        assert lane.n_past == lane.end == 4
        lane.rollback(0)


@pytest.mark.parametrize(("kind", "n"), [("eagle3", 8), ("medusa", 4), ("medusa", 8)])
def test_as_many_conversations_have_one_pass_a_depth(tmp_path: Path, kind: str, n: int) -> None:
    for engine, method in opened(tmp_path, kind, n):
        found = passes_of(engine, method, n)
        assert len(found) >= 6
        assert {lanes for _, lanes in found} == {n}, Counter(found)
        assert kind != "medusa" or {head for head, _ in found} == {"head 1", "head 2", "head 3"}


@pytest.mark.parametrize("n", [4, 8])
def test_each_state_has_the_numbers_of_medusa_heads_that_it_has_alone(
    tmp_path: Path, n: int
) -> None:
    """States of several lanes for one head, then for several heads in one pass."""
    for engine, method in opened(tmp_path, "medusa", n):
        lanes: list[Any] = [slot.drafters[method] for slot in engine._slots]
        lanes = [drafter.lane for drafter in lanes]
        pool = lanes[0].pool
        assert all(lane.pool is pool for lane in lanes)
        width = pool.heads._facts.width
        states = np.random.default_rng(4).normal(size=(n, 1, width)).astype(np.float32)
        for heads in ([2] * n, [1 + i % lanes[0].heads for i in range(n)]):
            parts = [
                Part(lane, (), "last", states=state, head=head)
                for lane, state, head in zip(lanes, states, heads, strict=True)
            ]
            for part, out in zip(parts, ran(pool, *parts), strict=True):
                close(out, ran(pool, part)[0])
