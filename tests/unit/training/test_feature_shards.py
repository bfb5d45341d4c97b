"""Shards of features: the ring and its bound, damaged and torn files."""

import random
from pathlib import Path

import numpy as np
import pytest

from specllama.errors import StoreError
from specllama.training.features import TOP, Features
from specllama.training.shards import Shards


def features(i: int, n: int = 20, width: int = 16) -> Features:
    drawn = np.random.default_rng(i)
    return Features(
        tokens=drawn.integers(0, 100, n, np.int32),
        reply_from=i % n,
        inputs=drawn.standard_normal((n, 3 * width)).astype(np.float16),
        final=drawn.standard_normal((n, width)).astype(np.float16),
        top_ids=drawn.integers(0, 100, (n, TOP), np.int32),
        top_p=drawn.random((n, TOP)).astype(np.float16),
        id=f"{i:06}",
    )


SIZE = features(0).n_bytes


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "training"


def same(found: Features, i: int) -> bool:
    made = features(i)
    arrays = ("tokens", "inputs", "final", "top_ids", "top_p")
    return (found.id, found.reply_from) == (made.id, made.reply_from) and all(
        np.array_equal(getattr(found, name), getattr(made, name))
        and getattr(found, name).dtype == getattr(made, name).dtype
        for name in arrays
    )


def filled(folder: Path, n: int, most: int = 400 * SIZE, each: int = 4) -> Shards:
    shards = Shards(folder, most, shard_bytes=each * SIZE)
    for i in range(n):
        shards.add(features(i), held_out=i % 10 == 0)
    shards.flush()
    return shards


def numbers(shards: Shards, held_out: bool = False) -> list[int]:
    return [int(one.id) for one in shards.read(held_out)]


def test_features_come_back_as_they_were(folder: Path) -> None:
    for shards in (filled(folder, 23), Shards(folder)):
        trained, held = list(shards.read(False)), list(shards.read(True))
        assert [int(one.id) for one in held] == [0, 10, 20]
        assert all(same(one, int(one.id)) for one in (*trained, *held))
        assert [int(one.id) for one in trained] == [i for i in range(23) if i % 10]
        assert shards.ids(True) == {"000000", "000010", "000020"}


def test_a_text_that_is_held_keeps_no_others_in_memory(folder: Path) -> None:
    for one in filled(folder, 9).read(False):
        arrays = (one.tokens, one.inputs, one.final, one.top_ids, one.top_p)
        assert all(array.base is None for array in arrays)


def test_what_is_not_written_yet_is_read_as_well(folder: Path) -> None:
    shards = Shards(folder, shard_bytes=10 * SIZE)
    shards.add(features(1), held_out=False)
    assert not list(folder.iterdir())
    assert numbers(shards) == [1]
    assert shards.ids(False) == {"000001"}


def test_an_order_shuffles_all_and_loses_none(folder: Path) -> None:
    shards = filled(folder, 40)
    one, two = ([f.id for f in shards.read(False, random.Random(s))] for s in (1, 2))
    assert one != two
    assert sorted(one) == sorted(two) == sorted(shards.ids(False))


def test_the_ring_stays_within_its_bound_and_what_is_held_out_stays(folder: Path) -> None:
    most = 40 * SIZE
    shards = Shards(folder, most, shard_bytes=4 * SIZE)
    for i in range(200):
        shards.add(features(i), held_out=i % 20 == 0)
        assert sum(path.stat().st_size for path in folder.iterdir()) == shards.n_bytes <= most
    shards.flush()
    found = numbers(shards)
    assert found == sorted(found)
    assert found[-1] == 199
    assert 20 <= len(found) < 40
    assert numbers(shards, held_out=True) == list(range(0, 200, 20))
    again = Shards(folder, most // 2)
    assert again.n_bytes <= most // 2
    assert numbers(again) == found[-len(numbers(again)) :]
    assert numbers(again, held_out=True) == list(range(0, 200, 20))


def test_a_shard_that_leaves_the_ring_while_it_is_read_gives_nothing(folder: Path) -> None:
    shards = filled(folder, 20, most=40 * SIZE)
    reading = shards.read(False)
    next(reading)
    for i in range(100, 140):
        shards.add(features(i), held_out=False)
    assert len(list(reading)) < 19
    assert numbers(shards)


def test_a_damaged_shard_is_dropped_and_its_replies_are_told(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    filled(folder, 20)
    files = sorted(folder.glob("shard-*.npz"))
    data = bytearray(files[1].read_bytes())
    data[len(data) // 2] ^= 1  # one bit: only the sums tell
    files[1].write_bytes(data)
    files[2].write_bytes(files[2].read_bytes()[:1000])
    files[3].write_bytes(b"")
    shards = Shards(folder)
    before = shards.ids(False)
    found = numbers(shards)
    assert {f"{i:06}" for i in found} == shards.ids(False) < before
    assert all(same(one, int(one.id)) for one in shards.read(False))
    assert sorted(folder.glob("shard-*.npz")) == [*files[:1], *files[4:]]
    assert caplog.text.count("is damaged") == 3


def test_what_a_killed_writer_left_is_cleared_away(folder: Path) -> None:
    filled(folder, 20)
    (folder / ".shard-000099.npz.abc").write_bytes(b"half")
    (folder / ".held-000099.npz.abc").write_bytes(b"half")
    (folder / "head.pt").write_bytes(b"of the trainer")
    shards = Shards(folder)
    assert not list(folder.glob(".*"))
    assert (folder / "head.pt").exists()
    shards.add(features(50), held_out=False)
    shards.flush()
    assert numbers(shards)[-1] == 50


def test_a_disk_that_refuses_is_said(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: object) -> None:
        raise OSError(28, "No space left on device")

    shards = Shards(folder)
    shards.add(features(1), held_out=False)
    monkeypatch.setattr("specllama.training.shards.replace_file", full)
    with pytest.raises(StoreError, match="No space left"):
        shards.flush()
    assert numbers(shards) == [1]
