"""``specllama config``: the settings and their origins, shown and changed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

from specllama.cli import completion, diagnostics, output
from specllama.cli.listing import json_option
from specllama.cli.output import examples
from specllama.errors import UsageError
from specllama.paths import config_file
from specllama.settings.config_file import (
    PROJECT_FILE,
    check,
    find,
    load_settings,
    parse_text,
    read_file,
    write_setting,
)

project_option = click.option(
    "--project", is_flag=True, help=f"Of ./{PROJECT_FILE} instead of the user's file."
)


@click.group("config", epilog=examples()["config"])
def command() -> None:
    """Show and change settings."""


@command.command("show")
@click.argument("key", required=False, shell_complete=completion.settings)
@click.option("--all", "show_all", is_flag=True, help="Include settings that are at their default.")
@click.option("--origin", is_flag=True, help="Say where each value comes from.")
@json_option
def show(key: str | None, show_all: bool, origin: bool, as_json: bool) -> None:
    """Show settings as TOML; with KEY, only its value.

    With --all, every setting and its meaning.
    """
    settings = load_settings()
    if key is not None and not (origin or as_json):
        output.line(_toml(settings[find(key).name]))
        return
    wanted = find(key).name if key is not None else None
    shown = [
        (setting, value)
        for setting, value in settings
        if setting.name == wanted
        or (wanted is None and (value.origin != "default" or show_all or as_json))
    ]
    if as_json:
        listed = [
            {"name": one.name, "value": value.value, "origin": value.origin, "default": one.default}
            for one, value in shown
        ]
        output.json_line({"settings": listed})
        return
    for setting, value in shown:
        if show_all:
            output.line(f"\n# {setting.help}")
        text = f"{setting.name} = {_toml(value.value)}"
        if value.value is None:
            text = f"# {setting.name} is not set"
        output.line(f"{text:<40}  # {value.origin}" if origin else text)
    if not shown:
        diagnostics.note("everything is at its default; --all shows all settings")


@command.command("set")
@click.argument("key", shell_complete=completion.settings)
@click.argument("value")
@project_option
def set_(key: str, value: str, project: bool) -> None:
    """Set KEY to VALUE; comments in the file are kept."""
    setting = find(key)
    parsed: Any = check(setting.name, parse_text(setting, value))
    path = _file(project)
    write_setting(path, setting.name, parsed)
    diagnostics.note(f"{setting.name} = {_toml(parsed)} in {path}")
    winner = load_settings().origin(setting.name)
    if winner != str(path):
        diagnostics.warn(f"{winner} sets {setting.name}, too, and wins")


@command.command("unset")
@click.argument("key", shell_complete=completion.settings)
@project_option
def unset(key: str, project: bool) -> None:
    """Remove KEY, so that its default applies again."""
    name, path = key.replace("_", "-").lower(), _file(project)
    if name not in read_file(path):  # one that is gone may be, and has to leave
        raise UsageError(f"{find(name).name} is not set in {path}")
    write_setting(path, name, None)
    diagnostics.note(f"{name} is no longer set in {path}")


@command.command("path")
@project_option
def path_(project: bool) -> None:
    """Print where the settings file is (it need not exist)."""
    output.line(str(_file(project)))


def _file(project: bool) -> Path:
    return Path(PROJECT_FILE).absolute() if project else config_file()


def _toml(value: Any) -> str:
    return '""' if value is None else json.dumps(value, ensure_ascii=False)
