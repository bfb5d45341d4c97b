"""A race that moves: what the round log tells, when it came, in a picture that needs nothing."""

from __future__ import annotations

import json
import re
from pathlib import Path
from xml.etree import ElementTree

import pytest
from pictures.animation import COLUMNS, MovingRace, Piece, Reply, animated, record, reply_of
from pictures.screenshots import draw_recordings

from specllama.errors import UsageError


def round_line(t_s: float, texts: list[str], accepted: int = 0) -> str:
    return json.dumps({"type": "round", "t_s": t_s, "emitted_text": texts, "accepted": accepted})


@pytest.fixture
def race() -> MovingRace:
    words = [f"word{number} " for number in range(24)]
    plain = Reply([Piece(0.1 * i, word) for i, word in enumerate(words)], len(words))
    drafted = Reply([Piece(0.06 * i, word, i % 3 > 0) for i, word in enumerate(words)], len(words))
    return MovingRace("A <question>?", "two & a half cores", plain, drafted)


def test_a_log_tells_when_each_piece_came_and_which_were_guesses(tmp_path: Path) -> None:
    log = tmp_path / "run.jsonl"
    lines = [
        json.dumps({"type": "run"}),
        round_line(2.0, ["The"]),
        round_line(2.5, [" old", " heron", " flew"], 2),
        round_line(2.75, [".", "<end>"], 1),
        json.dumps({"type": "finish", "text": "The old heron flew."}),
    ]
    log.write_text("\n".join(lines), "utf-8")
    reply = reply_of(log)
    assert reply.text == "The old heron flew."
    assert (reply.tokens, reply.seconds) == (6, 0.75)
    assert reply.speed == pytest.approx(5 / 0.75)
    shown = [(piece.at_s, piece.text, piece.kept) for piece in reply.pieces if piece.text]
    assert shown == [
        (0.0, "The", False),
        (0.5, " old heron", True),
        (0.5, " flew", False),
        (0.75, ".", True),
    ]


def test_the_picture_holds_both_texts_and_plays_by_itself(race: MovingRace) -> None:
    svg = animated(race)
    tree = ElementTree.fromstring(svg)
    texts = ["".join(text.itertext()) for text in tree.iter("{http://www.w3.org/2000/svg}text")]
    both = " ".join(" ".join(texts).split())
    assert both.count("word0 word1 word2") == 2
    assert "same 24 tokens · 1.67× as fast" in both
    assert "two & a half cores" in both
    assert all(len(text) <= COLUMNS for text in texts if text.startswith("word"))
    assert "<script" not in svg
    assert "http" not in svg.replace("http://www.w3.org/2000/svg", "")
    assert len(svg) < 200_000


def test_a_piece_appears_at_the_share_of_the_loop_that_it_really_took(race: MovingRace) -> None:
    svg = animated(race)
    seconds = float(re.search(r"animation:([\d.]+)s", svg)[1])  # type: ignore[index]
    for word, at_s in (("word10", 1.0), ("word20", 2.0)):
        name = re.search(rf'class="(t\d+)">{word} ?<', svg)[1]  # type: ignore[index]
        percent = float(re.search(rf"@keyframes {name}{{0%{{[^}}]*}}([\d.]+)%", svg)[1])  # type: ignore[index]
        assert percent == pytest.approx(100 * at_s / seconds, abs=0.02)


def test_a_recorded_race_is_drawn_with_the_others(race: MovingRace, tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    race.save(tmp_path / "data" / "moving-race.json")
    assert MovingRace.load(tmp_path / "data" / "moving-race.json") == race
    (drawn,) = draw_recordings(tmp_path)
    assert drawn.read_text("utf-8") == animated(race)
    (tmp_path / "data" / "moving-race.json").write_text("{}")
    with pytest.raises(UsageError, match="no recorded race"):
        draw_recordings(tmp_path)


@pytest.mark.e2e
def test_a_real_race_is_recorded() -> None:
    race = record("What is a draft model?", ["-n", "12", "--seed", "7"], "here")
    assert race.plain.tokens == race.drafted.tokens == 12
    assert race.plain.text == race.drafted.text
    assert not any(piece.kept for piece in race.plain.pieces)
