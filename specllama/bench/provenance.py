"""The circumstances of a figure: versions, files, machine, arguments."""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from specllama.backend.devices import cpu_name
from specllama.errors import ModelUnavailable
from specllama.interface import EngineInfo, ModelInfo
from specllama.models.receipts import sha256_of
from specllama.store.rounds import package_versions


def provenance(
    info: EngineInfo, arguments: Sequence[str] | None = None, *, hashes: bool = True
) -> dict[str, Any]:
    """Return a block for JSON. Files are named without their folder; hashing reads each once."""
    return {
        "when": datetime.now(UTC).isoformat(timespec="seconds"),
        "versions": package_versions(),
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
        "repacked": model.repacked,
        "sha256": model.sha256 or (_hash(path) if hashes else None),
    }


def _hash(path: Path) -> str | None:
    try:
        return sha256_of(path)
    except ModelUnavailable:  # replaced or deleted since it was loaded
        return None


def _cores() -> int:
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:
        return os.cpu_count() or 1
