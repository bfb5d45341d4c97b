"""The address of a server and its key; failures on the way become our own errors."""

from __future__ import annotations

import ipaddress
import json
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from specllama.errors import EngineDied, EngineError, PromptTooLong, SpecllamaError, UsageError
from specllama.settings.hardware import is_loopback

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


def url_of(text: str, port: int = PORT) -> str:
    """Return the URL of a server as people write it: without a scheme, a host or a port, as an IPv6
    address without brackets, or as all addresses, at which servers listen."""
    scheme, _, rest = text.strip().rpartition("://")
    place, slash, path = rest.partition("/")
    host, _, digits = place.rpartition(":")
    if _is_ipv6(place) or not digits.isdigit():
        host, digits = place, ""
    if not (host or digits) or re.search(r"\s", host):
        return text
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
        url = url_of(self.url).rstrip("/").removesuffix("/v1")
        object.__setattr__(self, "url", url)

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
            raise UsageError(
                f"{self.url!r} is no address of a server", "for example http://127.0.0.1:8484"
            ) from None
        except (httpx2.HTTPError, ValueError, KeyError, TypeError) as error:
            raise EngineDied(f"no specllama answers at {self.url}: {error}", _START) from None

    def events(self) -> Iterator[dict[str, Any]]:
        """Yield the events of its lanes as they happen, from now on.

        Raises:
            SpecllamaError: no server answers, or not any more.
        """
        with (
            self.spoken(),
            self.client() as http,
            http.stream("GET", self.at("events")) as answer,
        ):
            yield from events_of(checked(answer).iter_bytes())


def events_of(parts: Iterable[bytes]) -> Iterator[dict[str, Any]]:
    """Yield the JSON of a stream of server-sent events, whose lines end with a line feed only:
    texts may hold other characters that end lines elsewhere."""
    held: list[bytes] = []
    for part in parts:
        *ended, rest = part.split(b"\n")
        for line in ended:
            line = b"".join([*held, line])
            held.clear()
            if line.startswith(b"data: {"):
                found: dict[str, Any] = json.loads(line[6:])
                yield found
        held.append(rest)


def code_of(answer: httpx2.Response) -> str:
    """Return the reason of a refusal, for programs; "" if the answer has none."""
    try:
        return str(answer.json()["error"]["code"])
    except (ValueError, KeyError, TypeError):
        return ""


def checked(answer: httpx2.Response) -> httpx2.Response:
    """Return the answer; raise SpecllamaError with the server's own message if it failed."""
    if answer.status_code == 200:
        return answer
    answer.read()
    try:
        error = answer.json()["error"]
    except (ValueError, KeyError, TypeError):
        raise EngineError(f"the server answered {answer.status_code}", _START) from None
    raise error_of({"message": error} if isinstance(error, str) else error)  # Ollama's is a text


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
