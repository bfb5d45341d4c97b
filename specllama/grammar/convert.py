"""A JSON schema as a GBNF grammar.

Whatever the grammar allows is JSON and satisfies the schema. It does not allow everything that
does: objects have their properties in the order of the schema, and no others unless it asks for
them (``additionalProperties``, ``patternProperties``, or no ``properties`` at all). A schema
without ``type`` whose keywords all belong to one type means that type. A keyword that cannot be
enforced is refused by name; unknown keywords mean nothing, as in the standard.
"""

from __future__ import annotations

import json
from decimal import Decimal
from itertools import combinations
from typing import Any

from specllama.errors import UsageError
from specllama.grammar.automaton import words
from specllama.grammar.numerals import Bound, integers, numbers
from specllama.grammar.objects import Members, members_of
from specllama.grammar.places import Leaves, Place, Places, cannot, members, wrong
from specllama.grammar.rules import Alternative, Atom, Rules, literal, ref
from specllama.grammar.strings import between, naming, regular
from specllama.grammar.values import Validator, items, json_text, listed, types_of

MAX_DEPTH = 100  # of schemas within schemas
MAX_SCHEMAS = 10_000
MAX_EXCLUSIVE = 32  # members of one oneOf: each is compared with every other
MAX_DIGITS = 300  # of a bound
_FAMILIES = {
    "number": ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"),
    "string": ("minLength", "maxLength", "pattern", "format"),
    "array": (
        *("prefixItems", "items", "additionalItems", "minItems", "maxItems", "uniqueItems"),
        *("contains", "unevaluatedItems"),
    ),
    "object": (
        *("properties", "required", "additionalProperties", "patternProperties"),
        *("propertyNames", "minProperties", "maxProperties", "unevaluatedProperties"),
    ),
}
WS = ref("ws")


def schema_to_gbnf(text: str) -> str:
    """A grammar, with the root rule ``root``, for JSON text that satisfies a schema.

    Raises:
        UsageError: it is not a JSON object; it has a reference that leads nowhere or to another
            document; it refers to itself with no array or object in between; nothing can satisfy
            it; it is too big; or it has a keyword that cannot be enforced.
    """
    try:
        schema = json.loads(text, parse_constant=_no_number)
    except (ValueError, RecursionError) as error:
        raise UsageError(
            f"the JSON schema is not JSON: {error}", "give the schema itself, or @FILE"
        ) from None
    if not isinstance(schema, dict):
        raise UsageError("a JSON schema is an object", 'for example {"type": "object"}')
    try:
        return Converter(Places(schema)).grammar()
    except RecursionError:
        raise UsageError(
            "the JSON schema is too big for a grammar", f"at most {MAX_DEPTH} levels"
        ) from None


