"""Themes, inks and glyphs, with which every widget draws speculation.

Meaning never rests on colour alone: accepted, rejected and target tokens differ by glyph and text
style, sources by a letter. An ink is a Textual style string, resolved against the theme when it is
drawn, so that a theme change recolours everything.
"""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from pathlib import Path

from textual.color import Color
from textual.theme import Theme

from specllama.interface import MethodInfo
from specllama.tui.state import DEFAULT_THEME

_COLOURS = tomllib.loads(Path(__file__).with_name("themes.toml").read_text("utf-8"))
# where a theme (Textual's own, or a user's) does not define a colour: on dark, on light, and among
# the terminal's own
VARIABLES, LIGHT_VARIABLES, ANSI_VARIABLES = (
    {name: of_look[i] for name, of_look in _COLOURS["ours"].items()} for i in range(3)
)


def _theme(name: str, ours: dict[str, str], look: int) -> Theme:
    colours = {field: of_look[look] for field, of_look in _COLOURS["theme"].items()}
    keys = {"footer-key-foreground": colours["primary"]}
    return Theme(name, dark=not look, variables={**ours, **keys}, **colours)


DARK = _theme(DEFAULT_THEME, VARIABLES, 0)
LIGHT = _theme("specllama-light", LIGHT_VARIABLES, 1)
THEMES = (DARK, LIGHT)
FEW_COLOURS = "ansi-dark"  # the terminal's own, where it has 16
READABLE = 4.5  # contrast of what carries information (WCAG AA)
_READ = ("foreground", "primary", "secondary", "accent", "warning", "error", "success")
READ = (*_READ, "footer-key-foreground", *VARIABLES)  # colours of text
BEHIND = ("background", "surface", "panel")  # what text stands on


def variable_defaults(theme: Theme | None) -> dict[str, str]:
    if theme is None:
        return VARIABLES
    if theme.ansi:
        return ANSI_VARIABLES
    return VARIABLES if theme.dark else LIGHT_VARIABLES


def contrast(one: Color, other: Color) -> float:
    """Return the contrast, from 1, alike, to 21, black and white (WCAG 2)."""

    def light(colour: Color) -> float:
        parts = [
            p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in colour.normalized
        ]
        return 0.2126 * parts[0] + 0.7152 * parts[1] + 0.0722 * parts[2] + 0.05

    low, high = sorted((light(one), light(other)))
    return high / low


def readable(variables: dict[str, str]) -> dict[str, str]:
    """Return the variables with enough contrast between every text color and its background,
    whatever the theme: lighter on dark, darker on light."""
    behind = [Color.parse(variables[name]) for name in BEHIND]
    end = behind[0].get_contrast_text(1.0)
    found = dict(variables)
    for name in READ:
        colour = Color.parse(variables[name])
        steps = (colour.blend(end, i / 20) for i in range(21))
        enough = (one for one in steps if min(contrast(one, b) for b in behind) >= READABLE)
        found[name] = next(enough, end).hex
    return found


_SUPERSCRIPT = dict(zip("abcdefghijklmnoprstuvwxyz", "ᵃᵇᶜᵈᵉᶠᵍʰⁱʲᵏˡᵐⁿᵒᵖʳˢᵗᵘᵛʷˣʸᶻ", strict=True))


@dataclass(frozen=True, slots=True)
class Ink:
    """Style strings by meaning."""

    muted: str
    strong: str
    target: str
    ghosts: tuple[str, str, str]
    rejected: str
    good: str
    bad: str
    warn: str
    accent: str

    def source(self, name: str) -> str:
        """Return the ink of a source; a method without one of its own shares the draft model's."""
        ink = f"source-{name.split('+', 1)[0]}"
        return f"${ink}" if ink in VARIABLES else "$source-draft"

    def verdict(self, answer: str) -> str:
        """Return green if drafting pays, amber if it loses, gray if it is unsure or off."""
        return {"faster": self.good, "slower": self.warn}.get(answer, self.muted)


def ink_for(theme: Theme) -> Ink:
    muted = "dim" if theme.ansi else "$muted"
    fainter = "strike dim $ghost" if theme.ansi else "strike $ghost"
    return Ink(
        muted=muted,
        strong="bold",
        target="bold $foreground" if not theme.ansi else "bold",
        ghosts=("strike $ghost", fainter, f"strike {muted}"),
        rejected="$ghost",
        good="$success",
        bad="bold $error",
        warn="bold $warning",
        accent="$primary",
    )


@dataclass(frozen=True, slots=True)
class Glyphs:
    """The signs of drafting.

    ``methods`` are those of the engine; they name its sources and give each a letter.
    """

    accepted: str = "■"
    rejected: str = "□"
    target: str = "+"
    untested: str = "·"
    methods: tuple[MethodInfo, ...] = ()

    def label(self, source: str) -> str:
        """Name a source for people: "draft model", "n-gram + draft model", "none"."""
        known = {method.name: method.short for method in self.methods}
        return " + ".join(known.get(part) or part for part in source.split("+"))

    def source(self, name: str) -> str:
        """Return the letter of a source; a round of mixed sources gets one letter for each."""
        known = {method.name: method.letter for method in self.methods}
        letters = (known.get(part) or part[:1] for part in name.split("+"))
        return "".join(_SUPERSCRIPT.get(letter, letter) for letter in letters)

    def meter(self, fraction: float, width: int) -> tuple[str, str]:
        """Return the done and the open part of a thin bar; anything above zero shows one cell."""
        filled = round(min(1.0, max(0.0, fraction)) * width)
        filled = max(filled, 1) if fraction > 0 else 0
        return "━" * filled, "─" * (width - filled)


UNICODE = Glyphs()
