"""The sandbox in which a model's chat template runs.

A chat template is a program that came with a downloaded file. Jinja's sandbox keeps it away from
Python. Here each of its operations is also counted against a budget, which bounds sizes and time.
Whatever a template does, it can only raise TemplateFailed.

A template can name one list many times over (``[x, x]`` holds two pointers and prints as two
lists), so a value is measured as if nothing in it were shared. Every value that a template builds
is measured when it is built. So whatever exists is small enough to be printed, compared, hashed or
sorted, and no single operation needs a guard of its own.
"""

from __future__ import annotations

import json
import re
import sys
import time
from collections.abc import Callable, ItemsView, Iterable, Iterator, KeysView, Mapping, ValuesView
from contextvars import ContextVar
from datetime import datetime
from functools import lru_cache, update_wrapper, wraps
from itertools import chain
from typing import Any

from jinja2 import nodes, pass_context
from jinja2.exceptions import SecurityError, TemplateError
from jinja2.ext import Extension, LoopControlExtension
from jinja2.filters import do_indent, do_round
from jinja2.runtime import LoopContext
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer

MAX_STEPS = 300_000  # operations: loop turns, calls, filters, comparisons, pieces of output
MAX_SECONDS = 2.0  # of CPU time: on a busy machine a template is not to blame for taking longer
MAX_INT_BITS = 16 * 1024  # the time to divide and print integers grows with the square
_BYTES_PER_CHAR = 4  # the widest Python stores
_SPARE_BYTES = 64 * 1024  # so that a small limit on texts leaves room for empty containers
_BUILT_IN_ALL = 16  # times the largest single value; templates append to one text turn by turn
_REMEMBERED = 10_000  # sizes

_CONTAINERS = (list, tuple, dict, set, frozenset, KeysView, ValuesView, ItemsView)
MAX_TEMPLATE_CHARS = 64 * 1024
MAX_NODES = 8_000  # of its syntax tree: compiling takes time by these; real ones have up to 1300
MAX_POWER = 64
MAX_FACTOR = 10**6
MAX_WIDTH = 64

# Padding and layout helpers: a small argument makes a huge string, and no chat needs one.
_FORBIDDEN_FILTERS = frozenset(
    {"batch", "center", "filesizeformat", "format", "pprint", "random", "slice", "striptags"}
    | {"urlize", "wordwrap", "xmlattr"}
)
_FORBIDDEN_METHODS = frozenset(
    {"center", "encode", "expandtabs", "format_map", "ljust", "maketrans", "rjust", "striptags"}
    | {"to_bytes", "translate", "unescape", "zfill"}
)
_MATERIALIZE = frozenset({"list", "sort"})  # filters that make a list of a text's characters
_JINJAS_OWN = ("_loop_vars", "_block_vars")  # keywords that compiled templates add to calls
_WIDTH_IN_PERCENT = re.compile(r"%[^%a-zA-Z]*(\*|\d{3,})")


class TemplateFailed(Exception):
    """An error of a template: it raised, the sandbox refused it, or it exceeded its budget; the
    text says which.

    ``refused`` is True in the last two cases, where another try would end the same way.
    """

    def __init__(self, reason: str, *, refused: bool = False) -> None:
        super().__init__(reason)
        self.refused = refused


class TooMuch(Exception):
    """An error: the template exceeds its budget."""


class Budget:
    """The budget of one rendering.

    Args:
        max_chars: the longest text; other values may take as many bytes as its widest form.
    """

    __slots__ = ("_built", "_deadline", "_max_bytes", "_max_chars", "_sizes", "_steps")

    def __init__(self, max_chars: int) -> None:
        self._max_chars = max_chars
        self._max_bytes = _BYTES_PER_CHAR * max_chars + _SPARE_BYTES
        self._built = 0
        self._steps = 0
        self._deadline = time.thread_time() + MAX_SECONDS
        # sizes by id; the value is kept as well, so that its id stays its own
        self._sizes: dict[int, tuple[Any, int]] = {}

    def step(self) -> None:
        """Count a step before every operation.

        Raises:
            TooMuch: too many of them, or out of time.
        """
        self._steps += 1
        if self._steps > MAX_STEPS:
            raise TooMuch("the chat template loops too long")
        if time.thread_time() > self._deadline:
            raise TooMuch("the chat template takes too long")

    def room(self, chars: int) -> None:
        """Raise TooMuch if a text of this many characters is too long."""
        if chars > self._max_chars:
            raise TooMuch("the chat template builds a text that is too long")

    def joined(self, parts: Iterable[str], separator: str = "") -> str:
        """Join texts; raise TooMuch as soon as they are too long together."""
        kept: list[str] = []
        total = 0
        for part in parts:
            total += len(part) + len(separator)
            self.room(total)
            kept.append(part)
        return separator.join(kept)

    def size(self, value: Any) -> int:
        """Return the bytes of a value and everything in it, counted as often as it appears.

        Raises:
            TooMuch: more than there is room for.
        """
        if isinstance(value, str):
            self.room(len(value))
        elif isinstance(value, _CONTAINERS):
            return self._deep_size(value)
        elif isinstance(value, int) and value.bit_length() > MAX_INT_BITS:
            raise TooMuch("a number in the chat template is too large")
        return sys.getsizeof(value)

    def keep(self, value: Any) -> Any:
        """Return the value, after counting it as built."""
        self.size(value)
        self._built += sys.getsizeof(value)
        if self._built > _BUILT_IN_ALL * self._max_bytes:
            raise TooMuch("the chat template builds too much")
        return value

    def _deep_size(self, value: Any) -> int:
        known = self._sizes.get(id(value))
        if known is not None:
            return known[1]
        total = sys.getsizeof(value)
        items = chain(value.keys(), value.values()) if isinstance(value, dict) else value
        for item in items:
            total += self.size(item)
            if total > self._max_bytes:
                raise TooMuch("the chat template builds a list that is too large")
        if len(self._sizes) >= _REMEMBERED:
            self._sizes.clear()  # bounds what is remembered here
        self._sizes[id(value)] = (value, total)
        return total


