"""One setting, declared once, where its field is: default, range, help, group and flag.

Parameter classes declare their fields with ``setting`` and call ``check`` when they are made;
``schema`` reads the same declarations. Light to import.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, Literal

from specllama.errors import UsageError

Kind = Literal["int", "float", "bool", "text", "texts"]
Group = Literal[
    "Model", "Placement", "Speculation", "Sampling", "Length", "Thoughts and template",
    "Server", "Output",
]  # fmt: skip
MOST = 2**31 - 1  # of a whole number that llama.cpp takes

_KEY = "setting"
_KINDS: Mapping[str, Kind] = {
    "int": "int",
    "float": "float",
    "bool": "bool",
    "tuple[str, ...]": "texts",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """One option.

    Attributes:
        name: the long option, and the key in files, in kebab case; that of the field unless given.
        kind: type of the value; "texts" is a list. default: its value unless it is set.
        field: where it goes: ``engine.X`` or a part of it (``place.X``), ``generate.X``,
            ``sampling.X``, or ``app.X`` for what the front ends use themselves.
        help: one or two sentences, shown by ``--help`` and ``config show``; "" for what only a
            caller sets.
        group: heading in ``--help``.
        flags: how it is typed, if not by its long name.
        within: the least and the greatest value; ``above``: the least is not one itself.
        choices: the only values allowed.
        metavar: what ``--help`` calls the value.
        flag: whether every command that uses it has a flag for it; --set takes each.
        unset: the value by which other tools say "not given".
    """

    name: str = ""
    kind: Kind = "text"
    default: Any = None
    field: str = ""
    help: str = ""
    group: Group = "Model"
    flags: tuple[str, ...] = ()
    within: tuple[float, float] | None = None
    above: bool = False
    choices: Collection[str] = ()
    metavar: str = ""
    flag: bool = True
    unset: int | None = None

    def check(self, value: Any) -> None:
        """Raise UsageError for a value that is not accepted; the message names those that are."""
        if value is None and self.default is None:
            return
        if self.choices and value not in self.choices:
            raise UsageError(f"{self.name} must be one of {', '.join(self.choices)}, got {value!r}")
        if self.within is None:
            return
        low, high = self.within
        if self.kind == "int":
            if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
                raise UsageError(
                    f"{self.name} must be a whole number from {low} to {high}, got {value!r}"
                )
            return
        if not isinstance(value, (int, float)) or not math.isfinite(value):
            raise UsageError(f"{self.name} must be a finite number, got {value!r}")
        if not low <= value <= high or (self.above and value == low):
            bracket = "(" if self.above else "["
            raise UsageError(f"{self.name} must be in {bracket}{low:g}, {high:g}], got {value!r}")


def variable_of(name: str) -> str:
    """Return the environment variable of a setting."""
    return "SPECLLAMA_" + name.upper().replace("-", "_")


def setting(default: Any, help: str = "", group: Group = "Model", **more: Any) -> Any:
    """Declare a field of a parameter class; ``more`` are further attributes of its Setting."""
    declared = Setting(default=default, help=help, group=group, **more)
    return dataclasses.field(default=default, metadata={_KEY: declared})


placement = partial(setting, group="Placement")
speculation = partial(setting, group="Speculation")
sampler = partial(setting, group="Sampling")
rare_sampler = partial(sampler, flag=False)
length = partial(setting, group="Length")
thinking = partial(setting, group="Thoughts and template")


@cache
def declared(kind: Any) -> Mapping[str, Setting]:
    """Return the settings of a parameter class, by field."""
    return {
        field.name: dataclasses.replace(
            field.metadata[_KEY],
            name=field.metadata[_KEY].name or field.name.replace("_", "-"),
            kind=_KINDS.get(str(field.type).removesuffix(" | None"), "text"),
        )
        for field in dataclasses.fields(kind)
        if _KEY in field.metadata
    }


def check(params: Any) -> None:
    """Check every declared field.

    Raises:
        UsageError: one has a value that is not accepted.
    """
    kind: Any = type(params)
    for name, one in declared(kind).items():
        one.check(getattr(params, name))
