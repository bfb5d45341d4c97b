"""What earlier runs on this machine measured of a pair that is not loaded yet."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from specllama.engine.profiles import SCHEMA
from specllama.paths import profiles_dir
from specllama.speculative.policy.learned import Learned
from specllama.store import profiles as store

if TYPE_CHECKING:
    from specllama.models.gguf import GgufHeader

ENOUGH_TESTED = 200  # tokens of a draft model, for a mean that says something


def measured_acceptance(
    target: GgufHeader, draft: GgufHeader, folder: Path | None = None
) -> float | None:
    """How often the draft model's tokens were accepted, wherever its layers were.

    None where too few were tested on this machine.
    """
    tested = accepted = 0.0
    for path in sorted((folder or profiles_dir()).glob("*.json")):
        try:
            data = store.read(path)
            if data is None or data["schema"] != SCHEMA:
                continue
            pair = data["pair"]
            if not _is_of(pair["target"], target) or not _is_of(pair["draft"], draft):
                continue
            bands = msgspec.convert(data["bands"], dict[str, Learned], str_keys=True)
        except (OSError, *store.DAMAGE):
            continue
        for band in bands.values():
            known = band.sources.get("draft")
            if known is not None:
                tested += known.labels
                accepted += known.labels * known.mean
    return accepted / tested if tested >= ENOUGH_TESTED else None


def _is_of(key: str, header: GgufHeader) -> bool:
    """Whether a key of ``_model_key`` is this file's."""
    beginning = f"{header.name} {header.quantization} "
    return key.startswith(beginning) and key.endswith(f" {header.file_bytes}")
