"""Suffix decoding: what followed the longest repeat of the text's end, by how often it followed.

A suffix automaton of the text so far grows by one token at a time. Its newest state's suffix link
is the longest end of the text that occurred before, whatever its length: no n-gram size to choose.
Earlier texts have an automaton of their own, in which a cursor follows the end of this one; they
are asked where they match longer, and are judged apart: what this text repeats is mostly meant.
Continuations are followed by their counts, as in SuffixDecoding (Oliaro et al. 2024), which keeps
two trees likewise; the automaton is that of SAM-Decoding (Hu et al. 2024).

A guess's probability is the share of its count among its siblings' times the reliability of matches
as long as this one, which is learnt; where it comes to be tested, the guesses before it were right
and have lengthened the match. The best nodes by path probability make the draft: a chain where the
target takes chains, a tree where it takes trees.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Sequence

from specllama.spec.proposer import Request
from specllama.spec.proposers.backoff import Backoff
from specllama.spec.proposers.draft_model import common_prefix
from specllama.spec.sampling import SamplerChain
from specllama.spec.tree import TreeBuilder
from specllama.spec.types import EMPTY_DRAFT, Draft, Guess, HiddenNeed, Room, Verdict

BREAK = -1  # stands between texts; never proposed
PAST = "suffix-past"  # guesses that continue as an earlier text did
_COUNTED = 32  # suffixes of a token whose counts grow with it: bounds the work per token
_ENDS_TRIED = 4  # match lengths compared per round
_OVERLAP = 64  # tokens before an edit that are read again, so that matches can reach back
_LIKELY = 0.01  # path probability below which a copy is not worth a row

# Reliability of a match of 1, 2-3, 4-7, 8-15, 16-31, 32+ tokens before anything was seen, worth
# _PRIOR tested guesses.
_RELIABLE = (0.25, 0.45, 0.65, 0.8, 0.9, 0.95)
_PRIOR = 4.0


class SuffixAutomaton:
    """The smallest automaton that knows every substring of a text (Blumer et al. 1985), online.

    A state stands for substrings that occur at the same places; ``length`` is its longest,
    ``link`` leads to the longest of their suffixes that also occurs elsewhere. ``count`` is how
    often a state's substrings occurred, exact while a token has at most _COUNTED suffixes that
    are states of their own.
    """

    def __init__(self) -> None:
        self.next: list[dict[int, int]] = [{}]
        self.link: list[int] = [-1]
        self.length: list[int] = [0]
        self.count: list[int] = [0]
        self.newest: list[int] = [0]  # where a state's substrings ended last
        self.last = 0
        self.size = 0  # tokens read

    def extend(self, token: int) -> None:
        """Append one token; amortised constant time."""
        new = self._state({}, self.length[self.last] + 1, 0)
        p = self.last
        while p >= 0 and token not in self.next[p]:
            self.next[p][token] = new
            p = self.link[p]
        if p < 0:
            self.link[new] = 0
        else:
            q = self.next[p][token]
            if self.length[q] == self.length[p] + 1:
                self.link[new] = q
            else:
                clone = self._state(dict(self.next[q]), self.length[p] + 1, self.count[q])
                self.newest[clone] = self.newest[q]
                self.link[clone] = self.link[q]
                while p >= 0 and self.next[p].get(token) == q:
                    self.next[p][token] = clone
                    p = self.link[p]
                self.link[q] = self.link[new] = clone
        self.last = new
        self.size += 1
        state = new
        for _ in range(_COUNTED):
            if state <= 0:
                break
            self.count[state] += 1
            self.newest[state] = self.size
            state = self.link[state]

    def ends(self) -> list[tuple[int, int]]:
        """(state, match length) of the longest ends of the text that occurred before."""
        state = self.link[self.last]
        return self.suffixes(state, self.length[state])

    def suffixes(self, state: int, length: int) -> list[tuple[int, int]]:
        """(state, match length) of a match and its own longest ends, the longest first."""
        found: list[tuple[int, int]] = []
        while state > 0 and len(found) < _ENDS_TRIED:
            found.append((state, length))
            state = self.link[state]
            length = self.length[state]
        return found

    def followers(self, state: int) -> list[tuple[int, int, float]]:
        """(token, state, share) of what followed, most frequent first, the newest first on ties."""
        after = [(t, s) for t, s in self.next[state].items() if t != BREAK]
        total = sum(self.count[s] for _, s in after)
        after.sort(key=lambda item: (-self.count[item[1]], -self.newest[item[1]]))
        return [(t, s, self.count[s] / total) for t, s in after]

    def share(self, state: int, token: int) -> float:
        """How often ``token``, of all that followed, came next."""
        after = self.next[state]
        return self.count[after[token]] / sum(self.count[s] for t, s in after.items() if t != BREAK)

    def best(self, state: int) -> tuple[int, int] | None:
        """(token, state) of the first of the followers, None without any."""
        count, newest = self.count, self.newest
        found: tuple[int, int] | None = None
        most = (0, 0)
        for token, after in self.next[state].items():
            if (count[after], newest[after]) > most and token != BREAK:
                found, most = (token, after), (count[after], newest[after])
        return found

    def _state(self, after: dict[int, int], length: int, count: int) -> int:
        self.next.append(after)
        self.link.append(0)
        self.length.append(length)
        self.count.append(count)
        self.newest.append(0)
        return len(self.next) - 1


class Cursor:
    """The longest end of a text that occurs in an automaton which does not hold the text.

    Matching statistics (Chang and Lawler 1994): amortised constant time per token.
    """

    def __init__(self, automaton: SuffixAutomaton) -> None:
        self.automaton = automaton
        self._state = 0
        self._length = 0

    def restart(self, tokens: Sequence[int]) -> None:
        """Follow another text, from its last tokens on."""
        self._state = self._length = 0
        for token in tokens[-_OVERLAP:]:
            self.step(token)

    def step(self, token: int) -> None:
        """The text goes on with ``token``."""
        automaton, state = self.automaton, self._state
        while state and token not in automaton.next[state]:
            state = automaton.link[state]
            self._length = automaton.length[state]
        after = automaton.next[state].get(token)
        self._state, self._length = (0, 0) if after is None else (after, self._length + 1)

    def ends(self) -> list[tuple[int, int]]:
        """(state, match length), the longest first."""
        return self.automaton.suffixes(self._state, self._length)


class SuffixProposer:
    """Drafts by copying, in proportion to what the past says.

    Args:
        min_match: shortest match used.
        past: earlier texts in the same tokens, oldest first, to copy from.
        remember: told every text that ended (replaced by another, or closed).
        most: tokens of earlier texts kept; beyond it only ``past`` is.
    """

    name = "suffix"
    needs: HiddenNeed = "nothing"

    def __init__(
        self,
        *,
        min_match: int = 1,
        past: Iterable[Sequence[int]] = (),
        remember: Callable[[Sequence[int]], None] | None = None,
        most: int = 1 << 16,
    ) -> None:
        self._min_match = min_match
        self._past = [tuple(text) for text in past]
        self._remember = remember
        self._most = most
        self._request: Request | None = None
        self._tested: list[list[float]] = [[0.0, 0.0] for _ in _RELIABLE]  # [hits, expected]
        self._used: int | None = None  # match length of this round's draft
        # of this round's guesses, the longest match first
        self._states: dict[Guess, tuple[SuffixAutomaton, int]] = {}
        self._text: list[int] = []
        self._now = SuffixAutomaton()
        self._habits = Backoff()
        self._before = Cursor(self._kept())

    def start(self, request: Request) -> None:
        self._request = request
        self._used = None

    def propose(self, tokens: Sequence[int], chain: SamplerChain, room: Room) -> Draft:
        if room.judged:
            guesses = self.guesses(tokens, room.n)
            if not guesses:
                return EMPTY_DRAFT
            which, length = room.pick(guesses)
            return self.send(guesses[which], length, room)
        best, best_score = EMPTY_DRAFT, 0.0
        for guess in self._found(tokens, room.n, _ENDS_TRIED):
            draft, score = self._grow(guess, 0, room.n, lambda likely: True)
            if score > best_score:  # the longest match wins a tie: it comes first
                best, best_score = draft, score
                self._used = guess.match_length
        return best

    def guesses(self, tokens: Sequence[int], most: int) -> list[Guess]:
        """The most frequent way on behind the longest match, here and in earlier texts.

        An earlier text is asked only where it matches longer. Shorter matches are left out: the
        best of several doubtful promises is mostly the one that was estimated too high.
        """
        return self._found(tokens, most, 1)

    def _found(self, tokens: Sequence[int], most: int, ends: int) -> list[Guess]:
        """A guess for each of the longest matches of either kind, the longest match first."""
        self._used = None
        self._states.clear()
        if most <= 0:
            return []
        self._follow(tokens)
        here = [(n, self.name, self._now, state) for state, n in self._now.ends()[:ends]]
        longest = here[0][0] if here else 0
        before = self._before.automaton
        there = [(n, PAST, before, state) for state, n in self._before.ends()[:ends] if n > longest]
        for length, source, automaton, state in (*there, *here):
            if length < self._min_match:
                continue
            guess = self._continue(automaton, state, source, length, most)
            if guess is not None:
                self._states.setdefault(guess, (automaton, state))
        return list(self._states)

    def _continue(
        self, automaton: SuffixAutomaton, at: int, source: str, length: int, most: int
    ) -> Guess | None:
        """The most frequent way on from a state, up to the end of a turn."""
        copied: list[int] = []
        is_eog = self._request.is_eog if self._request else None
        while len(copied) < most and (best := automaton.best(at)):
            token, at = best
            copied.append(token)
            if is_eog is not None and is_eog(token):
                break
        if not copied:
            return None
        endings = self._request.endings(self._text[-1], copied) if self._request else ()
        return Guess(source, tuple(copied), length, self._habits.likely(copied), endings)

    def send(self, guess: Guess, length: int, room: Room) -> Draft:
        """The first ``length`` tokens of one of this round's guesses, and likely ways beside them.

        Without a window to weigh them the other ways are left out.
        """
        if length == 0:
            return EMPTY_DRAFT
        most, worth = (room.n, room.beside) if room.judged else (length, None)
        return self._grow(guess, length, most, worth)[0]

    def _grow(
        self, guess: Guess, trunk: int, most: int, worth: Callable[[float], bool] | None
    ) -> tuple[Draft, float]:
        """A tree below the match of a guess, and how many of its nodes are expected to be right.

        Args:
            trunk: tokens of the guess that are in it in any case.
            most: nodes.
            worth: which others to add, the likeliest first; None for a chain.
        """
        request, match = self._request, guess.match_length
        automaton, begin = self._states[guess]
        self._used = match
        leaves = request.leaves if request and worth is not None else 1
        tree = TreeBuilder(max_nodes=most, max_leaves=leaves)
        heap: list[tuple[float, int, int, int, int, int]] = []
        pushed = 0

        def offer(node: int, depth: int, state: int, weight: float, but: int | None = None) -> None:
            nonlocal pushed
            trust = self._trust(match + depth)
            for token, after, share in automaton.followers(state):
                likely = weight * share * trust
                if likely < _LIKELY:
                    break
                if token != but:
                    pushed += 1
                    heapq.heappush(heap, (-likely, pushed, node, depth, token, after))

        node, state, weight, score = -1, begin, 1.0, 0.0
        weights = {-1: 1.0}
        for depth, token in enumerate(guess.tokens[:trunk]):
            offer(node, depth, state, weight, but=token)
            trust, share = self._trust(match + depth), automaton.share(state, token)
            added = tree.add(node, token, self.name, confidence=share * trust)
            assert added is not None  # a chain of at most ``most`` nodes always fits
            node, state = added, automaton.next[state][token]
            weight *= share * trust
            weights[node] = weight
            score += weight
        if trunk == 0:
            offer(-1, 0, state, 1.0)
        while worth is not None and heap and tree.room > 0:
            negative, _, parent, depth, token, after = heapq.heappop(heap)
            weight = -negative
            if not worth(weight):
                break
            found = tree.add(parent, token, self.name, confidence=weight / weights[parent])
            if found is None:
                continue
            weights[found] = weight
            score += weight
            if request is None or not request.is_eog(token):
                offer(found, depth + 1, after, weight)
        return tree.build(), score

    def _trust(self, match: int) -> float:
        """Probability that the target goes on as the text did after a match of this length."""
        size = _size(match)
        hits, expected = self._tested[size]
        return min((hits + _PRIOR * _RELIABLE[size]) / (expected + _PRIOR), 0.98)

    # -- the text --

    def _follow(self, tokens: Sequence[int]) -> None:
        """Read the tokens that are new. What an edit replaces joins the earlier texts."""
        keep = common_prefix(self._text, tokens)
        if keep == len(self._text):
            new = tokens[keep:]
            for token in new:
                self._before.step(token)
        else:
            self._ended()
            past = self._before.automaton
            gone = self._text[max(keep - _OVERLAP, 0) :]
            if past.size + len(gone) > self._most:
                self._before = Cursor(self._kept())
            else:
                for token in (*gone, BREAK):
                    past.extend(token)
            self._before.restart(tokens)
            self._now = SuffixAutomaton()
            self._habits = Backoff()
            new = tokens
        for token in new:
            self._now.extend(token)
        self._habits.extend(new)
        self._text = list(tokens)

    def _kept(self) -> SuffixAutomaton:
        """What earlier runs left."""
        automaton = SuffixAutomaton()
        for text in self._past:
            for token in (*text, BREAK):
                automaton.extend(token)
        return automaton

    def _ended(self) -> None:
        if self._remember is not None and self._text:
            self._remember(self._text)

    def commit(self, tokens: Sequence[int], draft: Draft, verdict: Verdict) -> None:
        """Compare what the tested guesses promised with what was accepted."""
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
        self._ended()
        self._text = []
        self._tested = [[0.0, 0.0] for _ in _RELIABLE]
        self._now = SuffixAutomaton()
        self._habits = Backoff()
        self._before = Cursor(self._kept())

    def close(self) -> None:
        self._ended()
        self._text = []


def _size(length: int) -> int:
    """The class of a match length: 1, 2-3, 4-7, ... as an index of _RELIABLE."""
    return min(length.bit_length(), len(_RELIABLE)) - 1
