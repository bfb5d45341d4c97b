"""Folders of specllama, and the packages that it runs with.

``SPECLLAMA_HOME`` moves all folders (tests, portable installs).
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import shlex
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from specllama.errors import CannotLoad, SpecllamaError, UsageError, as_ours, cause, out_of_memory

HOME_VARIABLE = "SPECLLAMA_HOME"
_LOCK = ".lock"
_BEGUN_S = 10.0  # a folder that is younger may not have its lock yet
LEAST_FREE = 1 << 18  # bytes of a disk on which a conversation and a log can be begun


def _base(kind: str) -> Path:
    home = os.environ.get(HOME_VARIABLE)
    if home:
        return Path(home) / kind
    import platformdirs

    try:
        if kind == "config":
            return Path(platformdirs.user_config_dir("specllama"))
        if kind == "cache":
            return Path(platformdirs.user_cache_dir("specllama"))
        return Path(platformdirs.user_data_dir("specllama"))
    except RuntimeError as error:
        raise UsageError(
            f"there is no home directory to keep data in ({error})",
            f"set {HOME_VARIABLE} to a folder you can write to",
        ) from None


def config_dir() -> Path:
    return _base("config")


def data_dir() -> Path:
    return _base("data")


def cache_dir() -> Path:
    return _base("cache")


def config_file() -> Path:
    return config_dir() / "config.toml"


def rounds_dir() -> Path:
    """Return the folder of round logs, one per run (JSON Lines)."""
    return data_dir() / "rounds"


def sessions_file() -> Path:
    """Return the path of the SQLite file of stored conversations."""
    return data_dir() / "sessions.db"


def models_dir() -> Path:
    """Return the folder of models pulled by ``specllama hub pull``."""
    return data_dir() / "models"


def profiles_dir() -> Path:
    """Return the folder of speed profiles, measured per pair and device."""
    return data_dir() / "profiles"


def states_dir() -> Path:
    """Return the folder of conversations' states, which need not be read again."""
    return data_dir() / "states"


def private_folder(folder: Path) -> Path:
    """Create a folder for a person's own files, closed to everybody else; return it.

    The data folder is closed, too, if others may enter it. An existing folder elsewhere is left as
    it is: it is the person's own.

    Raises:
        OSError: it cannot be created.
    """
    root = data_dir()
    root.parent.mkdir(parents=True, exist_ok=True)
    for each in (root, folder):
        if each == folder or folder.is_relative_to(root):
            if not each.is_dir():
                each.parent.mkdir(parents=True, exist_ok=True)
                with contextlib.suppress(FileExistsError):
                    each.mkdir(0o700)
            if each.is_relative_to(root):
                _close(each, 0o700)
    return folder


def private_file(path: Path) -> Path:
    """Create a file, unless it exists, that only its owner may read; returns it.

    Raises:
        OSError: it cannot be created.
    """
    with contextlib.suppress(FileExistsError):
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
    _close(path, 0o600)
    return path


def replace_file(path: Path, *parts: bytes | bytearray | memoryview) -> None:
    """Write a file whole or not at all; only its owner may read it. Its folder is created.

    Raises:
        OSError: it cannot be written; what was there stays.
    """
    handle, name = tempfile.mkstemp(dir=private_folder(path.parent), prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.writelines(parts)
        os.replace(name, path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


@contextlib.contextmanager
def scratch(name: str) -> Iterator[Path]:
    """Make a folder for the block among the temporary ones. First remove those that killed
    processes left under this name: a process that uses one holds a lock in it."""
    from filelock import FileLock, Timeout

    begin = f"specllama-{name}-"
    for left in Path(tempfile.gettempdir()).glob(f"{begin}*"):
        with contextlib.suppress(OSError, Timeout):
            about = left.lstat()
            if about.st_uid == os.getuid() and time.time() - about.st_mtime > _BEGUN_S:
                with FileLock(left / _LOCK, timeout=0):
                    shutil.rmtree(left, ignore_errors=True)
    with (
        tempfile.TemporaryDirectory(prefix=begin, ignore_cleanup_errors=True) as folder,
        FileLock(Path(folder) / _LOCK),
    ):
        yield Path(folder)


def standing(folder: Path) -> Path:
    """Return a folder that need not exist yet, or the nearest one above it that does."""
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    return folder


def barred(folder: Path) -> str:
    """Return why nothing can be kept in a folder that need not exist yet; "" if something can.
    Create nothing."""
    existing = standing(folder)
    if not existing.is_dir():
        return f"{existing} is no folder"
    if not os.access(existing, os.W_OK | os.X_OK):
        return f"{existing} cannot be written to"
    free = shutil.disk_usage(existing).free
    return "" if free >= LEAST_FREE else f"the disk of {existing} is full: {free:,} bytes are free"


def _close(path: Path, mode: int) -> None:
    """Take all rights from others; ignore failure (another owner, a system without modes)."""
    with contextlib.suppress(OSError):
        if path.stat().st_mode & 0o077:
            path.chmod(mode)


def pip_install(words: str) -> str:
    """Return the shell command that installs into the environment that runs this, whichever tool
    made it: uv puts no pip into one, and the pip of the PATH may be another environment's."""
    python = shlex.quote(sys.executable)
    if importlib.util.find_spec("pip") is None:
        return f"uv pip install --python {python} {words}"
    active = os.environ.get("VIRTUAL_ENV") == sys.prefix
    return f"{'pip' if active else f'{python} -m pip'} install {words}"


def cannot_import(
    error: BaseException, said: str, package: str, missing: type[SpecllamaError] = UsageError
) -> SpecllamaError:
    """Return the error for a package that was found missing, or broken, or too large for the memory
    that is left, when it was imported.

    Args:
        said: who needs it, as in "schemas need llguidance".
        missing: the error's class where it is not installed.
    """
    if isinstance(error, ModuleNotFoundError) and error.name == package:
        return missing(f"{said}, which is not installed", pip_install(package))
    if out_of_memory(error):
        return as_ours(error, said)
    again = pip_install(f"--force-reinstall {'.' if package == 'specllama' else package}")
    hint = f"install what it asks for, or {package} again (our own in its folder): {again}"
    return CannotLoad(f"{said}, which is installed, but cannot be loaded: {cause(error)}", hint)


@cache
def package_versions(*more: str) -> dict[str, str]:
    """Return the versions that decide results, and those of more packages, importing none."""
    from importlib import metadata
    from platform import python_version

    versions = {"python": python_version()}
    for name in ("specllama", "llama-cpp-python", "numpy", *more):
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            versions[name] = "not installed"
    return versions


def bundled_dir() -> Path:
    """Return the folder of the bundled tiny family inside the installed package."""
    from importlib.resources import files

    return Path(str(files("specllama.models") / "tiny"))
