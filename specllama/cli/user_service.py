"""A server that is left running: systemd or launchd starts it with the session of its user."""

from __future__ import annotations

import os
import plistlib
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from specllama import paths
from specllama.cli import diagnostics, output
from specllama.cli.asking import confirm
from specllama.errors import SpecllamaError, UsageError
from specllama.models import refs
from specllama.remote.address import KEY_VARIABLE
from specllama.settings.config import Settings

if TYPE_CHECKING:
    from specllama.server.models import Models

NAME = "specllama"
LABEL = "specllama.serve"
PROGRAM = (sys.executable, "-P", "-m", "specllama", "serve")
PASSING_S = 15  # after which a server is ended that does not end by itself, besides --drain
_OWN = ("install_service", "uninstall_service", "yes", "log_file")
_FILES = ("model", "draft_model", "head", "lora", "draft_from")  # references, or paths
_RUN_S = 60.0
_OFFLINE = "SPECLLAMA_OFFLINE"
_CARRIED = (paths.HOME_VARIABLE, _OFFLINE)

Command = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ServiceFile:
    """The file by which this system starts a server, and what goes with it.

    Attributes:
        program: that starts, shows and ends it; "" where it is not installed.
        starts, ends: commands, in their order; those of ``ends`` may find nothing to end.
        told: (what for, command) that a person may want later.
    """

    path: Path
    text: str
    program: str
    starts: tuple[Command, ...]
    ends: tuple[Command, ...]
    told: tuple[tuple[str, str], ...] = ()
    after: tuple[Command, ...] = field(default=())

    def run(self, commands: Sequence[Command], *, check: bool = True) -> None:
        """Run commands, or say them where their program is missing.

        Raises:
            SpecllamaError: one failed.
        """
        lines = [shlex.join(command) for command in commands]
        if not shutil.which(self.program):
            diagnostics.note(f"there is no {self.program} here; next: {' && '.join(lines)}")
            return
        for at, command in enumerate(commands):
            if (why := _failure(command)) and check:
                raise SpecllamaError(
                    f"{lines[at]}: {why}", f"in a session of your own: {' && '.join(lines[at:])}"
                )


def _failure(command: Command) -> str:
    """Why a command failed; "" if it did not."""
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, errors="replace", timeout=_RUN_S
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    said = (done.stderr or done.stdout).strip().splitlines()
    return "" if not done.returncode else (said[-1] if said else f"it ended with {done.returncode}")


def install(
    ctx: click.Context, models: Models, settings: Settings, drain_s: float, *, yes: bool
) -> None:
    """Show the file, and write it and start the server if that is agreed to.

    Raises:
        UsageError: not on this system, for root, or with what would stand in the file for all to
            read. SpecllamaError: it cannot be written or started, or a model is not here.
    """
    _require_person()
    for model in models.all.values():
        if model.recipe is not None:
            refs.resolve_pair(model.recipe.target, model.recipe.draft)
    if os.environ.get(KEY_VARIABLE):
        raise UsageError(
            f"the key of {KEY_VARIABLE} would stand in the file of the service",
            f"write it to a file of its own, give --api-key-file FILE, and unset {KEY_VARIABLE}",
        )
    log = os.path.abspath(os.path.expanduser(settings["log-file"] or paths.server_log()))
    service = service_file([*PROGRAM, *_flags(ctx), f"--log-file={log}"], log, drain_s)
    output.line(service.text.rstrip())
    _say_left_behind(settings)
    if not yes:
        confirm(f"write this to {service.path} and start it?")
    if service.path.exists():
        service.run(service.ends, check=False)
    _write(service)
    diagnostics.note(f"written: {service.path}")
    service.run(service.starts)
    for what, line in (*service.told, ("remove it", "specllama serve --uninstall-service")):
        diagnostics.note(f"{f'{what}:':<17}{line}")


def uninstall(*, yes: bool) -> None:
    """End the server and delete its file.

    Raises:
        UsageError: there is none. SpecllamaError: the file cannot be deleted.
    """
    _require_person()
    service = service_file(PROGRAM, str(paths.server_log()), 0.0)
    if not service.path.exists():
        raise UsageError(f"no service is installed: there is no {service.path}")
    if not yes:
        confirm(f"end the server and delete {service.path}?")
    service.run(service.ends, check=False)
    try:
        service.path.unlink()
    except OSError as error:
        raise SpecllamaError(f"cannot delete {service.path}: {error.strerror or error}") from None
    service.run(service.after, check=False)
    diagnostics.note(f"deleted: {service.path}; the log is kept: {paths.server_log()}")


def _require_person() -> None:
    if sys.platform == "win32":
        raise UsageError(
            "a service is written for systemd (Linux) or launchd (macOS)",
            "on Windows, have the Task Scheduler run specllama serve when you log in",
        )
    if os.geteuid() == 0:
        raise UsageError(
            "a server that is left running does not run as root",
            "run this without sudo, as the user whose models it is to serve",
        )


def _say_left_behind(settings: Settings) -> None:
    """Name what holds in this shell or folder, and will not for the service."""
    for name, value in settings.changes().items():
        if value.origin != str(paths.config_file()):
            diagnostics.warn(
                f"{name} is set by {value.origin}, which the service does not see; for good: "
                f"specllama config set {name} …"
            )


