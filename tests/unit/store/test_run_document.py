"""A logged reply as a document."""

import re
from dataclasses import replace

import pytest
from fakes import Reply, ScriptedEngine, engine_info

from specllama.events import Finished, RoundDone, Started
from specllama.interface import Message
from specllama.settings.params import GenerateParams, SamplingParams
from specllama.store.document import Raw, fact_list, folded, heading, page, paragraph, quote, table
from specllama.store.rounds import LoggedTurn, circumstances
from specllama.store.summary import ROUNDS, provenance, reply_parts, settings
from specllama.verdict import lead

LONG = " ".join(f"word{i}" for i in range(60))
METHODS = {one.name: one.short for one in engine_info().methods}


def turn(reply: Reply, **params: object) -> LoggedTurn:
    asked = GenerateParams(seed=1, draft_max=4).replace(**params)  # type: ignore[arg-type]
    out = LoggedTurn(0)
    for event in ScriptedEngine([reply]).generate([Message("user", "q")], asked):
        if isinstance(event, Started):
            out.started = event
        elif isinstance(event, RoundDone):
            out.rounds.append(event)
        elif isinstance(event, Finished):
            out.finished = event
    return out


def written(of: LoggedTurn) -> str:
    (found,) = [part for part in reply_parts(of, METHODS) if part.startswith("```text\n")]
    return found.removeprefix("```text\n").removesuffix("\n```")


def test_a_reply_with_its_verdict_and_rounds() -> None:
    one = turn(Reply(LONG, accept=(2, 0), sources=("draft", "ngram")))
    assert one.finished.verdict is not None
    text = page("T", reply_parts(one, METHODS))
    assert lead(one.finished.verdict, "") in text
    assert "of those checked" in text
    assert f"{one.finished.draft_n_accepted} of {one.finished.draft_n} guesses kept" in text
    assert f"```text\n{LONG}\n```" in text
    assert f"<summary>{len(one.rounds)} rounds</summary>" in text
    assert written(one) == LONG
    assert "| draft model |" in text
    assert "| n-gram |" in text


def test_a_stop_token_is_no_part_of_the_text() -> None:
    one = turn(Reply(LONG))
    last = one.rounds[-1]
    one.rounds[-1] = replace(last, emitted_text=(*last.emitted_text, "<|im_end|>"))
    assert written(one) == LONG


def test_plain_decoding_and_logs_without_a_verdict() -> None:
    assert "Plain decoding." in page("T", reply_parts(turn(Reply(LONG), speculate=False), METHODS))
    old = turn(Reply(LONG, accept=(2,)))
    assert old.finished is not None
    old.finished = replace(old.finished, verdict=None)
    assert "× faster (" in page("T", reply_parts(old, METHODS))
    assert "× faster (" in page("T", reply_parts(LoggedTurn(0, rounds=old.rounds), METHODS))


def test_of_a_reply_whose_rounds_nobody_kept_the_text_is_shown() -> None:
    one = LoggedTurn(0, finished=turn(Reply(LONG)).finished)
    assert "```text\nWhat was stored.\n```" in page(
        "T", reply_parts(one, METHODS, "What was stored.")
    )
    assert reply_parts(LoggedTurn(0), METHODS)


def test_a_long_reply_shows_its_first_rounds() -> None:
    folded = reply_parts(turn(Reply(" ".join(["word"] * (ROUNDS + 50)), accept=(0,))), METHODS)[-1]
    assert len([line for line in folded.splitlines() if line.startswith("| ")]) == ROUNDS + 2
    assert "more rounds: specllama log show" in folded


def test_what_it_ran_on_names_files_without_their_folder() -> None:
    info = engine_info()
    params = GenerateParams(seed=7, sampling=SamplingParams(temperature=0.1, top_k=7))
    header = circumstances(info, params)
    text = page("T", [*provenance(header), settings(header["params"])])
    assert "`scripted-target.gguf`" in text
    assert "/models" not in text
    for fact in ("llama-cpp-python", "CPU (scripted)", "seed: `7`", "temperature: `0.1`", "top_k"):
        assert fact in text
    assert "min_p" not in text  # as usual
    assert provenance({})
    assert settings("damaged") == ""


# -- documents --


HOSTILE = (
    "<script>alert(1)</script>",
    "</pre></code><img src=x onerror=alert(1)>",
    "```\n# heading\n@someone #1 https://example.org ![x](https://example.org/x.png)",
    "`` ` ``",
    "a | b\n| c",
    "\x00\x1b[31m\x9b\u202e\ud800\ufffe\uffff]]>&amp;",
    "",
    "   ",
    "${x} {{ x }}\r\n\t",
)


def everything(text: str) -> str:
    return page(
        "A title",
        [
            heading("Part"),
            paragraph("Words."),
            fact_list([["name: ", Raw(text), ", done"]]),
            quote(text),
            table(("a", "b"), [("1", Raw(text))]),
            folded("More", [quote(text)]),
        ],
    )


@pytest.mark.parametrize("text", HOSTILE)
def test_markdown_keeps_text_within_its_fence(text: str) -> None:
    """Without its code, nothing of the text is left."""
    written = everything(text)
    written.encode("utf-8")
    rest = re.sub(r"(?ms)^(`{3,})text\n.*?^\1$", "", written)
    rest = re.sub(r"(?<!`)(`+)(?!`).+?(?<!`)\1(?!`)", "", rest)
    assert not re.search(r"alert|someone|example|heading|onerror|\{\{", rest)
    assert "`" not in rest
    assert not re.search("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202e\ud800\ufffe]", written)


@pytest.mark.parametrize("text", HOSTILE)
def test_a_table_has_a_line_a_row_and_its_own_cells(text: str) -> None:
    lines = page("T", [table(("a", "b"), [("1", Raw(text))])]).splitlines()
    (row,) = [line for line in lines if line.startswith("| 1 ")]
    assert len(re.findall(r"(?<!\\)\|", row)) == 3


def test_spaces_at_the_ends_are_seen() -> None:
    (line,) = page("T", [fact_list([[Raw(" a b ")]])]).splitlines()[2:]
    assert line == "- `␣a b␣`"
