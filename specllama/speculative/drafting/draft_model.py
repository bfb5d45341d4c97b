"""A small model of the same vocabulary drafts a chain, one token a step.

It keeps the KV of its accepted drafts: after a round only the tokens it has not seen are fed (the
target token, and the last draft after a full acceptance). Where the window finds a long backlog
too dear, it reads the newest part of the text only. Its sampler chain is a fork of the
target's, so temperature, truncation, penalties and grammar shape the draft as they shape the
target, and under ``match`` both draw with the same noise.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from time import perf_counter

from specllama.backend.base import Context
from specllama.errors import ContextFull, EngineError
from specllama.speculative.drafting.drafter import Request
from specllama.speculative.drafting.method import Method, with_draft
from specllama.speculative.history import History, common_prefix
from specllama.speculative.noise import draw
from specllama.speculative.sampling import SamplerChain, confidence
from specllama.speculative.types import EMPTY_DRAFT, Draft, HiddenNeed, Law, Room, Row, Verdict

_SHORT = 3  # tokens; a longer backlog is one pass
_TRIALS = 3  # of both ways before one is preferred; the first one warms up
_AGAIN = 64  # readings after which the other way is tried once more
_WEIGHT = 0.25  # of a reading in the running mean


class ShortReading:
    """Whether a backlog of 2 or 3 tokens is read sooner in one pass or token by token.

    Kernels for a single row can be so much better than those for a few (measured on a CPU at
    Q8_0: two tokens cost 2.4 single ones) that it is worth finding out.
    """

    def __init__(self) -> None:
        self._taken: dict[tuple[int, bool], int] = {}
        self._mean: dict[tuple[int, bool], float] = {}

    def singly(self, n: int) -> bool:
        """Whether to read these ``n`` tokens one by one now."""
        if not 2 <= n <= _SHORT:
            return False
        together, single = (self._taken.get((n, way), 0) for way in (False, True))
        if min(together, single) < _TRIALS:
            return single < together
        better = self._mean[n, True] < self._mean[n, False]
        return better is not ((together + single + 1) % _AGAIN == 0)

    def took(self, n: int, singly: bool, seconds: float) -> None:
        """A reading was finished; one that was aborted does not count."""
        if not 2 <= n <= _SHORT:
            return
        way = n, singly
        self._taken[way] = self._taken.get(way, 0) + 1
        if self._taken[way] > 1:
            known = self._mean.get(way, seconds)
            self._mean[way] = known + _WEIGHT * (min(seconds, 2 * known) - known)


class DraftModelProposer:
    """Drafts with a second model.

    Args:
        context: the draft model's own KV cache, any size.
        n_vocab: vocabulary size of the target; ids at or above it are never proposed.
        batch: most tokens fed in one pass when catching up.
        clock: seconds; injected in tests.
        name: the source that drafts are booked under; default: the class's.
    """

    name = "draft"
    needs: HiddenNeed = "nothing"

    def __init__(
        self,
        context: Context,
        *,
        n_vocab: int,
        batch: int = 512,
        clock: Callable[[], float] = perf_counter,
        name: str | None = None,
    ) -> None:
        self.name = name or type(self).name
        self._context = context
        self._clock = clock
        self._short = ShortReading()
        self._n_vocab = min(n_vocab, context.n_vocab)
        self._batch = batch
        self._request: Request | None = None
        self._start = 0  # index of the cache's first token in the text

    @property
    def context(self) -> Context:
        return self._context

    def start(self, request: Request) -> None:
        self._request = request
        if self._start:  # a part of another text, or of this one before it was edited
            self._start = 0
            self._context.rollback(0)

    def propose(self, tokens: Sequence[int], chain: SamplerChain, room: Room) -> Draft:
        request = self._request
        if request is None:
            raise EngineError("propose before start")
        unread, fits = self._unread(tokens)
        # step i evaluates one more token, so the last draft needs no place in the cache
        n = min(room.n, fits)
        if n <= 0:
            return EMPTY_DRAFT
        read = min(room.begin(self.name, unread), unread)
        try:
            row = self._catch_up(tokens, unread, read) if read > 0 else None
        except ContextFull:
            row = None  # a draft model of another vocabulary may need more tokens for this text
        if row is None:
            return EMPTY_DRAFT
        ahead = chain.fork()
        drawn = request.rule == "match" or ahead.greedy
        drafted: list[int] = []
        laws: list[Law | None] = []
        scores: list[float | None] = []
        while True:
            score = confidence(row)
            # judged on the law alone, before the token is drawn: allowed under every rule
            if score < request.p_min:
                break
            if not drawn and not room.include(score, None, None):
                break
            try:
                law = ahead.law(row)
            except EngineError:
                break  # NaN, or a grammar with no way on in the draft's vocabulary
            if drawn:
                token, lead = draw(law, request.seed, ahead.position)
                # with common noise a draft may be left out for what it is: the target draws its own
                if not room.include(score, min(lead, ahead.gap), token):
                    break
            else:
                token = request.coins.pick(law.ids, law.probs)
            drafted.append(token)
            laws.append(None if ahead.greedy else law)
            scores.append(score)
            if (
                len(drafted) == n
                or request.is_eog(token)
                or not room.keep_going(len(drafted), score)
            ):
                break
            ahead.advance(token)
            try:
                row = self._context.forward([token], outputs="last")[0, : self._n_vocab]
            except ContextFull:
                break
        return Draft.chain(drafted, self.name, q=laws, confidence=scores)

    def _unread(self, tokens: Sequence[int]) -> tuple[int, int]:
        """(tokens not in the cache yet, drafts that fit after them).

        When the text outgrows the cache, the newer half of what fits is read again.
        """
        n_ctx = self._context.n_ctx
        length = len(tokens) - self._start
        if length <= 0 or length > n_ctx:
            length = min(len(tokens), max(n_ctx // 2, 1))
            self._start = len(tokens) - length
            self._context.rollback(0)
        text = tokens if self._start == 0 else History(tokens[self._start :])
        agreed = min(common_prefix(self._context.tokens, text), length - 1)
        return length - agreed, n_ctx - length + 1

    def _catch_up(self, tokens: Sequence[int], unread: int, read: int) -> Row | None:
        """Bring the cache to the end of ``tokens`` and return the logits after the last one.

        With ``read < unread`` the cache starts over from the newest ``read`` tokens: a shorter
        memory is cheaper than reading everything that was missed.
        """
        lag = tokens[len(tokens) - read :]
        if max(lag) >= self._context.n_vocab:
            return None  # a token the draft model does not know: it cannot follow this text
        if read < unread:
            self._start = len(tokens) - read
        self._context.rollback(len(tokens) - read - self._start)
        begin = self._clock()
        singly = self._short.singly(read)
        size = 1 if singly else self._batch
        for i in range(0, read, size):
            part = lag[i : i + size]
            last = i + len(part) == read
            rows = self._context.forward(part, outputs="last" if last else "none")
        self._short.took(read, singly, self._clock() - begin)
        return rows[0, : self._n_vocab]

    def commit(self, tokens: Sequence[int], draft: Draft, verdict: Verdict) -> None:
        # rejected drafts are cut when the next round compares the cache with the text
        pass

    def close(self) -> None:
        self._context.close()


METHOD = Method(
    name="draft",
    label="Draft model",
    short="draft model",
    letter="d",
    blurb="A small model of the same vocabulary writes ahead; the target checks. "
    "The classic: best on chat and stories.",
    cost="draft model",
    why_not=with_draft,
    auto=True,
)
