"""Noise counts from the start of a reply: what is continued, edited, or asked next."""

from collections.abc import Sequence

import pytest

from specllama.bench.experiment import ask_all, plain_and
from specllama.bench.prompts import BenchPrompt
from specllama.cancel import Cancel
from specllama.engine.engine import Engine
from specllama.interface import Message, Prompt
from specllama.settings.params import GenerateParams, SamplingParams
from specllama.told import Told

LONG = 40


def answer(
    engine: Engine, prompt: Prompt, *, proposer: str = "none", seed: int = 1, n: int = LONG
) -> Told:  # fmt: skip
    params = GenerateParams(
        seed=seed, max_tokens=n, proposer=proposer, window="fixed", draft_max=6,
        min_speculative_tokens=0, ignore_eos=True,
    ).choose("temperature", 1.0)  # fmt: skip
    return Told.of(engine.generate(prompt, params))


def position(engine: Engine, *messages: Message) -> int:
    return answer(engine, messages, n=1).started.position


def asked(prompts: Sequence[BenchPrompt], n: int) -> list[tuple[Message, ...]]:
    return [prompt.messages for prompt in prompts if prompt.messages][:n]


@pytest.mark.parametrize("proposer", ["none", "auto"])
def test_a_reply_goes_on_as_if_it_had_never_been_stopped(
    tiny: Engine, prompts: list[BenchPrompt], proposer: str
) -> None:
    continued = 0
    for seed, messages in enumerate(asked(prompts, 8)):
        whole = answer(tiny, messages, seed=seed).end
        ids = tiny.encode(messages)[0]
        for cut in (1, 7, 25):
            first = answer(tiny, messages, seed=seed, n=cut, proposer=proposer).end
            begun = [*messages, Message("assistant", first.text, seams=first.seams)]
            if tiny.encode(begun)[0] != [*ids, *first.token_ids]:
                continue  # the text is spelled in other tokens: another prompt
            rest = answer(tiny, begun, seed=seed, n=LONG - cut, proposer=proposer)
            assert rest.started.position == cut
            assert first.token_ids + rest.end.token_ids == whole.token_ids
            continued += 1
    assert continued >= 12


@pytest.mark.parametrize("proposer", ["none", "auto"])
def test_a_raw_text_goes_on_too(tiny: Engine, prompts: list[BenchPrompt], proposer: str) -> None:
    for seed, messages in enumerate(asked(prompts, 4)):
        ids = tiny.encode(messages)[0]
        whole = answer(tiny, ids, seed=seed).end.token_ids
        for cut in (1, 13):
            rest = answer(tiny, [*ids, *whole[:cut]], seed=seed, n=LONG - cut, proposer=proposer)
            assert rest.end.token_ids == whole[cut:]


def test_what_precedes_a_reply_does_not_move_its_noise(tiny: Engine) -> None:
    question, reply = Message("user", "How do I bake bread?"), Message("assistant", "With flour.")
    system, more = Message("system", "Be brief."), Message("user", "And without yeast, please?")
    assert position(tiny, question) == 0
    assert position(tiny, system, question) == 0
    assert position(tiny, more) == 0
    later = position(tiny, question, reply, more)
    assert later == position(tiny, system, more, Message("assistant", "No. Use water."), question)
    assert later > 1 << 20, "no reply of a conversation shares its noise with another"
    assert position(tiny, question, reply, more, Message("assistant", "Yes")) > later


def test_an_unchanged_law_is_drawn_alike_whatever_was_asked(tiny: Engine) -> None:
    """Two systems that say the same in other words: with one seed mostly the same words."""
    ask = Message("user", "How can I bake bread?")
    systems = ["You answer in short sentences.", "You answer questions in short sentences."]
    same = other = 0
    for seed in range(1, 17):
        one, two, third = (
            answer(tiny, [Message("system", systems[which]), ask], seed=s, n=8).end.token_ids
            for which, s in ((0, seed), (1, seed), (1, seed + 100))
        )
        same += sum(a == b for a, b in zip(one, two, strict=True))
        other += sum(a == b for a, b in zip(one, third, strict=True))
    assert same > 1.3 * other


# -- runs of a race, none of which copies from another --


def test_no_run_copies_what_another_wrote(own_tiny: Engine) -> None:
    fixed = GenerateParams(
        proposer="suffix",
        window="fixed",
        draft_max=4,
        max_tokens=40,
        sampling=SamplingParams(temperature=0.0),
    )
    question = (Message("user", "What is speculative decoding?"),)
    runs = [
        run for lap in range(2) for run in plain_and(question, fixed, [("drafted", fixed)], lap)
    ]
    for _ in own_tiny.generate(question, fixed.replace(seed=1)):
        pass  # the conversation beside it wrote the same, too
    ask_all(own_tiny, runs, Cancel())
    first, second = (run for run in runs if run.name == "drafted")
    assert first.tokens == second.tokens
    drafts = [[(one.drafted, one.accepted) for one in run.passes] for run in (first, second)]
    assert drafts[0] == drafts[1]
    assert len(first.passes) > len(first.tokens) / 2  # copies of the whole reply would take 8
