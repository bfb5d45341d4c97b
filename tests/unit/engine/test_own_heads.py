"""Heads that are named after their target: found, left out with a reason, never in the way."""

from pathlib import Path

import pytest
from eagle_files import write_eagle3
from ggufs import write_llama

from specllama.engine.target_heads import known_heads, read_heads, survey
from specllama.models.companions import own_place
from specllama.models.gguf import GgufHeader, read_header
from specllama.models.refs import bundled


@pytest.fixture
def target(tmp_path: Path) -> GgufHeader:
    path = tmp_path / "target.gguf"
    write_llama(path, blocks=8)
    return read_header(path)


def eagle3(target: GgufHeader) -> tuple[bool, str]:
    way = next(one for one in survey(target) if one.name == "eagle3")
    return way.available, way.reason


def test_a_head_beside_its_target_is_found(target: GgufHeader) -> None:
    assert not eagle3(target)[0]
    write_eagle3(target.path.with_name("eagle3-other.gguf"))
    assert not eagle3(target)[0]
    place = own_place(target, "eagle3")
    assert place == target.path.with_name("eagle3-target.gguf")
    write_eagle3(place)
    assert eagle3(target) == (True, "")


def test_a_head_in_the_cache_is_found(target: GgufHeader, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.access", lambda path, mode: False)
    place = own_place(target, "eagle3")
    assert place.parent != target.path.parent
    place.parent.mkdir(parents=True)
    write_eagle3(place)
    assert eagle3(target) == (True, "")


def test_one_that_does_not_fit_is_left_out_with_the_reason(target: GgufHeader) -> None:
    write_eagle3(own_place(target, "eagle3"), target_width=32)
    available, why = eagle3(target)
    assert not available
    assert "made for another target" in why


def test_one_that_cannot_be_read_is_not_in_the_way(
    target: GgufHeader, caplog: pytest.LogCaptureFixture
) -> None:
    own_place(target, "eagle3").write_bytes(b"GGUF and nothing else")
    assert not eagle3(target)[0]
    assert "eagle3-target.gguf" in caplog.text
    own_place(target, "eagle3").unlink()
    write_llama(own_place(target, "eagle3"))  # a model of that name is no head
    assert [*known_heads(target)] == []


def test_ones_own_head_comes_before_the_one_that_ships() -> None:
    shipped = read_header(bundled("tiny-target"))
    file = shipped.path.with_name("tiny-eagle3-q8_0.gguf")
    assert read_heads(shipped, ())[0]["eagle3"].path == file
    place = own_place(shipped, "eagle3")
    place.parent.mkdir(parents=True)
    place.write_bytes(file.read_bytes())
    assert read_heads(shipped, ())[0]["eagle3"].path == place
