"""The engine over the fake backend: events, stops, limits, failures, and the next request."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest
from engines import FakeContext, engine_over, fake_info
from hypothesis import given, settings
from hypothesis import strategies as st
from requests_made import FREE, PROMPT, check_laws, params, run, words
from table_model import FakeTable

from specllama.arrays import IntArray, Rows
from specllama.backend.base import Context, Outputs
from specllama.cancel import Cancel
from specllama.engine.engine import Engine
from specllama.errors import EngineError, PromptTooLong, SpecllamaError, UsageError
from specllama.events import Event, Finished, Notice, PrefillProgress, RoundDone
from specllama.interface import Message
from specllama.settings.params import GenerateParams, SamplingParams
from specllama.speculative.drafting.draft_model import ChainDrafter
from specllama.speculative.drafting.drafter import Drafter
from specllama.speculative.drafting.forced import ForcedDrafter
from specllama.speculative.drafting.mixed import MixedDrafter
from specllama.speculative.drafting.ngram import NgramDrafter

V = 48


class Forgetful(FakeContext):
    """Recurrent-like: it cannot cut; every rollback empties it and reads the text again."""

    replayed = 0

    def rollback(self, keep_len: int) -> None:
        if not 0 <= keep_len <= len(self.tokens):
            raise ValueError("beyond the end")
        kept = self.tokens[:keep_len]
        if keep_len == len(self.tokens) and self.tree is None:
            return
        super().rollback(0)
        if kept:
            self.forward(kept, outputs="none")
            Forgetful.replayed += len(kept)


class Faulty(FakeContext):
    """Fails at the n-th pass, before or after the cache changed, or with a row of NaN."""

    countdown = -1
    kind = "before"

    def forward(
        self, tokens: Sequence[int], *, outputs: Outputs, parents: Sequence[int] | None = None
    ) -> Rows:
        self.countdown -= 1
        fails = self.countdown == 0
        if fails and self.kind == "before":
            raise EngineError("injected")
        rows = super().forward(tokens, outputs=outputs, parents=parents)
        if fails and self.kind == "after":
            raise RuntimeError("injected")
        if fails and self.kind == "nan":
            rows[...] = np.nan
        return rows


def make(
    *,
    n_ctx: int = 256,
    eog_bias: float = -2.0,
    agreement: float = 0.7,
    sharpness: float = 2.0,
    exact_rows: int = 65,
    widths: Sequence[int] = (),
    context: Callable[..., FakeContext] = FakeContext,
    draft_context: Callable[..., FakeContext] = FakeContext,
    draft_ctx: int = 256,
    draft_vocab: int = V,
    seed: int = 0,
    **options: Any,
) -> Engine:
    table = FakeTable(V, seed=seed, sharpness=sharpness, eog_bias=eog_bias)
    other = FakeTable(
        draft_vocab,
        seed=99,
        sharpness=sharpness,
        of=table if draft_vocab <= V else FakeTable(draft_vocab, seed=seed, sharpness=sharpness),
        agreement=agreement,
    )
    draft = ChainDrafter(draft_context(other, n_ctx=draft_ctx), n_vocab=V, batch=64)
    proposers: dict[str, Drafter] = {
        "forced": ForcedDrafter(),
        "ngram": NgramDrafter(),
        "draft": draft,
        "mixed": MixedDrafter([NgramDrafter(n_min=3), draft]),
    }
    target = context(table, n_ctx=n_ctx, widths=widths, by_four=bool(widths))
    return engine_over(
        target,
        info=fake_info(n_ctx, V, exact_rows=widths[-1] if widths else exact_rows),
        drafters=proposers,
        **options,
    )


def plain(p: GenerateParams) -> GenerateParams:
    return p.replace(speculate=False)


PROPOSERS = ("draft", "forced", "ngram", "mixed")


# -- one text per seed ---------------------------------------------------------------------------


@pytest.mark.parametrize("proposer", PROPOSERS)
@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0, 1.5])
def test_speculative_is_plain_for_every_length(proposer: str, temperature: float) -> None:
    sampling = dataclasses.replace(FREE, temperature=temperature)
    for draft_max in (0, 1, 2, 4, 6, 16):
        for max_tokens in (1, 2, 9, 33):
            p = params(
                sampling=sampling,
                proposer=proposer,
                draft_max=draft_max,
                max_tokens=max_tokens,
                min_speculative_tokens=0,
                seed=draft_max,
            )
            assert words(run(make(), p)) == words(run(make(), plain(p)))


@settings(max_examples=35, deadline=None)
@given(
    proposer=st.sampled_from(PROPOSERS),
    draft_max=st.integers(0, 16),
    max_tokens=st.integers(1, 50),
    seed=st.integers(0, 2**64 - 1),
    temperature=st.sampled_from([0.0, 0.5, 1.0]),
    eog_bias=st.sampled_from([-5.0, 0.0, 3.0]),
    agreement=st.sampled_from([0.0, 0.5, 1.0]),
    widths=st.sampled_from([(), (1,), (1, 2, 3), (4,), (4, 8), (8, 16)]),
    ignore_eos=st.booleans(),
    stop=st.lists(st.text("etaoin sh", min_size=1, max_size=3), max_size=3),
    n_ctx=st.sampled_from([40, 64, 256]),
    on_full=st.sampled_from(["stop", "shift"]),
    sampling=st.sampled_from(
        [
            FREE,
            SamplingParams(),
            dataclasses.replace(FREE, repeat_penalty=1.3, dry_multiplier=1.0),
            dataclasses.replace(FREE, xtc_probability=0.5, logit_bias={3: 1.0, 4: -math.inf}),
        ]
    ),
)
def test_any_request_is_plain_decoding(
    proposer: str,
    draft_max: int,
    max_tokens: int,
    seed: int,
    temperature: float,
    eog_bias: float,
    agreement: float,
    widths: tuple[int, ...],
    ignore_eos: bool,
    stop: list[str],
    n_ctx: int,
    on_full: Any,
    sampling: SamplingParams,
) -> None:
    p = params(
        proposer=proposer,
        draft_max=draft_max,
        max_tokens=max_tokens,
        min_speculative_tokens=0,
        seed=seed,
        sampling=dataclasses.replace(sampling, temperature=temperature),
        ignore_eos=ignore_eos,
        stop=tuple(dict.fromkeys(stop)),
        on_full=on_full,
    )
    options: dict[str, Any] = {
        "n_ctx": n_ctx,
        "eog_bias": eog_bias,
        "agreement": agreement,
        "widths": widths,
    }
    assert words(run(make(**options), p)) == words(run(make(**options), plain(p)))


@pytest.mark.parametrize("rule", ["rejection", "block"])
@pytest.mark.parametrize("proposer", PROPOSERS)
def test_sampling_rules_are_reproducible_and_keep_the_laws(rule: Any, proposer: str) -> None:
    for seed in range(5):
        p = params(verify=rule, proposer=proposer, seed=seed, draft_max=5, stop=("th",))
        assert words(run(make(), p)) == words(run(make(), p)), "same seed, same text"
        greedy = p.replace(sampling=SamplingParams(temperature=0.0))
        assert words(run(make(), greedy)) == words(run(make(), plain(greedy)))


def test_drafts_are_really_accepted_and_counted() -> None:
    finished = run(make(agreement=1.0, eog_bias=-9.0), params())
    assert finished.draft_n_accepted > 20
    assert finished.acceptance_rate == finished.draft_n_accepted / finished.draft_n
    assert finished.mean_acceptance_length == 1 + finished.draft_n_accepted / finished.rounds
    assert finished.accepted_per_position == tuple(
        sorted(finished.accepted_per_position, reverse=True)
    )
    nothing = run(make(), plain(params()))
    assert (nothing.draft_n, nothing.acceptance_rate) == (0, None)
    assert nothing.mean_acceptance_length == 1.0
    assert nothing.rounds == len(nothing.token_ids)


def test_seed_none_draws_one_and_reports_it() -> None:
    first = run(make(), params(seed=None))
    again = run(make(), params(seed=first.seed))
    assert words(first) == words(again)
    assert run(make(), params(seed=None)).seed != first.seed


# -- stops inside an accepted run ----------------------------------------------------------------


@pytest.mark.parametrize("draft_max", [1, 4, 8])
def test_stop_strings_everywhere(draft_max: int) -> None:
    """Every substring of the reply as the stop: the same cut, never shown, caches right."""
    whole = run(make(eog_bias=-9.0), plain(params())).text
    speculative = make(eog_bias=-9.0, agreement=1.0)
    for length in (1, 2, 5):
        for start in range(0, len(whole) - length, 5):
            stop = whole[start : start + length]
            p = params(stop=(stop,), draft_max=draft_max)
            finished = run(speculative, p)
            assert finished.text == whole[: whole.index(stop)]
            assert finished.reason == "stop_string"
            assert words(finished) == words(run(make(eog_bias=-9.0), plain(p)))
            assert speculative.target.n_past == finished.prompt_n + len(finished.token_ids) - 1


def test_stop_string_that_never_completes_is_shown_at_the_end() -> None:
    whole = run(make(eog_bias=-9.0), plain(params())).text
    assert run(make(eog_bias=-9.0), params(stop=(whole[-3:] + "\x00",))).text == whole


@pytest.mark.parametrize("exact_rows", [1, 2, 3, 65])
def test_stop_token_inside_an_accepted_run(exact_rows: int) -> None:
    ends = 0
    for seed in range(16):
        p = params(seed=seed, draft_max=8)
        widths = range(1, exact_rows + 1) if exact_rows < 65 else ()
        engine = make(eog_bias=0.5, agreement=1.0, widths=widths)
        finished = run(engine, p)
        assert words(finished) == words(run(make(eog_bias=0.5), plain(p)))
        if finished.reason == "stop_token":
            ends += finished.cut
            assert finished.token_ids[-1] == 0
            assert 0 not in finished.token_ids[:-1]
            assert engine.target.n_past == finished.prompt_n + len(finished.token_ids) - 1
    assert ends > 2 or exact_rows == 1, "some ended inside an accepted run"


def test_ignore_eos_never_ends() -> None:
    p = params(ignore_eos=True, max_tokens=60)
    finished = run(make(eog_bias=6.0), p)
    assert finished.reason == "length"
    assert 0 not in finished.token_ids
    assert words(finished) == words(run(make(eog_bias=6.0), plain(p)))


# -- the context ends ----------------------------------------------------------------------------


@pytest.mark.parametrize("draft_max", [1, 4, 16])
@pytest.mark.parametrize("proposer", PROPOSERS)
def test_context_full_stops_at_the_same_token(draft_max: int, proposer: str) -> None:
    for n_ctx in (len(PROMPT), len(PROMPT) + 1, 40, 47):
        p = params(max_tokens=None, draft_max=draft_max, proposer=proposer, ignore_eos=True)
        finished = run(make(n_ctx=n_ctx), p)
        assert finished.reason == "context"
        assert str(n_ctx) in (finished.message or "")
        assert len(finished.token_ids) == n_ctx + 1 - len(PROMPT)
        assert words(finished) == words(run(make(n_ctx=n_ctx), plain(p)))


@pytest.mark.parametrize("draft_max", [1, 4, 16])
@pytest.mark.parametrize("proposer", PROPOSERS)
def test_context_shift_keeps_one_text(draft_max: int, proposer: str) -> None:
    p = params(
        max_tokens=120,
        draft_max=draft_max,
        proposer=proposer,
        ignore_eos=True,
        on_full="shift",
        sampling=dataclasses.replace(FREE, repeat_penalty=1.2, repeat_last_n=-1),
    )
    for n_ctx in (36, 50):
        engine = make(n_ctx=n_ctx, draft_ctx=n_ctx)
        events = list(engine.generate(PROMPT, p))
        finished = check_laws(events)
        assert len([e for e in events if isinstance(e, Notice) and e.topic == "context"]) >= 2
        assert len(finished.token_ids) == 120
        assert words(finished) == words(run(make(n_ctx=n_ctx), plain(p)))
        assert engine.target.n_past <= n_ctx


# -- the next request ----------------------------------------------------------------------------


def test_reuse_between_turns_gives_the_text_of_a_fresh_engine() -> None:
    engine = make()
    text = PROMPT
    for turn in range(4):
        p = params(seed=turn)
        finished = run(engine, p, text)
        assert words(finished) == words(run(make(), p, text))
        if turn:
            assert finished.cached_n >= len(text) - 20
        text = text + finished.text + " and "
    # an edited prompt, a shorter one, the same again, another one
    for prompt in (text[:30] + "x" + text[31:], text[:9], text[:9], "s", text):
        assert words(run(engine, params(), prompt)) == words(run(make(), params(), prompt))


def test_the_whole_prompt_cached_still_evaluates_the_last_token() -> None:
    engine = make()
    first = run(engine, params())
    second = run(engine, params())
    assert second.cached_n == len(PROMPT) - 1
    assert run(engine, params(), PROMPT[:20]).cached_n == 19
    assert words(first) == words(second)
    engine.reset()
    third = run(engine, params())
    assert third.cached_n == 0
    assert words(first) == words(third)


def all_events(p: GenerateParams, **options: Any) -> list[Event]:
    return list(make(**options).generate(PROMPT, p))


@pytest.mark.parametrize("proposer", PROPOSERS)
def test_closing_at_every_event_leaves_the_engine_ready(proposer: str) -> None:
    p = params(proposer=proposer, max_tokens=16, draft_max=5)
    reference = words(run(make(), p, PROMPT + "and"))
    n = len(all_events(p))
    engine = make()
    for index in range(n):
        stream = engine.generate(PROMPT, p)
        for _ in itertools.islice(stream, index + 1):
            pass
        stream.close()  # type: ignore[attr-defined]
        assert words(run(engine, p, PROMPT + "and")) == reference


@pytest.mark.parametrize("proposer", PROPOSERS)
def test_cancel_at_every_event_ends_within_a_round(proposer: str) -> None:
    p = params(proposer=proposer, max_tokens=16, draft_max=5)
    reference = words(run(make(), p))
    n = len(all_events(p))
    engine = make()
    for index in range(n - 1):
        cancel = Cancel()
        events: list[Event] = []
        after = 0
        for event in engine.generate(PROMPT, p, cancel=cancel):
            events.append(event)
            after += cancel.is_set() and isinstance(event, RoundDone)
            if len(events) == index + 1:
                cancel.set()
        finished = check_laws(events)
        assert after <= 1, "at most the round whose text was already out"
        assert reference[0].startswith(finished.text)
        assert finished.reason in ("cancelled", reference[2])
        assert words(run(engine, p)) == reference


def test_cancelled_before_it_began() -> None:
    cancel = Cancel()
    cancel.set()
    finished = check_laws(list(make().generate(PROMPT, params(), cancel=cancel)))
    assert (finished.reason, finished.token_ids, finished.text) == ("cancelled", (), "")
    assert finished.timings.tok_per_s is None


@pytest.mark.parametrize("kind", ["before", "after", "nan"])
@pytest.mark.parametrize("where", ["context", "draft_context"])
def test_a_failing_pass_leaves_the_engine_ready(kind: str, where: str) -> None:
    """At the n-th pass of either model, for every n until the request survives it."""
    p = params(max_tokens=14, draft_max=4)
    reference = words(run(make(), p))
    options: dict[str, Any] = {where: Faulty}
    engine = make(**options)
    context: Context = engine.target
    if where == "draft_context":
        proposer = engine.drafters["draft"]
        assert isinstance(proposer, ChainDrafter)
        context = proposer.lane
    assert isinstance(context, Faulty)
    failures = 0
    for n in range(1, 40):
        engine.reset()
        context.countdown, context.kind = n, kind
        try:
            survived = words(run(engine, p))
        except (EngineError, RuntimeError):
            failures += 1
        else:
            assert survived == reference
        passed, context.countdown = context.countdown > 0, -1
        assert words(run(engine, p)) == reference
        if passed:
            break
    else:
        pytest.fail("the request never got through")
    assert failures or where == "draft_context"


def test_a_broken_draft_does_not_stop_the_reply() -> None:
    """A draft model that returns NaN is no reason to lose the target's text."""

    class Broken(FakeContext):
        def forward(
            self, tokens: Sequence[int], *, outputs: Outputs, parents: Sequence[int] | None = None
        ) -> Rows:
            rows = super().forward(tokens, outputs=outputs, parents=parents)
            rows[...] = np.nan
            return rows

    assert words(run(make(draft_context=Broken), params())) == words(run(make(), plain(params())))


