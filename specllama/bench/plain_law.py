"""The plain law at every token of a server's reply: its sources, and the reading of the reply.

Our own engine over the same weights knows it exactly: the reply's tokens are evaluated after the
prompt, and every row of logits is the law of the next token at that temperature, the end of the
reply included. Without the weights there are the server's own logprobs: then it is asked at
temperature 1, where they are the law, and the likeliest tokens are classes of their own beside a
class of all others. That shows whether a server draws its tokens from what it says itself.

A reply is best read as the tokens that the server lists. Where it lists none, or some that do not
spell the reply (mlx-lm 0.32 does so at temperatures above 0), its text is split again, which is
wrong now and then: a model may write a word in smaller parts. ``STRAY`` bounds how often, and the
test allows for it.
"""

from __future__ import annotations

import re
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np

from specllama.arrays import FloatArray, Row
from specllama.bench.law import Habit, Spot
from specllama.bench.prompts import BenchPrompt
from specllama.bench.rounding import rows_of
from specllama.errors import UsageError
from specllama.settings.params import GenerateParams

if TYPE_CHECKING:
    from specllama.engine.engine import Engine
    from specllama.remote.answers import Likely
    from specllama.remote.kinds.kind import Heard

ReadAs = Literal["tokens", "text"]

STRAY = 0.005  # of tokens that are read wrongly, where a text is split again
# logits: what other kernels were measured to differ by (rms 0.015 of vLLM), and llama.cpp's own
SLACK, SLACK_ALIKE = 0.02, 0.002
TOP = 10  # tokens that a server is asked to list
_COPY = 3  # tokens of the end that an earlier place must repeat
_MARK = re.compile(r"\s*<[|｜/]?[^<>\s]+>\s*|\s*\[/?[A-Z_]+\]\s*|")  # how ends of replies are spelt


@dataclass(frozen=True, slots=True)
class ReplyReading:
    """A reply, token by token. ``why``: the reason, in words, if it cannot be read."""

    spots: Sequence[Spot] = ()
    read_as: ReadAs = "tokens"
    nats: float = 0.0  # minus the logarithm of its chance
    why: str = ""


def written(answer: Heard) -> str:
    """Return the whole reply as one text, its thought in front."""
    return f"{answer.reasoning}\n[answer]\n{answer.text}" if answer.reasoning else answer.text


def spelt(token: str) -> str:
    """Spell a token as text: some servers write white space as byte-level vocabularies do."""
    return token.replace("\u0120", " ").replace("\u010a", "\n")


def spells(answer: Heard) -> bool:
    """True if the tokens that a server lists begin with its reply; an end may follow."""
    if not answer.logprobs:
        return False
    listed = b"".join(one.raw or spelt(one.text).encode() for one in answer.logprobs)
    return listed.startswith(answer.text.encode())


def copied_after(tokens: Sequence[int]) -> int:
    """Return the guess of a copy of the text: the token after the newest earlier place that ends
    like this one; -1 for none."""
    end = list(tokens[-_COPY:])
    places = range(len(tokens) - 1, _COPY - 1, -1)
    return next((tokens[at] for at in places if list(tokens[at - _COPY : at]) == end), -1)


def own_answer(engine: Engine, prompt: BenchPrompt, params: GenerateParams) -> Heard:
    """Return the plain reply of our own engine."""
    from specllama.remote.kinds.kind import Heard
    from specllama.told import Told

    wish = params.replace(proposer="none", chances=None)
    end = Told.of(engine.generate(prompt.content, wish)).end
    finish = "length" if end.reason == "length" else "stop"
    return Heard(end.text, end.reasoning, finish, tokens=len(end.token_ids), prompt_n=end.prompt_n)


