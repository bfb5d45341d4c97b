"""``prove``, ``bench run`` and ``tune`` tick off what they show on the list of the app."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from engines import fake_info

from specllama.cli import invoke
from specllama.store.checks import Finding, newest

pytestmark = pytest.mark.usefixtures("loads")

INFO = fake_info(2048)
QUICK = ["--max-tokens", "8", "--temperature", "0"]


def found() -> dict[str, Finding]:
    return {what: check.finding for what, check in newest(INFO).items()}


def test_a_proof_is_kept() -> None:
    assert invoke(["prove", "-n", "2", *QUICK, "--proposer", "draft"]) == 0
    assert found() == {"text": Finding(True, "8 of 8 replies identical")}
    assert newest(INFO)["text"].by == "prove"


def test_a_comparison_is_kept(prompts: Path) -> None:
    flags = ["--prompts", str(prompts), "-r", "1", *QUICK, "--length", "2", "--length", "3"]
    assert invoke(["bench", "run", *flags]) == 0
    kept = found()
    assert set(kept) == {"text", "speed", "length", "kinds"}
    assert kept["text"] == Finding(True, "6 of 6 replies identical")
    assert kept["length"].words.startswith(("fixed 2 is the fastest: ", "fixed 3 is the fastest: "))
    assert kept["kinds"].words.startswith("chat ")
    assert ", code " in kept["kinds"].words
    assert kept["speed"].ok == (float(kept["speed"].words.split("×")[0]) >= 1.0)
    methods = ["--proposer", "draft", "--proposer", "mixed", "--slice", "chat"]
    assert invoke(["bench", "run", "--prompts", str(prompts), "-r", "1", *QUICK, *methods]) == 0
    assert " is the fastest: " in found()["methods"].words


def test_a_bench_of_useless_drafts_says_nothing_of_the_pair(prompts: Path) -> None:
    flags = ["--prompts", str(prompts), "-r", "1", *QUICK, "--useless-draft"]
    assert invoke(["bench", "run", *flags]) == 0
    assert found() == {}


def test_a_tuning_is_kept_unless_nothing_is() -> None:
    flags = ["tune", "some-pair", "--quick", *QUICK]
    assert invoke([*flags, "--no-save"]) == 0
    assert found() == {}
    assert invoke(flags) == 0
    assert found()["length"].words.startswith("k = ")


def test_a_proof_that_fails_is_no_tick(monkeypatch: pytest.MonkeyPatch) -> None:
    from specllama.bench import proof

    true = proof._difference

    def differs(*arguments: Any, **more: Any) -> Any:
        assert true(*arguments, **more) is None
        return proof.Difference(0, 1, 2, "a", "b", 9.0)

    monkeypatch.setattr(proof, "_difference", differs)
    assert invoke(["prove", "-n", "1", *QUICK, "--proposer", "draft"]) == 1
    assert found() == {"text": Finding(False, "0 of 3 replies identical")}
