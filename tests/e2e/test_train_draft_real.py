"""``train-draft`` on the bundled target, in seconds: the head is a head, and no text changes."""

import json
from pathlib import Path

import pytest

pytest.importorskip("torch")

from specllama.cli import invoke
from specllama.models.gguf import read_header
from specllama.training.training_card import METADATA, NAME, read_training_card

pytestmark = pytest.mark.e2e


def test_a_head_is_trained_and_drafts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("specllama.training.course.TRY_S", 3.0)
    monkeypatch.setattr("specllama.training.course.FIRST_S", 5.0)
    head, folder = tmp_path / "head.gguf", tmp_path / "training"
    arguments = ["train-draft", "tiny", str(head), "--folder", str(folder), "-t", "1"]
    for minutes in ("0.3", "0.2"):
        assert invoke([*arguments, "--minutes", minutes]) == 0
    told = capsys.readouterr()
    assert "Traceback" not in told.err
    card = read_training_card(folder / NAME)
    assert card is not None
    assert card.best is not None
    assert card.best.per_pass > 1.2
    assert card.replies
    assert card.held_out
    assert "a step of the head takes" in card.pays
    assert json.loads(read_header(head).metadata[METADATA])["target"] == card.target

    def text(*flags: str) -> str:
        words = ["run", "-m", "tiny", "--temperature", "0", "--max-tokens", "40", "--json", *flags]
        assert invoke([*words, "Tell me a story about a boat."]) == 0
        lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
        finish = lines[-1]
        if flags[0] == "--head":
            assert finish["draft_n_accepted"] > 0
        return str(finish["text"])

    drafted = text("--head", str(head), "--proposer", "eagle3", "--set", "window=fixed")
    assert drafted == text("--no-spec")
