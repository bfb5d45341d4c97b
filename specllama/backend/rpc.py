"""Devices of other machines: llama.cpp's RPC backend, its workers and how to become one.

A worker answers one program at a time, any program, without a password. A connection that is
refused, lost, or of another version ends the process in llama.cpp: workers are asked by a socket of
ours first, then one connection is held for as long as the process lives.
"""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import struct
import sys
from collections.abc import Callable, Sequence
from typing import Any

from specllama.backend import devices, trial
from specllama.errors import CannotLoad, UsageError
from specllama.models import memory
from specllama.settings.hardware import endpoints

PORT = 50052  # llama.cpp's own
PROTOCOL = (7, 0)  # of the pinned binding (ggml-rpc.h): the same major one, no newer minor one
ANSWER_S = 5.0
_HELLO, _CAPABILITIES = 14, 24  # a command and the bytes that come with it (ggml-rpc.cpp)
_P, _TEXT = ctypes.c_void_p, ctypes.c_char_p

_known: dict[str, Any] = {}  # connections by address, of this process


def use(workers: str) -> None:
    """Make llama.cpp compute on the devices of some workers, from now on in this process.

    Args:
        workers: see ``hardware.endpoints``.

    Raises:
        UsageError: an address cannot be read.
        CannotLoad: this build of llama.cpp cannot do that, or a worker does not answer.
    """
    for host, port in endpoints(workers):
        address = f"{host}:{port}"
        if address in _known:
            continue
        add = _backend_function("ggml_backend_rpc_add_server")
        greet(host, port)
        registry = ctypes.CFUNCTYPE(_P, _TEXT)(add)(address.encode())
        if not registry:
            raise CannotLoad(f"the worker at {address} offers no device")
        devices.ggml("ggml_backend_register", None, _P)(registry)
        device = devices.ggml("ggml_backend_reg_dev_get", _P, _P, ctypes.c_size_t)(registry, 0)
        _known[address] = devices.ggml("ggml_backend_dev_init", _P, _P, _TEXT)(device, None)


def greet(host: str, port: int) -> None:
    """Shake hands with a worker as llama.cpp would.

    Raises:
        CannotLoad: no worker answers there, or none that llama.cpp understands.
    """
    address = f"{host}:{port}"
    begin = "start a worker there: specllama rpc-worker" + ("" if port == PORT else f" -p {port}")
    try:
        with socket.create_connection((host, port), ANSWER_S) as connection:
            connection.settimeout(ANSWER_S)
            hello = struct.pack("<BQ", _HELLO, _CAPABILITIES) + bytes(_CAPABILITIES)
            connection.sendall(hello)
            answer = b""
            while len(answer) < 11 and (part := connection.recv(64)):
                answer += part
    except TimeoutError:
        raise CannotLoad(
            f"the worker at {address} does not answer",
            "a worker serves one program at a time: end the other one, or start a second worker",
        ) from None
    except OSError as error:
        raise CannotLoad(f"no worker at {address}: {error.strerror or error}", begin) from None
    if len(answer) < 11 or struct.unpack_from("<Q", answer)[0] != 4 + _CAPABILITIES:
        raise CannotLoad(f"what listens at {address} is no worker of llama.cpp", begin)
    major, minor, patch = struct.unpack_from("<BBB", answer, 8)
    if major != PROTOCOL[0] or minor > PROTOCOL[1]:
        mine = ".".join(map(str, PROTOCOL))
        raise CannotLoad(
            f"the worker at {address} speaks version {major}.{minor}.{patch} of llama.cpp's "
            f"protocol, this program {mine}",
            "run the same version of llama.cpp on both machines",
        )


def serve(
    host: str,
    port: int,
    *,
    threads: int,
    names: Sequence[str],
    limit: int | None,
    cache: str,
    ready: Callable[[], object],
) -> None:
    """Lend devices of this machine to a program elsewhere, one program at a time, for ever.

    Args:
        names: of the devices; empty for every GPU, or the CPU where there is none.
        limit: most bytes of RAM that the CPU reports as free.
        cache: a folder in which large tensors are kept, so that they need not be sent again; "" is
            none.
        ready: called when nothing is in the way any more, right before llama.cpp listens.

    Raises:
        UsageError: there is no such device or address, or the port is taken.
        CannotLoad: this build of llama.cpp cannot do that, or does not want to.
    """
    trial.require()
    start = _backend_function("ggml_backend_rpc_start_server")
    found = devices.devices()
    lent = [device for device in found if device.name in names] if names else devices.gpus(found)
    lent = lent or [device for device in found if device.kind == "cpu"]
    if missing := set(names) - {device.name for device in lent}:
        known = ", ".join(device.name for device in found)
        raise UsageError(f"there is no device {sorted(missing)[0]!r}", f"there is {known}")
    try:
        host = socket.gethostbyname(host)  # llama.cpp wants digits
        socket.create_server((host, port)).close()
    except OSError as error:
        raise UsageError(
            f"cannot listen at {host}:{port}: {error.strerror or error}", "choose another --port"
        ) from None
    handles = devices.handles()
    chosen = (_P * len(lent))(*(handles[device.name] for device in lent))
    alive = [_tell_free(handles[d.name], limit) for d in lent if d.kind == "cpu"]
    for number in (signal.SIGINT, signal.SIGTERM):  # Python's handlers would wait for llama.cpp
        signal.signal(number, signal.SIG_DFL)
    ready()
    sys.stdout.flush()
    os.dup2(2, 1)  # llama.cpp prints there
    size, call = ctypes.c_size_t, ctypes.CFUNCTYPE
    call(None, _TEXT, _TEXT, size, size, _P)(start)(
        f"{host}:{port}".encode(), os.fsencode(cache) or None, threads, len(lent), chosen
    )
    del alive
    raise CannotLoad(f"llama.cpp does not listen at {host}:{port}")


def _tell_free(device: int, limit: int | None) -> Any:
    """Make a CPU report its free RAM: ggml reports the total.

    Returns:
        What has to live as long as the device.
    """

    def tell(_: int, free: Any, total: Any) -> None:
        ram = memory.available_memory()
        free[0] = ram if limit is None else min(ram, limit)
        total[0] = memory.total_memory()

    # ggml_backend_device begins with get_name, get_description and get_memory
    size = ctypes.POINTER(ctypes.c_size_t)
    function = ctypes.CFUNCTYPE(None, _P, size, size)(tell)
    (_P * 3).from_address(device)[2] = ctypes.cast(function, _P)
    return function


def _backend_function(name: str) -> int:
    """Return the address of a function of the RPC backend.

    Raises:
        CannotLoad: the binding was built without it.
    """
    registry = devices.ggml("ggml_backend_reg_by_name", _P, _TEXT)(b"RPC")
    look_up = devices.ggml("ggml_backend_reg_get_proc_address", _P, _P, _TEXT)
    address = look_up(registry, name.encode()) if registry else None
    if not address:
        raise CannotLoad(
            "the installed llama.cpp is built without RPC, so that it cannot work with other "
            "machines",
            f"build it with: {devices.build_command('GGML_RPC')}",
        )
    return int(address)