# -- uneven pairs --------------------------------------------------------------------------------


@pytest.mark.parametrize("draft_ctx", [8, len(PROMPT), len(PROMPT) + 5, 50])
def test_a_draft_with_a_smaller_context(draft_ctx: int) -> None:
    p = params(max_tokens=60, ignore_eos=True)
    for proposer in ("draft", "mixed"):
        q = p.replace(proposer=proposer)
        finished = run(make(draft_ctx=draft_ctx, agreement=1.0), q)
        assert words(finished) == words(run(make(), plain(p)))
        if draft_ctx == 50 and proposer == "draft":
            assert finished.draft_n_accepted > 5


@pytest.mark.parametrize("draft_vocab", [8, V - 1, V + 1, V + 40])
@pytest.mark.parametrize("rule", ["match", "rejection", "block"])
def test_a_draft_with_another_vocabulary_size(draft_vocab: int, rule: Any) -> None:
    """Ids beyond the target's are never proposed; a text it cannot read makes it silent."""
    p = params(verify=rule, ignore_eos=True)
    events = list(make(draft_vocab=draft_vocab).generate(PROMPT, p))
    finished = check_laws(events)
    for event in events:
        if isinstance(event, RoundDone):
            assert all(0 <= t < min(V, draft_vocab) for t in event.drafted)
    if rule == "match":
        assert words(finished) == words(run(make(), plain(p)))


