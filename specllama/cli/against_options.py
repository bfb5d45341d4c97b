"""The flags of ``prove --against``; with it, another server is proved instead of a pair."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any, TypeVar, cast

import click

from specllama.cli.options import grouped, resolve
from specllama.errors import UsageError

Decorated = TypeVar("Decorated", bound=Callable[..., Any])

_OWN = ("proposers", "widths", "window", "pauses_ms")  # of a proof of our own pair
_GROUP = "Another server"


def against_options(function: Decorated) -> Decorated:
    """Add them to ``prove``."""

    @wraps(function)
    def command(
        against: str | None,
        plain: str | None,
        report: Path | None,
        tokens: int,
        at_once: int,
        remote_kind: str,
        remote_model: str,
        api_key_file: Path | None,
        **flags: Any,
    ) -> Any:
        if against is None:
            if plain or report or remote_model or api_key_file or remote_kind != "auto":
                raise UsageError("which server is meant is not said", "add --against URL")
            return function(**flags)
        given = [name for name in _OWN if flags[name]]
        if given or flags["parallel"] > 1:
            raise UsageError(
                "methods, draft lengths, pauses and --parallel are the server's own here",
                "leave them out; --at-once N asks it for N replies at the same time",
            )
        from specllama.bench.prompts import load_prompts
        from specllama.cli import prove_against

        loaded = load_prompts(flags["prompts"])
        chosen = loaded[flags["skip"] :][: flags["count"]]
        if not chosen:
            raise click.BadParameter(f"there are {len(loaded)} prompts", param_hint="-n, --skip")
        wish = prove_against.Wish(
            against, plain, remote_kind, remote_model, api_key_file,
            own_model=flags["model"] is not None, max_tokens=flags["max_tokens"],
            temperatures=flags["temperatures"] or (0.0, 1.0), seed=flags["seed"] + flags["skip"],
            at_once=at_once, most=tokens, report=report, as_json=flags["as_json"],
        )  # fmt: skip
        settings = resolve({k: v for k, v in flags.items() if k not in _HERE})
        return prove_against.run(wish, settings, chosen, loaded)

    found: Any = command
    for option in (
        grouped("--report", type=click.Path(path_type=Path), metavar="FILE", group=_GROUP,
                help="Write a page of Markdown with the verdict and every difference."),
        grouped("--at-once", type=click.IntRange(1, 64), default=4, show_default=True,
                metavar="N", group=_GROUP,
                help="Ask for N replies at the same time, too; 1 does not."),
        grouped("--tokens", type=click.IntRange(1), default=4000, show_default=True, metavar="N",
                group=_GROUP, help="Tokens of replies without seeds to look at, at most."),
        grouped("--api-key-file", type=click.Path(path_type=Path), metavar="FILE", group=_GROUP,
                help="Read the key of that server from a file; else SPECLLAMA_API_KEY holds it."),
        grouped("--remote-model", default="", metavar="ID", group=_GROUP,
                help="Which of that server's models to prove, where it has several."),
        grouped("--remote-kind", default="auto", metavar="KIND", group=_GROUP,
                help="What that server is, where that is not found out, such as vllm or openai."),
        grouped("--plain", metavar="URL", group=_GROUP,
                help="The same server without speculation, where a request cannot switch it off. "
                "With neither, -m FILE is compared with: the same weights in our own engine."),
        grouped("--against", metavar="URL", group=_GROUP,
                help="Prove a running server: vLLM, llama-server, mlx-lm or another engine."),
    ):  # fmt: skip
        found = option(found)
    return cast(Decorated, found)


# arguments of the command that are no settings
_HERE = {"prompts", "count", "skip", "max_tokens", "temperatures", "seed", "as_json", "parallel",
         *_OWN}  # fmt: skip
