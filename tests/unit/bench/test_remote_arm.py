"""Other engines as arms of a comparison, over scripted answers."""

from __future__ import annotations

import pytest

from specllama.bench.experiment import RunFigures, Task
from specllama.bench.prompts import BenchPrompt
from specllama.bench.remote_arm import RemoteArm
from specllama.bench.report import Comparison, provenance_lines
from specllama.interface import Message
from specllama.remote.address import Address
from specllama.remote.answers import Drafted
from specllama.remote.foreign import ForeignEngine
from specllama.remote.kinds import engines
from specllama.remote.kinds.kind import Found, Heard, Kind, Served
from specllama.settings.params import GenerateParams, SamplingParams

PROMPT = BenchPrompt("chat-00", "chat", (Message("user", "hello"),))
SAMPLING = SamplingParams(top_k=20, min_p=0.05, repeat_penalty=1.1)


class Scripted(ForeignEngine):
    """Answers every question alike, and keeps what it was asked."""

    def __init__(self, answered: Heard, kind: Kind = engines.VLLM) -> None:
        found = Found("0.32.0", "ngram, 4 tokens", (Served("tiny"),))
        super().__init__(Address("http://127.0.0.1:9"), kind, found)
        self.answered = answered
        self.asked: list[GenerateParams] = []
        self.told: list[dict[str, object]] = []

    def ask(self, prompt: object, params: GenerateParams, **told: object) -> Heard:  # type: ignore[override]
        self.asked.append(params)
        self.told.append(told)
        return self.answered


def answered(tokens: int | None = 41, draft: Drafted | None = None) -> Heard:
    return Heard("so it is", finish="length", tokens=tokens, draft=draft, first_s=0.5, seconds=2.5)


def run(engine: Scripted, temperature: float = 0.0) -> RunFigures:
    params = GenerateParams(sampling=SAMPLING)
    return RemoteArm(engine, params).run(Task(PROMPT, temperature, 64, 7, False), 0)


def test_a_reply_is_timed_by_the_client() -> None:
    figures = run(Scripted(answered(draft=Drafted(36, 31))))
    assert (figures.arm, figures.prompt, figures.slice) == ("vLLM", "chat-00", "chat")
    assert (figures.ttft_s, figures.total_s) == (0.5, 2.5)
    assert figures.speed == pytest.approx(40 / 2.0)
    assert (figures.drafted, figures.accepted) == (36, 31)


@pytest.mark.parametrize("tokens", [None, 23])
def test_a_reply_that_is_not_counted_or_short_has_no_speed(tokens: int | None) -> None:
    assert run(Scripted(answered(tokens))).speed is None


def test_a_reply_that_is_not_counted_is_counted_by_our_tokenizer() -> None:
    task = Task(PROMPT, 0.0, 64, 7, False)
    for told, tokens in ((None, 30), (41, 41)):
        arm = RemoteArm(Scripted(answered(told)), GenerateParams(), count=lambda text: 30)
        assert arm.run(task, 0).tokens == tokens


def test_what_is_not_told_is_not_known() -> None:
    told, silent = run(Scripted(answered(draft=Drafted(8, 4)))), run(Scripted(answered()))
    assert (silent.drafted, silent.accepted) == (None, None)
    row = Comparison("vLLM", [told, silent]).summary("vLLM", "all")
    assert (row.drafted, row.accepted, row.acceptance_rate, row.rejected) == (None,) * 4
    known = Comparison("vLLM", [told, told]).summary("vLLM", "all")
    assert (known.drafted, known.accepted, known.acceptance_rate, known.rejected) == (16, 8, 0.5, 8)


def test_what_changes_no_greedy_text_is_left_out() -> None:
    engine = Scripted(answered())
    run(engine)
    run(engine, 1.0)
    cold, warm = (params.sampling for params in engine.asked)
    assert (cold.top_k, cold.top_p, cold.min_p, cold.repeat_penalty) == (0, 1.0, 0.0, 1.1)
    assert (warm.temperature, warm.top_k, warm.min_p) == (1.0, 20, 0.05)
    assert [params.seed for params in engine.asked] == [7, 7]


def test_texts_are_compared_where_nothing_is_drawn() -> None:
    plain = RunFigures("plain", "chat-00", "chat", 0.0, 0, 4, 1.0, 1.0, 0.1,
                       token_ids=(1, 2), text="so it is\n")  # fmt: skip
    assert plain.same(run(Scripted(answered()))) is True
    assert plain.same(run(Scripted(answered()), 1.0)) is None
    plain.text = "so it was"
    assert plain.same(run(Scripted(answered()))) is False


def test_a_request_that_can_switch_makes_two_arms() -> None:
    engine = Scripted(answered(), engines.MLX_LM)
    arms = [RemoteArm(engine, GenerateParams(), speculation=way) for way in (False, True)]
    assert [arm.name for arm in arms] == ["mlx-lm plain", "mlx-lm drafting"]
    for arm in arms:
        arm.run(Task(PROMPT, 0.0, 64, 7, False), 0)
    assert [told["speculation"] for told in engine.told] == [False, True]


def test_a_report_says_how_each_was_started() -> None:
    arm = RemoteArm(Scripted(answered()), GenerateParams())
    lines = provenance_lines({"against": [arm.to_dict()]})
    told = "vLLM: vLLM 0.32.0 at http://127.0.0.1:9, model tiny, started with ngram, 4 tokens"
    assert told in lines
