"""``specllama convert`` from the command line."""

import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ggufs import write_llama

from specllama.cli import invoke
from specllama.models.gguf import read_header
from specllama.models.medusa_file import read_facts


@pytest.fixture
def target(tmp_path: Path) -> Path:
    path = tmp_path / "target.gguf"
    write_llama(path, width=64)
    return path


def checkpoint(folder: Path, rows: int, width: int = 64) -> Path:
    """Two heads in the public Medusa-1 layout, all zero."""
    folder.mkdir()
    header: dict[str, Any] = {}
    at = 0
    for h in range(2):
        for name, shape in (
            ("0.linear.weight", [width, width]),
            ("0.linear.bias", [width]),
            ("1.weight", [rows, width]),
        ):
            size = 2 * int(np.prod(shape))
            header[f"{h}.{name}"] = {
                "dtype": "F16",
                "shape": shape,
                "data_offsets": [at, at + size],
            }
            at += size
    text = json.dumps(header).encode()
    path = folder / "medusa_lm_head.safetensors"
    path.write_bytes(struct.pack("<Q", len(text)) + text + bytes(at))
    return folder


def test_convert(target: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = checkpoint(tmp_path / "heads", read_header(target).vocab_size)
    out = tmp_path / "heads.gguf"
    arguments = ["convert", str(source), str(out), "--target", str(target)]
    assert invoke([*arguments, "--json"]) == 0
    told = capsys.readouterr()
    assert json.loads(told.out)["head"] == "medusa"
    assert f"--head {out}" in told.err
    assert read_facts(read_header(out)).own_output == (True, True)
    assert invoke(arguments) == 2  # never overwritten
    assert "exists" in capsys.readouterr().err


def test_what_cannot_be_converted_says_why(
    target: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = read_header(target).vocab_size
    page = tmp_path / "page.safetensors"
    page.write_text("<html>")
    cases = {
        4: (checkpoint(tmp_path / "wide", rows, width=96), "width 96"),
        5: (page, "safetensors"),
        3: (tmp_path / "nowhere", "there is no"),
    }
    for code, (source, word) in cases.items():
        out = tmp_path / f"{code}.gguf"
        assert invoke(["convert", str(source), str(out), "-m", str(target)]) == code
        told = capsys.readouterr()
        assert word in told.err
        assert "Traceback" not in told.err
        assert not out.exists()
