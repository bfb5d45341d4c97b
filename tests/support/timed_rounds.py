"""Rounds of which only what a verdict on drafting uses is of interest."""

from dataclasses import replace
from typing import Any

from specllama.events import NO_GUESS, RoundDone

_EMPTY = RoundDone(
    index=1, t_s=0.0, n_past=0, source="none", draft_max=0, window_reason=NO_GUESS, drafted=(),
    parents=(), drafted_text=(), confidence=(), p=(), q=(), accepted=0, accepted_path=(),
    target_token=0, target_text="", target_kind="bonus", emitted=(0,), emitted_text=(), cut=0,
    draft_ms=0.0, verify_ms=0.0, other_ms=0.0,
)  # fmt: skip


def timed(one: RoundDone = _EMPTY, **changes: Any) -> RoundDone:
    """Change a round: numbers of ``tokens`` and of guesses (``drafted``), ``pass_ms``, ``declined``
    and ``rejected``; the rest by the fields' names."""
    for name, field in (("tokens", "emitted"), ("drafted", "drafted")):
        if name in changes:
            changes[field] = (0,) * changes.pop(name)
    if "pass_ms" in changes:
        changes["verify_ms"] = changes.pop("pass_ms")
    if "declined" in changes:
        changes["window_reason"] = "dear" if changes.pop("declined") else NO_GUESS
    if "rejected" in changes:
        changes["target_kind"] = "recovered" if changes.pop("rejected") else "bonus"
    return replace(one, **changes)
