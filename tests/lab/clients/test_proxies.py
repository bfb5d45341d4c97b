"""Reverse proxies in front of a server, as the page on them sets them up."""

from __future__ import annotations

import json
import re
import shutil
import socket
import ssl
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest
from scripted_server import Rule, Rules
from servers import Serving, serving, until

from specllama.server.guard import Access

PAGE = Path(__file__).parents[3] / ".github" / "proxy.md"
NAME = "models.example.org"
RULES = (Rule("one two three four five six", when="slowly", delay_s=0.3), Rule("Hello."))
ACCESS = Access(hosts=(NAME,), keys=("secret",), proxies=("127.0.0.1",))
SNI = {"sni_hostname": NAME}
TURNS = [{"role": "user", "content": "slowly"}]


def on_page(language: str) -> str:
    [found] = re.findall(rf"```{language}\n(.*?)```", PAGE.read_text("utf-8"), re.DOTALL)
    return str(found)


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def certified(folder: Path) -> tuple[Path, Path]:
    """A certificate and its key."""
    cert, key = folder / "cert.pem", folder / "key.pem"
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "1", "-subj",
         f"/CN={NAME}", "-out", str(cert), "-keyout", str(key)], check=True, capture_output=True,
    )  # fmt: skip
    return cert, key


def nginx(folder: Path, port: int, behind: str) -> list[str]:
    cert, key = certified(folder)
    site = on_page("nginx").replace("127.0.0.1:8484", behind)
    site = site.replace("listen 443", f"listen 127.0.0.1:{port}")
    site = site.replace(f"/etc/ssl/{NAME}.pem", str(cert)).replace(f"/etc/ssl/{NAME}.key", str(key))
    kept = "".join(
        f"{one}_temp_path {folder};\n"
        for one in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    )
    conf = folder / "nginx.conf"
    conf.write_text(
        f"daemon off;\nmaster_process off;\npid {folder}/pid;\nerror_log {folder}/error.log;\n"
        f"events {{}}\nhttp {{\naccess_log off;\n{kept}{site}}}\n",
        "utf-8",
    )
    return ["nginx", "-e", f"{folder}/error.log", "-p", str(folder), "-c", str(conf)]


def caddy(folder: Path, port: int, behind: str) -> list[str]:
    site = on_page("caddyfile").replace("127.0.0.1:8484", behind)
    site = site.replace(f"{NAME} {{", f"{NAME}:{port} {{\n\tbind 127.0.0.1\n\ttls internal")
    conf = folder / "Caddyfile"
    alone = "admin off\nskip_install_trust\nauto_https disable_redirects\n"
    conf.write_text(f"{{\n{alone}storage file_system {folder}/kept\n}}\n{site}", "utf-8")
    return ["caddy", "run", "--config", str(conf), "--adapter", "caddyfile"]


def haproxy(folder: Path, port: int, behind: str) -> list[str]:
    both = folder / "both.pem"
    both.write_text("".join(file.read_text("utf-8") for file in certified(folder)), "utf-8")
    conf = folder / "haproxy.cfg"
    site = on_page("haproxy").replace("127.0.0.1:8484", behind)
    site = site.replace("bind :443", f"bind 127.0.0.1:{port}")
    conf.write_text(site.replace(f"/etc/ssl/{NAME}.pem", str(both)), "utf-8")
    return ["haproxy", "-db", "-f", str(conf)]


@pytest.fixture(scope="module", params=[nginx, caddy, haproxy], ids=["nginx", "caddy", "haproxy"])
def proxied(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Serving, httpx2.Client]]:
    """A server, and a client that reaches it through a proxy."""
    made: Callable[[Path, int, str], list[str]] = request.param
    needed = (made.__name__, "openssl")
    if missing := [one for one in needed if shutil.which(one) is None]:
        pytest.skip(f"not installed: {', '.join(missing)}")
    folder, port = tmp_path_factory.mktemp(made.__name__), free_port()
    trusting = ssl.create_default_context()
    trusting.check_hostname, trusting.verify_mode = False, ssl.CERT_NONE
    headers = {"Host": NAME, "Authorization": "Bearer secret"}
    with (
        serving(Rules(RULES), access=ACCESS) as server,
        (folder / "out").open("wb") as out,
        subprocess.Popen(
            made(folder, port, server.url.removeprefix("http://")),
            stdout=out, stderr=out, env={"PATH": "/usr/sbin:/usr/bin:/bin", "HOME": str(folder)},
        ) as proxy,
        httpx2.Client(
            base_url=f"https://127.0.0.1:{port}", verify=trusting, headers=headers, timeout=60
        ) as http,
    ):  # fmt: skip
        try:
            answers(http, proxy, folder / "out")
            yield server, http
        finally:
            proxy.terminate()
            proxy.wait(20)


