"""How the draft length changes the speed of the user's pair; one key shows the theory."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Horizontal, Vertical
from textual.content import Content
from textual.widgets import Static

from specllama.bench.outcome import said
from specllama.bench.speed_model import MAX_K, SpeedModel
from specllama.events import Payoff
from specllama.tui.widgets.bars import IntervalMark, Series, Slider, SpeedChart
from specllama.tui.widgets.base import Inked


class Playground(Inked, Vertical, can_focus=True):
    """Bars are what was measured; with the theory, bars are the model and diamonds measurements."""

    HELP = """
    k is how many tokens are drafted in every round. A bar is the speed of such runs over that of
    plain runs, with the interval that it lies in. T shows the theory.

    In theory, α is the chance that a guess is kept, c the cost of one draft step and β the cost of
    each further row of a target pass, both in target steps. Expected tokens per round are
    (1 − α^(k+1)) / (1 − α), the speed-up is that divided by 1 + k·c + k·β. Speculation pays if and
    only if α > c + β, and never gets past 1 / (c + β). M puts the sliders on your pair's figures.
    """

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("t", "theory", "Theory", id="playground.theory"),
        Binding("m", "mine", "My pair", id="playground.mine"),
        Binding("tab", "app.focus_next", "Next slider", show=False),
    ]

    def __init__(self, *, id: str | None = None) -> None:
        super().__init__(id=id)
        self.pair: SpeedModel | None = None
        self.measured: Mapping[int, Payoff] = {}
        self.theory = False
        # Without a measurement: a draft a tenth of the target, on a machine with some headroom.
        self.model = SpeedModel(0.7, 0.1, 0.05)
        self.k = 4

    def compose(self) -> ComposeResult:
        glyphs = self.glyphs
        with Horizontal(id="playground"):
            with Vertical(id="playground-main"):
                with Vertical(id="sliders"):
                    yield Slider(glyphs.alpha, 0.7, 0.0, 0.99, 0.01, hint="kept", id="alpha")
                    yield Slider("c", 0.1, 0.0, 1.0, 0.01, hint="cost of a draft step", id="c")
                    yield Slider(glyphs.beta, 0.05, 0.0, 1.0, 0.01, hint="cost of a row", id="beta")
                    yield Slider("k", 4, 0, MAX_K, 1, hint="tokens drafted", form=".0f", id="k")
                yield SpeedChart()
            yield Static(id="verdict", markup=False)

    def on_mount(self) -> None:
        self._show()

    def measure(self, pair: SpeedModel | None, measured: Mapping[int, Payoff]) -> None:
        """Figures of the user's pair; the first put the sliders on them."""
        on_it = self.pair is None or not self.imaginary
        changed, self.pair, self.measured = pair != self.pair, pair, measured
        if changed and on_it and pair is not None:
            self.action_mine()
            self.query_one("#k", Slider).value = self.best_measured or pair.best()[0]
        self._show()

    @property
    def best_measured(self) -> int | None:
        """The length that was measured to be the fastest."""
        return max(self.measured, key=self._ratio, default=None)

    @property
    def imaginary(self) -> bool:
        """Whether the sliders stand for another pair than the one that was measured."""
        pair = self.pair
        if pair is None:
            return True
        here = (self.model.alpha, self.model.c, self.model.beta)
        mine = (min(0.99, pair.alpha), min(1.0, pair.c), min(1.0, pair.beta))
        return any(abs(a - b) > 0.006 for a, b in zip(here, mine, strict=True))  # half a step

    def on_slider_changed(self, event: Slider.Changed) -> None:
        value = {s.id: s.value for s in self.query(Slider)}
        self.model = SpeedModel(value["alpha"], value["c"], value["beta"])
        self.k = round(value["k"])
        self._show()

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        return self.theory or action != "mine"

    def action_theory(self) -> None:
        self.theory = not self.theory
        self._show()
        (self.query_one("#k") if self.theory else self).focus()
        self.refresh_bindings()

    def action_mine(self) -> None:
        if self.pair is None:
            self.notify("Nothing measured yet: Enter measures")
            return
        self.query_one("#alpha", Slider).value = min(0.99, self.pair.alpha)
        self.query_one("#c", Slider).value = self.pair.c
        self.query_one("#beta", Slider).value = self.pair.beta
        self.query_one("#k", Slider).value = self.pair.best()[0]

    def _show(self) -> None:
        self.query_one("#sliders").display = self.theory
        ks = range(MAX_K + 1)
        marks = [_mark(self.measured.get(k)) for k in ks]
        if self.theory:
            bars = [self.model.speedup(k) for k in ks]
            series = Series(bars, marks, self.k, self.imaginary)
        else:
            bars = [1.0, *(self._ratio(k) for k in range(1, max(self.measured, default=0) + 1))]
            series = Series(bars if self.measured else [], marks, self.best_measured)
        self.query_one(SpeedChart).series = series
        narrow = self.app.size.width < 100
        self.query_one("#verdict", Static).update(
            Content.assemble(*(self._brief() if narrow else self._verdict()))
        )

    def _brief(self) -> list[tuple[str, str]]:
        if (mine := self.best_measured) is None:
            return [("Not measured yet: Enter measures k = 2 to 8.", self.ink.mark)]
        one = self.measured[mine]
        words = f"{self.glyphs.diamond} best measured: k={mine} {self.glyphs.text(said(one))}"
        parts = [(words, self.ink.verdict(one.answer))]
        if self.theory:
            whose = "imaginary pair" if self.imaginary else "your pair in theory"
            speed = f"{self.model.speedup(self.k):.2f}{self.glyphs.times}"
            parts.append((f"\n{whose}: {speed} at k={self.k}", self.ink.muted))
        return parts

    def _verdict(self) -> list[tuple[str, str]]:
        """What was measured, every length of it; below, what the sliders would say."""
        ink, g = self.ink, self.glyphs
        parts: list[tuple[str, str]] = [(f"{g.diamond} Your pair, measured here\n", ink.mark)]
        if not self.measured:
            parts.append(("Not yet: Enter measures k = 2 to 8.\n", ink.muted))
        for length in sorted(self.measured):
            one = self.measured[length]
            words = f"k = {length:<2} {g.text(said(one))}\n"
            parts.append((words, ink.verdict(one.answer)))
        return parts + self._in_theory() if self.theory else parts

    def _in_theory(self) -> list[tuple[str, str]]:
        ink, g, model, k = self.ink, self.glyphs, self.model, self.k
        whose = "an imaginary pair" if self.imaginary else "your pair's figures (M)"
        best, top = model.best()
        total = model.c + model.beta
        parts = [
            (f"\nIn theory, with {whose}\n", "bold"),
            (f"{g.alpha} {model.alpha:.2f}  c {model.c:.2f}  {g.beta} {model.beta:.2f}\n", ""),
            (f"{model.speedup(k):.2f}{g.times} at k = {k}: ", ""),
            (f"{model.tokens(k):.2f} tokens in {model.cost(k):.2f} steps\n", ink.muted),
        ]
        signs = (f"{g.alpha} {model.alpha:.2f}", f"c + {g.beta} {total:.2f}")
        if not model.pays:
            return [*parts, (f"No guess would pay: {signs[0]} <= {signs[1]}", ink.muted)]
        bound = f"{model.bound:.1f}{g.times}" if total > 0 else "none"
        collapse = model.collapse()
        words = "never up to k = 64" if collapse is None else f"from k = {collapse}"
        return [
            *parts,
            (f"A guess would pay: {signs[0]} > {signs[1]}\n", ink.muted),
            (f"Peak {top:.2f}{g.times} at k = {best}, bound {bound}\n", ink.muted),
            (f"Slower than plain {words}", ink.muted),
        ]

    def _ratio(self, k: int) -> float:
        return self.measured[k].ratio or 0.0 if k in self.measured else 0.0


def _mark(verdict: Payoff | None) -> IntervalMark | None:
    if verdict is None or verdict.ratio is None:
        return None
    return IntervalMark(verdict.ratio, verdict.low or verdict.ratio, verdict.high or verdict.ratio)
