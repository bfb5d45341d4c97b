"""Advice on an error, in the app's own keys: errors themselves name commands and flags."""

from __future__ import annotations

import re

from specllama.errors import SpecllamaError
from specllama.interface import EngineInfo
from specllama.models.companions import HEADS

NO_GUESSES = (
    "This model has no draft model; only text that repeats itself is guessed. F6 chooses one"
)
_MODELS = re.compile(r"specllama hub (?:ls|pairs|search|info|pull)\b(?: --\w+)*")
_FLAG = re.compile(r"(?<![\w-])(--?[a-z][a-z-]*)(?: (N|[a-z]+)\b)?")
_KEYS = (
    (re.compile(r"specllama hub (?:pull|info) (\S*\w)"), r"F6 (\1)"),
    (_MODELS, "F6"),
    (re.compile(r"/sessions\b"), "F7"),
    (re.compile(r"\bstart a new chat\b"), "start a new chat (Ctrl+N)"),
    (re.compile(r"\banother model with -m\b"), "another model (F6)"),
)


def guesses(info: EngineInfo) -> bool:
    """True if a draft model or a head of the target guesses new text; another engine may."""
    heads = {kind.method for kind in HEADS.values()}
    drafts = any(one.available for one in info.methods if one.name in heads)
    return info.draft is not None or drafts or not info.target.path


def hint(error: SpecllamaError, *, server: bool = False) -> str:
    """Return the next step that the app offers. With ``server``, another process has loaded the
    model, and the app cannot change its options."""
    if not error.hint:
        return ""
    from specllama.settings.schema import SCHEMA
    from specllama.tui.screens.settings_screen import FIELDS

    settings = {name: one for one in SCHEMA for name in (*one.flags, f"--{one.name}")}

    def key(found: re.Match[str]) -> str:
        setting = settings.get(found[1])
        field = FIELDS.get(setting.field.partition(".")[2]) if setting is not None else None
        if field is None or (server and field.owner == "load"):
            return found[0]
        value = found[2] or ""
        if value in field.choices:
            return f"“{field.label}: {value}” (F8)"
        return f"“{field.label}” (F8)" + (f" {value}" if value not in ("", "N") else "")

    words = error.hint
    for wanted, instead in _KEYS:
        words = wanted.sub(instead, words)
    return _FLAG.sub(key, words)


def said(error: SpecllamaError, apart: str = ": ", *, server: bool = False) -> str:
    """Return the error's message and the next step that the app offers."""
    return apart.join(filter(None, (error.message, hint(error, server=server))))
