"""The address of a server and HTTP to it: failures on the way become our own errors.

Nothing that another engine sends is trusted: sizes are bounded first, and what is no JSON is one
clear error.
"""

from __future__ import annotations

import ipaddress
import json
import re
import socket
from collections.abc import Generator, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from time import monotonic
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from specllama.cancel import Cancel
from specllama.errors import EngineDied, EngineError, PromptTooLong, SpecllamaError, UsageError
from specllama.remote.answers import Json, of, text
from specllama.settings.hardware import is_loopback
from specllama.text import sanitize_line

if TYPE_CHECKING:  # it is slow to import, and a command line names addresses before it asks any
    import httpx2

KEY_VARIABLE = "SPECLLAMA_API_KEY"
PORT = 8484
_HERE = {"": "127.0.0.1", "0.0.0.0": "127.0.0.1", "::": "::1"}  # what a server listens at
_START = "start one with: specllama serve"
_HINTS = {
    "invalid_api_key": f"give one of its keys as {KEY_VARIABLE}",
    "queue_full": "try again in a moment",
}
LOOK_S = 5.0  # one look at a server takes no longer
SILENCE_S = 600.0  # a model may have to be loaded before the first token
MOST_LOOK = 16 * 2**20  # bytes of an answer to a look
MOST_LINE = 16 * 2**20  # bytes of one event
_SHOWN = 300  # characters of a server's own words
_TOO_LONG = re.compile(
    r"context (length|size|window)|(prompt|input|request).{0,40}(too long|exceed)|"
    r"exceed.{0,40}(context|max_model_len|max_total)",
    re.I,
)
KEY_HINT = f"put its key into a file: --api-key-file FILE, or into {KEY_VARIABLE}"


def url_of(written: str, port: int = PORT) -> str:
    """Return the URL of a server as people write it: without a scheme, a host or a port, as an IPv6
    address without brackets, or as all addresses, at which servers listen."""
    scheme, _, rest = written.strip().rpartition("://")
    place, slash, path = rest.partition("/")
    host, _, digits = place.rpartition(":")
    if _is_ipv6(place) or not digits.isdigit():
        host, digits = place, ""
    if not (host or digits) or re.search(r"\s", host):
        return written
    host = _HERE.get(host.strip("[]"), host)
    host = f"[{host}]" if _is_ipv6(host) else host
    digits = digits or ("" if scheme else str(port))
    return f"{scheme.lower() or 'http'}://{host}{':' if digits else ''}{digits}{slash}{path}"


def _is_ipv6(host: str) -> bool:
    with suppress(ValueError):
        return ipaddress.ip_address(host).version == 6
    return False


@dataclass(frozen=True, slots=True)
class Address:
    """The address of a server and its key.

    Attributes:
        kind: which engine it is, "auto" to find out.
        model: which of its models is asked, "" where it has one.
    """

    url: str
    key: str = ""
    kind: str = "auto"
    model: str = ""

    def __post_init__(self) -> None:
        object.__setattr__(self, "url", url_of(self.url).rstrip("/").removesuffix("/v1"))

    @property
    def name(self) -> str:
        """The short form, for display."""
        return self.url.rpartition("://")[2]

    def at(self, path: str) -> str:
        return f"{self.url}/specllama/{path}"

    def client(self, read_s: float = 60.0, *, keep: bool = True) -> httpx2.Client:
        import httpx2

        headers = {"Authorization": f"Bearer {self.key}"} if self.key else {}
        # a proxy of the environment is for others: keys and prompts for this machine stay on it
        host = ""
        with suppress(ValueError):  # what is no address is said when it is asked
            host = urlsplit(self.url).hostname or ""
        timeout = httpx2.Timeout(min(10.0, read_s), read=read_s)
        limits = httpx2.Limits() if keep else httpx2.Limits(max_keepalive_connections=0)
        here = is_loopback(host)
        return httpx2.Client(
            timeout=timeout,
            headers=headers,
            limits=limits,
            trust_env=not here,
            verify=not here or self.url.startswith("https:"),  # reading certificates takes long
        )

    @contextmanager
    def spoken(self) -> Iterator[None]:
        """Turn failures of the block into our errors: UsageError if that is no address, EngineDied
        if no server answers any more, or one that is not specllama."""
        import httpx2

        try:
            yield
        except (httpx2.InvalidURL, httpx2.UnsupportedProtocol):
            raise _no_address(self.url) from None
        except (httpx2.HTTPError, ValueError, KeyError, TypeError) as error:
            raise EngineDied(f"no specllama answers at {self.url}: {error}", _START) from None

    def events(self) -> Iterator[dict[str, Any]]:
        """Yield the events of its lanes as they happen, from now on.

        Raises:
            SpecllamaError: no server answers, or not any more.
        """
        with self.spoken(), self.client() as http, http.stream("GET", self.at("events")) as answer:
            yield from events_of(checked(answer).iter_bytes())


