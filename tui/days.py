"""Times of conversations, in words."""

from __future__ import annotations

from datetime import datetime


def age(seconds: float) -> str:
    """Format an age: "just now", "5 min ago", "3 h ago", "yesterday", "12 days ago"."""
    if seconds < 60:
        return "just now"
    if seconds < 3600:
        return f"{seconds // 60:.0f} min ago"
    if seconds < 86400:
        return f"{seconds // 3600:.0f} h ago"
    days = int(seconds // 86400)
    return "yesterday" if days == 1 else f"{days} days ago"


def heading(when_s: float, now_s: float) -> str:
    """Return the heading for the conversations of a day, or of a month if that is long ago:
    "Today", "Yesterday", "Monday", "October", "December 2025"."""
    then, now = datetime.fromtimestamp(when_s), datetime.fromtimestamp(now_s)
    days = (now.date() - then.date()).days
    if days < 2:
        return "Yesterday" if days == 1 else "Today"
    return then.strftime("%A" if days < 7 else "%B" if then.year == now.year else "%B %Y")


def moment(when_s: float, now_s: float) -> str:
    """Format a time under such a heading: "5 min ago", "14:05", "12 Oct"."""
    then, now = datetime.fromtimestamp(when_s), datetime.fromtimestamp(now_s)
    days = (now.date() - then.date()).days
    if days < 1:
        return age(max(0.0, now_s - when_s))
    return f"{then:%H:%M}" if days < 7 else f"{then.day} {then:%b}"


def date(when_s: float) -> str:
    """Format a date: "23 November 2026, 14:05"."""
    then = datetime.fromtimestamp(when_s)
    return f"{then.day} {then:%B %Y, %H:%M}"
