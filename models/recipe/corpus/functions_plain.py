"""Function families over text, numbers, names and files."""

from __future__ import annotations

from specllama.models.recipe.corpus.base import Source
from specllama.models.recipe.corpus.pycode import TEXTS, Function, Param, fn, noun, two


def text_family(src: Source) -> Function:
    """Make one of the `text` functions."""
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
    return fn(name, [Param(s, "str")], returns, what, body)


def math_family(src: Source) -> Function:
    """Make one of the `math` functions."""
    pairs = [
        fn(
            "factorial",
            [Param("n", "int")],
            "int",
            "returns the factorial of a number",
            "result = 1\nfor i in range(2, n + 1):\n    result *= i\nreturn result",
        ),
        fn(
            "fibonacci",
            [Param("n", "int")],
            "int",
            "returns the n-th Fibonacci number",
            "a, b = 0, 1\nfor _ in range(n):\n    a, b = b, a + b\nreturn a",
        ),
        fn(
            "gcd",
            [Param("a", "int"), Param("b", "int")],
            "int",
            "returns the greatest common divisor",
            "while b:\n    a, b = b, a % b\nreturn a",
        ),
        fn(
            "is_prime",
            [Param("n", "int")],
            "bool",
            "checks if a number is prime",
            "if n < 2:\n    return False\nfor i in range(2, int(n ** 0.5) + 1):\n"
            "    if n % i == 0:\n        return False\nreturn True",
        ),
        fn(
            "clamp",
            [Param("value", "float"), Param("low", "float"), Param("high", "float")],
            "float",
            "limits a value to a range",
            "return max(low, min(high, value))",
        ),
        fn(
            "power",
            [Param("base", "int"), Param("exponent", "int", str(src.between(2, 5)))],
            "int",
            "raises a number to a power",
            "return base ** exponent",
        ),
        fn(
            "distance",
            [Param(p, "float") for p in ("x1", "y1", "x2", "y2")],
            "float",
            "returns the distance of two points",
            "return math.hypot(x2 - x1, y2 - y1)",
            "import math",
        ),
        fn(
            "circle_area",
            [Param("radius", "float")],
            "float",
            "returns the area of a circle",
            "return math.pi * radius ** 2",
            "import math",
        ),
        fn(
            "digit_sum",
            [Param("n", "int")],
            "int",
            "adds up the digits of a number",
            "return sum(int(c) for c in str(n))",
        ),
        fn(
            "acceptance_rate",
            [Param("accepted", "int"), Param("drafted", "int")],
            "float",
            "returns the share of drafted tokens that were accepted",
            "if drafted == 0:\n    return 0.0\nreturn accepted / drafted",
        ),
    ]
    return src.pick(pairs)


def convert_family(src: Source) -> Function:
    """Make one of the `convert` functions."""
    a, b = two(src)
    factor = src.pick([str(src.between(2, 1000)), f"{src.between(0, 9)}.{src.between(1, 99)}"])
    op = src.pick(["*", "/", "+", "-"])
    words = {"*": "multiplying by", "/": "dividing by", "+": "adding", "-": "subtracting"}
    return fn(
        f"{a}_to_{b}",
        [Param(a, "float")],
        "float",
        f"converts {a} to {b} by {words[op]} {factor}",
        f"return {a} {op} {factor}",
    )


def formula_family(src: Source) -> Function:
    """Make one of the `formula` functions."""
    names: list[str] = []
    while len(names) < src.between(2, 3):
        n = noun(src)
        if n not in names:
            names.append(n)
    op = src.pick(["+", "*", "-"])
    word = {"+": "the sum", "*": "the product", "-": "the difference"}[op]
    listed = ", ".join(names[:-1]) + " and " + names[-1]
    return fn(
        src.pick(["combine", "compute", "get"]) + f"_{noun(src)}",
        [Param(n, "float") for n in names],
        "float",
        f"returns {word} of {listed}",
        f"return {f' {op} '.join(names)}",
    )


def format_family(src: Source) -> Function:
    """Make one of the `format` functions."""
    a, b = two(src)
    w = src.pick(["Hello", "Name", "Total", "Result", src.proper()])
    body = f'return f"{w}: {{{a}}} {src.pick(["-", "of", "and", "with", "/"])} {{{b}}}"'
    return fn(
        f"format_{a}",
        [Param(a, "str"), Param(b, "str")],
        "str",
        f'formats {a} and {b} as a line that starts with "{w}"',
        body,
    )


def files_family(src: Source) -> Function:
    """Make one of the `files` functions."""
    p = src.pick(["path", "filename", "source"])
    w = src.word(1, 2)
    return src.pick(
        [
            fn(
                "read_lines",
                [Param(p, "str")],
                "list[str]",
                "reads the lines of a file",
                f"with open({p}) as f:\n    return [line.strip() for line in f]",
            ),
            fn(
                "write_text",
                [Param(p, "str"), Param("text", "str")],
                "None",
                "writes text to a file",
                f'with open({p}, "w") as f:\n    f.write(text)',
            ),
            fn(
                "load_json",
                [Param(p, "str")],
                "dict",
                "loads JSON from a file",
                f"with open({p}) as f:\n    return json.load(f)",
                "import json",
            ),
            fn(
                "save_json",
                [Param(p, "str"), Param("data", "dict")],
                "None",
                "saves data as JSON to a file",
                f'with open({p}, "w") as f:\n    json.dump(data, f)',
                "import json",
            ),
            fn(
                f"lines_with_{w}",
                [Param(p, "str")],
                "int",
                f'counts the lines of a file that contain "{w}"',
                f'with open({p}) as f:\n    return sum(1 for line in f if "{w}" in line)',
            ),
        ]
    )


def check_family(src: Source) -> Function:
    """Make one of the `check` functions."""
    a = noun(src)
    k = str(src.between(1, 500))
    word, op = src.pick([("above", ">"), ("below", "<"), ("equal to", "=="), ("at least", ">=")])
    return fn(
        f"is_{a}_{src.pick(['ok', 'valid', 'good'])}",
        [Param(a, "int")],
        "bool",
        f"checks if {a} is {word} {k}",
        f"return {a} {op} {k}",
    )


def label_family(src: Source) -> Function:
    """Make one of the `label` functions."""
    a = noun(src)
    k = str(src.between(1, 500))
    yes, no = src.word(), src.word()
    return fn(
        f"label_{a}",
        [Param(a, "int")],
        "str",
        f'returns "{yes}" if {a} is above {k} and "{no}" otherwise',
        f'if {a} > {k}:\n    return "{yes}"\nreturn "{no}"',
    )
