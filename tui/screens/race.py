"""The race: does drafting pay here? Plain against drafted, draft lengths, methods, slices; and the
list of what was checked."""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

from textual import on
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Horizontal, VerticalScroll
from textual.content import Content
from textual.timer import Timer
from textual.widgets import ContentSwitcher, Footer, Static

from specllama.interface import EngineInfo, EngineLike, Prompt
from specllama.params import GenerateParams
from specllama.prompts import SLICES, load_prompts
from specllama.store import checks
from specllama.tui import outcome
from specllama.tui.checklist import Line, checklist, counted, draw, next_tab
from specllama.tui.exports import Circumstances, Export, of_document, race
from specllama.tui.keeper import loading_words
from specllama.tui.measure import Meter
from specllama.tui.messages import EngineFailed, EngineLoading, EngineReady
from specllama.tui.race import (
    DRAFTED,
    LENGTHS,
    PLAIN,
    TOGETHER,
    Advice,
    Board,
    RaceEnded,
    RaceMoved,
    Racing,
    Run,
    advise,
    drafted,
    plain_and,
    side_by_side,
)
from specllama.tui.screens.base import Page
from specllama.tui.widgets import race_tables
from specllama.tui.widgets.playground import Playground
from specllama.tui.widgets.track import RaceTrack

FRAMES = 12  # a second, while a race is replayed
PER_SLICE = 3  # prompts
TABS = {
    "race": "Race",
    "sweep": "k sweep",
    "methods": "Methods",
    "slices": "Slices",
    "lanes": "Lanes",
    "checklist": "Checks",
}


