"""One generation, round by round: what the as-drafted view and the inspector show."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from specllama.events import Event, Finished, RoundDone, Started, event_from_dict
from specllama.kept import DAMAGE
from specllama.stats import SpecStats

SPECIAL = re.compile(r"<\|?[\w/]+\|?>$")


def is_special(text: str) -> bool:
    """The text of a stop token: it was decided like any other, but is no part of the reply."""
    return SPECIAL.match(text) is not None


@dataclass(slots=True)
class Record:
    """``starts`` says which request each stretch of rounds answers, from which round on; ``live``
    that the reply is still being written."""

    title: str = ""
    starts: list[tuple[int, Started]] = field(default_factory=list)
    rounds: list[RoundDone] = field(default_factory=list)
    finished: Finished | None = None
    stats: SpecStats = field(default_factory=SpecStats)
    live: bool = False

    def add(self, rounds: Iterable[RoundDone]) -> None:
        for done in rounds:
            self.rounds.append(done)
            self.stats.observe(done)

    def begin(self, started: Started) -> None:
        """Whatever is added from now on answers this request."""
        self.starts.append((len(self.rounds), started))

    @property
    def started(self) -> Started | None:
        return self.starts[-1][1] if self.starts else None

    def verify_at(self, index: int) -> str:
        """The rule that judged round ``index``; "match" if it is not known."""
        rules = [started.verify for first, started in self.starts if first <= index]
        return rules[-1] if rules else "match"

    @staticmethod
    def of(title: str, events: Iterable[Event]) -> Record:
        record = Record(title)
        for event in events:
            if isinstance(event, Started):
                record.begin(event)
            elif isinstance(event, RoundDone):
                record.add([event])
            elif isinstance(event, Finished):
                record.finished = event
        return record

    def text_before(self, index: int) -> str:
        return "".join("".join(r.emitted_text) for r in self.rounds[:index])

    def tokens_per_s(self) -> float | None:
        """From the finish line if there is one, else from the rounds' own times."""
        if self.finished is not None and self.finished.timings.tok_per_s is not None:
            return self.finished.timings.tok_per_s
        ms = self.stats.draft_ms + self.stats.verify_ms + self.stats.other_ms
        return 1000.0 * self.stats.emitted / ms if ms > 0 else None


def depth_of(done: RoundDone) -> list[int]:
    """Depth of each drafted node, the first level being 1."""
    depths: list[int] = []
    for parent in done.parents:
        depths.append(1 if parent < 0 else depths[parent] + 1)
    return depths


def fate_of(done: RoundDone) -> list[str]:
    """ "accepted", "rejected" (judged and refused) or "untested" for each drafted node.

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


def glyph_run(done: RoundDone, accepted: str, rejected: str, target: str) -> list[tuple[str, str]]:
    """The round as (kind, glyphs): the accepted depth, the drafted rest, the target token.

    A tree is drawn by depth, as a chain: what counts is how far the draft came.
    """
    depth = max(depth_of(done), default=0)
    out: list[tuple[str, str]] = []
    if done.accepted:
        out.append(("accepted", accepted * done.accepted))
    if depth > done.accepted:
        out.append(("rejected", rejected * (depth - done.accepted)))
    if _has_target(done):
        out.append(("target", target))
    return out


def finished_from(stats: dict[str, Any]) -> Finished | None:
    """The finish line of a stored reply: its counters; text and ids are not stored with them."""
    try:
        tokens = int(stats["draft_n_accepted"]) + int(stats["rounds"]) - int(stats["cut"])
        ids = [0] * max(0, tokens)
        event = event_from_dict({**stats, "type": "finish", "text": "", "token_ids": ids})
    except DAMAGE:
        return None
    return event if isinstance(event, Finished) else None
