"""Servers under load: several clients that send one request after another.

    python tests/lab/load_servers.py URL[#METHOD] ... [--clients N] [-n 16] [-r 3] [--json]

Servers take turns within every repetition, and only what was measured side by side is compared,
since machines drift. Every server gets the same prompts with the same seeds, every wave others, as
long as there are some: what a server has in its cache is not measured again.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import cycle, islice, product
from pathlib import Path
from statistics import median
from time import perf_counter, sleep
from typing import Any
from urllib.parse import urldefrag

import click

from specllama.bench.experiment import RunFigures, Task, tasks_of
from specllama.bench.outcome import as_one, pairs, ratio_words
from specllama.bench.prompts import load_prompts
from specllama.bench.remote_arm import LONG, RemoteArm
from specllama.bench.report import percentile
from specllama.cli import diagnostics
from specllama.cli.listing import Column, json_option, listing
from specllama.cli.options import (
    GroupedCommand,
    length_option,
    number_option,
    prompts_option,
    seed_option,
)
from specllama.errors import UsageError
from specllama.rates import share, total
from specllama.remote.address import KEY_VARIABLE, Address
from specllama.remote.answers import Drafted
from specllama.remote.remote_engine import open_remote
from specllama.settings.params import PROPOSERS, GenerateParams
from specllama.text import figure, percent

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
        answers = list(pool.map(lambda task: arm.run(task, repetition, alone=False), asked))
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


EPILOG = """\b
Examples:
  python tests/lab/load_servers.py http://127.0.0.1:8484                   one and four clients
  python tests/lab/load_servers.py http://127.0.0.1:8484#none http://127.0.0.1:8484
                                               with and without drafting
  python tests/lab/load_servers.py http://127.0.0.1:8484 http://127.0.0.1:8080 --clients 8
                                               beside another server (llama-server, vLLM, ...)
"""


@click.command("load", cls=GroupedCommand, epilog=EPILOG)
@click.argument("servers", nargs=-1, required=True, metavar="URL[#METHOD]…")
@click.option(
    "--clients", multiple=True, type=click.IntRange(1, 256), metavar="N",
    help="Number of clients at the same time; repeatable. Default: 1 and 4.",
)  # fmt: skip
@prompts_option
@number_option("-n", "--count", default=16, help="Number of requests in a wave.")
@length_option(64, least=2)
@number_option("-r", "--repetitions", default=3, help="Number of times that each wave is measured.")
@number_option("--alone", default=8, least=0,
               help="Number of requests that the first server gets again, one by one.")  # fmt: skip
@click.option("--temperature", type=click.FloatRange(0), default=0.0, show_default=True,
              help="Sampling temperature of the replies.")  # fmt: skip
@seed_option
@json_option
def load_command(
    servers: tuple[str, ...],
    clients: tuple[int, ...],
    prompts: Path | None,
    count: int,
    max_tokens: int,
    repetitions: int,
    alone: int,
    temperature: float,
    seed: int,
    as_json: bool,
) -> None:
    """Time running servers while several clients ask at once.

    The servers get the same requests, in turns, and each wave gets other requests while there are
    some. specllama recognises the engine. If a request can switch drafting, #none and #auto do so.

    \b
    ratio        tokens per second over those of the first server, with as many clients, and an
                 interval that holds the ratio 19 of 20 times, from how much repetitions differ
    first token  time to the first token, for half and for 95 % of the requests; reply: to the end
    accepted     share of the drafted tokens, if the server reports it in its replies, or counts it
                 while it has no other requests
    pace         speed of the reply that fell furthest behind the first server's same reply
    same text    replies that equal what the first server writes for one client alone (--alone)
    """
    tasks = tasks_of(load_prompts(prompts), (temperature,), max_tokens, seed)
    with ExitStack() as stack:
        arms = []
        for text in servers:
            arms.append(load_arm(text, GenerateParams(), os.environ.get(KEY_VARIABLE, "")))
            stack.callback(arms[-1].close)
        told = []
        for wave in waves(arms, tasks, count, clients or (1, 4), repetitions):
            told.append(wave)
            if not as_json:
                speed = figure(wave.tok_per_s, ".1f")
                diagnostics.note(f"{wave.arm}, {wave.clients} clients: {speed} tok/s")
        answers = [arms[0].run(task, 0, alone=False) for task in tasks[:alone]]
        found = rows(told, {(one.prompt, one.temperature): one.text for one in answers})
    columns = [Column(head, cell, right=i > 0) for i, (head, cell) in enumerate(COLUMNS.items())]
    listing(as_json, "rows", found, columns, to_dict=LoadRow.to_dict)


if __name__ == "__main__":
    load_command()
