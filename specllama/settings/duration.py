"""Lengths of time as people and other servers write them: ``10m``, ``1h30m``, ``90``, ``never``."""

from __future__ import annotations

import math
import re

from specllama.errors import UsageError

_UNITS = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}
_PART = re.compile(r"(\d+(?:\.\d*)?|\.\d+)(ns|us|µs|ms|s|m|h)")
_WHOLE = re.compile(rf"[+-]?(?:{_PART.pattern})+")
_NEVER = ("never", "off")


def seconds(value: str | float) -> float:
    """Convert a length of time to seconds; infinity if it has no end.

    A number without a unit is seconds, and less than 0 is without an end, as in Ollama's
    ``keep_alive``.

    Raises:
        UsageError: it is no length of time.
    """
    number = _number(value)
    if math.isnan(number):
        raise UsageError(
            f"cannot read the duration {str(value)[:40]!r}",
            "for example 10m, 1h30m, 90 (seconds), 0 (at once) or never",
        )
    return number if number >= 0 else math.inf


def _number(value: str | float) -> float:
    """Read the seconds; return NaN for text that is no length of time."""
    if not isinstance(value, str):
        return float(value)
    text = value.strip().lower()
    if text in _NEVER:
        return math.inf
    if _WHOLE.fullmatch(text):
        total = sum(float(number) * _UNITS[unit] for number, unit in _PART.findall(text))
        return -total if text.startswith("-") else total
    try:
        return float(text)
    except ValueError:
        return math.nan


def told(left_s: float) -> str:
    """Format the time for people, in its largest unit."""
    if left_s == math.inf:
        return "never"
    for size, unit in ((3600, "h"), (60, "min")):
        if left_s >= size:
            return f"{left_s / size:.0f} {unit}"
    return f"{max(left_s, 0):.0f} s"
