"""Objects: their properties in the order of the schema, then further ones if it asks for them.

The names of further properties are written without escapes and never equal a listed name: a name
that occurs twice would replace the value that was checked.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations
from typing import NamedTuple, Protocol

from specllama.grammar.automaton import ANY, Chars, Dfa, Repeat, compiled, words
from specllama.grammar.places import Leaves, Place, Places, cannot, wrong
from specllama.grammar.rules import Alternative, Atom, Rules, literal, ref
from specllama.grammar.strings import between, lengths, naming, none_of, pattern, regular
from specllama.grammar.values import Validator, json_text, listed, mapping, of_property

MAX_PATTERNS = 4
SPACE = Atom('" "?')


class Document(Protocol):
    """The document that objects are part of; it makes their rules."""

    rules: Rules
    places: Places
    validator: Validator

    def rule(self, *conjunction: Place) -> str:
        """The rule for values that satisfy the schemas at all of these places."""

    def nothing(self, why: str) -> list[Alternative]:
        """No alternatives; notes the reason in case none are left."""


class Members(NamedTuple):
    """The properties that are written for a schema: these, and others if it is open."""

    names: frozenset[str]
    open: bool

    @classmethod
    def of(cls, leaves: Leaves) -> Members:
        return cls(frozenset(_names(leaves)), _is_open(leaves))


def members_of(
    document: Document, leaves: Leaves, only: Members | None = None
) -> list[Alternative]:
    """Alternatives for the objects that satisfy plain schemas.

    Args:
        only: nothing else is written, whatever the schemas allow.
    """
    for place in leaves:
        if place.schema.get("unevaluatedProperties", True) is not True:
            raise cannot(place, "unevaluatedProperties", "use additionalProperties")
    required = _required(leaves)
    least, most = between(leaves, "minProperties", "maxProperties")
    if most is not None and least > most:
        return document.nothing(f"no object has at least {least} and at most {most} properties")
    properties: dict[str, str] = {}  # the rules of the listed properties, by name
    listed_names = _names(leaves)
    for name in listed_names:
        conjunction = [inner for place in leaves for inner in of_property(place, name)]
        fits = all(
            document.validator.valid(name, place / "propertyNames")
            for place in leaves
            if place.has("propertyNames")
        )
        written = only is None or only.open or name in only.names
        if not fits or not written or any(inner.schema is False for inner in conjunction):
            if name in required:
                where = next(p for p in leaves if name in p.schema.get("required", ()))
                return document.nothing(
                    f"the property {name!r} is required at {where.pointer}, but cannot be there"
                )
            continue
        head = [literal(f"{json_text(name)}:"), SPACE, ref(document.rule(*conjunction))]
        properties[name] = document.rules.new("property", head)
    extra = ""
    if _is_open(leaves) and (only is None or only.open):
        extra = _extra(document, leaves, listed_names)
    if most is not None and most < len(required):
        return document.nothing(
            f"at most {most} properties, and {len(required)} are required at {leaves[-1].pointer}"
        )
    if least > len(properties) + bool(extra):
        if extra:
            where = next(p for p in leaves if p.has("minProperties"))
            raise cannot(
                where, "minProperties", "names that are not listed might repeat; list them"
            )
        return document.nothing(f"there are no {least} properties at {leaves[-1].pointer}")
    state = _States(document, properties, required, extra, least, most).at(0, 0)
    return [(literal("{"), ref("ws"), ref(state))]


class _States:
    """Rules for the rest of an object: which property is next, and how many were written."""

    def __init__(
        self,
        document: Document,
        properties: dict[str, str],
        required: set[str],
        extra: str,
        least: int,
        most: int | None,
    ) -> None:
        self._rules = document.rules
        self._properties = list(properties.items())
        self._required = required
        self._extra = extra
        self._least = least
        self._most = most
        # count only what matters: without a bound, whether there was one
        can_exceed = most is not None and (bool(extra) or most < len(properties))
        self._cap = len(properties) if can_exceed or least > len(required) else 1
        self._made: dict[tuple[int, int], str] = {}

    def at(self, index: int, count: int) -> str:
        # built from the last one back: recursion would exceed Python's stack
        for i in reversed(range(index, len(self._properties) + 1)):
            for n in range(min(i, self._cap) + 1):
                if (i, n) not in self._made:
                    self._made[i, n] = self._rules.new("object", *self._bodies(i, n))
        return self._made[index, count]

    def _bodies(self, index: int, count: int) -> Iterator[Alternative]:
        comma = (literal(","), ref("ws")) if count else ()
        if index == len(self._properties):
            yield from self._end(count)
            return
        name, rule = self._properties[index]
        if self._cap == 1 or self._most is None or count < self._most:
            behind = self._made[index + 1, min(count + 1, self._cap)]
            yield (*comma, ref(rule), ref(behind))
        if name not in self._required:
            yield (ref(self._made[index + 1, count]),)

    def _end(self, count: int) -> Iterator[Alternative]:
        close = (ref("ws"), literal("}"))
        lacking = max(self._least - count, 0) if self._least > len(self._required) else 0
        if not self._extra:
            if not lacking:
                yield close if count else (literal("}"),)
            return
        room = None if self._most is None else self._most - count
        if lacking > 1 or (room is not None and room < lacking):
            return
        more = self._rules.once(f"{self._extra}-more", [literal(","), ref("ws"), ref(self._extra)])
        if count:
            yield (*self._rules.repeated(more, lacking, room), *close)
            return
        if room is None or room > 0:
            others = self._rules.repeated(more, 0, room and room - 1)
            yield (ref(self._extra), *others, *close)
        if not lacking:
            yield (literal("}"),)


def _names(leaves: Leaves) -> list[str]:
    """The properties that are listed, those that are only required last."""
    names = [name for place in leaves for name in mapping(place, "properties")]
    for place in leaves:
        if place.has("propertyNames"):
            # a finite set of names is a list of properties
            inner = place / "propertyNames"
            names += [name for name in listed((inner,)) or [] if isinstance(name, str)]
    return list(dict.fromkeys([*names, *sorted(_required(leaves) - set(names))]))


def _required(leaves: Leaves) -> set[str]:
    return {name for place in leaves for name in place.schema.get("required", ())}


def _is_open(leaves: Leaves) -> bool:
    """Whether properties that are not listed are written as well."""
    if any(mapping(place, "patternProperties") for place in leaves):
        return True
    said = [p.schema["additionalProperties"] for p in leaves if p.has("additionalProperties")]
    if any(schema is False for schema in said):
        return False
    return bool(said) or not any(place.has("properties") for place in leaves)


def _extra(document: Document, leaves: Leaves, names: list[str]) -> str:
    """The rule for a property that is not listed, its name included; "" if there is none."""
    patterns = list(
        dict.fromkeys(p for place in leaves for p in mapping(place, "patternProperties"))
    )
    where = next((p for p in leaves if p.has("patternProperties")), None)
    if len(patterns) > MAX_PATTERNS and where is not None:
        raise cannot(where, "patternProperties", f"there are more than {MAX_PATTERNS}")
    base = _allowed_names(document, leaves)
    if names:
        base = none_of(names) if base is None else base & none_of(names)
    found: list[Alternative] = []
    for n in range(len(patterns) + 1):
        for chosen in combinations(patterns, n):
            inner = list(_values(leaves, set(chosen)))
            unasked = (
                not chosen and patterns and not any(p.has("additionalProperties") for p in leaves)
            )
            if unasked or any(place.schema is False for place in inner):
                continue
            key = base
            if where is not None:
                with naming(where, "patternProperties"):
                    for text in patterns:
                        dfa = pattern(text) if text in chosen else pattern(text).complement()
                        key = dfa if key is None else key & dfa
            if key is not None and key.empty:
                continue
            found.append((*_name(document, key), literal(":"), SPACE, ref(document.rule(*inner))))
    return document.rules.new("extra", *found) if found else ""


def _name(document: Document, key: Dfa | None) -> Alternative:
    rule = document.rules.regular(key or compiled(Repeat(Chars(ANY), 0, None)), in_string=True)
    return literal('"'), ref(rule)


def _values(leaves: Leaves, patterns: set[str]) -> Iterator[Place]:
    """What the value of an unlisted property must satisfy whose name matches these patterns."""
    for place in leaves:
        mine = [text for text in mapping(place, "patternProperties") if text in patterns]
        yield from (place / "patternProperties" / text for text in mine)
        if not mine and place.has("additionalProperties"):
            yield place / "additionalProperties"


def _allowed_names(document: Document, leaves: Leaves) -> Dfa | None:
    """What ``propertyNames`` leaves of all names; None if it does not say."""
    given = [place / "propertyNames" for place in leaves if place.has("propertyNames")]
    if not given:
        return None
    alternatives = document.places.alternatives(given)
    if len(alternatives) > 1:
        place = next(p for p in leaves if p.has("propertyNames"))
        raise cannot(place, "propertyNames", "it has more than one alternative")
    if not alternatives:
        return words([])
    (names,) = alternatives
    values = listed(names)
    if values is not None:
        fitting = [v for v in values if isinstance(v, str) and document.validator.fits(v, names)]
        return words(fitting)
    typed = [p for p in names if p.has("type") and p.schema["type"] != "string"]
    if typed:
        raise wrong(typed[0], "type", "must be string: it is about names")
    least, most = between(names, "minLength", "maxLength")
    dfa = regular(names, least, most)
    if dfa is None and (least or most is not None):
        place = next(p for p in leaves if p.has("propertyNames"))
        with naming(place, "propertyNames"):
            dfa = lengths(least, most)
    return dfa
