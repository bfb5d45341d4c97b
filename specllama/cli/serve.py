"""``specllama serve``: many clients, one engine."""

from __future__ import annotations

import gc
import ipaddress
import os
import shlex
import stat
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from threading import Event
from typing import Any

import click

from specllama import signals
from specllama.cli import completion, diagnostics, loading
from specllama.cli.options import (
    LOADING,
    REPLYING,
    GroupedCommand,
    grouped,
    parallel_option,
    quiet_option,
    read_text,
    resolve,
    settings_options,
)
from specllama.cli.output import examples
from specllama.errors import UsageError
from specllama.remote.address import KEY_VARIABLE
from specllama.settings.duration import seconds
from specllama.settings.hardware import is_loopback
from specllama.settings.params import PROPOSERS

PARALLEL = 4
USUAL = ("model", "draft_model", "ctx_size", "gpu_layers", "threads", "parallel", "host", "port",
         "api_key_file", "alias", "on_demand", "idle_unload", "speculate", "set")  # fmt: skip


@click.command("serve", cls=GroupedCommand, epilog=examples()["serve"], usual=USUAL)
@settings_options(
    "idle-unload",
    "kv-ram",
    "kv-disk",
    "queue",
    "access-log",
    "log-file",
    only=(*(n for n in LOADING if n not in ("model", "draft-model")), *REPLYING),
)
@grouped("-d", "--draft-model", multiple=True, metavar="REF", group="Model",
         shell_complete=completion.models,
         help="Draft model, named alike; none loads none. With several models: one for each, in "
         "their order; auto is the model's own.")  # fmt: skip
@grouped("-m", "--model", multiple=True, metavar="REF", group="Model",
         shell_complete=completion.models,
         help="Model: a path, user/repo[:quant], name or folder. "
         "Repeatable: requests name one of them, and the first is loaded at once.")  # fmt: skip
@grouped("--on-demand", is_flag=True, group="Model",
         help="Also serve the other models on this machine. A request that names one loads "
         "it.")  # fmt: skip
@grouped("--models-max", type=click.IntRange(0), default=0, metavar="N", group="Model",
         help="Most models loaded at once; 0: as many as fit.  [default: 0]")  # fmt: skip
@grouped("--host", metavar="ADDRESS", default="127.0.0.1", show_default=True, group="Server",
         help="Address to listen on. Any address but loopback needs a key.")  # fmt: skip
@grouped("--port", type=click.IntRange(0, 65535), default=8484, show_default=True, group="Server",
         metavar="N",
         help="Port to listen on; 0 takes a free one.")  # fmt: skip
@parallel_option(PARALLEL)
@grouped("--alias", metavar="NAME", group="Server", multiple=True,
         help="Name of the model in responses. With several models: one for each, in their "
         "order.")  # fmt: skip
@grouped("--api-key-file", type=click.Path(path_type=Path), group="Server",
         help=f"File of client keys, one per line. {KEY_VARIABLE} adds one.")  # fmt: skip
@grouped("--insecure", is_flag=True, group="Server",
         help="Allow an address other than loopback without a key.")  # fmt: skip
@grouped("--allow-host", multiple=True, metavar="NAME", group="Server",
         help="Another host name that clients use for this server; repeatable.")  # fmt: skip
@grouped("--cors-origin", multiple=True, metavar="ORIGIN", group="Server",
         help="Allow requests from web pages of this origin, such as https://example.org; "
         "repeatable.")  # fmt: skip
@grouped("--proxy", multiple=True, metavar="ADDRESS", group="Server",
         help="Address of a trusted proxy, whose X-Forwarded-For names the client; "
         "repeatable.")  # fmt: skip
@grouped("--experiment", metavar="METHOD=SHARE,…", group="Server",
         help="Give conversations methods in these shares, such as auto=50,none=50.")  # fmt: skip
@grouped("--expose-text", is_flag=True, group="Server",
         help="Include texts in /specllama/events, not only figures of rounds.")  # fmt: skip
@grouped("--slots/--no-slots", default=True, show_default=True, group="Server",
         help="Let every client see how replies are written, in /slots, /specllama/events "
         "and `specllama top`.")  # fmt: skip
@grouped("--drain", type=click.FloatRange(0), default=30.0, show_default=True, group="Server",
         metavar="SECONDS",
         help="Time that running replies get to finish when the server stops.")  # fmt: skip
