"""Families of small Python functions: what they are called, take, return and do."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from specllama.models.recipe.corpus.base import Source, words


@dataclass(frozen=True)
class Param:
    """One parameter: name, annotation and optional default (source text)."""

    name: str
    type: str
    default: str | None = None


@dataclass(frozen=True)
class Function:
    """A function before it is printed; `body` lines carry their own indentation."""

    name: str
    params: tuple[Param, ...]
    returns: str
    purpose: str
    body: tuple[str, ...]
    imports: tuple[str, ...] = ()

    def render(self, *, typed: bool = False, doc: str | None = None) -> str:
        """The source text, with or without annotations and a docstring."""
        parts = []
        for p in self.params:
            text = f"{p.name}: {p.type}" if typed else p.name
            if p.default is not None:
                text += f" = {p.default}" if typed else f"={p.default}"
            parts.append(text)
        arrow = f" -> {self.returns}" if typed else ""
        lines = [*self.imports, *(["", ""] if self.imports else [])]
        lines.append(f"def {self.name}({', '.join(parts)}){arrow}:")
        if doc:
            lines.append(f'    """{doc}"""')
        lines += [f"    {line}" if line else "" for line in self.body]
        return "\n".join(lines)


NOUNS = words(
    "price weight score order item user name token row line value size length count height speed "
    "page word file path key point time day level rate age cost area depth width error event task "
    "step node edge batch draft model layer query result record field"
)
LISTS = words("items values numbers xs data rows elements entries things")
TEXTS = words("text line word s name message sentence phrase")


def noun(src: Source) -> str:
    """A noun for identifiers, made up one time in three."""
    return src.word(2, 2) if src.maybe(0.33) else src.listed(NOUNS)


def _two(src: Source) -> tuple[str, str]:
    a = noun(src)
    b = noun(src)
    while b == a:
        b = noun(src)
    return a, b


def _var(src: Source, *taken: str) -> str:
    names = [x for x in ("x", "item", "value", "n", "v", "entry") if x not in taken]
    return src.pick(names)


def _fn(
    name: str, params: list[Param], returns: str, purpose: str, body: str, *imports: str
) -> Function:
    return Function(name, tuple(params), returns, purpose, tuple(body.split("\n")), imports)


def _filter(src: Source) -> Function:
    xs, k = src.pick(LISTS), str(src.between(0, 100))
    x = _var(src, xs)
    name, test, what = src.pick(
        [
            ("keep_even", f"{x} % 2 == 0", "the even numbers"),
            ("keep_odd", f"{x} % 2 == 1", "the odd numbers"),
            ("keep_positive", f"{x} > 0", "the positive numbers"),
            ("keep_negative", f"{x} < 0", "the negative numbers"),
            (f"above_{k}", f"{x} > {k}", f"the numbers greater than {k}"),
            (f"below_{k}", f"{x} < {k}", f"the numbers less than {k}"),
            (f"multiples_of_{k}", f"{x} % {int(k) + 2} == 0", f"the multiples of {int(k) + 2}"),
        ]
    )
    if name.startswith("multiples"):
        name = f"multiples_of_{int(k) + 2}"
    if src.maybe(0.5):
        body = f"return [{x} for {x} in {xs} if {test}]"
    else:
        body = f"result = []\nfor {x} in {xs}:\n    if {test}:\n        result.append({x})\n"
        body += "return result"
    return _fn(name, [Param(xs, "list[int]")], "list[int]", f"returns {what} of a list", body)


def _map(src: Source) -> Function:
    xs, k = src.pick(LISTS), str(src.between(2, 100))
    x = _var(src, xs)
    name, expr, what = src.pick(
        [
            ("double_all", f"{x} * 2", "doubles every number of a list"),
            ("square_all", f"{x} * {x}", "squares every number of a list"),
            (f"add_{k}", f"{x} + {k}", f"adds {k} to every number of a list"),
            (f"times_{k}", f"{x} * {k}", f"multiplies every number of a list by {k}"),
            ("negate_all", f"-{x}", "negates every number of a list"),
            ("absolute", f"abs({x})", "takes the absolute value of every number of a list"),
        ]
    )
    if src.maybe(0.5):
        body = f"return [{expr} for {x} in {xs}]"
    else:
        body = f"result = []\nfor {x} in {xs}:\n    result.append({expr})\nreturn result"
    return _fn(name, [Param(xs, "list[int]")], "list[int]", what, body)


def _reduce(src: Source) -> Function:
    xs = src.pick(LISTS)
    x = _var(src, xs)
    name, body, what = src.pick(
        [
            (
                "total",
                f"result = 0\nfor {x} in {xs}:\n    result += {x}\nreturn result",
                "adds up a list of numbers",
            ),
            (
                "product",
                f"result = 1\nfor {x} in {xs}:\n    result *= {x}\nreturn result",
                "multiplies a list of numbers",
            ),
            (
                "mean",
                f"if not {xs}:\n    return 0.0\nreturn sum({xs}) / len({xs})",
                "returns the mean of a list",
            ),
            (
                "largest",
                f"best = {xs}[0]\nfor {x} in {xs}:\n    if {x} > best:\n"
                f"        best = {x}\nreturn best",
                "finds the largest number of a list",
            ),
            (
                "smallest",
                f"best = {xs}[0]\nfor {x} in {xs}:\n    if {x} < best:\n"
                f"        best = {x}\nreturn best",
                "finds the smallest number of a list",
            ),
            (
                "spread",
                f"return max({xs}) - min({xs})",
                "returns the difference of the largest and the smallest number",
            ),
        ]
    )
    returns = "float" if name == "mean" else "int"
    return _fn(name, [Param(xs, "list[int]")], returns, what, body)


def _field_sum(src: Source) -> Function:
    a, b = _two(src)
    how = src.pick(["total", "max", "min", "all"])
    xs = f"{b}s"
    generator = f'{b}["{a}"] for {b} in {xs}'
    body, what = {
        "total": (f"return sum({generator})", f"adds up the `{a}` of every {b}"),
        "max": (f"return max({generator})", f"returns the largest `{a}` of all {b}s"),
        "min": (f"return min({generator})", f"returns the smallest `{a}` of all {b}s"),
        "all": (f"return [{generator}]", f"lists the `{a}` of every {b}"),
    }[how]
    returns = "list[int]" if how == "all" else "int"
    return _fn(f"{how}_{a}", [Param(xs, "list[dict[str, int]]")], returns, what, body)


def _group(src: Source) -> Function:
    a, b = _two(src)
    xs = f"{b}s"
    which = src.between(0, 3)
    if which == 0:
        body = (
            f'groups = {{}}\nfor {b} in {xs}:\n    groups.setdefault({b}["{a}"], [])'
            f".append({b})\nreturn groups"
        )
        return _fn(
            f"group_by_{a}", [Param(xs, "list[dict]")], "dict", f"groups {b}s by their `{a}`", body
        )
    if which == 1:
        return _fn(
            f"sort_by_{a}",
            [Param(xs, "list[dict]"), Param("reverse", "bool", "False")],
            "list[dict]",
            f"sorts {b}s by their `{a}`",
            f'return sorted({xs}, key=lambda {b}: {b}["{a}"], reverse=reverse)',
        )
    if which == 2:
        return _fn(
            f"find_{b}",
            [Param(xs, "list[dict]"), Param(a, "str")],
            "dict | None",
            f"finds the first {b} with a given `{a}`",
            f'for {b} in {xs}:\n    if {b}["{a}"] == {a}:\n        return {b}\nreturn None',
        )
    return _fn(
        f"count_by_{a}",
        [Param(xs, "list[dict]")],
        "dict[str, int]",
        f"counts {b}s by their `{a}`",
        f'counts = {{}}\nfor {b} in {xs}:\n    key = {b}["{a}"]\n'
        "    counts[key] = counts.get(key, 0) + 1\nreturn counts",
    )


def _text(src: Source) -> Function:
    s = src.pick(TEXTS)
    w = src.word(1, 2)
    name, body, returns, what = src.pick(
        [
            ("reverse_text", f"return {s}[::-1]", "str", "reverses a string"),
            (
                "count_vowels",
                f'return sum(1 for c in {s}.lower() if c in "aeiou")',
                "int",
                "counts the vowels of a string",
            ),
            (
                "is_palindrome",
                f'clean = {s}.lower().replace(" ", "")\nreturn clean == clean[::-1]',
                "bool",
                "checks if a string is a palindrome",
            ),
            ("word_count", f"return len({s}.split())", "int", "counts the words of a string"),
            (
                "longest_word",
                f"return max({s}.split(), key=len)",
                "str",
                "returns the longest word of a string",
            ),
            (
                "initials",
                f'return "".join(part[0] for part in {s}.split())',
                "str",
                "returns the first letter of every word",
            ),
            (
                f"starts_with_{w}",
                f'return {s}.startswith("{w}")',
                "bool",
                f'checks if a string starts with "{w}"',
            ),
            (
                f"remove_{w}",
                f'return {s}.replace("{w}", "")',
                "str",
                f'removes "{w}" from a string',
            ),
            (f"add_{w}", f'return "{w}" + {s}', "str", f'puts "{w}" in front of a string'),
            (
                f"count_{w}",
                f'return {s}.count("{w}")',
                "int",
                f'counts how often "{w}" occurs in a string',
            ),
        ]
    )
    return _fn(name, [Param(s, "str")], returns, what, body)


def _math(src: Source) -> Function:
    pairs = [
        _fn(
            "factorial",
            [Param("n", "int")],
            "int",
            "returns the factorial of a number",
            "result = 1\nfor i in range(2, n + 1):\n    result *= i\nreturn result",
        ),
        _fn(
            "fibonacci",
            [Param("n", "int")],
            "int",
            "returns the n-th Fibonacci number",
            "a, b = 0, 1\nfor _ in range(n):\n    a, b = b, a + b\nreturn a",
        ),
        _fn(
            "gcd",
            [Param("a", "int"), Param("b", "int")],
            "int",
            "returns the greatest common divisor",
            "while b:\n    a, b = b, a % b\nreturn a",
        ),
        _fn(
            "is_prime",
            [Param("n", "int")],
            "bool",
            "checks if a number is prime",
            "if n < 2:\n    return False\nfor i in range(2, int(n ** 0.5) + 1):\n"
            "    if n % i == 0:\n        return False\nreturn True",
        ),
        _fn(
            "clamp",
            [Param("value", "float"), Param("low", "float"), Param("high", "float")],
            "float",
            "limits a value to a range",
            "return max(low, min(high, value))",
        ),
        _fn(
            "power",
            [Param("base", "int"), Param("exponent", "int", str(src.between(2, 5)))],
            "int",
            "raises a number to a power",
            "return base ** exponent",
        ),
        _fn(
            "distance",
            [Param(p, "float") for p in ("x1", "y1", "x2", "y2")],
            "float",
            "returns the distance of two points",
            "return math.hypot(x2 - x1, y2 - y1)",
            "import math",
        ),
        _fn(
            "circle_area",
            [Param("radius", "float")],
            "float",
            "returns the area of a circle",
            "return math.pi * radius ** 2",
            "import math",
        ),
        _fn(
            "digit_sum",
            [Param("n", "int")],
            "int",
            "adds up the digits of a number",
            "return sum(int(c) for c in str(n))",
        ),
        _fn(
            "acceptance_rate",
            [Param("accepted", "int"), Param("drafted", "int")],
            "float",
            "returns the share of drafted tokens that were accepted",
            "if drafted == 0:\n    return 0.0\nreturn accepted / drafted",
        ),
    ]
    return src.pick(pairs)


def _convert(src: Source) -> Function:
    a, b = _two(src)
    factor = src.pick([str(src.between(2, 1000)), f"{src.between(0, 9)}.{src.between(1, 99)}"])
    op = src.pick(["*", "/", "+", "-"])
    words = {"*": "multiplying by", "/": "dividing by", "+": "adding", "-": "subtracting"}
    return _fn(
        f"{a}_to_{b}",
        [Param(a, "float")],
        "float",
        f"converts {a} to {b} by {words[op]} {factor}",
        f"return {a} {op} {factor}",
    )


def _formula(src: Source) -> Function:
    names: list[str] = []
    while len(names) < src.between(2, 3):
        n = noun(src)
        if n not in names:
            names.append(n)
    op = src.pick(["+", "*", "-"])
    word = {"+": "the sum", "*": "the product", "-": "the difference"}[op]
    listed = ", ".join(names[:-1]) + " and " + names[-1]
    return _fn(
        src.pick(["combine", "compute", "get"]) + f"_{noun(src)}",
        [Param(n, "float") for n in names],
        "float",
        f"returns {word} of {listed}",
        f"return {f' {op} '.join(names)}",
    )


def _format(src: Source) -> Function:
    a, b = _two(src)
    w = src.pick(["Hello", "Name", "Total", "Result", src.proper()])
    body = f'return f"{w}: {{{a}}} {src.pick(["-", "of", "and", "with", "/"])} {{{b}}}"'
    return _fn(
        f"format_{a}",
        [Param(a, "str"), Param(b, "str")],
        "str",
        f'formats {a} and {b} as a line that starts with "{w}"',
        body,
    )


def _dicts(src: Source) -> Function:
    d = src.pick(["data", "mapping", "table", "counts", noun(src) + "s"])
    k = noun(src)
    return src.pick(
        [
            _fn(
                "invert",
                [Param(d, "dict")],
                "dict",
                "swaps the keys and values of a dictionary",
                f"return {{value: key for key, value in {d}.items()}}",
            ),
            _fn(
                "merge",
                [Param("first", "dict"), Param("second", "dict")],
                "dict",
                "merges two dictionaries",
                "result = dict(first)\nresult.update(second)\nreturn result",
            ),
            _fn(
                f"get_{k}",
                [Param(d, "dict"), Param("default", "int", str(src.between(0, 99)))],
                "int",
                f'reads "{k}" from a dictionary with a default',
                f'return {d}.get("{k}", default)',
            ),
            _fn(
                f"has_{k}",
                [Param(d, "dict")],
                "bool",
                f'checks if a dictionary has "{k}"',
                f'return "{k}" in {d}',
            ),
            _fn(
                f"without_{k}",
                [Param(d, "dict")],
                "dict",
                f'copies a dictionary without "{k}"',
                f'return {{key: value for key, value in {d}.items() if key != "{k}"}}',
            ),
        ]
    )


def _lists(src: Source) -> Function:
    xs = src.pick(LISTS)
    k = str(src.between(2, 64))
    return src.pick(
        [
            _fn(
                "unique",
                [Param(xs, "list")],
                "list",
                "removes duplicates and keeps the order",
                f"seen = set()\nresult = []\nfor x in {xs}:\n    if x not in seen:\n"
                "        seen.add(x)\n        result.append(x)\nreturn result",
            ),
            _fn(
                "flatten",
                [Param(xs, "list[list]")],
                "list",
                "flattens a list of lists",
                f"return [x for row in {xs} for x in row]",
            ),
            _fn(
                "chunks",
                [Param(xs, "list"), Param("size", "int", k)],
                "list[list]",
                f"splits a list into parts of {k}",
                f"return [{xs}[i:i + size] for i in range(0, len({xs}), size)]",
            ),
            _fn(
                "count_matches",
                [Param(xs, "list"), Param("target", "int")],
                "int",
                "counts how often a value occurs in a list",
                f"count = 0\nfor x in {xs}:\n    if x == target:\n        count += 1\nreturn count",
            ),
            _fn(
                "last",
                [Param(xs, "list"), Param("n", "int", k)],
                "list",
                f"returns the last {k} elements of a list",
                f"return {xs}[-n:]",
            ),
            _fn(
                "running_total",
                [Param(xs, "list[int]")],
                "list[int]",
                "returns the running total of a list",
                f"result = []\ntotal = 0\nfor x in {xs}:\n    total += x\n"
                "    result.append(total)\nreturn result",
            ),
            _fn(
                "index_of",
                [Param(xs, "list"), Param("target", "int")],
                "int",
                "returns the index of a value or -1",
                f"for i, x in enumerate({xs}):\n    if x == target:\n        return i\nreturn -1",
            ),
        ]
    )


def _files(src: Source) -> Function:
    p = src.pick(["path", "filename", "source"])
    w = src.word(1, 2)
    return src.pick(
        [
            _fn(
                "read_lines",
                [Param(p, "str")],
                "list[str]",
                "reads the lines of a file",
                f"with open({p}) as f:\n    return [line.strip() for line in f]",
            ),
            _fn(
                "write_text",
                [Param(p, "str"), Param("text", "str")],
                "None",
                "writes text to a file",
                f'with open({p}, "w") as f:\n    f.write(text)',
            ),
            _fn(
                "load_json",
                [Param(p, "str")],
                "dict",
                "loads JSON from a file",
                f"with open({p}) as f:\n    return json.load(f)",
                "import json",
            ),
            _fn(
                "save_json",
                [Param(p, "str"), Param("data", "dict")],
                "None",
                "saves data as JSON to a file",
                f'with open({p}, "w") as f:\n    json.dump(data, f)',
                "import json",
            ),
            _fn(
                f"lines_with_{w}",
                [Param(p, "str")],
                "int",
                f'counts the lines of a file that contain "{w}"',
                f'with open({p}) as f:\n    return sum(1 for line in f if "{w}" in line)',
            ),
        ]
    )


def _check(src: Source) -> Function:
    a = noun(src)
    k = str(src.between(1, 500))
    word, op = src.pick([("above", ">"), ("below", "<"), ("equal to", "=="), ("at least", ">=")])
    return _fn(
        f"is_{a}_{src.pick(['ok', 'valid', 'good'])}",
        [Param(a, "int")],
        "bool",
        f"checks if {a} is {word} {k}",
        f"return {a} {op} {k}",
    )


def _label(src: Source) -> Function:
    a = noun(src)
    k = str(src.between(1, 500))
    yes, no = src.word(), src.word()
    return _fn(
        f"label_{a}",
        [Param(a, "int")],
        "str",
        f'returns "{yes}" if {a} is above {k} and "{no}" otherwise',
        f'if {a} > {k}:\n    return "{yes}"\nreturn "{no}"',
    )


Family = Callable[[Source], Function]
FAMILIES: tuple[Family, ...] = (
    _filter,
    _map,
    _reduce,
    _field_sum,
    _field_sum,
    _group,
    _group,
    _text,
    _math,
    _convert,
    _formula,
    _format,
    _dicts,
    _lists,
    _files,
    _check,
    _label,
)


def function(src: Source) -> Function:
    """One random function; a third get a name the request makes up."""
    made = src.pick(FAMILIES)(src)
    if src.maybe(0.35):
        verb = src.pick(["get", "make", "do", "run", "find", "calc", "my"])
        made = replace(made, name=f"{verb}_{noun(src)}")
    return made


def dataclass_source(src: Source) -> tuple[str, str, str]:
    """A dataclass: its name, the spoken list of fields, and its source."""
    name = src.proper()
    fields: list[tuple[str, str]] = []
    for _ in range(src.between(2, 5)):
        n = noun(src)
        if n not in [f for f, _ in fields]:
            fields.append((n, src.pick(["int", "str", "float", "bool", "list[str]"])))
    spoken = ", ".join(f"{n} ({t})" for n, t in fields)
    lines = ["from dataclasses import dataclass", "", "", "@dataclass", f"class {name}:"]
    lines += [f"    {n}: {t}" for n, t in fields]
    return name, spoken, "\n".join(lines)


def class_source(src: Source) -> tuple[str, str, str]:
    """A small class: its name, what it does, and its source."""
    name = src.proper()
    a = noun(src)
    kind = src.between(0, 2)
    if kind == 0:
        return (
            name,
            f"keeps a list of {a}s with `add` and `total`",
            (
                f"class {name}:\n    def __init__(self):\n        self.{a}s = []\n\n"
                f"    def add(self, {a}):\n        self.{a}s.append({a})\n\n"
                f"    def total(self):\n        return sum(self.{a}s)"
            ),
        )
    if kind == 1:
        b = noun(src) + "_id"
        return (
            name,
            f"stores {a} and {b}",
            (
                f"class {name}:\n    def __init__(self, {a}, {b}):\n        self.{a} = {a}\n"
                f"        self.{b} = {b}"
            ),
        )
    return (
        name,
        f"counts {a}s with `step` and `reset`",
        (
            f"class {name}:\n    def __init__(self):\n        self.{a}s = 0\n\n"
            f"    def step(self):\n        self.{a}s += 1\n        return self.{a}s\n\n"
            f"    def reset(self):\n        self.{a}s = 0"
        ),
    )
