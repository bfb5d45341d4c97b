"""The curated pairs: complete, honest about their sources, and parsable by strangers."""

import datetime

import pytest

from specllama.errors import UsageError
from specllama.models import catalog, companions, refs
from specllama.models.catalog import BYTES_PER_PARAM
from specllama.models.judgement import Machine
from specllama.settings import method_list as registry


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
            assert refs.parse_hub(model.ref) == model.hub
            assert model.hub.quant in BYTES_PER_PARAM
            assert model.bytes > 1e7
        assert (pair.draft is not None) == (pair.method == "draft")
        assert bool(pair.head) == (pair.method == "eagle3" or pair.family == "Gemma 4")
        assert pair.head.count("/") == (2 if pair.head else 0)
        assert not pair.cannot.endswith(".")
        assert pair.method == "ngram" or pair.method in registry.names()
        assert pair.memory_gb * 1e9 > pair.bytes


def test_drafts_are_much_smaller() -> None:
    for pair in catalog.load().values():
        if pair.draft is not None:
            assert pair.draft.bytes < pair.target.bytes / 2.5, pair.name


def test_what_could_not_be_checked_says_so() -> None:
    assert all(not pair.checked for pair in catalog.load().values())


def test_today_s_families_are_there() -> None:
    families = {pair.family for pair in catalog.load().values()}
    for family in (
        "Qwen3", "Llama 3", "Gemma 3", "Qwen2.5-Coder", "SmolLM2", "gpt-oss", "Mistral", "Qwen3.5",
        "Qwen3.6", "Qwen3.8", "Gemma 4", "Ministral 3", "Devstral 2", "Granite 4", "Nemotron 3",
        "LFM2.5", "SmolLM3", "Phi-4", "GLM-4.5", "GLM-4.7-Flash",
    ):  # fmt: skip
        assert any(found.startswith(family) for found in families), family


def test_every_method_is_one_that_runs_the_target_here() -> None:
    pairs = catalog.load()
    assert {pair.method for pair in pairs.values()} == {"draft", "mtp", "eagle3", "ngram"}
    for name in ("gpt-oss-20b", "gpt-oss-120b"):
        assert pairs[name].method == "eagle3"
        assert companions.kind_of_name(pairs[name].head) == "eagle3"
        assert pairs[name].head.startswith(pairs[name].target.repo + "/")
    assert {pairs[name].family for name in pairs if pairs[name].method == "mtp"} == {
        "Nemotron 3.5", "Qwen3.5", "Qwen3.6", "Qwen3.8", "Gemma 4",
    }  # fmt: skip
    for pair in pairs.values():
        if pair.method == "mtp" and pair.family == "Gemma 4":
            assert companions.kind_of_name(pair.head) == "gemma4-assistant"
            assert pair.head.startswith(pair.target.repo + "/")
    # whatever has a drafter that nobody here can run says so; a second one that runs is named
    assert pairs["granite4-h-tiny"].cannot
    for name in ("gemma4-31b", "gpt-oss-20b"):
        assert not pairs[name].cannot
        assert "DFlash" in pairs[name].why


def test_names_are_unique_and_found_whatever_the_case() -> None:
    pairs = catalog.load()
    names = [*pairs, *(alias for pair in pairs.values() for alias in pair.aliases)]
    assert len(names) == len(set(names))
    assert catalog.find("QWEN3-8B") is pairs["qwen3-8b"]
    assert catalog.find("nothing") is None
    assert catalog.find_target(pairs["qwen3-8b"].target.repo.lower()) is not None


@pytest.mark.parametrize("text", ["not toml [", "[pairs.x]\nfamily = 'y'", "[pairs]\nx = 3"])
def test_a_broken_catalogue_says_where(text: str) -> None:
    with pytest.raises(UsageError, match="catalog"):
        catalog.parse(text)


def test_fit_is_judged_by_memory() -> None:
    pair = catalog.load()["qwen3-8b"]

    def fits(n_bytes: float) -> str:
        return Machine(n_bytes, cores=8).judge(pair).fits

    assert fits(64e9) == "yes"
    assert fits(pair.bytes) == "no"
    assert fits(0) == "tight"
    assert {fits(gb * 1e9) for gb in range(1, 64)} == {"yes", "tight", "no"}
