"""Thoughts: what a reply shows, and what the template is given at the next turn."""

from __future__ import annotations

import re
from pathlib import Path

import ggufs
import pytest
from engines import loaded

from specllama.backend.fake import FakeContext, FakeTable, fake_info
from specllama.backend.llama import LlamaModel
from specllama.chat import render
from specllama.engine.engine import Engine
from specllama.engine.reply import Reply
from specllama.events import Finished
from specllama.interface import Message
from specllama.params import GenerateParams
from specllama.thoughts import Channels, Tagged, answer, begun, reader, style

TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'assistant' %}"
    "{% if '<|channel|>analysis<|message|>' in m.content "
    "or '<|channel|>final<|message|>' in m.content %}{{ raise_exception('channel tags') }}"
    "{% endif %}<|start|>assistant<|channel|>final<|message|>{{ m.content }}<|end|>"
    "{% else %}<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant{% endif %}"
)
RAW = (
    "<|channel|>analysis<|message|>Hm, <b>well</b>.<|end|>"
    "<|start|>assistant<|channel|>final<|message|>Yes & no."
)
TOKEN = re.compile(r"<\|\w+\|>|.", re.DOTALL)


def shown(raw: str, prefix: str = "") -> str:
    channels = Channels(prefix)
    out = [channels.feed(piece.encode()) for piece in TOKEN.findall(raw)]
    return b"".join([*out, channels.finish()]).decode()


@pytest.mark.parametrize(
    ("raw", "text"),
    [
        (RAW, "<think>Hm, <b>well</b>.</think>\nYes & no."),
        ("<|channel|>final<|message|>Yes.", "Yes."),
        ("<|channel|>final <|constrain|>json<|message|>{}", "{}"),
        ("<|channel|>analysis<|message|>Hm", "<think>Hm"),
        (
            "<|channel|>analysis<|message|>A<|end|><|start|>assistant<|channel|>analysis<|message|>"
            "B<|end|><|start|>assistant<|channel|>final<|message|>C",
            "<think>A\nB</think>\nC",
        ),
        (
            "<|channel|>commentary<|message|>First,<|end|><|start|>assistant<|channel|>analysis"
            "<|message|>hm<|end|><|start|>assistant<|channel|>final<|message|>done.",
            "First,\n\ndone.",
        ),
        (" to=functions.f<|channel|>commentary json<|message|>{}", "<think>{}"),
        ("<|channel|>commentary to=functions.f <|constrain|>json<|message|>{}", "<think>{}"),
        ("Just text.", "Just text."),
        ("<|channel|>analysis", "<|channel|>analysis"),
        ("", ""),
    ],
)
def test_what_is_shown(raw: str, text: str) -> None:
    assert shown(raw) == text


def test_the_rest_of_a_reply_that_is_continued() -> None:
    assert shown("well.<|end|><|start|>assistant<|channel|>final<|message|>Yes", "<think>Hm") == (
        "well.</think>\nYes"
    )
    assert shown(" and no.", "<think>Hm</think>\nYes") == " and no."
    assert shown(" and no.", "Yes") == " and no."


@pytest.mark.parametrize(
    ("reply", "said"),
    [
        ("<think>Hm</think>\nYes </think>.", "Yes </think>."),
        ("<think>Hm", ""),
        ("Yes", "Yes"),
        ("", ""),
        (RAW, "Yes & no."),
        ("<|channel|>analysis<|message|>Hm", "Hm"),
    ],
)
def test_what_the_template_is_given(reply: str, said: str) -> None:
    assert answer(reply) == said
    messages = [Message("user", "?"), Message("assistant", reply), Message("user", "!")]
    rendered = render(TEMPLATE, messages, bos="", eos="")
    assert rendered.notice is None
    assert rendered.text == (
        "<|start|>user<|message|>?<|end|><|start|>assistant<|channel|>final<|message|>"
        f"{said}<|end|><|start|>user<|message|>!<|end|><|start|>assistant"
    )


@pytest.mark.parametrize("ending", ["Hm", "Hm, <b>well</b>.", "Y", "Yes & no."])
def test_a_reply_is_continued_as_the_model_wrote_it(ending: str) -> None:
    """Wherever a message stops, the prompt that continues it ends in the very text of the model."""
    written = RAW[: RAW.index(ending) + len(ending)]
    messages = [Message("user", "?"), Message("assistant", shown(written))]
    prompt = render(TEMPLATE, messages, bos="", eos="", continue_last=True).text
    assert prompt == "<|start|>user<|message|>?<|end|><|start|>assistant" + written
    assert begun(TEMPLATE, "", "") == [("", True)]


