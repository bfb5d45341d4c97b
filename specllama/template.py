"""The sandbox in which a model's chat template runs.

A chat template is a program that came with a downloaded file. Jinja's sandbox keeps it away from
Python; this module also bounds what it may cost: size of the template, of its output and of every
string on the way, number of loop turns and calls, and seconds. Nothing a template does can raise
anything but TemplateFailed.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterable, Iterator, Mapping
from contextvars import ContextVar
from datetime import datetime
from functools import lru_cache
from typing import Any

from jinja2 import nodes
from jinja2.exceptions import SecurityError, TemplateError
from jinja2.ext import Extension, LoopControlExtension
from jinja2.filters import do_indent
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

MAX_TEMPLATE_CHARS = 64 * 1024
MAX_STEPS = 100_000  # loop turns and calls
MAX_SECONDS = 2.0
MAX_POWER = 64
MAX_FACTOR = 10**6
MAX_WIDTH = 64

# Padding and layout helpers: a small argument makes a huge string, and no chat needs them.
_FORBIDDEN_FILTERS = frozenset(
    {"batch", "center", "filesizeformat", "format", "pprint", "random", "slice", "urlize"}
    | {"wordwrap", "xmlattr"}
)
_FORBIDDEN_METHODS = frozenset(
    {"center", "encode", "expandtabs", "format_map", "ljust", "maketrans", "rjust", "translate"}
    | {"zfill"}
)
_WIDTH_IN_PERCENT = re.compile(r"%[^%a-zA-Z]*(\*|\d{3,})")


class TemplateFailed(Exception):
    """The template raised, was refused by the sandbox, or wanted too much; the text says which.

    ``refused`` is True in the last two cases, where another try would end in the same way.
    """

    def __init__(self, reason: str, *, refused: bool = False) -> None:
        super().__init__(reason)
        self.refused = refused


class _Budget:
    __slots__ = ("deadline", "max_chars", "steps")

    def __init__(self, max_chars: int) -> None:
        self.max_chars = max_chars
        self.steps = MAX_STEPS
        self.deadline = time.perf_counter() + MAX_SECONDS

    def step(self) -> None:
        self.steps -= 1
        if self.steps < 0:
            raise SecurityError("the chat template loops too long")
        if self.steps % 256 == 0 and time.perf_counter() > self.deadline:
            raise SecurityError("the chat template takes too long")

    def room(self, n: int) -> None:
        if n > self.max_chars:
            raise SecurityError("the chat template builds a text that is too long")


# Set before compiling as well: constant folding runs filters then.
_budget: ContextVar[_Budget] = ContextVar("budget")


def _counted(items: Iterable[Any]) -> Iterator[Any]:
    budget = _budget.get()
    for item in items:
        budget.step()
        yield item


def _join(items: Iterable[Any], separator: str = "", attribute: str | int | None = None) -> str:
    budget = _budget.get()
    parts: list[str] = []
    total = 0
    for item in items:
        budget.step()
        if attribute is not None:
            item = item[attribute]
        parts.append(str(item))
        total += len(parts[-1]) + len(separator)
        budget.room(total)
    return str(separator).join(parts)


def _replace(text: object, old: object, new: object, count: int = -1) -> str:
    whole, was, now = str(text), str(old), str(new)
    _budget.get().room(len(whole) + whole.count(was) * len(now))
    return whole.replace(was, now, count)


def _indent(text: str, width: int | str = 4, first: bool = False, blank: bool = False) -> str:
    size = len(width) if isinstance(width, str) else width
    _budget.get().room(len(text) + max(size, 0) * (text.count("\n") + 1))
    return str(do_indent(text, width, first, blank))


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    if isinstance(indent, int) and indent > MAX_WIDTH:
        raise SecurityError("tojson: the indent is too wide")
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _raise_exception(message: str) -> None:
    raise TemplateError(message)


def _strftime_now(layout: str) -> str:
    return datetime.now().strftime(layout[:200])


class _Generation(Extension):  # type: ignore[misc]
    """``{% generation %}`` marks the assistant's words for training; here it is transparent."""

    tags = frozenset({"generation"})

    def parse(self, parser: Any) -> Any:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Bounded(NodeTransformer):  # type: ignore[misc]
    """Route every loop and every ``~`` through a filter that counts."""

    def visit_For(self, node: Any) -> Any:
        self.generic_visit(node)
        node.iter = _filter(node.iter, "_counted")
        return node

    def visit_Concat(self, node: Any) -> Any:
        self.generic_visit(node)
        return _filter(nodes.List(node.nodes, lineno=node.lineno), "_join")


