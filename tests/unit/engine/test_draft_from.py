"""The texts that a user names: read in the target's tokens, once, up to a bound, and said."""

from __future__ import annotations

from pathlib import Path

import pytest
from table_model import FakeVocab

from specllama.engine import pair_loading
from specllama.errors import UsageError
from specllama.speculative.drafting.text_library import Library


def test_they_are_read_up_to_the_bound_and_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    vocab, ids = FakeVocab(), {}
    for name in ("one", "two"):
        text = f"the rain of {name}"
        (tmp_path / name).write_text(text, "utf-8")
        ids[name] = vocab.tokenize(text, add_special=False, parse_special=False)
    (tmp_path / "image").write_bytes(b"\0")
    found, said = pair_loading._given([str(tmp_path)], vocab)
    assert sorted(found) == sorted(ids.values())
    assert said.startswith("drafting from 2 of 2 texts")
    assert said.endswith("left out: 1 no text")
    places, length = Library(found).find(ids["one"], 4)
    assert length == len(ids["one"])
    assert len(places) == 1
    monkeypatch.setattr(pair_loading, "GIVEN_TOKENS", len(found[-1]))
    assert pair_loading._given([str(tmp_path)], vocab)[0] == found[-1:]
    assert pair_loading._given([], vocab) == ([], "")
    with pytest.raises(UsageError, match="no such file or folder"):
        pair_loading._given([str(tmp_path / "three")], vocab)
