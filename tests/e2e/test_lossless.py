"""The promise, on the bundled pair: same seed, same text."""

import pytest
from engines import proved

from specllama.backend import llama_cache
from specllama.bench.prompts import BenchPrompt, schema_prompts
from specllama.bench.proof import finish, score_gap, wish_of
from specllama.bench.rounding import probe_rows, rounding
from specllama.engine.engine import Engine
from specllama.events import RoundDone
from specllama.settings.params import EngineOptions, GenerateParams, SamplingParams

# of each method, the least acceptance on prompts of every kind
METHODS = {
    "draft": 0.3, "ngram": 0.1, "mixed": 0.3, "tree": 0.1, "merged": 0.1, "suffix": 0.1,
    "lookahead": 0.01, "eagle3": 0.1, "medusa": 0.05,
}  # fmt: skip


@pytest.mark.parametrize("method", METHODS)
def test_match_is_token_identical_to_plain_decoding(
    tiny: Engine, prompts: list[BenchPrompt], method: str
) -> None:
    asked = {"temperatures": (0.0, 0.7, 1.0), "draft_max": (1, 4, 8), "max_tokens": 40}
    drafted, accepted = proved(tiny, prompts[:12:3], method, **asked)
    assert accepted > METHODS[method] * drafted > 0


def test_the_default_context_is_in_the_bit_exact_class(tiny: Engine) -> None:
    assert tiny.info.flash_attn
    assert tiny.info.exactness == f"bitwise up to {tiny.target.max_rows} rows"
    assert tiny.info.exact_trees
    assert "every product and attention" in tiny.info.measured


def test_wide_drafts_and_long_contexts_are_identical_too(
    tiny: Engine, prompts: list[BenchPrompt]
) -> None:
    proved(tiny, prompts[:8], "mixed", draft_max=(16,), max_tokens=48)
    longest = sorted(prompts, key=lambda p: -tiny.count_tokens(p.content))[:2]
    assert tiny.count_tokens(longest[0].content) > 1000
    proved(tiny, longest, "mixed", draft_max=(6,), max_tokens=48)


def test_rows_are_bit_identical_up_to_the_stated_width(
    tiny: Engine, prompts: list[BenchPrompt]
) -> None:
    rows = tiny.info.exact_rows
    ids = tiny.encode(max(prompts, key=lambda p: tiny.count_tokens(p.content)).content)[0]
    # a difference shows at some contexts only, so look at many
    for length in range(100, len(ids), 197):
        for probe in probe_rows(tiny, ids[:length], (2, 4, 8, 12, 16, 17, 33, rows)):
            assert probe.difference == 0.0


def test_a_forged_difference_is_not_explained_away(
    tiny: Engine, prompts: list[BenchPrompt]
) -> None:
    params = GenerateParams(
        sampling=SamplingParams(temperature=0.0), seed=1, max_tokens=8, ignore_eos=True
    )
    last = list(tiny.generate(prompts[0].content, params))[-1]
    ids = tiny.encode(prompts[0].content)[0]
    wrong = (last.token_ids[3] + 1) % tiny.vocab.n_tokens
    assert score_gap(tiny, ids, last.token_ids[:3], (last.token_ids[3], wrong), params, 3) > 0.3


def test_a_difference_under_a_schema_is_scored_where_the_grammar_stands(tiny: Engine) -> None:
    prompt = schema_prompts()[0]
    params = wish_of(prompt.bound(GenerateParams()), 1.0, 24, 5, "fixed")
    written = finish(tiny, prompt, params)
    ids, tokens = tiny.encode(prompt.content)[0], written.reply.token_ids
    for at in (0, 7, 23):
        same = (tokens[at], tokens[at])
        assert score_gap(tiny, ids, tokens[:at], same, params, written.position + at) == 0.0


def test_branches_are_not_exact_where_places_of_cells_matter(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # a GPU adds up cells in tiles: bits depend on where the branch that was kept lies
    monkeypatch.setattr(llama_cache, "one_by_one", lambda ctx: None)
    options = EngineOptions(n_ctx=1024, threads=1, exact="on", kernels="off")
    with Engine.load("tiny", options=options) as engine:
        assert engine.info.exact_rows > 1
        assert not engine.info.exact_trees
        assert rounding(engine) > 0.0, "widths are kept: it is of prompts read in other parts"


@pytest.mark.parametrize("rule", ["rejection", "block"])
def test_sampling_rules_run_and_keep_the_counting_law(
    tiny: Engine, prompts: list[BenchPrompt], rule: str
) -> None:
    accepted = 0
    for prompt in prompts[:4]:
        params = GenerateParams(
            sampling=SamplingParams(temperature=1.0),
            seed=5,
            max_tokens=40,
            ignore_eos=True,
            verify=rule,  # type: ignore[arg-type]
            window="fixed",
        )
        events = list(tiny.generate(prompt.content, params))
        last = events[-1]
        accepted += last.draft_n_accepted
        assert len(last.token_ids) == last.draft_n_accepted + last.rounds - last.cut
        rounds = [e for e in events if isinstance(e, RoundDone)]
        assert [t for r in rounds for t in r.emitted] == list(last.token_ids)
    assert accepted > 0
