"""A hub on this machine: the routes that huggingface_hub 2.x and our downloader really use.

    with FakeHub() as hub:
        hub.add("user/repo", {"model-Q4_0.gguf": data})
        hub.faults["model-Q4_0.gguf"] = Fault(cut_after=1000, times=2)

Faults are per file name or, under "api", for the listing routes. Stdlib only.
"""

from __future__ import annotations

import hashlib
import json
import re
import threading
import time
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

COMMIT = "c" * 40


@dataclass
class Fault:
    """What goes wrong, for the next ``times`` requests (-1: always).

    Attributes:
        status: answer with this status, ``code`` in X-Error-Code and these headers.
        cut_after: close the connection after so many bytes of the body.
        corrupt: flip a byte of the body (the length stays).
        extra: bytes sent after the body, with no Content-Length.
        ignore_range: answer 200 with everything.
        wrong_range: answer a range request with another range.
        bytes_per_s: send slowly.
        stall_s: send nothing for so long before the body.
        redirect: answer 302 with this Location.
        etag: send this instead of the digest.
        claim: a Content-Length (or Content-Range total) that is not true.
    """

    status: int | None = None
    code: str | None = None
    headers: dict[str, str] = field(default_factory=dict)
    cut_after: int | None = None
    corrupt: bool = False
    extra: bytes = b""
    ignore_range: bool = False
    wrong_range: bool = False
    bytes_per_s: int | None = None
    stall_s: float = 0.0
    redirect: str | None = None
    etag: str | None = None
    claim: int | None = None
    times: int = -1


@dataclass
class Request:
    """One request that arrived."""

    method: str
    path: str
    headers: dict[str, str]

    @property
    def range(self) -> str | None:
        return self.headers.get("range")

    @property
    def authorization(self) -> str | None:
        return self.headers.get("authorization")


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request: object, client_address: object) -> None:
        """A client that goes away (a killed pull) is part of the tests, not an error to print."""


