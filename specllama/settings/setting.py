"""One setting, and the rooms that settings fill."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from specllama.settings.hardware import CpuOptions, PlaceOptions, RopeOptions
from specllama.settings.params import EngineOptions, GenerateParams, SamplingParams

Kind = Literal["int", "float", "bool", "text", "texts"]


@dataclass(frozen=True, slots=True)
class Setting:
    """One option.

    Attributes:
        name: the long option, and the key in files, in kebab case.
        kind: type of the value; "texts" is a list.
        field: where it goes: ``engine.X`` or a part of it (ENGINE_PARTS), ``generate.X``,
            ``sampling.X``, or ``app.X`` for what the front ends use themselves.
        help: one or two sentences, shown by ``--help`` and ``config show``.
        group: heading in ``--help``.
        flags: how it is typed, if not by its long name.
        choices: the only values allowed.
        metavar: what ``--help`` calls the value.
        flag: whether it can be typed on the command line, not only set.
        unset: the value by which other tools say "not given".
    """

    name: str
    kind: Kind
    field: str
    help: str
    group: str
    flags: tuple[str, ...] = ()
    choices: tuple[str, ...] = ()
    metavar: str = ""
    flag: bool = True
    unset: int | None = None

    @property
    def default(self) -> Any:
        room, _, name = self.field.partition(".")
        return _APP_DEFAULTS[name] if room == "app" else getattr(DEFAULTS[room], name)

    @property
    def variable(self) -> str:
        """Name of its environment variable."""
        return "SPECLLAMA_" + self.name.upper().replace("-", "_")


# fields of EngineOptions with settings of their own
ENGINE_PARTS: dict[str, Any] = {
    "place": PlaceOptions(),
    "draft_place": PlaceOptions(),
    "cpu": CpuOptions(),
    "rope": RopeOptions(),
}
DEFAULTS: dict[str, Any] = {
    "engine": EngineOptions(),
    **ENGINE_PARTS,
    "generate": GenerateParams(),
    "sampling": SamplingParams(),
}
_APP_DEFAULTS: dict[str, Any] = {
    "model": None,
    "draft_model": None,
    "system": None,
    "log": True,
    "thoughts": "show",
    "model_dirs": (),
}
