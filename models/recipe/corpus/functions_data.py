"""Function families over lists, dictionaries and records."""

from __future__ import annotations

from specllama.models.recipe.corpus.base import Source
from specllama.models.recipe.corpus.pycode import LISTS, Function, Param, fn, noun, two, var


def filter_family(src: Source) -> Function:
    """Make one of the `filter` functions."""
    xs, k = src.pick(LISTS), str(src.between(0, 100))
    x = var(src, xs)
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
    return fn(name, [Param(xs, "list[int]")], "list[int]", f"returns {what} of a list", body)


def map_family(src: Source) -> Function:
    """Make one of the `map` functions."""
    xs, k = src.pick(LISTS), str(src.between(2, 100))
    x = var(src, xs)
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
    return fn(name, [Param(xs, "list[int]")], "list[int]", what, body)


def reduce_family(src: Source) -> Function:
    """Make one of the `reduce` functions."""
    xs = src.pick(LISTS)
    x = var(src, xs)
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
    return fn(name, [Param(xs, "list[int]")], returns, what, body)


def field_sum_family(src: Source) -> Function:
    """Make one of the `field_sum` functions."""
    a, b = two(src)
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
    return fn(f"{how}_{a}", [Param(xs, "list[dict[str, int]]")], returns, what, body)


def group_family(src: Source) -> Function:
    """Make one of the `group` functions."""
    a, b = two(src)
    xs = f"{b}s"
    which = src.between(0, 3)
    if which == 0:
        body = (
            f'groups = {{}}\nfor {b} in {xs}:\n    groups.setdefault({b}["{a}"], [])'
            f".append({b})\nreturn groups"
        )
        return fn(
            f"group_by_{a}", [Param(xs, "list[dict]")], "dict", f"groups {b}s by their `{a}`", body
        )
    if which == 1:
        return fn(
            f"sort_by_{a}",
            [Param(xs, "list[dict]"), Param("reverse", "bool", "False")],
            "list[dict]",
            f"sorts {b}s by their `{a}`",
            f'return sorted({xs}, key=lambda {b}: {b}["{a}"], reverse=reverse)',
        )
    if which == 2:
        return fn(
            f"find_{b}",
            [Param(xs, "list[dict]"), Param(a, "str")],
            "dict | None",
            f"finds the first {b} with a given `{a}`",
            f'for {b} in {xs}:\n    if {b}["{a}"] == {a}:\n        return {b}\nreturn None',
        )
    return fn(
        f"count_by_{a}",
        [Param(xs, "list[dict]")],
        "dict[str, int]",
        f"counts {b}s by their `{a}`",
        f'counts = {{}}\nfor {b} in {xs}:\n    key = {b}["{a}"]\n'
        "    counts[key] = counts.get(key, 0) + 1\nreturn counts",
    )


def dicts_family(src: Source) -> Function:
    """Make one of the `dicts` functions."""
    d = src.pick(["data", "mapping", "table", "counts", noun(src) + "s"])
    k = noun(src)
    return src.pick(
        [
            fn(
                "invert",
                [Param(d, "dict")],
                "dict",
                "swaps the keys and values of a dictionary",
                f"return {{value: key for key, value in {d}.items()}}",
            ),
            fn(
                "merge",
                [Param("first", "dict"), Param("second", "dict")],
                "dict",
                "merges two dictionaries",
                "result = dict(first)\nresult.update(second)\nreturn result",
            ),
            fn(
                f"get_{k}",
                [Param(d, "dict"), Param("default", "int", str(src.between(0, 99)))],
                "int",
                f'reads "{k}" from a dictionary with a default',
                f'return {d}.get("{k}", default)',
            ),
            fn(
                f"has_{k}",
                [Param(d, "dict")],
                "bool",
                f'checks if a dictionary has "{k}"',
                f'return "{k}" in {d}',
            ),
            fn(
                f"without_{k}",
                [Param(d, "dict")],
                "dict",
                f'copies a dictionary without "{k}"',
                f'return {{key: value for key, value in {d}.items() if key != "{k}"}}',
            ),
        ]
    )


def lists_family(src: Source) -> Function:
    """Make one of the `lists` functions."""
    xs = src.pick(LISTS)
    k = str(src.between(2, 64))
    return src.pick(
        [
            fn(
                "unique",
                [Param(xs, "list")],
                "list",
                "removes duplicates and keeps the order",
                f"seen = set()\nresult = []\nfor x in {xs}:\n    if x not in seen:\n"
                "        seen.add(x)\n        result.append(x)\nreturn result",
            ),
            fn(
                "flatten",
                [Param(xs, "list[list]")],
                "list",
                "flattens a list of lists",
                f"return [x for row in {xs} for x in row]",
            ),
            fn(
                "chunks",
                [Param(xs, "list"), Param("size", "int", k)],
                "list[list]",
                f"splits a list into parts of {k}",
                f"return [{xs}[i:i + size] for i in range(0, len({xs}), size)]",
            ),
            fn(
                "count_matches",
                [Param(xs, "list"), Param("target", "int")],
                "int",
                "counts how often a value occurs in a list",
                f"count = 0\nfor x in {xs}:\n    if x == target:\n        count += 1\nreturn count",
            ),
            fn(
                "last",
                [Param(xs, "list"), Param("n", "int", k)],
                "list",
                f"returns the last {k} elements of a list",
                f"return {xs}[-n:]",
            ),
            fn(
                "running_total",
                [Param(xs, "list[int]")],
                "list[int]",
                "returns the running total of a list",
                f"result = []\ntotal = 0\nfor x in {xs}:\n    total += x\n"
                "    result.append(total)\nreturn result",
            ),
            fn(
                "index_of",
                [Param(xs, "list"), Param("target", "int")],
                "int",
                "returns the index of a value or -1",
                f"for i, x in enumerate({xs}):\n    if x == target:\n        return i\nreturn -1",
            ),
        ]
    )
