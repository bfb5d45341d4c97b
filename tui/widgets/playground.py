"""The speed model on sliders, and the user's own pair on the same chart."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Horizontal, Vertical
from textual.content import Content
from textual.widgets import Static

from specllama.events import Verdict
from specllama.tui.measure import MAX_K, SpeedModel
from specllama.tui.widgets.bars import Mark, Series, Slider, SpeedChart
from specllama.tui.widgets.base import Inked
from specllama.verdict import lead

LENGTHS_SHOWN = 4


class Playground(Inked, Vertical):
    """Bars are the model; a diamond with its whisker is a measurement."""

    HELP = """
    α is the chance that a drafted token is accepted, c the cost of one draft step and β the cost
    of each further row of a target pass, both in target steps; k is how many tokens are drafted.

    Expected tokens per round are (1 − α^(k+1)) / (1 − α), the speed-up is that divided by
    1 + k·c + k·β. Speculation pays if and only if α > c + β, and never gets past 1 / (c + β).

    Bars are the model. A diamond is a measurement: the speed of rounds that drafted k tokens, over
    that of plain steps, with the interval that it lies in. M puts the sliders on your pair's
    figures, so that the two can be compared.
    """

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("m", "mine", "My pair", id="playground.mine"),
        Binding("b", "best", "Best k", id="playground.best"),
        Binding("tab", "app.focus_next", "Next slider", show=False),
    ]

    def __init__(self, *, id: str | None = None) -> None:
        super().__init__(id=id)
        self.pair: SpeedModel | None = None
        self.measured: Mapping[int, Verdict] = {}
        # Without a measurement: a draft a tenth of the target, on a machine with some headroom.
        self.model = SpeedModel(0.7, 0.1, 0.05)
        self.k = 4

    def compose(self) -> ComposeResult:
        glyphs = self.glyphs
        with Horizontal(id="playground"):
            with Vertical(id="playground-main"):
                yield Slider(glyphs.alpha, 0.7, 0.0, 0.99, 0.01, hint="acceptance", id="alpha")
                yield Slider("c", 0.1, 0.0, 1.0, 0.01, hint="cost of a draft step", id="c")
                yield Slider(glyphs.beta, 0.05, 0.0, 1.0, 0.01, hint="cost of a row", id="beta")
                yield Slider("k", 4, 0, MAX_K, 1, hint="tokens drafted", form=".0f", id="k")
                yield SpeedChart()
            yield Static(id="verdict", markup=False)

    def on_mount(self) -> None:
        self._show()

    def measure(self, pair: SpeedModel | None, measured: Mapping[int, Verdict]) -> None:
        """Figures of the user's pair; the first put the sliders on them."""
        first, self.pair, self.measured = self.pair is None, pair, measured
        if first and pair is not None:
            self.action_mine()
        self._show()

    def on_slider_changed(self, event: Slider.Changed) -> None:
        value = {s.id: s.value for s in self.query(Slider)}
        self.model = SpeedModel(value["alpha"], value["c"], value["beta"])
        self.k = round(value["k"])
        self._show()

    def action_mine(self) -> None:
        if self.pair is None:
            self.notify("Nothing measured yet: Enter measures")
            return
        self.query_one("#alpha", Slider).value = min(0.99, self.pair.alpha)
        self.query_one("#c", Slider).value = self.pair.c
        self.query_one("#beta", Slider).value = self.pair.beta
        self.query_one("#k", Slider).value = self.pair.best()[0]

    def action_best(self) -> None:
        self.query_one("#k", Slider).value = self.model.best()[0]

    def _show(self) -> None:
        ks = range(MAX_K + 1)
        marks = [_mark(self.measured.get(k)) for k in ks]
        self.query_one(SpeedChart).series = Series(
            [self.model.speedup(k) for k in ks], marks, self.k
        )
        narrow = self.app.size.width < 100
        self.query_one("#verdict", Static).update(self._brief() if narrow else self._verdict())

    def _brief(self) -> Content:
        ink, x = self.ink, self.glyphs.times
        best, top = self.model.best()
        speed = self.model.speedup(self.k)
        parts = [
            (f"{speed:.2f}{x}", ink.good if speed > 1 else ink.bad),
            (f" at k={self.k}, {self.model.tokens(self.k):.2f} tokens/round", ""),
            (f"  best k={best}: {top:.2f}{x}", ink.muted),
        ]
        if self.measured:
            mine = max(self.measured, key=self._ratio)
            words = f"  {self.glyphs.diamond} yours k={mine}: {self._ratio(mine):.2f}{x}"
            parts.append((words, ink.mark))
        return Content.assemble(*parts)

    def _verdict(self) -> Content:
        ink, g, model, k = self.ink, self.glyphs, self.model, self.k
        speed = model.speedup(k)
        best, top = model.best()
        total = model.c + model.beta
        parts: list[tuple[str, str]] = [
            (f"{speed:.2f}{g.times}", ink.good if speed > 1 else ink.bad),
            (f" at k = {k}\n", "bold"),
            (f"{model.tokens(k):.2f} tokens per round\n", ""),
            (f"{model.cost(k):.2f} target steps per round\n\n", ink.muted),
        ]
        if model.pays:
            parts.append((f"It pays: {g.alpha} > c + {g.beta}", ink.good))
            parts.append((f" ({model.alpha:.2f} > {total:.2f})\n", ink.muted))
            parts.append((f"Peak {top:.2f}{g.times} at k = {best}\n", ""))
            bound = f"{model.bound:.1f}{g.times}" if total > 0 else "none"
            parts.append((f"Bound 1/(c+{g.beta}): {bound}\n", ink.muted))
        else:
            parts.append((f"It cannot pay: {g.alpha} <= c + {g.beta}", ink.bad))
            parts.append((f" ({model.alpha:.2f} <= {total:.2f})\n", ink.muted))
            parts.append(("Plain decoding is faster at every k.\n", ""))
        collapse = model.collapse()
        if model.pays:
            parts.append(
                (f"Slower than plain from k = {collapse}\n", ink.warn)
                if collapse is not None
                else ("Never slower than plain up to k = 64\n", ink.muted)
            )
        parts.append(("\n", ""))
        parts += self._mine()
        return Content.assemble(*parts)

    def _ratio(self, k: int) -> float:
        return self.measured[k].ratio or 0.0

    def _mine(self) -> list[tuple[str, str]]:
        ink, g, pair = self.ink, self.glyphs, self.pair
        out = [(f"{g.diamond} Your pair, measured here\n", ink.mark)]
        if not self.measured:
            out.append(("Not yet: Enter measures 2 to 8.\n", ink.muted))
        best = sorted(self.measured, key=self._ratio, reverse=True)[:LENGTHS_SHOWN]
        for k in sorted(best):
            one = self.measured[k]
            out.append((f"k = {k:<2} {g.text(lead(one, ''))}\n", ink.verdict(one.answer)))
        if pair is None:
            return out
        top, predicted = pair.best()
        out += [
            ("\nIts figures in the model (M)\n", "bold"),
            (f"{g.alpha} {pair.alpha:.2f}  c {pair.c:.2f}  {g.beta} {pair.beta:.2f}\n", ""),
        ]
        if top:
            out.append((f"predict {predicted:.2f}{g.times} at k = {top}", ""))
        else:
            out.append(("predict that no draft pays", ink.warn))
        return out


def _mark(verdict: Verdict | None) -> Mark | None:
    if verdict is None or verdict.ratio is None:
        return None
    return Mark(verdict.ratio, verdict.low or verdict.ratio, verdict.high or verdict.ratio)
