"""A model of drafting: the speed at each draft length, by three figures of a pair."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import ClassVar

from textual import events
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Horizontal, Vertical
from textual.content import Content
from textual.reactive import reactive
from textual.widget import Widget
from textual.widgets import Static

from specllama.bench.outcome import MAX_K, SpeedModel
from specllama.tui.widgets.inked import Inked


class Slider(Inked, Widget, can_focus=True):
    """A value between two bounds: arrows step, Shift steps far, the mouse jumps."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("left,h,minus", "step(-1)", "Less", show=False),
        Binding("right,l,plus", "step(1)", "More", show=False),
        Binding("shift+left,H", "step(-10)", "Much less", show=False),
        Binding("shift+right,L", "step(10)", "Much more", show=False),
        Binding("home", "edge(0)", "Least", show=False),
        Binding("end", "edge(1)", "Most", show=False),
        Binding("up,k", "app.focus_previous", "Up", show=False),
        Binding("down,j", "app.focus_next", "Down", show=False),
    ]

    value: reactive[float] = reactive(0.0)

    def __init__(
        self,
        label: str,
        value: float,
        low: float,
        high: float,
        step: float,
        *,
        hint: str = "",
        form: str = ".2f",
        id: str | None = None,
    ) -> None:
        super().__init__(id=id)
        self.label, self.low, self.high, self.step = label, low, high, step
        self.hint, self.form = hint, form
        self.set_reactive(Slider.value, value)

    def validate_value(self, value: float) -> float:
        steps = round((value - self.low) / self.step)
        return min(self.high, max(self.low, self.low + steps * self.step))

    def action_step(self, steps: int) -> None:
        self.value += steps * self.step

    def action_edge(self, end: int) -> None:
        self.value = self.high if end else self.low

    def on_click(self, event: events.Click) -> None:
        start, width = self._track()
        self.focus()
        if width > 1:
            share = (event.x - start) / (width - 1)
            self.value = self.low + min(1.0, max(0.0, share)) * (self.high - self.low)

    def _track(self) -> tuple[int, int]:
        """Return the begin and the width of the track; the label column is fixed."""
        width = self.content_size.width
        hint = 22 if width >= 64 else 0
        return 4, max(6, width - 4 - 7 - hint)

    def render(self) -> Content:
        ink = self.ink
        _, width = self._track()
        share = (self.value - self.low) / (self.high - self.low)
        at = round(share * (width - 1))
        knob = "●" if self.has_focus else "○"
        knob_style = "bold $primary" if self.has_focus else "bold"
        parts = [
            (f"{self.label:<3} ", "bold $primary" if self.has_focus else "bold"),
            ("─" * at, ink.accent),
            (knob, knob_style),
            ("─" * (width - 1 - at), ink.muted),
            (f" {self.value:>5{self.form}} ", "bold"),
        ]
        if self.content_size.width >= 64:
            parts.append((self.hint[:22], ink.muted))
        return Content.assemble(*parts)


