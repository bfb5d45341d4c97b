"""The measurements of a model file on this machine, kept between runs.

A verdict belongs to one file, one build of llama.cpp, one machine and the settings that choose
kernels; anything else is measured anew. One small JSON file per verdict.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from specllama.files import DAMAGE, read_json
from specllama.models.contents import SHORT

if TYPE_CHECKING:
    from specllama.models.gguf import GgufHeader

logger = logging.getLogger("specllama.backend.verdicts")

Verdict = TypeVar("Verdict", bound=msgspec.Struct)


def circumstances(header: GgufHeader) -> dict[str, Any]:
    """Describe the contents of the file ("" if they were not read), the build and the machine, as
    plain values."""
    return {"file": header.contents, **here()}


def here() -> dict[str, Any]:
    """Describe the build and the machine."""
    from specllama.backend import devices

    build = devices.build_info()
    return {
        "build": [build.binding, *build.backends, *build.features, *devices.library_files()],
        "machine": [
            devices.cpu_name(),
            devices.cpu_features(),
            *(d.description for d in devices.gpus(devices.devices())),
        ],
    }


def kept(
    schema: str, key: Mapping[str, Any], kind: type[Verdict], measure: Callable[[], Verdict]
) -> Verdict:
    """Return the verdict kept under ``key``, or measure and keep a new one.

    Args:
        schema: "specllama.<name>.<version>"; files lie in a folder of that name.
        key: everything that the verdict depends on, as plain values.
    """
    if (found := known(schema, key, kind)) is None:
        keep(schema, key, found := measure())
    return found


def keep(schema: str, key: Mapping[str, Any], found: object) -> None:
    """Keep a verdict under ``key``, instead of one that lies there."""
    from specllama.paths import replace_file

    try:
        whole = msgspec.json.encode(_Kept({"schema": schema, **key}, found, _sum(found)))
        replace_file(_place(schema, key)[1], whole)
    except OSError as error:
        logger.info("cannot keep what was measured: %s", error)


def known(schema: str, key: Mapping[str, Any], kind: type[Verdict]) -> Verdict | None:
    """Return the verdict kept under ``key``, None if there is none."""
    text, path = _place(schema, key)
    return _read(path, text, kind)


def all_known(schema: str, part: Mapping[str, Any], kind: type[Verdict]) -> list[Verdict]:
    """Return the verdicts whose keys have all of ``part``."""
    from specllama.paths import profiles_dir

    found: list[Verdict] = []
    for path in sorted((profiles_dir() / schema.split(".")[1]).glob("*.json")):
        try:
            file = read_json(path, _Kept)
        except (OSError, *DAMAGE):
            continue
        if file is not None and part.items() <= file.key.items():
            one = _read(path, msgspec.json.encode(file.key, order="sorted"), kind)
            found += [] if one is None else [one]
    return found


class _Kept(msgspec.Struct):
    """A verdict in its file. A flipped bit could make another verdict of it, and other texts of
    that: ``sum`` tells."""

    key: dict[str, Any]
    found: Any
    sum: str = ""


def _place(schema: str, key: Mapping[str, Any]) -> tuple[bytes, Path]:
    from specllama.paths import profiles_dir

    whole = {"schema": schema, **key}
    of = f"{key['file'][:SHORT]}-" if "file" in key else ""
    path = profiles_dir() / schema.split(".")[1] / f"{of}{name_of(whole)}.json"
    return msgspec.json.encode(whole, order="sorted"), path


def name_of(key: Mapping[str, Any]) -> str:
    """Return a short name of plain values."""
    return hashlib.sha256(msgspec.json.encode(key, order="sorted")).hexdigest()[:16]


def _read(path: Path, key: bytes, kind: type[Verdict]) -> Verdict | None:
    try:
        file = read_json(path, _Kept)
        if file is None or msgspec.json.encode(file.key, order="sorted") != key:
            return None
        if file.sum == _sum(file.found):
            return msgspec.convert(file.found, kind)
        raise ValueError("its sum does not fit")
    except (OSError, *DAMAGE) as error:
        logger.info("%s is measured again: %s", path, error)
        return None


def _sum(found: object) -> str:
    return hashlib.sha256(msgspec.json.encode(found)).hexdigest()