def _write(service: ServiceFile) -> None:
    try:
        service.path.parent.mkdir(parents=True, exist_ok=True)
        service.path.write_text(service.text, "utf-8")
    except OSError as error:
        raise SpecllamaError(f"cannot write {service.path}: {error.strerror or error}") from None


# -- the command line --


def _flags(ctx: click.Context) -> Iterator[str]:
    """The flags that were given, in a form that means the same in every folder."""
    for param in ctx.command.params:
        name = param.name or ""
        given = ctx.get_parameter_source(name) is ParameterSource.COMMANDLINE
        if not given or name in _OWN or not isinstance(param, click.Option):
            continue
        value, flag = ctx.params[name], max(param.opts, key=len)
        if param.is_flag:
            yield flag if value else max(param.secondary_opts, key=len)
            continue
        for one in value if param.multiple else (value,):
            yield f"{flag}={_lasting(name, one)}"


def _lasting(name: str, value: Any) -> str:
    if isinstance(value, Path):
        return os.path.abspath(value.expanduser())
    return refs.lasting(value) if name in _FILES else str(value)


def service_file(words: Sequence[str], log: str, drain_s: float) -> ServiceFile:
    """The file of this system for a command that writes this log.

    Raises:
        UsageError: a word of it cannot stand in such a file.
    """
    kept = {name: os.environ[name] for name in _CARRIED if os.environ.get(name)}
    if paths.HOME_VARIABLE in kept:
        kept[paths.HOME_VARIABLE] = os.path.abspath(kept[paths.HOME_VARIABLE])
    for word in (*words, *kept.values()):
        if not word.isprintable():
            raise UsageError(f"{word!r} cannot be written into the file of a service")
    end_s = round(drain_s) + PASSING_S
    made = _agent if sys.platform == "darwin" else _unit
    return made(words, kept, log, end_s)


# -- systemd --


def _unit(words: Sequence[str], kept: dict[str, str], log: str, end_s: int) -> ServiceFile:
    unit = f"{NAME}.service"
    base = os.environ.get("XDG_CONFIG_HOME") or os.path.expanduser("~/.config")
    run = " ".join([_quoted(words[0]), *(_quoted(word, "$") for word in words[1:])])
    kept_lines = "".join(f"Environment={_quoted(f'{name}={kept[name]}')}\n" for name in kept)
    text = f"""[Unit]
Description=specllama serve: models over HTTP
StartLimitIntervalSec=300
StartLimitBurst=5

[Service]
Type=exec
{kept_lines}ExecStart={run}
ExecReload=kill -HUP $MAINPID
Restart=on-failure
RestartSec=5
RestartPreventExitStatus=2 3 4
KillMode=mixed
TimeoutStopSec={end_s}
NoNewPrivileges=yes

[Install]
WantedBy=default.target
"""
    control = ("systemctl", "--user")
    return ServiceFile(
        Path(base, "systemd", "user", unit),
        text,
        "systemctl",
        ((*control, "daemon-reload"), (*control, "enable", "--now", unit)),
        ((*control, "disable", "--now", unit),),
        (
            ("see it", f"systemctl --user status {NAME}"),
            ("its log", f"tail -F {shlex.quote(log)}"),
            ("start it again", f"systemctl --user restart {NAME}"),
            ("reload settings", f"systemctl --user reload {NAME}"),
            ("logged out, too", "loginctl enable-linger"),
        ),
        ((*control, "daemon-reload"),),
    )


def _quoted(word: str, also: str = "") -> str:
    """A word in a unit: % and, in arguments, $ begin what is replaced there."""
    for sign in f"%{also}":
        word = word.replace(sign, 2 * sign)
    if word and not set(word) & set(" \t\"'\\;#"):
        return word
    escaped = word.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'


# -- launchd --


def _agent(words: Sequence[str], kept: dict[str, str], log: str, end_s: int) -> ServiceFile:
    path = Path.home() / "Library" / "LaunchAgents" / f"{LABEL}.plist"
    domain = f"gui/{Path.home().stat().st_uid}"
    target = f"{domain}/{LABEL}"
    told: dict[str, Any] = {
        "Label": LABEL,
        "ProgramArguments": list(words),
        "EnvironmentVariables": kept,
        "RunAtLoad": True,
        "KeepAlive": {"SuccessfulExit": False},
        "ThrottleInterval": 30,
        "ExitTimeOut": end_s,
        "ProcessType": "Interactive",
        "StandardErrorPath": str(Path(log).with_suffix(".err")),
    }
    return ServiceFile(
        path,
        plistlib.dumps(told, sort_keys=False).decode(),
        "launchctl",
        (("launchctl", "bootstrap", domain, str(path)),),
        (("launchctl", "bootout", target),),
        (
            ("see it", f"launchctl print {target}"),
            ("its log", f"tail -F {shlex.quote(log)}"),
            ("start it again", f"launchctl kickstart -k {target}"),
            ("reload settings", f"launchctl kill HUP {target}"),
        ),
    )
