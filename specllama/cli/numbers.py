"""Numbers on the command line that are checked before anything is loaded."""

from __future__ import annotations

import math
from typing import Any

import click

from specllama.settings.params import DRAFT_MAX_LIMIT, SEED_LIMIT


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