class OwnLaw:
    """The law of our own engine over the same weights, and of another one over the draft's.

    Args:
        draft: loaded as a target of its own; its vocabulary must be the target's.
        listed: the server lists the tokens of its replies. alike: it computes with llama.cpp.

    Attributes:
        what: in words. slack: see ``law``. top: logprobs that replies need; None for none.
        must: the only temperature that it knows; None for any.
    """

    must: float | None = None

    def __init__(
        self, engine: Engine, draft: Engine | None = None, *, listed: bool, alike: bool = False
    ) -> None:
        self.what = f"our own engine over {engine.info.target.name}"
        self.slack = SLACK_ALIKE if alike else SLACK
        self.top: int | None = 1 if listed else None
        self._engine, self._draft = engine, draft
        if draft is not None and draft.vocab.n_tokens != engine.vocab.n_tokens:
            raise UsageError(
                "the draft has another vocabulary than the target", "leave out -d: it is a help"
            )
        self._ends = [t for t in range(engine.vocab.n_tokens) if engine.vocab.is_eog(t)]
        self._ids: dict[bytes, int] = {}
        self._habit = Habit()

    def read(self, prompt: BenchPrompt, answer: Heard, temperature: float) -> ReplyReading:
        """Return the positions of a reply, as far as it can be read. They are made for tokens in
        this order and remember earlier replies, so each reply is read once."""
        ids = list(self._engine.encode(prompt.content)[0])
        if answer.prompt_n not in (None, len(ids)):
            return ReplyReading(
                why=f"the server read prompt {prompt.id} as {answer.prompt_n} tokens, this "
                f"file as {len(ids)}: another chat template or vocabulary"
            )
        emitted, read_as, why = self._tokens(answer)
        if why:
            return ReplyReading(why=why)
        if answer.finish == "stop" and self._ends:
            emitted = [*emitted, self._ends[0]]
        emitted = emitted[: max(self._engine.target.n_ctx - len(ids) - 1, 0)]
        plain = self._laws(self._engine, ids, emitted, temperature)
        drafts = None
        if self._draft is not None:
            drafts = self._laws(self._draft, ids, emitted, temperature)
        spots, nats = [], 0.0
        for i, token in enumerate(emitted):
            p = plain[i]
            spots.append(
                Spot(
                    p,
                    np.asarray(token),
                    temperature,
                    draft=None if drafts is None else drafts[i],
                    habit=self._habit.law(len(p)),
                    copied=np.asarray(copied_after([*ids, *emitted[:i]])),
                )
            )
            self._habit.note(token, float(p[token]))
            nats -= float(np.log(max(p[token], 1e-300)))
        return ReplyReading(spots, read_as, nats)

    def lead(
        self, prompt: BenchPrompt, params: GenerateParams, shared: str, plain: str, other: str
    ) -> float | None:
        """Return the lead of one continuation's first token over the other's, in logits."""
        ids = list(self._engine.encode(prompt.content)[0])
        if self._ends and not (plain and other):
            return self._lead_of_end(ids, shared, plain or other)
        a, b = (self._split(shared + rest) + self._ends[:1] for rest in (plain, other))
        at = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), None)
        if at is None or len(ids) + at >= self._engine.target.n_ctx:
            return None
        row = _rows(self._engine, ids, a[: at + 1])[at]
        return abs(float(row[a[at]]) - float(row[b[at]]))

    def _lead_of_end(self, prompt: Sequence[int], shared: str, rest: str) -> float | None:
        """Return the lead between the end of a reply and the likeliest token that ``rest`` may
        begin with. One reply ended here, so a token begins here in the other, however the whole
        would be split."""
        vocab, ids = self._engine.vocab, self._split(shared)
        if len(prompt) + len(ids) >= self._engine.target.n_ctx:
            return None
        row = _rows(self._engine, prompt, [*ids, self._ends[0]])[-1]
        pieces = ((token, vocab.piece(token)) for token in range(vocab.n_tokens))
        begin = [token for token, piece in pieces if piece and rest.encode().startswith(piece)]
        return abs(float(row[self._ends].max() - row[begin].max())) if begin else None

    def _tokens(self, answer: Heard) -> tuple[list[int], ReadAs, str]:
        if answer.logprobs:
            ids = self._listed(answer.logprobs)
            if ids and ids[-1] in self._ends:
                ids.pop()
            if ids is not None and self._spells(ids, written(answer)):
                return ids, "tokens", ""
        if answer.reasoning:
            return [], "text", "it thought, and the marks around a thought are not in its text"
        ids = self._split(answer.text)
        if not self._spells(ids, answer.text):
            return [], "text", "its text cannot be split into tokens of this file"
        return ids, "text", ""

    def _split(self, text: str) -> list[int]:
        split = self._engine.vocab.tokenize
        return split(text, add_special=False, parse_special=False, after_text=True)

    def _spells(self, ids: Sequence[int], text: str) -> bool:
        return b"".join(map(self._engine.vocab.piece, ids)).decode("utf-8", "replace") == text

    def _listed(self, told: Sequence[Likely]) -> list[int] | None:
        """Return the tokens that a server lists, in our numbers; None if one is not known."""
        vocab = self._engine.vocab
        if not self._ids:
            for token in range(vocab.n_tokens - 1, -1, -1):
                self._ids[vocab.piece(token, special=True)] = token
        out = []
        for one in told:
            spelling = one.raw or spelt(one.text).encode()
            token = one.id if one.id is not None and one.id < vocab.n_tokens else -1
            # an end is spelt out by some servers, by others not at all
            if token < 0 or spelling not in (vocab.piece(token), vocab.piece(token, special=True)):
                token = self._ids.get(spelling, -1)
            if token < 0:
                return None
            out.append(token)
        return out

    def _laws(
        self, engine: Engine, prompt: Sequence[int], emitted: Sequence[int], temperature: float
    ) -> list[FloatArray]:
        """Return [len(emitted)] laws; the chance of all ends is that of the first one."""
        laws = []
        for row in _rows(engine, prompt, emitted):
            z = row.astype(np.float64) / temperature
            p = np.exp(z - z.max())
            p /= p.sum()
            if self._ends:
                total = p[self._ends].sum()
                p[self._ends] = 0.0
                p[self._ends[0]] = total
            laws.append(p)
        return laws


