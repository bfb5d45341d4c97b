"""The variables of a chat template that turn thoughts on and off.

Every family has a switch of its own, so each is tried: a template that renders another prompt for
it reads it.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from specllama.replies.marks import MarkProbe, derive
from specllama.settings.params import EFFORTS

_SWITCHES: tuple[tuple[str, Any, Any], ...] = (  # name, on, off
    ("enable_thinking", True, False),
    ("thinking", True, False),
    ("thinking_mode", "enabled", "disabled"),
    ("thinking_budget", -1, 0),
    ("reasoning_effort", "high", "none"),
    ("reasoning_effort", "high", "no_think"),
)
_STRENGTHS = ("reasoning_effort", "thinking_effort", "reasoning_strength")


@lru_cache(maxsize=64)
def switch(template: str, think: str) -> tuple[dict[str, Any], str]:
    """Return the variables for a value of THINK, and a note for the user if it has no effect.

    "off" gives no variables where the template has no switch.
    """
    if think == "auto":
        return {}, ""
    probe, marks = MarkProbe(template), derive(template)

    def turns(name: str, value: Any, other: Any, state: bool) -> bool:
        """True if a variable turns thoughts on (``state`` True) or off; an effort has to show
        it."""
        shown = probe.whole({name: value})
        if not shown or shown == probe.whole({name: other}):
            return False
        left = marks.state(probe.prompt({name: value}))
        return left is state or (left is None and name != "reasoning_effort")

    if think == "off":
        return next(({n: off} for n, on, off in _SWITCHES if turns(n, off, on, False)), {}), ""
    said = next(({n: on} for n, on, off in _SWITCHES if turns(n, on, off, True)), {})
    if think == "on":
        return said, ""
    for name in _STRENGTHS:
        shown = {level: probe.whole({**said, name: level}) for level in EFFORTS}
        if len(set(filter(None, shown.values()))) > 1:
            level = next((one for one in EFFORTS[EFFORTS.index(think) :] if shown[one]), "high")
            return {**said, name: level}, "" if level == think else f"this model thinks at {level}"
    return said, "this model's template knows no effort: it thinks as it always does"
