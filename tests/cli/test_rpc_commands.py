"""``--rpc`` and ``specllama rpc-worker``: what is warned of, and refused."""

from __future__ import annotations

import json
import socket

import pytest

from specllama.cli import invoke


def test_a_worker_on_another_machine_is_warned_of(capsys: pytest.CaptureFixture[str]) -> None:
    command = ["run", "-m", "no-such-file.gguf", "Hi"]
    assert invoke([*command, "--rpc", "10.0.0.7:50052"]) == 3
    assert "without a password" in capsys.readouterr().err
    assert invoke([*command, "--rpc", "localhost:50052"]) == 3
    assert "without a password" not in capsys.readouterr().err


def test_a_worker_listens_to_this_machine_only(capsys: pytest.CaptureFixture[str]) -> None:
    assert invoke(["rpc-worker", "--host", "10.0.0.7"]) == 2
    assert "SSH tunnel" in capsys.readouterr().err


def test_doctor_says_which_worker_is_missing(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    command = ["doctor", "--rpc", f"127.0.0.1:{port}", "-m", "tiny", "--json"]
    assert invoke(command) == 1
    checks = json.loads(capsys.readouterr().out)["checks"]
    assert [check["name"] for check in checks if check["status"] == "bad"] == ["workers"]
