"""Regular languages over characters: what patterns, formats and number ranges become.

An expression is compiled to a deterministic automaton; automata can be intersected and
complemented, so several rules for one text become one.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TypeVar

from specllama.errors import UsageError

Intervals = tuple[tuple[int, int], ...]  # of code points, ascending and disjoint
ANY: Intervals = ((0, 0xD7FF), (0xE000, 0x10FFFF))  # surrogates are not characters
MAX_STATES = 20_000  # while an automaton is being built
MAX_KEPT = 2_500  # of a finished one: each becomes a rule, which llama.cpp copies for every fork


# ---- sets of characters


def union(*sets: Intervals) -> Intervals:
    merged: list[tuple[int, int]] = []
    for low, high in sorted(pair for one in sets for pair in one):
        if merged and low <= merged[-1][1] + 1:
            merged[-1] = (merged[-1][0], max(high, merged[-1][1]))
        else:
            merged.append((low, high))
    return tuple(merged)


def intersection(a: Intervals, b: Intervals) -> Intervals:
    return tuple((max(p, r), min(q, s)) for p, q in a for r, s in b if max(p, r) <= min(q, s))


def without(a: Intervals, b: Intervals) -> Intervals:
    out = list(a)
    for low, high in b:
        out = [
            piece
            for p, q in out
            for piece in ((p, min(q, low - 1)), (max(p, high + 1), q))
            if piece[0] <= piece[1]
        ]
    return tuple(out)


# ---- expressions


@dataclass(frozen=True, slots=True)
class Chars:
    """One character of a set; the empty set matches nothing."""

    of: Intervals


@dataclass(frozen=True, slots=True)
class Seq:
    parts: tuple[Expr, ...] = ()


@dataclass(frozen=True, slots=True)
class Alt:
    parts: tuple[Expr, ...] = ()


@dataclass(frozen=True, slots=True)
class Repeat:
    """``least`` to ``most`` times; None means unbounded."""

    part: Expr
    least: int
    most: int | None


@dataclass(frozen=True, slots=True)
class Edge:
    """``^`` (begin) or ``$``."""

    begin: bool


Expr = Chars | Seq | Alt | Repeat | Edge
NOTHING = Chars(())
EMPTY = Seq()


def seq(*parts: Expr) -> Expr:
    return Seq(parts)


def alt(*parts: Expr) -> Expr:
    return Alt(parts)


def text(word: str) -> Expr:
    return Seq(tuple(Chars(((ord(c), ord(c)),)) for c in word))


# ---- automata


class Dfa:
    """States are numbers, 0 the first. ``edges[s]`` are (low, high, target), ascending."""

    def __init__(self, edges: list[list[tuple[int, int, int]]], accepting: Iterable[int]) -> None:
        self.edges = edges
        self.accepting = frozenset(accepting)

    @property
    def empty(self) -> bool:
        """Whether it accepts no text at all. Automata never have dead states."""
        return not self.accepting

    @property
    def lengths(self) -> tuple[int, int | None]:
        """The fewest and the most characters of a text; None if there is no limit."""
        reached, depth, least, most = {0}, 0, -1, 0
        while reached and depth <= len(self.edges):
            if reached & self.accepting:
                least = depth if least < 0 else least
                most = depth
            reached = {target for state in reached for _, _, target in self.edges[state]}
            depth += 1
        return max(least, 0), None if reached else most

    def accepts(self, word: str) -> bool:
        state = 0
        for c in map(ord, word):
            found = [t for low, high, t in self.edges[state] if low <= c <= high]
            if not found:
                return False
            state = found[0]
        return state in self.accepting

    def complement(self) -> Dfa:
        """Every text that this one does not accept."""
        sink = len(self.edges)
        edges = []
        for out in [*self.edges, []]:
            rest = without(ANY, tuple((low, high) for low, high, _ in out))
            edges.append(sorted([*out, *((low, high, sink) for low, high in rest)]))
        return tidy(edges, set(range(sink + 1)) - self.accepting)

    def __and__(self, other: Dfa) -> Dfa:
        def step(pair: tuple[int, int]) -> list[tuple[int, int, tuple[int, int]]]:
            return [
                (max(p, r), min(q, s), (mine, its))
                for p, q, mine in self.edges[pair[0]]
                for r, s, its in other.edges[pair[1]]
                if max(p, r) <= min(q, s)
            ]

        return _explore(
            (0, 0), step, lambda pair: pair[0] in self.accepting and pair[1] in other.accepting
        )


def words(of: Sequence[str]) -> Dfa:
    """The automaton of a finite set of texts."""
    edges: list[list[tuple[int, int, int]]] = [[]]
    ends = set()
    for word in of:
        state = 0
        for c in map(ord, word):
            for low, _, target in edges[state]:
                if low == c:
                    state = target
                    break
            else:
                edges[state].append((c, c, len(edges)))
                state = len(edges)
                edges.append([])
        ends.add(state)
    return tidy([sorted(out) for out in edges], ends, most=MAX_STATES)


def compiled(expr: Expr, *, search: bool = False) -> Dfa:
    """The automaton of an expression.

    Args:
        search: accept every text with a match anywhere in it, as patterns do.

    Raises:
        UsageError: it needs too many states.
    """
    nfa = _Nfa()
    end = nfa.state()
    begin = nfa.state()
    last = nfa.add(expr, begin)
    nfa.free[last].append(end)
    if search:
        nfa.chars[end].append((ANY, end))
        first = nfa.state()  # a loop that nothing leads back to
        nfa.chars[first].append((ANY, first))
        nfa.free[first].append(begin)
        begin = first

    def step(states: _States) -> list[tuple[int, int, _States]]:
        moves = [
            (low, high, target)
            for state, ended in states
            if not ended
            for of, target in nfa.chars[state]
            for low, high in of
        ]
        cuts = sorted({low for low, _, _ in moves} | {high + 1 for _, high, _ in moves})
        out: list[tuple[int, int, _States]] = []
        for low, after in pairwise(cuts):
            targets = frozenset(t for p, q, t in moves if p <= low <= q)
            if not targets:
                continue
            reached = nfa.closure(targets, begin=False)
            if out and out[-1][1] == low - 1 and out[-1][2] == reached:
                out[-1] = (out[-1][0], after - 1, reached)
            else:
                out.append((low, after - 1, reached))
        return out

    return _explore(
        nfa.closure(frozenset([begin]), begin=True), step, lambda states: (end, True) in states
    )


_States = frozenset[tuple[int, bool]]


class _Nfa:
    def __init__(self) -> None:
        self.chars: list[list[tuple[Intervals, int]]] = []
        self.free: list[list[int]] = []
        self.edge: list[list[tuple[bool, int]]] = []  # passable only at the beginning or the end

    def state(self) -> int:
        if len(self.chars) >= MAX_STATES:
            raise UsageError("a pattern or range of the JSON schema is too large")
        self.chars.append([])
        self.free.append([])
        self.edge.append([])
        return len(self.chars) - 1

    def add(self, expr: Expr, at: int) -> int:
        """Append an expression; returns the state after it."""
        match expr:
            case Chars(of):
                after = self.state()
                self.chars[at].append((of, after))
            case Edge(begin):
                after = self.state()
                self.edge[at].append((begin, after))
            case Seq(parts):
                after = at
                for part in parts:
                    after = self.add(part, after)
            case Alt(parts):
                after = self.state()
                for part in parts:
                    start = self.state()
                    self.free[at].append(start)
                    self.free[self.add(part, start)].append(after)
            case Repeat(part, least, most):
                for _ in range(least):
                    at = self.add(part, at)
                after = self.state()
                self.free[at].append(after)
                if most is None:
                    start = self.state()
                    self.free[at].append(start)
                    end = self.add(part, start)
                    self.free[end] += [start, after]
                for _ in range((most or 0) - least):
                    start = self.state()
                    self.free[at].append(start)
                    at = self.add(part, start)
                    self.free[at].append(after)
        return after

    def closure(self, states: frozenset[int], *, begin: bool) -> _States:
        """States reached without a character, each with whether the text may end there only.

        (s, False) goes on; (s, True) was reached by way of ``$``, or may be as well.
        """
        seen = {(s, False) for s in states}
        todo = list(seen)
        while todo:
            state, ended = todo.pop()
            reached = [(t, ended) for t in self.free[state]]
            for is_begin, target in self.edge[state]:
                if not is_begin:
                    reached.append((target, True))
                elif begin:
                    reached.append((target, ended))
            for new in reached:
                if new not in seen:
                    seen.add(new)
                    todo.append(new)
        ends = {(s, True) for s, _ in seen}  # what needs no $ may end as well
        return frozenset({(s, False) for s, ended in seen if not ended} | ends)


_S = TypeVar("_S")


def _explore(
    first: _S, step: Callable[[_S], list[tuple[int, int, _S]]], accepts: Callable[[_S], bool]
) -> Dfa:
    numbers = {first: 0}
    order = [first]
    edges: list[list[tuple[int, int, int]]] = []
    for state in order:
        out = []
        for low, high, target in step(state):
            if target not in numbers:
                if len(order) >= MAX_STATES:
                    raise UsageError("a pattern or range of the JSON schema is too large")
                numbers[target] = len(order)
                order.append(target)
            out.append((low, high, numbers[target]))
        edges.append(sorted(out))
    return tidy(edges, {numbers[s] for s in order if accepts(s)})


def tidy(
    edges: list[list[tuple[int, int, int]]], accepting: set[int], *, most: int = MAX_KEPT
) -> Dfa:
    """The smallest equivalent automaton, without dead states."""
    into = defaultdict(set)
    for state, out in enumerate(edges):
        for _, _, target in out:
            into[target].add(state)
    alive = set(accepting)
    todo = list(accepting)
    while todo:
        for state in into[todo.pop()] - alive:
            alive.add(state)
            todo.append(state)
    if 0 not in alive:
        return Dfa([[]], ())
    kept = {s: [e for e in edges[s] if e[2] in alive] for s in sorted(alive)}
    block = {s: int(s in accepting) for s in kept}
    count = 0
    while True:
        known: dict[tuple[object, ...], int] = {}
        finer = {}
        for s, out in kept.items():
            key = (block[s], *_joined([(low, high, block[t]) for low, high, t in out]))
            finer[s] = known.setdefault(key, len(known))
        if len(known) == count:
            break
        block, count = finer, len(known)
    # the first state gets number 0
    swap = {block[0]: 0, 0: block[0]}
    block = {s: swap.get(b, b) for s, b in block.items()}
    out_edges: list[list[tuple[int, int, int]]] = [[] for _ in range(count)]
    for s, out in kept.items():
        out_edges[block[s]] = _joined([(low, high, block[t]) for low, high, t in out])
    if count > most:
        raise UsageError("a pattern or range of the JSON schema is too large")
    return Dfa(out_edges, {block[s] for s in kept if s in accepting})


def _joined(out: list[tuple[int, int, int]]) -> list[tuple[int, int, int]]:
    joined: list[tuple[int, int, int]] = []
    for low, high, target in sorted(out):
        if joined and joined[-1][1] == low - 1 and joined[-1][2] == target:
            joined[-1] = (joined[-1][0], high, target)
        else:
            joined.append((low, high, target))
    return joined
