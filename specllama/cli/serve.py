"""``specllama serve``: many clients, one engine."""

from __future__ import annotations

import gc
import importlib.util
import ipaddress
import os
import re
from collections.abc import Sequence
from functools import partial
from importlib import metadata
from pathlib import Path
from threading import Event
from typing import TYPE_CHECKING, Any

import click

from specllama import signals
from specllama.cli import completing, diagnostics, loading
from specllama.cli.options import (
    LOADING,
    REPLYING,
    GroupedCommand,
    disk_option,
    grouped,
    read_text,
    resolve,
    say_project,
    settings_options,
    sharing_options,
)
from specllama.errors import SpecllamaError, UsageError
from specllama.paths import pip_install
from specllama.remote.address import KEY_VARIABLE
from specllama.settings.hardware import is_loopback
from specllama.settings.params import PROPOSERS
from specllama.settings.schema import BY_NAME

if TYPE_CHECKING:
    from specllama.cli.reload import ServerSettings

PARALLEL = 4

EPILOG = """\b
Examples:
  specllama serve                            the bundled pair at http://127.0.0.1:8484
  specllama serve -m qwen3-8b --parallel 8   eight conversations at once
  specllama serve -m qwen3-8b -m gemma3-4b   two models: requests name one, loaded when needed
  specllama serve --on-demand                every model on this machine, loaded when needed
  specllama serve --host 0.0.0.0 --api-key-file keys.txt
  specllama serve --experiment auto=50,none=50    half of the conversations plain

\b
Clients:
  OpenAI              base URL http://127.0.0.1:8484/v1
  Anthropic, Ollama   http://127.0.0.1:8484
  specllama           run --remote URL, chat --remote URL, top URL

GET /health answers 200 once the model is loaded. Ctrl-C lets replies end
(--drain); a second one stops at once.
"""


@click.command("serve", cls=GroupedCommand, epilog=EPILOG)
@settings_options(only=(*(n for n in LOADING if n not in ("model", "draft-model")), *REPLYING))
@grouped("-d", "--draft-model", multiple=True, metavar="REF", group="Model",
         shell_complete=completing.models,
         help="Draft model, named in the same ways; none loads none. With several models: one for "
         "each, in their order; auto is the model's own.")  # fmt: skip
@grouped("-m", "--model", multiple=True, metavar="REF", group="Model",
         shell_complete=completing.models,
         help="Target: a path, user/repo[:quant], a catalog name, or a folder of models. "
         "Repeatable: requests name one of them, and the first is loaded at once.")  # fmt: skip
@grouped("--on-demand", is_flag=True, group="Model",
         help="Also serve every other model on this machine: a request that names one loads "
         "it.")  # fmt: skip
@grouped(
    "--models-max",
    type=click.IntRange(0),
    default=0,
    metavar="N",
    group="Model",
    help="Most models loaded at once; 0: as many as fit.  [default: 0]",
)
@grouped("--idle-unload", metavar="TIME", group="Model",
         help="Unload a model that no request named for this TIME, such as 10m; 0 unloads at once, "
         "never keeps it.  [default: 10m]")  # fmt: skip
@grouped("--host", default="127.0.0.1", show_default=True, group="Server",
         help="Address to listen on. Any address but loopback needs a key.")  # fmt: skip
@grouped("--port", type=click.IntRange(0, 65535), default=8484, show_default=True, group="Server",
         help="Port to listen on; 0 takes a free one.")  # fmt: skip
@sharing_options(PARALLEL)
@disk_option
@grouped("--alias", metavar="NAME", group="Server", multiple=True,
         help="Name of the model in responses. With several models: one for each, in their "
         "order.")  # fmt: skip
@grouped("--api-key-file", type=click.Path(path_type=Path), group="Server",
         help=f"File of client keys, one per line; {KEY_VARIABLE} adds one.")  # fmt: skip
@grouped("--insecure", is_flag=True, group="Server",
         help="Allow an address other than loopback without a key.")  # fmt: skip
@grouped("--allow-host", multiple=True, metavar="NAME", group="Server",
         help="Another host name that clients use for this server; repeatable.")  # fmt: skip
