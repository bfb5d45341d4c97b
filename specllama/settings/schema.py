"""Every setting: its flag, its key in files, its type, default and help text.

One table serves ``--help``, settings files, environment variables and ``config show``. It is read
from the fields of the parameter classes, where each setting is declared.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, get_args

from specllama.errors import UsageError
from specllama.settings.duration import seconds
from specllama.settings.hardware import CpuOptions, PlaceOptions, RopeOptions
from specllama.settings.params import EngineOptions, GenerateParams, SamplingParams
from specllama.settings.setting import MOST, Group, Setting, check, declared, setting


@dataclass(frozen=True, slots=True)
class AppOptions:
    """Options that the front ends use themselves."""

    model: str | None = setting(
        None,
        "Target: a path, user/repo[:quant] or a catalog name. Without it: the bundled tiny "
        "pair; in the terminal app, the pair opened last.",
        flags=("-m", "--model"),
        metavar="REF",
    )
    draft_model: str | None = setting(
        None,
        "Draft model, named in the same ways; none loads none.",
        flags=("-d", "--draft-model"),
        metavar="REF",
    )
    thoughts: str = setting(
        "show",
        "Thoughts in the terminal: shown on stderr, folded to one line, or hidden.",
        "Thoughts and template",
        choices=("show", "fold", "hide"),
    )
    system: str | None = setting(None, "System prompt.", "Output")
    log: bool = setting(True, "Write a round log (see specllama log).", "Output")
    read_ahead: str = setting(
        "auto",
        "Read a message while it is typed in the terminal app; auto does not on battery power.",
        choices=("auto", "on", "off"),
        flag=False,
    )
    idle_unload: str = setting(
        "10m",
        "Free the memory of a model that was idle for this TIME, in serve and in the terminal app; "
        "the next message loads it again. never keeps it.",
        metavar="TIME",
        flag=False,
    )
    queue: int = setting(
        64,
        "Requests of one client that may wait in serve; further ones get 429. All clients "
        "together may have four times as many waiting.",
        within=(0, MOST),
        flag=False,
    )
    access_log: bool = setting(
        True,
        "Log each request to serve on one line: time, route, status, seconds, client, id; never "
        "its text.",
        flag=False,
    )
    log_file: str | None = setting(
        None,
        "Write serve's log to this file instead of stderr; with its four predecessors it stays "
        "below 50 MB.",
        metavar="FILE",
        flag=False,
    )
    model_dirs: tuple[str, ...] = setting(
        (), "More folders in which to look for model files.", flag=False
    )

    def __post_init__(self) -> None:
        check(self)
        try:
            seconds(self.idle_unload)
        except UsageError as error:
            raise UsageError(f"idle-unload: {error.message}", error.hint) from None


# fields of EngineOptions with settings of their own
ENGINE_PARTS: dict[str, Any] = {
    "place": PlaceOptions(),
    "draft_place": PlaceOptions(),
    "cpu": CpuOptions(),
    "rope": RopeOptions(),
}
DEFAULTS: dict[str, Any] = {
    "app": AppOptions(),
    "engine": EngineOptions(),
    **ENGINE_PARTS,
    "generate": GenerateParams(),
    "sampling": SamplingParams(),
}


def _settings() -> Iterator[Setting]:
    for room, default in DEFAULTS.items():
        kind: Any = type(default)
        for name, one in declared(kind).items():
            where = f"{room}.{name}"
            if room == "draft_place":
                if one.draft:
                    named = f"draft-{one.name}"
                    yield dataclasses.replace(
                        one, name=named, field=where, help=one.draft, flags=()
                    )
            elif one.help:
                yield dataclasses.replace(one, field=where)


SCHEMA: tuple[Setting, ...] = tuple(
    sorted(_settings(), key=lambda one: get_args(Group).index(one.group))
)
"""By group; within one, in the order of the fields."""
BY_NAME: dict[str, Setting] = {one.name: one for one in SCHEMA}
