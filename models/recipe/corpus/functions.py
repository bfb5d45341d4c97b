"""All families of small Python functions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from specllama.models.recipe.corpus.base import Source
from specllama.models.recipe.corpus.functions_data import (
    dicts_family,
    field_sum_family,
    filter_family,
    group_family,
    lists_family,
    map_family,
    reduce_family,
)
from specllama.models.recipe.corpus.functions_plain import (
    check_family,
    convert_family,
    files_family,
    format_family,
    formula_family,
    label_family,
    math_family,
    text_family,
)
from specllama.models.recipe.corpus.pycode import Function, noun

Family = Callable[[Source], Function]
FAMILIES: tuple[Family, ...] = (
    filter_family,
    map_family,
    reduce_family,
    field_sum_family,
    field_sum_family,
    group_family,
    group_family,
    text_family,
    math_family,
    convert_family,
    formula_family,
    format_family,
    dicts_family,
    lists_family,
    files_family,
    check_family,
    label_family,
)


def function(src: Source) -> Function:
    """Make one random function; a third get a name the request makes up."""
    made = src.pick(FAMILIES)(src)
    if src.maybe(0.35):
        verb = src.pick(["get", "make", "do", "run", "find", "calc", "my"])
        made = replace(made, name=f"{verb}_{noun(src)}")
    return made
