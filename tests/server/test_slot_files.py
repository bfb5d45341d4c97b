"""llama-server's slots: saved to a file, restored from it, erased."""

from __future__ import annotations

import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from servers import Serving, serving, table

PROMPT = "the rain in spain stays mainly in the plain, and so does the sun. "


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("slots")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, folder: Path) -> Iterator[Serving]:
    model = table(tmp_path_factory.mktemp("model"), kv_disk="1G", kv_ram=0)
    with serving(model, slot_folder=folder) as found:
        yield found


def write(server: Serving, prompt: str, **more: Any) -> dict[str, Any]:
    body = {"prompt": prompt, "n_predict": 12, "seed": 3, "ignore_eos": True, **more}
    answer = server.post("/completion", body)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def act(server: Serving, action: str, slot: object = 1, **body: Any) -> Any:
    return server.post(f"/slots/{slot}?action={action}", body)


def test_a_slot_is_saved_restored_and_erased(server: Serving, folder: Path) -> None:
    first = write(server, PROMPT, id_slot=1)
    saved = act(server, "save", filename="one.bin").json()
    n = saved["n_saved"]
    assert n >= len(PROMPT)
    assert saved["filename"] == "one.bin"
    assert saved["id_slot"] == 1
    assert saved["n_written"] == (folder / "one.bin").stat().st_size
    assert saved["timings"]["save_ms"] > 0
    assert stat.S_IMODE((folder / "one.bin").stat().st_mode) == 0o600

    again = PROMPT + first["content"]
    on = write(server, again, id_slot=1)
    assert act(server, "erase").json()["n_erased"] > n
    assert write(server, again, id_slot=1)["content"] == on["content"]
    assert act(server, "erase").json()["id_slot"] == 1

    restored = act(server, "restore", slot=0, filename="one.bin").json()
    assert restored["n_restored"] == n
    assert restored["n_read"] == saved["n_written"]
    assert restored["timings"]["restore_ms"] > 0
    assert write(server, again, id_slot=0)["content"] == on["content"]
    assert act(server, "erase", slot=0).json()["n_erased"] > n
    assert act(server, "erase", slot=0).json()["n_erased"] == 0


@pytest.mark.parametrize(
    ("slot", "action", "name", "word"),
    [
        ("x", "save", "a", "Invalid slot ID"),
        ("-1", "save", "a", "Invalid slot ID"),
        ("99999", "save", "a", "Invalid slot ID"),
        ("0", "swap", "a", "Invalid action"),
        ("0", "", "a", "Invalid action"),
        ("0", "save", "", "Invalid filename"),
        ("0", "save", "../up", "Invalid filename"),
        ("0", "save", "/etc/passwd", "Invalid filename"),
        ("0", "save", "a/b", "Invalid filename"),
        ("0", "save", ".", "Invalid filename"),
        ("0", "save", "a\x00b", "Invalid filename"),
        ("0", "save", "a ", "Invalid filename"),
        ("0", "restore", "none", "Unable to restore"),
        ("0", "restore", "torn", "Unable to restore"),
        ("0", "restore", "foreign", "Unable to restore"),
    ],
)
def test_what_cannot_be_is_refused(
    server: Serving, folder: Path, slot: str, action: str, name: str, word: str
) -> None:
    write(server, PROMPT, id_slot=0)
    assert act(server, "save", slot=0, filename="whole").status_code == 200
    (folder / "torn").write_bytes((folder / "whole").read_bytes()[:-9])
    (folder / "foreign").write_bytes(b"GGUF" * 99)
    answer = act(server, action, slot=slot, filename=name)
    assert answer.status_code == 400
    assert word in answer.json()["error"]["message"]
    assert write(server, PROMPT)["stop"]


def test_without_a_folder_there_are_no_actions(tmp_path: Path) -> None:
    with serving(table(tmp_path)) as found:
        answer = act(found, "save", filename="a")
    assert answer.status_code == 501
    assert "--slot-save-path" in answer.json()["error"]["message"]
