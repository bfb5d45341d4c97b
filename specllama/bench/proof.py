"""Losslessness, proved on this machine: speculative output against plain decoding, token by token.

Under ``match`` the two must be equal. Where every pass of the speculative run was of a kind that
was measured to equal single steps bit for bit, any difference is a failure. Elsewhere a near-tie
may flip: the first difference is scored again and its gap is shown, and a gap larger than what
rounding was measured to close on this file here is a failure.

The plain text of a prompt and temperature is computed once and serves every proposer and width.

What a prediction is drafted from is the plain reply with a word changed here and there.

Nor may a text depend on what was here before, so every comparison is made three ways: cold; after
a stranger's prompt, which begins alike and is read in other parts; and as the next turn after its
own former one, against the same turn of a plain conversation. The two warm ways are short replies:
where passes are bit-exact their logprobs are compared as well, in which a single wrong cell shows
at once.

Or replies are written side by side: requests arrive at random and share passes, cells and the
beginnings of their prompts; some are cancelled, and what they wrote until then has to be the
beginning of what they write alone.
"""

from __future__ import annotations

import dataclasses
import math
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import cycle, islice, product
from typing import Any, Literal

import numpy as np

from specllama.arrays import IntArray
from specllama.backend.kernels import TILE
from specllama.bench.experiment import edited
from specllama.bench.prompts import BenchPrompt
from specllama.bench.rounding import rounding, rows_of
from specllama.engine.engine import Engine
from specllama.errors import Cancelled, CannotLoad, DoesNotFit
from specllama.events import Finished
from specllama.settings.params import GenerateParams, WindowKind
from specllama.speculative.noise import exp_noise
from specllama.text import spelled
from specllama.text_history import common_prefix
from specllama.told import Told

_SHORT = 8  # tokens of a warm reply, at most
_ARRIVES = 0.3  # chance of a further request between two steps
_LEAVES = 0.002

Way = Literal["cold", "behind", "turns", "beside"]
"""Where a reply was written: in an empty cache or after the same prompt (cold), after a
stranger's prompt, after its own former turn, alongside others."""
Asked = tuple[BenchPrompt, GenerateParams]


@dataclass(frozen=True, slots=True)
class Difference:
    """The first position where two runs part.

    ``gap`` is the difference of the two tokens' scores in one fixed evaluation, in logits before
    the temperature: perturbed by the common noise where tokens are drawn. Where the token is the
    same and only its logprob differs, it is the difference of the two logprobs.
    ``bound`` is the largest gap that rounding explains, see ``rounding``.
    """

    position: int
    plain_token: int
    spec_token: int
    plain_text: str
    spec_text: str
    gap: float
    bound: float = 0.0

    @property
    def explained(self) -> bool:
        return self.gap <= self.bound

    @property
    def of_logprobs(self) -> bool:
        return self.plain_token == self.spec_token


@dataclass(frozen=True, slots=True)
class ProofReply:
    """A reply.

    Attributes:
        logprobs: of its tokens, before any sampler.
        exact: every row of it was computed as a single step after a fresh prompt would have.
        position: of its first token in the noise.
        turn: what it replies to, where that is more than the prompt.
    """

    reply: Finished
    logprobs: tuple[float, ...]
    exact: bool
    position: int
    turn: tuple[int, ...] = ()

    @staticmethod
    def of(told: Told, exact: bool, turn: tuple[int, ...] = ()) -> ProofReply:
        logprobs = (chance.logprob for done in told.rounds for chance in done.chances)
        position = 0 if told.started is None else told.started.position
        return ProofReply(told.end, tuple(logprobs), exact, position, turn)

    def cut(self, n: int) -> ProofReply:
        """Return its first ``n`` tokens, without the text."""
        reply = dataclasses.replace(self.reply, token_ids=self.reply.token_ids[:n], text="")
        return dataclasses.replace(self, reply=reply, logprobs=self.logprobs[:n])


