"""The first launch: ten seconds of a reply as it is drafted, and what to do next."""

from __future__ import annotations

from textual.content import Content
from textual.timer import Timer
from textual.widgets import Static

from specllama.events import RoundDone
from specllama.models import catalog, fit
from specllama.params import GenerateParams
from specllama.tui.widgets import walk
from specllama.tui.widgets.base import Inked

STAGE_S = 0.55
ROUNDS = 6  # of three stages: ten seconds
STAGES = ("guess", "check", "keep")
BUNDLED = (
    "The bundled pair is for trying things out. Its target is so small that a guess costs more "
    "than it saves, so drafting switches itself off, as it should.\n\n"
)


def demo_rounds() -> list[RoundDone]:
    """Invented rounds that drafted, of a fixed window."""
    from specllama.tui.demo import DemoEngine

    events = DemoEngine().generate("?", GenerateParams(seed=7, draft_max=4, proposer="draft"))
    rounds = [event for event in events if isinstance(event, RoundDone)]
    first = next(i for i, done in enumerate(rounds) if done.drafted)
    return rounds[: first + ROUNDS]


def _kept(done: RoundDone) -> str:
    n, drafted = done.accepted, len(done.drafted)
    if n == drafted:
        return "all are what it would have written"
    counted = {0: "none is", 1: f"1 of {drafted} is"}.get(n, f"{n} of {drafted} are")
    return f"{counted} what it would have written"


def real_pair(memory: float) -> catalog.CatalogPair | None:
    """The largest pair of the catalogue with a draft model that runs comfortably here."""
    pairs = [
        p for p in catalog.load().values() if p.draft is not None and fit.judge(p, memory) == "yes"
    ]
    return max(pairs, key=lambda pair: pair.memory_gb, default=None)


class FirstLook(Inked, Static):
    DEFAULT_CSS = """
    FirstLook { height: auto; padding: 1 2; }
    """

    def __init__(self, *, bundled: bool, id: str | None = None) -> None:
        super().__init__(id=id, markup=False)
        self.bundled = bundled
        self.rounds = demo_rounds()
        self.at = next(i for i, done in enumerate(self.rounds) if done.drafted)
        self.stage = 0
        self._timer: Timer | None = None

    @property
    def over(self) -> bool:
        return self.at >= len(self.rounds)

    def on_mount(self) -> None:
        self._timer = self.set_interval(STAGE_S, self.step)
        self.redraw()

    def step(self) -> None:
        """One stage on; at the end the clock stops: an idle app costs nothing."""
        self.stage += 1
        if self.stage > 2:
            self.at, self.stage = self.at + 1, 0
        if self.over and self._timer is not None:
            self._timer.stop()
        self.redraw()

    def redraw(self) -> None:
        self.update(self._next_steps() if self.over else self._moment())

    def _moment(self) -> Content:
        ink, glyphs, done = self.ink, self.glyphs, self.rounds[self.at]
        width = max(30, self.app.size.width - 8)
        before = "".join("".join(one.emitted_text) for one in self.rounds[: self.at])
        said = walk.passage(before, done, self.stage, glyphs, ink, width, 3)
        told = (
            f"a small model writes {len(done.drafted)} tokens ahead",
            "the large model reads them all in one pass",
            f"{_kept(done)}; it adds one of its own",
        )
        lines = [
            Content.assemble(("Demonstration: invented text and times\n", ink.muted)),
            said,
            Content(""),
        ]
        for i, (name, words) in enumerate(zip(STAGES, told, strict=True)):
            here = i == self.stage
            style = "bold $primary" if here else ink.muted
            mark = glyphs.play if here else " "
            shown = words if i <= self.stage else ""
            lines.append(
                Content.assemble((f"{mark} {name:<6} ", style), (shown, "" if here else ink.muted))
            )
        return Content("\n").join(lines)

    def _next_steps(self) -> Content:
        ink = self.ink
        memory = fit.machine_memory()
        parts: list[tuple[str, str]] = [
            ("Guess, check, keep: the same text, in fewer passes.\n\n", "bold")
        ]
        if self.bundled:
            parts.append((BUNDLED, ""))
        if (pair := real_pair(memory)) is not None:
            parts += [
                (f"A real pair for this machine ({memory / 1e9:.0f} GB):\n", ""),
                (f"  specllama hub pull {pair.name}", "bold $primary"),
                ("  or F6 here\n\n", ink.muted),
            ]
        parts += [("F4 ", "bold $primary"), ("races plain against drafted decoding", ink.muted)]
        parts += [("  F1 ", "bold $primary"), ("explains the keys", ink.muted)]
        return Content.assemble(*parts)
