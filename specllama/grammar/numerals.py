"""Numbers between bounds, as regular languages of their decimal numerals.

Numerals have no exponent here. Reading one as a floating-point number rounds it, and rounding never
crosses a bound that is such a number. Numerals beyond a strict bound have at most 15 digits:
different numbers always differ within them.
"""

from __future__ import annotations

from decimal import Decimal
from typing import NamedTuple

from specllama.errors import UsageError
from specllama.grammar.automaton import (
    EMPTY,
    NOTHING,
    Alt,
    Chars,
    Dfa,
    Expr,
    Repeat,
    alt,
    compiled,
    seq,
    text,
    tidy,
)

MAX_DIGITS = 15  # that a double keeps
MAX_DIVISOR = 2_000
_DIGIT = Chars(((48, 57),))
_NOT_ZERO = Chars(((49, 57),))
_NATURAL = alt(text("0"), seq(_NOT_ZERO, Repeat(_DIGIT, 0, MAX_DIGITS)))
_FRACTION = alt(EMPTY, seq(text("."), Repeat(_DIGIT, 1, MAX_DIGITS)))


class Bound(NamedTuple):
    value: Decimal
    strict: bool


def integers(low: Bound | None, high: Bound | None, divisor: int = 1) -> Dfa:
    """Numerals of the integers between two bounds that ``divisor`` divides.

    Raises:
        UsageError: too many states.
    """
    dfa = compiled(alt(_NATURAL, seq(text("-"), _NATURAL)))
    if low is not None:
        least = int(low.value.to_integral_value("ROUND_CEILING"))
        dfa = compiled(_integers_from(least + (low.strict and least == low.value)))
    if high is not None:
        most = int(high.value.to_integral_value("ROUND_FLOOR"))
        most -= high.strict and most == high.value
        upper = compiled(_negated_integers_from(-most))
        dfa = upper if low is None else dfa & upper
    return dfa & _multiples(divisor) if divisor > 1 else dfa


def numbers(low: Bound | None, high: Bound | None) -> Dfa:
    """Numerals of the numbers between two bounds, at least one of them given."""
    parts = []
    if low is not None:
        parts.append(compiled(_from(low, "", "-")))
    if high is not None:
        parts.append(compiled(_from(Bound(-high.value, high.strict), "-", "")))
    return parts[0] if len(parts) == 1 else parts[0] & parts[1]


# ---- integers


def _integers_from(n: int) -> Expr:
    if n > 0:
        return _naturals_from(n)
    return alt(_NATURAL, *([seq(text("-"), _naturals_to(-n))] if n else []))


def _negated_integers_from(n: int) -> Expr:
    """The numerals of -i for all integers i from n on."""
    if n > 0:
        return seq(text("-"), _naturals_from(n))
    return alt(seq(text("-"), _naturals_from(1)), _naturals_to(-n))


def _naturals_from(n: int) -> Expr:
    digits = str(n)
    longest = max(MAX_DIGITS, len(digits)) + 1
    longer = seq(_NOT_ZERO, Repeat(_DIGIT, len(digits), longest - 1))
    return alt(_same_length_from(digits), longer)


def _naturals_to(n: int) -> Expr:
    """0 and 1 to n."""
    digits = str(n)
    shorter = seq(_NOT_ZERO, Repeat(_DIGIT, 0, len(digits) - 2)) if len(digits) > 1 else NOTHING
    return alt(text("0"), shorter, _same_length_to(digits))


def _same_length_from(digits: str) -> Expr:
    if not digits:
        return EMPTY
    rest = Repeat(_DIGIT, len(digits) - 1, len(digits) - 1)
    return alt(seq(text(digits[0]), _same_length_from(digits[1:])), seq(_above(digits[0]), rest))