def events_of(parts: Iterable[bytes]) -> Iterator[dict[str, Any]]:
    """Yield the JSON of a stream of server-sent events of ours."""
    for line in _lines("specllama", parts):
        if line.startswith(b"data: {"):
            yield json.loads(line[6:])


def _error(answer: httpx2.Response) -> Any:
    """Return the error in an answer; None if there is none."""
    with suppress(ValueError):
        return of(answer.json()).get("error")
    return None


def code_of(answer: httpx2.Response) -> str:
    """Return the reason of a refusal, for programs; "" if the answer has none."""
    return str(of(_error(answer)).get("code", ""))


def checked(answer: httpx2.Response) -> httpx2.Response:
    """Return the answer; raise SpecllamaError with the server's own message if it failed."""
    if answer.status_code == 200:
        return answer
    answer.read()
    if (error := _error(answer)) is None:
        raise EngineError(f"the server answered {answer.status_code}", _START)
    raise error_of(error if isinstance(error, dict) else {"message": error})  # Ollama's is a text


def error_of(error: dict[str, Any]) -> SpecllamaError:
    """Convert the error of an answer to one of ours."""
    message, code = str(error.get("message")), str(error.get("code"))
    if code == "context_length_exceeded":
        return PromptTooLong(message)
    if code == "engine_died":
        return EngineDied(message)
    if error.get("type") == "invalid_request_error":
        return UsageError(message)
    return EngineError(message, _HINTS.get(code))


class Look:
    """The answers of one server to GET requests, each sent once at most.

    Attributes:
        locked: a look was refused for want of a key.
    """

    def __init__(self, address: Address) -> None:
        self.address = address
        self.locked = False
        self._echo = "5bec11a0-10cc-4000-8000-000000000000"  # some take UUIDs only
        self.get = cache(self._get)
        self._http = address.client(LOOK_S)
        self._http.headers["x-request-id"] = self._echo

    def close(self) -> None:
        self._http.close()

    def _get(self, path: str) -> tuple[int, dict[str, str], bytes]:
        """Return status, headers and body; 0 if the answer is no HTTP, or too long.

        Raises:
            EngineDied, UsageError: nobody answers there in time, or that is no address.
        """
        import httpx2

        until, body = monotonic() + LOOK_S, bytearray()
        try:
            with self._http.stream("GET", self.address.url + path) as answer:
                for part in answer.iter_bytes():
                    body += part
                    if len(body) > MOST_LOOK or monotonic() > until:
                        return 0, {}, b""
                self.locked = self.locked or answer.status_code in (401, 403)
                return answer.status_code, dict(answer.headers), bytes(body)
        except (httpx2.ConnectError, httpx2.ConnectTimeout) as error:
            raise nobody(self.address, error) from None
        except (httpx2.InvalidURL, httpx2.UnsupportedProtocol, UnicodeError):
            raise _no_address(self.address.url) from None
        except httpx2.TimeoutException:
            raise EngineDied(
                f"what listens at {self.address.url} does not answer within {LOOK_S:.0f} seconds",
                "see its log; it may be loading: try again",
            ) from None
        except httpx2.HTTPError:
            return 0, {}, b""

    def text(self, path: str) -> str | None:
        """Return the body as text; None if the status is not 200."""
        status, _, body = self.get(path)
        return body.decode("utf-8", "replace") if status == 200 else None

    def object(self, path: str) -> Json:
        """Return the body; an empty object if the status is not 200, or it is no JSON object."""
        with suppress(ValueError, RecursionError):
            return of(json.loads(self.text(path) or "null"))
        return {}

    def echoes(self, path: str) -> bool:
        """True if the answer carries our request id."""
        return self.get(path)[1].get("x-request-id") == self._echo

    def server(self, path: str) -> str:
        """Return the name of the program that answers, as it sends it."""
        return self.get(path)[1].get("server", "")


def _no_address(url: str) -> UsageError:
    return UsageError(f"{url!r} is no address of a server", "for example http://127.0.0.1:8484")


def nobody(address: Address, error: Exception) -> EngineDied:
    return EngineDied(
        f"no server answers at {address.url}: {str(error) or type(error).__name__}",
        "start one, for example: specllama serve; or give another address",
    )


