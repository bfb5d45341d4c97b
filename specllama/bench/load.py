"""Other engines: as arms of a comparison, and servers under load.

They run already, and are used as a client uses them: they get the same messages, limits, seeds and
sampler settings; each puts the messages into its own chat template. Times are those of the client,
from the request on.

Under load, clients send one request after another. Arms take turns within every repetition, and
only what was measured side by side is compared, since machines drift. Every arm gets the same
prompts with the same seeds, every wave others, as long as there are some: what a server has in its
cache is not measured again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from itertools import cycle, islice, product
from statistics import median
from time import perf_counter, sleep
from typing import Any
from urllib.parse import urldefrag

import numpy as np

from specllama.bench.experiment import RunFigures, Task
from specllama.bench.outcome import as_one, pairs, ratio_words
from specllama.errors import UsageError
from specllama.rates import share, total
from specllama.remote.address import Address
from specllama.remote.answers import Drafted
from specllama.remote.foreign import ForeignEngine
from specllama.remote.remote_engine import open_remote
from specllama.settings.params import PROPOSERS, GenerateParams
from specllama.text import figure, percent

LONG = 24  # tokens of a reply whose pace tells something: an event may hold a whole round
Count = Callable[[str], int]
# what changes nothing at temperature 0, and is refused by some engines while they draft
IDLE: dict[str, Any] = {"top_k": 0, "top_p": 1.0, "min_p": 0.0}


@dataclass(slots=True)
class RemoteArm:
    """A server under some parameters.

    Args:
        params: sampling; temperature, seed and length come from the task.
        speculation: on or off, where a request can say so; None leaves it to the server.
        count: tokens of a text, for replies that the server does not count.
    """

    engine: ForeignEngine
    params: GenerateParams
    speculation: bool | None = None
    name: str = ""
    count: Count | None = None

    def __post_init__(self) -> None:
        state = {None: "", False: " plain", True: " drafting"}[self.speculation]
        self.name = self.name or self.engine.kind.title + state
        self.params = self.params.replace(from_card=())

    def run(self, task: Task, repetition: int) -> RunFigures:
        """Run a task alone: the server's counters replace figures that the answer lacks."""
        return self.answer(task, repetition, alone=True)

    def answer(self, task: Task, repetition: int, *, alone: bool = False) -> RunFigures:
        chosen = {"temperature": task.temperature} | ({} if task.temperature else IDLE)
        params = task.wish(self.params, sampling=replace(self.params.sampling, **chosen))
        answered = self.engine.ask(
            task.prompt.content, params, stream=True, speculation=self.speculation, counted=alone
        )
        first_s, draft = answered.first_s or answered.seconds, answered.draft
        text, tokens = answered.reasoning + answered.text, answered.tokens
        if tokens is None:
            tokens = 0 if self.count is None else self.count(text)
        return RunFigures.told(
            self.name,
            task,
            repetition,
            tokens=tokens,
            decode_s=answered.seconds - first_s if tokens >= LONG else 0.0,
            total_s=answered.seconds,
            ttft_s=first_s,
            drafted=None if draft is None else draft.drafted,
            accepted=None if draft is None else draft.accepted,
            text=text,
        )

    def close(self) -> None:
        self.engine.close()

    def to_dict(self) -> dict[str, str]:
        """Describe the server, as far as it reports itself: for the provenance of a report."""
        engine = self.engine
        return {
            "arm": self.name,
            "url": engine.address.url,
            "engine": engine.name,
            "model": engine.model.id,
            "flags": engine.flags,
        }


def load_arm(text: str, params: GenerateParams, key: str = "") -> RemoteArm:
    """Open an arm from ``URL`` or ``URL#METHOD``, which names the method to draft with.

    Raises:
        UsageError: it is something else, or that server cannot be told to draft so.
        SpecllamaError: nobody answers there.
    """
    url, proposer = urldefrag(text)
    if not url or proposer not in ("", *PROPOSERS):
        raise UsageError(
            f"cannot read the server {text!r}", "for example http://127.0.0.1:8484#none"
        )
    engine = open_remote(Address(url, key))
    if proposer and not engine.kind.switches:
        engine.close()
        raise UsageError(
            f"{engine.kind.title} cannot be told how to draft", f"leave out #{proposer}"
        )
    params = params.replace(proposer=proposer or params.proposer)
    speculation = proposer != "none" if proposer else None
    return RemoteArm(engine, params, speculation=speculation, name=text)


def remote_arms(
    server: Address, params: GenerateParams, *, ignore_eos: bool, count: Count | None = None
) -> list[RemoteArm]:
    """Open an arm for a server; two, plain and drafting, if a request can switch it.

    Raises:
        SpecllamaError: nobody answers there.
        UsageError: it ends its replies before the length that every arm is to write.
    """
    engine = open_remote(server)
    if ignore_eos and "ignore_eos" not in engine.kind.fields:
        engine.close()
        raise UsageError(
            f"{engine.kind.title} ends a reply where its model does, and the other arms go on",
            "compare whole replies: --no-ignore-eos",
        )
    ways = (False, True) if engine.kind.switches else (None,)
    return [RemoteArm(engine, params, speculation=way, count=count) for way in ways]


