"""Write share/, which the wheel installs: the manual page and the completion of three shells.

    python tests/tools/shared_files.py

They are told by the command line itself; a test asks whether they are current.
"""

import re
from collections.abc import Iterator
from pathlib import Path

import click
from click.shell_completion import get_completion_class

from specllama import __version__
from specllama.cli import EPILOG, SUMMARIES, diagnostics, group
from specllama.settings.schema import BY_NAME, SCHEMA

ROOT = Path(__file__).resolve().parents[2]
SHARE = ROOT / "share"
SHELLS = {
    "bash": "bash-completion/completions/specllama",
    "zsh": "zsh/site-functions/_specllama",
    "fish": "fish/vendor_completions.d/specllama.fish",
}
MANUAL = "man/man1/specllama.1"
_HELP = {"-h", "--help"}
VARIABLES = {
    "SPECLLAMA_HOME": "The folder of everything that specllama keeps.",
    "SPECLLAMA_OFFLINE": "Set to 1: never use the network.",
    "SPECLLAMA_API_KEY": "The key of a server that --remote names.",
    "SPECLLAMA_DEBUG": "Set to 1: show where an error happened.",
    "SPECLLAMA_...": "Every setting in capitals, with _ for -.",
    "HF_TOKEN": "The token for models of the hub that need one.",
    "NO_COLOR": "Use no colours.",
}


def completion(shell: str) -> str:
    """What ``specllama completion`` prints."""
    kind = get_completion_class(shell)
    assert kind is not None
    return kind(group, {}, "specllama", "_SPECLLAMA_COMPLETE").source().rstrip() + "\n"


def manual() -> str:
    """The page in roff, for ``man``."""
    top = click.Context(group, info_name="specllama", max_content_width=100)
    shared: dict[str, dict[str, str]] = {}  # by heading, then by flags
    details = list(_commands(group, top, shared))
    lines = [
        f'.TH SPECLLAMA 1 "" "specllama {__version__}" "User Commands"',
        *(".SH NAME", r"specllama \- run quantized GGUF models with speculative decoding"),
        *(".SH SYNOPSIS", ".B specllama", _text("[-v] [--offline] [COMMAND [ARGUMENTS]]")),
        *(".SH DESCRIPTION", *_prose(group.help or "")),
        ".SH COMMANDS",
        *_list(SUMMARIES),
        ".SH OPTIONS",
        *_list(dict(_records(group, top))),
        ".SH COMMANDS IN DETAIL",
        *details,
        ".SH SETTINGS",
        "Flags that several commands share; specllama COMMAND \\-\\-help lists those of one.",
    ]
    for heading, settings in shared.items():
        lines += [f".SS {_text(heading)}", *_list(settings)]
    told = {text for settings in shared.values() for text in settings.values()}
    rare = {one.name: one.help for one in SCHEMA if not any(one.help in text for text in told)}
    lines += [f".SS {_text('Typed with --set NAME=VALUE alone')}", *_list(rare)]
    exits = re.findall(r"(\d+) ([^·]+)", " ".join((diagnostics.__doc__ or "").split("\n")[2:]))
    lines += [".SH EXIT STATUS", *_list({code: what.strip() for code, what in exits})]
    lines += [".SH ENVIRONMENT", *_list(VARIABLES)]
    lines += [".SH EXAMPLES", *_prose(EPILOG)]
    return "\n".join(lines) + "\n"


def _commands(
    command: click.Command, ctx: click.Context, shared: dict[str, dict[str, str]]
) -> Iterator[str]:
    """All below a command, and what they share."""
    for name in command.list_commands(ctx):
        below = command.get_command(ctx, name)
        inner = click.Context(below, info_name=name, parent=ctx)
        if isinstance(below, click.Group):
            yield from _commands(below, inner, shared)
            continue
        usage = " ".join([inner.command_path, *below.collect_usage_pieces(inner)])
        yield f".SS {_text(usage)}"
        yield from _prose(below.help or "")
        yield from _list(dict(_records(below, inner, shared)))


def _records(
    command: click.Command, ctx: click.Context, shared: dict[str, dict[str, str]] | None = None
) -> Iterator[tuple[str, str]]:
    """The options of a command; settings go to those that are shared."""
    for param in command.get_params(ctx):
        record = param.get_help_record(ctx)
        if record is None or not isinstance(param, click.Option) or _HELP & set(param.opts):
            continue
        setting = BY_NAME.get((param.name or "").replace("_", "-"))
        if shared is not None and setting is not None and setting.help in (param.help or ""):
            shared.setdefault(getattr(param, "group", "Options"), {}).setdefault(*record)
        else:
            yield record


def _list(entries: dict[str, str]) -> Iterator[str]:
    for what, said in entries.items():
        yield from (".TP", f".B {_text(what)}", _text(said))


def _prose(text: str) -> Iterator[str]:
    for number, paragraph in enumerate(text.split("\f")[0].strip().split("\n\n")):
        if number:
            yield ".PP"
        if "\b" in paragraph:
            yield from (".nf", *map(_text, paragraph.replace("\b", "").strip().splitlines()), ".fi")
        else:
            yield _text(" ".join(paragraph.split()))


def _text(text: str) -> str:
    text = text.replace("\\", r"\e").replace("-", r"\-")
    text = "".join(sign if sign.isascii() else rf"\[u{ord(sign):04X}]" for sign in text)
    return rf"\&{text}" if text[:1] in (".", "'") else text


def files() -> dict[Path, str]:
    """All of share/ as it should be."""
    scripts = {SHARE / path: completion(shell) for shell, path in SHELLS.items()}
    return {SHARE / MANUAL: manual(), **scripts}


if __name__ == "__main__":
    for path, text in files().items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, "utf-8", newline="\n")
        print(path.relative_to(ROOT), len(text))
