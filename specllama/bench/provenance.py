"""What a figure was measured with: versions, files, machine, arguments."""

from __future__ import annotations

import hashlib
import os
import platform
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from specllama.interface import EngineInfo, ModelInfo


def provenance(
    info: EngineInfo, arguments: Sequence[str] | None = None, *, hashes: bool = True
) -> dict[str, Any]:
    """A JSON-ready block. Files are named without their folder; hashing reads them once."""
    from importlib.metadata import PackageNotFoundError, version

    import specllama

    versions = {"specllama": specllama.__version__, "python": platform.python_version()}
    for name in ("llama-cpp-python", "numpy"):
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            continue
    return {
        "when": datetime.now(UTC).isoformat(timespec="seconds"),
        "versions": versions,
        "machine": {
            "system": f"{platform.system()} {platform.release()}",
            "cpu": cpu_name(),
            "cores": _cores(),
        },
        "engine": {
            "device": info.device,
            "threads": info.threads,
            "flash_attn": info.flash_attn,
            "exactness": info.exactness,
        },
        "target": _model(info.target, hashes),
        "draft": None if info.draft is None else _model(info.draft, hashes),
        "arguments": list(sys.argv[1:] if arguments is None else arguments),
    }


def _model(model: ModelInfo, hashes: bool) -> dict[str, Any]:
    path = Path(model.path)
    return {
        "file": path.name,
        "name": model.name,
        "quantization": model.quantization,
        "n_params": model.n_params,
        "bytes": model.file_bytes,
        "sha256": model.sha256 or (file_hash(path) if hashes and path.is_file() else None),
    }


def file_hash(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def cpu_name() -> str:
    """The processor's marketing name where the system tells, else its architecture."""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def _cores() -> int:
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:
        return os.cpu_count() or 1
