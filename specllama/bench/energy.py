"""Joules used by the processor package, if the platform reports them (Linux powercap)."""

from __future__ import annotations

from pathlib import Path

_ROOT = Path("/sys/class/powercap")


class EnergyMeter:
    """Reads the package counters of RAPL; ``available`` is False if there are none."""

    def __init__(self, root: Path = _ROOT) -> None:
        self._zones: list[tuple[Path, int]] = []
        try:
            zones = sorted(root.glob("*-rapl:?"))
        except OSError:
            zones = []
        for zone in zones:
            try:
                int((zone / "energy_uj").read_text())
                self._zones.append(
                    (zone / "energy_uj", int((zone / "max_energy_range_uj").read_text()))
                )
            except (OSError, ValueError):
                continue  # not readable without privileges

    @property
    def available(self) -> bool:
        return bool(self._zones)

    def read(self) -> list[int] | None:
        """Counters in microjoules, to be given to ``since``."""
        if not self._zones:
            return None
        try:
            return [int(path.read_text()) for path, _ in self._zones]
        except (OSError, ValueError):
            return None

    def since(self, before: list[int] | None) -> float | None:
        """Joules since ``before``; counters wrap."""
        now = self.read()
        if before is None or now is None:
            return None
        total = 0
        for a, b, (_, wrap) in zip(before, now, self._zones, strict=True):
            total += b - a if b >= a else b - a + wrap
        return total / 1e6
