"""Servers under load: clients that ask one after another, over OpenAI's chat completions.

Arms take turns within every repetition, and only what was measured side by side is compared, since
machines drift. Every arm gets the same prompts with the same seeds.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from statistics import median
from time import perf_counter
from typing import Any
from urllib.parse import urldefrag, urlsplit

import httpx2

from specllama.bench.arms import percentile
from specllama.errors import EngineError, UsageError
from specllama.params import PROPOSERS

TIMEOUT_S = 600.0


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
        """Tokens per second behind the first."""
        took = self.total_s - self.first_s
        return (self.tokens - 1) / took if self.tokens > 1 and took > 0 else None


@dataclass(slots=True)
class Wave:
    """All questions, by so many clients."""

    arm: str
    clients: int
    repetition: int
    seconds: float
    answers: list[Answer] = field(default_factory=list)

    @property
    def tok_per_s(self) -> float:
        return sum(answer.tokens for answer in self.answers) / self.seconds


@dataclass(frozen=True, slots=True)
class Row:
    """An arm with so many clients, over all repetitions; ratios are to the first arm.

    ``equal`` of ``compared`` replies have the text that the first arm with one client, or with the
    fewest, wrote at the same place; near-ties apart, all of a server that keeps its word.
    """

    arm: str
    clients: int
    tok_per_s: float
    ratio: float
    ratio_low: float
    ratio_high: float
    first_p50_s: float | None
    first_p95_s: float | None
    slowest: float | None
    equal: int
    near_ties: int
    compared: int

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def load(
    targets: Sequence[Target],
    questions: Sequence[Question],
    *,
    clients: Sequence[int],
    repetitions: int,
    key: str = "",
    progress: Callable[[Wave], None] = lambda wave: None,
) -> list[Wave]:
    """Ask every server everything, by so many clients at a time.

    Raises:
        EngineError: a server does not answer, or with an error.
    """
    waves: list[Wave] = []
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    limits = httpx2.Limits(max_connections=None, max_keepalive_connections=0)  # servers close them
    with httpx2.Client(timeout=TIMEOUT_S, headers=headers, limits=limits) as http:
        for repetition in range(repetitions):
            for n in clients:
                for target in targets:
                    begin = perf_counter()
                    with ThreadPoolExecutor(n) as pool:
                        answers = list(
                            pool.map(lambda i, to=target: _ask(http, to, i, questions[i]),
                                     range(len(questions)))
                        )  # fmt: skip
                    took = perf_counter() - begin
                    waves.append(Wave(target.name, n, repetition, took, answers))
                    progress(waves[-1])
    return waves


def _ask(http: httpx2.Client, target: Target, index: int, question: Question) -> Answer:
    body: dict[str, Any] = {
        "model": "default",
        "messages": question.messages,
        "seed": question.seed,
        "temperature": question.temperature,
        "max_tokens": question.max_tokens,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    if target.proposer:
        body["specllama"] = {"proposer": target.proposer}
    answer, begin = Answer(index), perf_counter()
    try:
        url = f"{target.url}/v1/chat/completions"
        with http.stream("POST", url, json=body) as reply:
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
    answer.total_s = perf_counter() - begin
    return answer


def _chunks(lines: Iterator[str]) -> Iterator[dict[str, Any]]:
    for line in lines:
        if line.startswith("data: {"):
            yield json.loads(line[6:])


def rows(waves: Sequence[Wave]) -> list[Row]:
    """The figures of every arm and number of clients."""
    first = waves[0].arm
    texts = {answer.question: answer.text for answer in waves[0].answers}
    base = {(w.clients, w.repetition): w.tok_per_s for w in waves if w.arm == first}
    out: list[Row] = []
    for arm, clients in dict.fromkeys((wave.arm, wave.clients) for wave in waves):
        mine = [wave for wave in waves if (wave.arm, wave.clients) == (arm, clients)]
        answers = [answer for wave in mine for answer in wave.answers]
        ratios = [wave.tok_per_s / base[clients, wave.repetition] for wave in mine]
        firsts = [answer.first_s for answer in answers]
        out.append(
            Row(
                arm,
                clients,
                tok_per_s=median(wave.tok_per_s for wave in mine),
                ratio=median(ratios),
                ratio_low=min(ratios),
                ratio_high=max(ratios),
                first_p50_s=percentile(firsts, 0.5),
                first_p95_s=percentile(firsts, 0.95),
                slowest=min(filter(None, (answer.speed for answer in answers)), default=None),
                equal=sum(answer.text == texts[answer.question] for answer in answers),
                near_ties=sum(answer.near_ties for answer in answers),
                compared=len(answers),
            )
        )
    return out