class StatedLaw:
    """The law from the logprobs that the server reports with its reply.

    Ends of replies are spelt in many ways and often not listed, so laws are those of a token that
    is no end.
    """

    what = "the logprobs that the server states itself"
    must: float | None = 1.0
    slack = 0.01  # some servers state them in half precision

    def __init__(self, top: int = TOP) -> None:
        self.top: int | None = top
        self._habit = Habit()

    def read(self, prompt: BenchPrompt, answer: Heard, temperature: float) -> ReplyReading:
        if not answer.logprobs:
            return ReplyReading(why="the server gives no logprobs")
        if not spells(answer):
            return ReplyReading(why="the tokens that the server lists are not those of its reply")
        spots, nats = [], 0.0
        for one in answer.logprobs:
            if _MARK.fullmatch(one.text):
                continue
            top = [(text, log) for text, log in one.top if not _MARK.fullmatch(text)]
            if len(top) < 2:
                return ReplyReading(why="the server lists no rivals of a token")
            ends = sum(np.exp(log) for text, log in one.top if _MARK.fullmatch(text))
            names = [text for text, _ in top]
            p = np.exp([log for _, log in top])
            rest = max(1.0 - float(p.sum()) - ends, 1e-9)
            p = np.append(p, rest) / (p.sum() + rest)
            at = names.index(one.text) if one.text in names else len(names)
            sizes = np.append(np.ones(len(names)), 1000.0)
            places: dict[Hashable, int] = {name: i for i, name in enumerate([*names, ""])}
            habit = self._habit.law(places, sizes)
            spots.append(Spot(p, np.asarray(at), temperature, habit=habit, sizes=sizes))
            self._habit.note(one.text if at < len(names) else "", float(p[at]))
            nats -= max(one.logprob, -700.0)
        return ReplyReading(spots, "tokens", nats)


PlainLaw = OwnLaw | StatedLaw
"""A source of the law that a reply should have been drawn from."""


def _rows(engine: Engine, prompt: Sequence[int], emitted: Sequence[int]) -> list[Row]:
    """Return the rows before each emitted token."""
    wide = min(engine.target.max_rows, engine.target.n_batch)
    rows = rows_of(engine, prompt[:-1], [prompt[-1], *emitted[:-1]] if emitted else [], width=wide)
    engine.reset()
    return rows
