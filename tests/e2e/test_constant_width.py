"""The same bits at a constant width, on a file whose kernels change at a few rows."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ggufs
import pytest
from engines import measured
from ggufs_nextn import write_nextn
from requests_made import asked, finish

from specllama.bench.prompts import BenchPrompt
from specllama.bench.proof import available, prove
from specllama.bench.rounding import probe_rows
from specllama.engine.engine import Engine
from specllama.errors import UsageError
from specllama.events import Finished, Notice
from specllama.models.quantization import prepare, run
from specllama.models.refs import bundled
from specllama.settings.params import EngineOptions, GenerateParams, SamplingParams

METHODS = ("draft", "ngram", "tree", "merged", "eagle3", "medusa", "auto")


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The bundled target in a type whose kernels change here; on most processors after 3 rows."""
    folder = tmp_path_factory.mktemp("k")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SPECLLAMA_HOME", str(folder))
        for kind in ("q4_k_m", "q2_k", "iq4_nl", "f16"):
            path = folder / f"{kind}.gguf"
            run(prepare(bundled("tiny-target"), path, kind, requantize=True, threads=1))
            with load(path, "off") as engine:
                if engine.info.exact_rows < 16:
                    yield path
                    return
    pytest.skip("passes of all widths are alike here, in all types of weights")


@pytest.fixture(scope="module")
def groups(file: Path) -> list[tuple[int, ...]]:
    """The widths of up to 16 rows that agree with each other on this processor."""
    with load(file, "on") as engine:
        said = agreeing(engine.info.measured)
    found: list[tuple[int, ...]] = []
    for part in said.split("; "):
        numbers = [int(n) for n in re.findall(r"\d+", part)]
        found.append(tuple(range(numbers[0], numbers[-1] + 1)) if " to " in part else (*numbers,))
    assert len(found) > 1
    return found


def agreeing(measured: str) -> str:
    return measured.partition("widths that agree: ")[2]


def load(file: Path, exact: str, **more: Any) -> Engine:
    heads = tuple(str(file) for file in bundled("tiny-target").parent.glob("tiny-[em]*.gguf"))
    wanted = {"n_ctx": 1024, "threads": 1, "exact": exact, "heads": heads, "repack": "on"}
    return measured(file, bundled("tiny-draft"), EngineOptions(**{**wanted, **more}))


def test_passes_of_other_widths_differ_where_nothing_is_done(
    file: Path, prompts: list[BenchPrompt], groups: list[tuple[int, ...]]
) -> None:
    """Negative control: what a constant width has to make good is there."""
    first, *others = groups
    with load(file, "off") as engine:
        assert engine.info.exact_rows == first[-1]
        assert engine.info.exactness.startswith("near-ties possible")
        ids = engine.encode(prompts[0].content)[0]
        alike, unlike = first[1:], [group[0] for group in others]
        probes = probe_rows(engine, ids, (*alike, *unlike))
        differ = {probe.rows: probe.difference for probe in probes}
    assert all(differ[n] == 0.0 for n in alike)
    assert all(differ[n] > 0.0 for n in unlike)


@pytest.mark.parametrize(("which", "part"), [(-1, "whole"), (-1, "least"), (0, "whole")])
def test_every_method_writes_the_text_of_plain_decoding(
    file: Path, prompts: list[BenchPrompt], groups: list[tuple[int, ...]], which: int, part: str
) -> None:
    several = [group for group in groups if group[-1] > 1]
    widths = several[which] if part == "whole" else several[which][:1]
    exact = str(widths[-1])
    with load(file, exact) as engine:
        info = engine.info
        assert info.widths == widths
        assert info.exact_rows == engine.target.max_rows == widths[-1]
        ids = engine.encode(prompts[0].content)[0]
        assert {probe.difference for probe in probe_rows(engine, ids, widths)} == {0.0}
        cases = list(
            prove(
                engine,
                prompts[4:7],
                proposers=available(engine, METHODS)[0],
                temperatures=(0.0, 0.8),
                draft_max=(16,) if widths[-1] == 16 else (8,),
                max_tokens=32,
            )
        )
        assert all(case.bitwise and case.law_holds for case in cases)
        assert [case for case in cases if not case.identical] == []
        assert sum(case.accepted for case in cases) > 0


def test_the_least_price_is_chosen_once(file: Path, groups: list[tuple[int, ...]]) -> None:
    with load(file, "on") as engine:
        first = engine.info
        assert first.widths in groups
    with load(file, "on") as engine:
        assert engine.info.exactness == first.exactness, "times are not taken anew"


