"""The pair: target and draft model next to each other, their fit, and downloads."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

from textual import events, on, work
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Container
from textual.content import Content
from textual.timer import Timer
from textual.widgets import Input, Static
from textual.worker import get_current_worker

from specllama.errors import SpecllamaError
from specllama.models import catalog, library, refs
from specllama.models.judgement import Machine
from specllama.models.refs import NO_DRAFT
from specllama.settings.params import EngineOptions
from specllama.text import sanitize_line
from specllama.tui import advice, choices
from specllama.tui.choices import ChoiceRow, Does
from specllama.tui.downloads import Downloads, DownloadTold
from specllama.tui.loader import Pair
from specllama.tui.screens.page import Page
from specllama.tui.state import Preferences
from specllama.tui.widgets.model_picker import ModelColumn

COMPARING = "comparing tokenizers"
SETTLED_S = 0.12  # a highlight that stays for so long is looked into


class ModelsScreen(Page):
    TITLE = "Models"
    HELP = """
    Enter takes the target, then the draft model; then the pair is loaded, and the conversation
    stays. Tab changes the column. What is typed filters; a path is completed (Tab takes the
    highlighted name), and other words can be looked for on the hub. Enter on something that is not
    here downloads it, Enter once more stops that and a further one continues it; the chat can be
    used meanwhile. The sign ✓ means that it fits; what stands beside ✗ is the reason.
    """

    HORIZONTAL_BREAKPOINTS = [(0, "-stacked"), (90, "-beside")]  # noqa: RUF012
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("enter", "choose", "Choose", id="models.choose", priority=True),
        Binding("tab", "other", "Column", id="models.other", priority=True),
        Binding("shift+tab", "switch", "Column", show=False, priority=True),
        Binding("ctrl+f", "search", "Search hub", id="models.search", priority=True),
        Binding("ctrl+y", "favourite", "Favorite", id="models.favourite", priority=True),
        Binding("down", "move(1)", "Down", show=False, priority=True),
        Binding("up", "move(-1)", "Up", show=False, priority=True),
        Binding("pagedown", "move(6)", "Page down", show=False, priority=True),
        Binding("pageup", "move(-6)", "Page up", show=False, priority=True),
    ]

    def __init__(
        self,
        current: Pair | None,
        options: EngineOptions,
        downloads: Downloads,
        machine: Machine,
        prefs: Preferences,
        here: str = "",
    ) -> None:
        super().__init__()
        self.here = here
        self.machine = machine
        self.prefs = prefs
        self.current = current
        self.options = options
        self.downloads = downloads
        self.target: ChoiceRow | None = None
        self._loaded: Path | None = None
        self._offered: list[ChoiceRow] = []
        self._compared: tuple[str, list[ChoiceRow]] | None = None
        self._lit: str | None = None  # the draft that was highlighted for the person
        self._settle: Timer | None = None

    def compose_page(self) -> ComposeResult:
        with Container(id="columns"):
            yield ModelColumn("Target", "name, path, or words for the hub", id="target")
            yield ModelColumn("Draft model", "name, path, or words for the hub", id="draft")
        yield Static(id="detail", markup=False)

    def on_mount(self) -> None:
        self.targets = self.query_one("#target", ModelColumn)
        self.drafts = self.query_one("#draft", ModelColumn)
        self.set_title("Models", "looking for models")
        self.targets.favourites = self.prefs.favourites
        self.targets.show(note="looking for models")
        self.drafts.show(note="choose a target first")
        self._activate(self.targets)
        newest = self.downloads.newest
        self._scan(newest.ref if newest else None)

    # ------------------------------------------------------------------ what there is

    def _on_screen(self, call: Callable[..., object], *arguments: Any) -> None:
        """Run ``call`` from a worker unless the screen is gone or the worker was replaced."""
        if not get_current_worker().is_cancelled:

            def go() -> None:
                if self.is_attached and not self._pruning:
                    call(*arguments)

            self.app.call_from_thread(go)

    @work(thread=True, exclusive=True, exit_on_error=False, group="scan")
    def _scan(self, highlight: str | None) -> None:
        worker = get_current_worker()
        try:
            self._loaded = refs.resolve(self.current[0]) if self.current else None
        except SpecllamaError:
            self._loaded = None  # it is gone
        models = library.scan(near=self._loaded)
        self._on_screen(self._found, models, choices.pair_rows(self._loaded), highlight)
        self._on_screen(self._offer, choices.offered_rows(models, self.machine))
        for row in list(self.targets.here):
            if worker.is_cancelled:
                return
            self._on_screen(
                self.targets.judged, row, choices.judged_target(row, self.options, self.machine)
            )

    def _found(
        self, models: list[library.LocalModel], pairs: list[ChoiceRow], highlight: str | None
    ) -> None:
        n = len(models)
        self.set_title("Models", f"{n} on this machine" if n else "none found on this machine")
        rows = choices.local_rows(models, self._loaded)
        first = rows[0].ref if rows else None
        self.targets.show(here=[*pairs, *rows], note="", highlight=highlight or first)

    def _offer(self, rows: list[ChoiceRow] | None = None) -> None:
        """Show what can be downloaded, in both columns: running and waiting downloads first."""
        self._offered = self._offered if rows is None else rows
        mine = [choices.download_row(download) for download in self.downloads.all.values()]
        rest = [row for row in self._offered if row.ref not in self.downloads.all]
        self.targets.show(offers=[*mine, *rest])
        self.drafts.show(offers=[row for row in mine if catalog.find(row.ref) is None])

    @on(DownloadTold)
    def _download_told(self, told: DownloadTold) -> None:
        self._offer()
        row = self.active.row
        if row is not None and row.does in ("stop", "continue", "load"):
            self._tell(Content(row.detail))
        if told.over is not None and told.over.state == "done":
            self._scan(None)

    # ------------------------------------------------------------------ the columns

    @property
    def active(self) -> ModelColumn:
        return self.drafts if self.drafts.has_class("-active") else self.targets

    def _activate(self, column: ModelColumn) -> None:
        for one in (self.targets, self.drafts):
            one.set_class(one is column, "-active")
            one.redraw_head()
        column.query_one(Input).focus()
        self._look()

    @on(ModelColumn.Activated)
    def _activated(self, event: ModelColumn.Activated) -> None:
        if event.column is not self.active:
            self._activate(event.column)

    @on(events.DescendantFocus)
    def _focused(self, event: events.DescendantFocus) -> None:
        column = next((n for n in event.widget.ancestors if isinstance(n, ModelColumn)), None)
        if column is not None and column is not self.active:
            self._activate(column)

    @on(ModelColumn.Highlighted)
    def _highlighted(self, event: ModelColumn.Highlighted) -> None:
        if event.column is self.active:
            self._look()

    def _look(self) -> None:
        """Inspect the highlighted row once it has stayed the same for a moment."""
        if self._settle is not None:
            self._settle.stop()
        self._settle = self.set_timer(SETTLED_S, self._settled)

    def _settled(self) -> None:
        target, row = self.targets.row, self.active.row
        local = target is not None and target.path is not None and not target.refused
        if not local:
            self._compared = None
            self.drafts.show(here=[], note="choose a target that is here first")
        elif target is not None and (self._compared is None or self._compared[0] != target.ref):
            self.drafts.show(here=[], note=COMPARING)
            self._compare(target)
        if row is None:
            self._tell(Content(""))
        elif row.path is None and row.detail:
            self._tell(Content(row.detail))
        elif row.refused:
            self._tell(Content.assemble((sanitize_line(row.reason), "$error")))
        elif target is not None and target.path is not None:
            self._estimate(target, self.drafts.row)
            if row.fits is None and row.path is not None:
                self._look_into(self.active, target, row)

    def _judged(self, column: ModelColumn, target: ChoiceRow, row: ChoiceRow) -> ChoiceRow | None:
        """Judge a file, before the pair in use is closed; None for one that is no model."""
        try:
            if column is self.targets:
                return choices.judged_target(row, self.options, self.machine)
            return choices.judged_draft(target, row, self.options, self.here)
        except SpecllamaError as error:
            return replace(row, refused=True, fits=False, reason=error.message)

    @work(thread=True, exclusive=True, exit_on_error=False, group="look")
    def _look_into(self, column: ModelColumn, target: ChoiceRow, row: ChoiceRow) -> None:
        judged = self._judged(column, target, row)
        if judged is not None:
            judged = replace(judged, ref=row.ref, name=row.name)
            self._on_screen(column.judge_typed, judged)

    @work(thread=True, exclusive=True, exit_on_error=False, group="compare")
    def _compare(self, target: ChoiceRow) -> None:
        tell = partial(self._on_screen, self._drafts_found, target, COMPARING)
        try:
            rows = choices.draft_rows(target, self.options, self.here, tell)
        except SpecllamaError:
            rows = [choices.none_row()]
        self._on_screen(self._drafts_found, target, "", rows)

    def _drafts_found(self, target: ChoiceRow, note: str, rows: list[ChoiceRow]) -> None:
        row, before = self.drafts.row, self._compared
        self._compared = target.ref, rows
        used = next((d for t, d in library.opened() if t == target.path and d is not None), None)
        mine = next((row.ref for row in rows if row.path == used), rows[0].ref) if used else None
        if self.current is not None and target.path == self._loaded:
            mine = self.current[1]
        if not any(one.ref == mine for one in rows):
            mine = rows[0].ref
        moved = row is not None and before is not None and row.ref != self._lit
        self._lit = mine if not moved else self._lit
        self.drafts.show(here=rows, note=note, highlight=None if moved else mine)
        self._estimate(target, self.drafts.row)

    @work(thread=True, exclusive=True, exit_on_error=False, group="estimate")
    def _estimate(self, target: ChoiceRow, draft: ChoiceRow | None) -> None:
        brief = self.size.width < 100
        words = choices.estimate(
            target, draft, self.options, self.machine, self.ink.muted, brief=brief, here=self.here
        )
        self._on_screen(self._tell, words)

    def _tell(self, words: Content) -> None:
        self.query_one("#detail", Static).update(words)

    # ------------------------------------------------------------------ keys

    def action_move(self, step: int) -> None:
        self.active.move(step)

    def action_switch(self) -> None:
        self._activate(self.targets if self.active is self.drafts else self.drafts)

    def action_other(self) -> None:
        if not self.active.complete():
            self.action_switch()

    def action_choose(self) -> None:
        self.active.enter()

    def action_back(self) -> None:
        if self.active is self.drafts:
            self._activate(self.targets)
        else:
            self.dismiss(None)

    def action_search(self) -> None:
        column = self.active
        if column.text:
            self._ask(column, column.text, "search")
        else:
            self._tell(Content("Type words for the hub, then Ctrl+F searches."))

    def action_favourite(self) -> None:
        row, names = self.targets.row, self.prefs.favourites
        if row is None or row.path is None:
            self._tell(Content("A favorite is a target that is on this machine."))
            return
        (names.remove if row.ref in names else names.append)(row.ref)
        self.prefs.save()
        self.targets.redraw(row.ref)

    @on(ModelColumn.Entered)
    def _entered(self, event: ModelColumn.Entered) -> None:
        column, row = event.column, event.row
        match row.does:
            case "open":
                column.type(row.ref)
            case "search":
                self._ask(column, row.ref, "search")
            case "list":
                column.type(row.ref)
                self._ask(column, row.ref, "list")
            case "get" | "continue":
                self.downloads.begin(row.ref)
            case "stop":
                self.downloads.stop(row.ref)
            case "load":
                done = self.downloads.all[row.ref]
                if done.target is not None:
                    self.dismiss((done.target, done.draft or NO_DRAFT))
            case "pair":
                self.dismiss(row.pair)
            case "choose":
                self._take(column, row)

    def _take(self, column: ModelColumn, row: ChoiceRow) -> None:
        target = self.targets.row
        if row.refused or target is None:
            self._refuse(row.reason)
        elif column is self.targets or (row.path is not None and row.fits is None):
            self._take_file(column, target, row)
        else:
            self.dismiss((target.ref, row.ref))

    @work(thread=True, exclusive=True, exit_on_error=False, group="take")
    def _take_file(self, column: ModelColumn, target: ChoiceRow, row: ChoiceRow) -> None:
        judged = self._judged(column, target, row)
        if judged is None:
            judged = replace(row, refused=True, reason="it goes with a model, and is none")
        if judged.refused:
            self._on_screen(self._refuse, f"{judged.name}: {judged.reason}")
        elif column is self.targets:
            self._on_screen(self._activate, self.drafts)
        else:
            self._on_screen(self.dismiss, (target.ref, row.ref))

    def _refuse(self, why: str) -> None:
        self.app.bell()
        self._tell(Content.assemble((sanitize_line(why), "$error")))

    # ------------------------------------------------------------------ the hub

    @work(thread=True, exclusive=True, exit_on_error=False, group="hub")
    def _ask(self, column: ModelColumn, text: str, does: Does) -> None:
        from specllama.models.hub_client import HubClient

        self._on_screen(partial(column.show, found=[], asked=text, note="asking the hub"))
        try:
            client = HubClient()
            client.reach()
            if does == "list":
                found = choices.listing_rows(client.listing(text))
            else:
                found = choices.hit_rows(client.search(text))
        except SpecllamaError as error:
            row = ChoiceRow(text, error.message, does, fits=False, reason="Enter asks again")
            found = [replace(row, detail=advice.said(error, "\n"))]
        note = "" if found else f'nothing on the hub for "{text}"'
        first = found[0].ref if found else None
        self._on_screen(partial(column.show, found=found, asked=text, note=note, highlight=first))
