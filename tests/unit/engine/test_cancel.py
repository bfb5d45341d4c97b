"""Stopping: at every pass of either model, in the middle of one, too late, and across processes."""

import threading
from typing import Any

from engines import FakeContext, engine_over
from requests_made import PROMPT, check_laws, params, run, words
from table_model import FakeTable

from specllama.cancel import Cancel
from specllama.engine.engine import Engine
from specllama.events import Event, RoundDone
from specllama.speculative.drafting.draft_model import ChainDrafter


def stoppable(stop: Cancel | None = None, **options: Any) -> tuple[Engine, Cancel]:
    """An engine whose contexts, the draft model's too, look at the flag that its cancel sets."""
    stop = stop or Cancel()
    table = FakeTable(seed=1, eog_bias=-4.0)
    target = FakeContext(table, stop=stop, n_batch=16, **options)
    copy = FakeTable(seed=2, of=table, agreement=0.7)
    draft = FakeContext(copy, stop=stop, n_batch=16, max_rows=1, **options)
    engine = engine_over(
        target, drafters={"draft": ChainDrafter(draft, n_vocab=64, batch=16)}, stop=stop
    )
    return engine, stop


def test_a_cancel_stops_the_next_pass_of_either_model_and_nothing_after_its_request() -> None:
    """Set at every pass in turn: before it, as a signal between two passes would come."""

    class Counting(Cancel):
        def is_set(self) -> bool:  # asked once a pass
            self.asked += 1
            if self.asked == self.at:
                self.cancel.set()
            return super().is_set()

        asked = at = 0
        cancel = Cancel()

    prompt = PROMPT * 6  # several chunks, for the target and for the draft model
    p = params(proposer="draft", max_tokens=40, draft_max=4)
    engine, _ = stoppable()
    reference = words(run(engine, p, prompt))
    ends: set[str] = set()
    for at in range(1, 60):
        stop = Counting()
        engine, _ = stoppable(stop)
        stop.cancel, stop.at = Cancel(), at
        finished = check_laws(list(engine.generate(prompt, p, cancel=stop.cancel)))
        if not stop.cancel.is_set():
            break
        assert finished.reason == "cancelled"
        assert reference[0].startswith(finished.text)
        ends.add("prefill" if not finished.rounds else "rounds")
        assert stop.asked == at, "no pass may begin after the cancel"
        committed = [*engine.encode(prompt)[0], *finished.token_ids]
        target = engine.target
        assert target.n_past == len(target.tokens)
        assert target.tokens == committed[: len(target.tokens)]
        stop.cancel.set()  # once more, too late: the next request has another
        assert words(run(engine, p, prompt)) == reference
    assert ends == {"prefill", "rounds"}


def test_a_cancel_while_a_full_context_is_read_again_ends_as_cancelled() -> None:
    engine, stop = stoppable(n_ctx=64)
    p = params(max_tokens=200, on_full="shift", proposer="none", ignore_eos=True)
    cancel = Cancel()
    inner = engine.target.rollback

    def rollback(keep_len: int) -> None:
        inner(keep_len)
        if keep_len == 16 and not cancel.is_set():  # the head that a shift keeps
            cancel.set()

    engine.target.rollback = rollback  # type: ignore[method-assign]
    events = list(engine.generate("e" * 30, p, cancel=cancel))
    assert cancel.is_set()
    assert check_laws(events).reason == "cancelled"
    assert engine.target.n_past == len(engine.target.tokens)
    assert not stop.is_set()
    run(engine, params(max_tokens=4))


def test_abort_stops_the_running_pass_and_no_later_request() -> None:
    engine, _ = stoppable()
    first = words(run(engine, params()))
    engine.abort()
    assert words(run(engine, params())) == first
    events: list[Event] = []
    for event in engine.generate(PROMPT, params()):
        events.append(event)
        if isinstance(event, RoundDone) and event.index == 2:
            engine.abort()
    assert check_laws(events).reason == "cancelled"
    assert words(run(engine, params())) == first


# -- the two objects -------------------------------------------------------------------------------


def test_a_cancel_tells_whoever_asks_before_or_after() -> None:
    told: list[str] = []
    cancel = Cancel()
    with cancel.calling(lambda: told.append("one")):
        assert told == []
        cancel.set()
    assert told == ["one"]
    cancel.set()
    assert told == ["one"]
    with cancel.calling(lambda: told.append("late")):
        assert told == ["one", "late"]


def test_a_flag_obeys_the_cancel_of_its_request_only() -> None:
    stop, first, second = Cancel(), Cancel(), Cancel()
    with stop.following(first):
        assert not stop.is_set()
    first.set()
    assert not stop.is_set()
    with stop.following(second):
        first.set()
        assert not stop.is_set()
        second.set()
        assert stop.is_set()
    assert not stop.is_set()
    with stop.following(second):
        assert stop.is_set(), "set before it began"


def test_a_cancel_that_races_with_the_end_of_its_request_never_hits_the_next() -> None:
    stop = Cancel()
    for _ in range(300):
        late = Cancel()
        thread = threading.Thread(target=late.set)
        with stop.following(late):
            thread.start()
        with stop.following(Cancel()):
            thread.join()
            assert not stop.is_set()
