"""What a hostile chat template may build and how long it may take: little, whatever it does."""

import os
import random
import tracemalloc
from itertools import count

import pytest

from specllama.replies.template import TemplateFailed, render_template

LIMIT = 1_000_000  # characters
PROGRAMS = int(os.environ.get("SPECLLAMA_FUZZ_TEMPLATES", "60"))  # tests see no such variable
PEAK_BYTES = 72 * LIMIT
_GROW = "{% for i in range(60) %}{% set ns.x = STEP %}{% endfor %}"
BIG = "{% set b = 'a' * 900000 %}"
SIXTY = {
    "lists": "[ns.x, ns.x]",
    "tuples": "(ns.x, ns.x)",
    "dictionaries": "{'a': ns.x, 'b': ns.x}",
    "dict()": "dict(a=ns.x, b=ns.x)",
    "sums of lists": "[ns.x] + [ns.x]",
    "products": "[ns.x] * 2",
    "lists of map": "[0, 0] | map('default', ns.x, true) | list",
    "squares": "ns.x * ns.x",
}
SAYS = {
    "printed": "{{ ns.x | string | length }}",
    "as JSON": "{{ ns.x | tojson | length }}",
    "joined": "{{ (ns.x ~ '') | length }}",
    "compared": "{{ [ns.x] == [ns.y] }}",
    "hashed": "{{ {(ns.x,): 1} }}",
}


def refused(template: str) -> str:
    with pytest.raises(TemplateFailed) as caught:
        render_template(template, {"messages": [{"role": "user"}]}, max_chars=LIMIT)
    assert caught.value.refused, caught.value
    return str(caught.value)


def peak_bytes(template: str) -> int:
    """The most memory that rendering held at a time, whether it ended well or not."""
    tracemalloc.start()
    try:
        render_template(template, {"messages": [{"role": "user"}]}, max_chars=LIMIT)
    except TemplateFailed:
        pass
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    return peak


@pytest.mark.parametrize("says", SAYS)
@pytest.mark.parametrize("step", SIXTY)
def test_what_doubles_sixty_times_is_never_built(step: str, says: str) -> None:
    start = "9" if step == "squares" else "[1]"
    template = "{% set ns = namespace(x=START, y=START) %}".replace("START", start)
    template += _GROW.replace("STEP", SIXTY[step])
    template += _GROW.replace("STEP", SIXTY[step]).replace("ns.x", "ns.y") + SAYS[says]
    assert "too" in refused(template)


SHARED = "{% set x = ['a' * 8] * 2000 %}{% set y = [x] * 2000 %}"


@pytest.mark.parametrize(
    "template",
    [
        SHARED + "{{ (y | string) | length }}",
        SHARED + "{{ (y | tojson) | length }}",
        SHARED + "{{ (y ~ '') | length }}",
        SHARED + "{{ y }}",
        SHARED + "{{ '%s' % y }}",
        SHARED + "{{ '{}'.format(y) }}",
        SHARED + "{{ y | map('string') | list | length }}",
        SHARED + "{{ y | join | length }}",
        BIG + "{{ ('{0}' * 9000).format(b) | length }}",
        BIG + "{{ ('%(a)s' * 9000) % {'a': b} }}",
        BIG + "{{ 'aaaaaaaa'.replace('a', b, count=8) }}",
        BIG + "{{ range(9999) | map('string') | map('replace', '1', b) | list | length }}",
        BIG + "{% macro f() %}{{ varargs | string | length }}{% endmacro %}"
        "{{ f(*([1, 2, 3] * 999) | map('default', b)) }}{{ f(" + "b, " * 999 + "b) }}",
        BIG + "{% macro f() %}{{ kwargs | string | length }}{% endmacro %}"
        "{{ f(" + ", ".join(f"k{i}=b" for i in range(999)) + ") }}",
        BIG + "{% for s in range(9999) | map('string') | map('replace', '1', b) %}"
        "{{ loop.length }}{% endfor %}",
        BIG + "{{ dict.fromkeys(range(9999), b) | string | length }}",
        BIG + "{{ ([{'k': b}] * 9999) | groupby('k') | string | length }}",
        BIG + "{% set x %}{% for i in range(999) %}{{ b }}{% endfor %}{% endset %}{{ x | length }}",
        BIG + "{% macro f() %}{% for i in range(999) %}{{ b }}{% endfor %}{% endmacro %}"
        "{{ f() | length }}",
        "{% set x %}{% for i in range(9999) %}" + "y" * 20_000 + "{% endfor %}{% endset %}"
        "{{ x | length }}",
        "".join(f"{{% set a{i} = 'a' * {990_000 + i} %}}" for i in range(400)),
        "{{ ([[1, 2, 3]] * 90000) | sum(start=[]) | length }}",
        "{{ ('\u3042' * 1000000) | list | length }}",
        "{{ ('\u3042' * 1000000) | sort | length }}",
        "{{ ('\u3042 ' * 500000).split() | length }}",
        "{{ ('[' ~ ('{},' * 300000) ~ '{}]') | from_json | length }}",
        "{{ (['\U000e0001' * 1000000]) | string | length }}",
        "{{ (['\U000e0001' * 1000000]) | tojson(ensure_ascii=true) | length }}",
        "{% set ns = namespace(x=[1]) %}{% for i in range(300) %}{% set ns.x = [ns.x] %}"
        "{% endfor %}{% set ns.x = [ns.x] * 90 %}{{ ns.x | tojson(indent=64) | length }}",
        "{{ (5).to_bytes(1000000000, 'big') | length }}",
        "{{ '{a:>999999999}'.format_map({'a': 1}) }}",
        "{{ 5 | round(-999999999) }}",
        "{{ 5 | round(999999999, 'ceil') }}",
        "{{ (('f' * 900000) | int(0, 16)) // 3 }}",
        "{% autoescape true %}{{ '&' }}{% endautoescape %}",
        "{{ " + "1 < " * 9000 + "1 }}",
    ],
    ids=lambda t: t[-60:],
)
def test_no_operation_builds_more_than_its_share(template: str) -> None:
    assert refused(template)
    assert peak_bytes(template) < PEAK_BYTES


