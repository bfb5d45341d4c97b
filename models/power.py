"""Battery power: a test that this machine runs on it now."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

from specllama.models.kernel_limits import text_in

_SUPPLIES = Path("/sys/class/power_supply")
_HOLDS_S = 20.0  # how long an answer holds

_asked: tuple[float, bool] = (-_HOLDS_S, False)


def on_battery() -> bool:
    """True if it does; False also if the system does not report it."""
    global _asked
    now = time.monotonic()
    if now - _asked[0] >= _HOLDS_S:
        _asked = now, _on_battery()
    return _asked[1]


def _on_battery() -> bool:
    try:
        if sys.platform == "darwin":
            said = subprocess.run(
                ["pmset", "-g", "batt"], capture_output=True, text=True, timeout=1, check=False
            )
            return "'Battery Power'" in said.stdout
        return discharging(_SUPPLIES)
    except (OSError, subprocess.SubprocessError):
        return False


def discharging(supplies: Path) -> bool:
    """True if a battery of the machine itself, not of a mouse, feeds it (Linux)."""
    for one in supplies.glob("*"):
        kind, status, scope = (text_in(one / name).strip() for name in ("type", "status", "scope"))
        if (kind, status) == ("Battery", "Discharging") and scope != "Device":
            return True
    return False
