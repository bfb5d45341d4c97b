"""``specllama log``: the rounds of earlier runs, shown or deleted."""

from __future__ import annotations

import re
import shutil

import click

from specllama.cli import charts, completion, diagnostics, output
from specllama.cli.diagnostics import confirm, yes_option
from specllama.cli.listing import (
    Column,
    json_option,
    limit_option,
    listing,
    number,
    picked,
    show_table,
)
from specllama.cli.output import examples
from specllama.cli.printer import MEASURE, round_glyphs, statistics_line
from specllama.errors import StoreError, UsageError
from specllama.events import RoundDone
from specllama.figures import SpecStats, stats_by_source
from specllama.interface import layout_words
from specllama.paths import rounds_dir
from specllama.rates import Payoff, share
from specllama.store import summary
from specllama.store.rounds import (
    LoggedTurn,
    RunRecord,
    delete_run,
    find_run,
    iter_lines,
    list_runs,
    read_run,
)
from specllama.text import figure, number_of, percent, rate, sanitize_line, size
from specllama.verdict import by_source, details, judge, lead, passes_of, words

run_argument = click.argument(
    "run", default="last", metavar="[RUN]", shell_complete=completion.runs
)


@click.group("log", epilog=examples()["log"])
def command() -> None:
    """Look into the rounds of earlier runs, or delete them.

    RUN is `last` (the default), a name from `log ls` or the start of one, or a file. Damaged lines
    are skipped and counted.
    """


@command.command("rm", epilog=examples()["log-rm"])
@click.argument("runs", nargs=-1, metavar="[RUN]...", shell_complete=completion.runs)
@click.option("--all", "every", is_flag=True, help="Delete the logs of every run.")
@yes_option
def rm(runs: tuple[str, ...], every: bool, yes: bool) -> None:
    """Delete the logs of runs. A file outside the log folder is never touched."""
    if every == bool(runs):
        raise UsageError(
            "give the runs to delete, or --all, not both", "list them: specllama log ls"
        )
    # one run can be named twice: `last` and its name
    paths = list_runs() if every else list(dict.fromkeys(find_run(run) for run in runs))
    folder = rounds_dir().resolve()
    for path in paths:
        if path.resolve().parent != folder:
            raise UsageError(f"{path} is not in the log folder {folder}", "delete it yourself")
    if not paths:
        diagnostics.note("there is no round log to delete")
        return
    what = paths[0].stem if len(paths) == 1 else f"{len(paths)} round logs"
    if not yes:
        total = sum(path.stat().st_size for path in paths if path.exists())
        confirm(f"delete {what} ({size(total)})?", default=False)
    freed = sum(delete_run(path) for path in paths)
    diagnostics.note(f"deleted {what}, {size(freed)} freed")


@command.command("ls")
@limit_option
@json_option
def ls(limit: int, as_json: bool) -> None:
    """List runs, newest first."""
    runs = []
    for path in list_runs()[:limit]:
        try:
            runs.append(summary.run_dict(read_run(path)))
        except StoreError as error:
            diagnostics.warn(error.message)
    columns = [
        Column("run", "run"),
        Column("command", lambda run: run["command"] or "?", drop=90),
        Column("target", lambda run: run["target"] or "?", give=True),
        Column("draft", lambda run: run["draft"] or "–", give=True, drop=110),
        number("rounds", "rounds"),
        number("tokens", "emitted"),
        number("kept", lambda run: percent(run["acceptance_rate"])),
        number("tok/s", lambda run: rate(run["tok_per_s"])),
        Column("", lambda run: "" if run["complete"] else "unfinished", drop=80),
    ]
    empty = "there is no round log yet; make one: specllama run 'Hello'"
    listing(as_json, "runs", runs, columns, empty=empty)