def test_a_target_that_cannot_cut() -> None:
    """Recurrent models replay; the text is the same, also across turns."""
    before = Forgetful.replayed
    for draft_max in (1, 4):
        p = params(draft_max=draft_max)
        engine = make(context=Forgetful)
        assert words(run(engine, p)) == words(run(make(), plain(p)))
        assert words(run(engine, p, PROMPT + "so")) == words(run(make(), plain(p), PROMPT + "so"))
    assert Forgetful.replayed > before


def test_prompts_longer_than_a_pass_are_read_in_pieces() -> None:
    def small(table: FakeTable, **options: Any) -> FakeContext:
        return FakeContext(table, n_batch=32, **options)

    engine = make(context=small, n_ctx=300)
    prompt = PROMPT * 4
    events = list(engine.generate(prompt, params()))
    assert words(check_laws(events)) == words(run(make(n_ctx=300), params(), prompt))
    done = [e.done for e in events if isinstance(e, PrefillProgress)]
    assert done == [0, 32, 64, 96, len(prompt)]
    full = params(max_tokens=300, on_full="shift", ignore_eos=True)
    assert words(run(make(context=small, n_ctx=200), full, prompt)) == words(
        run(make(n_ctx=200), plain(full), prompt)
    )


@pytest.mark.parametrize("proposer", ["none", "mixed"])
def test_a_prompt_is_read_to_its_end_in_one_go(proposer: str) -> None:
    """The first row is that of the prompt's own last pass; the same one again costs none."""
    passes: list[tuple[int, str]] = []

    class Counted(FakeContext):
        def forward(self, tokens: Sequence[int], **more: Any) -> Any:
            passes.append((len(tokens), more["outputs"]))
            return super().forward(tokens, **more)

    engine = make(context=Counted)
    p = params(max_tokens=1, proposer=proposer, min_speculative_tokens=0)
    ids = engine.encode(PROMPT)[0]
    first = run(engine, p)
    assert passes == [(len(ids), "last")]
    assert (first.rounds, len(first.token_ids), first.draft_n) == (1, 1, 0)
    again = run(engine, p)
    assert passes[1:] == []
    assert words(again) == words(first)
    assert engine.target.tokens == ids