def test_a_width_that_cannot_be_kept_is_refused(file: Path, groups: list[tuple[int, ...]]) -> None:
    alone = next((n for n in range(2, 17) if all(n not in group for group in groups)), None)
    if alone is None:
        pytest.skip("every width can be kept here")
    with pytest.raises(UsageError, match=f"--exact {alone}") as refused:
        load(file, str(alone))
    with load(file, "on") as engine:
        assert refused.value.hint == f"widths that agree here: {agreeing(engine.info.measured)}"


def test_where_every_width_is_alike_nothing_changes() -> None:
    with load(bundled("tiny-target"), "on", repack="off") as engine:
        assert engine.info.exactness == "bitwise up to 65 rows"
        assert engine.info.measured.endswith("--exact changes nothing here")
        assert (engine.info.widths, engine.target.max_rows, engine.target.n_ctx) == ((), 65, 1024)


def reply(engine: Engine, prompt: list[int], proposer: str, **more: object) -> Finished:
    params = asked(proposer, 0.7, draft_max=7, seed=5, max_tokens=None)
    return finish(engine, prompt, params.replace(**more))


SHIFTING = GenerateParams(
    seed=3, max_tokens=380, on_full="shift", ignore_eos=True, window="fixed", draft_max=7
)


def test_conversations_that_go_on_stay_equal(file: Path, prompts: list[BenchPrompt]) -> None:
    """Second and third turns over the cells of earlier ones, edits, and a context that shifts."""
    texts: dict[str, list[tuple[int, ...]]] = {}
    with load(file, "8", n_ctx=384) as engine:
        ids = [engine.encode(prompt.content)[0][:90] for prompt in prompts[:4]]
        for proposer in ("none", "draft", "tree"):
            engine.reset()
            said = texts.setdefault(proposer, [])
            text: list[int] = []
            for turn in ids:
                text = [*text, *turn]
                said.append(reply(engine, text, proposer, max_tokens=24).token_ids)
                text += said[-1]
            edited = [*text[:150], *ids[0][:30]]
            said.append(reply(engine, edited, proposer, max_tokens=24).token_ids)
            *events, last = engine.generate(ids[1], SHIFTING.replace(proposer=proposer))
            assert any(isinstance(event, Notice) and "dropped" in event.message for event in events)
            said.append(last.token_ids)
    assert texts["none"] == texts["draft"] == texts["tree"]


def test_conversations_beside_each_other_stay_equal(file: Path, prompts: list[BenchPrompt]) -> None:
    """Their rows fill each other's passes; short prompts, which are read whole."""
    with load(file, "8") as alone, load(file, "8", parallel=3, n_ctx=2048) as three:
        ids = [alone.encode(prompt.content)[0][:50] for prompt in prompts[:9]]
        ids = [[11 + i, *one] for i, one in enumerate(ids)]  # nobody shares a beginning
        params = GenerateParams(
            window="fixed", draft_max=5, max_tokens=32, ignore_eos=True,
            sampling=SamplingParams(temperature=0.7),
        )  # fmt: skip
        running: dict[int, tuple[int, str]] = {}
        waiting = [(i, name) for i in range(len(ids)) for name in ("draft", "ngram", "none")]
        said: list[tuple[int, str, tuple[int, ...]]] = []
        while waiting or running:
            while waiting and three.free:
                i, name = waiting.pop()
                for slot in three._seats.free:
                    slot.reset()
                id = three.submit(ids[i], params.replace(proposer=name, seed=i))
                running[id] = i, name
            for id, event in three.step():
                assert not isinstance(event, Exception), event
                if isinstance(event, Finished):
                    said.append((*running.pop(id), event.token_ids))
        for i, _, tokens in said:
            alone.reset()
            *_, last = alone.generate(ids[i], params.replace(proposer="none", seed=i))
            assert tokens == last.token_ids


@pytest.mark.parametrize("arch", ["qwen35", "mamba"])
def test_running_states_take_pads_as_far_as_they_can_go_back(tmp_path: Path, arch: str) -> None:
    path = tmp_path / f"{arch}.gguf"
    if arch == "mamba":
        ggufs.write_mamba(path)
    else:
        write_nextn(path, arch)
    options = EngineOptions(n_ctx=512, threads=1, exact="on", kernels="off")
    with Engine.load(path, None, options) as engine:
        assert max(engine.info.widths) <= (7 if arch == "qwen35" else 1)
        prompt = [(7 * i) % 50 + 5 for i in range(40)]
        plain = reply(engine, prompt, "none", max_tokens=40)
        engine.reset()
        assert reply(engine, prompt, "ngram", max_tokens=40).token_ids == plain.token_ids
