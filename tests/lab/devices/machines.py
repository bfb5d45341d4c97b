"""The command line, in processes of their own, with the libraries of LLAMA_CPP_LIB."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FOLDER = os.environ.get("LLAMA_CPP_LIB", "")
# what llama.cpp must leave alone with Mesa's software driver
SOFTWARE_VULKAN = {
    "GGML_VK_VISIBLE_DEVICES": "0",
    **{f"GGML_VK_DISABLE_{name}": "1" for name in ("F16", "INTEGER_DOT_PRODUCT", "FUSION", "MMVQ")},
}


@dataclass(frozen=True)
class Ended:
    """What a command left behind."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.out.splitlines()]


class Machine:
    """The command line with the libraries of LLAMA_CPP_LIB."""

    def __init__(self, home: Path, **variables: str) -> None:
        given = {k: v for k, v in os.environ.items() if not k.startswith("SPECLLAMA_")}
        self.env = {
            **given,
            "LLAMA_CPP_LIB_PATH": FOLDER,
            "SPECLLAMA_HOME": str(home),
            "NO_COLOR": "1",
            **variables,
        }

    def start(self, *args: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-P", "-m", "specllama", *args],
            env=self.env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def __call__(self, *args: str) -> Ended:
        process = self.start(*args)
        out, err = process.communicate(timeout=280)
        return Ended(process.returncode, out, err)
