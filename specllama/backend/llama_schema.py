"""JSON schemas as GBNF grammars: the binding's converter, with references as rules of their own.

A ``$ref`` becomes a rule that other rules name, so a schema may refer to itself, directly or by
way of others: GBNF is recursive as it is. Only places in the same document can be referred to;
nothing is ever fetched.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import contextmanager
from graphlib import CycleError, TopologicalSorter
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

from llama_cpp.llama_grammar import SchemaConverter

from specllama.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Iterator

MAX_DEPTH = 100  # of schemas within schemas; the converter recurses several frames for each
MAX_SCHEMAS = 10_000
_BESIDE = ("oneOf", "anyOf")  # keywords whose schemas begin where their parent begins


def schema_to_gbnf(text: str) -> str:
    """A grammar, with the root rule ``root``, for JSON text that satisfies a schema.

    Raises:
        UsageError: no JSON object, a reference that leads nowhere or to another document, a schema
            that refers to itself without an array or object in between, or one that is too big.
    """
    try:
        schema = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"the JSON schema is not JSON: {error}") from None
    if not isinstance(schema, dict):
        raise UsageError("a JSON schema must be an object", 'for example {"type": "object"}')
    return _Converter(schema).grammar()


class _Places(dict[str, Any]):
    """The schemas that references lead to, by reference, looked up when first asked for."""

    def __init__(self, root: Mapping[str, Any]) -> None:
        super().__init__({"#": root})
        self._root = root

    def __missing__(self, ref: str) -> Any:
        if not ref.startswith("#"):
            raise UsageError(
                f"the JSON schema refers to another document: {ref}",
                "nothing is fetched: copy that schema under $defs and refer to #/$defs/NAME",
            )
        place: Any = self._root
        for part in unquote(ref).removeprefix("#").split("/")[1:]:
            key = part.replace("~1", "/").replace("~0", "~")
            if isinstance(place, list) and key.isdecimal() and int(key) < len(place):
                place = place[int(key)]
            elif isinstance(place, dict) and key in place:
                place = place[key]
            else:
                raise UsageError(
                    f"the JSON schema has no {ref}", "references look like #/$defs/NAME"
                )
        if not ref.startswith("#/") or not isinstance(place, dict | bool):
            raise UsageError(
                f"the reference {ref} leads to no schema", "references look like #/$defs/NAME"
            )
        self[ref] = place
        return place


class _Converter(SchemaConverter):  # type: ignore[misc]  # the binding ships no types
    """Takes over what the binding does with references; everything else is its own."""

    def __init__(self, schema: dict[str, Any]) -> None:
        super().__init__(prop_order={}, allow_fetch=False, dotall=False, raw_pattern=False)
        self._schema = schema
        self._refs = _Places(schema)
        self._named = {"#": "root"}
        # references that begin where another one begins: a cycle would never end
        self._beside: dict[str, set[str]] = {}
        self._holder: str | None = "#"
        self._depth = 0
        self._visits = 0

    def grammar(self) -> str:
        self.visit(self._schema, "")
        try:
            TopologicalSorter(self._beside).prepare()
        except CycleError as error:
            raise UsageError(
                f"the JSON schema defines {error.args[1][0]} by itself alone",
                "put an array or an object in between",
            ) from None
        text: str = self.format_grammar()
        return text

    def visit(self, schema: Any, name: str) -> str:
        """The name of the rule for a schema; ``name`` is what it would like to be called."""
        self._visits += 1
        if self._depth >= MAX_DEPTH or self._visits > MAX_SCHEMAS:
            raise UsageError(
                "the JSON schema is too big for a grammar",
                f"at most {MAX_DEPTH} levels and {MAX_SCHEMAS} schemas; name what repeats in $defs",
            )
        if schema is True:
            schema = {}
        if not isinstance(schema, dict):
            raise UsageError(f"in the JSON schema, {name or 'root'} must be an object")
        if not isinstance(schema.get("$ref", ""), str):
            raise UsageError("a $ref in the JSON schema is not text")
        begins_here = "$ref" in schema or any(key in schema for key in _BESIDE)
        with self._inside(self._holder if begins_here else None):
            # an empty name would mean the root again
            rule: str = super().visit(schema, name if name or self._depth == 1 else "empty")
        return rule

    def _resolve_ref(self, ref: str) -> str:
        if self._holder is not None:
            self._beside.setdefault(self._holder, set()).add(ref)
        if ref not in self._named:
            place = self._refs[ref]
            # the placeholder keeps the name for the rule while its own parts refer to it
            name = self._add_rule(f"ref-{ref.rsplit('/', 1)[-1]}", f"<{ref}>")
            self._named[ref] = name
            with self._inside(ref):
                self._rules[name] = self.visit(place, f"{name}-is")
        return self._named[ref]

    @contextmanager
    def _inside(self, holder: str | None) -> Iterator[None]:
        """One level down; ``holder`` is the reference whose text begins here, if any."""
        former, self._holder = self._holder, holder
        self._depth += 1
        try:
            yield
        finally:
            self._holder = former
            self._depth -= 1