@command.command("show")
@run_argument
@click.option("--turn", type=int, help="Show only request N of the run, counted from 0.")
@click.option("-n", "--limit", type=click.IntRange(1), help="Show only the last N rounds.")
@click.option("--json", "as_json", is_flag=True, help="Print the lines of the log as JSON Lines.")
def show(run: str, turn: int | None, limit: int | None, as_json: bool) -> None:
    """Show the rounds of a run.

    Each round is one line: ■ a draft token that was kept, □ one refused, + the target's own token;
    then the milliseconds for drafting, verifying and waiting, which is neither.
    """
    path = find_run(run)
    if as_json:
        for line in iter_lines(path):
            if line is not None:
                output.json_line(line)
        return
    record = read_run(path)
    turns = [t for t in record.turns if turn in (None, t.index)]
    if turn is not None and not turns:
        raise UsageError(f"{record.run} has no request {turn}")
    output.line(_headline(record))
    skip = sum(len(t.rounds) for t in turns) - limit if limit is not None else 0
    for one in turns:
        rounds = one.rounds[max(skip, 0) :]
        skip -= len(one.rounds)
        _show_turn(one, rounds, len(record.turns) > 1)
    _say_skipped(record)


@command.command("stats")
@click.argument("runs", nargs=-1, metavar="[RUN]...", shell_complete=completion.runs)
@click.option("--all", "every", is_flag=True, help="Add up all runs.")
@json_option
def stats(runs: tuple[str, ...], every: bool, as_json: bool) -> None:
    """Show totals, and acceptance by position and by source."""
    named = [find_run(run) for run in runs or ("last",)]
    records = [read_run(path) for path in (list_runs() if every else named)]
    rounds = [done for record in records for done in record.rounds]
    if not rounds and any(turn.finished for record in records for turn in record.turns):
        raise StoreError(
            "another engine wrote that, which tells of no rounds",
            f"what it told: specllama log show {records[0].run}",
        )
    total, passes = SpecStats.of(rounds), passes_of(rounds)
    verdict = judge(passes)
    wrote = summary.generated(records)
    sources, positions = stats_by_source(rounds), total.by_depth
    if as_json:
        output.json_line(
            {
                "runs": [record.run for record in records],
                "generation_s": wrote.decode_ms / 1e3,
                "tok_per_s": wrote.tok_per_s,
                "skipped_lines": sum(record.skipped for record in records),
                "total": summary.stats_dict(total),
                "verdict": verdict.to_dict(),
                "by_source": {k: summary.stats_dict(v) for k, v in sources.items()},
                "by_position": [
                    picked(p, "drafted accepted of_rounds of_drafted", position=p.depth)
                    for p in positions
                ],
            }
        )
        return
    name = records[0].run if len(records) == 1 else f"{len(records)} runs"
    output.line(
        f"{name}: {total.emitted} tokens in {total.rounds} rounds, {wrote.decode_ms / 1e3:.2f} s, "
        f"{rate(wrote.tok_per_s)} tok/s, {total.near_ties} near-ties"
    )
    output.line(lead(verdict, MEASURE))
    if told := details(verdict, both=True):
        output.line(" · ".join(told))
    speeds = by_source(passes)
    output.line()
    output.line("by source: mean acceptance length, draft and verify in ms per round")
    columns = [
        Column("source", lambda item: item[0]),
        number("rounds", lambda item: item[1].rounds),
        number("guesses", lambda item: item[1].drafted),
        number("kept", lambda item: item[1].accepted),
        number("of all", lambda item: percent(item[1].acceptance_rate)),
        number("length", lambda item: figure(item[1].mean_acceptance_length, ".2f")),
        number("draft", lambda item: f"{share(item[1].draft_ms, item[1].rounds) or 0.0:.2f}"),
        number("verify", lambda item: f"{share(item[1].verify_ms, item[1].rounds) or 0.0:.2f}"),
        number("speed", lambda item: _speed(speeds.get(item[0]))),
    ]
    show_table(sources.items(), columns)
    if positions:
        output.line("\nby position in the draft")
        output.write(charts.position_chart(positions))
    for record in records:
        _say_skipped(record)


@command.command("plot")
@run_argument
@json_option
def plot(run: str, as_json: bool) -> None:
    """Draw acceptance over time and by position."""
    record = read_run(find_run(run))
    if not record.rounds:
        raise StoreError(f"{record.run} has no rounds to draw")
    slices = summary.over_time(record, min(output.width() - 10, 100, len(record.rounds)))
    positions = SpecStats.of(record.rounds).by_depth
    if as_json:
        middles = [[(begin + end) / 2, kept] for begin, end, kept in slices]
        depths = [[p.depth, p.of_rounds] for p in positions]
        output.json_line({"run": record.run, "over_time": middles, "by_position": depths})
        return
    output.line(f"{_headline(record)}\n\naccepted drafts over time")
    output.line(f"{charts.time_chart(slices)}\n")
    output.line("accepted by position in the draft" if positions else "nothing was drafted")
    output.write(charts.position_chart(positions))
    _say_skipped(record)


