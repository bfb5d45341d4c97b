"""Every method with a file that does not belong to the target: a sentence and exit code 4.

A check that is missing would not raise: llama.cpp would end the process of the tests.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from eagle_files import write_eagle3
from ggufs import CONTROL, NORMAL, write_llama
from ggufs_gemma4 import write_assistant, write_gemma4
from ggufs_nextn import write_nextn

from specllama.cli import invoke
from specllama.models.gguf import read_header
from specllama.models.medusa_file import vocabulary_digest, write_heads
from specllama.models.refs import resolve

pytestmark = pytest.mark.e2e

TARGET = resolve("tiny-target")
SHARED = 0.8  # of the tokens of a draft model that is still too different


def tokens_of(path: Path) -> list[str]:
    return [text.decode("utf-8", "replace") for text in read_header(path).token_bytes]


def renamed(tokens: Sequence[str], share: float) -> list[str]:
    """The same list, the last ``1 - share`` of it with other texts."""
    kept = int(len(tokens) * share)
    return [*tokens[:kept], *(f"other{i}" for i in range(kept, len(tokens)))]


def write_medusa(path: Path, **changes: Any) -> Path:
    header = read_header(TARGET)
    options: dict[str, Any] = {
        "name": path.stem,
        "heads": 2,
        "blocks": 0,
        "width": header.embedding_length,
        "vocab": header.vocab_size,
        "vocabulary": vocabulary_digest(header),
    }
    options |= changes
    eye = np.eye(options["width"], dtype=np.float32)
    write_heads(path, {f"head.{h}.proj.weight": eye for h in range(2)}, **options)
    return path


def write_eagle(path: Path, *, width: int | None = None, **more: Any) -> Path:
    """A head with random weights; sound, unless for another target."""
    own = read_header(TARGET).embedding_length if width is None else width
    given = {"layers": (1, 3, 5), "tokens": tokens_of(TARGET), **more}
    return write_eagle3(path, width=own, target_width=own, **given)


def write_draft(path: Path, share: float) -> Path:
    """A random draft model that shares this much of the target's vocabulary."""
    header = read_header(TARGET)
    types = [CONTROL if kind == CONTROL else NORMAL for kind in header.token_types()]
    merges = [m.decode() for m in header.array("tokenizer.ggml.merges")]
    return write_llama(
        path, tokens=renamed(tokens_of(TARGET), share), types=types, merges=merges, blocks=1
    )


Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(capfd: pytest.CaptureFixture[str]) -> Run:
    def run(*args: str) -> tuple[int, str, str]:
        more = ("--threads", "1", "--max-tokens", "16", "--seed", "1", "Hi there")
        return invoke(["run", *args, *more]), *capfd.readouterr()

    return run


# name -> (words of the error, arguments for a folder)
WRONG: dict[str, tuple[str, Callable[[Path], list[str]]]] = {
    "mtp, no heads": ("no NextN layers", lambda p: ["-m", "tiny", "--proposer", "mtp"]),
    "mtp, two layers": (
        "this file has 2",
        lambda p: ["-m", str(write_nextn(p / "two.gguf", nextn=2)), "--proposer", "mtp"],
    ),
    "eagle3, width": ("another target", lambda p: eagle(write_eagle(p / "head.gguf", width=128))),
    "eagle3, layers": (
        "another target",
        lambda p: eagle(write_eagle(p / "head.gguf", layers=(2, 8, 60))),
    ),
    "eagle3, fewer tokens": (
        "another target",
        lambda p: eagle(write_eagle(p / "head.gguf", tokens=tokens_of(TARGET)[:-64])),
    ),
    "eagle3, other tokens": (
        "another text",
        lambda p: eagle(write_eagle(p / "head.gguf", tokens=renamed(tokens_of(TARGET), SHARED))),
    ),
    "eagle3, a target that gives no states away": (
        "does not expose the layer inputs of qwen2",
        lambda p: no_hook(p),
    ),
    "medusa, width": ("width", lambda p: medusa(write_medusa(p / "head.gguf", width=128))),
    "medusa, tokens": ("tokens", lambda p: medusa(write_medusa(p / "head.gguf", vocab=4000))),
    "medusa, other tokens": (
        "different tokens",
        lambda p: medusa(write_medusa(p / "head.gguf", vocabulary="0" * 64)),
    ),
    "mtp, an assistant of another target": (
        "assistants belong to gemma4",
        lambda p: ["-m", "tiny", "--head", str(write_assistant(p / "a.gguf"))],
    ),
    "mtp, an assistant of other keys": (
        "reads 4 keys of width 64",
        lambda p: gemma(p, {"gemma4-assistant.attention.head_count_kv": [4, 2, 1]}),
    ),
    "mtp, an assistant of another width": (
        "hidden states of width 96",
        lambda p: gemma(p, {"gemma4-assistant.embedding_length_out": 96}),
    ),
    "a head that is a model": ("no drafting head", lambda p: medusa(resolve("tiny-draft"))),
    "draft, 80 % of the vocabulary": (
        "of 4,096 ids mean another text",
        lambda p: ["-m", "tiny-target", "-d", str(write_draft(p / "draft.gguf", SHARED))],
    ),
}


def eagle(path: Path) -> list[str]:
    return ["-m", "tiny", "--head", str(path), "--proposer", "eagle3"]


def no_hook(folder: Path) -> list[str]:
    target = write_llama(folder / "q.gguf", architecture="qwen2", blocks=4)
    head = write_eagle(folder / "h.gguf", width=64, layers=(1, 2, 3), tokens=tokens_of(target))
    return ["-m", str(target), "--head", str(head), "--proposer", "eagle3"]


def gemma(folder: Path, keys: dict[str, Any]) -> list[str]:
    target = write_gemma4(folder / "target.gguf")
    head = write_assistant(folder / "assistant.gguf", keys=keys)
    return ["-m", str(target), "-c", "256", "--head", str(head), "--proposer", "mtp"]


def medusa(path: Path) -> list[str]:
    return ["-m", "tiny", "--head", str(path), "--proposer", "medusa"]


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_file_ends_with_a_sentence_and_exit_code_4(
    case: str, run: Run, tmp_path: Path
) -> None:
    words, make = WRONG[case]
    code, out, err = run(*make(tmp_path))
    assert code == 4, err
    assert out == ""
    said = [line for line in err.splitlines() if not line.startswith("measuring whether")]
    assert said[0].startswith("error: ")  # a busy machine says first what it measures
    assert words in err
    assert "Traceback" not in err


def test_a_head_is_no_draft_model(run: Run, tmp_path: Path) -> None:
    """It is of another kind, so it cannot be loaded at all: exit code 5."""
    code, _, err = run("-m", "tiny-target", "-d", str(write_eagle(tmp_path / "h.gguf")))
    assert code == 5, err
    assert "EAGLE-3 head" in err
    assert "Traceback" not in err


def test_the_same_files_are_taken_where_they_belong(run: Run, tmp_path: Path) -> None:
    """What is refused above is refused for what is wrong with it, not for being made here."""
    for args in (
        eagle(write_eagle(tmp_path / "eagle.gguf")),
        medusa(write_medusa(tmp_path / "medusa.gguf")),
        ["-m", str(write_nextn(tmp_path / "one.gguf")), "-c", "256", "--proposer", "mtp"],
        gemma(tmp_path, {}),
        ["-m", "tiny-target", "-d", str(write_draft(tmp_path / "draft.gguf", 1.0))],
    ):
        code, _, err = run(*args)
        assert code == 0, err
