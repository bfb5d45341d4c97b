"""Workers of llama.cpp: what is said of addresses and of whoever listens there."""

import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from specllama.backend import devices, rpc
from specllama.errors import CannotLoad, UsageError
from specllama.settings.hardware import endpoints
from specllama.settings.params import EngineOptions


@pytest.mark.parametrize(
    "text", ["127.0.0.1", "host:", ":50052", "host:0", "host:70000", "[::1]:50052", "a:1,,b:2"]
)
def test_addresses_that_llama_cpp_would_end_the_process_on(text: str) -> None:
    with pytest.raises(UsageError, match="cannot read the worker"):
        EngineOptions(rpc=text)


def test_addresses() -> None:
    assert endpoints("a:1, 10.0.0.2:50052") == (("a", 1), ("10.0.0.2", 50052))
    assert endpoints("") == ()


@contextmanager
def listening(answer: Callable[[socket.socket], None]) -> Iterator[int]:
    """The port of somebody who takes one connection."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            connection, _ = server.accept()
            with connection:
                answer(connection)

        thread = threading.Thread(target=serve)
        thread.start()
        yield server.getsockname()[1]
        thread.join()


def version(*numbers: int) -> Callable[[socket.socket], None]:
    """A worker that speaks this version."""

    def answer(connection: socket.socket) -> None:
        assert connection.recv(1024) == struct.pack("<BQ", 14, 24) + bytes(24)
        connection.sendall(struct.pack("<QBBBx", 28, *numbers) + bytes(24))

    return answer


def test_a_worker_of_this_version() -> None:
    with listening(version(7, 0, 0)) as port:
        rpc.greet("127.0.0.1", port)


@pytest.mark.parametrize("numbers", [(6, 0, 0), (7, 1, 0), (8, 0, 0)])
def test_a_worker_of_another_version(numbers: tuple[int, int, int]) -> None:
    with listening(version(*numbers)) as port, pytest.raises(CannotLoad) as refused:
        rpc.greet("127.0.0.1", port)
    assert f"speaks version {'.'.join(map(str, numbers))}" in refused.value.message


@pytest.mark.parametrize("said", [b"", b"HTTP/1.1 400 Bad Request\r\n\r\n"])
def test_somebody_else(said: bytes) -> None:
    def answer(connection: socket.socket) -> None:
        connection.recv(1024)
        connection.sendall(said)

    with listening(answer) as port, pytest.raises(CannotLoad, match=r"is no worker of llama\.cpp"):
        rpc.greet("127.0.0.1", port)


def test_a_worker_that_serves_somebody_else(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rpc, "ANSWER_S", 0.05)
    done = threading.Event()
    with listening(lambda connection: done.wait() and None) as port:
        with pytest.raises(CannotLoad, match="does not answer") as refused:
            rpc.greet("127.0.0.1", port)
        done.set()
    assert "one program at a time" in (refused.value.hint or "")


def test_nobody() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    with pytest.raises(CannotLoad, match=f"no worker at 127.0.0.1:{port}") as refused:
        rpc.greet("127.0.0.1", port)
    assert f"specllama rpc-worker -p {port}" in (refused.value.hint or "")


def test_a_build_without_rpc(monkeypatch: pytest.MonkeyPatch) -> None:
    ggml = devices.ggml
    monkeypatch.setattr(
        devices,
        "ggml",
        lambda name, *rest: (lambda _: None) if name.endswith("by_name") else ggml(name, *rest),
    )
    with pytest.raises(CannotLoad, match="built without RPC") as refused:
        rpc.use("127.0.0.1:50052")
    assert "-DGGML_RPC=on" in (refused.value.hint or "")


def test_an_abort_of_llama_cpp_is_one_sentence() -> None:
    code = """
import llama_cpp
from specllama.backend import llama_log
llama_log.start()
llama_cpp.llama_cpp._lib["ggml_abort"](b"/src/ggml-rpc.cpp", 566, b"Remote RPC server crashed")
"""
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert ended.returncode == 134
    assert ended.stdout == ""
    assert ended.stderr.startswith("error: a worker (--rpc) is gone: ggml-rpc.cpp:566: Remote RPC")
