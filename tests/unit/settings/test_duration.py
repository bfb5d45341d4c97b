"""Lengths of time, as people and other servers write them."""

from __future__ import annotations

import math

import pytest

from specllama.errors import UsageError
from specllama.settings.duration import seconds, told
from specllama.settings.schema import AppOptions


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("10m", 600), ("1h30m", 5400), ("1.5h", 5400), ("300ms", 0.3), ("90", 90), (90, 90),
        (0, 0), ("0", 0), ("0s", 0), (-1, math.inf), ("-1", math.inf), ("-1m", math.inf),
        ("never", math.inf), ("Off", math.inf), (" 24h ", 86400), (5.5, 5.5),
    ],
)  # fmt: skip
def test_what_is_meant(written: str | float, meant: float) -> None:
    assert seconds(written) == meant


@pytest.mark.parametrize("written", ["", "soon", "10 minutes", "m", "5m!", "nan", math.nan, "1d"])
def test_what_is_none(written: str | float) -> None:
    with pytest.raises(UsageError, match="cannot read the duration"):
        seconds(written)


def test_a_setting_names_itself() -> None:
    with pytest.raises(UsageError, match=r"^idle-unload: cannot read the duration 'soon'"):
        AppOptions(idle_unload="soon")


@pytest.mark.parametrize(
    ("left", "words"),
    [(math.inf, "never"), (7200, "2 h"), (600, "10 min"), (59.4, "59 s"), (-3, "0 s")],
)
def test_for_people(left: float, words: str) -> None:
    assert told(left) == words