# -- what cannot be served -----------------------------------------------------------------------


def refused(engine: Engine, prompt: Any, p: GenerateParams) -> SpecllamaError:
    with pytest.raises(SpecllamaError) as caught:
        next(iter(engine.generate(prompt, p)))
    short = params(max_tokens=9)
    assert words(run(make(), short)) == words(run(engine, short)), "ready for the next"
    return caught.value


def test_requests_that_cannot_be_served() -> None:
    long = refused(make(n_ctx=64), "x" * 65, params())
    assert isinstance(long, PromptTooLong)
    assert "65" in long.message
    assert "64" in long.message
    empty: tuple[Any, ...] = ("", [], ())
    for prompt in empty:
        assert isinstance(refused(make(), prompt, params()), UsageError)
    for token in (-1, V, 2**40):
        assert "outside the vocabulary" in refused(make(), [1, token], params()).message
    assert "grammar" in refused(make(), PROMPT, params(grammar="root ::= x")).message
    lonely = engine_over(FakeContext(FakeTable(V, sharpness=2.0, eog_bias=-2.0), n_ctx=256))
    with pytest.raises(UsageError, match="draft"):
        next(iter(lonely.generate(PROMPT, params(proposer="draft"))))
    assert list(lonely.drafters) == ["none"]
    assert run(lonely, params(proposer="auto")).proposer == "none"


