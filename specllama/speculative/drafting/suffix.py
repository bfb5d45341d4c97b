"""Suffix decoding: the tokens that followed the longest repeat of the text's end, by frequency.

It finds the longest end of the text that occurred before, so there is no n-gram size to choose.
Earlier texts are used only where they match longer, and are judged apart, since a text usually
repeats itself on purpose. Continuations are weighed by their counts, as in SuffixDecoding (Oliaro
et al. 2024), which also keeps two trees.

A guess's probability is its share of the counts times the reliability of a match of this length,
which is learnt. By the time a later guess is tested, those before it were right and have lengthened
the match. The likeliest nodes make the draft: a chain where the target takes chains, a tree where
it takes trees.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from specllama.speculative.drafting.copying import TextFollower
from specllama.speculative.drafting.drafter import Copier, Request
from specllama.speculative.drafting.method import Method
from specllama.speculative.drafting.text_library import BREAK, Library
from specllama.speculative.effects import Steps, run_alone
from specllama.speculative.matches import Matches
from specllama.speculative.sampling import SamplerChain
from specllama.speculative.tree import ROOT, BestFirst
from specllama.speculative.types import EMPTY_DRAFT, Draft, DraftJudge, Guess, Room, Verdict
from specllama.text_history import Follower, History

PAST = "suffix-past"  # guesses that continue as an earlier text did
BESIDE = "suffix-beside"  # and those that continue as one that is being written
_COUNTED = 32  # places of a match whose continuations are counted, the newest: bounds the work
_OVERLAP = 64  # tokens before an edit that are read again, so that matches can reach back
_LIKELY = 0.01  # path probability below which a copy is not worth a row

# Reliability of a match of 1, 2-3, 4-7, 8-15, 16-31, 32+ tokens before anything was seen, worth
# _PRIOR tested guesses.
_RELIABLE = (0.25, 0.45, 0.65, 0.8, 0.9, 0.95)
_PRIOR = 4.0


@dataclass(frozen=True, slots=True)
class State:
    """Places of a text where one string ends. The tokens that followed there may follow again."""

    text: Sequence[int]
    places: list[int]  # of the string's last token, ascending, each with a token after it

    @staticmethod
    def at(text: Sequence[int], places: Sequence[int]) -> State:
        """Return the newest of ``places`` that have a next token."""
        end = len(text) - 1
        return State(text, [place for place in places[-_COUNTED:] if place < end])

    @staticmethod
    def ending(matches: Matches) -> State:
        """Return the newest places of the longest match."""
        return State.at(matches.within, matches.at_least(matches.longest, _COUNTED + 1))

    def followers(self) -> list[tuple[int, State, float]]:
        """Return (token, state, share) of each next token, by frequency, the newest first on
        ties."""
        ways: dict[int, list[int]] = {}
        for place in self.places:
            ways.setdefault(self.text[place + 1], []).append(place + 1)
        ways.pop(BREAK, None)
        total = sum(map(len, ways.values()))
        ranked = sorted(ways.items(), key=lambda way: (-len(way[1]), -way[1][-1]))
        return [(token, State.at(self.text, at), len(at) / total) for token, at in ranked]

    def path(self, most: int, is_end: Callable[[int], bool]) -> list[int]:
        """Return the most frequent way on, at most ``most`` tokens, up to one that ends a turn."""
        rows = [self.text[place + 1 : place + 1 + most] for place in self.places]
        path: list[int] = []
        while rows and len(path) < most:
            depth = len(path)
            if rows.count(rows[-1]) == len(rows):
                ahead = rows[-1][depth:]
            else:
                # of equals the newest is counted first
                ways = Counter(row[depth] for row in reversed(rows) if len(row) > depth)
                ways[BREAK] = 0
                ahead = [max(ways, key=ways.__getitem__)]
                rows = [row for row in rows if len(row) > depth and row[depth] == ahead[0]]
            for token in ahead:
                if token == BREAK:
                    return path
                path.append(token)
                if is_end(token):
                    return path
            if len(ahead) != 1:
                break
        return path


class SuffixDrafter(Copier):
    """A drafter that copies, in proportion to the frequencies of the past.

    Args:
        library: texts that were given, to copy from.
        reader: of the text, to share with other copying sources.
        most: tokens kept of what edits replaced; beyond it only ``library`` is.
    """

    name = "suffix"

    def __init__(
        self,
        *,
        library: Library | None = None,
        most: int = 1 << 16,
        reader: TextFollower | None = None,
    ) -> None:
        self._library = library or Library()
        self._most = most
        self._tested: list[list[float]] = [[0.0, 0.0] for _ in _RELIABLE]  # [hits, expected]
        self._used: int | None = None  # match length of this round's draft
        # of this round's guesses, the longest match first
        self._states: dict[Guess, State] = {}
        self._reader = reader or TextFollower()
        self._seen = Follower()
        self._text: list[int] = []  # a copy of what was read: an edit replaces it
        self._past = Matches(History())
        self._beside: dict[int, Matches] = {}  # by the identity of the text

    def start(self, request: Request) -> None:
        super().start(request)
        self._used = None
        self._beside = {}

    def draft(self, tokens: Sequence[int], chain: SamplerChain, room: Room) -> Steps[Draft]:
        if room.judge.weighs:
            return (yield from super().draft(tokens, chain, room))
        guesses = self.guesses(tokens, chain, room.n)
        if not guesses:
            return EMPTY_DRAFT
        grown = [(*self._grow(guess, 0, room), guess.match_length) for guess in guesses]
        draft, _, self._used = max(grown, key=lambda way: way[1])
        return draft

    def guesses(self, tokens: Sequence[int], chain: SamplerChain, most: int) -> list[Guess]:
        """Return the most frequent continuation of the longest match, here and in earlier texts.

        An earlier text is asked only where it matches longer. Shorter matches are left out: the
        best of several doubtful promises is mostly the one that was estimated too high.
        """
        self._used = None
        self._states.clear()
        self._follow(tokens)
        here, gone = self._reader.matches, self._past
        places, longest = self._library.find(tokens, _COUNTED + 1)
        past = State.at(self._library.text, places)
        if gone.longest >= longest:
            past, longest = State.ending(gone), gone.longest
        found = [(PAST, past, longest)] if longest > here.longest else []
        if here.longest:
            found.append((self.name, State.ending(here), here.longest))
        if (near := self._nearby(max(here.longest, longest))) is not None:
            found.insert(0, (BESIDE, State.ending(near), near.longest))
        for source, state, length in found:
            guess = self._continue(state, source, length, most)
            if guess is not None:
                self._states.setdefault(guess, state)
        return list(self._states)

    def _nearby(self, longest: int) -> Matches | None:
        """Return the longest match in a text written at the same time, beyond ``longest`` tokens.

        Coins of another conversation may be those of this one: its text is not for rules that
        throw any.
        """
        texts = self.request.beside() if self.request.rule.common_noise else ()
        self._beside = {
            id(text): self._beside.get(id(text)) or Matches(text) for text in texts if len(text)
        }
        for matches in self._beside.values():
            matches.follow(self._reader.text)
        best = max(self._beside.values(), key=lambda one: one.longest, default=None)
        return best if best is not None and best.longest > longest else None

    def _continue(self, state: State, source: str, length: int, most: int) -> Guess | None:
        """Return the most frequent way on from a state, up to the end of a turn."""
        copied = state.path(most, self.request.is_eog)
        if not copied:
            return None
        return Guess(source, tuple(copied), length, self._reader.habits.likely(copied))

    def send(self, guess: Guess, length: int, room: Room) -> Draft:
        """Return the first ``length`` tokens of one of this round's guesses, with alternatives.

        Without a window to weigh them the other ways are left out.
        """
        alone = Room(length, _CopyAlone())
        return self._grow(guess, length, room if room.judge.weighs else alone)[0]

    def _grow(self, guess: Guess, trunk: int, room: Room) -> tuple[Draft, float]:
        """Grow a tree of a guess's first ``trunk`` tokens and alternatives that are worth a row.

        Returns what it promises, too: 1 and the expected number of accepted tokens.
        """
        request = self.request
        self._used = guess.match_length
        tree = _Copies(
            lambda depth: self._trust(guess.match_length + depth),
            room,
            leaves=request.leaves,
            is_end=request.is_eog,
        )
        tree.follow(self._states[guess], guess.tokens[:trunk])
        return run_alone(tree.grow()), sum(tree.weight.values())

    def _trust(self, match: int) -> float:
        """Return the probability that a match of this length goes on in the same way."""
        size = _size(match)
        hits, expected = self._tested[size]
        return min((hits + _PRIOR * _RELIABLE[size]) / (expected + _PRIOR), 0.98)

    # -- the text --

    def _follow(self, tokens: Sequence[int]) -> None:
        """Read the new tokens. The part that an edit replaces joins the earlier texts."""
        text = self._reader.follow(tokens)
        keep, edited = self._seen.follow(text)
        if edited and self._text:
            gone = (*self._text[max(keep - _OVERLAP, 0) :], BREAK)
            past = self._past.within
            if len(past) + len(gone) > self._most:
                past = History()
            else:
                past.extend(gone)
            self._past = Matches(past)
            del self._text[keep:]
        self._text += text[len(self._text) :]
        self._past.follow(text)

    def commit(self, tokens: Sequence[int], draft: Draft, verdict: Verdict) -> None:
        """Compare the acceptance that the tested guesses promised with the real one."""
        if self._used is None or not len(draft) or draft.sources[0] != self.name:
            return
        promised: dict[int, float] = {}
        for parent, likely in zip(draft.parents, draft.confidence, strict=True):
            promised[parent] = promised.get(parent, 0.0) + (likely or 0.0)
        trusts = [self._trust(self._used + depth) for depth in range(len(verdict.path) + 1)]
        for depth, node in enumerate((-1, *verdict.path)):
            tested = self._tested[_size(self._used + depth)]
            tested[0] += depth < len(verdict.path)
            tested[1] += promised.get(node, 0.0) / trusts[depth]
        self._used = None

    def forget(self) -> None:
        self.close()
        self._tested = [[0.0, 0.0] for _ in _RELIABLE]
        self._past = Matches(History())

    def close(self) -> None:
        self._text = []


class _Copies(BestFirst):
    """A tree of the tokens that followed the end of a text, by their frequency.

    Args:
        trust: how reliable the match is where it is this many tokens longer.
        room, leaves, is_end: see ``BestFirst``.
    """

    def __init__(
        self,
        trust: Callable[[int], float],
        room: Room,
        *,
        leaves: int,
        is_end: Callable[[int], bool],
    ) -> None:
        super().__init__(room, leaves=leaves, is_end=is_end)
        self._trust = trust
        self._after: dict[tuple[int, int], State] = {}  # after a node's token that was offered

    def follow(self, state: State, copied: Sequence[int]) -> None:
        """Add the copied chain, and the alternatives at each of its nodes."""
        node = ROOT
        for token in copied:
            ways = state.followers()
            trust = self._offer_all(node, [way for way in ways if way[0] != token])
            _, state, share = next(way for way in ways if way[0] == token)
            added = self.add(node, token, "suffix", confidence=share * trust)
            assert added is not None  # a chain within the bounds always fits
            self.weight[added] = self.weight[node] * share * trust
            node = added
        if not copied:
            self._after[ROOT, ROOT] = state

    def _offer_all(self, node: int, ways: Sequence[tuple[int, State, float]]) -> float:
        trust, weight = self._trust(self.depth(node)), self.weight[node]
        for token, after, share in ways:
            if weight * share * trust < _LIKELY:
                break
            self._after[node, token] = after
            self.offer(node, token, share * trust, "suffix")
        return trust

    def read(self, node: int) -> Steps[None]:
        yield from ()
        at = (self.parent(node), self.token(node)) if node >= 0 else (ROOT, ROOT)
        self._offer_all(node, self._after[at].followers())

    def wants(self, parent: int, token: int, weight: float) -> bool:
        wanted = self.judge.row(weight)
        if not wanted:
            self.stop()  # the rest is less likely
        return wanted


def _size(length: int) -> int:
    """Return the class of a match length: 1, 2-3, 4-7, ... as an index of _RELIABLE."""
    return min(length.bit_length(), len(_RELIABLE)) - 1


class _CopyAlone(DraftJudge):
    """A judge that adds no branches to a copy."""

    def row(self, likely: float, *, keep: bool = True) -> bool:
        return False


METHOD = Method(
    name="suffix",
    label="Suffix decoding",
    short="suffix",
    letter="s",
    blurb="Finds the longest earlier match of the text's end (also in texts that are "
    "given) and copies its most frequent continuation.",
    open=lambda kit: SuffixDrafter(library=kit.library, reader=kit.reader),
    auto=True,
)
