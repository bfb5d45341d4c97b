"""The first launch: ten seconds of a reply as it is drafted, and what to do next."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial

from textual.content import Content
from textual.timer import Timer
from textual.widgets import Static

from specllama.backend import expected
from specllama.events import RoundDone
from specllama.models import catalog, fit
from specllama.settings.params import GenerateParams
from specllama.told import Told
from specllama.tui.loader import EngineLoader
from specllama.tui.widgets import walk
from specllama.tui.widgets.base import Inked
from specllama.tui.widgets.stats_strip import gigabytes
from specllama.tui.widgets.welcome import SHORT, TRY, keys

STAGE_S = 0.55
ROUNDS = 6  # of three stages: ten seconds
STAGES = ("guess", "check", "keep")
BUNDLED = (
    "The bundled pair is for trying things out: so small that a guess costs more than it saves. "
    "This first chat drafts all the same, to show it; from the next one on (Ctrl+N) drafting "
    "switches itself off.\n"
)
BUNDLED_SHORT = (
    "The bundled pair is too small for drafting to pay. This first chat drafts all the same, to "
    "show it; Ctrl+N ends it.\n"
)
READABLE = 5.0  # tokens a second: about as fast as a person reads


def demo_rounds() -> list[RoundDone]:
    """Invented rounds that drafted, of a fixed window."""
    from specllama.tui.demo import DemoEngine

    params = GenerateParams(seed=7, draft_max=4, proposer="draft")
    rounds = Told.of(DemoEngine().generate("?", params)).rounds
    first = next(i for i, done in enumerate(rounds) if done.drafted)
    return rounds[: first + ROUNDS]


def _kept(done: RoundDone) -> str:
    n, drafted = done.accepted, len(done.drafted)
    if n == drafted:
        return "all are what it would have written"
    counted = {0: "none is", 1: f"1 of {drafted} is"}.get(n, f"{n} of {drafted} are")
    return f"{counted} what it would have written"


def real_pair(memory: float, speed: Callable[[float], float]) -> catalog.CatalogPair | None:
    """The largest pair of the catalogue with a draft model that runs comfortably here, in memory
    and in time: ``speed`` gives the tokens per second of a target of N bytes, before drafting."""
    pairs = [
        p
        for p in catalog.load().values()
        if p.draft is not None
        and "coder" not in p.name  # who begins wants to chat
        and fit.judge(p, memory) == "yes"
        and speed(p.target.bytes) >= READABLE
    ]
    return max(pairs, key=lambda p: (p.memory_gb, -min(m.bytes for m in p.models)), default=None)


class FirstLook(Inked, Static):
    DEFAULT_CSS = """
    FirstLook { height: auto; padding: 1 2; }
    .-short FirstLook { padding: 0 2; }
    """

    def __init__(self, loader: EngineLoader, *, id: str | None = None) -> None:
        super().__init__(id=id, markup=False)
        self.loader = loader
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

    def on_resize(self) -> None:
        self.call_after_refresh(self.redraw)  # it may need more lines than it was given just now

    def _next_steps(self) -> Content:
        ink, info = self.ink, self.loader.info
        short = self.app.size.height < SHORT
        line = "" if short else "\n"
        cores = info.threads if info is not None else os.cpu_count() or 1
        gpu = info is not None and info.target.gpu_layers > 0
        speed = partial(expected.plain_speed, cores=cores, on_gpu=gpu)
        parts: list[tuple[str, str]] = [
            (f"Guess, check, keep: the same text, in fewer passes.\n{line}", "bold")
        ]
        if self.loader.bundled:
            parts.append((BUNDLED_SHORT if short else BUNDLED + line, ""))
        if (pair := real_pair(fit.machine_memory(), speed)) is not None:
            size, plain = gigabytes(pair.bytes), speed(pair.target.bytes)
            rate = f"about {plain:.0f} tokens a second"
            parts.append(("A real pair for this machine: ", ""))
            if short:
                parts += [
                    (f"{pair.name}\n", "bold $primary"),
                    (f"  F6, {size}, {rate}\n", ink.muted),
                ]
            else:
                parts += [
                    (f"specllama hub pull {pair.name}\n", "bold $primary"),
                    (f"  {size} to download, also by F6; {rate}, before drafting\n\n", ink.muted),
                ]
        pays = ("F4", "answers whether drafting pays here")
        more = ("F2 F3", "show what was guessed"), pays, ("F1", "explains the keys")
        parts += keys(self, TRY, *(() if short else more))
        return Content.assemble(*parts).rstrip()
