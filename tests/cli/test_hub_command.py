"""``specllama hub`` on what is on disk; pulling is tested in tests/hub."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import ggufs
import pytest

from specllama import paths
from specllama.backend import this_machine
from specllama.cli import invoke
from specllama.models import receipts, refs

pytestmark = pytest.mark.usefixtures("nobody_else")


@pytest.fixture
def pulled(tmp_path: Path) -> Path:
    """A model in our own folder, with its receipt."""
    import hashlib

    path = paths.models_dir() / "maker" / "some-GGUF" / "some-Q4_0.gguf"
    path.parent.mkdir(parents=True)
    ggufs.write_llama(path, quant="Q4_0")
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    receipt = receipts.Receipt(
        "maker/some-GGUF", path.name, "c" * 40, path.stat().st_size, "sha256", digest
    )
    receipts.write_receipt(path, receipt)
    return path


def test_ls_lists_what_is_here(pulled: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert invoke(["hub", "ls"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split()[:2] == ["model", "params"]
    assert any("maker/some-GGUF:Q4_0" in line and "specllama" in line for line in lines)
    assert any(line.startswith("tiny-target") and "tiny-draft" in line for line in lines)


def test_ls_json(pulled: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert invoke(["hub", "ls", "--mine", "--json"]) == 0
    (entry,) = json.loads(capsys.readouterr().out)["models"]
    assert entry["ref"] == "maker/some-GGUF:Q4_0"
    assert entry["path"] == str(pulled)
    assert entry["quantization"] == "Q4_0"
    assert entry["architecture"] == "llama"
    assert entry["complete"] is True


def test_ls_of_a_folder_says_why_a_file_is_no_model(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "mix"
    folder.mkdir()
    ggufs.write_bert(folder / "embed.gguf")
    (folder / "page.gguf").write_text("<html>")
    (folder / "\x1b[31mred.gguf").write_text("x")
    assert invoke(["hub", "ls", str(folder)]) == 0
    out = capsys.readouterr().out
    assert "is an encoder" in out
    assert "is a web page" in out
    assert "\x1b" not in out


def test_ls_finds_what_the_loader_finds(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "a\u3000b"
    (folder / "below").mkdir(parents=True)
    parts = ggufs.write_split(folder / "below" / "big-Q4_0.gguf")
    (folder / "._x.gguf").write_bytes(b"junk")
    for named in (folder, *parts):
        assert invoke(["hub", "ls", str(named), "--json"]) == 0
        (entry,) = json.loads(capsys.readouterr().out)["models"]
        assert entry["path"] == str(refs.resolve(str(named))) == str(parts[0])
    assert invoke(["hub", "ls", str(folder / "none")]) == 3
    assert "no such file" in capsys.readouterr().err


def test_path(pulled: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert invoke(["hub", "path"]) == 0
    assert capsys.readouterr().out.strip() == str(paths.models_dir())
    assert invoke(["hub", "path", "maker/some-GGUF"]) == 0
    assert capsys.readouterr().out.strip() == str(pulled)
    assert invoke(["hub", "path", "nobody/nothing"]) == 3
    assert "specllama hub pull nobody/nothing" in capsys.readouterr().err


def test_verify(pulled: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert invoke(["hub", "verify"]) == 0
    assert capsys.readouterr().out.splitlines()[-1].split()[0] == "ok"
    data = bytearray(pulled.read_bytes())
    data[-10] ^= 1
    pulled.write_bytes(data)
    assert invoke(["hub", "verify", "maker/some-GGUF", "--json"]) == 3
    captured = capsys.readouterr()
    (verdict,) = json.loads(captured.out)["files"]
    assert verdict["status"] == "damaged"
    assert "1 of 1 files" in captured.err


def test_verify_knows_content_addressed_names(
    pulled: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    import hashlib

    repo = tmp_path / "user/.cache/huggingface/hub/models--other--thing-GGUF"
    name = hashlib.sha256(pulled.read_bytes()).hexdigest()
    (repo / "blobs").mkdir(parents=True)
    shutil.copy(pulled, repo / "blobs" / name)
    snapshot = repo / "snapshots" / ("d" * 40)
    snapshot.mkdir(parents=True)
    (snapshot / "thing-Q4_0.gguf").symlink_to(repo / "blobs" / name)
    assert invoke(["hub", "verify", "other/thing-GGUF"]) == 0
    assert "ok" in capsys.readouterr().out


def test_rm_deletes_ours_and_only_ours(
    pulled: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pulled.with_name(f"{pulled.name}.abc.part").write_bytes(b"x")
    assert invoke(["hub", "rm", "maker/some-GGUF"]) == 2  # nobody to ask
    assert pulled.exists()
    assert invoke(["hub", "rm", "-y", "maker/some-GGUF"]) == 0
    assert not pulled.parent.exists()
    assert paths.models_dir().exists()
    capsys.readouterr()

    foreign = ggufs.write_llama(tmp_path / "mine.gguf")
    assert invoke(["hub", "rm", "-y", str(foreign)]) == 2
    assert foreign.exists()
    assert "belongs to another tool" in capsys.readouterr().err
    assert invoke(["hub", "rm", "-y", "tiny-target"]) == 2


def test_rm_does_not_follow_a_link_out_of_our_folder(pulled: Path, tmp_path: Path) -> None:
    outside = ggufs.write_llama(tmp_path / "outside-Q8_0.gguf")
    pulled.with_name("leak-Q8_0.gguf").symlink_to(outside)
    assert invoke(["hub", "rm", "-y", "maker/some-GGUF:Q8_0"]) == 3  # it is not listed at all
    assert outside.exists()


def test_a_pair_is_listed_with_the_head_that_is_here(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """SmolLM2's head ships: it was listed with n-grams."""
    assert invoke(["hub", "pairs", "--json"]) == 0
    method = {one["name"]: one["method"] for one in json.loads(capsys.readouterr().out)["pairs"]}
    assert method["smollm2-135m"] == "eagle3"
    assert method["llama3-3b"] == "ngram"
    assert invoke(["hub", "pairs", "smollm2-135m"]) == 0
    said = capsys.readouterr().out
    assert "an EAGLE-3 head" in said
    assert "with drafting: not measured" in said


def test_pairs(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert invoke(["hub", "pairs", "--json"]) == 0
    every = json.loads(capsys.readouterr().out)["pairs"]
    machine = this_machine.this_machine()
    monkeypatch.setattr(this_machine, "this_machine", lambda: replace(machine, memory=memory))
    memory = 12e9
    assert invoke(["hub", "pairs", "--fits", "--json"]) == 0
    some = json.loads(capsys.readouterr().out)["pairs"]
    assert 0 < len(some) < len(every)
    assert all(entry["fits"] in ("yes", "tight") for entry in some)
    assert all(entry["checked"] is False for entry in every)
    memory = 0.5e9
    assert invoke(["hub", "pairs", "--fits"]) == 0
    assert "the bundled pair does" in capsys.readouterr().err


def test_offline_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert invoke(["hub", "search", "qwen"]) == 3
    assert "switched off" in capsys.readouterr().err


def test_nonsense_references(capsys: pytest.CaptureFixture[str]) -> None:
    assert invoke(["hub", "pull", "qwen3-8c"]) == 2
    assert "qwen3-8b" in capsys.readouterr().err
    assert invoke(["hub", "pull", "tiny"]) == 2
    assert "ships with specllama" in capsys.readouterr().err
