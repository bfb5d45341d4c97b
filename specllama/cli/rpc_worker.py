"""``specllama rpc-worker``: lend this machine to a specllama, or llama.cpp, elsewhere."""

from __future__ import annotations

from pathlib import Path

import click

from specllama.cli import diagnostics, output
from specllama.cli.options import GroupedCommand, grouped
from specllama.cli.output import examples
from specllama.errors import UsageError
from specllama.settings.hardware import is_loopback


@click.command("rpc-worker", cls=GroupedCommand, epilog=examples()["rpc-worker"])
@grouped("--host", default="127.0.0.1", show_default=True, group="Worker",
         help="Address to listen on. The protocol has no password.")  # fmt: skip
@grouped("-p", "--port", type=click.IntRange(1, 65535), default=50052, show_default=True,
         group="Worker")  # fmt: skip
@grouped("-t", "--threads", type=click.IntRange(1, 1024), metavar="N", group="Worker",
         help="CPU threads. Unset: the physical cores.")  # fmt: skip
@grouped("--device", metavar="NAME,…", default="", group="Worker",
         help="Devices to lend; doctor names them. Unset: every GPU, else the CPU.")  # fmt: skip
@grouped("--mem", type=click.IntRange(1), metavar="MIB", group="Worker",
         help="Most RAM to lend when the CPU computes. Unset: all free RAM.")  # fmt: skip
@grouped("-c", "--cache", is_flag=True, group="Worker",
         help="Keep large tensors on this disk, so that they are sent only once.")  # fmt: skip
@grouped("--insecure", is_flag=True, group="Worker",
         help="Allow an address other than loopback.")  # fmt: skip
def command(
    host: str,
    port: int,
    threads: int | None,
    device: str,
    mem: int | None,
    cache: bool,
    insecure: bool,
) -> int:
    """Lend this machine's GPU, or its CPU, to a program on another one (--rpc).

    One program at a time; Ctrl-C ends the worker, and a program that uses it.
    """
    from specllama import paths
    from specllama.backend import rpc
    from specllama.backend.cores import physical_cores

    if not (is_loopback(host) or insecure):
        raise UsageError(
            f"any program that reaches {host} could read and run anything here",
            "use an SSH tunnel to a worker at 127.0.0.1, or --insecure in a network you trust",
        )
    folder = Path()
    if cache:
        folder = paths.cache_dir() / "rpc"
        folder.mkdir(parents=True, exist_ok=True)
    rpc.serve(
        host,
        port,
        threads=threads or physical_cores(),
        names=[name.strip() for name in device.split(",")] if device else [],
        limit=None if mem is None else mem << 20,
        cache=str(folder) if cache else "",
        ready=lambda: output.line(f"worker at {host}:{port}"),
    )
    return diagnostics.Exit.OK
