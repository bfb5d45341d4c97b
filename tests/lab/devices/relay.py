"""A worker of llama.cpp whose memory is bounded: a relay in front of a real one.

It reads every message of llama.cpp's protocol (ggml-rpc.cpp), answers for the memory itself,
refuses buffers that would not fit, and writes down what was asked of the worker.
"""

from __future__ import annotations

import socket
import struct
import threading
from dataclasses import dataclass, field

ALLOC, FREE, SET, HASH, GET, COMPUTE, MEMORY, AGAIN = 0, 4, 6, 7, 8, 10, 11, 16
ANSWERED = {ALLOC, 1, 2, 3, HASH, GET, 9, MEMORY, 13, 14, 15}


@dataclass
class Relay:
    """Listens at ``port`` for as long as the process lives.

    Attributes:
        worker: the port of the real one.
        said: bytes that it says it has. bound: those that it really gives.
        used, most: bytes that are given, now and at most.
        refused: buffers that did not fit.
        passes: graphs that were computed. fetched: bytes that were read back.
    """

    worker: int
    said: int
    bound: int
    port: int = 0
    used: int = 0
    most: int = 0
    refused: list[int] = field(default_factory=list)
    passes: int = 0
    fetched: int = 0
    _sizes: dict[int, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def forget(self) -> None:
        """Count anew."""
        self.most, self.passes, self.fetched = self.used, 0, 0
        self.refused.clear()

    def _accept(self) -> None:
        while True:
            client, _ = self._listener.accept()
            with client, socket.create_connection(("127.0.0.1", self.worker)) as server:
                for end in (client, server):
                    end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                try:
                    while True:
                        self._message(client, server)
                except (EOFError, OSError):
                    pass
            self._sizes.clear()  # the worker frees what a client leaves behind
            self.used = 0

    def _message(self, client: socket.socket, server: socket.socket) -> None:
        head = _read(client, 9)
        command, size = struct.unpack("<BQ", head)
        asked = _read(client, size)
        if command == MEMORY:
            free = max(self.said - self.used, 0)
            client.sendall(struct.pack("<QQQ", 16, free, self.said))
            return
        if command == ALLOC:
            wanted = struct.unpack_from("<Q", asked, 4)[0]
            if self.used + wanted > self.bound:
                self.refused.append(wanted)
                client.sendall(struct.pack("<QQQ", 16, 0, 0))
                return
        server.sendall(head + asked)
        if command == FREE:
            self.used -= self._sizes.pop(struct.unpack("<Q", asked)[0])
        elif command in (COMPUTE, AGAIN):
            self.passes += 1
        if command in ANSWERED:
            size = struct.unpack("<Q", _read(server, 8))[0]
            answer = _read(server, size)
            client.sendall(struct.pack("<Q", size) + answer)
            if command == ALLOC:
                handle, given = struct.unpack("<QQ", answer)
                self._sizes[handle] = given
                self.used += given
                self.most = max(self.most, self.used)
            elif command == GET:
                self.fetched += size


def _read(end: socket.socket, n: int) -> bytes:
    data = bytearray(n)
    view, at = memoryview(data), 0
    while at < n:
        got = end.recv_into(view[at:])
        if not got:
            raise EOFError
        at += got
    return bytes(data)
