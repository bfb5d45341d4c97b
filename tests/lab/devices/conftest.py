"""Devices for tests: workers on loopback, and the device of a Vulkan driver in software.

LLAMA_CPP_LIB names a folder with llama.cpp's libraries, built with RPC or Vulkan from the source
that the binding has pinned (``make devices``).
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
from machines import FOLDER, Machine
from relay import Relay


@pytest.fixture(scope="session")
def machine(tmp_path_factory: pytest.TempPathFactory) -> Machine:
    if not list(Path(FOLDER or "nowhere").glob("libllama.*")):
        pytest.skip("LLAMA_CPP_LIB names no folder with llama.cpp's libraries")
    return Machine(tmp_path_factory.mktemp("home"))


@pytest.fixture(scope="session")
def worker_ports(machine: Machine) -> Iterator[list[int]]:
    """Two workers, ``specllama rpc-worker``, on the CPU."""
    ports, processes = [], []
    for _ in range(2):
        with socket.create_server(("127.0.0.1", 0)) as free:
            ports.append(free.getsockname()[1])
        processes.append(machine.start("rpc-worker", "-p", str(ports[-1]), "-t", "1"))
    for process in processes:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line.startswith("worker at"), f"{line} {process.communicate()}"
    for port in ports:
        _wait(lambda port=port: _answers(port))
    yield ports
    for process in processes:
        process.terminate()
        process.communicate()


def _answers(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def _wait(done: Callable[[], bool]) -> None:
    until = time.monotonic() + 30
    while not done():
        assert time.monotonic() < until
        time.sleep(0.05)


@pytest.fixture
def relays(worker_ports: Sequence[int]) -> Callable[..., list[Relay]]:
    """Bounded workers: ``relays(bytes, …)``, ``gives`` what they really have, if it is less."""

    def make(*said: int, gives: int | None = None) -> list[Relay]:
        pairs = zip(worker_ports, said, strict=False)
        return [Relay(port, size, size if gives is None else gives) for port, size in pairs]

    return make
