"""A race that moves: two replies in an SVG, written as fast as they really were.

    python -m pictures.animation RECORDING.json "where it ran" "A question" -m TARGET -d DRAFT

asks the question plainly and drafted, with one seed, and keeps when each token came, as the round
log tells it. ``pictures.screenshots`` draws the recording. The picture needs no script and no
other file, so it plays in an ``<img>``; where motion is not wanted it stands still at the end.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from html import escape
from pathlib import Path

from specllama.errors import SpecllamaError, UsageError
from specllama.paths import HOME_VARIABLE

COLUMNS = 46  # of a pane
ADVANCE, LINE, SIZE = 7.8, 19.0, 13  # px: a character, a line, the letters
MARGIN, HEAD, FOOT = 18.0, 62.0, 66.0
HOLD_S = 3.5  # the end is shown this long before it begins again
LETTERS = {"own": "#d7dde6", "kept": "#7fd4a8"}
GREY, LEAD, GROUND, PANE = "#9aa7b8", "#7fd4a8", "#0f141b", "#161d27"


@dataclass(frozen=True, slots=True)
class Piece:
    """Text that came at one moment; ``kept`` if the draft had guessed it."""

    at_s: float
    text: str
    kept: bool = False


@dataclass(frozen=True, slots=True)
class Reply:
    """One arm of the race: its tokens from the first on, and the seconds between first and last."""

    pieces: list[Piece]
    tokens: int

    @property
    def seconds(self) -> float:
        return self.pieces[-1].at_s

    @property
    def speed(self) -> float:
        return (self.tokens - 1) / self.seconds

    @property
    def text(self) -> str:
        return "".join(piece.text for piece in self.pieces)


@dataclass(frozen=True, slots=True)
class MovingRace:
    """Both replies to one question; ``where`` says what ran and on what."""

    question: str
    where: str
    plain: Reply
    drafted: Reply

    def save(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self), ensure_ascii=False) + "\n", "utf-8")

    @staticmethod
    def load(path: Path) -> MovingRace:
        """Raises:
        UsageError: the file is no such recording.
        """
        try:
            data = json.loads(path.read_text("utf-8"))
            replies = [
                Reply([Piece(**piece) for piece in data[arm]["pieces"]], int(data[arm]["tokens"]))
                for arm in ("plain", "drafted")
            ]
            return MovingRace(str(data["question"]), str(data["where"]), *replies)
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise UsageError(f"{path} is no recorded race: {error}", "make pictures") from None


def reply_of(log: Path) -> Reply:
    """The reply that a round log tells of."""
    pieces: list[Piece] = []
    tokens, begun = 0, 0.0
    for line in log.read_text("utf-8").splitlines():
        told = json.loads(line)
        if told["type"] == "finish":
            pieces = _cut(pieces, len(told["text"]))
        if told["type"] != "round":
            continue
        at = float(told["t_s"])
        begun = begun or at
        texts = told["emitted_text"]
        tokens += len(texts)
        kept = min(int(told["accepted"]), len(texts))
        for text, guessed in (("".join(texts[:kept]), True), ("".join(texts[kept:]), False)):
            if text:
                pieces.append(Piece(round(at - begun, 3), text, guessed))
    return Reply(pieces, tokens)


def _cut(pieces: Sequence[Piece], length: int) -> list[Piece]:
    """The pieces of the first ``length`` characters: without the token that ends a reply."""
    cut = []
    for piece in pieces:
        text = piece.text[:length]
        length -= len(text)
        cut.append(Piece(piece.at_s, text, piece.kept))
    return cut


def record(question: str, arguments: Sequence[str], where: str) -> MovingRace:
    """Ask twice; the second run knows what drafts cost, as a second reply in the app does.

    Raises:
        UsageError: a run failed, or the texts differ.
    """
    replies = []
    with tempfile.TemporaryDirectory() as home:
        environ = os.environ | {HOME_VARIABLE: home}
        for more in ([], ["--no-spec"], []):
            command = [sys.executable, "-P", "-m", "specllama", "run", *arguments, *more, question]
            if subprocess.run(command, stdout=subprocess.DEVNULL, env=environ).returncode:
                raise UsageError("a run failed; it has said why")
            logs = Path(home).glob("**/rounds/*.jsonl")
            replies.append(reply_of(max(logs, key=lambda path: path.stat().st_mtime_ns)))
    _, plain, drafted = replies
    if plain.text != drafted.text:
        raise UsageError("the texts differ: the race is not drawn")
    return MovingRace(question, where, plain, drafted)


def _wrapped(pieces: Sequence[Piece]) -> list[list[Piece]]:
    """The pieces in lines of at most ``COLUMNS`` characters, broken before a word."""
    letters = [(letter, piece) for piece in pieces for letter in piece.text]
    lines: list[list[tuple[str, Piece]]] = [[]]
    for letter, piece in letters:
        line = lines[-1]
        if letter == "\n":
            lines.append([])
        elif len(line) < COLUMNS:
            line.append((letter, piece))
        else:
            spaces = [i for i, (before, _) in enumerate(line) if before == " "]
            cut = spaces[-1] + 1 if spaces and letter != " " else len(line)
            lines.append(line[cut:] + ([] if letter == " " else [(letter, piece)]))
            del line[cut:]
    return [_joined(line) for line in lines]


def _joined(letters: Sequence[tuple[str, Piece]]) -> list[Piece]:
    joined: list[Piece] = []
    last: Piece | None = None
    for letter, piece in letters:
        if piece is last:
            joined[-1] = Piece(piece.at_s, joined[-1].text + letter, piece.kept)
        else:
            joined.append(Piece(piece.at_s, letter, piece.kept))
        last = piece
    return joined


class _Film:
    """The moments of a loop of so many seconds, each with a class that appears then."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._names: dict[float, str] = {}

    def at(self, moment_s: float) -> str:
        """The class of what is seen from this moment on."""
        percent = round(100 * moment_s / self.seconds, 2)
        return self._names.setdefault(percent, f"t{len(self._names)}")

    def style(self) -> str:
        frames = "".join(
            f"@keyframes {name}{{0%{{fill-opacity:0}}{percent or 0.01}%{{fill-opacity:1}}}}"
            f".{name}{{animation-name:{name}}}"
            for percent, name in self._names.items()
        )
        moving = f"tspan,.end{{animation:{self.seconds:.2f}s step-end infinite}}"
        return f"@media (prefers-reduced-motion:no-preference){{{moving}{frames}}}"


