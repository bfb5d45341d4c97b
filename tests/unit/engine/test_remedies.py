"""What would make a pair faster: from costs that were measured here, by the one formula."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from engines import fake_info
from ggufs import write_llama
from timed_rounds import timed

from specllama.engine import profiles
from specllama.engine.profiles import Profile, Windows, open_profile, pair_key, remedies_of
from specllama.engine.remedies import Weighed, kept_in, ranked
from specllama.interface import EngineInfo
from specllama.models import library
from specllama.models.gguf import read_header
from specllama.models.refs import resolve
from specllama.rates import Payoff, Remedy, affordable_step, fixed_speeds, steady
from specllama.settings.params import GenerateParams
from specllama.speculative.policy.costs import Costs, CostTable
from specllama.speculative.policy.learned import Acceptance, Learned
from specllama.verdict import remedy_words, words

# Qwen2.5-Coder 1.5B with its 0.5 B draft on two cores: milliseconds by rows
STORED = {n: 87.0 * v for n, v in enumerate((1, 1.52, 1.89, 2.28, 2.72, 3.46, 3.7, 4.03), 1)}
REPACKED = {n: 80.0 * v for n, v in enumerate((1, 1.42, 1.8, 1.44, 1.79, 2.24, 2.5, 2.88), 1)}
DRAFT = {1: 20.0, 2: 26.0}


def table(times: Mapping[int, float]) -> CostTable:
    made = CostTable()
    for rows, ms in sorted(times.items()):
        made.set(rows, ms)
    return made


def kept(
    times: Mapping[int, float] = STORED,
    steps: Mapping[int, float] = DRAFT,
    *,
    mean: float = 0.8,
    **key: str,
) -> Weighed:
    """A profile whose guesses are kept that often."""
    whole = {
        "here": "h", "model": "T 1", "target": "Q4_K_M 2", "layout": "as stored",
        "draft": "D Q4_K_M (1, 2, as stored)", "threads": "2", "layers": "0 0", "cache": "f16",
    }  # fmt: skip
    costs = Costs(table(times), table(steps))
    bands = {"greedy": Learned({"draft": Acceptance(mean=mean, labels=99)})}
    return Weighed({**whole, **key}, costs, bands)


def changes(found: tuple[Remedy, ...]) -> list[str]:
    return [one.change for one in found if one.speed]


def test_fewer_threads_are_named_with_the_speed_of_their_own_costs() -> None:
    (best,) = (one for one in ranked(kept(), [kept(REPACKED, threads="1")]) if one.speed)
    late = DRAFT[2] - DRAFT[1]
    expected = max(fixed_speeds(steady(0.8), DRAFT[1], [0.0, *REPACKED.values()], late).values())
    assert best.change == "-t 1"
    assert best.speed == pytest.approx(expected * 87 / 80, rel=0.01)
    assert remedy_words(best).startswith(f"-t 1 would write {best.speed:.2f}×")


def test_what_is_no_faster_is_not_named() -> None:
    slower = kept({n: 1.03 * ms for n, ms in STORED.items()}, threads="1")
    assert not changes(ranked(kept(), [slower]))
    assert not changes(ranked(kept(REPACKED), [kept(STORED, threads="1")]))


def test_rounds_that_drafted_are_paid_anew() -> None:
    """Copies cost rows only: what they would take with other threads is no estimate."""
    one = timed(source="ngram", tokens=4, drafted=3, accepted=3, pass_ms=STORED[4])
    other = kept(REPACKED, mean=0.1, threads="1")
    (best,) = (r for r in ranked(kept(mean=0.1), [other], "greedy", [one] * 9) if r.speed)
    assert best.speed == pytest.approx(4 * 87.0 / REPACKED[4])


def test_only_one_change_at_a_time_and_only_what_is_faster() -> None:
    mine = kept(steps={1: 60.0, 2: 70.0})
    ways = [
        kept(other_key="x"),
        kept(steps={1: 8.0, 2: 12.0}, draft="D small (1, 1, as stored)"),
        kept({n: ms * 0.5 for n, ms in STORED.items()}, target="Q4_0 1", layout="repacked"),
        kept({n: ms * 0.9 for n, ms in STORED.items()}, threads="1"),
        kept({n: ms * 0.1 for n, ms in STORED.items()}, threads="1", cache="q8_0"),
        kept({n: ms * 0.1 for n, ms in STORED.items()}, model="another"),
        kept({n: ms * 2.0 for n, ms in STORED.items()}, threads="4"),
    ]
    found = ranked(mine, ways)
    assert changes(found) == ["this model as Q4_0", "the draft model D small", "-t 1"]
    speeds = [one.speed for one in found if one.speed]
    assert speeds == sorted(speeds, reverse=True)


def test_a_draft_model_is_named_as_it_can_be_typed(tmp_path: Path) -> None:
    """As the path of a file that was opened before; a model that is gone is no option."""
    file = write_llama(tmp_path / "my quick-f32.gguf", quant="F32")
    library.remember(write_llama(tmp_path / "target.gguf"), file)
    header = read_header(file)
    sizes = f"({header.n_params}, {header.file_bytes}, as stored)"
    mine = kept(steps={1: 60.0, 2: 70.0})

    def named(name: str, sizes: str = sizes) -> list[str]:
        quick = kept(steps={1: 8.0, 2: 12.0}, draft=f"{name} {sizes}")
        return changes(ranked(mine, [quick]))

    told = f"{header.name} {header.quantization}"
    assert named(told) == [f"-d '{file}'"]
    assert resolve(str(file)) == file
    assert named("quicker-f32 F32") == ["the draft model quicker-f32 F32"], "of the same size"
    assert named(told, "(1, 1, as stored)") == [f"the draft model {told}"], "of another one"
    assert named("D Q4_K_M", "(1, 1, as stored)") == [], "a copy of it with fewer words"


def test_what_a_draft_step_may_cost_is_where_the_formula_says_so() -> None:
    dear = ranked(kept(steps={1: 60.0, 2: 70.0}), [])
    rows = [0.0, *STORED.values(), STORED[8]]
    most = affordable_step(steady(0.8), rows)
    assert f"pays below {most / 87.0:.2f} of a plain one" in dear[-1].then
    assert max(fixed_speeds(steady(0.8), most, rows).values()) == pytest.approx(1.02)
    assert not ranked(kept(steps={1: 0.9 * most, 2: 0.9 * most}), [])
    steep = {n: 87.0 * n for n in STORED}
    (nothing,) = ranked(kept(steep, steps=DRAFT, mean=0.5), [])
    assert nothing.change == "no draft model would pay"


def test_one_slow_step_of_a_draft_says_nothing_of_the_machine() -> None:
    mine = kept(steps={}, mean=0.5)
    mine.costs.draft.observe(1, 4000.0)
    assert ranked(mine, []) == ()
    for _ in range(6):
        mine.costs.draft.observe(1, 40.0)
    assert ranked(mine, [])


def test_nothing_is_said_of_what_was_not_measured() -> None:
    assert ranked(kept({1: 87.0}), [kept(REPACKED, threads="1")]) == ()
    assert not changes(ranked(kept(), [kept({1: 9.0}, threads="1")]))


def verdict(answer: Any, *remedies: Remedy) -> Payoff:
    return Payoff(answer, None, None, None, 9, 9, 0, 0, 0, lost_ms=1.0, remedies=remedies)


def test_a_verdict_names_the_first_of_them() -> None:
    layout, cheaper = Remedy("-t 1", 1.2, "and so on"), Remedy("a cheaper one", then="why")
    assert words(verdict("off", layout, cheaper), "").endswith(
        "would be slower here (it lost 1.0 ms a token) · -t 1 would write 1.20×; and so on"
    )
    assert words(verdict("off", cheaper), "").endswith("a cheaper one: why")
    assert "cheaper" not in words(verdict("unknown", cheaper), "")


# ---- what is kept


def engine_info(**changes: Any) -> EngineInfo:
    info = fake_info()
    target = dataclasses.replace(changes.pop("target", info.target), repacked=False)
    return dataclasses.replace(info, target=target, here="this one", **changes)


def learnt(folder: Path, info: EngineInfo) -> Windows:
    windows = Windows(open_profile(info, folder), info)
    for rows, ms in STORED.items():
        windows.profile.costs.target.set(rows, ms)
    windows.profile.costs.draft.set(1, 60.0)  # dear: a remedy says so
    windows.profile.save()
    return windows


def test_the_profiles_of_others_are_read_once(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    info, listed = engine_info(), list[int]()
    learnt(home, info)
    again = Windows(open_profile(info, home), info)
    monkeypatch.setattr(profiles, "kept_in", lambda *args: listed.append(1) or kept_in(*args))
    assert again.remedies(GenerateParams()) == again.remedies(GenerateParams())
    assert len(listed) == 1, "for all replies"


def test_a_pair_of_files_is_found_again_and_never_of_another_machine(home: Path) -> None:
    from specllama.paths import profiles_dir

    info = engine_info()
    learnt(profiles_dir(), info)
    assert remedies_of("this one", info.target, info.draft, "as stored")
    assert remedies_of("this one", info.target, info.draft)
    assert remedies_of("this one", info.target, None) is None
    assert remedies_of("this one", info.target, info.draft, "repacked where llama.cpp can") is None
    assert remedies_of("another", info.target, info.draft) is None
    elsewhere = dataclasses.replace(info, here="another")
    assert pair_key(elsewhere) != pair_key(info)
    assert not open_profile(elsewhere).warm
    (profiles_dir() / "damaged.json").write_bytes(b"{")
    assert remedies_of("this one", info.target, info.draft)


def test_types_of_a_model_are_known_by_the_names_of_their_files() -> None:
    target = fake_info().target
    keys = [
        pair_key(engine_info(target=dataclasses.replace(target, name=name, quantization=kind)))
        for name, kind in (("m-7b-q4_k_m", "Q4_K_M"), ("m-7b.Q8_0", "Q8_0"), ("n-7b-q8_0", "Q8_0"))
    ]
    assert keys[0]["model"] == keys[1]["model"] != keys[2]["model"]


def test_without_a_profile_on_disk_nothing_is_lost() -> None:
    windows = Windows(Profile(), engine_info())
    assert windows.remedies(GenerateParams()) == ()
