"""A GBNF grammar under construction: rules, compact repetitions, automata, and its text."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field

from specllama.errors import UsageError
from specllama.grammar.automaton import ANY, Dfa, Intervals, intersection, union, without

MAX_RULES = 20_000
_BLOCK = 64  # repetitions are counted in blocks of blocks, as digits of this base
MAX_COUNT = _BLOCK**4 - 1
_RAW = without(ANY, ((0, 31), (34, 34), (92, 92)))  # what needs no escape in a JSON text
_ESCAPED = {8: "b", 9: "t", 10: "n", 12: "f", 13: "r", 34: '"', 92: "\\"}


@dataclass(frozen=True, slots=True)
class Atom:
    """A piece of an alternative.

    Attributes:
        text: GBNF.
        rule: the rule that it names, if any.
        optional: the rule may be absent.
    """

    text: str
    rule: str = ""
    optional: bool = False


def literal(word: str) -> Atom:
    """A literal text."""
    escaped = word.replace("\\", "\\\\").replace('"', '\\"')
    for code, name in ((10, "n"), (13, "r"), (9, "t")):
        escaped = escaped.replace(chr(code), f"\\{name}")
    return Atom(f'"{escaped}"')


def ref(rule: str) -> Atom:
    return Atom(rule, rule)


def maybe(rule: str) -> Atom:
    return Atom(f"{rule}?", rule, optional=True)


Alternative = tuple[Atom, ...]


@dataclass
class Rules:
    """Rules by name. An empty list of alternatives can never be matched."""

    bodies: dict[str, list[Alternative]] = field(default_factory=dict)

    def new(self, kind: str, *alternatives: Sequence[Atom]) -> str:
        """Add a rule named after ``kind``; its alternatives may be filled in later."""
        if len(self.bodies) >= MAX_RULES:
            raise UsageError("the JSON schema is too big for a grammar")
        name = f"{kind}-{len(self.bodies)}"
        self.bodies[name] = [tuple(a) for a in alternatives]
        return name

    def once(self, name: str, *alternatives: Sequence[Atom]) -> str:
        """A shared rule of exactly that name."""
        if name not in self.bodies:
            self.bodies[name] = [tuple(a) for a in alternatives]
        return name

    # ---- repetition

    def repeated(self, rule: str, least: int, most: int | None) -> Alternative:
        """``rule`` from ``least`` to ``most`` times (None: without end).

        llama.cpp unrolls ``x{m,n}``, at most 2000 times; as blocks of blocks, thousands cost only a
        few hundred elements.
        """
        parts = self._exactly(rule, least)
        if most is None:
            parts.append(Atom(f"{rule}*", rule, optional=True))
        elif most > least:
            parts += self._up_to(rule, most - least)
        return tuple(parts)

    def _exactly(self, rule: str, count: int) -> list[Atom]:
        parts = []
        while count:
            count, rest = divmod(count, _BLOCK)
            if rest:
                parts.append(Atom(f"{rule}{{{rest}}}", rule))
            if count:
                rule = self._block(rule)
        return parts[::-1]

    def _up_to(self, rule: str, count: int) -> list[Atom]:
        if count < _BLOCK:
            return [Atom(f"{rule}{{0,{count}}}", rule, optional=True)]
        blocks, rest = divmod(count, _BLOCK)
        block = self._block(rule)
        few = Atom(f"{rule}{{0,{_BLOCK - 1}}}", rule, optional=True)
        last = [Atom(f"{rule}{{0,{rest}}}", rule, optional=True)] if rest else []
        # fewer blocks than there may be and any part of one, or all of them and the rest
        some = self._up_to(block, blocks - 1) if blocks > 1 else []
        every = self._exactly(block, blocks)
        return [ref(self.new("upto", [*some, few], [*every, *last]))]

    def _block(self, rule: str) -> str:
        return self.once(f"{rule}-x{_BLOCK}", [Atom(f"{rule}{{{_BLOCK}}}", rule)])

    # ---- automata

    def regular(self, dfa: Dfa, *, in_string: bool) -> str:
        """A rule for the texts of an automaton.

        Args:
            in_string: they are the characters of a JSON string whose opening quote was read; the
                rule reads the closing one.
        """
        entries = [0] * len(dfa.edges)
        for out in dfa.edges:
            for _, _, target in out:
                entries[target] += 1
        names = [self.new("text") for _ in dfa.edges]
        end = [literal('"')] if in_string else []

        def single(state: int) -> tuple[int, int] | None:
            """The only character after a state and where it leads, if there is nothing else."""
            out = dfa.edges[state]
            if state in dfa.accepting or len(out) != 1 or out[0][0] != out[0][1]:
                return None
            return out[0][0], out[0][2]

        for state, name in enumerate(names):
            by_target: dict[int, Intervals] = {}
            for low, high, target in dfa.edges[state]:
                by_target[target] = union(by_target.get(target, ()), ((low, high),))
            for target, of in by_target.items():
                if len(of) == 1 and of[0][0] == of[0][1]:
                    word = chr(of[0][0])
                    while entries[target] == 1 and (found := single(target)) is not None:
                        word += chr(found[0])
                        target = found[1]
                    heads = [
                        literal(json.dumps(word, ensure_ascii=False)[1:-1] if in_string else word)
                    ]
                else:
                    heads = _classes(of, in_string)
                final = target in dfa.accepting and not dfa.edges[target]
                behind = end if final else [ref(names[target])]
                self.bodies[name] += [(head, *behind) for head in heads]
            if state in dfa.accepting:
                self.bodies[name].append(tuple(end))
        return names[0]

    # ---- the whole

    def productive(self) -> set[str]:
        """The rules that some finite text matches."""
        users: dict[str, list[str]] = {}
        for name, alternatives in self.bodies.items():
            for alternative in alternatives:
                for atom in alternative:
                    users.setdefault(atom.rule, []).append(name)
        good: set[str] = set()
        todo = list(self.bodies)
        while todo:
            name = todo.pop()
            if name not in good and any(
                all(a.optional or not a.rule or a.rule in good for a in alternative)
                for alternative in self.bodies[name]
            ):
                good.add(name)
                todo += users.get(name, [])
        return good

    def text(self, root: str) -> str:
        """GBNF with the rule ``root``; leaves out what only leads to endless texts."""
        good = self.productive()
        lines = []
        seen = {root}
        todo = [root]
        while todo:
            name = todo.pop()
            bodies = []
            for alternative in self.bodies[name]:
                if any(a.rule and a.rule not in good and not a.optional for a in alternative):
                    continue
                kept = [a for a in alternative if not a.rule or a.rule in good]
                bodies.append(" ".join(a.text for a in kept) or '""')
                for atom in kept:
                    if atom.rule and atom.rule not in seen:
                        seen.add(atom.rule)
                        todo.append(atom.rule)
            lines.append(f"{name} ::= {' | '.join(bodies)}")
        return "\n".join([f"root ::= {root}", *lines]) + "\n"


def _classes(of: Intervals, in_string: bool) -> list[Atom]:
    """Atoms that each match one character of a set."""
    if not in_string:
        return [Atom(_class(of))]
    raw = intersection(of, _RAW)
    atoms = [Atom(_class(raw))] if raw else []
    atoms += [
        literal(f"\\{name}") for code, name in _ESCAPED.items() if intersection(of, ((code, code),))
    ]
    if not atoms:  # control characters without a short escape
        atoms = [literal(f"\\u{code:04x}") for low, high in of for code in range(low, high + 1)]
    return atoms


def _class(of: Intervals) -> str:
    inside = "".join(_char(p) if p == q else f"{_char(p)}-{_char(q)}" for p, q in of)
    return f"[{inside}]"


def _char(code: int) -> str:
    c = chr(code)
    if c.isascii() and c.isalnum():
        return c
    return (
        f"\\x{code:02X}" if code < 256 else f"\\u{code:04X}" if code < 65536 else f"\\U{code:08X}"
    )