class RaceScreen(Page):
    TITLE = "Does it pay?"
    AUTO_FOCUS = ""
    HELP = """
    Plain and drafted decoding answer the same prompt with the same seed and length, one after the
    other, each from an empty cache; then both are shown side by side as they really went. Space
    stops and goes on, Home begins again, End shows the outcome, plus and minus change the pace.

    1 to 6 choose: the race, draft lengths, methods, kinds of text, conversations at once, and the
    list of what to check before you trust drafting. Enter runs what is shown, or the next check; A
    takes what was best. A check is asked for again after an upgrade, with other files and on
    another device.

    Esc leaves, and stops what is running. Speeds are those of the tokens behind the first, of
    typical passes; in 19 of 20 cases the truth lies between the two figures in brackets.
    """

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("enter,r", "run", "Run", id="race.run", priority=True),
        Binding("space", "play", "Play", id="race.play"),
        Binding("home", "restart", "From the start", show=False, id="race.restart"),
        Binding("end", "skip", "To the end", show=False, id="race.skip"),
        Binding("plus,equals_sign", "pace(2)", "Faster", show=False, id="race.faster"),
        Binding("minus", "pace(0.5)", "Slower", show=False, id="race.slower"),
        Binding("a", "apply", "Apply", id="race.apply"),
        Binding("ctrl+s", "app.export", "Save", id="app.export"),
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
        widen: Callable[[], None] | None = None,
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
        self.list: list[Line] = []
        self._raced: str = ""
        self._widen, self._widening = widen, ""  # and how far that is
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
            with VerticalScroll(id="lanes", can_focus=False):
                yield Static(id="lanes-table", markup=False)
            with VerticalScroll(id="checklist"):
                yield Static(id="checklist-table", markup=False)
        yield Static(id="race-verdict", markup=False)
        yield Footer()

    def on_mount(self) -> None:
        super().on_mount()
        self.seconds = self._end()
        self._check()
        self._show()
        if self.board.plain("race") is None and self.info is not None:
            self.action_run()

    def on_resize(self) -> None:
        super().on_resize()
        self._show()

    def on_unmount(self) -> None:
        self.racing.stop()
        self.board.runs.pop(self._raced, None)  # half a race proves nothing
        if self.racing.thread is not None:
            self.racing.thread.join(1.0)  # the chat is about to use the engine

    # ------------------------------------------------------------------ running

    def action_run(self) -> None:
        if self.info is None or self.racing.busy or self._widening:
            self.notify("Load a model first: F6" if self.info is None else "It is running")
            return
        self._stop()
        if self.tab == "checklist":
            if not (tab := next_tab(self.list)):
                self.notify("Nothing is left to check")
                return
            self.action_tab(tab)
        if self.tab == "lanes" and self.info.lanes < 2:
            if self._widen is None:
                self.notify(self._offer(self.info))
                return
            widen, self._widen, self._widening = self._widen, None, loading_words(None)
            widen()
            self._show()
            return
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
            case "lanes":
                prompts = load_prompts()
                asked = [next(p for p in prompts if p.slice == kind).content for kind in SLICES]
                return side_by_side(asked, params, [n for n in TOGETHER if n <= info.lanes])
            case _:
                ways = [(DRAFTED, params)]
        return plain_and(prompt, params, ways, "")

    def _offer(self, info: EngineInfo) -> str:
        """What Enter does for conversations at once, or why nothing."""
        if info.lanes > 1:
            return f"Enter writes {len(SLICES)} replies {_several(info.lanes)} at once, each way."
        if self._widen is None:
            return "This engine writes one reply at a time: nothing can be run at once."
        most = max(TOGETHER)
        return (
            f"Enter loads the pair again, with room for {most} conversations (that took "
            f"{info.load_ms / 1000:.1f} s last time), and writes {len(SLICES)} replies "
            f"{_several(most)} at once, each way. It stays loaded so."
        )

    def engine_told(self, told: EngineLoading | EngineReady | EngineFailed) -> None:
        match told:
            case EngineLoading() if self._widening:
                self._widening = loading_words(told.progress)
            case EngineReady():
                self.info, widened, self._widening = told.info, self._widening, ""
                if widened and self.tab == "lanes":
                    self.action_run()
            case EngineFailed():
                self._widening = ""
                self.notify(told.error.message, severity="error", markup=False)
        self._show()

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
        if event.error is None and self.info is not None:
            checks.add(self.info, "race", outcome.findings(tab, self.board))
        self._check()
        self._show()

    def _check(self) -> None:
        if self.info is not None:
            self.list = checklist(self.info, list(TABS), logging=self.racing.log)

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
        held = {"sweep": "#k", "checklist": "#checklist"}.get(tab)
        self.set_focus(None if held is None else self.query_one(held))

    @property
    def advice(self) -> Advice | None:
        """From everything that was raced on the prompt."""
        tabs = ("race", "sweep", "methods")
        judged = [(w.run, w.verdict) for tab in tabs for w in outcome.ways(self.board, tab)]
        if not judged or self.info is None or self._raced or self.seconds < self._end():
            return None
        return advise(self.params, judged)

    def action_apply(self) -> None:
        advice = self.advice
        if advice is None or advice.params is None:
            self.notify(advice.said if advice else "Nothing was raced yet")
        else:
            self.dismiss(advice.params)

    def exports(self) -> list[Export]:
        """All that was raced; half a race proves nothing."""
        if self._raced or not self.board.runs:
            return []
        under = Circumstances(self.info, self.params)
        board, prompt, lines, advice = self.board, self.prompt, self.list, self.advice
        return [
            of_document("The race", "race", lambda: race(board, prompt, lines, advice, under)),
        ]

    # ------------------------------------------------------------------ drawing

    def _show(self) -> None:
        if not self.is_mounted:
            return
        state = f"running {TABS[self._raced]}" if self._raced else self._widening
        if not state and self._timer is not None:
            state = f"{self.glyphs.play} {self.pace:g}{self.glyphs.times}"
        self.set_title(self.TITLE or "", state)
        parts: list[tuple[str, str]] = []
        pad = " " if self.size.width >= 72 else ""
        for i, (tab, name) in enumerate(TABS.items(), 1):
            chosen = tab == self.tab
            if tab == "checklist" and self.list:
                name = f"{name} {counted(self.list)}"
            style = "bold reverse" if chosen else self.ink.muted
            parts += [(f"{pad}{i} {name}{pad}", style), (" ", "")]
        self.query_one("#tabs", Static).update(Content.assemble(*parts))
        match self.tab:
            case "race":
                self._show_race()
            case "sweep":
                self._show_sweep()
            case "methods":
                ways = outcome.ways(self.board, "methods")
                table = race_tables.methods(ways, self.glyphs, self.ink)
                self.query_one("#methods-table", Static).update(table)
            case "slices":
                kinds = outcome.kinds(self.board)
                table = race_tables.slices(kinds, PER_SLICE, self.glyphs, self.ink)
                self.query_one("#slices-table", Static).update(table)
            case "lanes":
                offer = "" if self.info is None else self._offer(self.info)
                held = outcome.companies(self.board)
                table = race_tables.lanes(held, offer, self.glyphs, self.ink)
                self.query_one("#lanes-table", Static).update(table)
            case "checklist":
                table = draw(self.list, self.glyphs, self.ink, self.size.width - 6)
                self.query_one("#checklist-table", Static).update(table)
        self.query_one("#race-verdict", Static).update(self._verdict())

    def _show_race(self) -> None:
        runs = self.board.runs.get("race", ())
        for name in (PLAIN, DRAFTED):
            run = next((r for r in runs if r.name == name), None)
            self.query_one(f"#track-{name}", RaceTrack).show(run, self.seconds)

    def _show_sweep(self) -> None:
        measured = self.meter.verdicts_by_length()
        for way in outcome.ways(self.board, "sweep"):
            if way.verdict.ratio is not None:
                measured[way.run.params.draft_max or 0] = way.verdict
        self.query_one(Playground).measure(self.meter.model(), measured)

    def _verdict(self) -> Content:
        """The proof, the verdict, and what to do."""
        ink, glyphs = self.ink, self.glyphs
        lines: list[Content] = []
        ways = outcome.ways(self.board, "race")
        if self._raced:
            done = [run for run in self.board.runs[self._raced] if run.finished is not None]
            now = f"run {len(done) + 1} of {len(self.board.runs[self._raced])}"
            lines.append(Content.assemble((now, ink.muted)))
        elif self.tab == "race" and ways and self.seconds >= self._end():
            lines.append(race_tables.proof(ways[0], glyphs, ink))
            lines.append(race_tables.verdict(ways[0].verdict, glyphs, ink, both=True))
        elif self.tab == "lanes" and (held := outcome.companies(self.board)):
            lines.append(race_tables.together(held, glyphs, ink))
        if (advice := self.advice) is not None:
            lines.append(Content.assemble((glyphs.text(advice.said), ink.accent)))
        return Content("\n").join(lines)


def _several(lanes: int) -> str:
    """ "1, 2 and 4": how many conversations are raced at once, where there are so many lanes."""
    *first, last = [str(n) for n in TOGETHER if n <= lanes]
    return f"{', '.join(first)} and {last}"
