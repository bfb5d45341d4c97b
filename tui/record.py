"""The record of one reply, round by round, for the as-drafted view, the panel and the inspector."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from specllama.events import Finished, RoundDone, Started, event_from_dict
from specllama.figures import Figures, SpecStats, depths
from specllama.files import DAMAGE
from specllama.store.rounds import LoggedTurn
from specllama.told import News, news
from specllama.tui.themes import Glyphs

LAG = 64  # rounds, one of which the figures of a live reply may be behind
SPECIAL = re.compile(r"<\|?[\w/]+\|?>$")


def is_special(text: str) -> bool:
    """True if this is a stop token's text: decided like any other, but no part of the reply."""
    return SPECIAL.match(text) is not None


@dataclass(slots=True)
class ReadAhead:
    """The reading before a message was sent, in tokens and seconds.

    Attributes:
        begin: tokens of the prompt that were in the cache before. end: those that are now.
        read: how many were read. in_vain: of these, how many are not those of the prompt.
        read_s: what reading them took.
    """

    begin: int = -1
    end: int = 0
    read: int = 0
    in_vain: int = 0
    read_s: float = 0.0

    @property
    def stands(self) -> int:
        return self.end - max(self.begin, 0)

    @property
    def in_vain_s(self) -> float:
        return self.read_s * self.in_vain / self.read if self.read else 0.0

    def goes_on(self, cached: int) -> None:
        """Note that the next prompt continues from its first ``cached`` tokens."""
        if self.begin < 0:
            self.begin = self.end = cached
        self.in_vain += max(self.end - max(cached, self.begin), 0)
        self.begin, self.end = min(self.begin, cached), cached


@dataclass(slots=True)
class Record:
    """A reply's rounds. ``starts`` gives for each stretch of rounds its first round and its
    request, and ``ends`` the end of each request by its number, 0 being one with an unknown start;
    ``live``: the reply is still being written; ``ahead``: the reading while its question was typed.
    """

    title: str = ""
    starts: list[tuple[int, Started]] = field(default_factory=list)
    rounds: list[RoundDone] = field(default_factory=list)
    ends: dict[int, Finished] = field(default_factory=dict)
    stats: SpecStats = field(default_factory=SpecStats)
    live: bool = False
    ahead: ReadAhead | None = None
    _figures: tuple[object, int, Figures | None] = field(default=((), 0, None), init=False)

    def add(self, rounds: Iterable[RoundDone]) -> None:
        for done in rounds:
            self.rounds.append(done)
            self.stats.observe(done)

    def take(self, new: News) -> None:
        """Add the news of a request, which may be the first or the last part of it."""
        if new.started is not None:
            self.starts.append((len(self.rounds), new.started))
        self.add(new.rounds)
        if new.finished is not None:
            self.ends[len(self.starts)] = new.finished

    def restore(self, stats: dict[str, Any]) -> None:
        """Restore a reply that was stored without its rounds."""
        if (finished := _finished_from(stats)) is not None:
            self.ends[len(self.starts)] = finished

    @property
    def finished(self) -> Finished | None:
        """The end of the newest request that has ended."""
        return self.ends[max(self.ends)] if self.ends else None

    def request(self, at: int = -1) -> LoggedTurn:
        """Return the request that wrote round ``at``, the newest unless given."""
        number = sum(first <= at for first, _ in self.starts) if at >= 0 else len(self.starts)
        first, started = self.starts[number - 1] if number else (0, None)
        last = self.starts[number][0] if number < len(self.starts) else len(self.rounds)
        rounds = self.rounds[first:last]
        return LoggedTurn(number, started=started, rounds=rounds, finished=self.ends.get(number))

    def figures(self, at: int = -1) -> Figures | None:
        """Return the figures of that request; None before its first token. They cost time for each
        round, so those of a long reply that is being written lag by up to one in ``LAG`` rounds."""
        turn = self.request(at)
        which, rounds = (turn.index, turn.finished is not None), len(turn.rounds)
        known, seen, found = self._figures
        if known != which or not 0 <= rounds - seen <= (seen // LAG if self.live else 0):
            found = turn.figures
            self._figures = which, rounds, found
        return found

    @property
    def started(self) -> Started | None:
        return self.starts[-1][1] if self.starts else None

    def verify_at(self, index: int) -> str:
        """Return the rule that judged round ``index``; "match" if unknown."""
        rules = [started.verify for first, started in self.starts if first <= index]
        return rules[-1] if rules else "match"

    def context(self) -> tuple[int, int] | None:
        """Return (tokens of context in use, tokens that there is room for)."""
        done, started = self.finished, self.started
        if self.live and started is not None:
            past = self.rounds[-1] if len(self.rounds) > self.starts[-1][0] else None
            used = past.n_past + 1 + len(past.emitted) if past else started.prompt_n
            return None if "prompt_n" in started.unknown else (used, started.n_ctx)
        return None if done is None or done.used is None else (done.used, done.n_ctx)


def fate_of(done: RoundDone) -> list[str]:
    """Return "accepted", "rejected" (judged and refused) or "untested" for each drafted node.

    A node is judged when its parent was accepted and no sibling took its place before it: in a
    chain that is the first one after the accepted run.
    """
    accepted = set(done.accepted_path)
    fates: list[str] = []
    for i, parent in enumerate(done.parents):
        if i in accepted:
            fates.append("accepted")
        elif (parent < 0 or parent in accepted) and not (done.cut and not _has_target(done)):
            fates.append("rejected")
        else:
            fates.append("untested")
    return fates


def _has_target(done: RoundDone) -> bool:
    return len(done.emitted) > done.accepted


def glyph_run(done: RoundDone, glyphs: Glyphs) -> list[tuple[str, str]]:
    """Return the round as (kind, glyphs): the accepted depth, the rejected and untested rest, the
    target token.

    A tree is drawn by depth, as a chain: what counts is how far the draft came.
    """
    rest = max(depths(done.parents), default=0) - done.accepted
    rejected = int("rejected" in fate_of(done)) if rest > 0 else 0
    out = [
        ("accepted", glyphs.accepted * done.accepted),
        ("rejected", glyphs.rejected * rejected),
        ("untested", glyphs.untested * (rest - rejected)),
        ("target", glyphs.target if _has_target(done) else ""),
    ]
    return [(kind, run) for kind, run in out if run]


def _finished_from(stats: dict[str, Any]) -> Finished | None:
    """Read the finish line of a stored reply: its counters; text and ids are not stored with
    them."""
    try:
        tokens = 0
        if not stats.get("engine"):
            tokens = int(stats["draft_n_accepted"]) + int(stats["rounds"]) - int(stats["cut"])
        ids = [0] * max(0, tokens)
        event = event_from_dict({**stats, "type": "finish", "text": "", "token_ids": ids})
    except DAMAGE:
        return None
    return news(event).finished