@command.command("path")
@click.argument("run", required=False, shell_complete=completion.runs)
def path_(run: str | None) -> None:
    """Print where the logs are; with RUN, the path of that log."""
    output.line(str(rounds_dir() if run is None else find_run(run)))


def _headline(record: RunRecord) -> str:
    run = summary.run_dict(record)
    pair = str(run["target"] or "unknown target")
    if run["draft"]:
        pair += f" + {run['draft']}"
    device = record.header.get("device", "?")
    target = record.header.get("target")
    layout = ""
    if isinstance(target, dict) and (repacked := target.get("repacked")) is not None:
        layout = f", weights {layout_words(repacked, target.get('kernels') or '')}"
    return f"{record.run}: {pair} on {device}{layout}"


def _show_turn(turn: LoggedTurn, rounds: list[RoundDone], numbered: bool) -> None:
    output.line()
    if turn.started is not None:
        start = turn.started
        head = f"request {turn.index}: " if numbered else ""
        prompt = f"prompt {start.prompt_n} tokens ({start.cached_n} cached), seed {start.seed}, "
        how = f"{start.proposer}, {start.verify}, draft-max {start.draft_max}, "
        if start.unknown:  # of another engine, which says no more before the end
            prompt, how = "", f"{start.proposer}, "
        output.line(f"{head}{prompt}{how}{start.exactness}")
    if rounds:
        glyphs = max(6, *(len(round_glyphs(done)) for done in rounds))
        output.line(
            f"    #       s  source   {'drafts':<{glyphs}}  {'draft':>7} {'verify':>8} "
            "waiting  tokens (times in ms)"
        )
        for done in rounds:
            output.write_styled(_round_line(done, glyphs) + "\n")
    if turn.finished is not None:
        output.line(statistics_line(turn.finished))
        if turn.finished.verdict is not None:
            output.line(words(turn.finished.verdict, MEASURE, both=True))
    else:
        output.line("(the run ended here without a finish)")


def _round_line(done: RoundDone, glyphs: int) -> str:
    tie = " ≈near-tie" if done.near_tie else ""
    left = (
        f"{done.index + 1:>5} {done.t_s:>7.3f}  {sanitize_line(done.source):<7}  "
        f"{round_glyphs(done):<{glyphs}}  {done.draft_ms:>7.2f} {done.verify_ms:>8.2f} "
        f"{done.waiting_ms:>7.2f}  "
    )
    room = shutil.get_terminal_size((10_000, 24)).columns if output.is_terminal() else 10_000
    return left + _tokens(done, max(room - len(left) - len(tie) - 1, 12)) + tie


def _tokens(done: RoundDone, room: int) -> str:
    """Write each token after its sign; color and strike-through only repeat the sign."""
    accepted = set(done.accepted_path[: done.accepted])
    parts = [("■", done.drafted_text[i], "32") for i in done.accepted_path[: done.accepted]]
    parts += [("□", text, "2;9") for i, text in enumerate(done.drafted_text) if i not in accepted]
    if not done.cut:
        parts.append(("+", done.target_text, "1"))
    colour = output.use_colour()
    out: list[str] = []
    for sign, text, code in parts:
        shown = _visible(text)
        if room < len(shown) + 2:
            out.append("…")
            break
        room -= len(shown) + 2
        out.append(f"{sign}\x1b[{code}m{shown}\x1b[0m" if colour else sign + shown)
    return " ".join(out)


def _visible(token: str) -> str:
    """Make the spaces and line breaks of a token visible."""
    marked = re.sub("^ +| +$", lambda ends: "␣" * len(ends[0]), token)
    return sanitize_line(marked.replace("\n", "⏎").replace("\t", "⇥"))


def _speed(verdict: Payoff | None) -> str:
    return f"{verdict.ratio:.2f}×" if verdict is not None and verdict.ratio else "–"


def _say_skipped(record: RunRecord) -> None:
    if record.skipped:
        lines = number_of(record.skipped, "damaged or unknown line")
        diagnostics.warn(f"{record.run}: {lines} skipped")
