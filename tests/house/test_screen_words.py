"""F1 explains every word of the field that a screen uses."""

import ast
import re
from collections.abc import Iterator

import pytest
from house_table import House, Module

from specllama.tui.keymap import ACTIONS
from specllama.tui.screens.help_screen import words

# Words that somebody who does not know the field has not met, by their stems.
FIELD = """
accept(ed|ance)? acceptance architecture assistant balance bitwise bonus branch cache card catalog
confidence copies decoding depth DFlash device draft drafted EAGLE exact(ly)? forced fold gated
GGUF GPU grammar greedy guess head hub kept KV layers? layout license lookahead lossless match
Medusa merged method min-p mixed MTP n-gram near-tie parameters? pass penalty plain probability
proposer quantization race ratio recovered refused rejection repack residual round rounding rows?
sampling schema seed self server speculation speed-up step suffix target template temperature
thoughts? threads? tok/s token tokenizer top-k top-p tree typical unread verdict verify vocabulary
weights window
"""
SPELLED = {
    "accept": "kept", "accepted": "kept", "verif": "verify", "gpu": "device", "eagle": "eagle-3",
    "exactly": "exact", "layer": "layers", "parameter": "parameters", "thought": "thoughts",
    "row": "row", "rows": "row", "thread": "threads",
}  # fmt: skip
# what reaches a screen beside the app's own modules
SPOKEN = (
    "specllama.tui", "specllama.verdict", "specllama.told", "specllama.figures", "specllama.rates",
    "specllama.interface", "specllama.bench.outcome", "specllama.speculative.drafting",
    "specllama.speculative.policy", "specllama.models.judgement",
)  # fmt: skip
SILENT = {"DEFAULT_CSS", "CSS"}


def texts(module: Module) -> Iterator[str]:
    """The texts of a module that people may read: of several words, neither docstrings nor CSS."""
    unread = set[ast.AST]()
    for node in module.nodes:
        if isinstance(node, ast.Assign | ast.AnnAssign):
            names = node.targets if isinstance(node, ast.Assign) else [node.target]
            if node.value and any(getattr(name, "id", "") in SILENT for name in names):
                unread.add(node.value)
        elif isinstance(node, ast.Expr):
            unread.add(node.value)
    for node in module.nodes:
        if not isinstance(node, ast.Constant) or node in unread:
            continue
        if isinstance(node.value, str) and " " in node.value.strip():
            yield node.value


def used() -> set[str]:
    """The words of the field in all of them."""
    found = set[str]()
    spoken = [m for m in House().shipped if m.name.startswith(SPOKEN)]
    everything = "\n".join(text for module in spoken for text in texts(module))
    everything += "\n".join(f"{action.label} {action.help}" for action in ACTIONS)
    for stem in FIELD.split():
        whole = rf"(?<![\w-])({stem})s?(?![\w-])"
        found |= {one[1].lower() for one in re.finditer(whole, everything, re.IGNORECASE)}
    return found


def explained(word: str) -> bool:
    terms = {term.lower() for term in words()}
    return SPELLED.get(word, word) in terms


def test_every_word_of_the_field_on_a_screen_is_explained() -> None:
    found = used()
    assert len(found) > 50
    assert sorted(word for word in found if not explained(word)) == []


def test_an_unexplained_word_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    fewer = {term: text for term, text in words().items() if term != "near-tie"}
    monkeypatch.setitem(globals(), "words", lambda: fewer)
    assert [word for word in used() if not explained(word)] == ["near-tie"]


def test_an_explanation_is_one_line_that_uses_explained_words_only() -> None:
    known = {term.lower() for term in words()}
    for term, text in words().items():
        assert len(term) <= 13, term
        assert len(text) <= 90, text
        for other in re.findall(r"\bsee ([\w-]+)", text):
            assert other.lower() in known, f"{term} sends to {other}"


def test_the_words_of_the_strip_are_among_them() -> None:
    strip = "near-tie guess kept draft head pass row step acceptance window repack refused unread"
    assert set(strip.split()) <= words().keys()
