"""Thoughts and answers: split right for every family, however the reply arrives, and put together
again as the model wrote it. The templates are small ones in the way of each family."""

import json
import random
import re
from itertools import pairwise
from pathlib import Path

import ggufs
import numpy as np
import pytest
from engines import FakeContext, engine_over
from hypothesis import given, settings
from hypothesis import strategies as st
from requests_made import asked
from table_model import FakeTable
from thinking import TagVocab, check, end, kept, replies, tell, vocabularies

from specllama.backend.llama import LlamaModel
from specllama.engine.engine import Engine
from specllama.engine.reply import ReplyBuilder
from specllama.errors import UsageError
from specllama.events import Event, Finished, ReasoningDelta, RoundDone, TextDelta
from specllama.interface import Message
from specllama.replies.marks import USUAL, derive, switch
from specllama.replies.segments import render
from specllama.replies.thoughts import Messages, Spelling, reader
from specllama.settings.params import GenerateParams, template_arguments
from specllama.speculative.drafting.draft_model import ChainDrafter
from specllama.speculative.drafting.forced import ForcedDrafter


def chat(user: str, reply: str, ask: str) -> str:
    """A template of three parts: a question's turn, a reply's, and the next header."""
    return (
        "{% for m in messages %}{% set thought = m.reasoning_content or '' %}"
        f"{{% if m.role == 'assistant' %}}{reply}{{% else %}}{user}{{% endif %}}{{% endfor %}}"
        f"{{% if add_generation_prompt %}}{ask}{{% endif %}}"
    )


LAST = "loop.last and thought"
FAMILIES = {
    "tags, of the last reply alone": chat(
        "<|u|>{{ m.content }}",
        f"<|a|>{{% if {LAST} %}}<think>\n{{{{ thought }}}}\n</think>\n\n{{% endif %}}"
        "{{ m.content.split('</think>')[-1] }}<|e|>",
        "<|a|>{% if not enable_thinking %}<think>\n\n</think>\n\n{% endif %}",
    ),
    "tags, opened in the prompt": chat(
        "[U]{{ m.content }}",
        f"[A]{{% if {LAST} %}}<think>{{{{ thought }}}}{{% endif %}}</think>{{{{ m.content }}}}[E]",
        "[A]{% if enable_thinking %}<think>{% else %}</think>{% endif %}",
    ),
    "tags, every reply": chat(
        "<u>{{ m.content }}",
        "<a><seed:think>{{ thought }}</seed:think>\n{{ m.content }}</a>",
        "<a>{% if thinking_budget == 0 %}<seed:think></seed:think>{% endif %}",
    ),
    "tags that only cut": chat(
        "<｜User｜>{{ m.content }}",
        "<｜Assistant｜>{{ m.content.split('</think>')[-1] }}<｜end｜>",
        "<｜Assistant｜><think>\n",
    ),
    "brackets": chat(
        "[INST]{{ m.content }}[/INST]",
        "{% if m.content is string %}{{ m.content }}{% else %}{% for b in m.content %}"
        "{% if b.type == 'thinking' %}[THINK]{{ b.thinking }}[/THINK]{% else %}{{ b.text }}"
        "{% endif %}{% endfor %}{% endif %}</s>",
        "",
    ),
    "control tokens": chat(
        "<|T|><|USER|>{{ m.content }}<|/T|>",
        "<|T|><|BOT|>{% if thought %}<|START_THINKING|>{{ thought }}<|END_THINKING|>{% endif %}"
        "<|START_TEXT|>{{ m.content }}<|END_TEXT|><|/T|>",
        "<|T|><|BOT|><|START_THINKING|>",
    ),
    "open and close": chat(
        "<|open|>user<|sep|>{{ m.content }}<|close|>",
        "<|open|>bot<|sep|>{% if thought %}<|open|>think<|sep|>{{ thought }}<|close|>think<|sep|>"
        "{% endif %}<|open|>text<|sep|>{{ m.content }}<|close|>text<|sep|>",
        "<|open|>bot<|sep|><|open|>think<|sep|>",
    ),
    "channels, given away by an empty one": chat(
        "<|turn>user\n{{ m.content }}<turn|>",
        "<|turn>model\n{{ m.content.split('<channel|>')[-1] }}<turn|>",
        "<|turn>model\n{% if not enable_thinking %}<|channel>thought\n<channel|>{% endif %}",
    ),
    "harmony": chat(
        "<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>",
        "{% if loop.last and m.thinking %}<|start|>assistant<|channel|>analysis<|message|>"
        "{{ m.thinking }}<|end|>{% endif %}"
        "<|start|>assistant<|channel|>final<|message|>{{ m.content }}<|end|>",
        "<|start|>assistant",
    ),
    "other messages": chat(
        "<|begin|>{{ m.role }}<|content|>{{ m.content }}<|end|>",
        "{% if thought %}<|begin|>assistant<|think|>{{ thought }}<|end|>{% endif %}"
        "<|begin|>assistant<|content|>{{ m.content }}<|end|>",
        "<|begin|>assistant",
    ),
    "tags that are only opened": chat(
        "<|u|>{{ m.content }}<|e|>", "<|a|>{{ m.content }}<|e|>", "<|a|>\n<think>\n"
    ),
    "words": chat(
        "<|user|>\n{{ m.content }}\n",
        f"<|bot|>\n{{% if {LAST} %}}{{{{ thought }}}}\n[BEGIN ANSWER]\n{{% endif %}}"
        "{{ m.content }}<|end|>\n",
        "<|bot|>\nHere is what I think:\n",
    ),
    "nothing at all": ggufs.CHATML,
}
KEPT = {"tags, every reply", "brackets", "control tokens", "open and close", "other messages"}
HARMONY = derive(FAMILIES["harmony"])