@dataclass(frozen=True, slots=True)
class Case:
    """One comparison. ``bitwise``: no pass of it can have rounded differently from single steps."""

    prompt: str
    slice: str
    proposer: str
    temperature: float
    draft_max: int
    seed: int
    prompt_n: int
    tokens: int
    drafted: int
    accepted: int
    rounds: int
    law_holds: bool
    bitwise: bool
    way: Way
    difference: Difference | None

    @property
    def identical(self) -> bool:
        return self.difference is None

    @property
    def ok(self) -> bool:
        explained = self.difference is None or (not self.bitwise and self.difference.explained)
        return self.law_holds and explained

    def to_dict(self) -> dict[str, Any]:
        return {"type": "case", **dataclasses.asdict(self), "ok": self.ok}


def available(engine: Engine, wanted: Sequence[str]) -> tuple[tuple[str, ...], dict[str, str]]:
    """Return the wanted methods that this engine has, and why it lacks each of the others."""
    known = {m.name: m.reason for m in engine.info.methods}
    have = tuple(p for p in wanted if p == "auto" or p in engine.drafters)
    missing = {p: known.get(p) or "unknown to this engine" for p in wanted if p not in have}
    return have, missing


def prove(
    engine: Engine,
    prompts: Iterable[BenchPrompt],
    *,
    proposers: Sequence[str],
    temperatures: Sequence[float] = (0.0, 0.7, 1.0),
    draft_max: Sequence[int] = (4,),
    max_tokens: int = 64,
    seed: int = 1,
    base: GenerateParams | None = None,
    window: WindowKind = "fixed",
    warm: bool = False,
    beside: bool = False,
    on_skip: Callable[[str, str], None] | None = None,
) -> Iterator[Case]:
    """Compare every method with plain decoding on every prompt; yield cases as they come.

    Each prompt is read once; plain and speculative runs start from the same cached prompt. Prompt
    number n (from 0) is drawn with ``seed + n``.

    Raises:
        Cancelled: a reply was cut short; its case is dropped.

    Args:
        base: sampling and everything else that the other arguments leave open.
        window: "auto" lets measured times decide how far to draft, so that no two runs draft alike.
        warm: compare also after a stranger's prompt and after its own former turn, plain
            decoding.
        beside: write all replies side by side instead, then each prompt alone and plainly.
        on_skip: called with (method, reason) for one that cannot be opened when first used and is
            left out from then on; without it, the error is raised.
    """
    base = base or GenerateParams()
    left = list(proposers)
    sent: list[Asked] = []
    for n, prompt in enumerate(prompts):
        bound = prompt.bound(base)
        wishes = [wish_of(bound, t, max_tokens, seed + n, window) for t in temperatures]
        if beside:
            ways = product(wishes, proposers, draft_max)
            sent += [(prompt, one.replace(proposer=p, draft_max=k)) for one, p, k in ways]
            continue
        engine.reset()
        references: list[tuple[GenerateParams, ProofReply]] = []
        for params in wishes:
            plain = finish(engine, prompt, params)
            params = params.replace(prediction=edited(plain.reply.text))
            references.append((params, plain))
            for proposer in tuple(left):
                for width in draft_max:
                    wish = params.replace(proposer=proposer, draft_max=width)
                    try:
                        spec = finish(engine, prompt, wish)
                    except (CannotLoad, DoesNotFit) as error:
                        if on_skip is None:
                            raise
                        left.remove(proposer)
                        on_skip(proposer, error.message)
                        break
                    yield compared(engine, prompt, wish, plain, spec, way="cold")
        if warm:
            yield from _warm(engine, prompt, [("none", 0), *product(left, draft_max)], references)
    yield from _beside(engine, sent, random.Random(seed))