def _filter(node: Any, name: str) -> Any:
    return nodes.Filter(node, name, [], [], None, None, lineno=node.lineno)


class _Environment(ImmutableSandboxedEnvironment):  # type: ignore[misc]
    intercepted_binops = frozenset({"**", "*", "%", "+"})

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[LoopControlExtension, _Generation],
            cache_size=0,
        )
        for name in _FORBIDDEN_FILTERS:
            self.filters.pop(name, None)
        self.filters.update(
            _counted=_counted,
            _join=_join,
            join=_join,
            replace=_replace,
            indent=_indent,
            tojson=_tojson,
        )
        self.globals.pop("lipsum", None)
        self.globals.update(raise_exception=_raise_exception, strftime_now=_strftime_now)

    def _parse(self, source: str, name: str | None, filename: str | None) -> Any:
        return _Bounded().visit(super()._parse(source, name, filename))

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        if isinstance(obj, str) and attr in _FORBIDDEN_METHODS:
            return False
        return bool(super().is_safe_attribute(obj, attr, value))

    def wrap_str_format(self, value: Any) -> Any:
        # Format specifications carry widths, also nested ones; plain {} and {0} do not.
        if getattr(value, "__name__", "") == "format" and ":" in getattr(value, "__self__", ""):
            raise SecurityError("format specifications are not allowed in a chat template")
        return super().wrap_str_format(value)

    def call(self, context: Any, function: Any, *args: Any, **kwargs: Any) -> Any:
        budget = _budget.get()
        budget.step()
        owner = getattr(function, "__self__", None)
        if isinstance(owner, str):
            name = getattr(function, "__name__", "")
            if name == "join" and len(args) == 1:
                return _join(args[0], owner)
            if name == "replace" and len(args) in (2, 3):
                return _replace(owner, *args)
        result = super().call(context, function, *args, **kwargs)
        if isinstance(result, str):
            budget.room(len(result))
        return result

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        budget = _budget.get()
        budget.step()
        if operator == "**":
            if abs(left) > MAX_FACTOR or abs(right) > MAX_POWER:
                raise SecurityError("a power in the chat template is too large")
        elif operator == "*":
            for items, count in ((left, right), (right, left)):
                if hasattr(items, "__len__"):
                    budget.room(len(items) * max(int(count), 0))
            if isinstance(left, int) and isinstance(right, int):
                budget.room(left.bit_length() + right.bit_length())
        elif operator == "%":
            if isinstance(left, str) and _WIDTH_IN_PERCENT.search(left):
                raise SecurityError("a width in the chat template is too large")
        elif hasattr(left, "__len__") and hasattr(right, "__len__"):
            budget.room(len(left) + len(right))
        return super().call_binop(context, operator, left, right)


@lru_cache(maxsize=16)
def _compiled(source: str) -> Any:
    return _Environment().from_string(source)


def render_template(source: str, variables: Mapping[str, Any], *, max_chars: int) -> str:
    """Render a chat template.

    Args:
        source: the template as it stands in the model file, at most 64 kB.
        variables: what it sees (messages, bos_token, ...).
        max_chars: longest text it may build.

    Raises:
        TemplateFailed: for whatever reason; one line.
    """
    if len(source) > MAX_TEMPLATE_CHARS:
        raise TemplateFailed(
            f"the chat template is longer than {MAX_TEMPLATE_CHARS // 1024} kB", refused=True
        )
    budget = _Budget(max_chars)
    token = _budget.set(budget)
    try:
        out: list[str] = []
        total = 0
        for chunk in _compiled(source).generate(**variables):
            total += len(chunk)
            budget.step()
            budget.room(total)
            out.append(chunk)
        return "".join(out)
    except (Exception, RecursionError, MemoryError) as error:
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        raise TemplateFailed(reason, refused=isinstance(error, SecurityError)) from error
    finally:
        _budget.reset(token)
