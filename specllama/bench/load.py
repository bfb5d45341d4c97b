"""Servers under load: clients that ask one after another, over OpenAI's chat completions.

Arms take turns within every repetition, and only what was measured side by side is compared, since
machines drift. Every arm gets the same prompts with the same seeds, every wave others, as long as
there are some: what a server has in its cache is not measured again.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from itertools import product
from statistics import median
from time import perf_counter
from typing import Any
from urllib.parse import urldefrag, urlsplit

import httpx2

from specllama.bench.arms import percentile
from specllama.bench.paired import Compared, as_one
from specllama.bench.processes import cpu_seconds, server_of
from specllama.errors import EngineError, UsageError
from specllama.settings.params import PROPOSERS

TIMEOUT_S = 600.0
_LONG = 24  # tokens of a reply whose pace tells something


@dataclass(frozen=True, slots=True)
class Target:
    """A server, and how it is to draft ("" leaves that to it)."""

    url: str
    proposer: str = ""

    @staticmethod
    def parse(text: str) -> Target:
        """``URL`` or ``URL#METHOD``.

        Raises:
            UsageError: it is something else.
        """
        url, proposer = urldefrag(text)
        if urlsplit(url).scheme not in ("http", "https") or proposer not in ("", *PROPOSERS):
            raise UsageError(
                f"cannot read the server {text!r}", "for example http://127.0.0.1:8484#none"
            )
        return Target(url.rstrip("/"), proposer)

    @property
    def name(self) -> str:
        return f"{self.url}#{self.proposer}" if self.proposer else self.url


@dataclass(frozen=True, slots=True)
class Question:
    """One request: messages, and the fields that decide its text."""

    messages: Sequence[dict[str, str]]
    seed: int
    temperature: float
    max_tokens: int


@dataclass(slots=True)
class Answer:
    """What came: the text, its tokens, and when, in seconds since it was asked for."""

    question: int
    text: str = ""
    tokens: int = 0
    first_s: float = 0.0
    total_s: float = 0.0
    near_ties: int = 0

    @property
    def speed(self) -> float | None:
        """Tokens per second after the first."""
        took = self.total_s - self.first_s
        return (self.tokens - 1) / took if self.tokens > 1 and took > 0 else None


@dataclass(slots=True)
class Wave:
    """Questions asked by N clients; ``cpu_s`` is the server's processor time."""

    arm: str
    clients: int
    repetition: int
    seconds: float
    answers: list[Answer] = field(default_factory=list)
    cpu_s: float | None = None

    @property
    def tokens(self) -> int:
        return sum(answer.tokens for answer in self.answers)

    @property
    def tok_per_s(self) -> float:
        return self.tokens / self.seconds

    @property
    def cpu_ms(self) -> float | None:
        """Of a token."""
        return None if self.cpu_s is None else self.cpu_s * 1e3 / self.tokens


@dataclass(frozen=True, slots=True)
class LoadRow:
    """An arm at N clients, over all repetitions; ratios are to the first arm.

    ``cpu_ms`` is of a token, its ratio above 1 where less is needed. ``pace`` is that of the long
    reply which fell furthest behind the same reply of the first arm. ``equal`` of ``compared``
    replies have the text that the first arm wrote when it was asked nothing else.
    """

    arm: str
    clients: int
    tok_per_s: float
    ratio: Compared
    cpu_ms: float | None
    cpu_ratio: Compared | None
    first_p50_s: float | None
    first_p95_s: float | None
    pace: float | None
    equal: int
    compared: int
    near_ties: int

    def to_dict(self) -> dict[str, Any]:
        ratios = {"ratio": self.ratio, "cpu_ratio": self.cpu_ratio}
        told = {
            name: one and {"ratio": one.ratio, "low": one.low, "high": one.high}
            for name, one in ratios.items()
        }
        return asdict(self) | told