budget: ContextVar[Budget] = ContextVar("budget")


def counted(items: Iterable[Any]) -> Iterator[Any]:
    """Yield the items; count each as a step, and bound all together as one value."""
    current = budget.get()
    total = 0
    for item in items:
        current.step()
        total += current.size(item)
        if total > current._max_bytes:
            raise TooMuch("the chat template loops over too much")
        yield item


# ---- filters and globals


def _join(items: Iterable[Any], separator: str = "", attribute: str | int | None = None) -> str:
    some = counted(items)
    texts = (str(item if attribute is None else item[attribute]) for item in some)
    return budget.get().joined(texts, str(separator))


def _replace(text: object, old: object, new: object, count: int = -1) -> str:
    whole, was, now = str(text), str(old), str(new)
    budget.get().room(len(whole) + whole.count(was) * len(now))
    return whole.replace(was, now, count)


def _indent(text: str, width: int | str = 4, first: bool = False, blank: bool = False) -> str:
    size = len(width) if isinstance(width, str) else width
    budget.get().room(len(text) + max(size, 0) * (text.count("\n") + 1))
    return str(do_indent(text, width, first, blank))


@pass_context  # type: ignore[untyped-decorator]
def _sum(
    context: Any, items: Iterable[Any], attribute: str | int | None = None, start: Any = 0
) -> Any:
    for item in counted(items):
        if attribute is not None:
            item = context.environment.getitem(item, attribute)
        start = context.environment.call_binop(context, "+", start, item)
    return start


def _round(value: float, precision: int = 0, method: Any = "common") -> Any:
    if abs(precision) > MAX_WIDTH:
        raise SecurityError("round: too many digits")
    return do_round(value, precision, method)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    if isinstance(indent, int) and indent > MAX_WIDTH:
        raise SecurityError("tojson: the indent is too wide")
    encoder = json.JSONEncoder(
        ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )
    # indents can be larger than what they indent
    return budget.get().joined(encoder.iterencode(value))


def _raise_exception(message: str) -> None:
    raise TemplateError(message)


class _Namespace(Namespace):  # type: ignore[misc]
    """A namespace that prints as a word: its contents may change after it was measured."""

    def __repr__(self) -> str:
        return "<Namespace>"


@pass_context  # type: ignore[untyped-decorator]
def _output(context: Any, value: Any) -> str:
    """Return the text of a ``{{ }}`` or of the template's own words, also inside macros."""
    current = budget.get()
    current.step()
    current.size(value)
    text: str = current.keep(str(value))
    return text