def answers(http: httpx2.Client, proxy: subprocess.Popen[bytes], out: Path) -> None:
    end = time.monotonic() + 30
    while True:
        try:
            if http.get("/health", extensions=SNI).status_code == 200:
                return
        except httpx2.TransportError:
            pass
        assert proxy.poll() is None, out.read_text("utf-8")
        assert time.monotonic() < end, out.read_text("utf-8")
        time.sleep(0.1)


def post(http: httpx2.Client, path: str, body: Any, **more: Any) -> Any:
    return http.stream("POST", path, json=body, extensions=SNI, **more)


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/api/chat"])
def test_a_stream_comes_as_it_is_written(proxied: tuple[Serving, httpx2.Client], path: str) -> None:
    server, http = proxied
    with post(http, path, {"model": "x", "messages": TURNS, "stream": True}) as answer:
        assert answer.status_code == 200
        lines = (line for line in answer.iter_lines() if "one" in line)
        assert next(lines)
        assert server.queue.running, "the first word came before the last was written"


def test_who_leaves_ends_the_reply(proxied: tuple[Serving, httpx2.Client]) -> None:
    server, http = proxied
    with post(http, "/v1/chat/completions", {"messages": TURNS, "stream": True}) as answer:
        next(line for line in answer.iter_lines() if "one" in line)
    end = time.monotonic() + 1.2  # the rest would take longer
    while server.queue.running and time.monotonic() < end:
        time.sleep(0.01)
    assert not server.queue.running


def test_what_a_proxy_changes_is_known(proxied: tuple[Serving, httpx2.Client]) -> None:
    server, http = proxied
    long = {"model": "x", "messages": [{"role": "user", "content": "a " * 1_500_000}]}
    with post(http, "/v1/chat/completions", long, headers={"X-Request-Id": "r7"}) as answer:
        told = answer.read().decode()
        assert (answer.status_code, answer.headers["x-request-id"]) == (400, "r7")
        assert "error" in told, "the server's own words, not the proxy's"
    with post(http, "/v1/chat/completions", {}, headers={"Authorization": "x"}) as answer:
        assert answer.status_code == 401
    assert server.http.get("/v1/models", headers={"Host": "other.example.org"}).status_code == 403


def test_a_slow_body_is_answered(proxied: tuple[Serving, httpx2.Client]) -> None:
    _, http = proxied
    body = json.dumps({"messages": [{"role": "user", "content": "Hi"}]}).encode()

    def slowly() -> Iterator[bytes]:
        for i in range(0, len(body), 10):
            yield body[i : i + 10]
            time.sleep(1.2)  # longer in all than the server waits before it looks

    answer = http.post("/v1/chat/completions", content=slowly(), extensions=SNI,
                       headers={"Content-Type": "application/json"})  # fmt: skip
    assert answer.status_code == 200, answer.text
    assert "Hello." in answer.text


def test_a_proxy_sees_the_end_and_who_was_there_is_answered(
    proxied: tuple[Serving, httpx2.Client],
) -> None:
    server, http = proxied
    with post(http, "/v1/chat/completions", {"messages": TURNS, "stream": True}) as answer:
        lines = answer.iter_lines()
        next(line for line in lines if "one" in line)
        server.service.traffic.closing = True
        try:
            until(lambda: http.get("/health", extensions=SNI).status_code == 503)
            assert "six" in "".join(lines)
        finally:
            server.service.traffic.closing = False
    until(lambda: http.get("/health", extensions=SNI).status_code == 200)
