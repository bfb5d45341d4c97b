"""A chain of drafted tokens, whatever evaluates them: the common loop of all chain drafters.

The sampler chain is a fork of the target's, so temperature, truncation, penalties and grammar shape
the draft as they shape the target, and where the rule has common noise both draw with it.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

from specllama.arrays import Row
from specllama.errors import ContextFull, EngineError, UsageError
from specllama.speculative.drafting.drafter import Drafter
from specllama.speculative.effects import Steps
from specllama.speculative.noise import draw
from specllama.speculative.sampling import SamplerChain
from specllama.speculative.selection import confidence
from specllama.speculative.tree import Path
from specllama.speculative.types import EMPTY_DRAFT, Draft, Law, Room


class Stepping(Drafter):
    """A chain drafter with a model of any kind that reads a text and predicts the next token.

    Attributes:
        siblings: most children that one reading gives where a tree is grown (``draft_tree``).
        floor: path probability below which a node of it is not worth a row of the target.
        samples: it draws by its law; else it guesses the likeliest tokens, under every rule.
        foreign: its tokens are not the target's, so the window cannot tell what becomes of them.
    """

    siblings = 3
    floor = 0.02
    samples = True
    foreign = False

    @property
    def width(self) -> int:
        """Most drafted tokens that are read in one pass; 1 if only chains can be read."""
        return 1

    def begin(self, tokens: Sequence[int], room: Room) -> Steps[tuple[Row | None, int]]:
        """Read the text, as far as the window lets it be read.

        Returns the logits [n_vocab] after it, None where nothing can be drafted, and how many
        tokens may be drafted one after the other.
        """
        raise NotImplementedError

    def after(self, paths: Sequence[Path]) -> Steps[Sequence[Row]]:
        """Return the logits [n_vocab] after the text and each of some paths of drafted tokens, at
        most ``width``; good until the next call.

        What is above a path was asked for before, or is asked for before it.

        Raises:
            ContextFull: there is no room for them.
        """
        raise NotImplementedError

    def settle(self, path: Path) -> Steps[None]:
        """Settle on this path of a complete draft, the likeliest of those read to stay."""
        yield from ()

    def alike(self, path: Path) -> Hashable:
        """Return a key that is equal for paths with the same prediction."""
        return path

    def sure(self, path: Sequence[int], row: Row) -> float:
        """Return the probability that the best token of this row, after these drafted ones, is
        right."""
        return confidence(row)

    def draft(self, tokens: Sequence[int], chain: SamplerChain, room: Room) -> Steps[Draft]:
        request, ahead, drawn = self.request, chain.fork(), self.request.drawn(chain)
        row, fits = yield from self.begin(tokens, room)
        if row is None or fits <= 0:
            return EMPTY_DRAFT
        most = min(room.n, fits)
        drafted: list[int] = []
        laws: list[Law | None] = []
        scores: list[float | None] = []
        while True:
            score = self.sure(drafted, row)
            # judged on the law alone, before the token is drawn: allowed under every rule
            if not score >= request.p_min:
                break
            if not drawn and not room.judge.take(score, None, None):
                break
            try:
                law = ahead.law(row)
            except (EngineError, UsageError):
                break  # NaN, or a grammar with no way on in the draft's vocabulary
            if drawn:
                token, lead = draw(law, request.seed, ahead.position)
                # with common noise a draft may be left out for what it is: the target draws its own
                seen = (None, None) if self.foreign else (min(lead, ahead.gap), token)
                if not room.judge.take(score, *seen):
                    break
            else:
                token = request.coins.pick(law.ids, law.probs)
            drafted.append(token)
            laws.append(None if ahead.greedy else law.kept())
            scores.append(score)
            if len(drafted) == most or request.is_eog(token) or not room.judge.further():
                break
            ahead.advance(token)
            try:
                (row,) = yield from self.after([tuple(drafted)])
            except ContextFull:
                break
        draft = Draft.chain(drafted, self.name, q=laws, confidence=scores)
        yield from self.settle(draft.tokens)
        return draft