def test_a_prompt_that_just_fits() -> None:
    finished = run(make(n_ctx=64), params(max_tokens=5), "x" * 64)
    assert (finished.reason, len(finished.token_ids)) == ("context", 1)


def test_busy_and_closed() -> None:
    engine = make()
    stream = engine.generate(PROMPT, params())
    next(stream)
    with pytest.raises(EngineError, match="busy"):
        next(iter(engine.generate(PROMPT, params())))
    assert isinstance(next(stream), Event), "the first request goes on"
    assert isinstance(list(stream)[-1], Finished)
    run(engine, params())
    engine.close()
    engine.close()
    with pytest.raises(EngineError, match="closed"):
        next(iter(engine.generate(PROMPT, params())))


def test_closing_the_engine_under_a_running_request() -> None:
    engine = make()
    stream = engine.generate(PROMPT, params())
    for _ in itertools.islice(stream, 4):
        pass
    engine.close()
    with pytest.raises(EngineError, match="closed"):
        list(stream)
    engine = make()
    stream = engine.generate(PROMPT, params())
    next(stream)
    engine.close()
    stream.close()  # type: ignore[attr-defined]


def test_an_abandoned_generator_frees_the_engine() -> None:
    engine = make()
    stream: Iterator[Event] | None = engine.generate(PROMPT, params())
    assert stream is not None
    next(stream)
    del stream
    run(engine, params())