class SpeedChart(Inked, Widget):
    """A chart of speed-up against draft length, with plain decoding as the line to beat."""

    values: reactive[Sequence[float]] = reactive((), layout=False)
    selected = 0
    imaginary = False  # the pair is none that was raced

    def render(self) -> Content:
        size = self.content_size
        bars = [b if math.isfinite(b) else 0.0 for b in self.values]
        if not bars or size.width < 20 or size.height < 4:
            return Content("")
        rows = size.height - 1  # the last line names the draft lengths
        axis = 5
        slot = max(2, min(7, (size.width - axis) // len(bars)))
        bars = bars[: (size.width - axis) // slot]
        # A peak needs its mark even if the bar touches the top.
        top = max([1.0, *bars]) * 1.08
        heights = [value / top * rows for value in bars]
        peak = max(range(len(bars)), key=lambda k: (bars[k], -k))
        lines = [self._row(row, rows, heights, top, peak, slot) for row in range(rows, 0, -1)]
        labels: list[tuple[str, str]] = [(f"{'k':>{axis - 1}} ", self.ink.muted)]
        for k in range(len(bars)):
            style = "bold $success" if k == peak and not self.imaginary else self.ink.muted
            labels.append((str(k), "bold reverse" if k == self.selected else style))
            labels.append((" " * (slot - len(str(k))), ""))
        return Content("\n").join([*lines, Content.assemble(*labels)])

    def _row(
        self, row: int, rows: int, heights: Sequence[float], top: float, peak: int, slot: int
    ) -> Content:
        """Draw one row of the bars, from 1 at the bottom; plain decoding is as high as one."""
        ink = self.ink
        plain = 1.0 / top * rows
        one = max(1, round(plain))
        label = f"{top:.1f}×" if row == rows else ""
        if row == one != rows:
            label = "1×"
        parts = [(f"{label:>4} ", ink.muted)]
        width = max(1, slot - 1)
        for k, height in enumerate(heights):
            style = ink.good if k == peak else ink.rejected if height < plain else ink.accent
            if self.imaginary:
                style = ink.muted
            if height >= row:
                cell = "█" * width
            elif height > row - 1:
                cell = "▁▂▃▄▅▆▇█"[round((height - row + 1) * 7)] * width
            elif k == peak and height + 1 > row - 1:
                cell = "▲".center(width)
            else:
                cell, style = ("·" if row == one else " ") * width, ink.muted
            parts += [(cell, style), (" " * (slot - width), "")]
        return Content.assemble(*parts)


class Playground(Inked, Vertical):
    """Sliders and the speed-up that they would give; a race sets them to the user's pair."""

    HELP = """
    k is how many tokens are drafted in every round, α the chance that a guess is kept, c the cost
    of one draft step and β the cost of each further row of a target pass, both in target steps.
    Expected tokens per round are (1 − α^(k+1)) / (1 − α), the speed-up is that divided by
    1 + k·c + k·β. Speculation pays if and only if α > c + β, and never gets past 1 / (c + β). M
    puts the sliders on your pair's figures, once it was raced.
    """

    BINDINGS: ClassVar[list[BindingType]] = [Binding("m", "mine", "My pair", id="playground.mine")]

    def __init__(self, *, id: str | None = None) -> None:
        super().__init__(id=id)
        self.pair: SpeedModel | None = None
        # Without a measurement: a draft a tenth of the target, on a machine with some headroom.
        self.model = SpeedModel(0.7, 0.1, 0.05)
        self.k = 4

    def compose(self) -> ComposeResult:
        with Horizontal(id="playground"):
            with Vertical(id="playground-main"):
                with Vertical(id="sliders"):
                    yield Slider("α", 0.7, 0.0, 0.99, 0.01, hint="kept", id="alpha")
                    yield Slider("c", 0.1, 0.0, 1.0, 0.01, hint="cost of a draft step", id="c")
                    yield Slider("β", 0.05, 0.0, 1.0, 0.01, hint="cost of a row", id="beta")
                    yield Slider("k", 4, 0, MAX_K, 1, hint="tokens drafted", form=".0f", id="k")
                yield SpeedChart()
            yield Static(id="verdict", markup=False)

    def on_mount(self) -> None:
        for slider in self.query(Slider):
            self.watch(slider, "value", self._moved, init=False)
        self._show()

    def measure(self, pair: SpeedModel | None) -> None:
        """Take the figures of the user's pair; set the sliders to the first ones."""
        on_it = self.pair is None or not self.imaginary
        changed, self.pair = pair != self.pair, pair
        if changed and on_it and pair is not None:
            self.action_mine()
        self._show()

    @property
    def imaginary(self) -> bool:
        """True if the sliders stand for another pair than the one that was raced."""
        pair = self.pair
        if pair is None:
            return True
        here = (self.model.alpha, self.model.c, self.model.beta)
        mine = (min(0.99, pair.alpha), min(1.0, pair.c), min(1.0, pair.beta))
        return any(abs(a - b) > 0.006 for a, b in zip(here, mine, strict=True))  # half a step

    def _moved(self) -> None:
        value = {s.id: s.value for s in self.query(Slider)}
        self.model = SpeedModel(value["alpha"], value["c"], value["beta"])
        self.k = round(value["k"])
        self._show()

    def action_mine(self) -> None:
        if self.pair is None:
            self.notify("Nothing measured yet: Enter races")
            return
        self.query_one("#alpha", Slider).value = min(0.99, self.pair.alpha)
        self.query_one("#c", Slider).value = self.pair.c
        self.query_one("#beta", Slider).value = self.pair.beta
        self.query_one("#k", Slider).value = self.pair.best()[0]

    def _show(self) -> None:
        chart = self.query_one(SpeedChart)
        chart.imaginary, chart.selected = self.imaginary, self.k
        chart.values = self.model.speedups()
        chart.refresh()
        words = self._brief() if self.app.size.width < 100 else self._in_theory()
        self.query_one("#verdict", Static).update(Content.assemble(*words))

    @property
    def _whose(self) -> str:
        return "an imaginary pair" if self.imaginary else "your pair's figures"

    def _brief(self) -> list[tuple[str, str]]:
        speed = f"{self.model.speedups()[self.k]:.2f}×"
        return [(f"In theory, with {self._whose}: {speed} at k = {self.k}", self.ink.muted)]

    def _in_theory(self) -> list[tuple[str, str]]:
        ink, model, k = self.ink, self.model, self.k
        best, top = model.best()
        total, cost, speedup = model.c + model.beta, model.cost(k), model.speedups()[k]
        parts = [
            (f"In theory, with {self._whose}\n", "bold"),
            (f"α {model.alpha:.2f}  c {model.c:.2f}  β {model.beta:.2f}\n", ""),
            (f"{speedup:.2f}× at k = {k}: ", ""),
            (f"{speedup * cost:.2f} tokens in {cost:.2f} steps\n", ink.muted),
        ]
        signs = (f"α {model.alpha:.2f}", f"c + β {total:.2f}")
        if not model.pays:
            return [*parts, (f"No guess would pay: {signs[0]} <= {signs[1]}", ink.muted)]
        bound = f"{model.bound:.1f}×" if total > 0 else "none"
        collapse = model.collapse()
        words = "never up to k = 64" if collapse is None else f"from k = {collapse}"
        return [
            *parts,
            (f"A guess would pay: {signs[0]} > {signs[1]}\n", ink.muted),
            (f"Peak {top:.2f}× at k = {best}, bound {bound}\n", ink.muted),
            (f"Slower than plain {words}", ink.muted),
        ]