def _guarded(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a filter or test: count it as one step and measure its result."""
    at = 1 if hasattr(function, "jinja_pass_arg") else 0

    @wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        current = budget.get()
        current.step()
        if len(args) > at:
            value = args[at]
            if isinstance(value, Iterator) or (isinstance(value, str) and name in _MATERIALIZE):
                args = (*args[:at], counted(value), *args[at + 1 :])
        return current.keep(function(*args, **kwargs))

    return run


# ---- the language


class _Generation(Extension):  # type: ignore[misc]
    """``{% generation %}`` marks the assistant's words for training; here it is transparent."""

    tags = frozenset({"generation"})

    def parse(self, parser: Any) -> Any:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Bounded(NodeTransformer):  # type: ignore[misc]
    """A transformer that routes the bare Python that Jinja compiles through counted filters."""

    def __init__(self) -> None:
        self._nodes = 0

    def visit(self, node: Any, *args: Any, **kwargs: Any) -> Any:
        self._nodes += 1
        if self._nodes > MAX_NODES:
            raise SecurityError("the chat template is too complex")
        return super().visit(node, *args, **kwargs)

    def visit_For(self, node: Any) -> Any:
        self.generic_visit(node)
        node.iter = _filter(node.iter, "_counted")
        return node

    def visit_Concat(self, node: Any) -> Any:
        self.generic_visit(node)
        return _filter(nodes.List(node.nodes, lineno=node.lineno), "_join")

    def _built(self, node: Any) -> Any:
        self.generic_visit(node)
        return _filter(node, "_identity")

    visit_List = visit_Dict = visit_Compare = _built

    def visit_Tuple(self, node: Any) -> Any:
        return self._built(node) if node.ctx == "load" else self.generic_visit(node)

    def visit_Getitem(self, node: Any) -> Any:
        self.generic_visit(node)
        return _filter(node, "_identity") if isinstance(node.arg, nodes.Slice) else node

    def visit_Call(self, node: Any) -> Any:
        self.generic_visit(node)
        if node.dyn_args is not None:
            node.dyn_args = _filter(node.dyn_args, "list")
        return node

    def visit_AssignBlock(self, node: Any) -> Any:
        self.generic_visit(node)
        node.filter = nodes.Filter(node.filter, "_identity", [], [], None, None, lineno=node.lineno)
        return node

    def visit_TemplateData(self, node: Any) -> Any:
        return nodes.Const(node.data, lineno=node.lineno)  # passes _output

    def visit_ScopedEvalContextModifier(self, node: Any) -> Any:
        raise SecurityError("autoescape is for web pages")


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
            optimized=False,  # nothing of the template runs while it is compiled
            finalize=_output,
        )
        for name in _FORBIDDEN_FILTERS:
            self.filters.pop(name, None)
        self.filters.update(
            _identity=lambda value: value,
            _join=_join,
            join=_join,
            replace=_replace,
            indent=_indent,
            sum=_sum,
            round=_round,
            tojson=_tojson,
            from_json=lambda text: json.loads(str(text)),
        )
        for table in (self.filters, self.tests):
            table.update({name: _guarded(name, f) for name, f in table.items()})
        self.filters["_counted"] = counted
        self.globals.pop("lipsum", None)
        self.globals.update(
            raise_exception=_raise_exception,
            strftime_now=lambda layout: datetime.now().strftime(layout[:200]),
            namespace=_Namespace,
        )

    def _parse(self, source: str, name: str | None, filename: str | None) -> Any:
        return _Bounded().visit(super()._parse(source, name, filename))

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        if isinstance(obj, str | int) and attr in _FORBIDDEN_METHODS:
            return False
        return bool(super().is_safe_attribute(obj, attr, value))

    def wrap_str_format(self, value: Any) -> Any:
        run = super().wrap_str_format(value)
        if run is None:
            return None
        layout = value.__self__
        # Specifications carry widths, also nested ones; plain {} and {0} do not.
        if value.__name__ == "format_map" or ":" in layout:
            raise SecurityError("format specifications are not allowed in a chat template")

        def bounded(*args: Any, **kwargs: Any) -> Any:
            current = budget.get()
            current.room(
                len(layout) + layout.count("{") * (current.size(args) + current.size(kwargs))
            )
            return run(*args, **kwargs)

        return update_wrapper(bounded, value)

    def getitem(self, obj: Any, argument: Any) -> Any:
        budget.get().step()  # a key is hashed
        return super().getitem(obj, argument)

    def call(self, context: Any, function: Any, *args: Any, **kwargs: Any) -> Any:
        current = budget.get()
        current.step()
        current.size(args)
        given = {k: v for k, v in kwargs.items() if k not in _JINJAS_OWN}
        current.size(given)
        owner = getattr(function, "__self__", None)
        if isinstance(owner, str):
            name = getattr(function, "__name__", "")
            if name == "join" and len(args) == 1:
                return current.keep(_join(args[0], owner))
            if name == "replace":
                return current.keep(_replace(owner, *args, **given))
        if isinstance(function, LoopContext):  # {{ loop(children) }} of a recursive loop
            args = tuple(map(counted, args))
        return current.keep(super().call(context, function, *args, **kwargs))

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        current = budget.get()
        current.step()
        if operator == "**":
            if abs(left) > MAX_FACTOR or abs(right) > MAX_POWER:
                raise SecurityError("a power in the chat template is too large")
        elif operator == "*":
            for items, count in ((left, right), (right, left)):
                if hasattr(items, "__len__"):
                    current.room(len(items) * max(int(count), 0))
        elif operator == "%":
            if isinstance(left, str):
                if _WIDTH_IN_PERCENT.search(left):
                    raise SecurityError("a width in the chat template is too large")
                current.room(len(left) + left.count("%") * (current.size(right) + MAX_WIDTH))
        elif hasattr(left, "__len__") and hasattr(right, "__len__"):
            current.room(len(left) + len(right))
        return current.keep(super().call_binop(context, operator, left, right))


@lru_cache(maxsize=16)
def _compiled(source: str) -> Any:
    return _Environment().from_string(source.removeprefix("\ufeff"))


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
    current = Budget(max_chars)
    token = budget.set(current)
    try:
        return current.joined(_compiled(source).generate(**variables))
    except (Exception, RecursionError, MemoryError) as error:
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        raise TemplateFailed(reason, refused=isinstance(error, SecurityError | TooMuch)) from error
    finally:
        budget.reset(token)
