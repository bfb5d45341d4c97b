"""``specllama train-draft``: a draft head for any model file, learned from its own replies."""

from __future__ import annotations

import shlex
import shutil
import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from threading import Event
from typing import TYPE_CHECKING, Any

import click

from specllama import paths, signals
from specllama.cli import completion, diagnostics, output
from specllama.cli.options import SEED, resolve
from specllama.cli.output import examples
from specllama.cli.progress import Bar
from specllama.errors import SpecllamaError
from specllama.models.companions import own_heads, own_place
from specllama.text import size

if TYPE_CHECKING:
    from specllama.models.gguf import GgufHeader
    from specllama.settings.params import EngineOptions
    from specllama.training.course import Course, News, Why
    from specllama.training.phases import TargetPhases
    from specllama.training.training_card import TrainingCard

_TIMED = 3  # prompts that the head is timed on
_FOR_TRAINING = 0.97  # of the time; the rest is for looking at the head


@click.command("train-draft", epilog=examples()["train-draft"])
@click.argument("target", shell_complete=completion.models)
@click.argument("out", required=False, type=click.Path(path_type=Path))
@click.option("--kind", type=click.Choice(["eagle3"]), default="eagle3", show_default=True,
              help="Kind of the head.")  # fmt: skip
@click.option("--minutes", type=click.FloatRange(0.1), default=60, show_default=True, metavar="N",
              help="Time for writing, reading and training; it ends earlier if nothing is gained "
              "any more.")  # fmt: skip
@click.option("--texts", multiple=True, metavar="FILE|FOLDER",
              help="Texts to make prompts of, beside those that ship; repeatable.")  # fmt: skip
@click.option("--from-chats", is_flag=True,
              help="Also take the questions of your stored conversations as prompts.")  # fmt: skip
@click.option("--words", type=click.IntRange(256), metavar="N",
              help="Tokens that the head can guess. Unset: a sixth of the target's.")  # fmt: skip
@click.option("--start-from", metavar="HEAD", shell_complete=completion.models,
              help="An EAGLE-3 head of the same sizes to start from, or none. Unset: one that is "
              "named after TARGET or ships for it, if it fits.")  # fmt: skip
@click.option("--seed", type=SEED, default=1, show_default=True, help="Seed of all that is drawn.")
@click.option("--folder", type=click.Path(path_type=Path, file_okay=False),
              help="Folder of texts, features and weights. Unset: one in the cache for each "
              "target.")  # fmt: skip
@click.option("--disk", type=click.FloatRange(0.1), default=2, show_default=True, metavar="GB",
              help="Most gigabytes in that folder.")  # fmt: skip
@click.option("-t", "--threads", type=click.IntRange(1, 1024), metavar="N", help="CPU threads.")
@click.option("--while-idle", is_flag=True,
              help="Work only while other programs need little and the machine is on mains; wait "
              "meanwhile.")  # fmt: skip
@click.option("--forget", is_flag=True,
              help="Delete all that was learned of TARGET, its replies and the head as well, "
              "and end.")  # fmt: skip
@click.option("-y", "--yes", is_flag=True, help="Begin, or delete, without asking.")
def command(
    target: str,
    out: Path | None,
    kind: str,
    folder: Path | None,
    forget: bool,
    yes: bool,
    threads: int | None,
    **asked: Any,
) -> None:
    """Train a draft head for the model TARGET, and write it as OUT.

    TARGET writes replies to prompts; a small head learns to foretell what it says next. No text
    of TARGET changes: the head only guesses, TARGET decides. Unless OUT is given, the head lies
    beside TARGET, where `run`, `chat` and `pair` find it.
    """
    from specllama.models import refs
    from specllama.models.gguf import read_header
    from specllama.training import training_folder

    header = read_header(refs.resolve(target))
    out = out or own_place(header, kind)
    folder = folder or training_folder.usual(header)
    if forget:
        _forget(header, folder, out, yes)
        return
    diagnostics.require_extra("train", "torch")
    training_folder.require_trainable(header)
    start = training_folder.choose_start(asked["start_from"], header, folder)
    there = training_folder.head_there(out, header, start)
    options = resolve({"threads": threads}).engine_options()
    again = shlex.join(["specllama", *sys.argv[1:]])
    with training_folder.held(folder):
        disk = training_folder.room(folder, int(asked["disk"] * 1e9))
        diagnostics.note(
            f"{header.path.name}: {asked['minutes']:g} min, at most {size(disk)} of disk "
            f"in {folder}; Ctrl-C keeps everything"
        )
        if not yes and output.all_terminals():
            diagnostics.confirm("begin?")
        card = training_folder.begin(folder, header, asked, there, start)
        if card.start and not card.spent_s:
            _keep_start(out, card)
        run = _Run(header, folder, out, card, asked, disk)
        try:
            why, code = run.train(options)
        except BaseException:
            if card.spent_s:
                diagnostics.note(f"what was learned is kept in {folder}; to go on: {again}")
            raise
        _tell(run, target, why, again)
    if code:
        raise signals.Interrupted(code)
    if card.best is None:
        raise SpecllamaError("no head was made: the time was too short", "give more --minutes")


