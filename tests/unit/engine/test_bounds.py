"""Sizes of requests, before anything of them is read."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from engines import FakeContext, engine_over
from table_model import FakeTable, FakeVocab

from specllama.cancel import Cancel
from specllama.engine.engine import Engine
from specllama.engine.pair_loading import SamplerChains
from specllama.engine.pulse import PATIENCE_S, Pulse, Watchdog, patience
from specllama.errors import Cancelled, PromptTooLong, UsageError
from specllama.events import Finished
from specllama.interface import Message, Prompt
from specllama.settings.params import GenerateParams, SamplingParams
from specllama.speculative.sampling import SamplerChain

N_CTX = 160


class Deaf(FakeVocab):
    """A vocabulary that must not be asked for tokens."""

    def tokenize(self, text: str, **how: bool) -> list[int]:  # type: ignore[override]
        if len(text) > 1000:
            raise AssertionError("it was read")
        return super().tokenize(text, **how)  # type: ignore[arg-type]


def engine_of(vocab: FakeVocab) -> Engine:
    return engine_over(FakeContext(FakeTable(), n_ctx=N_CTX), vocab)


LONG = "x" * (4 * N_CTX + 1)


@pytest.mark.parametrize(
    "prompt",
    [
        LONG,
        [1] * (N_CTX + 1),
        [LONG],
        [Message("user", LONG)],
        [Message("user", "a"), Message("assistant", "b", LONG), Message("user", "c")],
        [Message("user", "a")] * (N_CTX + 1),
    ],
)
def test_what_cannot_fit_is_refused_unread(prompt: Prompt) -> None:
    engine = engine_of(Deaf())
    for ask in (engine.prepare, engine.submit, engine.count_tokens):
        with pytest.raises(PromptTooLong, match="context size of 160"):
            ask(prompt)
    if isinstance(prompt, str):
        for call in (
            lambda: engine.tokenize(prompt, False, True),
            lambda: engine.tokens_of([prompt]),
        ):
            with pytest.raises(PromptTooLong):
                call()
    with pytest.raises(PromptTooLong):
        engine.pieces([1] * len(LONG))


def test_a_request_is_prepared_beside_another_one_and_says_the_same() -> None:
    engine = engine_of(FakeVocab())
    params = GenerateParams(seed=7, max_tokens=12)
    [*_, whole] = engine.generate("the rain", params)
    stream = engine.generate("the sea", params)
    next(stream)
    ready = engine.prepare("the rain", params)  # while the other one goes on
    list(stream)
    assert _played(engine, engine.begin(ready)).token_ids == whole.token_ids


def _played(engine: Engine, id: int) -> Finished:
    while steps := engine.step():
        for whose, said in steps:
            if whose == id and isinstance(said, Finished):
                return said
    raise AssertionError("it did not end")


def test_a_cancel_reaches_preparing() -> None:
    cancel = Cancel()
    cancel.set()
    with pytest.raises(Cancelled):
        engine_of(Deaf()).prepare("the rain", cancel=cancel)


class Counting(FakeVocab):
    asked = 0

    def piece(self, token: int, *, special: bool = False) -> bytes:
        Counting.asked += 1
        return super().piece(token, special=special)


def test_breakers_are_looked_up_once_and_few_are_kept() -> None:
    vocab = Counting()
    chains = SamplerChains(vocab)

    def chain(breakers: Sequence[str]) -> SamplerChain:
        sampling = SamplingParams(dry_multiplier=0.5, dry_sequence_breakers=tuple(breakers))
        return chains.chain(GenerateParams(sampling=sampling), 1, [1, 2], 2)

    wanted = {t for t in range(vocab.n_tokens) if vocab.piece(t) in (b"e", b"t")}
    assert chain(["e", "t"])._breakers == wanted
    asked = Counting.asked
    for i in range(300):
        chain([f"{i}", "e"])
    assert Counting.asked == asked, "pieces are looked up once"
    assert chains._breaking.cache_info().currsize <= 128
    with pytest.raises(UsageError, match="dry-sequence-breakers takes up to 32"):
        SamplingParams(dry_sequence_breakers=("a",) * 33)
    with pytest.raises(UsageError, match="dry-sequence-breakers"):
        SamplingParams(dry_sequence_breakers=("a" * 65,))
    with pytest.raises(UsageError, match="stop takes"):
        GenerateParams(stop=("a" * 1025,))


def test_a_bias_is_one_array_for_a_chain_and_its_forks() -> None:
    class Once(dict[int, float]):
        read = 0

        def items(self):  # type: ignore[no-untyped-def]
            Once.read += 1
            return super().items()

    bias = Once({1: 2.5, 3: float("-inf"), 99: 1.0, 2: 1e300})
    chain = SamplerChain(SamplingParams(temperature=0.0, logit_bias=bias))
    read = Once.read
    row = np.zeros(8, np.float32)
    for one in (chain, chain.fork(), chain):
        z = one._adjusted(row)
        assert (z[1], z[2], z[3], z[0]) == (np.float32(2.5), np.float32(1e37), -np.inf, 0.0)
    assert Once.read == read


def test_how_long_a_pass_may_take() -> None:
    gib = 1 << 30
    assert patience(0.0, None, 256, 5 * gib) > 600, "nothing is known of the machine"
    assert patience(0.4, 0.01, 256, 5 * gib) == PATIENCE_S
    assert patience(30.0, 0.1, 256, 5 * gib) == 600.0
    assert patience(2.0, 5.0, 256, 40 * gib) == 1280.0, "a part of a prompt, read one by one"


def test_a_watchdog_counts_what_it_saw() -> None:
    now, pulse = [0.0], Pulse()
    pulse.expect(10.0)
    dog = Watchdog(pulse, lambda: now[0])

    def after(seconds: float) -> bool:
        for _ in range(round(seconds * 4)):
            now[0] += 0.25
            if dog.stuck():
                return True
        return False

    assert not after(30), "it waits for work"
    pulse.works("passes")
    assert not after(9)
    pulse.beat()
    assert not after(9), "a pass ended"
    pulse.rests("passes")
    assert not after(30)
    pulse.works("requests", 7)
    assert not after(30), "no pass waits for it"
    assert after(15)
    assert dog.stuck() == ("requests", 7, pytest.approx(45.0, abs=10))
    pulse.rests("requests")
    pulse.works("passes")
    dog.stuck()
    now[0] += 3600.0  # the machine slept
    assert not dog.stuck()
    assert after(11)


@pytest.mark.parametrize(("begun", "works", "limit"), [
    (True, None, 30), (False, None, 240), (True, "calls", 240), (True, "passes", 30),
])  # fmt: skip
def test_a_process_that_hears_nothing_is_stuck(begun: bool, works: Any, limit: float) -> None:
    """Whatever its model costs: a pass of this one may take a minute."""
    now, pulse = [0.0], Pulse()
    pulse.expect(60.0)
    dog = Watchdog(pulse, lambda: now[0])

    def after(seconds: float) -> str:
        for _ in range(round(seconds * 4)):
            now[0] += 0.25
            if (found := dog.stuck(begun=begun)) is not None:
                return found[0]
        return ""

    if works is not None:
        pulse.works(works)
    pulse.sent = 1
    pulse.hears(7)
    assert pulse.heard == 7
    pulse.sent = 2
    assert after(limit - 1) == ""
    pulse.hears(0)
    pulse.sent = 3
    assert pulse.heard == 7
    if works == "passes":
        pulse.beat()
    elif works is not None:
        pulse.works(works)
    assert after(limit - 1) == "", "it heard in time"
    now[0] += 86_400.0  # the machine slept
    assert after(0.25) == ""
    assert after(3) in ("commands", works)
