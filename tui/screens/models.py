"""Switch target and draft model: first the one, then the other, with what they need and what is
free."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from textual import on, work
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.content import Content
from textual.widgets import Footer, OptionList, Static

from specllama.errors import SpecllamaError
from specllama.models import library
from specllama.models.refs import resolve
from specllama.params import EngineOptions
from specllama.text import sanitize_line
from specllama.tui.screens.base import Page
from specllama.tui.widgets.model_picker import ModelPicker
from specllama.tui.widgets.stats_strip import gigabytes

AUTOMATIC = "The draft that belongs to it, if there is one"


@dataclass(frozen=True, slots=True)
class Choice:
    target: str
    draft: str | None


class ModelsScreen(Page):
    TITLE = "Models"
    HELP = """
    Enter takes the target, then the draft model. The model is switched without a restart; the
    conversation stays. New models come with: specllama hub pull
    """

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("down", "move(1)", "Down", show=False, priority=True),
        Binding("up", "move(-1)", "Up", show=False, priority=True),
        Binding("enter", "choose", "Choose", id="models.choose", priority=True),
    ]

    def __init__(self, current: tuple[str, str | None] | None, options: EngineOptions) -> None:
        super().__init__()
        self.current = current
        self.options = options
        self.target: str | None = None
        self._target_path: str | None = None
        self._models: list[library.LocalModel] = []

    def compose_page(self) -> ComposeResult:
        yield ModelPicker(id="picker")
        yield Static(id="detail", markup=False)
        yield Footer()

    def on_mount(self) -> None:
        super().on_mount()
        self.set_title("1 Target", "looking for models")
        self._scan()

    @work(thread=True, exit_on_error=False, group="scan")
    def _scan(self) -> None:
        found = library.scan()
        self.app.call_from_thread(self._found, found)

    def _found(self, models: list[library.LocalModel]) -> None:
        if not self.is_attached:
            return
        self._models = models
        current = self.current[0] if self.current else None
        n = len(models)
        self.set_title("1 Target", f"{n} on this machine" if n else "none found on this machine")
        self.query_one(ModelPicker).offer(models, current=current)

    def action_move(self, step: int) -> None:
        self.query_one(ModelPicker).move(step)

    @on(OptionList.OptionSelected)
    def _clicked(self) -> None:
        self.action_choose()

    def action_choose(self) -> None:
        picker = self.query_one(ModelPicker)
        chosen = picker.chosen
        if chosen is not None and picker.path_chosen is None:
            # A typed name: refuse it here, before the pair in use is closed.
            try:
                resolve(chosen)
            except SpecllamaError as error:
                words = sanitize_line(error.message), sanitize_line(error.hint or "")
                self._tell(Content.assemble((f"{words[0]}\n", "$error"), words[1]))
                return
        if self.target is None:
            if chosen is None:
                return
            self.target, self._target_path = chosen, picker.path_chosen
            self.set_title("2 Draft model", f"for {self.target}")
            picker.offer(
                self._models,
                extra=AUTOMATIC,
                current=self.current[1] if self.current else None,
            )
            return
        self.dismiss(Choice(self.target, chosen))

    def action_back(self) -> None:
        if self.target is None:
            self.dismiss(None)
            return
        back, self.target = self.target, None
        self.set_title("1 Target", f"{len(self._models)} on this machine")
        self.query_one(ModelPicker).offer(self._models, current=back)

    @on(ModelPicker.Highlighted)
    def _highlighted(self) -> None:
        path = self.query_one(ModelPicker).path_chosen
        if self.target is None:
            self._estimate(path, None)
        else:
            self._estimate(self._target_path, path)

    @work(thread=True, exclusive=True, exit_on_error=False, group="estimate")
    def _estimate(self, target: str | None, draft: str | None) -> None:
        if target is None:
            self.app.call_from_thread(self._tell, Content(""))
            return
        self.app.call_from_thread(self._tell, estimate(target, draft, self.options, self.ink.muted))

    def _tell(self, words: Content) -> None:
        if self.is_attached:
            self.query_one("#detail", Static).update(words)


def estimate(target: str, draft: str | None, options: EngineOptions, muted: str) -> Content:
    """The pair, the memory it needs and what is free; problems in words."""
    from specllama.models import memory, pairing
    from specllama.models.gguf import read_header

    try:
        head = read_header(target)
        draft_head = read_header(draft) if draft is not None else None
        need = memory.estimate_pair(
            head,
            draft_head,
            n_ctx=options.n_ctx,
            type_k=options.kv_type_k,
            type_v=options.kv_type_v,
        )
    except SpecllamaError as error:
        return Content.assemble((sanitize_line(error.message), "$error"))
    free = memory.available_memory()
    weights = need.target.weights + need.target.repacked
    draft_bytes = need.draft.total if need.draft is not None else 0
    rest = need.total - weights - need.target.kv - draft_bytes
    parts: list[tuple[str, str]] = [
        (sanitize_line(head.name or head.architecture), "bold"),
        (f"  {sanitize_line(head.architecture)}, {sanitize_line(head.quantization)}\n", muted),
        (f"needs about {gigabytes(need.total)}", "bold"),
        (
            f": weights {gigabytes(weights)}, "
            f"context ({need.target.n_ctx}) {gigabytes(need.target.kv)}, "
            + (f"draft {gigabytes(draft_bytes)}, " if draft_bytes else "")
            + f"computing {gigabytes(rest)}",
            muted,
        ),
    ]
    if free:
        fits = memory.fits(need, free)
        parts.append((f"\n{gigabytes(free)} free", "$success" if fits else "$error"))
        if not fits:
            parts.append((", it does not fit", "$error"))
    if draft_head is not None:
        report = pairing.compare(head, draft_head)
        if report.compatible:
            parts.append(("\ndraft and target speak the same vocabulary", "$success"))
        else:
            parts.append((f"\n{sanitize_line(report.reason)}", "$error"))
    return Content.assemble(*parts)
