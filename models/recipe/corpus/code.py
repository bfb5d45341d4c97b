"""The code slice: requests to write a small Python function, or to edit a given one."""

from __future__ import annotations

import re
from dataclasses import replace

from specllama.models.recipe.corpus.base import Check, Message, Sample, Source, conversation, turn
from specllama.models.recipe.corpus.functions import function
from specllama.models.recipe.corpus.pycode import (
    Function,
    Param,
    class_source,
    dataclass_source,
    noun,
)

_SYSTEM = (
    "You [write|edit] [short|small|clean] Python code.",
    "[Answer|Reply] with [Python |]code only.",
    "You are a coding assistant. [Keep it simple.|Return only code.|]",
    "~You help with Python. Answer with one code block.",
)
_WRITE = (
    "[Write|Give me|Create] a [Python |]function [called|named] `{n}` that {p}.",
    "[Write|Create|Implement] `{n}({a})`: it {p}.",
    "[I need|Please write] a function `{n}` with the [arguments|parameters] {a}. It {p}.",
    'Complete this function:\n```python\ndef {n}({a}):\n    """{d}"""\n```',
    "Python: `{n}`, a function that {p}. [Parameters|Arguments]: {a}.",
    "~How would you write a function `{n}({a})` that {p}?",
)
_EDIT = (
    "{r}\n\n```python\n{c}\n```",
    "```python\n{c}\n```\n\n{r}",
    "Here is [some|my] code:\n```python\n{c}\n```\n{r}",
    "[Change|Edit] this code.\n```python\n{c}\n```\n[Task|Edit]: {r}",
    "~Take this function:\n```python\n{c}\n```\nand do this: {r}",
)


def _sentence(purpose: str) -> str:
    """Return the docstring of a purpose: ``returns x`` becomes ``Returns x.``"""
    return purpose[0].upper() + purpose[1:].replace('"', "'") + "."


def fence(source: str) -> str:
    """Return a fenced Python block."""
    return f"```python\n{source}\n```"


def unfence(answer: str) -> str:
    """Return the first fenced block of an answer, or the whole answer."""
    found = re.search(r"```(?:python)?\n(.*?)```", answer, re.DOTALL)
    return found.group(1) if found else answer


def _rename(code: str, old: str, new: str) -> str:
    return re.sub(rf"(?<![\w\"`]){re.escape(old)}(?![\w\"`])", new, code)


def _edit_rename(src: Source, f: Function) -> tuple[str, str, str]:
    typed = src.maybe(0.4)
    before = f.render(typed=typed)
    new = noun(src)
    params = [p.name for p in f.params]
    if src.maybe(0.4):
        new = f"{src.pick(['get', 'make', 'find', 'do'])}_{new}"
        request = src.form(
            (
                "Rename the function to `{b}`.",
                "Call the function `{b}` instead of `{a}`.",
                "[Rename|Change the name] `{a}` to `{b}`.",
                "~The function should be named `{b}`.",
            ),
            a=f.name,
            b=new,
        )
        return before, request, replace(f, name=new).render(typed=typed)
    old = src.pick(params)
    # A new name that already occurs would change the meaning.
    while re.search(rf"\b{new}\b", before):
        new = src.word(2, 3)
    request = src.form(
        (
            "Rename `{a}` to `{b}`.",
            "Rename the [parameter|argument|variable] `{a}` to `{b}`.",
            "Use `{b}` instead of `{a}`.",
            "~Replace the name `{a}` by `{b}` everywhere.",
        ),
        a=old,
        b=new,
    )
    return before, request, _rename(before, old, new)


def _edit_types(src: Source, f: Function) -> tuple[str, str, str]:
    doc = _sentence(f.purpose) if src.maybe(0.3) else None
    if src.maybe(0.25):
        request = src.form(
            (
                "Remove the type hints.",
                "[Drop|Delete] the [types|type hints].",
                "~I do not want type hints here.",
            )
        )
        return f.render(typed=True, doc=doc), request, f.render(doc=doc)
    request = src.form(
        (
            "Add type hints.",
            "[Add|Put in] [types|annotations|type hints].",
            "Annotate the [function|arguments].",
            "~Please type this function.",
        )
    )
    return f.render(doc=doc), request, f.render(typed=True, doc=doc)


def _edit_doc(src: Source, f: Function) -> tuple[str, str, str]:
    typed = src.maybe(0.4)
    doc = _sentence(f.purpose)
    if src.maybe(0.25):
        request = src.form(
            ("Remove the docstring.", "[Drop|Delete] the docstring.", "~No docstring, please.")
        )
        return f.render(typed=typed, doc=doc), request, f.render(typed=typed)
    if src.maybe(0.6):
        doc = src.spin(f"[The|This|A] {src.word()} [of|for|with] {src.word()}.")
        request = src.form(
            (
                'Add the docstring "{d}"',
                "Add a docstring: {d}",
                'Document it with "{d}"',
                "~Put in this docstring: {d}",
            ),
            d=doc,
        )
    else:
        request = src.form(
            (
                "Add a docstring.",
                "[Document it.|Write a docstring for it.]",
                "~It needs a docstring.",
            )
        )
    return f.render(typed=typed), request, f.render(typed=typed, doc=doc)


