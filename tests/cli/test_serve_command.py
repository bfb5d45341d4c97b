"""``specllama serve`` before it listens."""

from __future__ import annotations

import importlib.util
import re
import socket
from pathlib import Path
from typing import Any

import pytest

from specllama.cli import invoke
from specllama.events import Notice


def test_what_is_missing_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    real = importlib.util.find_spec

    def found(name: str, *more: Any) -> Any:
        return None if name == "uvicorn" else real(name, *more)

    monkeypatch.setattr(importlib.util, "find_spec", found)
    assert invoke(["serve"]) == 1
    error, hint = capsys.readouterr().err.splitlines()
    assert "uvicorn" in error
    assert re.search(r'pip install "starlette[^"]*" "uvicorn[^"]*"$', hint)


def test_what_a_load_measures_is_said(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from specllama.server import server_process

    def run(service: Any, listening: socket.socket, **more: Any) -> None:
        listening.close()
        hear = service.models.first.queue.host.on_event
        if hear is not None:
            hear(Notice("measuring whether passes are exact", topic="exactness"))

    monkeypatch.setattr(server_process, "run", run)
    assert invoke(["serve", "--port", "0"]) == 0
    assert "measuring whether passes are exact" in capsys.readouterr().err
    assert invoke(["serve", "--port", "0", "-q"]) == 0
    assert "measuring" not in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--host", "0.0.0.0"], "--api-key-file"),
        (["--experiment", "auto=50"], "add up to 100"),
        (["--experiment", "often=100"], "cannot read the experiment"),
        (["--api-key-file", "KEYS"], "holds no key"),
    ],
)
def test_what_is_refused(
    flags: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    keys = tmp_path / "keys"
    keys.write_text("# none\n\n", "utf-8")
    flags = [str(keys) if flag == "KEYS" else flag for flag in flags]
    assert invoke(["serve", "--port", "0", *flags]) == 2
    assert said in capsys.readouterr().err
