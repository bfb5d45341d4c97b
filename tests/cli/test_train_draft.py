"""``specllama train-draft`` over fake work: files, progress, refusals, kills."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import ggufs
import pytest
from eagle_files import write_eagle3
from training_fakes import FakeWork, replace_real

from specllama.cli import invoke
from specllama.models.companions import own_heads, own_name, own_place
from specllama.models.gguf import read_header
from specllama.models.refs import bundled
from specllama.paths import cache_dir
from specllama.training import course, spare_time
from specllama.training.training_card import METADATA, NAME, beside, read_training_card

DRIVER = Path(__file__).parent.parent / "support" / "training_fakes.py"


@pytest.fixture
def target(tmp_path: Path) -> Path:
    path = tmp_path / "models" / "some-q4_0.gguf"
    path.parent.mkdir()
    ggufs.write_llama(path, blocks=8)
    return path


@pytest.fixture
def works(monkeypatch: pytest.MonkeyPatch) -> list[FakeWork]:
    """The fake work of each run; a minute of it passes in no time."""
    made: list[FakeWork] = []
    moment = time.monotonic()

    def pass_by(seconds: float) -> None:
        nonlocal moment
        moment += seconds

    def work(folder: Path) -> FakeWork:
        made.append(FakeWork(pass_by, folder))
        return made[-1]

    replace_real(work, monkeypatch.setattr)
    real = course.Course.__init__

    def begin(self: Any, *args: Any, **more: Any) -> None:
        real(self, *args, **more, clock=lambda: moment)

    monkeypatch.setattr(course.Course, "__init__", begin)
    return made


def folder_of(target: Path) -> Path:
    return cache_dir() / "training" / read_header(target).fingerprint


def test_a_head_is_trained_and_found_by_its_name(
    target: Path, works: list[FakeWork], capsys: pytest.CaptureFixture[str]
) -> None:
    assert invoke(["train-draft", str(target), "--minutes", "5"]) == 0
    told = capsys.readouterr()
    head = target.with_name("eagle3-some-q4_0.gguf")
    assert own_heads(read_header(target)) == [head]
    first, shares, pays = told.out.splitlines()
    assert first.startswith(f"{head}: ")
    assert "first " in shares
    assert "tokens a pass" in shares
    assert "1.30× plain decoding is expected" in pays
    assert "about 5 min" in told.err
    assert f"next: specllama run -m {target} --proposer eagle3" in told.err
    for phase in ("writing", "training"):
        assert f"{phase}; " in told.err
    card = json.loads(beside(head).read_text())
    assert card["pays"] == pays
    assert card["target"] == target.name
    inside = json.loads(read_header(head).metadata[METADATA])
    assert inside["best"] == card["best"]
    assert not list(target.parent.glob("*.part"))


@pytest.mark.parametrize("times", [1, 2])
def test_it_asks_once_and_before_anything_is_written(
    target: Path,
    works: list[FakeWork],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    times: int,
) -> None:
    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
    monkeypatch.setattr("specllama.cli.output.all_terminals", lambda: True)
    asked: list[int] = []
    answer = True

    def confirm(question: str, **more: Any) -> bool:
        asked.append(len(works))
        told = capsys.readouterr().err
        assert f"{target.name}: 2 min, at most 2.0 GB of disk in {folder_of(target)}" in told
        return answer

    monkeypatch.setattr("click.confirm", confirm)
    arguments = ["train-draft", str(target), "--minutes", "2"]
    for _ in range(times):
        assert invoke(arguments) == 0
    assert asked == list(range(times))
    answer = False
    assert invoke(arguments) == 130
    assert len(works) == times
    assert invoke([*arguments, "--yes"]) == 0
    assert len(asked) == times + 1


def test_the_same_command_goes_on(
    target: Path, works: list[FakeWork], capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["train-draft", str(target), "--minutes", "2"]
    assert invoke(arguments) == 0
    assert invoke(arguments) == 0
    card = read_training_card(folder_of(target) / NAME)
    assert card is not None
    assert 230 < card.spent_s < 240
    assert works[1].written > works[0].written
    assert invoke(["pair", str(target)]) == 0
    told = capsys.readouterr().err
    assert "eagle3-some-q4_0.gguf, trained for 4 min: right guesses: first " in told
    assert "1.30× plain decoding is expected" in told


def test_other_words_need_a_new_head(
    target: Path, works: list[FakeWork], capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["train-draft", str(target), "--minutes", "2"]
    assert invoke(arguments) == 0
    assert invoke([*arguments, "--words", "300"]) == 2
    assert "--forget deletes it" in capsys.readouterr().err
    assert invoke([*arguments, "--forget", "-y"]) == 0
    assert invoke([*arguments, "--words", "300"]) == 0
    card = read_training_card(folder_of(target) / NAME)
    assert card is not None
    assert card.spent_s < 130
    assert card.words == 300


def test_without_torch_it_says_what_to_install(
    target: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import importlib.util

    real = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *a: None if name == "torch" else real(name, *a)
    )
    assert invoke(["train-draft", str(target)]) == 1
    told = capsys.readouterr().err
    assert "train-draft needs torch" in told
    assert '"torch>=' in told
    assert not folder_of(target).exists()


def test_what_cannot_be_trained_is_one_sentence(
    target: Path,
    tmp_path: Path,
    works: list[FakeWork],
    capsys: pytest.CaptureFixture[str],
) -> None:
    bare = ggufs.write_llama(tmp_path / "bare.gguf", blocks=8, omit=["output_norm.weight"])
    split = ggufs.write_split(tmp_path / "split.gguf", blocks=8)[0]
    flat = ggufs.write_llama(tmp_path / "flat.gguf")
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "letter.txt").write_text("Dear")
    for code, arguments, words in (
        (5, [str(split)], "is split; a head is trained for one file"),
        (2, [str(flat)], "has 2 layers: too few"),
        (5, [str(bare)], "has no norm before its output"),
        (3, [str(tmp_path / "nowhere.gguf")], "no such file"),
        (2, [str(target), str(target)], "train-draft did not make it"),
        (2, [str(target), "--folder", str(mine)], "holds other files"),
    ):
        assert invoke(["train-draft", *arguments]) == code
        told = capsys.readouterr()
        assert words in told.err.replace("there is no file", "no such file")
        assert "Traceback" not in told.err
    assert works == []
    assert [one.name for one in mine.iterdir() if one.name != ".lock"] == ["letter.txt"]


def test_a_better_head_of_an_earlier_training_stays(
    target: Path, works: list[FakeWork], capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["train-draft", str(target), "--minutes", "4"]
    assert invoke(arguments) == 0
    head = own_heads(read_header(target))[0]
    better, card = head.read_bytes(), json.loads(beside(head).read_text())
    shutil.rmtree(folder_of(target))
    assert invoke(["train-draft", str(target), "--minutes", "1"]) == 0
    assert head.read_bytes() == better
    assert works[1].exported == []
    assert f"{card['best']['per_pass']:.2f} tokens a pass" in capsys.readouterr().out
    head.unlink()
    assert invoke(["train-draft", str(target), "--minutes", "1"]) == 0
    assert works[2].exported
    assert head.exists()


def fitting(path: Path, **more: Any) -> Path:
    """A head of the sizes that the command gives to one for ``target``."""
    sizes: dict[str, Any] = {"heads_kv": 2, "hidden": 64, "layers": (2, 4, 5)}
    named = {"general.name": "the old head"}
    return write_eagle3(path, **{**sizes, "draft_ids": range(100), "keys": named, **more})


def test_it_starts_from_a_head_of_another_file_and_keeps_it(
    target: Path, works: list[FakeWork], capsys: pytest.CaptureFixture[str]
) -> None:
    head = fitting(own_place(read_header(target), "eagle3"))
    before, kept = head.read_bytes(), head.with_suffix(".before.gguf")
    arguments = ["train-draft", str(target), "--minutes", "2"]
    assert invoke([*arguments, "--start-from", "none"]) == 2
    assert "train-draft did not make it" in capsys.readouterr().err
    assert invoke(arguments) == 0
    told = capsys.readouterr()
    assert f"it starts from {head.name} (the old head), which stays as {kept.name}" in told.err
    assert kept.read_bytes() == (folder_of(target) / "start.gguf").read_bytes() == before
    assert head.read_bytes() != before
    card = json.loads(beside(head).read_text())
    assert card["start"] == f"{head.name} (the old head)"
    assert f"it started from {card['start']}: right guesses: first" in told.out
    assert card["first"]["right"]
    assert invoke(arguments) == 0  # it goes on
    assert "it starts from" not in capsys.readouterr().err
    assert read_training_card(folder_of(target) / NAME).start == card["start"]  # type: ignore[union-attr]
    # a head of this very file is no start by itself
    shutil.rmtree(folder_of(target))
    assert invoke(arguments) == 0
    assert "it starts from" not in capsys.readouterr().err
    assert not (folder_of(target) / "start.gguf").exists()


def test_the_head_to_start_from_is_named_and_the_same_command_goes_on(
    target: Path, tmp_path: Path, works: list[FakeWork], capsys: pytest.CaptureFixture[str]
) -> None:
    start, other = fitting(tmp_path / "old.gguf"), fitting(tmp_path / "older.gguf", seed=9)
    out = tmp_path / "new" / "folder" / "head.gguf"
    arguments = ["train-draft", str(target), str(out), "--minutes", "2", "--start-from"]
    wrong = fitting(tmp_path / "wrong.gguf", hidden=96, heads_kv=1)
    for head, code, words in (
        (wrong, 2, "hidden 96 instead of 64; heads of keys 1 instead of 2\n"),
        (target, 4, "not an EAGLE-3 head"),
        (tmp_path / "nowhere.gguf", 3, "no such file"),
    ):
        assert invoke([*arguments, str(head)]) == code
        assert words in capsys.readouterr().err
    assert not folder_of(target).exists()
    for again in range(2):
        assert invoke([*arguments, str(start)]) == 0
        told = capsys.readouterr().err
        assert ("it starts from old.gguf (the old head)\n" in told) == (not again)
    assert out.exists()
    assert invoke([*arguments, str(other)]) == 2
    assert "did not start from older.gguf" in capsys.readouterr().err
    assert invoke([*arguments, str(other), "--forget", "-y"]) == 0
    assert invoke([*arguments, str(other)]) == 0
    assert "it starts from older.gguf (the old head)\n" in capsys.readouterr().err
    assert start.exists()
    assert other.exists()


def test_one_command_forgets_everything(
    target: Path,
    works: list[FakeWork],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    head = fitting(own_place(read_header(target), "eagle3"))
    before = head.read_bytes()
    forget = ["train-draft", str(target), "--forget"]
    assert invoke(forget) == 0
    assert f"nothing was learned of {target.name}" in capsys.readouterr().err
    assert head.read_bytes() == before
    assert invoke(["train-draft", str(target), "--minutes", "2"]) == 0
    assert invoke(forget) == 2  # nobody to ask
    assert "add -y" in capsys.readouterr().err
    assert head.read_bytes() != before
    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
    monkeypatch.setattr("click.confirm", lambda *args, **more: False)
    assert invoke(forget) == 130
    assert head.read_bytes() != before
    assert (folder_of(target) / "texts.jsonl").exists()
    assert invoke([*forget, "-y"]) == 0
    told = capsys.readouterr().err.replace("\n", " ")
    assert str(folder_of(target)) in told
    assert f"{head.with_suffix('.before.gguf').name} is {head.name} again" in told
    assert not folder_of(target).exists()
    assert head.read_bytes() == before
    assert sorted(one.name for one in target.parent.iterdir()) == [head.name, target.name]


def test_what_others_made_is_not_forgotten(
    target: Path, tmp_path: Path, works: list[FakeWork], capsys: pytest.CaptureFixture[str]
) -> None:
    folder, other = tmp_path / "mine", target.with_name("other.gguf")
    ggufs.write_llama(other, blocks=8, seed=2)
    arguments = ["--folder", str(folder)]
    assert invoke(["train-draft", str(other), *arguments, "--minutes", "1"]) == 0
    (head,) = own_heads(read_header(other))
    there = sorted(folder.iterdir())
    assert invoke(["train-draft", str(target), str(head), *arguments, "--forget", "-y"]) == 0
    assert "nothing was learned" in capsys.readouterr().err
    assert head.exists()
    assert sorted(folder.iterdir()) == there
    (folder / "letter.txt").write_text("Dear")
    assert invoke(["train-draft", str(other), *arguments, "--forget", "-y"]) == 0
    assert not head.exists()
    assert sorted(one.name for one in folder.iterdir()) == [".lock", "letter.txt"]


def test_it_works_in_spare_time_only(
    target: Path,
    works: list[FakeWork],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    left = iter(["", "on battery", "on battery"])
    monkeypatch.setattr(course, "WAIT_S", 0.0)
    monkeypatch.setattr(spare_time.SpareTime, "__call__", lambda self: next(left, ""))
    assert invoke(["train-draft", str(target), "--minutes", "2", "--while-idle"]) == 0
    told = capsys.readouterr().err.splitlines()
    paused = next(i for i, line in enumerate(told) if line.startswith("paused: on battery"))
    assert told[paused + 1].startswith("writing")
    assert next(left, None) is None
    left = iter(["on battery"])
    assert invoke(["train-draft", str(target), "--minutes", "1"]) == 0  # only where it is asked for
    assert next(left) == "on battery"


def test_a_folder_belongs_to_one_target(
    target: Path, tmp_path: Path, works: list[FakeWork], capsys: pytest.CaptureFixture[str]
) -> None:
    folder = ["--folder", str(tmp_path / "training"), "--minutes", "2"]
    assert invoke(["train-draft", str(target), *folder]) == 0
    other = target.with_name("other.gguf")
    ggufs.write_llama(other, blocks=8, seed=2)
    assert invoke(["train-draft", str(other), *folder]) == 2
    assert "another file" in capsys.readouterr().err
    head = own_heads(read_header(target))[0]
    assert invoke(["train-draft", str(other), str(head)]) == 2
    assert "train-draft did not make it for other.gguf" in capsys.readouterr().err


def test_a_head_goes_to_the_cache_where_the_folder_is_not_ones_own(tmp_path: Path) -> None:
    shipped = read_header(bundled("tiny-target"))
    assert own_place(shipped, "eagle3").is_relative_to(cache_dir())
    link = tmp_path / "link.gguf"
    link.symlink_to(bundled("tiny-target"))
    assert own_place(read_header(link), "eagle3").is_relative_to(cache_dir())
    place = own_place(shipped, "eagle3")
    place.parent.mkdir(parents=True)
    place.touch()
    assert own_heads(shipped) == [place]
    assert place.name == own_name(shipped, "eagle3") == "eagle3-tiny-target-q4_0.gguf"


class Running:
    """The command over fake work, in a process and in real time."""

    def __init__(self, target: Path, minutes: float) -> None:
        words = [sys.executable, str(DRIVER), "train-draft", str(target), "--minutes", str(minutes)]
        self.process = subprocess.Popen(words, stderr=subprocess.PIPE, text=True)
        self.folder = folder_of(target)

    def end(self, number: int) -> str:
        self.process.send_signal(number)
        return self.process.communicate(timeout=60)[1]

    def wait_for_training(self, spent_s: float) -> None:
        end = time.monotonic() + 60
        while time.monotonic() < end:
            card = read_training_card(self.folder / NAME)
            if card is not None and card.spent_s > spent_s:
                return
            time.sleep(0.02)
        raise AssertionError("it does not train")


def test_a_killed_training_goes_on_and_another_one_waits(
    target: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    spent, written = 0.0, 0
    for _ in range(3):
        running = Running(target, 10)
        running.wait_for_training(spent + 0.5)
        began = time.monotonic()
        running.end(signal.SIGKILL)
        card = read_training_card(running.folder / NAME)
        assert card is not None
        assert card.written >= written
        assert card.spent_s > spent
        spent, written = card.spent_s, card.written
        assert time.monotonic() - began < 30
    head, end = target.with_name("eagle3-some-q4_0.gguf"), time.monotonic() + 60
    running = Running(target, 10)
    while not head.exists() and time.monotonic() < end:  # a busy machine may be killed before
        time.sleep(0.02)
    running.end(signal.SIGKILL)
    assert read_header(head).metadata[METADATA]


def test_ctrl_c_keeps_what_is_there(target: Path) -> None:
    running = Running(target, 10)
    running.wait_for_training(0.5)
    told = running.end(signal.SIGINT)
    assert running.process.returncode == 130
    assert f"to go on: specllama train-draft {target} --minutes 10" in told
    assert "Traceback" not in told
    card = read_training_card(running.folder / NAME)
    assert card is not None
    assert card.best is not None
    assert own_heads(read_header(target))


def test_ps_shows_what_is_trained(target: Path, capsys: pytest.CaptureFixture[str]) -> None:
    running = Running(target, 10)
    running.wait_for_training(0.5)
    nobody = "http://127.0.0.1:1"
    assert invoke(["ps", nobody]) == 0
    told = capsys.readouterr().err
    assert f"train-draft {target.name}: " in told
    assert "0 min so far" in told
    running.end(signal.SIGINT)
    assert invoke(["ps", nobody]) == 1
    assert "train-draft" not in capsys.readouterr().err


def test_two_do_not_train_in_one_folder(target: Path) -> None:
    first = Running(target, 10)
    first.wait_for_training(0.0)
    second = Running(target, 10)
    told = second.process.communicate(timeout=60)[1]
    assert second.process.returncode == 2
    assert "another process trains in" in told
    first.end(signal.SIGKILL)
    assert os.path.exists(first.folder / "card.json")
