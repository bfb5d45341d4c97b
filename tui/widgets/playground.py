"""A model of drafting: the speed at each draft length, by three figures of a pair."""

from __future__ import annotations

from typing import ClassVar

from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Horizontal, Vertical
from textual.content import Content
from textual.widgets import Static

from specllama.bench.speed_model import MAX_K, SpeedModel
from specllama.tui.widgets.bars import Slider, SpeedChart
from specllama.tui.widgets.base import Inked


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

    def on_slider_changed(self, event: Slider.Changed) -> None:
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
        narrow = self.app.size.width < 100
        words = self._brief() if narrow else self._in_theory()
        self.query_one("#verdict", Static).update(Content.assemble(*words))

    @property
    def _whose(self) -> str:
        return "an imaginary pair" if self.imaginary else "your pair's figures"

    def _brief(self) -> list[tuple[str, str]]:
        speed = f"{self.model.speedups()[self.k]:.2f}{self.glyphs.times}"
        return [(f"In theory, with {self._whose}: {speed} at k = {self.k}", self.ink.muted)]

    def _in_theory(self) -> list[tuple[str, str]]:
        ink, g, model, k = self.ink, self.glyphs, self.model, self.k
        best, top = model.best()
        total, cost, speedup = model.c + model.beta, model.cost(k), model.speedups()[k]
        parts = [
            (f"In theory, with {self._whose}\n", "bold"),
            (f"{g.alpha} {model.alpha:.2f}  c {model.c:.2f}  {g.beta} {model.beta:.2f}\n", ""),
            (f"{speedup:.2f}{g.times} at k = {k}: ", ""),
            (f"{speedup * cost:.2f} tokens in {cost:.2f} steps\n", ink.muted),
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