class FakeHub:
    """Repositories in memory behind an HTTP server on the loopback interface."""

    def __init__(self) -> None:
        self.repos: dict[str, dict[str, bytes]] = {}
        self.listed: dict[str, list[dict[str, Any]]] = {}
        self.faults: dict[str, Fault] = {}
        self.requests: list[Request] = []
        self.sums = False  # of the index, in its links
        self._server = _Server(("127.0.0.1", 0), _Handler)
        self._server.hub = self  # type: ignore[attr-defined]
        self._thread = threading.Thread(
            target=self._server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True
        )

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_port}"

    def __enter__(self) -> FakeHub:
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def add(self, repo: str, files: dict[str, bytes]) -> None:
        """Put files into a repository and list them truthfully."""
        self.repos.setdefault(repo, {}).update(files)
        self.listed[repo] = [self.entry(name, data) for name, data in self.repos[repo].items()]

    def entry(self, name: str, data: bytes, **lies: Any) -> dict[str, Any]:
        """A file as the listing shows it; ``lies`` replace size or sha256."""
        size = lies.get("size", len(data))
        sha = lies.get("sha256", hashlib.sha256(data).hexdigest())
        return {
            "rfilename": name,
            "size": size,
            "blobId": hashlib.sha1(data).hexdigest(),
            "lfs": {"sha256": sha, "size": size, "pointerSize": 130},
        }

    def of(self, name: str) -> list[Request]:
        """The requests for one file."""
        return [request for request in self.requests if request.path.endswith("/" + name)]

    def fragment(self, data: bytes) -> str:
        return f"#sha256={hashlib.sha256(data).hexdigest()}" if self.sums else ""

    def fault(self, key: str) -> Fault | None:
        fault = self.faults.get(key)
        if fault is None or fault.times == 0:
            return None
        if fault.times > 0:
            fault.times -= 1
        return fault


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    @property
    def hub(self) -> FakeHub:
        return self.server.hub  # type: ignore[attr-defined,no-any-return]

    def log_message(self, *args: object) -> None:
        pass

    def _record(self) -> str:
        path = unquote(urlsplit(self.path).path)
        headers = {key.lower(): value for key, value in self.headers.items()}
        self.hub.requests.append(Request(self.command, path, headers))
        return path

    def do_HEAD(self) -> None:
        self._answer()

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers.get("content-length") or 0))
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def _answer(self) -> None:
        path = self._record()
        try:
            if path.startswith("/api/"):
                self._api(path)
            elif match := re.match(r"^/(?:cdn/)?([^/]+/[^/]+)/resolve/([^/]+)/(.+)$", path):
                self._file(match[1], match[3], cdn=path.startswith("/cdn/"))
            elif match := re.match(r"^/(.+)/simple/(.+)/$", path):
                self._index(match[1], match[2])
            else:
                self._status(404, "EntryNotFound")
        except (BrokenPipeError, ConnectionResetError):
            self.close_connection = True

    # -- listings ----------------------------------------------------------------------------------

    def _api(self, path: str) -> None:
        fault = self.hub.fault("api")
        if fault is not None and fault.status is not None:
            self._status(fault.status, fault.code, fault.headers)
            return
        if path == "/api/models":
            self._json(self._search())
        elif match := re.match(r"^/api/models/([^/]+/[^/]+)(?:/revision/([^/]+))?$", path):
            self._model(match[1], match[2] or "main")
        elif match := re.match(r"^/api/models/([^/]+/[^/]+)/tree/([^/]+)$", path):
            entries = self.hub.listed.get(match[1], [])
            self._json(
                [
                    {"type": "file", "path": e["rfilename"], "size": e["size"], "oid": e["blobId"]}
                    for e in entries
                ]
            )
        else:
            self._status(404, "RepoNotFound")

    def _search(self) -> list[dict[str, Any]]:
        words = parse_qs(urlsplit(self.path).query).get("search", [""])[0].lower()
        return [
            {
                "id": repo,
                "modelId": repo,
                "downloads": 1000 - i,
                "likes": 10,
                "gated": False,
                "gguf": {"total": 8_000_000_000, "architecture": "llama", "context_length": 8192},
                "siblings": [{"rfilename": e["rfilename"]} for e in entries],
            }
            for i, (repo, entries) in enumerate(self.hub.listed.items())
            if words in repo.lower()
        ]

    def _model(self, repo: str, revision: str) -> None:
        if repo not in self.hub.listed:
            self._status(404, "RepoNotFound")
        elif revision not in ("main", COMMIT):
            self._status(404, "RevisionNotFound")
        else:
            self._json(
                {
                    "id": repo,
                    "modelId": repo,
                    "sha": COMMIT,
                    "gated": False,
                    "downloads": 1000,
                    "tags": ["gguf", "license:apache-2.0"],
                    "siblings": self.hub.listed[repo],
                }
            )

    def _json(self, value: Any) -> None:
        body = json.dumps(value).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def _status(self, status: int, code: str | None, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        if code:
            self.send_header("X-Error-Code", code)
            self.send_header("X-Error-Message", code)
        for key, value in (headers or {}).items():
            self.send_header(key, value)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def _index(self, repo: str, package: str) -> None:
        """A Python index of the wheels in a repository, with their sums if ``sums`` is set."""
        begins = package.replace("-", "_") + "-"
        links = [
            f'<a href="/{repo}/resolve/main/{name}{self.hub.fragment(data)}">{name}</a>'
            for name, data in self.hub.repos.get(repo, {}).items()
            if name.startswith(begins)
        ]
        body = f"<!DOCTYPE html><html><body>{''.join(links)}</body></html>".encode()
        self.send_response(200)
        self.send_header("Content-Type", "text/html")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    # -- files -------------------------------------------------------------------------------------

    def _file(self, repo: str, name: str, *, cdn: bool) -> None:
        data = self.hub.repos.get(repo, {}).get(name)
        fault = self.hub.fault(name) or Fault()
        if fault.status is not None:
            self._status(fault.status, fault.code, fault.headers)
            return
        if data is None:
            self._status(404, "EntryNotFound")
            return
        if fault.redirect is not None and not cdn:
            self.send_response(302)
            self.send_header("Location", fault.redirect)
            self.send_header("X-Repo-Commit", COMMIT)
            self.send_header("X-Linked-Size", str(fault.claim or len(data)))
            self.send_header("X-Linked-Etag", hashlib.sha256(data).hexdigest())
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        self._body(data, fault)

    def _body(self, data: bytes, fault: Fault) -> None:
        wanted = re.match(r"^bytes=(\d+)-$", self.headers.get("range") or "")
        start = int(wanted[1]) if wanted and not fault.ignore_range else 0
        if start >= len(data) and start:
            self._status(416, None)
            return
        if fault.wrong_range and wanted:
            start = max(0, start - 1)
        total = fault.claim or len(data)
        body = data[start:]
        if fault.corrupt and body:
            middle = len(body) // 2
            body = body[:middle] + bytes([body[middle] ^ 0xFF]) + body[middle + 1 :]
        self.send_response(206 if wanted and not fault.ignore_range else 200)
        if wanted and not fault.ignore_range:
            self.send_header("Content-Range", f"bytes {start}-{len(data) - 1}/{total}")
        if fault.extra:
            self.send_header("Connection", "close")
            self.close_connection = True
        else:
            self.send_header("Content-Length", str(total - start))
        self.send_header("ETag", f'"{fault.etag or hashlib.sha256(data).hexdigest()}"')
        self.send_header("X-Repo-Commit", COMMIT)
        self.send_header("Accept-Ranges", "bytes")
        self.end_headers()
        if self.command == "HEAD":
            return
        time.sleep(fault.stall_s)
        if fault.cut_after is not None:
            body = body[: fault.cut_after]
            self.close_connection = True
        self._send(body + fault.extra, fault.bytes_per_s)
        if fault.cut_after is not None:
            self.wfile.flush()
            self.connection.close()

    def _send(self, body: bytes, bytes_per_s: int | None) -> None:
        if bytes_per_s is None:
            self.wfile.write(body)
            return
        step = max(bytes_per_s // 20, 1)
        for i in range(0, len(body), step):
            self.wfile.write(body[i : i + step])
            self.wfile.flush()
            time.sleep(0.05)
