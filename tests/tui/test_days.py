"""When a conversation was, in words: the same for whoever reads them an hour later."""

from __future__ import annotations

from datetime import datetime

import pytest

from specllama.tui.widgets.sidebar import age, date, heading, moment

NOW = datetime(2026, 11, 25, 9, 30).timestamp()  # a Wednesday


def test_ages_in_words() -> None:
    assert [age(s) for s in (3, 200, 8000, 90_000, 400_000)] == [
        *("just now", "3 min ago", "2 h ago", "yesterday", "4 days ago")
    ]


@pytest.mark.parametrize(
    ("then", "over", "under"),
    [
        (datetime(2026, 11, 25, 9, 28), "Today", "2 min ago"),
        (datetime(2026, 11, 25, 0, 10), "Today", "9 h ago"),
        (datetime(2026, 11, 24, 23, 59), "Yesterday", "23:59"),
        (datetime(2026, 11, 23, 10, 0), "Monday", "10:00"),
        (datetime(2026, 11, 19, 0, 1), "Thursday", "00:01"),
        (datetime(2026, 11, 18, 23, 0), "November", "18 Nov"),
        (datetime(2026, 2, 3, 8, 5), "February", "3 Feb"),
        (datetime(2025, 12, 31, 8, 5), "December 2025", "31 Dec"),
        (datetime(2026, 11, 25, 9, 45), "Today", "just now"),  # a clock that was set back
    ],
)
def test_headings_and_what_stands_under_them(then: datetime, over: str, under: str) -> None:
    at = then.timestamp()
    assert (heading(at, NOW), moment(at, NOW)) == (over, under)


def test_a_date_is_whole() -> None:
    assert date(NOW) == "25 November 2026, 09:30"
