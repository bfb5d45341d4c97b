"""Flags shared by the commands that load a pair and generate.

They come from the settings schema, so a flag, its environment variable and its key in a settings
file are the same thing. A flag that was not typed is None: then the settings decide.
"""

from __future__ import annotations

import math
import os
import re
import shlex
from codecs import BOM_UTF16_BE, BOM_UTF16_LE
from collections.abc import Callable, Sequence
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

import click

from specllama.cli import completion, diagnostics
from specllama.errors import UsageError
from specllama.files import read_file
from specllama.settings.config_file import PROJECT_FILE, Settings, find, load_settings, parse_text
from specllama.settings.hardware import endpoints, is_loopback
from specllama.settings.params import DRAFT_MAX_LIMIT, SEED_LIMIT, THINK, GenerateParams
from specllama.settings.schema import GONE, SCHEMA
from specllama.settings.setting import Setting

if TYPE_CHECKING:
    from specllama.remote.address import Address

Decorated = TypeVar("Decorated", bound=Callable[..., Any])

_TYPES: dict[str, Any] = {"int": int, "float": float, "text": str, "texts": str}
_METAVARS = {"int": "N", "float": "X", "text": "TEXT", "texts": "TEXT"}
_SENTENCE = re.compile(r"\.(?: |$)|  \[")  # where the first sentence of a help text ends
_BIAS = re.compile(r"^\s*(\d+)\s*=?\s*([+-]?(?:inf|\d+\.?\d*(?:e[+-]?\d+)?|\.\d+))\s*$", re.I)


class Finite(click.FloatRange):
    """A number in a range; click accepts "nan" in every range."""

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        number: float = super().convert(value, param, ctx)
        if not math.isfinite(number):
            self.fail(f"{value} is not a finite number.", param, ctx)
        return number


TEMPERATURE = Finite(min=0)
LENGTH = click.IntRange(1, DRAFT_MAX_LIMIT)
SEED = click.IntRange(0, SEED_LIMIT - 1)


