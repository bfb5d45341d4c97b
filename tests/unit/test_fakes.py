"""The scripted engine keeps the laws that the real one keeps."""

import threading

import pytest
from fakes import Reply, ScriptedEngine
from requests_made import check_laws

from specllama.errors import EngineError, PromptTooLong
from specllama.events import RoundDone, TextDelta, event_from_dict
from specllama.interface import EngineLike, Message
from specllama.settings.params import GenerateParams

ASK = [Message("user", "What is a draft?")]
LONG = "one two three, four five: six seven eight nine ten eleven twelve. " * 5


def run(reply: Reply | str, **changes: object):
    engine: EngineLike = ScriptedEngine([reply])
    return list(engine.generate(ASK, GenerateParams(seed=1).replace(**changes)))


@pytest.mark.parametrize("tree", [False, True])
@pytest.mark.parametrize("draft_max", [0, 1, 4, 9])
@pytest.mark.parametrize("max_tokens", [None, 1, 7, 8, 9, 10])
def test_conservation_and_text(tree: bool, draft_max: int, max_tokens: int | None) -> None:
    events = run(Reply(LONG, tree=tree), draft_max=draft_max, max_tokens=max_tokens)
    end = check_laws(events)
    if max_tokens is None:
        assert (end.text, end.reason) == (LONG, "stop_token")
    else:
        assert (len(end.token_ids), end.reason) == (max_tokens, "length")
    past = end.prompt_n - 1
    for done in (event for event in events if isinstance(event, RoundDone)):
        assert done.n_past == past
        past += len(done.emitted)
        for i, node in enumerate(done.accepted_path):
            assert done.parents[node] == (done.accepted_path[i - 1] if i else -1)
    for event in events:
        assert event_from_dict(event.to_dict()) == event


def test_stop_string_and_cancel() -> None:
    end = run(LONG, stop=("four",))[-1]
    assert end.text == "one two three, "
    assert end.reason == "stop_string"
    cancel = threading.Event()
    engine = ScriptedEngine([LONG])
    seen = []
    for event in engine.generate(ASK, GenerateParams(), cancel=cancel):
        seen.append(event)
        if isinstance(event, TextDelta):
            cancel.set()
    assert seen[-1].reason == "cancelled"
    assert seen[-1].rounds == 1


def test_failures_and_reuse() -> None:
    engine = ScriptedEngine([Reply(LONG, raise_at_round=2), "again"])
    with pytest.raises(EngineError):
        list(engine.generate(ASK, GenerateParams()))
    stream = engine.generate(ASK, GenerateParams())
    next(iter(stream))
    with pytest.raises(EngineError, match="busy"):
        next(iter(engine.generate(ASK, GenerateParams())))
    stream.close()
    assert engine.requests[1].closed_early
    assert list(engine.generate(ASK, GenerateParams()))[-1].text == "again"
    with pytest.raises(PromptTooLong):
        list(engine.generate("word " * 3000, GenerateParams()))