@quiet_option("Print only the line with the address.")
def command(
    host: str,
    port: int,
    parallel: int,
    alias: Sequence[str],
    model: Sequence[str],
    draft_model: Sequence[str],
    on_demand: bool,
    models_max: int,
    api_key_file: Path | None,
    insecure: bool,
    allow_host: Sequence[str],
    cors_origin: Sequence[str],
    proxy: Sequence[str],
    experiment: str | None,
    expose_text: bool,
    slots: bool,
    drain: float,
    quiet: bool,
    **flags: Any,
) -> int:
    """Answer clients over HTTP.

    Several conversations share the passes of one engine; each writes what it would write alone.
    With several models, each has an engine of its own, loaded when a request names it.
    """
    diagnostics.require_extra("serve", "starlette", "uvicorn")
    from specllama.cli.served_models import served_models
    from specllama.server.guard import Access, hosts_of
    from specllama.server.server_log import ServerLog
    from specllama.server.server_process import bind, run, url_of
    from specllama.server.service import Service

    one = {"model": [*model, None][0], "draft_model": [*draft_model, None][0]}
    settings, keys = resolve({**flags, **one}, quiet=quiet), _keys(api_key_file)
    if not (insecure or is_loopback(host) or keys):
        raise UsageError(
            f"any program that reaches {host} could use this server",
            "give --api-key-file, or --insecure if that is meant",
        )
    usual = loading.pair_of(settings, quiet=quiet or on_demand)
    models = served_models(
        model or usual[:1],
        draft_model or tuple(filter(None, usual[1:])),
        alias,
        replace(settings.engine_options(), parallel=parallel),
        settings.generate_params(),
        on_demand=on_demand,
        most=models_max,
        waiting=settings["queue"],
        idle_s=seconds(settings["idle-unload"]),
        on_event=None if quiet else loading.LoadingLine(hidden=True),
    )
    service = Service(
        models,
        Access(hosts_of(host, allow_host), tuple(cors_origin), keys, proxies=_addresses(proxy)),
        experiment=_shares(experiment),
        expose_text=expose_text,
        slots=slots,
    )
    with ServerLog.of(settings, quiet=quiet) as log, bind(host, port) as listening:
        service.log = log.request
        service.models.hearers.add(log.model)
        ready = partial(_ready, service, url_of(listening), parallel, on_demand)
        load, stop = bool(model) or not on_demand, Event()
        with signals.stop_on_signals(stop, hangup=log.hang_up):
            run(service, listening, stop=stop, ready=ready, drain_s=drain, load=load)
    return diagnostics.Exit.OK


def _ready(service: Any, url: str, parallel: int, on_demand: bool) -> None:
    gc.freeze()  # what was loaded stays: a search for garbage would stop all threads for it
    models = service.models
    names = list(models.all)
    several = f"{', '.join(names[:8])}{' …' if len(names) > 8 else ''}"
    more = " and, when a request names it, any other model here" if on_demand else ""
    verb = "is" if len(names) == 1 and not more else "are"
    diagnostics.note(f"{several}{more} {verb} served at {url}")
    if models.loaded and (lanes := models.first.queue.lanes) < parallel:
        at_once = "one reply at a time" if lanes == 1 else f"{lanes} replies at once"
        diagnostics.note(f"{models.first.name} writes {at_once}: further requests wait")


def _addresses(given: Sequence[str]) -> tuple[str, ...]:
    try:
        return tuple(str(ipaddress.ip_address(one)) for one in given)
    except ValueError as error:
        raise UsageError(f"--proxy: {error}", "for example --proxy 127.0.0.1") from None


def _keys(file: Path | None) -> tuple[str, ...]:
    lines = [] if file is None else read_text(file, "the key file").splitlines()
    keys = [key.strip() for key in [*lines, os.environ.get(KEY_VARIABLE, "")]]
    keys = [key for key in keys if key and not key.startswith("#")]
    if file is not None and file.is_file() and file.stat().st_mode & (stat.S_IRGRP | stat.S_IROTH):
        others = "other users of this machine can read the keys in"
        diagnostics.warn(f"{others} {file}; only you can after: chmod 600 {shlex.quote(str(file))}")
    if file is not None and not keys:
        raise UsageError(f"the key file {file} holds no key")
    return tuple(keys)


def _shares(text: str | None) -> tuple[tuple[str, int], ...]:
    """Read the arms of an experiment, in percent."""
    arms: list[tuple[str, int]] = []
    for part in text.split(",") if text else ():
        method, _, share = part.strip().partition("=")
        if method not in PROPOSERS or not share.isdigit():
            raise UsageError(
                f"cannot read the experiment {part!r}", "for example --experiment auto=50,none=50"
            )
        arms.append((method, int(share)))
    if arms and sum(share for _, share in arms) != 100:
        raise UsageError("the shares of an experiment add up to 100")
    return tuple(arms)
