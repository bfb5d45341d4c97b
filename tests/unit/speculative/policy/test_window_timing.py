"""Same seed, same text with the window on, however the clock behaves; and what it keeps on disk."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from engines import FakeContext, fake_info, loaded
from table_model import FakeTable, FakeVocab

from specllama.arrays import Rows
from specllama.backend.base import Outputs
from specllama.engine.engine import Engine
from specllama.engine.profiles import Profile, Windows, band, open_profile, pair_key, profile_path
from specllama.events import Finished, RoundDone
from specllama.interface import EngineInfo
from specllama.settings.params import GenerateParams, SamplingParams
from specllama.speculative.drafting.draft_model import ChainDrafter
from specllama.speculative.drafting.mixed import MixedDrafter
from specllama.speculative.drafting.ngram import NgramDrafter
from specllama.speculative.drafting.suffix import SuffixDrafter
from specllama.speculative.policy.costs import CostTable
from specllama.speculative.policy.learned import draft_features
from specllama.speculative.policy.policy import Policy
from specllama.speculative.window import Window

PROMPT = "the rain in spain the rain in spain the rain"


class Sleepy(FakeContext):
    """Passes take a random while, so that the window decides differently every time."""

    rng = random.Random(0)
    longest_s = 0.0

    def forward(
        self, tokens: Sequence[int], *, outputs: Outputs, parents: Sequence[int] | None = None
    ) -> Rows:
        if self.longest_s:
            time.sleep(self.rng.random() * self.longest_s)
        return super().forward(tokens, outputs=outputs, parents=parents)


def make(
    profile: Profile, *, longest_s: float = 0.0, agreement: float = 0.7, n_ctx: int = 512
) -> tuple[Engine, EngineInfo]:
    table = FakeTable(seed=3, sharpness=2.0)
    target = Sleepy(table, n_ctx=n_ctx)
    draft_table = FakeTable(seed=9, of=table, agreement=agreement)
    draft = Sleepy(draft_table, n_ctx=n_ctx)
    target.longest_s = draft.longest_s = longest_s
    model = ChainDrafter(draft, n_vocab=64)
    info = fake_info(n_ctx)
    engine = Engine(
        loaded(
            target=target,
            vocab=FakeVocab(),
            info=info,
            drafters={
                "ngram": NgramDrafter(),
                "draft": model,
                "mixed": MixedDrafter([SuffixDrafter(), NgramDrafter(), model]),
            },
            make_window=Windows(profile, info),
        )
    )
    return engine, info


def ask(engine: Engine, **changes: Any) -> tuple[Finished, list[RoundDone]]:
    temperature = changes.pop("temperature", 0.9)
    params = GenerateParams(
        sampling=SamplingParams(temperature=temperature),
        seed=11,
        max_tokens=120,
        ignore_eos=True,
        proposer="mixed",
        draft_max=8,
    ).replace(**changes)
    events = list(engine.generate(PROMPT, params))
    finished = events[-1]
    assert isinstance(finished, Finished)
    return finished, [e for e in events if isinstance(e, RoundDone)]


@pytest.mark.parametrize("temperature", [0.0, 0.9, 1.5])
def test_random_sleeps_never_change_a_token(temperature: float) -> None:
    engine, _ = make(Profile())
    plain, _ = ask(engine, speculate=False, temperature=temperature)
    shapes = set()
    drafted = 0
    for seed in range(4):
        engine, _ = make(Profile(), longest_s=0.0008 * seed)
        Sleepy.rng.seed(seed)
        for _ in range(2):  # the second reply starts from what the first one taught
            spec, rounds = ask(engine, temperature=temperature)
            assert spec.token_ids == plain.token_ids
            assert spec.text == plain.text
            assert len(spec.token_ids) == spec.draft_n_accepted + spec.rounds - spec.cut
            shapes.add(tuple(len(r.drafted) for r in rounds))
            drafted += spec.draft_n
    assert drafted > 0
    assert len(shapes) > 1, "the clock should have changed what was drafted"


def test_every_round_says_why() -> None:
    engine, _ = make(Profile(), longest_s=0.0005)
    _, rounds = ask(engine)
    assert all(r.window_reason for r in rounds)
    assert rounds[0].window_reason == "first token"
    assert rounds[1].window_reason == "measuring a plain step"


def test_a_fixed_window_keeps_adapting_off() -> None:
    engine, _ = make(Profile())
    assert type(engine.windows(GenerateParams(window="fixed"))) is Window
    assert isinstance(engine.windows(GenerateParams()), Policy)
    _, rounds = ask(engine, window="fixed", draft_max=3, proposer="draft")
    assert {len(r.drafted) for r in rounds[1:-3]} == {3}


def test_the_second_run_starts_warm(home: Path) -> None:
    folder = home / "profiles"
    info = fake_info()
    profile = open_profile(info, folder)
    assert not profile.warm
    name = band(GenerateParams(sampling=SamplingParams(temperature=0.9)))
    # however the machine's clock goes in this run, there is something to keep
    profile.learned(name).source("draft", "draft").learn(draft_features(0.9, 3.0), True)
    engine, _ = make(profile, longest_s=0.0005)
    ask(engine)
    again = open_profile(info, folder)
    assert again.warm
    assert again.costs.target.level == pytest.approx(profile.costs.target.level)
    assert again.learned(name).sources["draft"].labels > 0
    kept, known = again.learned(name).sources, profile.learned(name).sources
    assert kept["draft"].theta == pytest.approx(known["draft"].theta)
    engine, _ = make(again)
    _, rounds = ask(engine)
    assert rounds[1].window_reason != "measuring a plain step"


@pytest.mark.parametrize(
    "damage",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b"[" * 100_000,
        b'{"schema": "specllama.profile.v8", "ledger": ' + b"[" * 5000 + b"]" * 5000 + b"}",
        b'{"schema": "specllama.profile.v8", "pair": {}, "costs": {}, "bands": []}',
    ],
)
def test_a_damaged_profile_is_ignored_and_replaced(home: Path, damage: bytes) -> None:
    info = fake_info()
    path = profile_path(pair_key(info), home)
    home.mkdir(parents=True, exist_ok=True)
    path.write_bytes(damage)
    profile = open_profile(info, home)
    assert not profile.warm
    assert str(path) in profile.trouble
    profile.costs.target = CostTable(5.0)
    assert profile.save()
    assert open_profile(info, home).warm
    left = {p.name for p in home.iterdir()} - {".lock"}
    assert left == {path.name}, "no temporary file stays behind"


def test_half_a_profile_is_no_profile(home: Path) -> None:
    info = fake_info()
    profile = open_profile(info, home)
    profile.learned(band(GenerateParams())).source("draft", "draft")
    engine, _ = make(profile)
    ask(engine)
    assert profile.path is not None
    whole = profile.path.read_bytes()
    data = json.loads(whole)
    name = next(name for name, learned in data["bands"].items() if "draft" in learned["sources"])
    data["bands"][name]["sources"]["draft"]["theta"] = ["a", "b", "c"]
    profile.path.write_text(json.dumps(data))
    assert not open_profile(info, home).warm
    profile.path.write_bytes(whole[: len(whole) // 2])
    assert not open_profile(info, home).warm


def test_a_folder_that_cannot_be_written_only_forgets(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("not a folder")
    engine, info = make(open_profile(fake_info(), blocked / "profiles"))
    finished, _ = ask(engine)
    assert len(finished.token_ids) == 120
    assert not open_profile(info, blocked / "profiles").warm


def test_profiles_belong_to_a_pair_a_device_and_a_temperature() -> None:
    import dataclasses

    info = fake_info()
    paths = {
        profile_path(pair_key(i), Path("x"))
        for i in (
            info,
            dataclasses.replace(info, threads=8),
            dataclasses.replace(info, here="another processor, or another build"),
            dataclasses.replace(info, device="GPU"),
            dataclasses.replace(info, draft=None),
            dataclasses.replace(info, flash_attn=True),
            *(
                dataclasses.replace(info, target=dataclasses.replace(info.target, **changes))
                for changes in (
                    {"file_bytes": 9},
                    {"gpu_layers": 7},
                    {"kv_types": "q8_0/q8_0"},
                )
            ),
        )
    }
    assert len(paths) == 9
    served = dataclasses.replace(info, target=dataclasses.replace(info.target, n_ctx=4096))
    assert profile_path(pair_key(served), Path("x")) in paths
    bands = [
        band(GenerateParams(sampling=SamplingParams(temperature=t), verify=rule))
        for t, rule in (
            (0.0, "match"),
            (0.0, "block"),
            (0.4, "match"),
            (0.9, "match"),
            (2.0, "match"),
        )
    ]
    assert bands == ["greedy", "greedy", "match cool", "match warm", "match wild"]
