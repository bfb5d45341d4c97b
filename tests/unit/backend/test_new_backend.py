"""A backend is added by one file (``new_backend/counting.py``) and one line.

It has the members of the Protocols and no others, so an engine that reached around them would fail.
"""

import json
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import table_model  # noqa: F401 (its backend)
from requests_made import asked, finish

from specllama.backend import base
from specllama.engine.engine import Engine
from specllama.engine.opening import BACKENDS
from specllama.errors import CannotLoad, PairIncompatible
from specllama.events import Finished, RoundDone
from specllama.interface import Message
from specllama.settings.params import EngineOptions, GenerateParams, SamplingParams, VerifyRule

FOLDER = Path(__file__).parents[2] / "new_backend"
TEXT = """user: what does the ship carry
assistant: the ship carries the salt and the sand to the island in the south
user: who sails the ship to the south
assistant: the son of the sailor and the son of the salter sail it to the island
"""


@pytest.fixture
def pair(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> tuple[Path, Path]:
    monkeypatch.syspath_prepend(FOLDER)
    monkeypatch.setitem(BACKENDS, ".counts", "counting:open_pair")  # the one line
    for name in ("target", "draft"):
        (tmp_path / f"{name}.counts").write_text(TEXT, "utf-8")
    return tmp_path / "target.counts", tmp_path / "draft.counts"


@pytest.fixture
def engine(pair: tuple[Path, Path]) -> Iterator[Engine]:
    with Engine.load(*pair, EngineOptions(parallel=2)) as loaded:
        yield loaded


def request(proposer: str, rule: VerifyRule = "match", **more: Any) -> GenerateParams:
    return asked(proposer, 0.8, **{"verify": rule, "max_tokens": 80, **more})


def chat(question: str) -> list[Message]:
    return [Message("user", question)]


def alone(engine: Engine, question: str, params: GenerateParams) -> Finished:
    return finish(engine, chat(question), params)


def members(kind: type) -> set[str]:
    named = {name for cls in kind.__mro__ for name in vars(cls).get("__annotations__", {})}
    return {name for name in {*dir(kind), *named} if not name.startswith("_")}


def test_it_has_nothing_but_what_the_protocols_ask_for(pair: tuple[Path, Path]) -> None:
    import counting

    pool = counting.CountPool(counting.Counts([1, 2, 1], 3, 1), 1, counting.Cancel())
    kept = counting.Kept(())
    for part, protocol in (
        (pool, base.Pool),
        (pool.open(), base.Lane),
        (kept, base.Blob),
        (counting.Letters("ab"), base.Vocab),
    ):
        assert {name for name in dir(part) if not name.startswith("_")} == members(protocol)


def test_it_takes_chains_only_and_says_so(engine: Engine) -> None:
    assert set(engine.drafters) == {
        "none",
        "draft",
        "forced",
        "suffix",
        "ngram",
        "prediction",
        "mixed",
    }
    with pytest.raises(PairIncompatible, match="chains only"):
        alone(engine, "who", request("tree"))


@pytest.mark.parametrize("proposer", ["draft", "ngram", "suffix", "mixed"])
def test_it_chats_with_drafts_and_no_token_changes(engine: Engine, proposer: str) -> None:
    for question in ("what does the sailor carry", "who sails to the sand"):
        plain, drafted = (alone(engine, question, request(name)) for name in ("none", proposer))
        assert drafted.token_ids == plain.token_ids
        assert 0 < drafted.draft_n_accepted <= drafted.draft_n
        if proposer in ("draft", "ngram"):  # the others may copy the plain reply
            assert drafted.draft_n_accepted < drafted.draft_n


def test_the_policy_runs_on_it(engine: Engine) -> None:
    question = "what does the ship carry"
    params = request("auto").replace(window="auto", min_speculative_tokens=0)
    plain = alone(engine, question, request("none"))
    assert alone(engine, question, params).token_ids == plain.token_ids


def test_rejection_writes_what_it_writes_alone(engine: Engine) -> None:
    """Its coins are seeded, too; at temperature 0 they decide nothing."""
    greedy = SamplingParams(temperature=0.0)
    question = "who sails the ship"
    plain = alone(engine, question, request("none", sampling=greedy))
    drafted = alone(engine, question, request("draft", "rejection", sampling=greedy))
    assert drafted.token_ids == plain.token_ids
    assert drafted.draft_n_accepted > 0


@pytest.mark.parametrize("rule", ["match", "rejection"])
def test_two_conversations_take_turns(engine: Engine, rule: VerifyRule) -> None:
    questions = {"what does the ship carry": "draft", "who sails to the island": "mixed"}
    ids = {
        engine.submit(chat(question), request(proposer, rule)): question
        for question, proposer in questions.items()
    }
    said: dict[int, Finished] = {}
    order: list[int] = []
    while events := engine.step():
        for id, event in events:
            assert not isinstance(event, Exception), event
            if isinstance(event, RoundDone):
                order.append(id)
            if isinstance(event, Finished):
                said[id] = event
    assert sum(a != b for a, b in pairwise(order)) > 20, "side by side"
    for id, question in ids.items():
        by = "none" if rule == "match" else questions[question]
        assert said[id].token_ids == alone(engine, question, request(by, rule)).token_ids
        assert said[id].draft_n_accepted > 0


def test_the_bundled_fake_is_a_backend_like_it(tmp_path: Path) -> None:
    target, draft = tmp_path / "target.table", tmp_path / "draft.table"
    target.write_text(json.dumps({"n_vocab": 24, "seed": 3, "eog_bias": -4.0}))
    draft.write_text(json.dumps({"n_vocab": 24, "seed": 4, "agreement": 0.9}))
    with Engine.load(target, draft) as engine:
        plain, drafted = (alone(engine, "a tale", request(name)) for name in ("none", "tree"))
    assert drafted.token_ids == plain.token_ids
    assert drafted.draft_n_accepted > 0


def test_a_file_that_is_none_is_refused(pair: tuple[Path, Path], tmp_path: Path) -> None:
    pair[0].write_text("")
    with pytest.raises(CannotLoad, match="empty"):
        Engine.load(*pair)
    (tmp_path / "a.table").write_text("{")
    with pytest.raises(CannotLoad, match="no table"):
        Engine.load(tmp_path / "a.table")