SETTLES_S = 0.3  # counters that lag behind the replies
Alone = Mapping[tuple[str, float], str]
"""What an arm writes when it is asked nothing else, by prompt and temperature."""


UNKNOWN = "–"


@dataclass(slots=True)
class Wave:
    """Questions of N clients.

    ``draft`` is the drafting behind all of them, None where the server does not report it.
    """

    arm: str
    clients: int
    repetition: int
    seconds: float
    answers: list[RunFigures] = field(default_factory=list)
    draft: Drafted | None = None

    @property
    def tokens(self) -> int | None:
        """Tokens of all answers; None if one was not counted."""
        counts = [answer.tokens for answer in self.answers]
        return sum(counts) if all(counts) else None

    @property
    def tok_per_s(self) -> float | None:
        return share(self.tokens or None, self.seconds)


Beside = Sequence[tuple[Wave, Wave]]


class LoadRow:
    """An arm at N clients, over all repetitions; ratios are to the first arm.

    ``pace`` is that of the long reply which fell furthest behind the same reply of the first arm.
    ``equal`` of ``compared`` replies have the text that the first arm wrote when it was asked
    nothing else.

    Args:
        beside: waves of the first arm, each with this arm's of the same repetition.
    """

    def __init__(self, arm: str, clients: int, beside: Beside, alone: Alone) -> None:
        waves = [wave for _, wave in beside]
        answers = [answer for wave in waves for answer in wave.answers]
        known = [(alone.get((one.prompt, one.temperature)), one.text) for one in answers]
        equal = [was == text for was, text in known if was is not None]
        firsts, wholes = [one.ttft_s for one in answers], [one.total_s for one in answers]
        paces = [pace for usual, wave in beside if (pace := _slowest(wave, usual)) is not None]
        self.arm, self.clients = arm, clients
        self.ratio = as_one([pairs(beside, lambda wave: wave.tok_per_s)])
        self.tok_per_s = self.ratio.speed if self.ratio else None
        self.first_p50_s, self.first_p95_s = percentile(firsts, 0.5), percentile(firsts, 0.95)
        self.reply_p50_s, self.reply_p95_s = percentile(wholes, 0.5), percentile(wholes, 0.95)
        self.accepted = _accepted(waves)
        self.pace = median(paces) if paces else None
        self.equal, self.compared = sum(equal), len(equal)

    def to_dict(self) -> dict[str, Any]:
        names = ("ratio", "low", "high")
        ratio = self.ratio and {name: getattr(self.ratio, name) for name in names}
        return vars(self) | {"ratio": ratio}


def percentile(values: Sequence[float], at: float) -> float | None:
    """Interpolate linearly between closest ranks; return None without values."""
    return float(np.quantile(values, at)) if values else None


COLUMNS: dict[str, Callable[[LoadRow], str]] = {
    "server": lambda row: row.arm,
    "clients": lambda row: str(row.clients),
    "tok/s": lambda row: figure(row.tok_per_s, ".1f"),
    "ratio": lambda row: ratio_words(row.ratio) if row.ratio else UNKNOWN,
    "first token s": lambda r: f"{figure(r.first_p50_s, '.2f')} {figure(r.first_p95_s, '.2f')}",
    "reply s": lambda row: f"{figure(row.reply_p50_s, '.1f')} {figure(row.reply_p95_s, '.1f')}",
    "accepted": lambda row: percent(row.accepted),
    "pace": lambda row: figure(row.pace, ".2f"),
    "same text": lambda row: f"{row.equal} of {row.compared}" if row.compared else UNKNOWN,
}


def waves(
    arms: Sequence[RemoteArm],
    tasks: Sequence[Task],
    count: int,
    clients: Sequence[int],
    repetitions: int,
) -> Iterator[Wave]:
    """Send the same questions to every server, with N clients at a time; each wave takes the next
    ``count``.

    Raises:
        SpecllamaError: a server does not answer, or with an error.
    """
    questions = cycle(tasks)
    for repetition, n in product(range(repetitions), clients):
        asked = list(islice(questions, count))
        for arm in arms:
            yield _wave(arm, n, repetition, asked)


def _wave(arm: RemoteArm, clients: int, repetition: int, asked: Sequence[Task]) -> Wave:
    before, begin = arm.engine.counters(), perf_counter()
    with ThreadPoolExecutor(clients) as pool:
        answers = list(pool.map(lambda task: arm.answer(task, repetition), asked))
    wave = Wave(arm.name, clients, repetition, perf_counter() - begin, answers)
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
