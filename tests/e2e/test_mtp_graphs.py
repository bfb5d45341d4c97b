"""NextN blocks of every architecture that llama.cpp has a graph for, on random weights.

What llama.cpp computes is compared with NumPy; texts with plain decoding.
"""

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from engines import measured
from ggufs_nextn import ARCHITECTURES, CHAINED, write_nextn
from head_lanes import begin_at, feed, grow
from nextn_numpy import reference
from requests_made import asked, finish

from specllama.bench.prompts import load_prompts
from specllama.engine.engine import Engine
from specllama.engine.target_heads import survey
from specllama.events import Finished, RoundDone
from specllama.models.gguf import read_header
from specllama.models.memory import estimate_head, estimate_model
from specllama.models.nextn_blocks import GRAPHS, trunk_blocks, why_not
from specllama.models.nextn_file import places, write_head
from specllama.models.recipe.nextn import build, own_texts
from specllama.models.recipe.shape import TARGET_FILE
from specllama.models.words import likeliest
from specllama.settings.params import EngineOptions, GenerateParams
from specllama.speculative.effects import HeadPlace

PAIRS = 40  # more than the sliding windows of the files hold
HEADS = 3  # of a chain


@pytest.fixture(scope="module", params=ARCHITECTURES)
def opened(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Engine, Path]]:
    folder, arch = tmp_path_factory.mktemp("nextn"), request.param
    path = write_nextn(folder / f"{arch}.gguf", arch, nextn=HEADS if arch in CHAINED else 1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SPECLLAMA_HOME", str(folder))
        with measured(path, None, EngineOptions(threads=1, n_ctx=256)) as engine:
            yield engine, path


def lane(engine: Engine) -> Any:
    return engine.drafters["mtp"]._lane


def test_every_graph_has_a_file_here() -> None:
    assert set(ARCHITECTURES) == set(GRAPHS)
    assert set(CHAINED) == {arch for arch, graph in GRAPHS.items() if graph.chained}


def close(found: Any, expected: Any) -> bool:
    """Keys and values are kept in half precision."""
    pairs = zip(found, expected, strict=True)
    return all(np.abs(a - b).max() < 0.003 * np.abs(b).max() for a, b in pairs)


def test_it_computes_what_numpy_computes_whatever_was_rolled_back(
    opened: tuple[Engine, Path],
) -> None:
    engine, path = opened
    nextn, rng = lane(engine), random.Random(1)
    heads = [reference(path, head) for head in range(nextn.heads)]
    ids = [rng.randrange(4, 300) for _ in range(PAIRS)]
    states = np.random.default_rng(1).normal(size=(PAIRS, nextn.width)).astype(np.float32)
    logits, own = heads[0].run(ids, states)
    begin_at(nextn, 0)
    while nextn.end < PAIRS:
        begin = nextn.end
        end = min(begin + rng.randrange(1, 6), PAIRS)
        row, state = feed(nextn, ids[begin:end], states[begin:end])
        assert close((row, state), (logits[end - 1], own[end - 1]))
        # by itself: one head's tree grows, of several each drafts one depth and is given all of it
        behind: dict[tuple[int, ...], Any] = {(): state}
        nodes = {(): -1}
        for depth in range(1, HEADS):
            several = nextn.max_rows > 1
            above = [path for path in behind if len(path) == depth - 1]
            tips = {
                (*rng.choice(above), rng.randrange(4, 300))
                for _ in range(rng.randrange(1, 4) if several else 1)
            }
            head, fed = 0, sorted(tips)
            if len(heads) > 1:
                head, nodes = depth, {(): -1}
                fed = list(dict.fromkeys(path[:n] for n in range(1, depth + 1) for path in fed))
            nodes |= {path: node for node, path in enumerate(fed, len(nodes) - 1)}
            rows, after = grow(
                nextn,
                [path[-1] for path in fed],
                np.stack([behind[path[:-1]] for path in fed]),
                [nodes[path[:-1]] for path in fed],
                head,
            )
            for path, row, own_state in zip(fed, rows, after, strict=True):
                if path in tips:
                    known = np.stack([behind[path[:n]] for n in range(depth)])
                    both = np.concatenate((states[:end], known))
                    alone = heads[head].run([*ids[:end], *path], both)
                    assert close((row, own_state), (alone[0][-1], alone[1][-1]))
                    behind[path] = own_state
        nextn.rollback(end if rng.random() < 0.7 else rng.randrange(end + 1))
    begin_at(nextn, 0)


def written(
    engine: Engine, prompt: list[int], method: str, temperature: float, n: int, full: Any = "stop"
) -> tuple[Finished, list[RoundDone]]:
    """A reply and its rounds."""
    params = asked(method, temperature, draft_max=5, max_tokens=n, seed=3, on_full=full)
    *before, last = engine.generate(prompt, params)
    assert isinstance(last, Finished)
    return last, [done for done in before if isinstance(done, RoundDone)]


def parted(plain: Finished, found: Finished, rounds: list[RoundDone]) -> bool:
    """Whether rounding decided a token otherwise: its round has to say so."""
    ties = [done.near_tie for done in rounds for _ in done.emitted]
    pairs = zip(plain.token_ids, found.token_ids, ties, strict=True)
    first = next((tie for a, b, tie in pairs if a != b), None)
    assert first is not False
    return first is not None


def test_the_text_is_that_of_plain_decoding(opened: tuple[Engine, Path]) -> None:
    engine, heads = opened[0], lane(opened[0]).heads
    drafted = accepted = longest = n_parted = 0
    for temperature in (0.0, 0.8):
        first = [10 + i % 7 for i in range(30)]
        reply = written(engine, first, "none", temperature, 24)[0].token_ids
        back = [*first, *reply[:9], 11, 12]  # into the reply
        for prompt, n, full in (
            (first, 24, "stop"), (back, 16, "stop"), ([10 + i % 9 for i in range(240)], 30, "shift")
        ):  # fmt: skip
            plain, _ = written(engine, prompt, "none", temperature, n, full)
            found, rounds = written(engine, prompt, "mtp", temperature, n, full)
            n_parted += parted(plain, found, rounds)
            drafted, accepted = drafted + found.draft_n, accepted + found.draft_n_accepted
            longest = max(longest, *(len(done.drafted) for done in rounds))
    assert 0 < accepted < drafted
    assert n_parted <= 1  # of 6 replies: which one depends on the processor
    chains = opened[0].target.max_leaves == 1
    assert longest == (heads if heads > 1 and chains else 5)


@pytest.mark.parametrize("arch", ["deepseek2", "hy_v3"])
def test_conversations_side_by_side_have_keys_and_values_of_their_own(
    arch: str, tmp_path: Path
) -> None:
    path = write_nextn(tmp_path / "model.gguf", arch, nextn=HEADS if arch in CHAINED else 1)
    prompts = [[10 + (i * k) % 7 for i in range(20 + 5 * k)] for k in range(1, 4)]
    params = asked(draft_max=None, seed=None)
    with measured(path, None, EngineOptions(threads=1, n_ctx=512, parallel=3)) as engine:
        plain = [finish(engine, prompt, params).token_ids for prompt in prompts]
        engine.reset()
        ids = [engine.submit(prompt, params.replace(proposer="mtp")) for prompt in prompts]
        done: dict[int, Finished] = {}
        while len(done) < len(ids):
            done |= {id: event for id, event in engine.step() if isinstance(event, Finished)}
    assert [done[id].token_ids for id in ids] == plain
    assert all(done[id].draft_n > 0 for id in ids)


@pytest.mark.parametrize("arch", ["bailingmoe3", "deepseek4", "glm-dsa", "mimo2", "qwen35"])
def test_blocks_in_a_file_of_their_own_draft_as_they_do_in_the_targets(
    arch: str, tmp_path: Path
) -> None:
    nextn = HEADS if arch in CHAINED else 1
    whole = write_nextn(tmp_path / "whole.gguf", arch, nextn=nextn)
    target = write_nextn(tmp_path / "target.gguf", arch, nextn=0)
    head = write_nextn(tmp_path / "mtp-head.gguf", arch, nextn=nextn, trunk=False)
    assert [way.name for way in survey(read_header(target), [str(head)]) if way.available] == [
        way.name for way in survey(read_header(whole)) if way.available
    ]
    estimated = estimate_head(read_header(head), read_header(target), n_ctx=256)
    assert (
        estimated.kv
        == estimate_model(read_header(whole), n_ctx=256).kv
        - estimate_model(read_header(target), n_ctx=256).kv
    )
    assert estimated.checkpoints == 0
    found = []
    for path, heads in ((whole, ()), (target, (str(head),))):
        with measured(path, None, EngineOptions(threads=1, n_ctx=256, heads=heads)) as engine:
            reply, _ = written(engine, [10 + i % 7 for i in range(30)], "mtp", 0.8, 24)
            found.append((reply.token_ids, reply.draft_n, reply.draft_n_accepted))
    assert found[0] == found[1]


@pytest.mark.parametrize("arch", ["deepseek4", "glm4moe", "mimo2", "qwen35"])
def test_a_head_of_few_tokens_computes_what_the_whole_one_does(arch: str, tmp_path: Path) -> None:
    """Of tokens that it knows; of others it is given how they begin. The text is the target's."""
    path = write_nextn(tmp_path / "whole.gguf", arch, nextn=HEADS if arch in CHAINED else 1)
    target = read_header(path)
    says = likeliest(target, 300, {}, places(target))
    write_head(target, head := tmp_path / "mtp-head.gguf", says)
    prompt, n_vocab = [10 + i % 7 for i in range(30)], target.vocab_size
    known = [int(token) for token in says[-40:]]
    found: list[Any] = []
    for heads in ((), (str(head),)):
        with measured(path, None, EngineOptions(threads=1, n_ctx=256, heads=heads)) as engine:
            texts = [
                written(engine, prompt, method, t, 24)[0]
                for method in ("none", "mtp")
                for t in (0.0, 0.8)
            ]
            nextn = lane(engine)
            states = np.random.default_rng(1).normal(size=(40, nextn.width)).astype(np.float32)
            begin_at(nextn, 0)
            row, state = (part.copy() for part in feed(nextn, known, states))
            begin_at(nextn, 0)
            feed(nextn, [n_vocab - 1], states[:1])  # not one of its tokens
            begin_at(nextn, 0)
        found.append((texts, row, state))
    (texts, row, state), (few, cut, own) = found
    for plain, drafted in ((few[0], few[2]), (few[1], few[3]), (texts[0], few[2])):
        assert drafted.token_ids == plain.token_ids
        assert drafted.draft_n > 0
    assert few[2].draft_n_accepted == texts[2].draft_n_accepted  # it knows what is likely
    assert close((cut[says], own), (row[says], state))
    assert np.isneginf(np.delete(cut, says)).all()


# -- NextN layers of a model that the recipe builds --


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("nextn") / "nextn.gguf"
    build(TARGET_FILE, path, own_texts(TARGET_FILE, 1, 24))
    return path


def loaded_from(path: Path, home: Path, **options: Any) -> Iterator[Engine]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SPECLLAMA_HOME", str(home))
        with Engine.load(path, None, EngineOptions(threads=1, repack="off", **options)) as engine:
            yield engine


@pytest.fixture(scope="module")
def fitted(file: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    yield from loaded_from(file, tmp_path_factory.mktemp("home"))


def block(engine: Engine) -> HeadPlace:
    return engine.drafters["mtp"]._lane


def test_the_caches_agree_with_the_text_after_every_request(fitted: Engine) -> None:
    for seed, prompt in enumerate(load_prompts()[:4]):
        params = GenerateParams(proposer="mtp", window="fixed", seed=seed, max_tokens=20)
        *_, finished = fitted.generate(prompt.content, params)
        nextn: Any = block(fitted)
        assert nextn.n_past == nextn.end
        assert fitted.target.n_past == finished.prompt_n + len(finished.token_ids) - 1


def test_what_the_header_says(file: Path, tmp_path: Path) -> None:
    header, source = read_header(file), read_header(TARGET_FILE)
    assert why_not(header) == ""
    assert trunk_blocks(header) == source.block_count
    # one layer more, and a second context
    with_block, without = estimate_model(header), estimate_model(source)
    assert with_block.kv == without.kv * header.block_count // source.block_count
    assert with_block.compute > without.compute
    stacked = read_header(write_nextn(tmp_path / "two.gguf", nextn=2))
    assert "this file has 2" in why_not(stacked)
    # layers that will not be loaded need no cache
    plain = read_header(write_nextn(tmp_path / "none.gguf", nextn=0))
    assert estimate_model(stacked).kv == estimate_model(plain).kv