def animated(race: MovingRace) -> str:
    """The race as SVG."""
    film = _Film(race.plain.seconds + HOLD_S)
    panes = [("plain", race.plain), ("drafted, guesses green", race.drafted)]
    wrapped = [_wrapped(reply.pieces) for _, reply in panes]
    rows = max(map(len, wrapped))
    wide = COLUMNS * ADVANCE + 2 * MARGIN
    width, height = 2 * wide + 3 * MARGIN, HEAD + (rows + 1.5) * LINE + FOOT
    body = []
    for number, ((title, reply), lines) in enumerate(zip(panes, wrapped, strict=True)):
        left = MARGIN + number * (wide + MARGIN)
        body += _pane(film, title, reply, lines, (left, wide, height))
    ratio = race.drafted.speed / race.plain.speed
    verdict = f"same {race.plain.tokens} tokens · {ratio:.2f}× as fast"
    last = film.at(race.plain.seconds)
    body.append(
        f'<text x="{width / 2:.0f}" y="{height - 40:.0f}" text-anchor="middle" fill="{LEAD}" '
        f'font-size="17" font-weight="700" class="end {last}">{escape(verdict)}</text>'
        f'<text x="{width / 2:.0f}" y="{height - 17:.0f}" text-anchor="middle" fill="{GREY}" '
        f'font-size="11.5">{escape(race.where)}</text>'
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height:.0f}" '
        f'role="img" aria-label="{escape(f"Two replies to one question: {verdict}")}" '
        f'font-family="ui-monospace,Menlo,Consolas,monospace" font-size="{SIZE}">'
        f"<style>{film.style()}</style>"
        f'<rect width="100%" height="100%" rx="10" fill="{GROUND}"/>'
        f'<text x="{MARGIN:.0f}" y="30" fill="{LETTERS["own"]}">'
        f"&gt; {escape(race.question)}</text>{''.join(body)}</svg>\n"
    )


def _pane(
    film: _Film,
    title: str,
    reply: Reply,
    lines: list[list[Piece]],
    place: tuple[float, float, float],
) -> Iterator[str]:
    """One reply: ``place`` is where it begins, how wide it is, and how high the picture is."""
    left, wide, height = place
    yield (
        f'<rect x="{left:.0f}" y="{HEAD - 18:.0f}" width="{wide:.0f}" '
        f'height="{height - HEAD - FOOT + 10:.0f}" rx="6" fill="{PANE}"/>'
        f'<text x="{left + MARGIN:.0f}" y="{HEAD + 4:.0f}" fill="{GREY}">{escape(title)}'
        f'<tspan class="{film.at(reply.seconds)}" fill="{LEAD}" dx="12">'
        f"{reply.seconds:.1f} s · {reply.speed:.0f} tok/s</tspan></text>"
    )
    for number, line in enumerate(lines):
        spans = "".join(
            f'<tspan class="{film.at(piece.at_s)}"'
            + (f' fill="{LETTERS["kept"]}"' if piece.kept else "")
            + f">{escape(piece.text)}</tspan>"
            for piece in line
        )
        yield (
            f'<text x="{left + MARGIN:.0f}" y="{HEAD + (number + 1.5) * LINE:.0f}" '
            f'xml:space="preserve" fill="{LETTERS["own"]}">{spans}</text>'
        )


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m pictures.animation")
    parser.add_argument("file", type=Path, help="where to keep the recording (.json)")
    parser.add_argument("where", help="what ran and on what, as the picture says it")
    parser.add_argument("question")
    parser.add_argument("run", nargs=argparse.REMAINDER, help="arguments of specllama run")
    given = parser.parse_args(arguments)
    try:
        race = record(given.question, given.run, given.where)
        race.save(given.file)
    except SpecllamaError as error:
        print(error.message, file=sys.stderr)
        return 1
    print(f"{given.file}: {race.plain.speed:.1f} and {race.drafted.speed:.1f} tok/s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