def _warm(
    engine: Engine,
    prompt: BenchPrompt,
    ways: Sequence[tuple[str, int]],
    references: Sequence[tuple[GenerateParams, ProofReply]],
) -> Iterator[Case]:
    """Compare a prompt after another one's text, and then its next turn, with every method and
    width. The first is plain decoding: the next turns of the others are compared with its own."""
    ids = tuple(engine.encode(prompt.content)[0])
    n_ctx = engine.target.n_ctx
    turns: dict[float, ProofReply] = {}
    for proposer, width in ways:
        engine.reset()
        finish(engine, prompt, references[0][0].replace(max_tokens=1), stranger_of(ids, n_ctx - 1))
        for params, plain in references:
            most = min(_SHORT, params.max_tokens or _SHORT)
            wish = params.replace(proposer=proposer, draft_max=width, max_tokens=most)
            first = finish(engine, prompt, wish)
            case = compared(engine, prompt, wish, plain.cut(most), first.cut(most), way="behind")
            yield case
            said = first.reply.token_ids
            room = min(n_ctx - len(ids) - len(said) - most, _SHORT)
            if room < 1 or (case.difference is not None and not case.difference.of_logprobs):
                continue  # after another reply it would be another conversation
            second = finish(engine, prompt, wish, (*ids, *said, *ids[-room:]))
            temperature = wish.sampling.temperature
            if proposer == "none":
                turns[temperature] = second
            elif temperature in turns:
                yield compared(engine, prompt, wish, turns[temperature], second, way="turns")


def _beside(engine: Engine, asked: list[Asked], rng: random.Random) -> Iterator[Case]:
    """Compare replies that were written side by side with the same requests alone."""
    rng.shuffle(asked)
    written = sorted(_written(engine, asked, rng), key=lambda one: _text_of(*one[0]))
    bitwise = engine.info.exact_rows > 1 and engine.info.exact_trees
    plain: dict[tuple[str, float], ProofReply] = {}
    for (prompt, params), reply in written:
        key = _text_of(prompt, params)
        if key not in plain:
            engine.reset()
            plain[key] = finish(engine, prompt, params.replace(proposer="none"))
        alone, beside = plain[key], dataclasses.replace(reply, exact=bitwise)
        if reply.reply.reason == "cancelled":
            n = len(reply.reply.token_ids)
            alone, beside = alone.cut(n), beside.cut(n)
        yield compared(engine, prompt, params, alone, beside, way="beside")


def _text_of(prompt: BenchPrompt, params: GenerateParams) -> tuple[str, float]:
    return prompt.id, params.sampling.temperature


def _written(
    engine: Engine, asked: Sequence[Asked], rng: random.Random
) -> Iterator[tuple[Asked, ProofReply]]:
    """Yield the replies to all, in the order in which they ended."""
    waiting, running = list(asked), dict[int, tuple[Asked, Told]]()
    while waiting or running:
        while waiting and engine.free and (not running or rng.random() < _ARRIVES):
            prompt, params = waiting.pop()
            id = engine.submit(prompt.content, params.replace(chances=0))
            running[id] = (prompt, params), Told()
        for id, said in engine.step():
            if isinstance(said, Exception):
                raise said
            one, told = running[id]
            told.take(said)
            if said.ends:
                del running[id]
                yield one, ProofReply.of(told, exact=False)
        if running and rng.random() < _LEAVES:
            engine.cancel(rng.choice(list(running)))


