"""The whole of a new way to draft: what was written in the last line is written again."""

from collections.abc import Sequence

from specllama.speculative.drafting.drafter import Copier
from specllama.speculative.drafting.method import Method
from specllama.speculative.sampling import SamplerChain
from specllama.speculative.types import Draft, Guess, Room

LINE_BREAK = 8  # of the vocabulary that this is shown with


class RepeatDrafter(Copier):
    """Drafts the rest of the last line while this one begins like it."""

    name = "repeat"

    def guesses(self, tokens: Sequence[int], chain: SamplerChain, most: int) -> list[Guess]:
        ends = [i + 1 for i, token in enumerate(tokens) if token == LINE_BREAK]
        if len(ends) < 2:
            return []
        line, begun = tokens[ends[-2] : ends[-1]], tokens[ends[-1] :]
        if list(line[: len(begun)]) != list(begun):
            return []
        rest = tuple(line[len(begun) :])[:most]
        return [Guess(self.name, rest, len(begun) + 1)] if rest else []

    def send(self, guess: Guess, length: int, room: Room) -> Draft:
        return Draft.chain(guess.tokens[:length], self.name, confidence=[0.5] * length)


METHOD = Method(
    name="repeat",
    label="Repeat the line",
    short="repeated line",
    letter="r",
    blurb="What the last line said is said again. Costs nothing; pays on tables and lists.",
    open=lambda kit: RepeatDrafter(),
    auto=True,
)
