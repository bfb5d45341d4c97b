"""The corpus generator: deterministic, checkable, varied, and split cleanly."""

from __future__ import annotations

import ast
import json
import re
from itertools import islice
from pathlib import Path

import pytest

from specllama.models.recipe.corpus import (
    MIX,
    SLICES,
    Check,
    Sample,
    chatml,
    check_answer,
    facts_people,
    facts_things,
    heldout_prompts,
    stream,
)
from specllama.models.recipe.corpus import chat as chat_slice
from specllama.models.recipe.corpus import code as code_slice
from specllama.models.recipe.corpus import extract as json_slice
from specllama.models.recipe.corpus import rag as rag_slice
from specllama.models.recipe.corpus.base import Source, an, is_held
from specllama.models.recipe.corpus.code import unfence


def take(n: int, split: str, name: str | None = None, seed: int = 5) -> list[Sample]:
    assert split in ("train", "heldout")
    return list(islice(stream(seed, "train" if split == "train" else "heldout", name), n))


def text_of(samples: list[Sample]) -> str:
    return "".join(chatml(list(s.messages)) for s in samples)


@pytest.mark.parametrize("split", ["train", "heldout"])
def test_same_seed_same_text(split: str) -> None:
    assert text_of(take(60, split)) == text_of(take(60, split))
    assert text_of(take(60, split)) != text_of(take(60, split, seed=6))


def test_text_does_not_change_between_versions() -> None:
    # The shipped weights and prompts belong to this very text.
    first = take(1, "train", "code", seed=1)[0].messages[-1]["content"]
    assert first.startswith("```python\n")


@pytest.mark.parametrize("split", ["train", "heldout"])
def test_every_code_block_compiles(split: str) -> None:
    for s in take(1500, split, "code"):
        for m in s.messages:
            if m["role"] == "assistant":
                ast.parse(unfence(m["content"]))
                assert m["content"].startswith("```python\n")
                assert m["content"].endswith("\n```")
        assert check_answer(s.check, s.reference)


@pytest.mark.parametrize("split", ["train", "heldout"])
def test_every_json_answer_parses(split: str) -> None:
    for s in take(1500, split, "json"):
        for m in s.messages:
            if m["role"] == "assistant":
                json.loads(m["content"])
        assert s.check.value == json.loads(s.reference)


@pytest.mark.parametrize("split", ["train", "heldout"])
def test_every_passage_answer_holds_its_span(split: str) -> None:
    for s in take(1500, split, "rag"):
        assert check_answer(s.check, s.reference), s
        for span in s.check.value:
            if span != "does not say":
                text = "".join(m["content"] for m in s.messages[:-1])
                assert span in text, (span, text)


def test_json_values_come_from_the_request() -> None:
    for s in take(400, "heldout", "json"):
        text = " ".join(m["content"] for m in s.messages if m["role"] == "user")
        value = s.check.value
        for leaf in leaves(value):
            if isinstance(leaf, str):
                assert leaf in text


def leaves(value: object) -> list[object]:
    if isinstance(value, dict):
        return [x for v in value.values() for x in leaves(v)]
    if isinstance(value, list):
        return [x for v in value for x in leaves(v)]
    return [value]


def test_heldout_templates_stay_out_of_training() -> None:
    marked: list[str] = []
    slices = (chat_slice, code_slice, json_slice, rag_slice)
    for module in (*slices, facts_people, facts_things):
        source = Path(module.__file__ or "").read_text(encoding="utf-8")
        marked += re.findall(r'"~([^"]+)"', source)
    assert len(marked) > 100
    # Literal beginnings or ends long enough to be unmistakable.
    pieces = {p for t in marked for p in re.split(r"\{\w+\}|\[[^\]]*\]", t) if len(p) > 14}
    assert len(pieces) > 40
    train = text_of(take(3000, "train"))
    held = text_of(take(3000, "heldout"))
    leaked = sorted(p for p in pieces if p in train)
    # A piece may also be part of a training template; whole templates may not.
    assert len(leaked) < len(pieces) * 0.15, leaked
    assert sum(p in held for p in pieces) > len(pieces) * 0.8


def test_heldout_values_stay_out_of_training() -> None:
    train, held = Source(1, "train"), Source(1, "heldout")
    a = {train.word() for _ in range(3000)}
    b = {held.word() for _ in range(3000)}
    assert not a & b
    assert len(a) > 2500
    assert not any(is_held(w) for w in a)
    assert all(is_held(w) for w in b)


def test_training_text_has_no_heldout_word() -> None:
    held = Source(2, "heldout")
    reserved = {w for w in (held.word() for _ in range(3000)) if len(w) > 6}
    words = set(re.findall(r"[a-z]+", text_of(take(2000, "train")).lower()))
    assert not words & reserved


@pytest.mark.parametrize(
    ("name", "least"), [("chat", 6000), ("code", 6000), ("rag", 25000), ("json", 12000)]
)
def test_slices_are_varied(name: str, least: int) -> None:
    samples = take(800, "train", name)
    words = text_of(samples).split()
    trigrams = set(zip(words, words[1:], words[2:], strict=False))
    assert len(trigrams) > least
    assert len({chatml(list(s.messages)) for s in samples}) > 0.9 * len(samples)


def test_shape_of_conversations() -> None:
    for s in take(500, "train"):
        roles = [m["role"] for m in s.messages]
        if roles[0] == "system":
            roles = roles[1:]
        assert roles == ["user", "assistant"] * (len(roles) // 2)
        assert 1 <= len(roles) // 2 <= 7
        for m in s.messages:
            assert m["content"] == m["content"].strip()
            assert "<|" not in m["content"]
            assert not re.search(r"\{[a-z]\}|\[[a-z ]*\|", m["content"]), m["content"]
    assert sum(MIX.values()) == pytest.approx(1.0)


def test_heldout_prompts_can_be_long() -> None:
    rows = heldout_prompts("rag", 6, 1, long=3)
    sizes = [sum(len(m["content"]) for m in messages) for messages, _, _ in rows]
    assert min(sizes[3:]) > 1000
    assert all(r[0][-1]["role"] == "user" for r in rows)
    assert rows == heldout_prompts("rag", 6, 1, long=3)


def test_unknown_slice() -> None:
    with pytest.raises(ValueError, match="unknown slice"):
        next(stream(1, "train", "poems"))
    assert len(SLICES) == 4


@pytest.mark.parametrize(
    ("check", "good", "bad"),
    [
        (Check("json"), '{"a": [1, null]}', '{"a": 1} ok'),
        (Check("code"), "```python\ndef f():\n    return 1\n```", "```python\ndef f(:\n```"),
        (Check("code"), "def f():\n    return 1", ""),
        (Check("span", ["Kora", "12 kg"]), "Kora weighs 12 kg.", "Kora weighs 13 kg."),
    ],
)
def test_checks_judge(check: Check, good: str, bad: str) -> None:
    assert check_answer(check, good)
    assert not check_answer(check, bad)
    assert check_answer({"kind": check.kind, "value": check.value}, good)


def test_article_before_a_vowel() -> None:
    assert an("a owl saw a dog and a orange kite") == "an owl saw a dog and an orange kite"
