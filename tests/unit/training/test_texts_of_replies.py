"""The file of replies: what a killed process leaves, and what is damaged."""

import os
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest

from specllama.errors import StoreError
from specllama.training.corpus import TEXTS, Corpus, Sample


def sample(i: int, *, held_out: bool = False) -> Sample:
    return Sample(f"{i:06}", "code", held_out, (1, 2, i), tuple(range(i + 1)), seed=i)


def filled(folder: Path, n: int = 6) -> Corpus:
    corpus = Corpus(folder)
    for i in range(n):
        corpus.append(sample(i, held_out=i % 3 == 0))
    return corpus


def test_replies_come_back_by_side_and_in_order(tmp_path: Path) -> None:
    for corpus in (filled(tmp_path), Corpus(tmp_path)):
        assert list(corpus.samples(held_out=True)) == [sample(i, held_out=True) for i in (0, 3)]
        assert list(corpus.samples(held_out=False)) == [sample(i) for i in (1, 2, 4, 5)]
        assert list(corpus.samples(False, without={"000002"})) == [sample(i) for i in (1, 4, 5)]
        assert (len(corpus), corpus.tokens) == (6, 21)
        assert (corpus.count(True), corpus.count(False, "code"), corpus.count(False, "x")) == (
            2,
            4,
            0,
        )
        assert "000004" in corpus
        assert "000009" not in corpus


def test_a_torn_last_line_is_cut_off_wherever_it_was_torn(tmp_path: Path) -> None:
    filled(tmp_path, 3)
    whole = (tmp_path / TEXTS).read_bytes()
    second = whole.index(b"\n", whole.index(b"\n") + 1) + 1
    for size in range(second, len(whole)):
        (tmp_path / TEXTS).write_bytes(whole[:size])
        corpus = Corpus(tmp_path)
        assert len(corpus) == 2
        corpus.append(sample(2))
        assert (tmp_path / TEXTS).read_bytes() == whole


def test_a_damaged_line_is_passed_over(tmp_path: Path) -> None:
    filled(tmp_path, 3)
    lines = (tmp_path / TEXTS).read_bytes().splitlines(keepends=True)
    (tmp_path / TEXTS).write_bytes(lines[0] + b"\0\xff{\n" + lines[1][:20] + b"\n" + lines[2])
    corpus = Corpus(tmp_path)
    assert [one.id for side in (True, False) for one in corpus.samples(side)] == [
        "000000",
        "000002",
    ]


def test_a_reply_is_kept_once(tmp_path: Path) -> None:
    corpus = filled(tmp_path, 2)
    size = (tmp_path / TEXTS).stat().st_size
    corpus.append(sample(1))
    assert (tmp_path / TEXTS).stat().st_size == size
    with (tmp_path / TEXTS).open("ab") as file:
        file.write((tmp_path / TEXTS).read_bytes())
    assert (len(Corpus(tmp_path)), Corpus(tmp_path).tokens) == (2, 3)


def test_only_its_owner_reads_the_file(tmp_path: Path) -> None:
    filled(tmp_path / "folder")
    assert stat.S_IMODE((tmp_path / "folder" / TEXTS).stat().st_mode) == 0o600


def test_what_cannot_be_written_is_said(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match="cannot keep replies"):
        Corpus(tmp_path / "file")
    corpus = filled(tmp_path / "folder")
    (tmp_path / "folder" / TEXTS).unlink()
    with pytest.raises(StoreError, match="cannot keep replies"):
        corpus.append(sample(9))
    assert "000009" not in corpus


WRITES = """
import sys
from pathlib import Path
from specllama.training.corpus import Corpus, Sample
corpus = Corpus(Path(sys.argv[1]))
for i in range(len(corpus), 10**6):
    corpus.append(Sample(f"{i:06}", "code", False, tuple(range(300)), tuple(range(i % 500))))
    print(i, flush=True)
"""


def test_a_killed_writer_loses_no_reply_that_it_had_ended(tmp_path: Path) -> None:
    told = -1
    for wait in (0.0, 0.02, 0.05):
        with subprocess.Popen(
            [sys.executable, "-c", WRITES, str(tmp_path)], stdout=subprocess.PIPE
        ) as writer:
            assert writer.stdout is not None
            first = writer.stdout.readline()
            time.sleep(wait)
            os.kill(writer.pid, signal.SIGKILL)
            lines = [first, *writer.stdout.read().splitlines()]
        told = max(int(line) for line in lines if line.strip().isdigit())
        corpus = Corpus(tmp_path)
        found = [int(one.id) for one in corpus.samples(held_out=False)]
        assert found == list(range(len(corpus)))
        assert len(found) > told
