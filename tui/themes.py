"""Themes, inks and glyphs, with which every widget draws speculation.

Meaning never rests on colour alone: accepted, rejected and target tokens differ by glyph and text
style, sources by a letter. An ink is a Textual style string, resolved against the theme when it is
drawn, so that a theme change recolours everything.
"""

from __future__ import annotations

from dataclasses import dataclass

from textual.color import Color
from textual.theme import Theme

from specllama.interface import MethodInfo
from specllama.tui.state import DEFAULT_THEME

# Where a theme (Textual's own, or a user's) does not define a colour: ours on dark, on light,
# and among the terminal's own. A new method has a row here, or the draft model's colour.
_COLOURS = {
    "source-draft": ("#5aa9e6", "#1565a8", "ansi_cyan"),
    "source-forced": ("#c49a6c", "#70451a", "ansi_bright_yellow"),
    "source-ngram": ("#e6b450", "#8a5a00", "ansi_yellow"),
    "source-suffix": ("#d98fd0", "#98328a", "ansi_magenta"),
    "source-medusa": ("#7fc8a9", "#1f7a55", "ansi_green"),
    "source-eagle3": ("#f08a5d", "#b3450f", "ansi_bright_red"),
    "source-dflash": ("#ef8fae", "#a8265a", "ansi_bright_magenta"),
    "source-mtp": ("#9a8cf0", "#5a45c4", "ansi_bright_blue"),
    "source-lookahead": ("#65c3ba", "#1c746c", "ansi_bright_cyan"),
    "source-self": ("#b5c46a", "#5d6b12", "ansi_bright_green"),
    "ghost": ("#c0606a", "#a83a46", "ansi_red"),
    "muted": ("#8390a0", "#65707c", "ansi_default"),
}
VARIABLES, LIGHT_VARIABLES, ANSI_VARIABLES = (
    {name: of_look[i] for name, of_look in _COLOURS.items()} for i in range(3)
)

DARK = Theme(
    name=DEFAULT_THEME,
    primary="#5aa9e6",
    secondary="#e6b450",
    accent="#7fc8a9",
    warning="#e6b450",
    error="#e0707c",
    success="#7fc8a9",
    foreground="#d7dce2",
    background="#12161c",
    surface="#181d25",
    panel="#212834",
    dark=True,
    variables={**VARIABLES, "footer-key-foreground": "#5aa9e6"},
)
LIGHT = Theme(
    name="specllama-light",
    primary="#1565a8",
    secondary="#8a5a00",
    accent="#1f7a55",
    warning="#8a5a00",
    error="#a83a46",
    success="#1f7a55",
    foreground="#20262e",
    background="#f7f8f9",
    surface="#eef0f2",
    panel="#e1e5e9",
    dark=False,
    variables={**LIGHT_VARIABLES, "footer-key-foreground": "#1565a8"},
)
THEMES = (DARK, LIGHT)
FEW_COLOURS = "ansi-dark"  # the terminal's own, where it has 16
READABLE = 4.5  # contrast of what carries information (WCAG AA)
_READ = ("foreground", "primary", "secondary", "accent", "warning", "error", "success")
READ = (*_READ, "footer-key-foreground", *_COLOURS)  # colours of text
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
