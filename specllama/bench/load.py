"""Servers under load: clients that send one request after another.

Arms take turns within every repetition, and only what was measured side by side is compared, since
machines drift. Every arm gets the same prompts with the same seeds, every wave others, as long as
there are some: what a server has in its cache is not measured again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from itertools import product
from statistics import median
from time import perf_counter, sleep
from typing import Any

from specllama.bench.arms import RunFigures, Task, percentile
from specllama.bench.paired import Compared, as_one, ratio_words
from specllama.bench.processes import cpu_seconds, server_of
from specllama.bench.remote_arm import LONG, RemoteArm
from specllama.remote.answers import Drafted

SETTLES_S = 0.3  # counters that lag behind the replies
Alone = Mapping[tuple[str, float], str]
"""What an arm writes when it is asked nothing else, by prompt and temperature."""


LOADED = "Several clients at once"
UNKNOWN = "–"


@dataclass(slots=True)
class Wave:
    """Questions of N clients; ``cpu_s`` is the server's processor time.

    ``draft`` is the drafting behind all of them, None where the server does not tell.
    """

    arm: str
    clients: int
    repetition: int
    seconds: float
    answers: list[RunFigures] = field(default_factory=list)
    cpu_s: float | None = None
    draft: Drafted | None = None

    @property
    def tokens(self) -> int | None:
        """Tokens of all answers; None if one was not counted."""
        counts = [answer.tokens for answer in self.answers]
        return sum(counts) if all(counts) else None

    @property
    def tok_per_s(self) -> float | None:
        return self.tokens / self.seconds if self.tokens else None

    @property
    def cpu_ms(self) -> float | None:
        """Processor milliseconds of a token."""
        return self.cpu_s * 1e3 / self.tokens if self.cpu_s is not None and self.tokens else None


@dataclass(frozen=True, slots=True)
class LoadRow:
    """An arm at N clients, over all repetitions; ratios are to the first arm.

    ``cpu_ms`` is of a token, its ratio above 1 where less is needed. ``pace`` is that of the long
    reply which fell furthest behind the same reply of the first arm. ``equal`` of ``compared``
    replies have the text that the first arm wrote when it was asked nothing else.
    """

    arm: str
    clients: int
    tok_per_s: float | None
    ratio: Compared | None
    cpu_ms: float | None
    cpu_ratio: Compared | None
    first_p50_s: float | None
    first_p95_s: float | None
    reply_p50_s: float | None
    reply_p95_s: float | None
    accepted: float | None
    pace: float | None
    equal: int
    compared: int

    def to_dict(self) -> dict[str, Any]:
        ratios = {"ratio": self.ratio, "cpu_ratio": self.cpu_ratio}
        told = {
            name: one and {"ratio": one.ratio, "low": one.low, "high": one.high}
            for name, one in ratios.items()
        }
        return asdict(self) | told


def _shown(value: float | None, form: str) -> str:
    return UNKNOWN if value is None else format(value, form)


COLUMNS: dict[str, Callable[[LoadRow], str]] = {
    "server": lambda row: row.arm,
    "clients": lambda row: str(row.clients),
    "tok/s": lambda row: _shown(row.tok_per_s, ".1f"),
    "ratio": lambda row: ratio_words(row.ratio) if row.ratio else UNKNOWN,
    "ms CPU": lambda row: _shown(row.cpu_ms, ".1f"),
    "CPU ratio": lambda row: ratio_words(row.cpu_ratio) if row.cpu_ratio else UNKNOWN,
    "first token s": lambda r: f"{_shown(r.first_p50_s, '.2f')} {_shown(r.first_p95_s, '.2f')}",
    "reply s": lambda row: f"{_shown(row.reply_p50_s, '.1f')} {_shown(row.reply_p95_s, '.1f')}",
    "accepted": lambda row: _shown(row.accepted, ".0%"),
    "pace": lambda row: _shown(row.pace, ".2f"),
    "same text": lambda row: f"{row.equal} of {row.compared}" if row.compared else UNKNOWN,
}


class ClientLoad:
    """Clients of some servers.

    Args:
        tasks: of which every wave takes the next ``count``.

    Its methods raise SpecllamaError where a server does not answer, or with an error.
    """

    def __init__(self, arms: Sequence[RemoteArm], tasks: Sequence[Task], count: int) -> None:
        self._arms, self._tasks, self._count = arms, tasks, count
        self._processes = {arm.name: server_of(arm.engine.address.url) for arm in arms}

    def waves(self, clients: Sequence[int], repetitions: int) -> Iterator[Wave]:
        """Send the same questions to every server, with N clients at a time."""
        all_, count = len(self._tasks), self._count
        for nth, (repetition, n) in enumerate(product(range(repetitions), clients)):
            asked = [self._tasks[i % all_] for i in range(nth * count, (nth + 1) * count)]
            for arm in self._arms:
                yield self._wave(arm, n, repetition, asked)

    def _wave(self, arm: RemoteArm, clients: int, repetition: int, asked: Sequence[Task]) -> Wave:
        process = self._processes[arm.name]
        spent = None if process is None else cpu_seconds(process)
        before, begin = arm.engine.counters(), perf_counter()
        with ThreadPoolExecutor(clients) as pool:
            answers = list(pool.map(lambda task: arm.answer(task, repetition), asked))
        took = perf_counter() - begin
        if process is not None and spent is not None:
            spent = cpu_seconds(process) - spent
        wave = Wave(arm.name, clients, repetition, took, answers, spent)
        drafted = [answer.drafted for answer in answers if answer.drafted is not None]
        accepted = [answer.accepted for answer in answers if answer.accepted is not None]
        if len(drafted) == len(accepted) == len(answers):
            wave.draft = Drafted(sum(drafted), sum(accepted))
        elif before is not None:
            sleep(SETTLES_S)
            if now := arm.engine.counters():
                wave.draft = now.since(before, wave.tokens)
        return wave

    def alone(self, count: int) -> Alone:
        """Return the first server's answers to the first questions, one after another."""
        first = self._arms[0]
        answers = [first.answer(task, 0) for task in self._tasks[:count]]
        return {(answer.prompt, answer.temperature): answer.text for answer in answers}