def _forget(target: GgufHeader, folder: Path, out: Path, yes: bool) -> None:
    """Delete what was learned of a target, after asking; a head that stood there comes back."""
    from specllama.training import training_folder

    with training_folder.held(folder):
        gone = training_folder.learned(folder, out, target)
        freed = size(sum(one.stat().st_size for one in gone))
        what = f"{freed}: texts, features and weights in {folder}"
        what += f", and {out}" if out in gone else ""
        if gone and not yes:
            diagnostics.confirm(f"delete {what}?", default=False)
        for one in gone:
            one.unlink()
        if out in gone and (kept := out.with_suffix(".before.gguf")).exists():
            kept.replace(out)
            what += f"; {kept.name} is {out.name} again"
        if [one.name for one in folder.iterdir()] == [training_folder.LOCK]:
            shutil.rmtree(folder)
    diagnostics.note(f"deleted {what}" if gone else f"nothing was learned of {target.path.name}")


def _keep_start(out: Path, card: TrainingCard) -> None:
    """Show what a training starts from; keep it if the new head takes its place."""
    stays = ""
    if card.best is None and out.exists():
        paths.replace_file(kept := out.with_suffix(".before.gguf"), out.read_bytes())
        stays = f", which stays as {kept.name}"
    diagnostics.note(f"it starts from {card.start}{stays}")


@dataclass(frozen=True, slots=True)
class _Run:
    """One run of the command: its files, and what was asked for."""

    target: GgufHeader
    folder: Path
    out: Path
    card: TrainingCard
    asked: dict[str, Any]
    disk: int

    def train(self, options: EngineOptions) -> tuple[Why, int]:
        """Train, then look at the head; return why it ended, and the exit code of a signal."""
        from specllama.training.course import Course
        from specllama.training.phases import open_work
        from specllama.training.spare_time import SpareTime

        stop, asked = Event(), self.asked
        card, disk = self.card, self.disk
        work, without = open_work(self.target, self.folder, card, disk, options.threads, asked)
        if without:
            diagnostics.note(f"not read: {without}")
        seconds, stopped = 60 * asked["minutes"] * _FOR_TRAINING, stop.is_set
        bar = Bar("training", int(seconds))
        tell = partial(_show, bar)
        course = Course(work, self.folder, card, self.out, seconds, stopped, tell)
        if asked["while_idle"]:
            course.rest = SpareTime()
        with signals.stop_on_signals(stop) as received:
            with bar:
                course.measure()
                if not received:
                    self._foretell(course, bar)
                why = course.run()
            self._look(work, course, options)
        return why, (*received, 0)[0]

    def _look(self, work: TargetPhases, course: Course, options: EngineOptions) -> None:
        """Load the head that was written, and see if it pays here."""
        from specllama.backend.cores import crowded
        from specllama.bench.payback import payback

        if (best := self.card.best) is None:
            return
        diagnostics.note("loading the head, to see what its steps cost here")
        if crowded():
            diagnostics.warn(diagnostics.CROWDED)
        prompts = [one.prompt for one in work.held_out(_TIMED)]
        found = payback(self.target.path, self.out, prompts, best.survival, options)
        self.card.pays = "" if found is None else found.words
        course.keep()

    def _foretell(self, course: Course, bar: Bar) -> None:
        """Show what the training will take, once its pace is known."""
        write_s, written, disk = course.outlook(self.disk)
        bar.waiting(
            f"about {course.seconds / 60:.0f} min, of which {write_s / 60:.0f} for writing "
            f"({written:,} tokens of replies); {size(disk)} of disk, "
            f"{size(self.card.memory)} of memory"
        )


def _show(bar: Bar, news: News, course: Course) -> None:
    """Show what is new in a training."""
    card, left_s = course.card, course.left_s
    doing = card.doing
    if news == "figures" and card.latest is not None:
        bar.waiting(card.latest.learned)
    elif news == "began" and not sys.stderr.isatty():
        bar.waiting(doing + (f"; {left_s / 60:.0f} min left" if left_s >= 60 else ""))
    if card.best is not None:
        shares = "/".join(f"{100 * one:.0f}" for one in card.best.right)
        doing = f"{doing}, {shares} % {card.best.per_pass:.2f}"
    bar.named(doing)
    bar.advanced(int(course.done_s))


def _tell(run: _Run, target: str, why: Why, again: str) -> None:
    """Show the result."""
    card, minutes = run.card, run.card.spent_s / 60
    ends = {
        "time": "the time is over",
        "gain": "it ends, since the last cycle gained nothing more",
        "stopped": "stopped",
    }
    diagnostics.note(f"{ends[why]}; to go on: {again}")
    if card.best is None:
        return
    output.line(f"{run.out}: {size(run.out.stat().st_size)}, after {minutes:.0f} min in all")
    if card.first is not None:
        output.line(f"it started from {card.start}: {card.first.words}")
    output.line(f"in replies that it did not learn from: {card.best.words}")
    output.line(card.pays or "too little was drafted to tell if it pays on this machine")
    head = "" if run.out in own_heads(run.target) else f" --head {run.out}"
    diagnostics.note(f'next: specllama run -m {target}{head} --proposer {card.kind} "Hello"')
