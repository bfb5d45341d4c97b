"""The systemd unit of server.md: a failure that stays is not tried again for ever."""

from __future__ import annotations

import re
from collections.abc import Iterator
from configparser import ConfigParser
from pathlib import Path

import pytest

from specllama.cli import invoke
from specllama.errors import SpecllamaError

PAGE = Path(__file__).parents[2] / ".github" / "server.md"
PASSING = {1, 130}  # failed for once, or ended by somebody


@pytest.fixture(scope="module")
def unit() -> ConfigParser:
    (text,) = re.findall(r"```ini\n(\[Unit\].*?)```", PAGE.read_text("utf-8"), re.DOTALL)
    found = ConfigParser()
    found.optionxform = str  # type: ignore[assignment,method-assign]
    found.read_string(text)
    return found


def _kinds(cls: type[SpecllamaError] = SpecllamaError) -> Iterator[type[SpecllamaError]]:
    yield cls
    for below in cls.__subclasses__():
        yield from _kinds(below)


def test_the_unit_names_each_exit_code_that_does_not_mend_itself(unit: ConfigParser) -> None:
    named = {int(code) for code in unit["Service"]["RestartPreventExitStatus"].split()}
    assert named == {kind.exit_code for kind in _kinds()} - PASSING


def test_whatever_else_fails_at_each_start_is_given_up(unit: ConfigParser) -> None:
    """So many starts, one behind the other, happen within the time in which they are counted."""
    starts = int(unit["Unit"]["StartLimitBurst"])
    pauses = float(unit["Service"]["RestartSec"]) * starts
    assert starts > 1
    assert pauses < float(unit["Unit"]["StartLimitIntervalSec"]) / 2


@pytest.mark.parametrize("damage", ["of no model", "cut"])
def test_a_damaged_model_ends_serve_with_a_code_that_the_unit_names(
    unit: ConfigParser, damage: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "m.gguf"
    whole = (PAGE.parents[1] / "models/tiny/tiny-target-q4_0.gguf").read_bytes()
    file.write_bytes(whole[: len(whole) // 2] if damage == "cut" else b"no model" * 100)
    code = invoke(["serve", "-m", str(file), "--port", "0"])
    assert str(code) in unit["Service"]["RestartPreventExitStatus"].split(), capsys.readouterr().err