def rows(waves: Sequence[Wave], alone: Alone) -> list[LoadRow]:
    """Return the figures of every arm and number of clients."""
    first = waves[0].arm
    base = {(wave.clients, wave.repetition): wave for wave in waves if wave.arm == first}
    out: list[LoadRow] = []
    for arm, clients in dict.fromkeys((wave.arm, wave.clients) for wave in waves):
        mine = [wave for wave in waves if (wave.arm, wave.clients) == (arm, clients)]
        beside = [(wave, base[clients, wave.repetition]) for wave in mine]
        faster = [
            (it.tok_per_s, us.tok_per_s) for us, it in beside if us.tok_per_s and it.tok_per_s
        ]
        speed = as_one([faster])
        answers = [answer for wave in mine for answer in wave.answers]
        known = [(alone.get((one.prompt, one.temperature)), one.text) for one in answers]
        compared = [was == text for was, text in known if was is not None]
        firsts, wholes = [one.ttft_s for one in answers], [one.total_s for one in answers]
        cpu = [wave.cpu_ms for wave in mine if wave.cpu_ms is not None]
        cheaper = [(it.cpu_ms, usual.cpu_ms) for it, usual in beside if usual.cpu_ms and it.cpu_ms]
        paces = [pace for pair in beside if (pace := _slowest(*pair)) is not None]
        out.append(
            LoadRow(
                arm,
                clients,
                tok_per_s=speed.speed if speed else None,
                ratio=speed,
                cpu_ms=median(cpu) if cpu else None,
                cpu_ratio=as_one([cheaper]),
                first_p50_s=percentile(firsts, 0.5),
                first_p95_s=percentile(firsts, 0.95),
                reply_p50_s=percentile(wholes, 0.5),
                reply_p95_s=percentile(wholes, 0.95),
                accepted=_accepted(mine),
                pace=median(paces) if paces else None,
                equal=sum(compared),
                compared=len(compared),
            )
        )
    return out


def _accepted(waves: Sequence[Wave]) -> float | None:
    """Return the share of drafted tokens that were accepted; None unless every wave reports it."""
    known = [(wave.draft.accepted, wave.draft.drafted) for wave in waves if wave.draft is not None]
    drafted = sum(drafted or 0 for _, drafted in known)
    if len(known) < len(waves) or not drafted:
        return None
    return sum(accepted or 0 for accepted, _ in known) / drafted


def _slowest(wave: Wave, usual: Wave) -> float | None:
    """Return the smallest ratio of the speeds of one long reply in two waves."""
    speeds = {(answer.prompt, answer.temperature): answer.speed for answer in usual.answers}
    return min(
        (answer.speed / was for answer in wave.answers
         if answer.tokens >= LONG and answer.speed
         and (was := speeds.get((answer.prompt, answer.temperature)))),
        default=None,
    )  # fmt: skip
