"""The comparison with llama.cpp's own prompts (make families), on a folder made here."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import ggufs

FAMILIES = Path(__file__).parent / "families"


def families(folder: Path) -> subprocess.CompletedProcess[str]:
    environment = {k: v for k, v in os.environ.items() if k != "LLAMA_SERVER"}
    return subprocess.run(
        [sys.executable, FAMILIES, folder],
        capture_output=True,
        text=True,
        env=environment,
        encoding="utf-8",
        check=False,
    )


def test_a_folder_is_compared(tmp_path: Path) -> None:
    (tmp_path / "chatml.jinja").write_text(ggufs.CHATML)
    (tmp_path / "fails.jinja").write_text("{{ raise_exception('never') }}")
    tokens, types, merges = ggufs.bpe_tokens()
    ggufs.write_vocab_only(
        tmp_path / "ggml-vocab-tiny.gguf",
        tokens,
        token_type=types,
        merges=merges,
        eos_token_id=2,
        bos_token_id=0,
    )
    done = families(tmp_path)
    assert done.returncode == 0, done.stderr
    assert "2 templates, 1 vocabularies" in done.stdout
    assert "no llama-server was built there" in done.stdout
    assert "15 equal     0 differs    18 refused     3 guarded" in done.stdout
    assert "18 × the model's chat template failed (never)" in done.stdout


def test_an_empty_folder_is_no_comparison(tmp_path: Path) -> None:
    done = families(tmp_path)
    assert done.returncode == 2
    assert "holds no chat templates" in done.stderr