def test_other_models_are_read_as_they_write() -> None:
    assert style(None) is style(ggufs.CHATML) is None
    assert style(TEMPLATE) == "harmony"
    assert reader(ggufs.CHATML, "<|im_start|>assistant\n", "") is None


def test_a_whole_chat(tmp_path: Path) -> None:
    """A model whose tokens are the channels': no marker in the text, no ChatML at turn two."""
    tokens, types, merges = ggufs.bpe_tokens()
    special = ["<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|return|>", "<|call|>"]
    path = ggufs.write_llama(
        tmp_path / "harmony.gguf",
        tokens=[*tokens, *special],
        types=[*types, *[ggufs.CONTROL] * len(special)],
        merges=merges,
    )
    model = LlamaModel(path, pre="gpt-2", gpu_layers="0")
    try:
        vocab = model.vocab
        engine = Engine(
            loaded(
                target=FakeContext(FakeTable(vocab.n_tokens)),
                vocab=vocab,
                info=fake_info(),
                template=TEMPLATE,
            )
        )
        question = [Message("user", "the model?")]
        reply = Reply(
            GenerateParams(),
            vocab,
            engine._loaded.prompting.reader(question, [0], GenerateParams()),
        )
        ids = vocab.tokenize(RAW + "<|return|>", add_special=False, parse_special=True)
        taken = reply.take(ids)
        assert taken.reason == "stop_token", "<|end|> ends a message, not the reply"
        assert reply.text == "<think>Hm, <b>well</b>.</think>\nYes & no."
        again = [*question, Message("assistant", reply.text), Message("user", "Why?")]
        _, notice = engine.encode(again)
        assert notice == ""
        events = list(engine.generate(again, GenerateParams(max_tokens=40, seed=1)))
        end = events[-1]
        assert isinstance(end, Finished)
        assert "<|message|>" not in end.text
        free, bound = GenerateParams(), GenerateParams(grammar='root ::= "x"')
        assert engine._loaded.prompting.reader("raw text", [0], free) is None
        assert engine._loaded.prompting.reader([1, 2], [0], free) is None
        assert engine._loaded.prompting.reader(question, [0], bound) is None
    finally:
        model.close()


def test_a_prompt_that_ends_in_thoughts_lends_the_reply_its_tag() -> None:
    template = (
        "{% for m in messages %}[{{ m.role }}]{{ m.content.split('</think>')[-1] }}{% endfor %}"
        "{% if add_generation_prompt %}[assistant]{% if enable_thinking %}<think>\n{% endif %}"
        "{% endif %}"
    )
    question = [Message("user", "?")]
    prompt = render(template, question, bos="", eos="").text
    assert prompt == "[user]?[assistant]<think>\n"
    opened = reader(template, prompt, "")
    assert opened is not None
    text = (opened.feed(b"Hm") + opened.feed(b".</think>Yes") + opened.finish()).decode()
    assert text == "<think>\nHm.</think>Yes"
    going_on = render(
        template, [*question, Message("assistant", text)], bos="", eos="", continue_last=True
    )
    assert going_on.text == prompt + "Hm.</think>Yes"
    assert reader(template, going_on.text, text) is None
    for reply, text_of_it in (("<think>Hm", "Hm"), ("Yes", "</think>\n\nYes"), ("a</think>b",) * 2):
        begun_so = [*question, Message("assistant", reply)]
        continued = render(template, begun_so, bos="", eos="", continue_last=True).text
        assert continued == prompt + text_of_it
    again = [*question, Message("assistant", text), Message("user", "!")]
    assert render(template, again, bos="", eos="").text == (
        "[user]?[assistant]Yes[user]![assistant]<think>\n"
    )


def test_gemmas_tags() -> None:
    template = (
        "{% for m in messages %}<|turn>{{ m.role }}\n{{ m.content.split('<channel|>')[-1] }}<turn|>"
        "{% endfor %}<|turn>model\n{% if tools %}<|channel>{% endif %}"
    )
    assert style(template) == "gemma"
    tagged = Tagged()
    pieces = ["<|channel>", "thou", "ght", "\nHm", ".\n", "<channel|>", "Yes\n"]
    text = b"".join(tagged.feed(p.encode()) for p in pieces).decode()
    assert text == "<think>Hm.\n</think>\nYes\n"
    messages = [Message("user", "?"), Message("assistant", text)]
    going_on = render(template, messages, bos="", eos="", continue_last=True).text
    assert going_on == "<|turn>user\n?<turn|><|turn>model\n" + "".join(pieces)
    again = render(template, [*messages, Message("user", "!")], bos="", eos="").text
    assert "<|turn>assistant\nYes\n<turn|>" in again
