"""What strings may be: lengths, patterns, formats."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache

from specllama.errors import UsageError
from specllama.grammar.automaton import ANY, Chars, Dfa, Repeat, compiled, words
from specllama.grammar.pattern import parse_pattern
from specllama.grammar.places import Leaves, Place, cannot, wrong
from specllama.grammar.rules import MAX_COUNT

_LABEL = "[a-z0-9]{1,12}(?:-[a-z0-9]{1,6})?"
_HOST = rf"(?:{_LABEL}\.){{1,3}}[a-z]{{2,8}}"
_YEAR = r"(?:000[1-9]|00[1-9]\d|0[1-9]\d\d|[1-9]\d{3})"
_DAY = (
    r"(?:(?:0[13578]|1[02])-(?:0[1-9]|[12]\d|3[01])|(?:0[469]|11)-(?:0[1-9]|[12]\d|30)"
    r"|02-(?:0[1-9]|1\d|2[0-8]))"
)
_LEAP = r"(?:\d\d(?:0[48]|[2468][048]|[13579][26])|(?:0[48]|[2468][048]|[13579][26])00)-02-29"
_DATE = rf"(?:{_YEAR}-{_DAY}|{_LEAP})"
_TIME = r"(?:[01]\d|2[0-3]):[0-5]\d:[0-5]\d(?:\.\d{1,9})?(?:Z|[+-](?:[01]\d|2[0-3]):[0-5]\d)"
_OCTET = r"(?:25[0-5]|2[0-4]\d|1\d\d|[1-9]?\d)"
_PATH = r"[A-Za-z0-9._~-]{0,24}"
_URI = rf"https?://{_HOST}(?::[1-9]\d{{0,3}})?(?:/{_PATH}){{0,4}}(?:\?{_PATH})?(?:#{_PATH})?"
_EMAIL = rf"[A-Za-z0-9]{{1,12}}(?:[._+-][A-Za-z0-9]{{1,8}}){{0,2}}@{_HOST}"
# Whatever these allow has the format; they do not allow everything that has it.
FORMATS = {
    "date": _DATE,
    "time": _TIME,
    "date-time": rf"{_DATE}T{_TIME}",
    "duration": r"P(?:\d{1,4}[YMWD]|\d{1,4}DT\d{1,4}[HMS]|T\d{1,4}[HMS])",
    "uuid": r"[0-9a-fA-F]{8}(?:-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}",
    "ipv4": rf"{_OCTET}(?:\.{_OCTET}){{3}}",
    "ipv6": r"[0-9a-f]{1,4}(?::[0-9a-f]{1,4}){7}",
    "hostname": _HOST,
    "idn-hostname": _HOST,
    "email": _EMAIL,
    "idn-email": _EMAIL,
    "uri": _URI,
    "uri-reference": _URI,
    "iri": _URI,
    "iri-reference": _URI,
    "json-pointer": r"(?:/(?:[^~/]|~[01])*)*",
}


def whole_number(place: Place, key: str) -> int | None:
    """A count under a keyword, None if it is not there."""
    if not place.has(key):
        return None
    value = place.schema[key]
    if isinstance(value, bool) or not isinstance(value, int | float) or value != value // 1:
        raise wrong(place, key, f"must be a whole number, not {value!r}")
    if value < 0:
        raise wrong(place, key, f"must not be negative: {value}")
    if value > MAX_COUNT:
        raise cannot(place, key, f"{int(value)} is more than {MAX_COUNT}")
    return int(value)


def between(leaves: Leaves, least_key: str, most_key: str) -> tuple[int, int | None]:
    """The narrowest counts of several places; ``most`` may be below ``least``.

    Raises:
        UsageError: one place alone contradicts itself.
    """
    least, most = 0, None  # type: int, int | None
    for place in leaves:
        low, high = whole_number(place, least_key), whole_number(place, most_key)
        if low is not None and high is not None and low > high:
            raise wrong(place, least_key, f"({low}) is above {most_key} ({high})")
        least = max(least, low or 0)
        if high is not None:
            most = high if most is None else min(most, high)
    return least, most


def regular(leaves: Leaves, least: int, most: int | None) -> Dfa | None:
    """The automaton of patterns, formats and lengths; None if there are only lengths.

    Raises:
        UsageError: a keyword that cannot be enforced, by its name.
    """
    dfa: Dfa | None = None
    for place in leaves:
        for key, make in (("pattern", pattern), ("format", _format)):
            if place.has(key):
                with naming(place, key):
                    one = make(place.schema[key])
                    dfa = one if dfa is None else dfa & one
                    where = (place, key)
    if dfa is not None and (least or most is not None):
        shortest, longest = dfa.lengths
        if shortest < least or (most is not None and (longest is None or longest > most)):
            with naming(*where):
                dfa &= lengths(least, most)
    return dfa


@contextmanager
def naming(place: Place, key: str) -> Iterator[None]:
    """Name the keyword in the message, whatever an automaton is refused for."""
    try:
        yield
    except UsageError as error:
        raise cannot(place, key, error.message) from None


@lru_cache(maxsize=64)
def pattern(of: str) -> Dfa:
    """The texts in which a pattern is found.

    Raises:
        UsageError: it is not a pattern, or not a regular one.
    """
    return compiled(parse_pattern(of), search=True)


@lru_cache(maxsize=64)
def _format(name: str) -> Dfa:
    if name not in FORMATS:
        raise UsageError(f"there is no grammar for the format {name!r}")
    return compiled(parse_pattern(FORMATS[name]))


def lengths(least: int, most: int | None) -> Dfa:
    """Every text of so many characters."""
    if max(least, most or 0) > 2_000:
        raise UsageError("with a length above 2000 it needs too large a grammar")
    return compiled(Repeat(Chars(ANY), least, most))


def none_of(names: list[str]) -> Dfa:
    """Every text except these."""
    return words(names).complement()