@grouped("--cors-origin", multiple=True, metavar="ORIGIN", group="Server",
         help="Allow requests from web pages of this origin, such as https://example.org; "
         "repeatable.")  # fmt: skip
@grouped("--queue", type=click.IntRange(0), group="Server", metavar="N",
         help="Requests of one client that may wait; further ones get 429. All clients "
         "together may have four times as many waiting.  [default: 64]")  # fmt: skip
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
@grouped("--access-log/--no-access-log", default=None, group="Output",
         help="Log each request on one line: time, route, status, seconds, client, id; never its "
         "text.  [default: on]")  # fmt: skip
@grouped("--log-file", metavar="FILE", group="Output", help=BY_NAME["log-file"].help)
@grouped(
    "-q", "--quiet", is_flag=True, group="Output", help="Print only the line with the address."
)
def command(
    host: str,
    port: int,
    parallel: int,
    kv_ram: int | None,
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
    _require_installed()
    from specllama.cli.reload import Reload
    from specllama.cli.served import Serves
    from specllama.server.guard import Access, hosts_of
    from specllama.server.log import ServerLog
    from specllama.server.running import bind, run, url_of
    from specllama.server.service import Service

    one = {"model": [*model, None][0], "draft_model": [*draft_model, None][0]}
    read = partial(_read, {**flags, **one}, api_key_file, None if insecure else host)
    settings = (told := read()).settings
    if not quiet:
        say_project(settings)
    said = None if quiet else loading.LoadingLine(shown=False, quiet=False)
    serves = Serves.of(settings, said, parallel=parallel, kv_ram=kv_ram)
    refs = model or (loading.model_of(settings, quiet=quiet or on_demand),)
    drafts = draft_model or tuple(filter(None, [settings["draft-model"]]))
    service = Service(
        serves.opened(refs, drafts, alias, on_demand=on_demand, most=models_max),
        Access(
            hosts_of(host, allow_host), tuple(cors_origin), told.keys, proxies=_addresses(proxy)
        ),
        experiment=_shares(experiment),
        expose_text=expose_text,
        slots=slots,
    )
    with ServerLog.of(settings, quiet=quiet) as log, bind(host, port) as listening:
        service.log = log.request
        service.models.hearers.add(log.model)
        reload = Reload(read, told, serves, service, log)

        def ready() -> None:
            reload.begin()
            _ready(service, url_of(listening), parallel, on_demand)

        load, stop = bool(model) or not on_demand, Event()
        with signals.stop_on_signals(stop), signals.on_hangup(reload.ask):
            run(service, listening, stop=stop, ready=ready, drain_s=drain, load=load)
    return diagnostics.Exit.OK


def _read(flags: dict[str, Any], key_file: Path | None, open_to: str | None) -> ServerSettings:
    """Read the settings from files, variables and flags.

    Raises:
        UsageError, ConfigError: it is wrong, or clients could use or read what is not theirs.
    """
    from specllama.cli.reload import ServerSettings

    settings, keys = resolve(flags), _keys(key_file)
    if open_to is not None and not (is_loopback(open_to) or keys):
        raise UsageError(
            f"any program that reaches {open_to} could use this server",
            "give --api-key-file, or --insecure if that is meant",
        )
    return ServerSettings(settings, keys)


def _require_installed() -> None:
    """Raise SpecllamaError if a package is missing."""
    for needed in ("starlette", "uvicorn"):
        if importlib.util.find_spec(needed) is None:
            raise SpecllamaError(
                f"serve needs {needed}, which is not installed",
                f"install what it needs with: {pip_install(_needs('serve'))}",
            )


def _needs(extra: str) -> str:
    """Return the requirements of an extra, for a shell. The name of our own package is not among
    them: an index may not know it, or know it as another's."""
    marker = re.compile(rf"""extra\s*==\s*['"]{extra}['"]""")
    needed = [one for one in metadata.requires("specllama") or [] if marker.search(one)]
    return " ".join(f'"{one.split(";")[0].strip()}"' for one in needed)


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
