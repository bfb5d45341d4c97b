"""Figures that other engines report of their replies and their drafting.

None is what an engine does not report; it is shown as "–", never as 0.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from specllama.rates import Kept, share

Json = dict[str, Any]

_SAMPLE = re.compile(r"([A-Za-z_:][\w:]*)(?:\{(.*)\})?\s+(\S+)")
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')


@dataclass(frozen=True, slots=True)
class Likely:
    """The probability of a token, and its likeliest rivals as (spelling, logarithm).

    Attributes:
        id: its number in the server's vocabulary. raw: its bytes. None where it does not report it.
    """

    text: str
    logprob: float
    top: tuple[tuple[str, float], ...] = ()
    id: int | None = None
    raw: bytes | None = None


@dataclass(frozen=True, slots=True)
class Drafted:
    """The drafts of one reply.

    Attributes:
        at_most: ``drafted`` is an upper bound.
        per_round: tokens that a pass wrote on average, as the engine counts it.
        accepted_at, drafted_at: by depth, from 1 on.
    """

    drafted: int | None
    accepted: int | None
    at_most: bool = False
    per_round: float | None = None
    accepted_at: tuple[int, ...] = ()
    drafted_at: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Counters(Kept):
    """A server's counts since it was started, for all clients.

    Attributes:
        drafts: passes that checked a draft.
        accepted_at: by depth, from 1 on.
        generated: tokens of all replies.
        running, waiting: requests now.
        per_round: tokens that a pass writes of late, where a server reports only that.
    """

    drafts: int | None = None
    drafted: int | None = None
    accepted: int | None = None
    accepted_at: tuple[int, ...] = ()
    generated: int | None = None
    running: int | None = None
    waiting: int | None = None
    per_round: float | None = None

    @property
    def idle(self) -> bool:
        return self.running == 0 and not self.waiting

    def since(self, before: Counters, tokens: int | None) -> Drafted | None:
        """Return the drafts of a reply of ``tokens`` between ``before`` and now.

        None where that is not sure: another request was served, or the server does not count.
        """
        one = self.grown(before)
        if not (before.idle and self.idle) or one.generated is None or one.generated != tokens:
            return None
        zeros = (0,) * (len(self.accepted_at) - len(before.accepted_at))
        at = tuple(b - a for a, b in zip((*before.accepted_at, *zeros), self.accepted_at,
                                         strict=False))  # fmt: skip
        if one.rejected is None or min((one.rejected, *at)) < 0:
            return None  # it was started anew, or does not tell
        return Drafted(one.drafted, one.accepted, per_round=one.per_draft, accepted_at=at)

    def grown(self, before: Counters) -> Counters:
        """Return the counts between ``before`` and now; None where one is not known, or fell: the
        server was started anew."""
        more: dict[str, int | None] = {}
        for name in ("drafts", "drafted", "accepted", "generated"):
            then, now = getattr(before, name) or 0, getattr(self, name)
            more[name] = None if now is None or now < then else now - then
        return replace(self, **more)  # type: ignore[arg-type]

    @property
    def per_draft(self) -> float | None:
        """Tokens of a pass that checked a draft."""
        kept = share(self.accepted, self.drafts)
        return None if kept is None else 1 + kept


def whole(value: object) -> int | None:
    """Return ``value`` if it is a count, else None."""
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else None


def number(value: object) -> float | None:
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return float(value)
    return None


def of(value: object) -> Json:
    """Return ``value`` if it is a JSON object, else an empty one."""
    return value if isinstance(value, dict) else {}


def each(value: object) -> list[Any]:
    """Return ``value`` if it is a list, else an empty one."""
    return value if isinstance(value, list) else []


def text(value: object) -> str:
    return value if isinstance(value, str) else ""


class MetricsPage:
    """The samples of a Prometheus page whose names begin with ``prefix``."""

    def __init__(self, page: str, prefix: str) -> None:
        self._samples: dict[str, list[tuple[dict[str, str], float]]] = {}
        for line in page.splitlines():
            found = _SAMPLE.match(line) if line.startswith(prefix) else None
            with suppress(ValueError):
                if found is not None:
                    labels = dict(_LABEL.findall(found[2] or ""))
                    self._samples.setdefault(found[1], []).append((labels, float(found[3])))

    def __bool__(self) -> bool:
        return bool(self._samples)

    def total(self, name: str) -> int | None:
        """Sum a sample over its labels; return None if there is no such sample."""
        found = self._samples.get(name)
        return None if found is None else whole(sum(value for _, value in found))

    def mean(self, name: str) -> float | None:
        found = [value for _, value in self._samples.get(name, ())]
        return sum(found) / len(found) if found else None

    def by(self, name: str, label: str) -> tuple[int, ...]:
        """Sum a sample for each value of a label that counts from 0."""
        sums: dict[int, float] = {}
        for labels, value in self._samples.get(name, ()):
            if (at := labels.get(label, "")).isdecimal():
                sums[int(at)] = sums.get(int(at), 0.0) + value
        most = max(sums, default=-1)
        return tuple(int(sums.get(i, 0)) for i in range(most + 1)) if most < 1024 else ()


def likely_of(told: object) -> Iterator[Likely]:
    """Yield the tokens of ``choices[0].logprobs``, of a chat or of a completion."""
    found = of(told)
    for one in each(found.get("content")):
        tops = [(text(top.get("token")), top.get("logprob")) for top in each(of(one).get(
            "top_logprobs")) if isinstance(top, dict)]  # fmt: skip
        if (log := number(of(one).get("logprob"))) is not None:
            raw = [byte for byte in each(one.get("bytes")) if byte in range(256)]
            id = whole(one.get("id"))
            yield Likely(text(one.get("token")), log, tuple(_sure(tops)), id, bytes(raw) or None)
    rows = each(found.get("top_logprobs"))
    pairs = zip(each(found.get("tokens")), each(found.get("token_logprobs")), strict=False)
    for i, (token, value) in enumerate(pairs):
        if (log := number(value)) is not None:
            top = of(rows[i]).items() if i < len(rows) else ()
            yield Likely(text(token), log, tuple(_sure(top)))


def _sure(pairs: Iterable[tuple[str, Any]]) -> Iterator[tuple[str, float]]:
    for token, value in pairs:
        if (log := number(value)) is not None:
            yield token, log
