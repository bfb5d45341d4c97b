"""The sampling that a model's file recommends: its keys ``general.sampling.*``.

They are defaults: a flag, a variable or a settings file that says otherwise wins. Read as llama.cpp
reads them (its ``common_init_sampler_from_model``); what we cannot follow is named, not guessed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from specllama.errors import UsageError
from specllama.settings.params import SamplingParams

PREFIX = "general.sampling."
# the file's names, and the fields of SamplingParams
_FIELDS = {
    "temp": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "xtc_probability": "xtc_probability",
    "xtc_threshold": "xtc_threshold",
    "penalty_last_n": "repeat_last_n",
    "penalty_repeat": "repeat_penalty",
}
_MIROSTAT = ("mirostat", "mirostat_tau", "mirostat_eta")
DIGITS = 7  # of a single-precision number: 0.95 is stored as 0.949999988


@dataclass(frozen=True, slots=True)
class Card:
    """The sampling that a file recommends.

    Attributes:
        values: by field of ``SamplingParams``; each is valid there.
        left_out: its settings that are not followed, and why.
    """

    values: dict[str, float] = field(default_factory=dict)
    left_out: tuple[str, ...] = ()


def read_card(metadata: Mapping[str, object]) -> Card:
    """Read the recommendation in a file's metadata; empty if it makes none."""
    values: dict[str, Any] = {}
    left_out: list[str] = []
    usual = SamplingParams()
    for key, raw in metadata.items():
        if not key.startswith(PREFIX):
            continue
        name = key.removeprefix(PREFIX)
        if name == "sequence":
            left_out.append(f"{key}: the order of samplers is fixed here")
        elif name in _MIROSTAT:
            if name == "mirostat" and raw:
                left_out.append(f"{key}: there is no mirostat here")
        elif name in _FIELDS:
            known = _FIELDS[name]
            try:
                values[known] = _value(raw, whole=isinstance(getattr(usual, known), int))
                dataclasses.replace(usual, **{known: values[known]})
            except (UsageError, ValueError, OverflowError) as error:
                values.pop(known, None)
                left_out.append(f"{key}: {error}")
    return Card(values, tuple(left_out))


def _value(raw: object, *, whole: bool) -> float:
    """Read a number of any type, or a text of one, as llama.cpp does."""
    if isinstance(raw, bool) or not isinstance(raw, (int, float, str)):
        raise ValueError(f"{raw!r} is not a number")
    value = float(raw)
    return int(value) if whole else float(f"{value:.{DIGITS}g}")