@pytest.mark.parametrize("family", FAMILIES)
def test_every_reply_of_every_family(family: str) -> None:
    """In one piece, byte by byte, at random; and cut at every place and continued."""
    template = FAMILIES[family]
    state = render(template, [Message("user", "Which?")], bos="", eos="").state
    for n, vocab in enumerate(vocabularies(derive(template))):
        for told in replies(derive(template), state):
            assert check(template, vocab, told, random.Random(n)) == []


@pytest.mark.parametrize("family", FAMILIES)
def test_earlier_thoughts_are_kept_where_the_template_keeps_them(family: str) -> None:
    assert kept(FAMILIES[family]) == ((family in KEPT, family in KEPT))


def test_what_is_derived() -> None:
    assert derive(ggufs.CHATML) is USUAL
    assert derive(None) is USUAL
    assert HARMONY.header == "<|start|>assistant"
    assert HARMONY.alone == "<|channel|>final<|message|>"
    assert HARMONY.shape == "thinking"
    gemma = derive(FAMILIES["channels, given away by an empty one"])
    assert (gemma.open, gemma.close) == ("<|channel>thought", "<channel|>")
    assert derive(FAMILIES["words"]).close == "[BEGIN ANSWER]"
    assert derive(FAMILIES["control tokens"]).lead == "<|START_TEXT|>"


@pytest.mark.parametrize(
    ("prompt", "close"),
    [
        ("<think>\n", "</think>"),
        ("\n<think>", "</think>"),
        (" <think> \n\n", "</think>"),
        ("[THINK]", "[/THINK]"),
        ("<seed:think>\n", "</seed:think>"),
        ("<|START_THINKING|>", "<|END_THINKING|>"),
        ("<|begin_of_thought|>\n", "<|end_of_thought|>"),
        ("<|channel>thought\n", "<channel|>"),
    ],
)
def test_a_mark_that_the_prompt_leaves_open_is_known_though_nothing_closes_it(
    prompt: str, close: str
) -> None:
    marks = derive(chat("<|u|>{{ m.content }}", "<|a|>{{ m.content }}", f"<|a|>{prompt}"))
    assert (marks.open, marks.close, marks.known) == (prompt.strip(), close, True)
    if close == "</think>":  # what only closes one opens none
        assert derive(chat("{{ m.content }}", "{{ m.content }}", "<|a|></think>\n")) is USUAL


