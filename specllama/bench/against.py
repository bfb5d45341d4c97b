"""A comparison of a server's replies, to show if its speculation changes them.

The same greedy and seeded requests go to an arm that speculates and to one that does not, see
``Side``. A greedy request is sent twice, so that the second finds what the first left in a prompt
cache; then all are sent again several at a time. The plain arm is compared with itself in
the same ways: where it does not repeat itself, a difference says nothing about speculation.

Servers answer with texts, so texts are compared, nothing stripped. At the first difference the
plain arm is asked once more, for its logprobs: the lead of its own token over the other one tells a
near-tie from a wrong text.

Unseeded replies are asked for one after another, at one temperature and with no other cut of the
law, until another law is shown or enough tokens were seen, see ``law``. Where it is shown, the
plain arm is tested in the same way: if its replies do not follow the law either, it is the wrong
law for this server, and the proof makes no claim about speculation.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from itertools import cycle
from typing import TYPE_CHECKING, Any, Literal

from specllama.bench.experiment import compare
from specllama.bench.law import ALARM, LawTest
from specllama.bench.plain_law import STRAY, PlainLaw, ReadAs, ReplyReading, spelt, written
from specllama.bench.prompts import BenchPrompt
from specllama.errors import EngineDied, SpecllamaError
from specllama.settings.params import GenerateParams, SamplingParams

if TYPE_CHECKING:
    from specllama.remote.answers import Likely
    from specllama.remote.kinds.kind import Heard

    Tried = Heard | SpecllamaError

Way = Literal["first", "again", "beside"]
WAYS: dict[Way, str] = {
    "first": "the first time",
    "again": "repeated at once (prompt cache)",
    "beside": "several at the same time",
}
SPECULATIVE, PLAIN = "speculative", "plain"
# a lead that a server's rounding may close: how far it goes cannot be measured from here
_TIE = 0.3
_TOP = 10  # rivals that are asked for at a difference
_SHOWN = 40  # characters on both sides of a difference
_SURE = math.log(1000.0)
_PATIENCE = 8  # replies in a row that cannot be used

Asked = tuple[BenchPrompt, GenerateParams]
Outcome = Literal["equal", "white space", "near-tie", "different", "failed"]


@dataclass(frozen=True, slots=True)
class Side:
    """One side of the comparison.

    Attributes:
        ask: the reply to a prompt; raises SpecllamaError. Several threads may call it.
        own: it is our own engine; it is asked once for each text and never beside others.
        what: where its replies come from, in words.
    """

    name: str
    what: str
    ask: Callable[[BenchPrompt, GenerateParams], Heard]
    own: bool = False

    def tried(self, asked: Asked, repetition: int = 0) -> Heard | SpecllamaError:
        """Send a request; return its answer or error. Raise EngineDied if nothing answers."""
        try:
            return self.ask(*asked)
        except EngineDied:
            raise
        except SpecllamaError as error:
            return error


def pure(base: GenerateParams, temperature: float, **more: Any) -> GenerateParams:
    """Return a request in which the temperature alone decides the law; a card decides nothing."""
    sampling = SamplingParams(temperature=temperature, top_k=0, top_p=1.0, min_p=0.0)
    return base.replace(sampling=sampling, from_card=(), **more)


# ---- texts


@dataclass(frozen=True, slots=True)
class TextCase:
    """A text compared with the plain arm's first one.

    Attributes:
        at: the first character that differs, None of equal texts.
        before, plain, other: the text around it: what both share, and how each goes on.
        gap: the lead in logprob of the plain arm's token there; None where it is not known.
        gap_by: who scored it.
        note: why it failed.
        drafted, accepted: of the reply, None where the server does not say.
    """

    prompt: str
    slice: str
    temperature: float
    arm: str
    way: Way
    outcome: Outcome
    tokens: int | None = None
    at: int | None = None
    before: str = ""
    plain: str = ""
    other: str = ""
    gap: float | None = None
    gap_by: str = ""
    note: str = ""
    drafted: int | None = None
    accepted: int | None = None

    @staticmethod
    def of(arm: str, way: Way, prompt: BenchPrompt, params: GenerateParams, got: Tried) -> TextCase:
        """Return the case of an answer that equals the plain one, or of one that failed."""
        case = TextCase(prompt.id, prompt.slice, params.sampling.temperature, arm, way, "equal")
        if isinstance(got, SpecllamaError):
            return replace(case, outcome="failed", note=got.message)
        if (draft := got.draft) is not None:
            case = replace(case, drafted=draft.drafted, accepted=draft.accepted)
        return replace(case, tokens=got.tokens)

    @property
    def same(self) -> bool:
        return self.outcome == "equal"

    def to_dict(self) -> dict[str, Any]:
        return {"type": "text", **asdict(self)}


Score = Callable[[BenchPrompt, GenerateParams, str, str, str], float | None]
"""The lead of one continuation of a text over another: (prompt, params, shared, plain, other)."""


def parted(a: str, b: str) -> int | None:
    """Return where two texts first differ; None if they are equal."""
    if a == b:
        return None
    shorter = min(len(a), len(b))
    return next((i for i in range(shorter) if a[i] != b[i]), shorter)


def compare_texts(
    speculative: Side,
    plain: Side,
    prompts: Sequence[BenchPrompt],
    wishes: Sequence[GenerateParams],
    *,
    at_once: int = 4,
    score: Score | None = None,
) -> Iterator[TextCase]:
    """Compare both arms with the plain arm's first texts; yield cases as they come.

    The speculative arm is asked first, so that its first texts are written before the plain arm has
    left anything in a cache that both share. Drawn texts are compared once only: few engines draw
    alike with and without speculation.

    Args:
        wishes: one for each temperature; prompt number n is drawn with its seed + n.
        at_once: requests at the same time; below 2 none are.
        score: asked for the gap where the server gives no logprobs.

    Raises:
        EngineDied: a server is gone; everything that was yielded stands.
    """
    asked: list[Asked] = [
        (prompt, wish if wish.seed is None else wish.replace(seed=wish.seed + n))
        for n, prompt in enumerate(prompts)
        for wish in wishes
    ]
    greedy = [one for one in asked if not one[1].sampling.temperature]
    drawn = [one for one in asked if one[1].sampling.temperature]
    again: list[tuple[Side, Way]] = [(speculative, "again")]
    again += [] if plain.own else [(plain, "again")]
    known: list[tuple[Asked, Heard]] = []

    def judged(side: Side, way: Way, one: Asked, answer: Tried, text: Tried) -> TextCase:
        case = TextCase.of(side.name, way, *one, answer)
        if isinstance(answer, SpecllamaError) or isinstance(text, SpecllamaError):
            return case
        a, b = written(text), written(answer)
        if (at := parted(a, b)) is None:
            return case
        outcome: Outcome = "white space"
        gap, by = None, ""
        if a.strip() != b.strip():
            gap, by = _gap(plain, *one, text, (a[:at], a[at:], b[at:]), score)
            outcome = "near-tie" if gap is not None and gap <= _TIE else "different"
        around = slice(at, at + _SHOWN)
        case = replace(case, before=a[max(at - _SHOWN, 0) : at], plain=a[around], other=b[around])
        return replace(case, outcome=outcome, at=at, gap=gap, gap_by=by)

    for some, more in ((greedy, again), (drawn, [])):
        ways = [(speculative, "first"), *more[:1], (plain, "first"), *more[1:]]
        rows = compare([side.tried for side, _ in ways], some, in_turn=False)
        for one, row in zip(some, rows, strict=True):
            answers = dict(zip(ways, row, strict=True))
            text = answers.pop((plain, "first"))
            if isinstance(text, SpecllamaError):
                yield judged(plain, "first", one, text, text)
                continue
            known += [(one, text)] if more else []
            for (side, way), answer in answers.items():
                yield judged(side, way, one, answer, text)
    for side in (speculative, plain):
        if at_once < 2 or side.own:
            continue
        with ThreadPoolExecutor(at_once) as pool:
            answered = pool.map(side.tried, [one for one, _ in known])
        for (one, text), answer in zip(known, answered, strict=True):
            yield judged(side, "beside", one, answer, text)


def _gap(
    plain: Side,
    prompt: BenchPrompt,
    params: GenerateParams,
    first: Heard,
    parts: tuple[str, str, str],
    score: Score | None,
) -> tuple[float | None, str]:
    """Return the gap by the plain arm's logprobs, else by ``score``; seeded draws have none.

    Args:
        parts: what both texts share, and how each goes on.
    """
    shared, _, other = parts
    if params.sampling.temperature:
        return None, ""
    if not plain.own and not first.reasoning:
        asked = plain.tried((prompt, params.replace(chances=_TOP)))
        told: Sequence[Likely] = ()
        if not isinstance(asked, SpecllamaError) and asked.text == first.text:
            told = asked.logprobs or ()
        if (gap := lead(told, len(shared), shared + other)) is not None:
            return gap, "its own logprobs"
    gap = None if score is None else score(prompt, params, *parts)
    return gap, "our engine" if gap is not None else ""


def lead(told: Sequence[Likely], at: int, other: str) -> float | None:
    """Return the lead of the token that covers character ``at`` over the likeliest one that
    continues ``other``; None if no listed token is one."""
    begin = 0
    for one in told:
        end = begin + len(spelt(one.text))
        if end > at:
            rest = other[begin:]
            rivals = [log for text, log in one.top if text and rest.startswith(spelt(text))]
            return max(one.logprob - max(rivals), 0.0) if rivals else None
        begin = end
    return None


# ---- the law


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
        return {"type": "law", **asdict(self)}


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
    arm: Side, law: PlainLaw, prompts: Sequence[BenchPrompt], wish: GenerateParams, *, most: int
) -> Iterator[LawCase]:
    """Read ``most`` tokens at most; yield a case after each reply, the last one is ``over``.

    Raises:
        EngineDied: the server is gone.
    """
    temperature = wish.sampling.temperature
    params = pure(wish, temperature, seed=None, chances=law.top)
    case = LawCase(arm.name, temperature, law.what, "tokens", slack=law.slack / temperature)
    test, repeats = LawTest(slack=case.slack), _Repeats()
    idle = 0

    def heard(asked: Asked, repetition: int) -> tuple[str, ReplyReading]:
        try:
            answer = arm.ask(*asked)
            return answer.text, law.read(asked[0], answer, temperature)
        except EngineDied:
            raise
        except SpecllamaError as error:
            return "", ReplyReading(why=error.message)

    asked = [(prompt, params) for prompt in prompts]
    rounds = compare([heard], asked, repetitions=2 * most)  # which is more than it takes
    for prompt, ((text, reading),) in zip(cycle(prompts), rounds, strict=False):
        why = reading.why or ("" if reading.spots else "the reply is empty")
        if not why and repeats.see(prompt.id, text, reading.nats):
            why = "the server writes the same reply again, as from a fixed seed"
        if why:
            idle += 1
            case = replace(case, skipped=case.skipped + 1, note=why)
            if idle >= min(_PATIENCE, 2 * len(prompts)) or repeats.fixed:
                break
            continue
        idle = 0
        stray = STRAY if reading.read_as == "text" else 0.0
        if stray:
            case = replace(case, read_as="text", stray=stray)
        for spot in reading.spots:
            if test.see(spot, stray) or test.tokens >= most:
                break
        case = replace(
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
    yield replace(case, over=True)