def posted(
    http: httpx2.Client, address: Address, title: str, path: str, body: Json, cancel: Cancel
) -> Generator[Json]:
    """Yield the objects of the answer, as they come; an empty one first: the request was taken.

    ``cancel`` ends them and the connection, and so does closing the iterator.

    Raises:
        SpecllamaError: the server refused, went away, or sent what is no JSON.
    """
    import httpx2

    sockets: list[Any] = []

    def opened(name: str, told: dict[str, Any]) -> None:
        if name in ("connection.connect_tcp.complete", "connection.start_tls.complete"):
            sockets.append(told["return_value"])

    def stop() -> None:  # a thread that waits for the server wakes up
        for stream in list(sockets):
            with suppress(OSError, AttributeError):
                stream.get_extra_info("socket").shutdown(socket.SHUT_RDWR)

    try:
        with (
            cancel.calling(stop),
            http.stream(
                "POST", address.url + path, json=body, extensions={"trace": opened}
            ) as answer,
        ):
            if answer.status_code != 200:
                raise refused(title, address, answer.status_code, bounded(answer.iter_bytes()))
            yield {}
            yield from objects(title, answer.iter_bytes())
    except (httpx2.InvalidURL, httpx2.UnsupportedProtocol, UnicodeError):
        raise _no_address(address.url) from None
    except httpx2.HTTPError as error:
        if cancel.is_set():
            return
        if isinstance(error, (httpx2.ConnectError, httpx2.ConnectTimeout)):
            raise nobody(address, error) from None
        words = f"ended the connection: {sanitize_line(str(error)) or type(error).__name__}"
        hint = "see its log; what was written is kept"
        if isinstance(error, httpx2.TimeoutException):
            words = f"said nothing for {SILENCE_S:.0f} seconds"
            hint = "see its log; a model that is loaded anew may need a second try"
        raise EngineError(f"{title} at {address.name} {words}", hint) from None


def bounded(parts: Iterable[bytes], most: int = 2**16) -> bytes:
    body = bytearray()
    for part in parts:
        body += part
        if len(body) > most:
            break
    return bytes(body)


def objects(title: str, parts: Iterable[bytes]) -> Iterator[Json]:
    """Yield the JSON objects of server-sent events, of lines of JSON, or of one document.

    Comments, names of events and blank lines are passed over; ``[DONE]`` ends the stream.

    Raises:
        EngineError: a line is no JSON object, longer than any should be, or reports an error.
    """
    for line in _lines(title, parts):
        if line.startswith(b"data:"):
            line = line[5:].strip()
        elif line.startswith(b"error:"):
            line = line[6:].strip()
        elif line[:1] not in (b"{", b"["):
            if line.startswith((b":", b"event:", b"id:", b"retry:")) or not line:
                continue
            raise _nonsense(title, line)
        if line == b"[DONE]":
            return
        if not line:
            continue
        try:
            found = json.loads(line)
        except (ValueError, RecursionError):
            raise _nonsense(title, line) from None
        if not isinstance(found, dict):
            raise _nonsense(title, line)
        if (error := found.get("error")) is not None and error != "":
            raise EngineError(f"{title} failed: {said(found)}", "see the log of that server")
        yield found


def _lines(title: str, parts: Iterable[bytes]) -> Iterator[bytes]:
    """Yield the lines; join a document of several into one, for JSON may be printed over many."""
    held = b""
    document = False
    for part in parts:
        held += part
        if len(held) > MOST_LINE:
            raise EngineError(f"{title} sent a line of more than {MOST_LINE // 2**20} MiB")
        document = document or held.lstrip()[:2] in (b"{\n", b"{\r")
        if document:
            continue
        *ended, held = held.split(b"\n")
        for line in ended:
            yield line.strip()
    if held.strip():
        yield held.strip()


def _nonsense(title: str, line: bytes) -> EngineError:
    shown = sanitize_line(line[:80].decode("utf-8", "replace"))
    return EngineError(
        f"{title} sent what is no JSON object: {shown}", "see its log; what was written is kept"
    )


def said(body: object) -> str:
    """Return the error message of an answer, in one line."""
    found = of(body)
    error = found.get("error")
    words = (
        text(of(error).get("message")) or text(error) or text(found.get("message"))
        or text(of(found.get("detail")).get("msg")) or text(found.get("detail"))
    )  # fmt: skip
    if not words and isinstance(found.get("detail"), list):
        words = "; ".join(text(of(one).get("msg")) for one in found["detail"][:3])
    words = " ".join(sanitize_line(words or json.dumps(body)[:_SHOWN]).split())
    return words if len(words) <= _SHOWN else f"{words[:_SHOWN]}..."


def refused(title: str, address: Address, status: int, body: bytes) -> SpecllamaError:
    """Convert the answer to a refused request to our error."""
    try:
        words = said(json.loads(body))
    except (ValueError, RecursionError):
        words = " ".join(sanitize_line(body[:_SHOWN].decode("utf-8", "replace")).split())
    where = f"{title} at {address.name}"
    words = words or f"status {status}"
    if status in (401, 403):
        return EngineError(f"{where} does not let us in: {words}", KEY_HINT)
    if status == 429:
        return EngineError(f"{where} is busy: {words}", "try again in a moment")
    if status in (400, 413, 422) and _TOO_LONG.search(words):
        return PromptTooLong(f"{where} has no room for the prompt: {words}")
    if status == 404:
        return UsageError(
            f"{where} does not have that: {words}", "name one of its models: --remote-model ID"
        )
    if 400 <= status < 500:
        return UsageError(f"{where} refuses the request: {words}")
    if status == 503:
        return EngineError(f"{where} cannot serve now: {words}", "it may be loading: try again")
    return EngineError(f"{where} failed ({status}): {words}", "see the log of that server")