class ClientLoad:
    """Clients of some servers.

    Args:
        questions: of which every wave takes the next ``count``.
        key: of the servers; "" for none.

    Its methods raise EngineError where a server does not answer, or with an error.
    """

    def __init__(
        self, targets: Sequence[Target], questions: Sequence[Question], count: int, key: str = ""
    ) -> None:
        self._targets, self._questions, self._count = targets, questions, count
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        # servers close connections that are idle
        limits = httpx2.Limits(max_connections=None, max_keepalive_connections=0)
        self._http = httpx2.Client(timeout=TIMEOUT_S, headers=headers, limits=limits)
        self._processes = {target: server_of(target.url) for target in targets}

    def __enter__(self) -> ClientLoad:
        return self

    def __exit__(self, *_: object) -> None:
        self._http.close()

    def waves(self, clients: Sequence[int], repetitions: int) -> Iterator[Wave]:
        """Ask every server the same questions, with N clients at a time."""
        all_, count = len(self._questions), self._count
        for nth, (repetition, n) in enumerate(product(range(repetitions), clients)):
            asked = [i % all_ for i in range(nth * count, (nth + 1) * count)]
            for target in self._targets:
                yield self._wave(target, n, repetition, asked)

    def _wave(self, target: Target, clients: int, repetition: int, asked: Sequence[int]) -> Wave:
        process = self._processes[target]
        spent = None if process is None else cpu_seconds(process)
        begin = perf_counter()
        with ThreadPoolExecutor(clients) as pool:
            answers = list(pool.map(lambda i: self._ask(target, i), asked))
        took = perf_counter() - begin
        if process is not None and spent is not None:
            spent = cpu_seconds(process) - spent
        return Wave(target.name, clients, repetition, took, answers, spent)

    def alone(self, count: int) -> dict[int, str]:
        """What the first server answers to the first questions, one after another."""
        asked = range(min(count, len(self._questions)))
        return {i: self._ask(self._targets[0], i).text for i in asked}

    def _ask(self, target: Target, index: int) -> Answer:
        question = self._questions[index]
        body: dict[str, Any] = {
            "model": "default",
            "messages": question.messages,
            "seed": question.seed,
            "temperature": question.temperature,
            "max_tokens": question.max_tokens,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if target.proposer:
            body["specllama"] = {"proposer": target.proposer}
        answer, begin = Answer(index), perf_counter()
        try:
            url = f"{target.url}/v1/chat/completions"
            with self._http.stream("POST", url, json=body) as reply:
                if reply.status_code != 200:
                    said = reply.read().decode("utf-8", "replace")[:300]
                    raise EngineError(f"{target.url} answers {reply.status_code}: {said}")
                for chunk in _chunks(reply.iter_lines()):
                    if "error" in chunk:
                        raise EngineError(f"{target.url}: {chunk['error']}")
                    for choice in chunk.get("choices", ()):
                        delta = choice.get("delta", {})
                        text = (delta.get("reasoning_content") or "") + (delta.get("content") or "")
                        if text and not answer.text:
                            answer.first_s = perf_counter() - begin
                        answer.text += text
                    if usage := chunk.get("usage"):
                        answer.tokens = int(usage["completion_tokens"])
                        answer.near_ties = int(chunk.get("timings", {}).get("near_ties", 0))
        except httpx2.HTTPError as error:
            raise EngineError(f"{target.url} does not answer: {error}") from None
        if not answer.tokens:
            raise EngineError(f"{target.url} does not say how many tokens it wrote")
        answer.total_s = perf_counter() - begin
        return answer


def _chunks(lines: Iterator[str]) -> Iterator[dict[str, Any]]:
    for line in lines:
        if line.startswith("data: {"):
            yield json.loads(line[6:])


def rows(waves: Sequence[Wave], alone: Mapping[int, str]) -> list[LoadRow]:
    """The figures of every arm and number of clients."""
    first = waves[0].arm
    base = {(wave.clients, wave.repetition): wave for wave in waves if wave.arm == first}
    out: list[LoadRow] = []
    for arm, clients in dict.fromkeys((wave.arm, wave.clients) for wave in waves):
        mine = [wave for wave in waves if (wave.arm, wave.clients) == (arm, clients)]
        beside = [(wave, base[clients, wave.repetition]) for wave in mine]
        speed = as_one([[(usual.tok_per_s, wave.tok_per_s) for wave, usual in beside]])
        assert speed is not None
        answers = [answer for wave in mine for answer in wave.answers]
        compared = [answer for answer in answers if answer.question in alone]
        firsts = [answer.first_s for answer in answers]
        cpu = [wave.cpu_ms for wave in mine if wave.cpu_ms is not None]
        cheaper = [(it.cpu_ms, usual.cpu_ms) for it, usual in beside if usual.cpu_ms and it.cpu_ms]
        paces = [pace for pair in beside if (pace := _slowest(*pair)) is not None]
        out.append(
            LoadRow(
                arm,
                clients,
                tok_per_s=speed.speed,
                ratio=speed,
                cpu_ms=median(cpu) if cpu else None,
                cpu_ratio=as_one([cheaper]),
                first_p50_s=percentile(firsts, 0.5),
                first_p95_s=percentile(firsts, 0.95),
                pace=median(paces) if paces else None,
                equal=sum(answer.text == alone[answer.question] for answer in compared),
                compared=len(compared),
                near_ties=sum(answer.near_ties for answer in answers),
            )
        )
    return out


def _slowest(wave: Wave, usual: Wave) -> float | None:
    """The smallest ratio of the speeds of one long reply in two waves."""
    speeds = {answer.question: answer.speed for answer in usual.answers}
    return min(
        (answer.speed / was for answer in wave.answers
         if answer.tokens >= _LONG and answer.speed and (was := speeds.get(answer.question))),
        default=None,
    )  # fmt: skip
