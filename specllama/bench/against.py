"""A comparison of a server's texts, to show if its speculation changes them.

The same greedy and seeded requests go to an arm that speculates and to one that does not, see
``Side``. A greedy request is sent twice, so that the second finds what the first left in a prompt
cache; then all are sent again several at a time. The plain arm is compared with itself in
the same ways: where it does not repeat itself, a difference says nothing about speculation.

Servers answer with texts, so texts are compared, nothing stripped. At the first difference the
plain arm is asked once more, for its logprobs: the lead of its own token over the other one tells a
near-tie from a wrong text.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from specllama.bench.prompts import BenchPrompt
from specllama.errors import EngineDied, SpecllamaError
from specllama.settings.params import GenerateParams, SamplingParams

if TYPE_CHECKING:
    from specllama.remote.answers import Answered, Likely

Way = Literal["first", "again", "beside"]
WAYS: dict[Way, str] = {
    "first": "the first time",
    "again": "repeated at once (prompt cache)",
    "beside": "several at the same time",
}
SPECULATIVE, PLAIN = "speculative", "plain"
_TIE = (
    0.3  # a lead that a server's rounding may close: how far it goes cannot be measured from here
)
_TOP = 10  # rivals that are asked for at a difference
_SHOWN = 40  # characters on both sides of a difference

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
    ask: Callable[[BenchPrompt, GenerateParams], Answered]
    own: bool = False


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

    @property
    def same(self) -> bool:
        return self.outcome == "equal"

    def to_dict(self) -> dict[str, Any]:
        return {"type": "text", **dataclasses.asdict(self)}


Score = Callable[[BenchPrompt, GenerateParams, str, str, str], float | None]
"""The lead of one continuation of a text over another: (prompt, params, shared, plain, other)."""


def written(answer: Answered) -> str:
    """Return the whole reply as one text, its thought in front."""
    return f"{answer.reasoning}\n[answer]\n{answer.text}" if answer.reasoning else answer.text


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
    texts: dict[tuple[int, int], Answered] = {}
    for n, prompt in enumerate(prompts):
        for w, wish in enumerate(wishes):
            params = seeded(wish, n)
            ways: tuple[Way, ...] = ("first",) if wish.sampling.temperature else ("first", "again")
            tried = [_tried(speculative, prompt, params) for _ in ways]
            first = _tried(plain, prompt, params)
            if isinstance(first, SpecllamaError):
                yield _failed(prompt, params, plain, "first", first)
                continue
            texts[n, w] = first
            judged = _Judge(plain, prompt, params, first, score)
            for way, answer in zip(ways, tried, strict=True):
                yield judged(speculative, way, answer)
            if not plain.own and "again" in ways:
                yield judged(plain, "again", _tried(plain, prompt, params))
    greedy = [w for w, wish in enumerate(wishes) if not wish.sampling.temperature]
    for w in greedy if at_once > 1 else ():
        known = [(n, prompt) for n, prompt in enumerate(prompts) if (n, w) in texts]
        for arm in (speculative, plain):
            if not arm.own:
                with ThreadPoolExecutor(at_once) as pool:
                    asked = [
                        pool.submit(_tried, arm, prompt, seeded(wishes[w], n))
                        for n, prompt in known
                    ]
                for (n, prompt), later in zip(known, asked, strict=True):
                    judged = _Judge(plain, prompt, seeded(wishes[w], n), texts[n, w], score)
                    yield judged(arm, "beside", later.result())


def pure(base: GenerateParams, temperature: float, **more: Any) -> GenerateParams:
    """Return a request in which the temperature alone decides the law; a card decides nothing."""
    sampling = SamplingParams(temperature=temperature, top_k=0, top_p=1.0, min_p=0.0)
    return base.replace(sampling=sampling, from_card=(), **more)


def seeded(wish: GenerateParams, n: int) -> GenerateParams:
    return wish if wish.seed is None else wish.replace(seed=wish.seed + n)


def _tried(arm: Side, prompt: BenchPrompt, params: GenerateParams) -> Answered | SpecllamaError:
    """Send a request; return its answer or error. Raise EngineDied if nothing answers."""
    try:
        return arm.ask(prompt, params)
    except EngineDied:
        raise
    except SpecllamaError as error:
        return error


def _failed(
    prompt: BenchPrompt, params: GenerateParams, arm: Side, way: Way, error: SpecllamaError
) -> TextCase:
    return TextCase(
        prompt.id, prompt.slice, params.sampling.temperature, arm.name, way, "failed",
        note=error.message,
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class _Judge:
    """A judge that compares replies to one request with the plain one."""

    plain: Side
    prompt: BenchPrompt
    params: GenerateParams
    first: Answered
    score: Score | None

    def __call__(self, arm: Side, way: Way, answer: Answered | SpecllamaError) -> TextCase:
        if isinstance(answer, SpecllamaError):
            return _failed(self.prompt, self.params, arm, way, answer)
        a, b = written(self.first), written(answer)
        draft = answer.draft
        case = TextCase(
            self.prompt.id, self.prompt.slice, self.params.sampling.temperature, arm.name, way,
            "equal", answer.tokens,
            drafted=None if draft is None else draft.drafted,
            accepted=None if draft is None else draft.accepted,
        )  # fmt: skip
        at = parted(a, b)
        if at is None:
            return case
        outcome: Outcome = "different"
        gap, by = (None, "")
        if a.strip() == b.strip():
            outcome = "white space"
        else:
            gap, by = self._gap(a[:at], a[at:], b[at:])
            if gap is not None and gap <= _TIE:
                outcome = "near-tie"
        return dataclasses.replace(
            case,
            outcome=outcome,
            at=at,
            before=a[max(at - _SHOWN, 0) : at],
            plain=a[at : at + _SHOWN],
            other=b[at : at + _SHOWN],
            gap=gap,
            gap_by=by,
        )

    def _gap(self, shared: str, plain: str, other: str) -> tuple[float | None, str]:
        """Return the gap by the plain arm's logprobs, else by ``score``; seeded draws have none."""
        if self.params.sampling.temperature:
            return None, ""
        if not self.plain.own and not self.first.reasoning:
            asked = _tried(self.plain, self.prompt, self.params.replace(chances=_TOP))
            told: Sequence[Likely] = ()
            if not isinstance(asked, SpecllamaError) and asked.text == self.first.text:
                told = asked.logprobs or ()
            if (gap := lead(told, len(shared), shared + other)) is not None:
                return gap, "its own logprobs"
        if self.score is not None:
            gap = self.score(self.prompt, self.params, shared, plain, other)
            return gap, "our engine" if gap is not None else ""
        return None, ""


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


def spelt(token: str) -> str:
    """Spell a token as text: some servers write white space as byte-level vocabularies do."""
    return token.replace("\u0120", " ").replace("\u010a", "\n")
