"""The race shows whether drafting pays here.

It compares plain with drafted decoding and methods, with the user's own pair.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import ClassVar

from textual import on
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical
from textual.content import Content
from textual.widgets import ContentSwitcher, Input, OptionList, Static

from specllama.bench import outcome
from specllama.bench.experiment import TOKENS, Run, question
from specllama.bench.outcome import RaceBoard
from specllama.interface import EngineInfo, EngineLike, MethodInfo, Prompt
from specllama.settings.params import GenerateParams
from specllama.text import sanitize_line
from specllama.tui.advice import NO_GUESSES, guesses
from specllama.tui.messages import EngineFailed, EngineLoading, EngineReady
from specllama.tui.race_runner import (
    Advice,
    RaceEnded,
    RaceMoved,
    RaceSetup,
    Racing,
    advise,
    advise_among,
)
from specllama.tui.screens.page import Page
from specllama.tui.widgets import race_tables
from specllama.tui.widgets.playground import Playground
from specllama.tui.widgets.race_tables import PLAINLY, MethodList, choices, raced

TABS = {"race": "Race", "methods": "Methods", "theory": "Theory"}


class RaceScreen(Page):
    TITLE = "Does it pay?"
    AUTO_FOCUS = ""
    HELP = """
    Plain and drafted decoding answer the same prompt with the same seed and length, each from an
    empty cache, in pairs of runs that alternate who goes first: until the answer is sure, or for
    ten pairs. Enter runs more. L races a longer reply, P another prompt.

    1 to 3 choose: the race, the methods, the theory. Of methods, Enter uses one from the next
    reply on, R races it and Shift+R all of them. A takes what was best.

    Esc leaves, and stops what is running. Times and speeds are those of whole runs behind their
    first token, by the clock, and so are the verdicts; the interval behind a ratio is reckoned for
    19 of 20 cases.
    """

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("enter", "run", "Run", id="race.run"),
        Binding("r", "race_one", "Race it", id="race.one"),
        Binding("R", "race_all", "Race all", id="race.all"),
        Binding("l", "longer", "Longer", id="race.longer"),
        Binding("p", "ask", "Prompt", id="race.ask"),
        Binding("a", "apply", "Apply", id="race.apply"),
        Binding("ctrl+s", "app.export", "Save", id="app.export"),
        *(
            Binding(str(i), f"tab('{tab}')", name, show=False, id=f"race.{tab}")
            for i, (tab, name) in enumerate(TABS.items(), 1)
        ),
    ]

    def __init__(
        self,
        board: RaceBoard,
        engine: EngineLike,
        info: EngineInfo | None,
        params: GenerateParams,
        prompt: Prompt | None,
        *,
        tab: str = "race",
        busy: Callable[[], bool] = lambda: False,
    ) -> None:
        super().__init__()
        self.board, self.info, self.params = board, info, params
        self.setup = RaceSetup(params, prompt)
        self.racing = Racing(engine, self.post_message)
        self.tab, self.busy = tab, busy
        self._raced: str = ""
        self._goal = 0  # laps of the race that is run
        self._early = False  # it may end before
        self._found: dict[str, tuple[int, list[outcome.Way]]] = {}

    def compose_page(self) -> ComposeResult:
        yield Static(id="tabs", markup=False)
        with ContentSwitcher(initial=self.tab):
            with Vertical(id="race"):
                yield Static(id="race-answer", markup=False)
                yield Input(id="race-ask", placeholder="a prompt to race; empty takes one of ours")
            now = self.params.proposer if self.params.speculate else PLAINLY.name
            yield MethodList(self.info, now, id="methods")
            yield Playground(id="theory")
        yield Static(id="race-verdict", markup=False)

    def on_mount(self) -> None:
        self.query_one("#race-ask").display = False
        before, prompt = self.board.plain("race"), self.setup.prompt
        other = before is not None and prompt is not None and before.prompt != prompt
        if other or not self.setup.fits(self.board):
            self.board.runs.clear()  # another question is asked now, or with other settings
        self.action_tab(self.tab)

    def on_resize(self) -> None:
        self._show()

    def on_unmount(self) -> None:
        self.racing.stop()
        if self.racing.thread is not None:
            self.racing.thread.join(1.0)  # the chat is about to use the engine
        if self._raced:
            self.board.drop_halves(self._raced)

    # ------------------------------------------------------------------ running

    def action_run(self) -> None:
        if not self._idle():
            return
        if self.tab == "methods":
            self._race_methods([m for m in choices(self.info) if m.available and m is not PLAINLY])
            return
        way, laps = self._race, self.board.free_lap("race")
        early = self._early = way is None or not outcome.decided(way)
        self._goal = laps + (outcome.MORE if laps else outcome.MOST)
        enough = outcome.decided if early else lambda way: False
        self._start("race", outcome.race(self.board, self.setup.lap, self._goal, enough))

    def action_race_all(self) -> None:
        self.action_run()

    def action_race_one(self) -> None:
        """Race the chosen method against plain decoding."""
        method = self.query_one(MethodList).chosen
        if method is None or not self._usable(method) or not self._idle():
            return
        if method is PLAINLY:
            self.notify("Every race has plain decoding in it")
            return
        self._race_methods([method])

    def _idle(self) -> bool:
        """True if something can be run now; otherwise show why not."""
        if self.info is None:
            self.notify("Load a model first: F6")
        elif self.racing.busy:
            self.notify("It is running: Esc stops it")
        elif self.busy():
            self.notify("A reply is being written")
        else:
            return True
        return False

    def _race_methods(self, methods: list[MethodInfo]) -> None:
        self._start("methods", self.setup.table(self.board, methods))

    def _start(self, tab: str, runs: Iterable[Run]) -> None:
        self._raced = tab
        self.racing.start(runs)
        self._show()

    # ------------------------------------------------------------------ another prompt or length

    def action_longer(self) -> None:
        """Race a reply that is twice as long, even past where the model would end it."""
        if not self._idle() or self.info is None:
            return
        plain = self.board.plain("race")
        written = self.setup.tokens if plain is None else len(plain.tokens)
        room = self.info.target.n_ctx // 2
        if written >= room:
            self.notify("Half of the context is the longest reply that is raced")
            return
        self.setup.tokens = min(max(2 * written, TOKENS), room)
        self.setup.to_the_end = True
        self._race_anew()

    def action_ask(self) -> None:
        """Ask for another prompt to race."""
        if not self._idle():
            return
        if self.tab != "race":
            self.action_tab("race")
        field = self.query_one("#race-ask", Input)
        field.display = True
        field.value = ""
        field.focus()

    @on(Input.Submitted)
    def _asked(self, event: Input.Submitted) -> None:
        self.setup.ask(event.value.strip())
        self._stop_asking()
        self._race_anew()

    def _stop_asking(self) -> None:
        self.query_one("#race-ask").display = False
        self.set_focus(None)

    def action_back(self) -> None:
        if self.query_one("#race-ask").display:
            self._stop_asking()
        else:
            super().action_back()

    def _race_anew(self) -> None:
        for tab in ("race", "methods"):  # they race this prompt at this length
            self.board.runs.pop(tab, None)
        self._found.clear()
        self.action_tab("race")

    def engine_told(self, told: EngineLoading | EngineReady | EngineFailed) -> None:
        if isinstance(told, EngineReady):
            self.info = told.info

    @on(RaceEnded)
    def _ended(self, event: RaceEnded) -> None:
        tab, self._raced = self._raced, ""
        if event.error is not None:
            self.board.runs.pop(tab, None)
            self.notify(event.error.message, severity="error", markup=False)
        self._show()

    @property
    def _race(self) -> outcome.Way | None:
        found = self._ways("race")
        return found[0] if found else None

    def _ways(self, tab: str) -> list[outcome.Way]:
        """Return the results of a tab, computed once for each number of runs."""
        whole = sum(run.whole for run in self.board.runs.get(tab, ()))
        if tab not in self._found or self._found[tab][0] != whole:
            self._found[tab] = whole, outcome.ways(self.board, tab)
        return self._found[tab][1]

    def raced(self) -> bool:
        """True if everything that was asked for was run and drawn."""
        return not self._raced and bool(self.board.runs.get(self.tab))

    # ------------------------------------------------------------------ choosing

    def action_tab(self, tab: str) -> None:
        self.tab = tab
        self.query_one(ContentSwitcher).current = tab
        self._show()
        focus = {"methods": "#methods", "theory": "#k"}.get(tab)
        self.set_focus(None if focus is None else self.query_one(focus))
        self.refresh_bindings()
        new = self.board.plain("race") is None and not self.racing.busy
        if tab == "race" and self.info is not None and new and guesses(self.info):
            self.action_run()

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        """True if the key has a use on this tab."""
        if action in ("ask", "longer"):
            return self.tab == "race"
        return self.tab == "methods" or action not in ("race_one", "race_all")

    @on(OptionList.OptionSelected)
    def _use(self, event: OptionList.OptionSelected) -> None:
        method = self.query_one(MethodList).methods[event.option_index]
        if self._usable(method):
            self.dismiss(method.name)

    def _usable(self, method: MethodInfo) -> bool:
        """True if the pair has the method; otherwise show why not."""
        if not method.available:
            reason = sanitize_line(method.reason) or "not available for this model"
            self.notify(f"{method.label}: {reason}", severity="warning", markup=False)
        return method.available

    @property
    def advice(self) -> Advice | None:
        """The advice from the races on this tab."""
        tab = self.tab
        if self.info is None or self._raced or tab == "theory":
            return None
        mine = None if self._race is None else self._race.verdict
        if tab == "race":
            return None if mine is None else advise(self.params, mine)
        if not (ways := self._ways(tab)):
            return None
        return advise_among(self.params, mine, [(way.run, way.verdict) for way in ways])

    def action_apply(self) -> None:
        advice = self.advice
        if advice is None or advice.params is None:
            self.notify(advice.said if advice else "Nothing was raced yet")
        else:
            self.dismiss(advice.params)

    # ------------------------------------------------------------------ drawing

    @on(RaceMoved)
    def _show(self) -> None:
        if not self.is_mounted:
            return
        self.set_title(self.TITLE or "", f"running: {TABS[self._raced]}" if self._raced else "")
        parts: list[tuple[str, str]] = []
        pad = " " if self.size.width >= 72 else ""
        for i, (tab, name) in enumerate(TABS.items(), 1):
            chosen = tab == self.tab
            style = "bold reverse" if chosen else self.ink.muted
            parts += [(f"{pad}{i} {name}{pad}", style), (" ", "")]
        self.query_one("#tabs", Static).update(Content.assemble(*parts))
        match self.tab:
            case "race":
                self.query_one("#race-answer", Static).update(Content("\n").join(self._answer()))
            case "theory":
                self.query_one(Playground).measure(outcome.model(self.board))
            case "methods":
                rows = self.query_one(MethodList)
                rows.raced = raced(self.board)
                rows.write_rows()
        self.query_one("#race-verdict", Static).update(self._verdict())

    def _answer(self) -> list[Content]:
        """Draw the question and the results so far: the answer first, once it is there."""
        ink, width = self.ink, self.size.width - 4
        way, plain = self._race, self.board.plain("race")
        tall = self.size.height >= 24
        lines: list[Content] = []
        if self.info is not None and not guesses(self.info):
            lines += Content.assemble((f"{NO_GUESSES}.", ink.accent)).wrap(width)
        if self._raced == "race":
            most = f"at most {self._goal}" if self._early else str(self._goal)
            lap = self.board.free_lap("race")
            words = f"Pair {lap} of {most}: the same reply, plainly and drafted"
            lines.append(Content.assemble((words, ink.accent)))
            lines += race_tables.present(self.board.present("race"), self.glyphs, ink, width)
        elif way is not None:
            lines += race_tables.answer(way, ink, width, tall=tall)
        if plain is not None:
            pairs = 0 if way is None else way.pairs
            lines.append(race_tables.question(plain, question(plain.prompt), pairs, ink, width))
        if way is not None:
            lines += race_tables.bars(way, ink, width)
            lines.append(race_tables.proof(way, ink, width))
            if not self._raced and (words := outcome.why(self.board, way)):
                lines += Content.assemble((words, ink.muted)).wrap(width)
        return lines

    def _verdict(self) -> Content:
        """Draw the progress, or what to do."""
        ink = self.ink
        if self._raced and self._raced != "race":
            runs = self.board.runs[self._raced]
            done = sum(run.finished is not None for run in runs)
            words = f"run {min(done + 1, len(runs))} of {len(runs)}: "
            now = race_tables.present(runs[done : done + 1], self.glyphs, ink, self.size.width - 24)
            return Content.assemble((words, ink.muted), *now)
        if (advice := self.advice) is not None:
            return Content.assemble((advice.said, ink.accent))
        return Content("")
