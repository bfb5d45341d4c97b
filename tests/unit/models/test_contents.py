"""The name of a file's contents: no byte changes unseen, and what is known is not read again."""

import hashlib
import os
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from ggufs import write_llama

from specllama import paths
from specllama.errors import ModelUnavailable
from specllama.models import contents, library, pruned, receipts, trimmed
from specllama.models.gguf import GgufHeader, read_header


@pytest.fixture
def file(tmp_path: Path) -> Path:
    (tmp_path / "models").mkdir()
    return write_llama(tmp_path / "models" / "some.gguf")


def hashed(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def another_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forget what is known only in this process."""
    monkeypatch.setattr(contents, "_found", {})


def flipped(data: bytes, at: int = -7) -> bytes:
    changed = bytearray(data)
    changed[at] ^= 0x80
    return bytes(changed)


def in_place(path: Path) -> None:
    """Change a byte, and set the times of the file back."""
    about = path.stat()
    data = flipped(path.read_bytes())
    with path.open("r+b") as opened:
        opened.write(data)
    os.utime(path, ns=(about.st_atime_ns, about.st_mtime_ns))


def replaced(path: Path) -> None:
    """Put another file of the same size and time into its place."""
    about, beside = path.stat(), path.with_suffix(".new")
    beside.write_bytes(flipped(path.read_bytes()))
    os.utime(beside, ns=(about.st_atime_ns, about.st_mtime_ns))
    os.replace(beside, path)


CHANGES = [in_place, replaced]


def test_it_is_unknown_until_it_is_read_then_known_to_every_process(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert read_header(file).contents == ""
    assert read_header(file).read_contents() == hashed(file)
    another_process(monkeypatch)
    reads = list[Path]()
    monkeypatch.setattr(contents, "digest_of", lambda *_: reads.append(file))
    assert read_header(file).contents == hashed(file) == read_header(file).read_contents()
    assert reads == []


@pytest.mark.parametrize("change", CHANGES)
def test_no_byte_changes_unseen(
    file: Path, change: Callable[[Path], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    old, header = hashed(file), read_header(file)
    header.read_contents()
    change(file)
    assert header.contents == old, "what was opened has not changed"
    assert read_header(file).contents == ""
    another_process(monkeypatch)
    assert read_header(file).contents == ""
    assert read_header(file).read_contents() == hashed(file) != old


@pytest.mark.parametrize("change", CHANGES)
def test_a_file_that_changed_since_it_was_opened_has_no_name(
    file: Path, change: Callable[[Path], None]
) -> None:
    header = read_header(file)
    change(file)
    with pytest.raises(ModelUnavailable, match="has changed since it was opened"):
        header.read_contents()
    assert header.contents == ""


def test_a_link_that_leads_elsewhere_now_is_another_file(file: Path, tmp_path: Path) -> None:
    other, link = tmp_path / "other.gguf", tmp_path / "link.gguf"
    other.write_bytes(flipped(file.read_bytes()))
    link.symlink_to(file)
    assert read_header(link).read_contents() == hashed(file)
    link.unlink()
    link.symlink_to(other)
    assert read_header(link).contents == ""
    assert read_header(link).read_contents() == hashed(other)


def test_each_part_of_a_split_model_counts(tmp_path: Path) -> None:
    parts = [tmp_path / f"m-0000{i}-of-00002.gguf" for i in (1, 2)]
    for part in parts:
        part.write_bytes(part.name.encode())
    first = contents.of_model(parts[0])
    assert contents.of_model(parts[0]) == first
    in_place(parts[1])
    assert contents.of_model(parts[0], most=3) is None
    assert contents.of_model(parts[0]) not in (None, first)
    parts[1].unlink()
    assert contents.of_model(parts[0]) is None


def test_a_change_right_after_it_was_read_is_seen(file: Path) -> None:
    """The clock of a file system ticks: two changes may have one time."""
    for _ in range(20):
        in_place(file)
        header = read_header(file)
        name = header.read_contents()
        assert name == hashed(file)
        in_place(file)
        assert read_header(file).contents != name


def test_reading_can_be_stopped_and_leaves_nothing(file: Path) -> None:
    def check() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        read_header(file).read_contents(check)
    assert read_header(file).contents == ""
    assert not (paths.cache_dir() / "contents.json").exists()


def test_who_waits_for_another_thread_can_be_stopped(file: Path) -> None:
    begun, go_on = threading.Event(), threading.Event()

    def holding() -> None:
        begun.set()
        assert go_on.wait(60)

    reading = threading.Thread(target=read_header(file).read_contents, args=[holding])
    reading.start()
    assert begun.wait(60)

    def check() -> None:
        raise InterruptedError

    with pytest.raises(InterruptedError):
        read_header(file).read_contents(check)
    go_on.set()
    reading.join(60)
    assert read_header(file).contents == hashed(file)


@pytest.mark.parametrize("text", [b"", b"{", b"[1]", b'[["a", [1, 2, 3], "b"]]'])
def test_a_damaged_index_costs_time_alone(file: Path, text: bytes) -> None:
    index = paths.cache_dir() / "contents.json"
    index.parent.mkdir(parents=True)
    index.write_bytes(text)
    assert read_header(file).read_contents() == hashed(file)


def test_copies_of_another_content_are_not_taken(file: Path) -> None:
    places = set()
    for _ in range(2):
        header = read_header(file)
        header.read_contents()
        places.add(trimmed.place(header))
        in_place(file)
    assert len(places) == 2


def _kept_for(header: GgufHeader, fingerprint: str) -> dict[str, Path]:
    name, cache = header.contents[:16], paths.cache_dir()
    kept = {
        "states of conversations": paths.states_dir() / f"{name}-1" / "server.a.state",
        "copy with fewer words or layers": pruned.folder() / f"{name}-without-1-2.gguf",
        "training of a head": cache / "training" / fingerprint / "card.json",
        "measurements": paths.profiles_dir() / "exactness" / f"{name}-2.json",
        "trained head": cache / "heads" / fingerprint / "eagle3-some.gguf",
    }
    for path in kept.values():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"12345")
    return kept


def test_what_belongs_to_a_model_is_what_was_kept_of_it_also_before_it_changed(file: Path) -> None:
    header = read_header(file)
    header.read_contents()
    in_place(file)
    kept = _kept_for(header, read_header(file).fingerprint)
    found = receipts.belongings(library.single(file))
    sizes = {kind: sum(map(receipts.bytes_of, some)) for kind, some in found.items()}
    assert sizes == dict.fromkeys(kept, 5)


def test_what_another_copy_needs_stays(file: Path, tmp_path: Path) -> None:
    header = read_header(file)
    header.read_contents()
    copy = tmp_path / "copy.gguf"
    copy.write_bytes(file.read_bytes())
    read_header(copy).read_contents()
    _kept_for(header, header.fingerprint)
    assert receipts.belongings(library.single(file)) == {}
    copy.unlink()
    assert "states of conversations" in receipts.belongings(library.single(file))