class GroupedOption(click.Option):
    """An option that knows its heading in ``--help``."""

    def __init__(self, *args: Any, group: str = "Options", **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.group = group


class GroupedCommand(click.Command):
    """A command whose ``--help`` shows its options under headings.

    Args:
        usual: of a command with many options, the names of those that ``-h`` shows, on one screen.
    """

    def __init__(self, *args: Any, usual: Sequence[str] = (), **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._usual = usual
        if not usual:
            return
        self.context_settings["help_option_names"] = ["--help"]
        self.params.append(
            click.Option(
                ["-h"], is_flag=True, is_eager=True, expose_value=False, callback=self._brief,
                help="Show the usual options and exit.",
            )
        )  # fmt: skip

    def _brief(self, ctx: click.Context, param: click.Parameter, value: bool) -> None:
        """Print the usual options, a line each."""
        if not value or ctx.resilient_parsing:
            return
        by_name = {one.name: one for one in self.get_params(ctx)}
        records = [by_name[name].get_help_record(ctx) for name in self._usual]
        lines = [(flags, _SENTENCE.split(text)[0]) for flags, text in filter(None, records)]
        page = ctx.make_formatter()
        self.format_usage(ctx, page)
        page.write_paragraph()
        with page.indentation():
            page.write_text((self.help or "").split("\n\n")[0])
        page.write_paragraph()
        with page.indentation():
            page.write_dl(lines)
        page.write_paragraph()
        page.write(f"All options:   {ctx.command_path} --help\n")
        page.write("All settings:  specllama config show --all")
        click.echo(page.getvalue())
        ctx.exit()

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Let ``--think`` and ``--exact`` take a value or none, so that a prompt may follow
        them."""
        given: list[str] = []
        for at, word in enumerate(args):
            if word == "--":
                given += args[at:]
                break
            after = (args[at + 1 : at + 2] or [""])[0]
            if word in ("--no-think", "--no-exact"):
                word = f"--{word[5:]}=off"
            elif word == "--think" and after not in THINK:
                word = "--think=on"
            elif word == "--exact" and not after.isdecimal():
                word = "--exact=on"
            given.append(word)
        try:
            return super().parse_args(ctx, given)
        except click.NoSuchOption as error:
            if "set" not in (one.name for one in self.params):
                raise
            raise _instead(error, ctx) from None
        except click.UsageError as error:
            takes_model = any(param.name == "model" for param in self.params)
            if "unexpected extra argument" not in error.message or not takes_model:
                raise
            line = f"specllama {ctx.info_name} -m MODEL"
            raise click.UsageError(
                f"{error.message}; a model goes with -m, a prompt into quotes: {line}", ctx
            ) from None

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        groups: dict[str, list[tuple[str, str]]] = {}
        for param in self.get_params(ctx):
            record = param.get_help_record(ctx)
            if record is not None and isinstance(param, click.Option):
                groups.setdefault(getattr(param, "group", "Options"), []).append(record)
        if len(groups.get("Options", ())) <= 2 and "Options" in groups:  # those of help alone
            groups["Options"] = groups.pop("Options")
        for heading, records in groups.items():
            with formatter.section(heading):
                formatter.write_dl(records)


def _instead(error: click.NoSuchOption, ctx: click.Context) -> click.UsageError:
    """Return the error for a flag that names a setting which has none, or that is gone."""
    name = error.option_name.removeprefix("--").removeprefix("no-")
    if name in GONE:
        return click.UsageError(f"{error.option_name} is gone: {GONE[name]}", ctx)
    for one in SCHEMA:
        if name == one.name or f"--{name}" in one.flags:
            value = one.metavar or "|".join(one.choices) or _METAVARS.get(one.kind, "on|off")
            return click.UsageError(
                f"{error.option_name} is a setting without a flag here: --set {one.name}={value}",
                ctx,
            )
    return error


def grouped(*names: str, group: str, **kwargs: Any) -> Callable[[Decorated], Decorated]:
    """Make a ``click.option`` with a heading."""
    return click.option(*names, cls=GroupedOption, group=group, **kwargs)


def with_options(function: Decorated, *options: Callable[[Decorated], Decorated]) -> Decorated:
    """Add options to a command; the last one stands first in its help."""
    for option in options:
        function = option(function)
    return function


def settings_options(
    *more: str, only: Sequence[str] | None = None
) -> Callable[[Decorated], Decorated]:
    """Add ``--set``, and a flag for every setting that usually has one.

    Args:
        more: settings that get a flag nevertheless.
        only: the settings that concern the command; a few have no others, and no ``--set``.
    """

    def decorate(function: Decorated) -> Decorated:
        if only is None or len(only) > len(LOADING) // 2:
            function = set_option(function)
        for setting in reversed(SCHEMA):
            if setting.name in more or (setting.flag and (only is None or setting.name in only)):
                function = _option(setting)(function)
        return function

    return decorate


set_option = grouped(
    "--set", multiple=True, metavar="NAME=VALUE", group="Settings",
    shell_complete=completion.settings,
    help="Any setting of a settings file; repeatable. specllama config show --all lists them.",
)  # fmt: skip


def parallel_option(default: int) -> Callable[[Decorated], Decorated]:
    """Make the flag for how many conversations share an engine."""
    return grouped(
        "--parallel", type=click.IntRange(1, 64), default=default, show_default=True,
        group="Server", metavar="N",
        help="Conversations at the same time. They share the context.",
    )  # fmt: skip


LOADING = (
    "model",
    "draft-model",
    *(s.name for s in SCHEMA if s.field.partition(".")[0] in ("engine", "place")),
)
"""The settings that decide which pair is loaded, and how."""

REPLYING = tuple(s.name for s in SCHEMA if s.field.partition(".")[0] in ("generate", "sampling"))
"""Those that decide what is written."""


def _option(setting: Setting) -> Callable[[Decorated], Decorated]:
    key = setting.name.replace("-", "_")
    help_text = setting.help
    if setting.default not in (None, (), ""):
        shown = setting.default
        if setting.kind == "texts":
            shown = " ".join(repr(text)[1:-1] for text in shown)
        elif setting.kind == "bool":
            shown = "on" if shown else "off"
        help_text += f"  [default: {shown}]"
    switch = f"/--no-{setting.name}" if setting.kind == "bool" else ""
    flags = setting.flags or (f"--{setting.name}{switch}",)
    complete = completion.models if setting.field in ("app.model", "app.draft_model") else None
    kind = click.Choice(setting.choices) if setting.choices else _TYPES.get(setting.kind)
    return grouped(
        *flags,
        key,
        group=setting.group,
        type=kind,
        default=None,
        multiple=setting.kind == "texts",
        metavar=setting.metavar or (None if setting.choices else _METAVARS.get(setting.kind)),
        help=help_text,
        shell_complete=complete,
    )


def constraint_options(function: Decorated) -> Decorated:
    """Add flags that only make sense for one request: grammar, JSON schema, logit bias."""
    return with_options(
        function,
        grouped("--json-schema", group="Constraints", metavar="JSON|@FILE", default=None,
                help="Only JSON that fits this schema. A keyword it cannot enforce is refused."),
        grouped("--grammar-file", group="Constraints", type=click.Path(path_type=Path),
                default=None, help="Read a GBNF grammar from a file."),
        grouped("--grammar", group="Constraints", metavar="GBNF", default=None,
                help="Only text that this GBNF grammar allows."),
        grouped("--logit-bias", group="Constraints", metavar="ID=X", multiple=True,
                help="Add X to a token's score, e.g. 15=-inf; repeatable."),
    )  # fmt: skip


def quiet_option(words: str) -> Callable[[Decorated], Decorated]:
    """Make ``--quiet``; ``words`` say what is not printed then."""
    return grouped("-q", "--quiet", is_flag=True, group="Output", help=words)


URL = "http://127.0.0.1:8484"  # where serve listens unless told otherwise
key_option = grouped(
    "--api-key-file", type=click.Path(path_type=Path), metavar="FILE", group="Model",
    help="Read the key of that server from a file; else SPECLLAMA_API_KEY holds it.",
)  # fmt: skip
which_server = (
    key_option,
    grouped("--remote-model", default="", metavar="ID", group="Model",
            help="Which of that server's models to use, where it has several."),
    grouped("--remote-kind", default="auto", metavar="KIND", group="Model",
            help="What that server is: auto, specllama, llama-server, vllm, sglang, trtllm, "
            "tgi, lmstudio, ollama, mlx-lm, transformers, openai.  [default: auto]"),
)  # fmt: skip


def remote_options(function: Decorated) -> Decorated:
    """Add the flags that name a running server; the command gets its ``Address``, or None."""

    @wraps(function)
    def command(
        *args: Any,
        remote: str | None,
        remote_kind: str,
        remote_model: str,
        api_key_file: Path | None,
        **flags: Any,
    ) -> Any:
        server = None
        if remote is not None:
            if flags.get("model") is not None:
                raise UsageError(
                    "--model loads a model here, --remote uses one that runs elsewhere",
                    "leave out --model; --remote-model ID names one of that server's",
                )
            server = server_address(remote, remote_kind, remote_model, api_key_file)
        elif remote_model or api_key_file is not None or remote_kind != "auto":
            raise UsageError("which server is meant is not said", "add --remote URL")
        return function(*args, server=server, **flags)

    found = with_options(
        command,
        *which_server,
        grouped("--remote", "--server", "remote", metavar="URL", group="Model",
                help="Use a running server, ours or any other. No model is loaded here."),
    )  # fmt: skip
    return cast(Decorated, found)


def server_address(
    url: str, kind: str = "auto", model: str = "", key_file: Path | None = None
) -> Address:
    """Make the address of a server, with the key that a file or the environment gives."""
    from specllama.remote.address import KEY_VARIABLE, Address

    key = os.environ.get(KEY_VARIABLE, "")
    if key_file is not None:
        key = read_text(key_file, "the key file").strip()
        if not key or not key.isascii() or not key.isprintable():
            raise UsageError(
                f"the key file {key_file} holds no key", "it holds the key alone, in one line"
            )
    return Address(url, key, kind, model)


prompts_option = click.option(
    "--prompts", type=click.Path(path_type=Path), help="A file of prompts: one a line, or .jsonl."
)
"""The prompts of a measurement."""

seed_option = click.option(
    "--seed",
    type=SEED,
    default=1,
    show_default=True,
    help="Seed of the first prompt; each further one adds 1.",
)
"""The seeds of a measurement."""


def temperatures_option(usual: str) -> Callable[[Decorated], Decorated]:
    """Make ``--temperature`` of a measurement; ``usual`` names the default."""
    return click.option(
        "--temperature",
        "temperatures",
        multiple=True,
        type=TEMPERATURE,
        help=f"Sampling temperature; repeatable. Default: the setting; else {usual}.",
    )


def number_option(
    *names: str, default: int, help: str, least: int = 1, most: int | None = None
) -> Callable[[Decorated], Decorated]:
    """Make an option of a whole number."""
    kind = click.IntRange(least, most)
    more: dict[str, Any] = {"default": default, "show_default": True, "help": help}
    return click.option(*names, type=kind, metavar="N", **more)


def length_option(default: int, *, least: int = 1) -> Callable[[Decorated], Decorated]:
    """Make ``--max-tokens`` of a measurement."""
    words = "Longest reply, in tokens."
    return number_option("--max-tokens", default=default, least=least, help=words)


def resolve(flags: dict[str, Any], *, quiet: bool = True) -> Settings:
    """Return the settings with the typed flags among a command's arguments on top.

    Args:
        quiet: do not show the settings of this folder's project file; it may come from another
            author.

    Raises:
        UsageError, ConfigError: a value is wrong.
    """
    typed = {
        setting.name: flags[key]
        for setting in SCHEMA
        if flags.get(key := setting.name.replace("-", "_")) not in (None, ())
    }
    for item in flags.get("set") or ():
        name, equals, text = item.partition("=")
        if not equals:
            raise UsageError(f"cannot read the setting {item!r}", "write --set NAME=VALUE")
        setting = find(name.strip())
        value = parse_text(setting, text)
        if isinstance(value, list):
            value = [*typed.get(setting.name, ()), *value]
        typed[setting.name] = value
    settings = load_settings().with_flags(typed)
    from specllama.backend.cores import usable_cores

    cores = usable_cores()[1]
    if (settings["threads"] or 0) > cores:
        diagnostics.warn(
            f"threads = {settings['threads']}, but only {cores} may compute here: threads that "
            "wait for each other are slower, often by far"
        )
    for host, _ in endpoints(settings["rpc"]):
        if not is_loopback(host):
            diagnostics.warn(
                f"the worker at {host} is reached without a password or encryption: "
                "keep to a network you trust, or to an SSH tunnel"
            )
    path, said = str(Path(PROJECT_FILE).absolute()), []
    for name, value in settings.changes().items():
        if value.origin == path:
            listed = value.value if isinstance(value.value, (list, tuple)) else [value.value]
            said.append(f"{name} = {', '.join(map(str, listed))[:60]!r}")
    if said and not quiet:
        diagnostics.note(f"from {path}: {', '.join(said)}")
    return settings


def say_settings(settings: Settings) -> None:
    """Show the settings from variables and files: a measurement must not depend on them unseen."""
    for name, value in settings.changes().items():
        diagnostics.note(f"{name} = {value.value!r} ({value.origin})")


def request_params(settings: Settings, flags: dict[str, Any]) -> GenerateParams:
    """Return the parameters of a request, with the constraints of ``constraint_options``."""
    grammar = flags.get("grammar")
    if flags.get("grammar_file") is not None:
        if grammar is not None:
            raise UsageError("give --grammar or --grammar-file, not both")
        grammar = read_text(flags["grammar_file"], "the grammar file")
    schema = flags.get("json_schema")
    if schema is not None and schema.startswith("@"):
        schema = read_text(Path(schema[1:]), "the schema file")
    params = settings.generate_params(grammar=grammar, json_schema=schema)
    if params.constrained:  # refuse it before a model is loaded
        from specllama.grammar.guide import require

        if schema is not None:
            require("schema", schema)
        else:
            require("grammar", grammar or "")
    if bias := _logit_bias(flags.get("logit_bias") or ()):
        from dataclasses import replace

        params = params.replace(sampling=replace(params.sampling, logit_bias=bias))
    return params


def read_text(path: Path, what: str) -> str:
    """Read a whole text file; raise UsageError with the reason if that fails."""
    data = read_file(path, what)
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        place = f"byte 0x{data[error.start]:02X}, line {data[: error.start].count(10) + 1}"
        code = "UTF-16" if data[:2] in (BOM_UTF16_BE, BOM_UTF16_LE) else "LATIN1"
        raise UsageError(
            f"{what} {path} is not UTF-8 text: {place}",
            f"save it as UTF-8, or convert it: iconv -f {code} -t UTF-8 {shlex.quote(str(path))}",
        ) from None


def _logit_bias(items: Sequence[str]) -> dict[int, float]:
    bias: dict[int, float] = {}
    for item in items:
        match = _BIAS.match(item)
        if match is None:
            raise UsageError(
                f"cannot read the logit bias {item!r}", "write ID=X, for example 15=-inf or 15=+1.5"
            )
        bias[int(match[1])] = float(match[2])
    return bias