def _same_length_to(digits: str, first: bool = True) -> Expr:
    if not digits:
        return EMPTY
    rest = Repeat(_DIGIT, len(digits) - 1, len(digits) - 1)
    equal = NOTHING if first and digits[0] == "0" else text(digits[0])
    return alt(
        seq(equal, _same_length_to(digits[1:], False)),
        seq(_below(digits[0], 1 if first else 0), rest),
    )


def _above(digit: str) -> Expr:
    return Chars(((ord(digit) + 1, 57),)) if digit < "9" else NOTHING


def _below(digit: str, least: int = 0) -> Expr:
    return Chars(((48 + least, ord(digit) - 1),)) if int(digit) > least else NOTHING


def _multiples(divisor: int) -> Dfa:
    """Digits whose number ``divisor`` divides, a minus sign or none before them."""
    if divisor > MAX_DIVISOR:
        raise UsageError(f"multipleOf above {MAX_DIVISOR} needs too large a grammar")
    # state 0 begins, 1 is behind the sign, 2 + r has read a number of remainder r
    digits = [
        [(48 + d, 48 + d, 2 + (10 * r + d) % divisor) for d in range(10)] for r in range(divisor)
    ]
    start = digits[0]
    return tidy([[(45, 45, 1), *start], start, *digits], {2})


# ---- decimal fractions


def _from(low: Bound, sign: str, other: str) -> Expr:
    """Numerals of ``sign`` x for all x from ``low`` on; those below zero carry ``other``."""
    value, strict = low
    if strict and len(value.as_tuple().digits) > MAX_DIGITS:
        raise UsageError(f"an exclusive bound of more than {MAX_DIGITS} digits")
    everything = seq(text(sign), _NATURAL, _FRACTION)
    if value == 0 and not strict:
        return alt(everything, text("0"))
    if value >= 0:
        return seq(text(sign), _magnitudes_from(value, strict))
    return alt(everything, seq(text(other), _magnitudes_to(-value, strict)))


def _magnitudes_from(value: Decimal, strict: bool) -> Expr:
    whole, fraction = _halves(value)
    behind = _fractions_from(fraction, strict, MAX_DIGITS - len(whole) - len(fraction))
    return alt(seq(text(whole), behind), seq(_naturals_from(int(whole) + 1), _FRACTION))


def _magnitudes_to(value: Decimal, strict: bool) -> Expr:
    whole, fraction = _halves(value)
    room = MAX_DIGITS - len(whole) - len(fraction)
    parts = [seq(text(whole), _fractions_to(fraction, strict, room))]
    if int(whole):
        parts.append(seq(_naturals_to(int(whole) - 1), _FRACTION))
    return Alt(tuple(parts))


def _halves(value: Decimal) -> tuple[str, str]:
    whole, _, fraction = f"{value:f}".partition(".")
    return whole, fraction.rstrip("0")


def _fractions_from(digits: str, strict: bool, room: int) -> Expr:
    """What may follow the whole part of a number that is at least its own part and ``digits``."""
    any_digits = Repeat(_DIGIT, 0, max(room, 0))
    zeros = max(room, 0) // 2
    more = seq(Repeat(text("0"), 0, zeros), _NOT_ZERO, Repeat(_DIGIT, 0, max(room - zeros - 1, 0)))
    if not digits:
        return seq(text("."), more) if strict else _FRACTION
    behind: Expr = more if strict else any_digits
    for digit in reversed(digits):
        behind = alt(seq(text(digit), behind), seq(_above(digit), any_digits))
    return seq(text("."), behind)


def _fractions_to(digits: str, strict: bool, room: int) -> Expr:
    if not digits:
        return NOTHING if strict else alt(EMPTY, text(".0"))
    any_digits = Repeat(_DIGIT, 0, max(room, 0))
    behind: Expr = NOTHING if strict else Repeat(text("0"), 0, 1)
    for n, digit in enumerate(reversed(digits)):
        here = alt(seq(text(digit), behind), seq(_below(digit), any_digits))
        behind = alt(EMPTY, here) if n < len(digits) - 1 else here
    return alt(EMPTY, seq(text("."), behind))