# -- choices -------------------------------------------------------------------------------------


def notices(engine: Engine, p: GenerateParams) -> list[str]:
    return [e.message for e in engine.generate(PROMPT, p) if isinstance(e, Notice)]


def test_routing_skips_short_replies_and_says_so() -> None:
    short = params(max_tokens=7)
    assert len(notices(make(), short)) == 1
    assert "7" in notices(make(), short)[0]
    assert run(make(), short).draft_n == 0
    assert notices(make(), params(max_tokens=8)) == []
    assert run(make(eog_bias=-9.0), params(max_tokens=8)).draft_n > 0


@pytest.mark.parametrize(
    ("changes", "proposer"),
    [
        ({"proposer": "auto"}, "mixed"),
        ({"proposer": "ngram"}, "ngram"),
        ({"proposer": "none"}, "none"),
        ({"proposer": "draft", "speculate": False}, "none"),
        ({"proposer": "draft", "draft_max": 0}, "none"),
    ],
)
def test_which_proposer_runs(changes: dict[str, Any], proposer: str) -> None:
    assert run(make(), params(**changes)).proposer == proposer


def test_messages_without_a_template_become_plain_text() -> None:
    events = list(make().generate([Message("user", "the rain")], params(max_tokens=4)))
    check_laws(events)
    assert any(isinstance(e, Notice) for e in events)


