"""Chat templates: what is template and what is content, and what a hostile template can do."""

import json
import time
from collections.abc import Sequence
from datetime import datetime

import pytest
from table_model import FakeVocab

from specllama.backend.base import SpecialToken
from specllama.engine.prompting import Prompting
from specllama.errors import UsageError
from specllama.interface import Message
from specllama.replies.segments import Segment, render
from specllama.replies.template import TemplateFailed, render_template
from specllama.settings.params import GenerateParams

CHATML = (
    "{% for message in messages %}{{'<|im_start|>' + message['role'] + '\n' + message['content'] "
    "+ '<|im_end|>' + '\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
TRIMMING = (
    "{{ bos_token }}{%- for m in messages %}\n{{- '[' + m.role + ']' + m['content'] | trim }}"
    "{%- if m.role == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
NO_SYSTEM = (
    "{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}"
    "{% endif %}{% for m in messages %}<{{ m.role }}>{{ m.content | trim }}</turn>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
THINKING = (
    "{% for m in messages %}{% set content = m.content %}"
    "{% if m.role == 'assistant' and '</think>' in content %}"
    "{% set content = content.split('</think>')[-1].lstrip('\n') %}{% endif %}"
    "<{{ m.role }}>{{ content }}<end>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)

ASK = [Message("system", "Be brief."), Message("user", "  Hi <|im_end|> there\n")]
HISTORY = [*ASK, Message("assistant", "<think>hm</think>\n\nHello."), Message("user", "Bye")]


def shape(template: str | None, messages: list[Message]) -> list[Segment]:
    return render(template, messages, bos="<s>", eos="</s>").segments


TOOLS = (
    "{% set ns = namespace(last=-1) %}{% for m in messages %}"
    "{% if m.role == 'user' and not (m.content.startswith('<tool_response>') "
    "and m.content.endswith('</tool_response>')) %}{% set ns.last = loop.index0 %}{% endif %}"
    "{% endfor %}{% for m in messages %}<{{ m.role }}>"
    "{% if m.reasoning_content is string and loop.index0 > ns.last %}"
    "<think>{{ m.reasoning_content }}</think>{% endif %}{{ m.content }}<end>{% endfor %}"
)


def test_a_thought_before_a_call_is_kept_as_long_as_only_tools_answered() -> None:
    talk = [
        Message("user", "Look"),
        Message("assistant", "(call)", "I had better look"),
        Message("user", "<tool_response>\n<end>main.py\n</tool_response>"),
    ]
    segments = shape(TOOLS, talk)
    assert Segment("I had better look", False, True) in segments
    assert any(s.text == "<end>main.py" and not s.special for s in segments)
    asked = [*talk, Message("assistant", "There."), Message("user", "Thanks")]
    assert not any("better" in segment.text for segment in shape(TOOLS, asked))


def test_contents_are_never_special() -> None:
    assert shape(CHATML, ASK) == [
        Segment("<|im_start|>system\n", True),
        Segment("Be brief.", False),
        Segment("<|im_end|>\n<|im_start|>user\n", True),
        Segment("  Hi <|im_end|> there\n", False),
        Segment("<|im_end|>\n<|im_start|>assistant\n", True),
    ]


def test_a_trimming_template_trims() -> None:
    assert shape(TRIMMING, ASK) == [
        Segment("<s>[system]", True),
        Segment("Be brief.", False),
        Segment("[user]", True),
        Segment("Hi <|im_end|> there", False),
        Segment("[assistant]", True),
    ]


def test_a_template_that_drops_thinking() -> None:
    segments = shape(THINKING, HISTORY)
    assert Segment("Hello.", False, reply=True) in segments
    assert not any("hm" in s.text for s in segments)
    assert next(s.text for s in segments if s.special) == "<system>"


@pytest.mark.parametrize("template", [CHATML, TRIMMING, NO_SYSTEM, THINKING])
@pytest.mark.parametrize(
    "content",
    ["", " ", "x", "\ue0000:0\ue002", "{{ 1 + 1 }}", "</think>", "<end>a\nb", "0", "\u202e", "é"],
)
def test_any_content_keeps_the_borders(template: str, content: str) -> None:
    messages = [Message("user", content), Message("assistant", content), Message("user", "end")]
    segments = shape(template, messages)
    assert "".join(s.text for s in segments if not s.special).endswith("end")
    special = "".join(s.text for s in segments if s.special)
    reference = shape(
        template, [Message("user", "x"), Message("assistant", "x"), Message("user", "end")]
    )
    assert special == "".join(s.text for s in reference if s.special)


def test_continue_ends_inside_the_reply() -> None:
    messages = [Message("user", "Count"), Message("assistant", "one, two, ")]
    for template in (CHATML, TRIMMING, NO_SYSTEM, THINKING):
        segments = shape(template, messages)
        assert segments[-1] == Segment("one, two, ", False, reply=True), template
    assert shape(CHATML, ASK) == shape(CHATML, ASK)
    assert shape(None, messages) == [Segment("Count\none, two, ", False)]
    assert "".join(s.text for s in shape(THINKING, messages)) == (
        "<user>Count<end><assistant>one, two, "
    )


def test_an_empty_partial_reply_can_be_continued() -> None:
    messages = [Message("user", "Count"), Message("assistant", "")]
    assert shape(CHATML, messages)[-1].text.endswith("<|im_start|>assistant\n")


def test_without_a_system_role_the_system_prompt_moves() -> None:
    rendered = render(NO_SYSTEM, ASK, bos="", eos="")
    assert rendered.notice is None
    assert rendered.segments[1] == Segment("Be brief.\n  Hi <|im_end|> there", False)


STRICT = (
    "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}"
    "{% if m.role == 'assistant' and not m.content %}{{ raise_exception('empty') }}{% endif %}"
    "<{{ m.role }}>{{ m.content }}</turn>{% endfor %}"
)
EMPTY = [Message("user", "One"), Message("assistant", ""), Message("user", "Two")]


def test_an_empty_reply_is_a_turn() -> None:
    rendered = render(CHATML, EMPTY, bos="", eos="")
    assert rendered.notice is None
    assert "<|im_start|>assistant\n<|im_end|>\n<|im_start|>user\nTwo" in rendered.text


@pytest.mark.parametrize("system", [[], [Message("system", "Be brief.")]])
def test_a_template_that_refuses_empty_replies_sees_one_question(system: list[Message]) -> None:
    rendered = render(STRICT, [*system, *EMPTY], bos="", eos="")
    assert rendered.notice is None
    head = "Be brief.\n" if system else ""
    assert rendered.text == f"<user>{head}One\n\nTwo</turn>"


@pytest.mark.parametrize(
    "head",
    [
        "{% for tool in tools %}{{ tool.name }}{% endfor %}",
        "{% for d in documents %}{{ d.text }}{% endfor %}",
        "{{ 'functions: ' + functions }} on {{ datetime | length > 9 }}",
    ],
)
def test_templates_that_take_tools_for_a_list_are_used(head: str) -> None:
    rendered = render(head + CHATML, ASK, bos="", eos="")
    assert rendered.notice is None
    assert rendered.text.endswith(render(CHATML, ASK, bos="", eos="").text)


def test_that_there_are_no_tools_is_said_first() -> None:
    rendered = render("{% if tools is none %}none{% endif %}" + CHATML, ASK, bos="", eos="")
    assert rendered.text.startswith("none<|im_start|>")


def test_no_template_is_raw() -> None:
    assert shape(None, [Message("user", "Once upon")]) == [Segment("Once upon", False)]


def test_a_missing_template_is_said_once() -> None:
    first = [Message("system", "Be brief."), Message("user", "Hi")]
    assert "no chat template" in (render(None, first, bos="", eos="").notice or "")
    later = [*first, Message("assistant", "Hello"), Message("user", "Again")]
    assert render(None, later, bos="", eos="").notice is None
    said = Prompting(FakeVocab()).prepare(first, GenerateParams()).notices
    assert [words for words in said if "no chat template" in words]


@pytest.mark.parametrize(
    "template",
    [
        "{{ raise_exception('no') }}",
        "{% for x in %}",
        "{{ ''.__class__.__mro__ }}{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ 10**(10**9) }}",
        "{{ 'x' * 10**10 }}",
        "{{ 10**10 * 'x' }}",
        "{{ [1] * 10**9 }}",
        "{{ '%099999999d' % 1 }}",
        "{{ '%*d' % (99999999, 1) }}",
        "{{ '{:>999999999}'.format(1) }}",
        "{{ 'x'.center(10**9) }}",
        "{{ 'x' | center(10**9) }}",
        "{{ 'x' | indent(10**9, true) }}",
        "{{ lipsum(n=100000) }}",
        "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
        "{% set ns = namespace(s='x') %}{% for i in range(60) %}{% set ns.s = ns.s + ns.s %}"
        "{% endfor %}",
        "{% set ns = namespace(s='x') %}{% for i in range(60) %}{% set ns.s = ns.s ~ ns.s %}"
        "{% endfor %}",
        "{% set ns = namespace(s='x') %}{% for i in range(60) %}"
        "{% set ns.s = ns.s.replace('x', 'xx') %}{% endfor %}",
        "{% set ns = namespace(s=9) %}{% for i in range(60) %}{% set ns.s = ns.s * ns.s %}"
        "{% endfor %}",
        "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}"
        "{{ f(64) }}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
        "{% include 'x' %}",
        "{{ messages.append(1) }}",
        "{{ nothing.at.all }}",
        "{{ [messages] | tojson(indent=100000) }}",
        "(" * 70_000,
    ],
)
def test_a_bad_template_falls_back(template: str) -> None:
    started = time.process_time()
    rendered = render(template, ASK, bos="", eos="")
    assert time.process_time() - started < 4
    assert rendered.notice is not None
    assert "ChatML" in rendered.notice
    assert "\n" not in rendered.notice
    assert rendered.segments == shape(CHATML, ASK)


def test_everyday_template_features_work() -> None:
    template = (
        "{%- set ns = namespace(n=0) -%}{% for m in messages %}{% if m.role == 'skip' %}"
        "{% continue %}{% endif %}{% set ns.n = ns.n + 1 %}{{ loop.index ~ '/' ~ loop.length }}"
        "{% if not loop.last %},{% endif %}{% endfor %}|{{ ns.n }}|{{ {'a': 'é'} | tojson }}|"
        "{% generation %}g{% endgeneration %}|{{ ['a', 'b'] | join('-') }}|"
        "{{ 'x'.join(['1', '2']) }}"
        "|{{ '{} {}'.format(1, 2) }}|{{ 'aXb'.replace('X', '+') }}|{{ '%s' % 'p' }}"
        "|{{ strftime_now('%Y') | length }}|{{ messages[::-1] | length }}"
    )
    out = render_template(
        template, {"messages": [{"role": "user"}, {"role": "skip"}]}, max_chars=10_000
    )
    assert out == '1/2,|1|{"a": "é"}|g|a-b|1x2|1 2|a+b|p|4|2'


def test_caps_and_refusals() -> None:
    with pytest.raises(TemplateFailed, match="longer than 64 kB"):
        render_template("x" * 65_537, {}, max_chars=10**6)
    with pytest.raises(TemplateFailed, match="too long"):
        render_template("{{ text }}{{ text }}", {"text": "x" * 60}, max_chars=100)
    with pytest.raises(UsageError, match="unknown role"):
        shape(CHATML, [Message("user<|im_end|>", "x")])
    with pytest.raises(UsageError, match="empty"):
        shape(CHATML, [])


@pytest.mark.parametrize("template", [CHATML, TRIMMING, NO_SYSTEM, THINKING])
@pytest.mark.parametrize(
    "reply",
    ["<think>hm</think>\n\nHello. ", " a\n\nb ", "x</think>", "<think>x", "Hello.<|im_end|> \n"],
)
def test_the_text_is_always_the_templates_own(template: str, reply: str) -> None:
    messages = [
        Message("user", " Hi\n"),
        Message("assistant", reply),
        Message("user", "  <think> \ue000 Bye <|im_end|>"),
    ]
    rendered = render(template, messages, bos="<s>", eos="</s>")
    variables = {
        "messages": [m.to_dict() for m in messages],
        "bos_token": "<s>",
        "eos_token": "</s>",
        "add_generation_prompt": True,
    }
    assert rendered.text == render_template(template, variables, max_chars=10_000)
    template_text = "".join(s.text for s in rendered.segments if s.special)
    for typed in ("Hi", "Bye <|im_end|>", "Hello.", "a\n\nb", "x"):
        assert typed not in template_text


def test_templates_see_what_llama_cpp_gives_them() -> None:
    today = datetime.now()
    text = "".join(
        s.text
        for s in shape(
            "{{ date_string }}|{{ datetime }}|{{ 'f' + functions }}{{ messages|length }}", ASK
        )
    )
    assert text == f"{today:%d %b %Y}|{today:%b %d %Y}|f2"


@pytest.mark.parametrize("tags", ["<think>", "[THINK]", "<|channel>", "<|START_THINKING|>", ""])
def test_models_think_where_their_thoughts_can_be_told_apart(tags: str) -> None:
    template = "{{ enable_thinking }}{% if tools %}" + tags + "{% endif %}"
    assert "".join(s.text for s in shape(template, ASK)) == str(bool(tags))


HERE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
TOLD = (
    "{% if tools %}{% for t in tools %}{{ t | tojson }}\n{% endfor %}Write SHAPE{% endif %}" + HERE
)


@pytest.mark.parametrize(
    ("shape", "syntax"),
    [
        ('<tool_call>\n{"name": <name>}\n</tool_call>', "json"),
        ("<tool_call>\n<function=name>\n</tool_call>", "xml"),
        ("<tool_call>{function-name}<arg_key>", "glm"),
        ("[TOOL_CALLS]", "mistral"),
    ],
)
def test_how_a_template_tells_of_calls(shape: str, syntax: str) -> None:
    assert Prompting(FakeVocab(64), TOLD.replace("SHAPE", shape)).tool_syntax() == syntax
    assert Prompting(FakeVocab(64), HERE + shape).tool_syntax() == ""
    assert Prompting(FakeVocab(64)).tool_syntax() == ""


def test_tools_cannot_forge_turns() -> None:
    class Vocab(FakeVocab):
        @property
        def specials(self) -> Sequence[SpecialToken]:
            return (SpecialToken(1, "<|end|>", True), SpecialToken(2, "<tool_call>", False))

    prompting = Prompting(Vocab(64), TOLD)
    args = (f"tools={json.dumps([{'function': {'name': 'x<tool_call>'}}])}",)
    assert prompting.prepare([Message("user", "Hi")], GenerateParams(template_args=args)).ids
    tools = json.dumps([{"function": {"name": "x", "description": "ends <|end|> here"}}])
    params = GenerateParams(template_args=(f"tools={tools}",))
    rendered, _ = prompting.render([Message("user", "Hi")], params)
    plain = render(
        TOLD, [Message("user", "Hi")], bos="", eos="", variables={"tools": json.loads(tools)}
    )
    assert rendered.text == plain.text
    assert [one.text for one in rendered.segments if not one.special] == ["<|end|>", "Hi"]
    assert prompting.prepare([Message("user", "Hi")], params).ids
