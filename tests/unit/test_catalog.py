"""The curated pairs: complete, honest about their sources, and parsable by strangers."""

from __future__ import annotations

import datetime

import pytest

from specllama.errors import UsageError
from specllama.models import catalog, fit, refs
from specllama.models.catalog import BYTES_PER_PARAM


def test_every_entry_is_complete() -> None:
    pairs = catalog.load()
    assert len(pairs) >= 15
    for name, pair in pairs.items():
        assert name == name.lower()
        assert refs.parse_hub(name) is None, "a name must not look like a repository"
        assert pair.why.strip()
        assert not pair.why.endswith("."), "short reasons, no sentences"
        assert pair.licence
        assert pair.source
        datetime.date.fromisoformat(pair.date)
        for model in pair.models:
            assert refs.parse_hub(model.ref) == refs.HubRef(model.repo, model.quant)
            assert model.quant in BYTES_PER_PARAM
            assert model.bytes > 1e7
        assert (pair.draft is not None) == (pair.method == "draft")
        assert pair.memory_gb * 1e9 > pair.bytes


def test_drafts_are_much_smaller() -> None:
    for pair in catalog.load().values():
        if pair.draft is not None:
            assert pair.draft.bytes < pair.target.bytes / 2.5, pair.name


def test_what_could_not_be_checked_says_so() -> None:
    assert all(not pair.checked for pair in catalog.load().values())


def test_today_s_families_are_there() -> None:
    families = {pair.family for pair in catalog.load().values()}
    for family in ("Qwen3", "Llama 3", "Gemma 3", "Qwen2.5-Coder", "SmolLM", "gpt-oss", "Mistral"):
        assert any(found.startswith(family) for found in families), family


def test_names_are_unique_and_found_whatever_the_case() -> None:
    pairs = catalog.load()
    names = [*pairs, *(alias for pair in pairs.values() for alias in pair.aliases)]
    assert len(names) == len(set(names))
    assert catalog.find("QWEN3-8B") is pairs["qwen3-8b"]
    assert catalog.find("nothing") is None
    target = pairs["qwen3-8b"].target.repo
    assert catalog.find_target(target.lower()) is not None


@pytest.mark.parametrize("text", ["not toml [", "[pairs.x]\nfamily = 'y'", "[pairs]\nx = 3"])
def test_a_broken_catalogue_says_where(text: str) -> None:
    with pytest.raises(UsageError, match="catalogue"):
        catalog.parse(text)


def test_fit_is_judged_by_memory() -> None:
    pair = catalog.load()["qwen3-8b"]
    assert fit.judge(pair, 64e9) == "yes"
    assert fit.judge(pair, pair.bytes) == "no"
    assert fit.judge(pair, 0) == "tight"
    assert {fit.judge(pair, gb * 1e9) for gb in range(1, 64)} == {"yes", "tight", "no"}