def stranger_of(ids: Sequence[int], most: int) -> tuple[int, ...]:
    """Return another prompt that begins like this one and is read in other parts: in tiles if this
    one is too short for them, else not in tiles."""
    if len(ids) > TILE:
        return tuple(ids[: TILE // 2])
    return tuple(islice(cycle(ids), min(TILE + 1, most)))


def compared(
    engine: Engine,
    prompt: BenchPrompt,
    params: GenerateParams,
    plain: ProofReply,
    spec: ProofReply,
    *,
    way: Way,
) -> Case:
    """Compare a reply with the plain one; the engine scores their first difference again."""
    assert params.seed is not None
    assert params.draft_max is not None
    reply, bitwise = spec.reply, plain.exact and spec.exact
    return Case(
        prompt=prompt.id,
        slice=prompt.slice,
        proposer=params.proposer,
        temperature=params.sampling.temperature,
        draft_max=params.draft_max,
        seed=params.seed,
        prompt_n=reply.prompt_n,
        tokens=len(reply.token_ids),
        drafted=reply.draft_n,
        accepted=reply.draft_n_accepted,
        rounds=reply.rounds,
        law_holds=len(reply.token_ids) == reply.draft_n_accepted + reply.rounds - reply.cut,
        bitwise=bitwise,
        way=way,
        difference=_difference(engine, prompt, params, plain, spec, bitwise=bitwise),
    )


def wish_of(
    base: GenerateParams, temperature: float, max_tokens: int, seed: int, window: WindowKind
) -> GenerateParams:
    """Return a request for plain decoding that others are compared with."""
    return base.choose("temperature", temperature).replace(
        max_tokens=max_tokens, seed=seed, speculate=True, proposer="none", verify="match",
        min_speculative_tokens=0, window=window
    )  # fmt: skip


def finish(
    engine: Engine, prompt: BenchPrompt, params: GenerateParams, turn: tuple[int, ...] = ()
) -> ProofReply:
    """Return the reply to a prompt, or to another text in its case.

    Raises:
        Cancelled: it was cut short, so that it can be compared with nothing.
    """
    told = Told.of(engine.generate(turn or prompt.content, params.replace(chances=0)))
    if told.end.reason == "cancelled":  # what was cut short shows nothing
        raise Cancelled(
            f"prompt {prompt.id}, {params.proposer}, temperature "
            f"{params.sampling.temperature:g}: the reply was cut short, this case is dropped"
        )
    return ProofReply.of(told, not engine.inexact, turn)


def _difference(
    engine: Engine,
    prompt: BenchPrompt,
    params: GenerateParams,
    plain: ProofReply,
    spec: ProofReply,
    *,
    bitwise: bool,
) -> Difference | None:
    a, b = plain.reply.token_ids, spec.reply.token_ids
    if a == b and plain.reply.text == spec.reply.text:
        return _of_logprobs(engine, plain, spec) if bitwise else None
    at = common_prefix(a, b)
    if at >= min(len(a), len(b)):
        longer = a[at] if len(a) > at else b[at] if len(b) > at else -1
        return Difference(at, longer, -1, "", "", math.inf)  # one stopped early: never rounding
    ids = spec.turn or engine.encode(prompt.content)[0]
    return Difference(
        position=at,
        plain_token=a[at],
        spec_token=b[at],
        plain_text=_piece(engine, a[at]),
        spec_text=_piece(engine, b[at]),
        gap=score_gap(engine, ids, a[:at], (a[at], b[at]), params, spec.position + at),
        bound=0.0 if bitwise else rounding(engine),
    )


def _of_logprobs(engine: Engine, plain: ProofReply, spec: ProofReply) -> Difference | None:
    """Find a place where the same tokens came from different rows."""
    for at, (x, y) in enumerate(zip(plain.logprobs, spec.logprobs, strict=False)):
        if x != y:
            token = plain.reply.token_ids[at]
            text = _piece(engine, token)
            return Difference(at, token, token, text, text, abs(x - y))
    return None


def _piece(engine: Engine, token: int) -> str:
    return spelled(engine.vocab.piece(token, special=True))


def score_gap(
    engine: Engine,
    prompt: Sequence[int],
    emitted: Sequence[int],
    tokens: tuple[int, int],
    params: GenerateParams,
    position: int,
) -> float:
    """Return the gap between the scores of two tokens after ``prompt + emitted``, decoded one token
    at a time; ``position`` is theirs in the noise.

    inf if one of them cannot be drawn there at all.
    """
    assert params.seed is not None
    chain = engine.chain(params, params.seed, prompt, position - len(emitted))
    for token in emitted:  # a grammar stands where it stood
        chain.advance(token)
    row = rows_of(engine, prompt[:-1], (prompt[-1], *emitted))[-1]
    if chain.greedy:
        return float(abs(float(row[tokens[0]]) - float(row[tokens[1]])))
    law = chain.law(row)
    ids: IntArray = np.array(tokens, np.int32)
    probs = [law.prob(t) for t in tokens]
    if min(probs) <= 0.0:
        # cut by top-k, top-p or min-p: the edge itself may be a near-tie, so compare logits there
        kept = law.ids[np.argmin(law.probs)]
        outside = tokens[int(np.argmin(probs))]
        return float(abs(float(row[int(kept)]) - float(row[outside])))
    times = exp_noise(params.seed, chain.position, ids) / np.array(probs)
    return float(abs(np.log(times[0] / times[1]))) * chain.scale