def test_a_template_that_prints_lists_has_no_marks() -> None:
    assert derive("{% for m in messages %}{{ m.content }}|{% endfor %}") is USUAL


@pytest.mark.parametrize(
    ("written", "thought", "answer"),
    [
        ("<|channel|>final <|constrain|>json<|message|>{}", "", "{}"),
        ("<|channel|>commentary to=f <|constrain|>json<|message|>{}", "{}", ""),
        (
            "<|channel|>analysis<|message|>A<|end|><|start|>assistant<|channel|>analysis<|message|>"
            "B<|end|><|start|>assistant<|channel|>final<|message|>C",
            "A\n\nB",
            "C",
        ),
        (
            "<|channel|>commentary<|message|>First,<|end|><|start|>assistant<|channel|>analysis"
            "<|message|>hm<|end|><|start|>assistant<|channel|>final<|message|>done.",
            "First,\n\nhm",
            "done.",
        ),
        ("Just text.", "", "Just text."),
    ],
)
def test_messages_of_other_kinds_are_no_answer(written: str, thought: str, answer: str) -> None:
    for vocab in vocabularies(HARMONY):
        one = reader(Spelling(HARMONY, vocab), None)
        assert isinstance(one, Messages)
        ids = vocab.tokenize(written, add_special=False, parse_special=True)
        said, rest = tell(one, ids), end(one, cut=False)
        assert (said[0] + rest[0], said[1] + rest[1]) == (thought, answer)


def test_what_people_write_opens_no_thought() -> None:
    template = FAMILIES["tags, opened in the prompt"]
    for typed in ("</think>", "<think>", "<think></think>[A]</think>"):
        assert render(template, [Message("user", typed)], bos="", eos="").state is True
        off = render(
            template, [Message("user", typed)], bos="", eos="", variables={"enable_thinking": False}
        )
        assert off.state is False


UNITS = st.lists(st.sampled_from(["<think>", "</think>", "<", "think", ">", "\n", " ", "a", "é"]))