def _no_number(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


class Converter:
    """Rules for the places of one document, made on demand."""

    def __init__(self, places: Places) -> None:
        self.places = places
        self.rules = Rules()
        self.validator = Validator(places)
        self._made: dict[tuple[str, ...], str] = {}
        self._depth = 0
        self._nothing: list[str] = []  # why alternatives were dropped, for the message
        self.rules.once("ws", [], [literal(" ")], [literal("\n"), Atom("[ \\t]{0,20}")])
        hexes = "[0-9a-fA-F]"
        self.rules.once(
            "char",
            [Atom('[^"\\\\\\x00-\\x1F\\uD800-\\uDFFF\\U00110000-\\U7FFFFFFF]')],
            [Atom('"\\\\" ["\\\\/bfnrt]')],
            [Atom(f'"\\\\u" [0-9a-cA-CefEF] {hexes}{{3}}')],
            [Atom(f'"\\\\u" [dD] [0-7] {hexes}{{2}}')],
        )

    def grammar(self) -> str:
        root = self.rule(self.places.root)
        if root not in self.rules.productive():
            why = f": {self._nothing[0]}" if self._nothing else ""
            raise UsageError(
                f"no finite value can satisfy the JSON schema{why}",
                "look for bounds that exclude each other, and for required parts that never end",
            )
        for place in list(self.places.exclusive.values()):
            self._check_exclusive(place)
        return self.rules.text(root)

    def rule(self, *conjunction: Place) -> str:
        """The rule for values that satisfy the schemas at all of these places."""
        key = tuple(sorted({place.pointer for place in conjunction if place.schema is not True}))
        if key in self._made:
            return self._made[key]
        if self._depth >= MAX_DEPTH or len(self._made) >= MAX_SCHEMAS:
            raise UsageError(
                "the JSON schema is too big for a grammar",
                f"at most {MAX_DEPTH} levels and {MAX_SCHEMAS} schemas; name what repeats in $defs",
            )
        name = self._made[key] = self.rules.new("value")
        self._depth += 1
        for leaves in self.places.alternatives(conjunction):
            self.rules.bodies[name] += self.bodies(leaves)
        self._depth -= 1
        return name

    def bodies(self, leaves: Leaves, only: Members | None = None) -> list[Alternative]:
        """Alternatives for the values that satisfy plain schemas, by their types."""
        values = listed(leaves)
        if values is not None:
            return self._listed([v for v in values if self.validator.fits(v, leaves)], leaves)
        found: list[Alternative] = []
        types = self._types(leaves)
        if "null" in types:
            found.append((literal("null"),))
        if "boolean" in types:
            found += [(literal("true"),), (literal("false"),)]
        if "integer" in types:
            found += self._number(leaves, whole="number" not in types)
        if "string" in types:
            found += self._string(leaves)
        if "array" in types:
            found += self._array(leaves)
        if "object" in types:
            found += members_of(self, leaves, only)
        return found

    def nothing(self, why: str) -> list[Alternative]:
        self._nothing.append(why)
        return []

    def _types(self, leaves: Leaves) -> set[str]:
        said = [types_of(place) for place in leaves if place.has("type")]
        if said:
            types = set.intersection(*said)
            if not types:
                self.nothing(f"the types at {leaves[-1].pointer} exclude each other")
            return types
        families = [
            family
            for family, keys in _FAMILIES.items()
            if any(place.has(key) for place in leaves for key in keys)
        ]
        if len(families) == 1:
            return {"number", "integer"} if families == ["number"] else set(families)
        return {"null", "boolean", "integer", "number", "string", "array", "object"}

    def _listed(self, values: list[Any], leaves: Leaves) -> list[Alternative]:
        if not values:
            place = next(p for p in leaves if p.has("enum") or p.has("const"))
            key = "enum" if place.has("enum") else "const"
            return self.nothing(f"no value of {key} at {place.pointer} satisfies the rest")
        texts = [json_text(value) for value in values]
        if len(texts) == 1:
            return [(literal(texts[0]),)]
        return [(ref(self.rules.regular(words(texts), in_string=False)),)]

    # ---- numbers

    def _number(self, leaves: Leaves, *, whole: bool) -> list[Alternative]:
        low, high = self._bounds(leaves)
        divisor, where = 1, leaves[0] if leaves else self.places.root
        for place in leaves:
            if place.has("multipleOf"):
                step = _decimal(place, "multipleOf")
                if step <= 0:
                    raise wrong(place, "multipleOf", "must be above 0")
                top, bottom = step.as_integer_ratio()
                if bottom != 1 and not whole:
                    raise cannot(place, "multipleOf", "a grammar can check whole numbers only")
                divisor, where = _lcm(divisor, top), place
        if (
            low is not None
            and high is not None
            and (
                low.value > high.value or (low.value == high.value and (low.strict or high.strict))
            )
        ):
            return self.nothing(f"no number lies between {low.value} and {high.value}")
        if divisor == 1 and low is None and high is None:
            return [(ref(self._integer() if whole else self._any_number()),)]
        if divisor > 1:
            key = "multipleOf"
        else:
            bounds = ("minimum", "exclusiveMinimum", "maximum", "exclusiveMaximum")
            where, key = next((p, k) for p in leaves for k in bounds if p.has(k))
        with naming(where, key):
            if whole or divisor > 1:
                dfa = integers(low, high, divisor)
            else:
                dfa = numbers(low, high)
            if dfa.empty:
                return self.nothing(f"no number satisfies {key} at {where.pointer}")
            return [(ref(self.rules.regular(dfa, in_string=False)),)]

    def _bounds(self, leaves: Leaves) -> tuple[Bound | None, Bound | None]:
        lows, highs = [], []
        for place in leaves:
            own: dict[str, list[Bound]] = {"minimum": [], "maximum": []}
            for key in ("minimum", "maximum"):
                strict = f"exclusive{key.capitalize()}"
                as_flag = isinstance(place.schema.get(strict), bool)  # before draft 6
                if place.has(key):
                    flag = as_flag and place.schema[strict] is True
                    own[key].append(Bound(_decimal(place, key), flag))
                if place.has(strict) and not as_flag:
                    own[key].append(Bound(_decimal(place, strict), True))
            for least in own["minimum"]:
                for most in own["maximum"]:
                    if least.value > most.value:
                        raise wrong(place, "minimum", f"({least.value}) is above {most.value}")
            lows += own["minimum"]
            highs += own["maximum"]
        low = max(lows, key=lambda b: (b.value, b.strict), default=None)
        high = min(highs, key=lambda b: (b.value, not b.strict), default=None)
        return low, high

    def _integer(self) -> str:
        rule = [Atom('"-"?'), Atom('("0" | [1-9] [0-9]{0,15})')]
        return self.rules.once("integer", rule)

    def _any_number(self) -> str:
        exponent = Atom("([eE] [-+]? [1-9] [0-9]?)?")
        rule = [ref(self._integer()), Atom('("." [0-9]{1,16})?'), exponent]
        return self.rules.once("number", rule)

    # ---- strings and arrays

    def _string(self, leaves: Leaves) -> list[Alternative]:
        least, most = between(leaves, "minLength", "maxLength")
        if most is not None and least > most:
            return self.nothing(f"no string has at least {least} and at most {most} characters")
        dfa = regular(leaves, least, most)
        if dfa is None:
            if not least and most is None:
                quoted = [literal('"'), Atom("char*", "char", optional=True), literal('"')]
                return [(ref(self.rules.once("string", quoted)),)]
            return [(literal('"'), *self.rules.repeated("char", least, most), literal('"'))]
        if dfa.empty:
            return self.nothing(f"no string satisfies the patterns at {leaves[-1].pointer}")
        return [(literal('"'), ref(self.rules.regular(dfa, in_string=True)))]

    def _array(self, leaves: Leaves) -> list[Alternative]:
        for place in leaves:
            _refuse_in_arrays(place)
        least, most = between(leaves, "minItems", "maxItems")
        if most is not None and least > most:
            return self.nothing(f"no array has at least {least} and at most {most} items")
        parts = [items(place) for place in leaves]
        first = max((len(own) for own, _ in parts), default=0)
        rest = [more for _, more in parts if more is not None]
        if first and not rest:
            most = max(first, least) if most is None else min(most, max(first, least))
        if any(more.schema is False for more in rest):
            most = first if most is None else min(most, first)
        if most is not None and least > most:
            return self.nothing(f"there are no {least} items at {leaves[-1].pointer}")
        first = first if most is None else min(first, most)
        end, comma = [WS, literal("]")], literal(",")
        # from the last place on: what may follow when i items have been read
        follows: list[list[Alternative]] = []
        if most is None or most > first:
            item = self.rule(*rest)
            lacking, room = max(least - first, 0), None if most is None else most - first
            if first:
                more = self.rules.new("more", [comma, WS, ref(item)])
                follows = [[(*self.rules.repeated(more, lacking, room), *end)]]
            else:
                more = self.rules.new("more", [comma, WS, ref(item)])
                behind = self.rules.repeated(more, max(lacking - 1, 0), room and room - 1)
                follows = [[(ref(item), *behind, *end)]]
                if not least:
                    follows[0].append((literal("]"),))
        else:
            follows = [[tuple(end) if first else (literal("]"),)]]
        for i in reversed(range(first)):
            own = [own[i] if i < len(own) else more for own, more in parts]
            item = self.rule(*(place for place in own if place is not None))
            behind_it = self.rules.new("items", *follows[0])
            here: list[Alternative] = [(*((comma, WS) if i else ()), ref(item), ref(behind_it))]
            if i >= least:
                here.append(tuple(end) if i else (literal("]"),))
            follows.insert(0, here)
        return [(literal("["), WS, *body) for body in follows[0]]

    # ---- oneOf

    def _check_exclusive(self, place: Place) -> None:
        """Refuse a ``oneOf`` of which one text could satisfy two members."""
        options = list(members(place, "oneOf"))
        if len(options) > MAX_EXCLUSIVE:
            raise cannot(place, "oneOf", f"more than {MAX_EXCLUSIVE} members; use anyOf")
        rest = {key: value for key, value in place.schema.items() if key != "oneOf"}
        beside = Place(f"{place.pointer}-beside", rest)
        for one, other in combinations(options, 2):
            if self._meet(beside, one, other) or self._meet(beside, other, one):
                numbers = f"{one.pointer.rsplit('/', 1)[1]} and {other.pointer.rsplit('/', 1)[1]}"
                raise cannot(place, "oneOf", f"a value may satisfy both {numbers}; use anyOf")

    def _meet(self, beside: Place, one: Place, other: Place) -> bool:
        """Whether something that is written for ``one`` may satisfy ``other`` as well."""
        fresh = Converter(self.places)
        found: list[Alternative] = []
        for mine in self.places.alternatives([beside, one]):
            for its in self.places.alternatives([other]):
                both = tuple({p.pointer: p for p in (*mine, *its)}.values())
                found += fresh.bodies(both, Members.of(mine))
        root = fresh.rules.new("both", *found)
        return root in fresh.rules.productive()


def _refuse_in_arrays(place: Place) -> None:
    schema = place.schema
    most = schema.get("maxItems")
    if schema.get("uniqueItems", False) is not False and most not in (0, 1):
        raise cannot(place, "uniqueItems", "a grammar cannot remember earlier items")
    if "contains" in schema and not (
        schema.get("minContains") == 0 and "maxContains" not in schema
    ):
        raise cannot(place, "contains", "a grammar cannot count items of one kind")
    if schema.get("unevaluatedItems", True) is not True:
        raise cannot(place, "unevaluatedItems", "use items")


def _decimal(place: Place, key: str) -> Decimal:
    value = place.schema[key]
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise wrong(place, key, f"must be a number, not {json.dumps(value)[:40]}")
    number = Decimal(repr(value) if isinstance(value, float) else value)
    if not number.is_finite() or abs(number.adjusted()) > MAX_DIGITS:
        raise cannot(place, key, f"it has more than {MAX_DIGITS} digits")
    return number


def _lcm(a: int, b: int) -> int:
    x, y = a, b
    while y:
        x, y = y, x % y
    return a // x * b