class OnlyLetters:
    """A grammar of the fake vocabulary: ids below 27, never twice the same."""

    def __init__(self, last: int = -1) -> None:
        self.last = last

    def allowed(self, ids: IntArray) -> Any:
        return (ids > 0) & (ids < 27) & (ids != self.last)

    def accept(self, token: int) -> None:
        assert 0 < token < 27
        assert token != self.last
        self.last = token

    def fork(self) -> OnlyLetters:
        return OnlyLetters(self.last)

    def ahead(self, most: int, habits: Any) -> list[tuple[int, float]]:
        return [(1 + (self.last + i) % 26, 0.5) for i in range(most)]


@pytest.mark.parametrize("proposer", PROPOSERS)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_grammar_is_obeyed_and_changes_nothing_between_proposers(
    proposer: str, temperature: float
) -> None:
    made: list[OnlyLetters] = []

    def constraint(p: GenerateParams, reader: object = None) -> OnlyLetters | None:
        if p.grammar is None:
            return None
        made.append(OnlyLetters())
        return made[-1]

    p = params(
        proposer=proposer,
        grammar="letters",
        draft_max=6,
        sampling=SamplingParams(temperature=temperature),
    )
    finished = run(make(make_constraint=constraint), p)
    assert words(finished) == words(run(make(make_constraint=constraint), plain(p)))
    assert all(0 < t < 27 for t in finished.token_ids)
    assert len(finished.token_ids) == 40
    # the request's own grammar saw exactly the emitted text: drafts went to forks
    assert made[0].last == finished.token_ids[-1]


class Letters(OnlyLetters):
    """As many letters as asked for, then nothing but the end."""

    def __init__(self, left: int = 9) -> None:
        self.left = left

    def allowed(self, ids: IntArray) -> Any:
        return (ids > 0) & (ids < 27) if self.left else ids == 0

    def accept(self, token: int) -> None:
        assert self.left > 0
        self.left -= 1

    def fork(self) -> Letters:
        return Letters(self.left)

    def ahead(self, most: int, habits: Any) -> list[tuple[int, float]]:
        return [(-1, 1.0)] if not self.left else []


@pytest.mark.parametrize("proposer", PROPOSERS)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("bias", [{}, {0: -math.inf}])
def test_a_complete_grammar_ends_the_reply_whatever_is_said_of_end_tokens(
    proposer: str, temperature: float, bias: dict[int, float]
) -> None:
    p = params(
        proposer=proposer,
        grammar="letters",
        ignore_eos=not bias,
        sampling=SamplingParams(temperature=temperature, logit_bias=bias),
    )
    finished = run(make(make_constraint=lambda *_: Letters()), p)
    assert finished.reason == "stop_token"
    assert len(finished.token_ids) == 10
    assert finished.token_ids[-1] == 0
    assert all(0 < t < 27 for t in finished.token_ids[:-1])
    again = run(make(make_constraint=lambda *_: Letters()), plain(p))
    assert words(finished) == words(again)


def test_near_ties_are_flagged_only_where_passes_were_wide() -> None:
    """A flat model is full of near-ties; they count only beyond the exact row count."""
    flat: dict[str, Any] = {"sharpness": 0.05, "eog_bias": -9.0, "agreement": 1.0}
    assert run(make(exact_rows=2, **flat), params(draft_max=8)).near_ties > 0
    assert run(make(exact_rows=65, **flat), params(draft_max=8)).near_ties == 0
    assert run(make(widths=(1, 2), **flat), params(draft_max=8)).near_ties == 0
    assert run(make(exact_rows=2, **flat), plain(params())).near_ties == 0