@settings(max_examples=100)
@given(UNITS, st.randoms(use_true_random=False), st.sampled_from([True, False, None]))
def test_pieces_change_nothing_and_nothing_is_lost(
    words: list[str], rng: random.Random, state: bool | None
) -> None:
    for vocab in (TagVocab(["<think>", "</think>"], control=False), TagVocab()):
        spelling = Spelling(USUAL, vocab)
        text = "".join(words)
        ids = vocab.tokenize(text, add_special=False, parse_special=True)
        found = set()
        for n in (0, len(ids) // 2, len(ids) - 1):
            one = reader(spelling, state)
            cuts = sorted(rng.sample(range(len(ids)), max(n, 0)))
            parts = []
            for start, stop in pairwise([0, *cuts, len(ids)]):
                parts += one.feed("".join(map(spelling.unit, ids[start:stop])))
            parts += one.finish(cut=False)
            fields = ["".join(u for told, u in parts if told is kind) for kind in (True, False)]
            found.add((*fields, one.seams))
        [(thought, answer, seams)] = found
        if seams is not None:
            before, behind = (seam.encode() for seam in seams)
            said = before + spelling.bytes(thought) + behind + spelling.bytes(answer)
            assert said == text.encode()


# ---- switches


def test_switches_are_found_by_rendering() -> None:
    opened = FAMILIES["tags, opened in the prompt"]
    assert switch(opened, "off") == ({"enable_thinking": False}, "")
    assert switch(opened, "on") == ({"enable_thinking": True}, "")
    said, why = switch(opened, "low")
    assert said == {"enable_thinking": True}
    assert "effort" in why
    assert switch(FAMILIES["tags, every reply"], "off")[0] == {"thinking_budget": 0}
    assert switch(ggufs.CHATML, "off") == ({}, "")
    assert switch(ggufs.CHATML, "auto") == ({}, "")
    effort = "{{ reasoning_effort or 'medium' }}" + FAMILIES["harmony"]
    assert switch(effort, "low") == ({"reasoning_effort": "low"}, "")
    assert switch(effort, "off") == ({}, "")
    picky = (
        "{% if reasoning_effort == 'medium' %}{{ raise_exception('low or high') }}{% endif %}"
        "{{ reasoning_effort }}" + FAMILIES["harmony"]
    )
    said, why = switch(picky, "medium")
    assert (said, why) == ({"reasoning_effort": "high"}, "this model thinks at high")


@pytest.mark.parametrize("family", FAMILIES)
def test_without_a_switch_the_thought_is_closed_in_the_prompt(family: str) -> None:
    template = FAMILIES[family]
    asked = [Message("user", "Which?")]
    rendered = render(template, asked, bos="", eos="", unthinking=True)
    marks = derive(template)
    one = reader(Spelling(marks, vocabularies(marks)[0]), rendered.state)
    one.resume(rendered.begun)
    said, rest = tell(one, list(b"Yes.")), end(one, cut=False)
    assert (said[0] + rest[0], said[1] + rest[1]) == ("", "Yes.")
    if marks != USUAL:
        assert rendered.text != render(template, asked, bos="", eos="").text


def test_template_arguments() -> None:
    given_ = ["enable_thinking=false", "name=Ada", 'tools=[{"a": 1}]', "empty=", "x=1=2"]
    assert template_arguments(given_) == {
        "enable_thinking": False,
        "name": "Ada",
        "tools": [{"a": 1}],
        "empty": "",
        "x": "1=2",
    }
    for bad in ("no value", "=1", "1a=2", "messages=[]"):
        with pytest.raises(UsageError):
            template_arguments([bad])
        with pytest.raises(UsageError):
            GenerateParams(template_args=(bad,))
    text = render(
        "{{ tools | tojson }}{{ add_generation_prompt }}{{ messages[0].content }}",
        [Message("user", "x")],
        bos="",
        eos="",
        variables={"tools": [1], "add_generation_prompt": False, "messages": []},
    ).text
    assert text == "[1]Falsex"


# ---- a whole engine


MARKED = ["<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|return|>", "<|call|>"]
TAGS = ["<think>", "</think>"]


def a_model(path: Path, special: list[str], kind: int) -> LlamaModel:
    tokens, types, merges = ggufs.bpe_tokens()
    ggufs.write_llama(
        path, tokens=[*tokens, *special], types=[*types, *[kind] * len(special)], merges=merges
    )
    return LlamaModel(path, pre="gpt-2", gpu_layers="0")


def test_a_whole_chat_in_channels(tmp_path: Path) -> None:
    """A model whose tokens are the channels': no marker in the text, no ChatML at turn two."""
    model = a_model(tmp_path / "harmony.gguf", MARKED, ggufs.CONTROL)
    try:
        vocab = model.vocab
        engine = engine_over(
            FakeContext(FakeTable(vocab.n_tokens)), vocab=vocab, template=FAMILIES["harmony"]
        )
        question = [Message("user", "the model?")]
        prepare = engine._loaded.prompting.prepare
        reply = ReplyBuilder(GenerateParams(), vocab, prepare(question, GenerateParams()).reader)
        raw = (
            "<|channel|>analysis<|message|>Hm, <b>well</b>.<|end|>"
            "<|start|>assistant<|channel|>final<|message|>Yes & no.<|return|>"
        )
        reply.accept(vocab.tokenize(raw, add_special=False, parse_special=True))
        assert reply.reason == "stop_token", "<|end|> ends a message, not the reply"
        assert (reply.reasoning, reply.text) == ("Hm, <b>well</b>.", "Yes & no.")
        again = Message("assistant", reply.text, reply.reasoning, reply.seams)
        assert prepare([*question, again, Message("user", "Why?")], GenerateParams()).notices == ()
        going_on = prepare([*question, again], GenerateParams()).ids
        written = vocab.tokenize(raw[: -len("<|return|>")], add_special=False, parse_special=True)
        assert going_on == prepare(question, GenerateParams()).ids + written
        free, bound = GenerateParams(), GenerateParams(grammar='root ::= "x"')
        assert prepare("raw text", free).reader is None
        assert prepare([1, 2], free).reader is None
        constrained = prepare(question, bound)
        assert constrained.reader is None
        assert vocab.piece(constrained.ids[-1], special=True) == b"<|message|>"
    finally:
        model.close()


def run(engine: Engine, prompt: list[Message], **changes: object) -> tuple[list[Event], Finished]:
    params = asked(temperature=1.0, free=True, seed=5, max_tokens=60, draft_max=None)
    params = params.replace(**{"proposer": GenerateParams().proposer, **changes})
    events = list(engine.generate(prompt, params))
    last = events[-1]
    texts = {
        kind: "".join(e.text for e in events if isinstance(e, kind))
        for kind in (ReasoningDelta, TextDelta)
    }
    assert texts == {ReasoningDelta: last.reasoning, TextDelta: last.text}
    assert len(last.token_ids) == last.draft_n_accepted + last.rounds - last.cut
    return events, last


@pytest.mark.parametrize("budget", [0, 1, 7, 30])
@pytest.mark.parametrize("kind", [ggufs.CONTROL, ggufs.USER_DEFINED, None])
def test_a_budget_closes_the_thought_alike_with_and_without_drafts(
    tmp_path: Path, budget: int, kind: int | None
) -> None:
    special = [] if kind is None else TAGS
    model = a_model(tmp_path / "tags.gguf", special, kind or ggufs.CONTROL)
    try:
        vocab = model.vocab
        table = FakeTable(vocab.n_tokens, sharpness=4.0)
        other = FakeTable(vocab.n_tokens, seed=9, of=table, agreement=0.8)
        engine = engine_over(
            FakeContext(table, n_ctx=512),
            vocab=vocab,
            drafters={"draft": ChainDrafter(FakeContext(other, n_ctx=512), n_vocab=vocab.n_tokens)},
            template=FAMILIES["tags, opened in the prompt"],
        )
        asked = [Message("user", "the model?")]
        _, plain = run(engine, asked, think_budget=budget, speculate=False)
        _, drafted = run(engine, asked, think_budget=budget, proposer="draft")
        assert drafted.draft_n_accepted > 0
        assert plain.token_ids == drafted.token_ids
        assert (plain.reasoning, plain.text) == (drafted.reasoning, drafted.text)
        assert plain.text
        closing = vocab.tokenize("</think>", add_special=False, parse_special=True)
        at = min(budget, len(plain.token_ids))
        early = next(i for i in range(60) if list(plain.token_ids[i:])[: len(closing)] == closing)
        assert early <= at + 3, "at most to the end of a character"
        _, free = run(engine, asked, speculate=False)
        assert free.token_ids[: min(early, at)] == plain.token_ids[: min(early, at)]
        # answer now: a reply that was cut in its thought goes on with the answer
        begun = Message("assistant", "", plain.reasoning[:3] or "Hm", ("", ""))
        _, answered = run(engine, [*asked, begun], think_budget=0)
        assert answered.reasoning == ""
        assert answered.text
        assert answered.token_ids[: len(closing)] == tuple(closing)
    finally:
        model.close()


def test_a_continued_thought_goes_on_token_for_token(tmp_path: Path) -> None:
    model = a_model(tmp_path / "tags.gguf", TAGS, ggufs.USER_DEFINED)
    try:
        vocab = model.vocab
        engine = engine_over(
            FakeContext(FakeTable(vocab.n_tokens, sharpness=4.0), n_ctx=512),
            vocab=vocab,
            template=FAMILIES["tags, opened in the prompt"],
        )
        asked = [Message("user", "the model?")]
        _, whole = run(engine, asked, think_budget=9, max_tokens=40)
        for n in (3, 9, 10, 14):
            events, first = run(engine, asked, think_budget=9, max_tokens=n)
            begun = Message("assistant", first.text, first.reasoning, first.seams)
            ids = engine.encode([*asked, begun])[0]
            if ids == engine.encode(asked)[0] + list(first.token_ids):
                _, rest = run(engine, [*asked, begun], think_budget=9, max_tokens=40 - n)
                assert first.token_ids + rest.token_ids == whole.token_ids
                assert first.reasoning + rest.reasoning == whole.reasoning
                assert first.text + rest.text == whole.text
            assert sum(isinstance(e, RoundDone) for e in events) == first.rounds
    finally:
        model.close()


# ---- thoughts before an answer that has to fit a grammar

PET = {
    "type": "object",
    "properties": {"pet": {"enum": ["cat", "cow"]}, "age": {"type": "integer", "maximum": 99}},
    "required": ["pet", "age"],
    "additionalProperties": False,
}
FITS = re.compile(r'\{\s*"pet"\s*:\s*"(cat|cow)"\s*,\s*"age"\s*:\s*-?\d+\s*\}')


@pytest.mark.parametrize("family", ["tags, opened in the prompt", "tags that are only opened",
                                    "tags, every reply", "control tokens"])  # fmt: skip
@pytest.mark.parametrize("kind", [ggufs.CONTROL, ggufs.USER_DEFINED, None])
def test_a_schema_holds_behind_the_thought_with_and_without_drafts(
    tmp_path: Path, family: str, kind: int | None
) -> None:
    marks = derive(FAMILIES[family])
    text = "".join((marks.opening, marks.closing, marks.alone, marks.header))
    special = sorted(set(re.findall(r"<[^<>\s]+>", text)))
    model = a_model(tmp_path / "m.gguf", [] if kind is None else special, kind or ggufs.CONTROL)
    try:
        vocab = model.vocab
        table = FakeTable(vocab.n_tokens, sharpness=4.0)
        other = FakeTable(vocab.n_tokens, seed=9, of=table, agreement=0.8)
        draft = ChainDrafter(FakeContext(other, n_ctx=512), n_vocab=vocab.n_tokens)
        engine = engine_over(
            FakeContext(table, n_ctx=512),
            vocab=vocab,
            drafters={"draft": draft, "forced": ForcedDrafter()},
            template=FAMILIES[family],
        )
        question = [Message("user", "the model?")]
        wish = {"json_schema": json.dumps(PET), "max_tokens": 160, "think": "on"}
        for budget in (0, 7, None):
            wish["think_budget"] = budget
            _, plain = run(engine, question, **wish, speculate=False)
            for proposer in ("draft", "forced"):
                _, drafted = run(engine, question, **wish, proposer=proposer)
                assert plain.token_ids == drafted.token_ids
                assert (plain.reasoning, plain.text) == (drafted.reasoning, drafted.text)
            if budget is None and plain.reason == "length":  # nothing ends the thought
                continue
            assert FITS.fullmatch(plain.text), plain
        again = {**wish, "think": "auto", "think_budget": None}
        _, bound = run(engine, question, **again, speculate=False)
        assert (bound.reasoning, bool(FITS.fullmatch(bound.text))) == ("", True)
    finally:
        model.close()


def test_a_schema_holds_in_the_last_of_several_messages(tmp_path: Path) -> None:
    model = a_model(tmp_path / "harmony.gguf", MARKED, ggufs.CONTROL)
    try:
        vocab = model.vocab
        engine = engine_over(
            FakeContext(FakeTable(vocab.n_tokens)), vocab=vocab, template=FAMILIES["harmony"]
        )
        params = GenerateParams(json_schema=json.dumps(PET), think="high", seed=1)
        it = engine.prepare([Message("user", "the model?")], params).chain.constraint
        assert it is not None
        written = (
            "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final"
            '<|message|>{"pet": "cow", "age": 7}<|return|>'
        )
        every = np.arange(vocab.n_tokens)
        return_ = vocab.tokenize("<|return|>", add_special=False, parse_special=True)[0]
        for token in vocab.tokenize(written, add_special=False, parse_special=True):
            allowed = it.allowed(every)
            assert allowed[token], vocab.piece(token, special=True)
            assert token == return_ or not allowed[return_], "the reply ends behind its answer"
            it.accept(token)
    finally:
        model.close()
