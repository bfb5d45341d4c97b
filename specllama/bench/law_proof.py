"""A test, run token by token, of the law that a server draws its unseeded replies from.

Replies are asked for one after another, at one temperature and with no other cut of the law, until
another law is shown or enough tokens were seen, see ``law``. Where it is shown, the plain arm is
tested in the same way: if its replies do not follow the law either, it is the wrong law for this
server, and the proof makes no claim about speculation.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from specllama.bench.against import Side, pure
from specllama.bench.law import ALARM, LawTest
from specllama.bench.plain_law import STRAY, PlainLaw, ReadAs
from specllama.bench.prompts import BenchPrompt
from specllama.errors import EngineDied, SpecllamaError
from specllama.settings.params import GenerateParams

_SURE = math.log(1000.0)
_PATIENCE = 8  # replies in a row that cannot be used


@dataclass(frozen=True, slots=True)
class LawCase:
    """The evidence of one arm's tokens so far.

    Attributes:
        tokens: looked at. replies: they came from. skipped: replies that could not be used.
        found_at: tokens until another law was shown, None where it was not.
        evidence: decimal logarithm of the bets' wealth; largest: of the largest so far.
        by: the bet that won most, a key of ``RIVALS``.
        note: why it ended early.
    """

    arm: str
    temperature: float
    law: str
    read_as: ReadAs
    tokens: int = 0
    replies: int = 0
    skipped: int = 0
    found_at: int | None = None
    evidence: float = 0.0
    largest: float = 0.0
    by: str = ""
    slack: float = 0.0
    stray: float = 0.0
    alarm: float = ALARM
    note: str = ""
    over: bool = False

    @property
    def shown(self) -> bool:
        return self.found_at is not None

    def to_dict(self) -> dict[str, Any]:
        return {"type": "law", **dataclasses.asdict(self)}


class _Repeats:
    """A detector of a server that repeats replies too unlikely for chance: another bet, see
    ``law``, on a reply that was seen before."""

    def __init__(self) -> None:
        self._known: dict[str, dict[str, float]] = {}
        self._wealth = 0.0

    @property
    def fixed(self) -> bool:
        return self._wealth >= _SURE

    def see(self, prompt: str, text: str, nats: float) -> bool:
        """True if this reply must not be counted."""
        known = self._known.setdefault(prompt, {})
        chance, again = min(sum(known.values()), 1.0), text in known
        if chance:
            self._wealth += math.log(0.5 + 0.5 * again / chance)
        known[text] = max(math.exp(-nats), 1e-300)
        return again and (self.fixed or nats >= _SURE)


def follow_law(
    arm: Side,
    law: PlainLaw,
    prompts: Sequence[BenchPrompt],
    wish: GenerateParams,
    *,
    most: int,
    seed: int = 0,
) -> Iterator[LawCase]:
    """Read ``most`` tokens at most; yield a case after each reply, the last one is ``over``.

    Raises:
        EngineDied: the server is gone.
    """
    temperature = wish.sampling.temperature
    params = pure(wish, temperature, seed=None, chances=law.top)
    case = LawCase(arm.name, temperature, law.what, "tokens", slack=law.slack / temperature)
    test, repeats = LawTest(slack=case.slack, seed=seed), _Repeats()
    idle = 0
    for prompt in itertools.cycle(prompts):
        try:
            answer = arm.ask(prompt, params)
            reading = law.read(prompt, answer, temperature)
            why = reading.why
            if not why and not reading.spots:
                why = "the reply is empty"
            if not why and repeats.see(prompt.id, answer.text, reading.nats):
                why = "the server writes the same reply again, as from a fixed seed"
        except EngineDied:
            raise
        except SpecllamaError as error:
            why = error.message
        if why:
            idle += 1
            case = dataclasses.replace(case, skipped=case.skipped + 1, note=why)
            if idle >= min(_PATIENCE, 2 * len(prompts)) or repeats.fixed:
                break
            continue
        idle = 0
        stray = STRAY if reading.read_as == "text" else 0.0
        if stray:
            case = dataclasses.replace(case, read_as="text", stray=stray)
        for spot in reading.spots:
            if test.see(spot, stray) or test.tokens >= most:
                break
        case = dataclasses.replace(
            case,
            tokens=test.tokens,
            replies=case.replies + 1,
            found_at=test.found_at,
            evidence=test.now / math.log(10.0),
            largest=test.most / math.log(10.0),
            by=test.by,
            note="",
        )
        if case.shown or test.tokens >= most:
            break
        yield case
    yield dataclasses.replace(case, over=True)
