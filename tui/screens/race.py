"""The race: does drafting pay here? Plain against drafted, draft lengths, methods, slices."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import ClassVar

from textual import on
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Horizontal, VerticalScroll
from textual.content import Content
from textual.timer import Timer
from textual.widgets import ContentSwitcher, Footer, Static

from specllama.events import Verdict
from specllama.interface import EngineInfo, EngineLike, Prompt
from specllama.params import GenerateParams
from specllama.prompts import SLICES, load_prompts
from specllama.text import sanitize_line
from specllama.tui.measure import Meter
from specllama.tui.race import (
    DRAFTED,
    LENGTHS,
    PLAIN,
    Advice,
    Board,
    RaceEnded,
    RaceMoved,
    Racing,
    Run,
    advise,
    drafted,
    plain_and,
)
from specllama.tui.screens.base import Page
from specllama.tui.widgets.playground import Playground
from specllama.tui.widgets.stats_strip import MEASURE, duration, rate
from specllama.tui.widgets.track import RaceTrack
from specllama.verdict import details, lead

FRAMES = 12  # a second, while a race is replayed
PER_SLICE = 3  # prompts
TABS = {"race": "Race", "sweep": "k sweep", "methods": "Methods", "slices": "Slices"}


class RaceScreen(Page):
    TITLE = "Does it pay?"
    AUTO_FOCUS = ""
    HELP = """
    Plain and drafted decoding answer the same prompt with the same seed and length, one after the
    other, each from an empty cache; then both are shown side by side as they really went. Space
    stops and goes on, Home begins again, End shows the outcome, plus and minus change the pace.

    1 to 4 choose: the race, draft lengths, methods, kinds of text. Enter runs what is shown, A
    takes what was best. Esc leaves, and stops what is running. Speeds are those of the tokens
    behind the first, of typical passes; the figure behind ± holds the truth in 19 of 20 cases.
    """

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("enter,r", "run", "Run", id="race.run", priority=True),
        Binding("space", "play", "Play", id="race.play"),
        Binding("home", "restart", "From the start", show=False, id="race.restart"),
        Binding("end", "skip", "To the end", show=False, id="race.skip"),
        Binding("plus,equals_sign", "pace(2)", "Faster", show=False, id="race.faster"),
        Binding("minus", "pace(0.5)", "Slower", show=False, id="race.slower"),
        Binding("a", "apply", "Apply", id="race.apply"),
        *(
            Binding(str(i), f"tab('{tab}')", name, show=False, id=f"race.{tab}")
            for i, (tab, name) in enumerate(TABS.items(), 1)
        ),
    ]

    def __init__(
        self,
        board: Board,
        meter: Meter,
        engine: EngineLike,
        info: EngineInfo | None,
        params: GenerateParams,
        prompt: Prompt | None,
        *,
        log: bool = True,
        tab: str = "race",
    ) -> None:
        super().__init__()
        self.board, self.meter, self.info, self.params = board, meter, info, params
        self.prompt = prompt
        self.racing = Racing(engine, self.post_message, log=log)
        self.tab = tab
        self.seconds = 0.0
        self.pace = 1.0
        self._raced: str = ""
        self._timer: Timer | None = None

    def compose_page(self) -> ComposeResult:
        yield Static(id="tabs", markup=False)
        with ContentSwitcher(initial=self.tab):
            with Horizontal(id="race"):
                yield RaceTrack(PLAIN, id="track-plain")
                yield RaceTrack(DRAFTED, id="track-drafted")
            yield Playground(id="sweep")
            with VerticalScroll(id="methods", can_focus=False):
                yield Static(id="methods-table", markup=False)
            with VerticalScroll(id="slices", can_focus=False):
                yield Static(id="slices-table", markup=False)
        yield Static(id="race-verdict", markup=False)
        yield Footer()

    def on_mount(self) -> None:
        super().on_mount()
        self.seconds = self._end()
        self._show()
        if self.board.plain("race") is None and self.info is not None:
            self.action_run()

    def on_unmount(self) -> None:
        self.racing.stop()
        self.board.runs.pop(self._raced, None)  # half a race proves nothing
        if self.racing.thread is not None:
            self.racing.thread.join(1.0)  # the chat is about to use the engine

    # ------------------------------------------------------------------ running

    def action_run(self) -> None:
        if self.info is None or self.racing.busy:
            self.notify("Load a model first: F6" if self.info is None else "It is running")
            return
        self._stop()
        self._raced = self.tab
        runs = self._runs(self.info)
        self.board.runs[self.tab] = runs
        self.racing.start(runs)
        self._show()

    def _runs(self, info: EngineInfo) -> list[Run]:
        params = drafted(self.params)
        prompt = self.prompt or load_prompts()[0].content
        match self.tab:
            case "sweep":
                fixed = params.replace(window="fixed", draft_min=0)
                ways = [(f"k = {k}", fixed.replace(draft_max=k)) for k in LENGTHS]
            case "methods":
                methods = [m for m in info.methods if m.available and m.name != "none"]
                ways = [(m.label, params.replace(proposer=m.name)) for m in methods]
            case "slices":
                prompts = load_prompts()
                return [
                    run
                    for group in SLICES
                    for one in [p for p in prompts if p.slice == group][:PER_SLICE]
                    for run in plain_and(one.content, params, [(DRAFTED, params)], group)
                ]
            case _:
                ways = [(DRAFTED, params)]
        return plain_and(prompt, params, ways, "")

    @on(RaceMoved)
    def _moved(self) -> None:
        self.seconds = self._end()
        self._show()

    @on(RaceEnded)
    def _ended(self, event: RaceEnded) -> None:
        tab, self._raced = self._raced, ""
        if event.error is not None:
            self.board.runs.pop(tab, None)
            self.notify(event.error.message, severity="error", markup=False)
        elif (plain := self.board.plain("race")) is not None and tab == "race":
            self.meter.measured(plain.singles)
            for run in self.board.ways("race"):
                for done in run.rounds:
                    self.meter.observe(done)
            self.action_restart()
        self._show()

    # ------------------------------------------------------------------ the replay

    def _end(self) -> float:
        return max((run.end_s for run in self.board.runs.get("race", ())), default=0.0)

    def raced(self) -> bool:
        """Whether everything that was asked for was run and drawn."""
        return not self._raced and bool(self.board.runs.get(self.tab))

    def action_skip(self) -> None:
        """To the end of the replay."""
        self._stop()
        self.seconds = self._end()
        self._show()

    def action_restart(self) -> None:
        self.seconds = 0.0
        self._play()

    def action_play(self) -> None:
        if self._timer is not None:
            self._stop()
        elif self.seconds >= self._end():
            self.action_restart()
        else:
            self._play()

    def action_pace(self, factor: float) -> None:
        self.pace = min(8.0, max(0.125, self.pace * factor))
        self._show()

    def _play(self) -> None:
        if self._timer is None:
            self._timer = self.set_interval(1 / FRAMES, self._tick)

    def _stop(self) -> None:
        if self._timer is not None:
            self._timer.stop()
            self._timer = None

    def _tick(self) -> None:
        self.seconds = min(self.seconds + self.pace / FRAMES, self._end())
        if self.seconds >= self._end():
            self._stop()
        self._show()

    # ------------------------------------------------------------------ choosing

    def action_tab(self, tab: str) -> None:
        self.tab = tab
        self.query_one(ContentSwitcher).current = tab
        self._show()
        if tab == "sweep":
            self.query_one("#k").focus()
        else:
            self.set_focus(None)

    @property
    def advice(self) -> Advice | None:
        """From everything that was raced on the prompt."""
        plain = self.board.plain("race")
        if plain is None or self.info is None or self._raced or self.seconds < self._end():
            return None
        ways = [run for tab in ("race", "sweep", "methods") for run in self.board.ways(tab)]
        return advise(self.params, plain, ways)

    def action_apply(self) -> None:
        advice = self.advice
        if advice is None or advice.params is None:
            self.notify("There is nothing to change" if advice else "Nothing was raced yet")
        else:
            self.dismiss(advice.params)

    # ------------------------------------------------------------------ drawing

    def _show(self) -> None:
        if not self.is_mounted:
            return
        state = f"running {TABS[self._raced]}" if self._raced else ""
        if not state and self._timer is not None:
            state = f"{self.glyphs.play} {self.pace:g}{self.glyphs.times}"
        self.set_title(self.TITLE or "", state)
        parts: list[tuple[str, str]] = []
        for i, (tab, name) in enumerate(TABS.items(), 1):
            chosen = tab == self.tab
            parts += [(f" {i} {name} ", "bold reverse" if chosen else self.ink.muted), (" ", "")]
        self.query_one("#tabs", Static).update(Content.assemble(*parts))
        match self.tab:
            case "race":
                self._show_race()
            case "sweep":
                self._show_sweep()
            case "methods":
                self.query_one("#methods-table", Static).update(self._methods())
            case "slices":
                self.query_one("#slices-table", Static).update(self._slices())
        self.query_one("#race-verdict", Static).update(self._verdict())

    def _show_race(self) -> None:
        runs = self.board.runs.get("race", ())
        for name in (PLAIN, DRAFTED):
            run = next((r for r in runs if r.name == name), None)
            self.query_one(f"#track-{name}", RaceTrack).show(run, self.seconds)

    def _show_sweep(self) -> None:
        plain = self.board.plain("sweep")
        measured = self.meter.verdicts_by_length()
        if plain is not None and plain.finished is not None:
            for run in self.board.ways("sweep"):
                measured[run.params.draft_max or 0] = run.against(plain)
        self.query_one(Playground).measure(self.meter.model(), measured)

    def _verdict(self) -> Content:
        """The proof, the verdict, and what to do."""
        ink, glyphs = self.ink, self.glyphs
        lines: list[Content] = []
        plain, ways = self.board.plain("race"), self.board.ways("race")
        if self._raced:
            done = [run for run in self.board.runs[self._raced] if run.finished is not None]
            now = f"run {len(done) + 1} of {len(self.board.runs[self._raced])}"
            lines.append(Content.assemble((now, ink.muted)))
        elif self.tab == "race" and plain is not None and ways and self.seconds >= self._end():
            lines.append(self._proof(ways[0], plain))
            lines.append(self._words(ways[0].against(plain), both=True))
        if (advice := self.advice) is not None:
            lines.append(Content.assemble((glyphs.text(advice.words), ink.accent)))
        return Content("\n").join(lines)

    def _proof(self, run: Run, plain: Run) -> Content:
        same, of = run.same(plain)
        if same == of:
            return Content.assemble(
                (self.glyphs.text(f"✓ {same} of {of} tokens identical"), self.ink.good)
            )
        words = f"✗ {same} of {of} tokens identical"
        if run.params.verify != "match":
            return Content.assemble(
                (self.glyphs.text(f"{words}: {run.params.verify} keeps the law"), self.ink.muted)
            )
        near = any(done.near_tie for done in (*run.rounds, *plain.rounds))
        why = ": a near-tie, see specllama prove" if near else ": see specllama prove"
        return Content.assemble((self.glyphs.text(words + why), self.ink.warn))

    def _words(self, verdict: Verdict, *, both: bool = False, kept: bool = False) -> Content:
        first = self.glyphs.text(lead(verdict, MEASURE))
        rest = "".join(
            f" {self.glyphs.dot} {one}" for one in details(verdict, both=both)[int(kept) :]
        )
        return Content.assemble((first, self.ink.verdict(verdict.answer)), (rest, self.ink.muted))

    def _methods(self) -> Content:
        plain = self.board.plain("methods")
        ways = self.board.ways("methods")
        if plain is None or not ways:
            return Content.assemble(("Enter runs every method on this prompt.", self.ink.muted))
        width = max(len(run.name) for run in ways)
        lines = []
        for run in sorted(ways, key=lambda r: -(r.against(plain).ratio or 0.0)):
            same, of = run.same(plain)
            mark = self.glyphs.text("✓" if same == of else "✗")
            lines.append(
                Content.assemble(
                    (f"{sanitize_line(run.name):<{width}}  ", "bold"),
                    (f"{mark} ", self.ink.good if same == of else self.ink.warn),
                    self._words(run.against(plain)),
                )
            )
        return Content("\n").join(lines)

    def _slices(self) -> Content:
        groups = [g for g in SLICES if self.board.ways("slices", g)]
        if not groups:
            return Content.assemble(
                (f"Enter runs {PER_SLICE} prompts of each kind of text.", self.ink.muted)
            )
        lines = [
            Content.assemble(
                (f"{'':6}{'plain':>8}{'drafted':>9}{'p50':>9}{'p95':>9}", self.ink.muted)
            )
        ]
        for group in groups:
            ways = self.board.ways("slices", group)
            plains = [r for r in self.board.runs["slices"] if r.name == PLAIN and r.group == group]
            verdict = _together(ways, plains)
            waits = sorted(1000 * w for run in ways for w in _waits(run))
            figures = "".join(
                (
                    f"{rate(_speed(plains)):>8}",
                    f"{rate(_speed(ways)):>9}",
                    f"{duration(_percentile(waits, 0.5)):>9}",
                    f"{duration(_percentile(waits, 0.95)):>9}  ",
                )
            )
            lines.append(
                Content.assemble(
                    (f"{group:<6}", "bold"), (figures, ""), self._words(verdict, kept=True)
                )
            )
        lines.append(
            Content.assemble(
                ("tokens a second; p50, p95: how long one waits for more text", self.ink.muted)
            )
        )
        return Content("\n").join(lines)


def _together(ways: Sequence[Run], plains: Sequence[Run]) -> Verdict:
    from specllama.verdict import judge

    return judge(
        [one for run in ways for one in run.passes], [ms for run in plains for ms in run.singles]
    )


def _speed(runs: Sequence[Run]) -> float | None:
    """Tokens a second behind the first."""
    seconds = sum(run.end_s - run.ttft_s for run in runs)
    return sum(len(run.tokens) - 1 for run in runs) / seconds if seconds > 0 else None


def _waits(run: Run) -> list[float]:
    """Seconds between rounds."""
    times = [done.t_s for done in run.rounds]
    return [b - a for a, b in pairwise(times)]


def _percentile(values: Sequence[float], share: float) -> float | None:
    return values[min(int(share * len(values)), len(values) - 1)] if values else None
