"""Servers under load: clients that send one request after another.

Arms take turns within every repetition, and only what was measured side by side is compared, since
machines drift. Every arm gets the same prompts with the same seeds, every wave others, as long as
there are some: what a server has in its cache is not measured again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import cycle, islice, product
from statistics import median
from time import perf_counter, sleep
from typing import Any

import numpy as np

from specllama.bench.experiment import RunFigures, Task
from specllama.bench.outcome import as_one, pairs, ratio_words
from specllama.bench.remote_arm import LONG, RemoteArm, cpu_seconds, server_of
from specllama.rates import share, total
from specllama.remote.answers import Drafted

SETTLES_S = 0.3  # counters that lag behind the replies
Alone = Mapping[tuple[str, float], str]
"""What an arm writes when it is asked nothing else, by prompt and temperature."""


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
        return share(self.tokens or None, self.seconds)

    @property
    def cpu_ms(self) -> float | None:
        """Processor milliseconds of a token."""
        return None if self.cpu_s is None else share(self.cpu_s * 1e3, self.tokens)


Beside = Sequence[tuple[Wave, Wave]]


class LoadRow:
    """An arm at N clients, over all repetitions; ratios are to the first arm.

    ``cpu_ms`` is of a token, its ratio above 1 where less is needed. ``pace`` is that of the long
    reply which fell furthest behind the same reply of the first arm. ``equal`` of ``compared``
    replies have the text that the first arm wrote when it was asked nothing else.

    Args:
        beside: waves of the first arm, each with this arm's of the same repetition.
    """

    def __init__(self, arm: str, clients: int, beside: Beside, alone: Alone) -> None:
        waves = [wave for _, wave in beside]
        answers = [answer for wave in waves for answer in wave.answers]
        known = [(alone.get((one.prompt, one.temperature)), one.text) for one in answers]
        equal = [was == text for was, text in known if was is not None]
        firsts, wholes = [one.ttft_s for one in answers], [one.total_s for one in answers]
        cpu = [wave.cpu_ms for wave in waves if wave.cpu_ms is not None]
        paces = [pace for usual, wave in beside if (pace := _slowest(wave, usual)) is not None]
        self.arm, self.clients = arm, clients
        self.ratio = as_one([pairs(beside, lambda wave: wave.tok_per_s)])
        self.tok_per_s = self.ratio.speed if self.ratio else None
        self.cpu_ms = median(cpu) if cpu else None
        self.cpu_ratio = as_one([pairs(((b, a) for a, b in beside), lambda wave: wave.cpu_ms)])
        self.first_p50_s, self.first_p95_s = percentile(firsts, 0.5), percentile(firsts, 0.95)
        self.reply_p50_s, self.reply_p95_s = percentile(wholes, 0.5), percentile(wholes, 0.95)
        self.accepted = _accepted(waves)
        self.pace = median(paces) if paces else None
        self.equal, self.compared = sum(equal), len(equal)

    def to_dict(self) -> dict[str, Any]:
        ratios = {"ratio": self.ratio, "cpu_ratio": self.cpu_ratio}
        return vars(self) | {
            name: one and {"ratio": one.ratio, "low": one.low, "high": one.high}
            for name, one in ratios.items()
        }


def percentile(values: Sequence[float], at: float) -> float | None:
    """Interpolate linearly between closest ranks; return None without values."""
    return float(np.quantile(values, at)) if values else None


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

    def rows(
        self,
        clients: Sequence[int],
        repetitions: int,
        *,
        alone: int = 0,
        heard: Callable[[int, int], object] = lambda done, total: None,
        wave_ended: Callable[[Wave], object] = lambda wave: None,
    ) -> list[LoadRow]:
        """Measure every arm with each number of clients.

        Args:
            alone: questions that the first server gets again, one after another.
            heard: called with how many waves there were, and of how many.
        """
        waves, n = [], len(clients) * repetitions * len(self._arms)
        for wave in self.waves(clients, repetitions):
            waves.append(wave)
            heard(len(waves), n)
            wave_ended(wave)
        answers = [self._arms[0].answer(task, 0) for task in self._tasks[:alone]]
        return rows(waves, {(one.prompt, one.temperature): one.text for one in answers})

    def waves(self, clients: Sequence[int], repetitions: int) -> Iterator[Wave]:
        """Send the same questions to every server, with N clients at a time."""
        count, questions = self._count, cycle(self._tasks)
        for repetition, n in product(range(repetitions), clients):
            asked = list(islice(questions, count))
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
        drafted = total([answer.drafted for answer in answers])
        accepted = total([answer.accepted for answer in answers])
        if drafted is not None and accepted is not None:
            wave.draft = Drafted(drafted, accepted)
        elif before is not None:
            sleep(SETTLES_S)
            if now := arm.engine.counters():
                wave.draft = now.since(before, wave.tokens)
        return wave


def rows(waves: Sequence[Wave], alone: Alone) -> list[LoadRow]:
    """Return the figures of every arm and number of clients."""
    first = waves[0].arm
    base = {(wave.clients, wave.repetition): wave for wave in waves if wave.arm == first}
    beside: dict[tuple[str, int], list[tuple[Wave, Wave]]] = {}
    for wave in waves:
        pair = base[wave.clients, wave.repetition], wave
        beside.setdefault((wave.arm, wave.clients), []).append(pair)
    return [LoadRow(*which, found, alone) for which, found in beside.items()]


def _accepted(waves: Sequence[Wave]) -> float | None:
    """Return the share of drafted tokens that were accepted; None unless every wave reports it."""
    known = [wave.draft or Drafted(None, None) for wave in waves]
    return share(total([one.accepted for one in known]), total([one.drafted for one in known]))


def _slowest(wave: Wave, usual: Wave) -> float | None:
    """Return the smallest ratio of the speeds of one long reply in two waves."""
    speeds = {(answer.prompt, answer.temperature): answer.speed for answer in usual.answers}
    return min(
        (answer.speed / was for answer in wave.answers
         if answer.tokens >= LONG and answer.speed
         and (was := speeds.get((answer.prompt, answer.temperature)))),
        default=None,
    )  # fmt: skip
