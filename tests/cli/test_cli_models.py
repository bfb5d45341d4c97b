"""The command line on real model files: what is wrong with a file, and runs of the bundled pair."""

import subprocess
import sys
from pathlib import Path

import ggufs
import pytest

import specllama.cli
from specllama.paths import bundled_dir
from specllama.store.rounds import list_runs, read_run

pytestmark = pytest.mark.e2e


@pytest.fixture(autouse=True)
def one_thread(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy machine two threads of so small a model mostly wait for each other."""
    monkeypatch.setenv("SPECLLAMA_THREADS", "1")


def run(*args: str, stdin: bytes = b"") -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(
        [sys.executable, "-m", "specllama", *args], input=stdin, capture_output=True, timeout=120
    )


def invoke(capsys: pytest.CaptureFixture[str], *args: str) -> tuple[int, str, str]:
    capsys.readouterr()
    code = specllama.cli.invoke(args)
    out, err = capsys.readouterr()
    return code, out, err


@pytest.fixture
def target(tmp_path: Path) -> Path:
    path = tmp_path / "target.gguf"
    ggufs.write_llama(path)
    return path


def truncated(path: Path) -> None:
    ggufs.write_llama(path)
    path.write_bytes(path.read_bytes()[:200_000])


def lying(path: Path) -> None:
    ggufs.write_llama(path)
    data = bytearray(path.read_bytes())
    data[8:16] = (2**62).to_bytes(8, "little")  # number of tensors
    path.write_bytes(data)


BROKEN = {
    "missing": (lambda path: None, 3, "no such file"),
    "text": (lambda path: path.write_text("hello " * 100), 5, "not a GGUF"),
    "empty": (lambda path: path.write_bytes(b""), 5, ""),
    "truncated": (truncated, 5, ""),
    "lying": (lying, 5, ""),
    "embedding": (ggufs.write_bert, 5, ""),
    "projector": (ggufs.write_clip, 5, ""),
    "adapter": (ggufs.write_lora, 5, ""),
}


@pytest.mark.parametrize("case", BROKEN)
def test_files_that_are_no_model(case: str, tmp_path: Path, capsys) -> None:
    make, expected, words = BROKEN[case]
    path = tmp_path / f"{case}.gguf"
    make(path)
    code, out, err = invoke(capsys, "run", "-m", str(path), "hello")
    assert (code, out) == (expected, ""), err
    (message, *hints) = err.splitlines()
    assert message.startswith("error: ")
    assert words in message
    assert f"{case}.gguf" in message
    assert all(hint.startswith("  ") for hint in hints)
    assert "Traceback" not in err


def test_a_folder_is_no_model(tmp_path: Path, capsys) -> None:
    code, _, err = invoke(capsys, "run", "-m", str(tmp_path), "hello")
    assert code in (3, 5)
    assert "Traceback" not in err


def test_a_draft_with_another_tokenizer(target: Path, tmp_path: Path, capsys) -> None:
    draft = tmp_path / "draft.gguf"
    ggufs.write_spm(draft)
    code, out, err = invoke(capsys, "run", "-m", str(target), "-d", str(draft), "hello")
    assert (code, out) == (4, "")
    assert "token" in err


def test_prompts_that_do_not_fit(target: Path, capsys) -> None:
    long = "word " * 600
    code, out, err = invoke(capsys, "run", "-m", str(target), "-c", "256", long)
    assert (code, out) == (2, "")
    assert err.startswith("error: the prompt of ")
    assert "context size of 256" in err
    code, out, err = invoke(capsys, "run", "-m", str(target), "-c", "256", long * 5)
    assert (code, out) == (2, "")
    assert err.startswith("error: a text of 15000 bytes ")  # too long for any tokens: unread
    assert "context size of 256" in err
    megabyte = run("run", "-m", str(target), "-", stdin=b"model token " * 90_000)
    assert megabyte.returncode == 2
    assert megabyte.stderr.startswith(b"error: ")
    assert b"Traceback" not in megabyte.stderr


def test_the_default_model_is_named_once(capsys) -> None:
    code, out, err = invoke(capsys, "run", "-n", "12", "Hi")
    assert code == 0
    assert out.strip()
    assert err.splitlines()[0] == "no model given: using the bundled tiny pair (choose one with -m)"
    said = [line for line in err.splitlines() if "measuring" not in line]  # told where it is slow
    assert len(said) == 3  # behind it the figures and the verdict
    header = read_run(list_runs()[0]).header
    assert len(header["target"]["sha256"]) == 64
    assert Path(header["target"]["path"]).parent.samefile(bundled_dir())