@pytest.mark.parametrize(
    "template",
    [
        "{% for a in [1] recursive %}{% if loop.depth < 40 %}{{ loop(range(99999)) }}{% endif %}"
        "{% endfor %}",
        "{% for a in range(99999) %}{% for b in range(99999) if b < 0 %}{% endfor %}{% endfor %}",
        "{% for a in range(99999) %}{{ 'x' in (range(99999) | map('string')) }}{% endfor %}",
        "{% set a = (1.5,) * 90000 %}{% set b = a[1:] + (1.5,) %}"
        "{% for i in range(99999) %}{% if a == b %}{% endif %}{% endfor %}",
        "{% set a = (1.5,) * 90000 %}{% set d = {1: 2} %}"
        "{% for i in range(99999) %}{{ d[a] }}{% endfor %}",
        "{% set b = 'a' * 999999 %}{% for i in range(99999) %}{{ b | upper | length }}{% endfor %}",
    ],
)
def test_every_operation_looks_at_the_clock(template: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("specllama.replies.template.MAX_SECONDS", 0.2)
    assert "too" in refused(template)


def test_a_busy_machine_is_not_the_templates_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    hours = count(0, 3600)
    monkeypatch.setattr("time.perf_counter", lambda: float(next(hours)))
    monkeypatch.setattr("time.monotonic", lambda: float(next(hours)))
    template = "{% for i in range(99) %}{{ i }}{% endfor %}"
    assert render_template(template, {}, max_chars=1000).startswith("012")


def test_what_templates_do_still_works() -> None:
    template = (
        "{{ '[1, {\"a\": 2}]' | from_json }} {{ [[1], [2, 3]] | sum(start=[]) }} "
        "{{ [1, 2] | sum }} {{ [{'n': 2}, {'n': 3}] | sum(attribute='n') }} "
        "{{ 2.567 | round(2) }} {{ 2.1 | round(0, 'ceil') }} {{ -2.1 | round(method='floor') }} "
        "{{ 7 | round }} {{ {'b': [1], 'a': none} | tojson(indent=1, sort_keys=true) }} "
        "{{ '%s=%d' % ('a', 3) }} {% set x %}in {{ 'a' }} block{% endset %}{{ x | upper }} "
        "{% set ns = namespace(n=1) %}{{ ns }}{{ ns.n }} {{ messages[-1].role in ['user', 'x'] }} "
        "{% for c in [{'t': 1, 'c': [{'t': 2}]}] recursive %}{{ c.t }}{{ loop(c.c or []) }}"
        "{% endfor %} {{ 'b,a' | replace(',', '') | list | sort | join('+') }} "
        "{{ 'a'.join(['x', 'y']) }} {% for i in [1] %}{{ 'aa'.replace('a', 'b', i) }}"
        "{{ '-'.join(['u', 'v']) }}{% endfor %}"
    )
    assert render_template(template, {"messages": [{"role": "user"}]}, max_chars=10_000) == (
        "[1, {'a': 2}] [1, 2, 3] 3 5 2.57 3.0 -3.0 7 "
        '{\n "a": null,\n "b": [\n  1\n ]\n} a=3 IN A BLOCK <Namespace>1 True 12 a+b xay bau-v'
    )


def test_long_conversations_have_room() -> None:
    template = (
        "{% set ns = namespace(text='') %}{% set messages = messages[1:] + [messages[0]] %}"
        "{% for m in messages %}{% set content = m.content.strip() ~ '' %}"
        "{% set ns.text = ns.text + content %}"
        "{{ '<' + m.role + '>' + (content if loop.index0 % 2 else [content] | join) }}{% endfor %}"
    )
    text = "word " * 200
    messages = [{"role": "user", "content": text} for _ in range(500)]
    out = render_template(template, {"messages": messages}, max_chars=LIMIT + 4 * 500 * len(text))
    assert len(out) == 500 * (len(text) + 5)


# ---- random programs made of what makes things grow

_VALUES = [
    "'a'",
    "'é😀'",
    "[1]",
    "(1, 'b')",
    "{'k': 'v'}",
    "7",
    "2.5",
    "none",
    "messages",
    "x",
    "y",
]
_UNARY = [
    "(A | string)", "(A | tojson)", "(A | list)", "(A | length)", "(A | join)", "(A | upper)",
    "(A | replace('a', B))", "(A | map('string') | list)", "(A | map('default', B) | list)",
    "(A | sort)", "(A | unique | list)", "(A | reverse | list)", "(A | sum)", "(A | sum(start=[]))",
    "(A | default(B))", "(A | indent(9, true))", "(A | round(9))", "(A | int)", "(A | urlencode)",
    "(A | from_json)", "(A | items | list)", "(A | tojson | from_json)", "(A | groupby(0))",
    "A.split('a')", "A.join(B)", "A.format(B, B)", "A.items()", "A[1:]", "A[0]", "A.replace('', B)",
    "dict(a=A, b=A)", "range(A | length) | list", "f(A, B, B)", "(A | select('in', B) | list)",
]  # fmt: skip
_BINARY = [
    "(A + A)", "(A * 99)", "(A ~ B)", "[A, A, B]", "(A, A)", "{'p': A, 'q': A}", "(A == B)",
    "(A in B)", "('%s %s' % (A, A))", "('{}{}'.format(A, B))", "(A if B else B)", "(A ** 9)",
    "(A * B)", "[A] * 999", "(A < B)", "(A // 3)",
]  # fmt: skip


def _expression(rng: random.Random, depth: int) -> str:
    if depth == 0:
        return rng.choice(_VALUES)
    form = rng.choice(_UNARY + _BINARY)
    parts = {"A": _expression(rng, depth - 1), "B": rng.choice(_VALUES)}
    return "".join(parts.get(c, c) for c in form)


def _program(rng: random.Random) -> str:
    lines = ["{% macro f(a) %}{{ a }}{{ varargs | string }}{{ caller }}{% endmacro %}"]
    lines.append("{% set x = 'aB' %}{% set y = [1] %}{% set ns = namespace(x=[x], y=y) %}")
    for _ in range(rng.randint(1, 6)):
        e = _expression(rng, rng.randint(1, 3))
        lines.append(
            rng.choice(
                [
                    f"{{% set x = {e} %}}",
                    f"{{% set y = {e} %}}",
                    f"{{% for i in range({rng.choice([9, 60, 9999])}) %}}{{% set ns.x = "
                    f"{e.replace('x', 'ns.x') if 'x' in e and 'index' not in e else e} %}}"
                    "{% endfor %}{% set x = ns.x %}",
                    f"{{% for i in {e} %}}{{{{ i }}}}{{{{ loop.length }}}}{{% endfor %}}",
                    f"{{% set x %}}{{{{ {e} }}}}{{{{ x }}}}{{{{ x }}}}{{% endset %}}",
                    f"{{{{ {e} }}}}",
                ]
            )
        )
    return "".join(lines)


def test_random_programs_stay_within_their_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """More of them: SPECLLAMA_FUZZ_TEMPLATES=10000."""
    monkeypatch.setattr("specllama.replies.template.MAX_SECONDS", 0.2)
    for seed in range(PROGRAMS):
        template = _program(random.Random(seed))
        assert peak_bytes(template) < PEAK_BYTES, (seed, template)
