"""Requests to an engine over tables, and the laws that its events keep."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from specllama.engine.engine import Engine
from specllama.events import Event, Finished, PrefillProgress, RoundDone, Started, TextDelta
from specllama.interface import EngineLike
from specllama.settings.params import GenerateParams, SamplingParams

PROMPT = "the rain in spain, the rain in "
FREE = SamplingParams(temperature=1.0, top_k=0, top_p=1.0, min_p=0.0)


def params(**changes: Any) -> GenerateParams:
    values: dict[str, Any] = {"sampling": FREE, "seed": 3, "max_tokens": 40, "proposer": "draft"}
    values.update(changes)
    return GenerateParams(**values)


def asked(
    proposer: str = "none", temperature: float = 0.0, *, free: bool = False, **changes: Any
) -> GenerateParams:
    """A request for a reply that ends where it is bounded, drafted in a fixed window.

    Args:
        free: no sampler cuts the law.
    """
    sampling = replace(FREE if free else SamplingParams(), temperature=temperature)
    fixed = {"seed": 1, "window": "fixed", "draft_max": 4, "max_tokens": 24, "ignore_eos": True}
    return GenerateParams(**{"proposer": proposer, "sampling": sampling, **fixed, **changes})


def finish(engine: EngineLike, prompt: Any, params: GenerateParams) -> Finished:
    *_, last = engine.generate(prompt, params)
    assert isinstance(last, Finished)
    return last


def check_laws(events: Sequence[Event]) -> Finished:
    """What holds for every complete request."""
    started, finished = events[0], events[-1]
    assert isinstance(started, Started)
    assert isinstance(finished, Finished)
    rounds = [e for e in events if isinstance(e, RoundDone)]
    assert [type(e) for e in events].count(Started) == 1
    assert [type(e) for e in events].count(Finished) == 1
    assert len(finished.token_ids) == finished.draft_n_accepted + finished.rounds - finished.cut
    assert finished.rounds == len(rounds)
    assert [r.index for r in rounds] == list(range(len(rounds)))
    assert finished.token_ids == tuple(t for r in rounds for t in r.emitted)
    assert finished.text == "".join(e.text for e in events if isinstance(e, TextDelta))
    assert all(e.text for e in events if isinstance(e, TextDelta))
    assert finished.draft_n == sum(len(r.drafted) for r in rounds)
    assert finished.draft_n_accepted == sum(r.accepted for r in rounds)
    assert finished.cut == sum(r.cut for r in rounds)
    assert (finished.seed, finished.prompt_n) == (started.seed, started.prompt_n)
    if rounds:
        assert not rounds[0].drafted, "the first token is a plain step"
        assert finished.timings.ttft_ms > 0.0
    for r in rounds:
        assert r.cut in (0, 1)
        assert len(r.emitted) == r.accepted + 1 - r.cut
        assert tuple(r.drafted[i] for i in r.accepted_path) == r.emitted[: r.accepted]
        n = len(r.drafted)
        fields = (r.parents, r.drafted_text, r.confidence, r.p, r.q, r.sources)
        assert all(len(f) == n for f in fields)
        assert "".join(r.emitted_text) or {*r.emitted} <= {0, 2}  # ends: of tables, of scripts
        if not r.cut:
            assert r.target_token == r.emitted[-1]
        assert (r.target_kind == "plain") == (n == 0)
    prefills = [e for e in events if isinstance(e, PrefillProgress)]
    assert [e.done for e in prefills] == sorted(e.done for e in prefills)
    assert all(e.total == finished.prompt_n for e in prefills)
    return finished


def run(engine: Engine, p: GenerateParams, prompt: Any = PROMPT) -> Finished:
    return check_laws(list(engine.generate(prompt, p)))


def words(finished: Finished) -> tuple[Any, ...]:
    return finished.text, finished.token_ids, finished.reason