def _edit_guard(src: Source, f: Function) -> tuple[str, str, str]:
    typed = src.maybe(0.4)
    p = src.pick([q.name for q in f.params])
    text = f"{src.pick(['empty', 'bad', 'missing', 'no'])} {p}"
    request = src.form(
        (
            'Raise a ValueError "{t}" if `{p}` is {w}.',
            'Add a guard: if `{p}` is {w}, raise ValueError("{t}").',
            'Guard against {w} `{p}` with a ValueError "{t}".',
            '~When `{p}` is {w}, it should raise ValueError with "{t}".',
        ),
        t=text,
        p=p,
        w=src.pick(["empty", "missing", "false"]),
    )
    guard = (f"if not {p}:", f'    raise ValueError("{text}")')
    return f.render(typed=typed), request, replace(f, body=guard + f.body).render(typed=typed)


def _edit_print(src: Source, f: Function) -> tuple[str, str, str]:
    typed = src.maybe(0.4)
    w = src.word()
    what = f'"{w}"' if src.maybe(0.5) else src.pick([p.name for p in f.params])
    shown = what.strip('"') if what.startswith('"') else f"`{what}`"
    request = src.form(
        (
            "Print {w} [first|at the start].",
            "Add a print of {w} at the [start|top].",
            "~It should begin by printing {w}.",
        ),
        w=shown,
    )
    body = (f"print({what})", *f.body)
    return f.render(typed=typed), request, replace(f, body=body).render(typed=typed)


def _edit_default(src: Source, f: Function) -> tuple[str, str, str]:
    typed = src.maybe(0.4)
    new = src.pick([str(src.between(0, 999)), "None", "True"])
    last = f.params[-1]
    request = src.form(
        (
            "Give `{p}` the default {v}.",
            "[Set|Change] the default of `{p}` to {v}.",
            "Make `{p}` default to {v}.",
            "~Without a value, `{p}` should be {v}.",
        ),
        p=last.name,
        v=new,
    )
    params = (*f.params[:-1], replace(last, default=new))
    return f.render(typed=typed), request, replace(f, params=params).render(typed=typed)


def _edit_parameter(src: Source, f: Function) -> tuple[str, str, str]:
    typed = src.maybe(0.4)
    name = noun(src)
    while any(p.name == name for p in f.params):
        name = src.word()
    value = str(src.between(0, 999))
    request = src.form(
        (
            "Add a parameter `{p}` with the default {v}.",
            "Add `{p}={v}` as [a|the last|a new] parameter.",
            "~It needs one more parameter, `{p}`, with default {v}.",
        ),
        p=name,
        v=value,
    )
    params = (*f.params, Param(name, "int", value))
    return f.render(typed=typed), request, replace(f, params=params).render(typed=typed)


_EDITS = (
    _edit_rename,
    _edit_rename,
    _edit_types,
    _edit_doc,
    _edit_guard,
    _edit_print,
    _edit_default,
    _edit_parameter,
)


def _write(src: Source) -> list[Message]:
    kind = src.between(0, 9)
    if kind == 0:
        name, spoken, source = dataclass_source(src)
        ask = src.form(
            (
                "[Write|Create|Make] a dataclass `{n}` with the fields {f}.",
                "Dataclass `{n}`: {f}",
                "~I want a dataclass `{n}` that has {f}.",
            ),
            n=name,
            f=spoken,
        )
        return [turn("user", ask), turn("assistant", fence(source))]
    if kind == 1:
        name, spoken, source = class_source(src)
        ask = src.form(
            (
                "[Write|Create|Make] a class `{n}` that {f}.",
                "Class `{n}`: it {f}.",
                "~I want a class `{n}` which {f}.",
            ),
            n=name,
            f=spoken,
        )
        return [turn("user", ask), turn("assistant", fence(source))]
    f = function(src)
    args = ", ".join(p.name if p.default is None else f"{p.name}={p.default}" for p in f.params)
    doc = _sentence(f.purpose)
    ask = src.form(_WRITE, n=f.name, a=args, p=f.purpose, d=doc)
    completing = "Complete" in ask
    typed = documented = False
    if not completing and src.maybe(0.3):
        typed = True
        ask += src.spin(" [Use type hints.|With type hints.|Add type hints.]")
    if not completing and src.maybe(0.25):
        documented = True
        ask += src.spin(" [Add a docstring.|With a docstring.]")
    source = f.render(typed=typed, doc=doc if documented or completing else None)
    turns = [turn("user", ask), turn("assistant", fence(source))]
    if src.maybe(0.15):
        before, request, after = src.pick(_EDITS)(src, f)
        if before == source:
            turns += [turn("user", request), turn("assistant", fence(after))]
    return turns


def code_sample(src: Source) -> Sample:
    """Make one request to write or edit Python, answered with one fenced block."""
    if src.maybe(0.55):
        turns = _write(src)
    else:
        before, request, after = src.pick(_EDITS)(src, function(src))
        if src.maybe(0.06):
            # A second function around it makes the copied part longer.
            other = function(src).render()
            before, after = f"{other}\n\n\n{before}", f"{other}\n\n\n{after}"
        ask = src.form(_EDIT, r=request, c=before)
        turns = [turn("user", ask), turn("assistant", fence(after))]
    return conversation(src, "code", turns, Check("code"), _SYSTEM)
