"""A logged reply as a document."""

from __future__ import annotations

from dataclasses import replace

from fakes import Reply, ScriptedEngine, engine_info

from specllama.events import Finished, RoundDone, Started
from specllama.interface import Message
from specllama.settings.params import GenerateParams, SamplingParams
from specllama.store.document import page
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
    assert one.finished is not None
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
    plain = turn(Reply(LONG), speculate=False)
    assert "Plain decoding." in page("T", reply_parts(plain, METHODS))
    old = turn(Reply(LONG, accept=(2,)))
    assert old.finished is not None
    old.finished = replace(old.finished, verdict=None)
    assert "× faster (" in page("T", reply_parts(old, METHODS))
    torn = LoggedTurn(0, rounds=old.rounds)
    assert "× faster (" in page("T", reply_parts(torn, METHODS))


def test_of_a_reply_whose_rounds_nobody_kept_the_text_is_shown() -> None:
    one = LoggedTurn(0, finished=turn(Reply(LONG)).finished)
    assert "```text\nWhat was stored.\n```" in page(
        "T", reply_parts(one, METHODS, "What was stored.")
    )
    assert reply_parts(LoggedTurn(0), METHODS)


def test_a_long_reply_shows_its_first_rounds() -> None:
    one = turn(Reply(" ".join(["word"] * (ROUNDS + 50)), accept=(0,)))
    folded = reply_parts(one, METHODS)[-1]
    assert len([line for line in folded.splitlines() if line.startswith("| ")]) == ROUNDS + 2
    assert "more rounds: specllama log export" in folded


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
    drawn = settings(circumstances(info, params.replace(seed=None))["params"], [5, 6])
    assert "seed: `drawn, 5, 6`" in page("T", [drawn])
    assert provenance({})
    assert settings("damaged") == ""
