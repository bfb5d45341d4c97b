"""``specllama run``: prompts in, text or events out, and every way to get it wrong."""

import json
import os
import pty
import re
import select
import signal
import subprocess
import time
from pathlib import Path

import pytest
from fakes import Reply

from specllama.cli import output
from specllama.cli.printer import Printer
from specllama.errors import EngineError, PairIncompatible, PromptTooLong
from specllama.events import Notice, TextDelta
from specllama.interface import Message
from specllama.store.rounds import list_runs, read_run

LONG = "The target reads all the guesses in a single pass and keeps those it agrees with. "


def test_text_to_stdout_and_two_lines_to_stderr(cli) -> None:
    cli.reply("Paris is the capital.")
    result = cli("run", "What is the capital of France?", "--seed", "5")
    assert result.code == 0
    assert result.out == "Paris is the capital.\n"
    line, verdict = result.err.splitlines()
    for word in ("tok/s", "rounds", "first token", "seed 5"):
        assert word in line
    assert verdict.startswith("Not known yet: ")  # two rounds say nothing
    assert cli.engine.requests[0].prompt == [Message("user", "What is the capital of France?")]
    assert cli.engine.requests[0].params.seed == 5
    assert len(read_run(list_runs()[0]).turns) == 1


def test_json_lines_end_in_finish_and_keep_the_law(cli) -> None:
    cli.reply(Reply(LONG * 3))
    result = cli("run", "--json", "x", "--seed", "1")
    types = [event["type"] for event in result.json]
    assert types[0] == "started"
    assert types[-1] == "finish"
    assert types.count("finish") == 1
    end = result.json[-1]
    assert end["text"] == LONG * 3
    assert len(end["token_ids"]) == end["draft_n_accepted"] + end["rounds"] - end["cut"]
    assert end["draft_n_accepted"] > 0
    assert {"seed", "proposer", "verify", "timings", "reason", "draft_n"} <= set(end)
    assert {
        "load_ms",
        "tokenize_ms",
        "prefill_ms",
        "first_decode_ms",
        "ttft_ms",
        "decode_ms",
        "draft_ms",
        "verify_ms",
        "other_ms",
        "tok_per_s",
    } <= set(end["timings"])
    assert end["text"] == "".join(e["text"] for e in result.json if e["type"] == "text_delta")


def test_prompts_from_stdin(cli) -> None:
    cli("run", "-", stdin=b"from a pipe\n")
    cli("run", stdin=b"two\nlines\n\n")
    cli("run", "--raw", "-", stdin=b"as it is\n")
    assert [request.prompt for request in cli.engine.requests] == [
        [Message("user", "from a pipe")],
        [Message("user", "two\nlines\n")],
        "as it is\n",
    ]


def test_any_bytes_are_a_prompt(cli) -> None:
    assert cli("run", "-", stdin=b"nul \0 and \xff\xfe bytes \xe2\x82").code == 0
    assert cli.engine.requests[0].prompt[0].content == "nul \0 and \ufffd\ufffd bytes \ufffd"
    assert cli("run", "odd \udcff argument").code == 0
    assert cli.engine.requests[1].prompt[0].content == "odd \ufffd argument"


@pytest.mark.parametrize(
    ("args", "stdin"),
    [([""], b""), (["  \n"], b""), (["-"], b""), ([], b"\n"), (["--raw", ""], b"")],
)
def test_an_empty_prompt_is_refused_before_loading(cli, args: list[str], stdin: bytes) -> None:
    result = cli("run", *args, stdin=stdin)
    assert result.code == 2
    assert "prompt is empty" in result.err
    assert not cli.opened


def test_a_prompt_of_a_megabyte(cli) -> None:
    result = cli("run", "-", stdin=b"word " * 200_000)
    assert result.code == 2
    assert result.err.startswith("error: the prompt has ")
    assert len(result.err.splitlines()) == 2


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--draft-max", "-1"], "draft-max must be a whole number from 0 to 64"),
        (["--draft-max", "4.5"], "--draft-max"),
        (["--temp", "nan"], "temperature must be a finite number"),
        (["--seed", "18446744073709551616"], "seed must be a whole number"),
        (["--seed", "abc"], "--seed"),
        (["--stop", ""], "stop takes up to 16 strings of 1 to 1024 characters"),
        (["-ngl", "some"], "gpu-layers must be auto, all or a count"),
        (["--verify", "guess"], "--verify"),
        (["--proposer", "nobody"], "--proposer"),
        (["--cache-type-k", "fp8"], "--cache-type-k"),
        (["--logit-bias", "5"], "cannot read the logit bias '5'"),
        (["--logit-bias", "5=inf"], "must be finite or -inf"),
        (["--json-schema", "{"], "the JSON schema is not JSON"),
        (["--json-schema", "3"], "a JSON schema is an object"),
        (["--json-schema", "@/no/such/file"], "cannot read the schema file"),
        (["--grammar-file", "/no/such/file"], "cannot read the grammar file"),
        (["--grammar", "root ::= 'a'", "--json-schema", "{}"], "only one"),
        (["--raw", "--system", "Be brief."], "leave out --system or --raw"),
    ],
)
def test_wrong_values(cli, args: list[str], words: str) -> None:
    result = cli("run", "x", *args)
    assert result.code == 2
    assert words in result.err
    assert result.out == ""
    assert "Traceback" not in result.err
    assert not cli.opened


def test_flags_reach_the_engine(cli, tmp_path: Path) -> None:
    schema = tmp_path / "schema.json"
    schema.write_text('{"type": "object"}')
    result = cli(
        *("run", "x", "-m", "a.gguf", "-d", "b.gguf", "-c", "512", "-ngl", "7", "-t", "2"),
        *("--flash-attn", "on", "--cache-type-k", "q8_0", "--draft-max", "0", "--verify", "block"),
        *("--temp", "0", "--top-k", "5", "--set", "typical=0.9", "--repeat-penalty", "1.1"),
        *("--set", "dry-multiplier=0.8", "--set", "dry_sequence_breaker=;"),
        *("--set", "dry-sequence-breaker=.", "--logit-bias", "5=-inf"),
        *("--logit-bias", "7+1.5", "-n", "9", "--stop", "END", "--stop", "\n\n", "--ignore-eos"),
        *("--exact", "--on-full", "shift", "--system", "Be brief.", "--no-spec", "--no-log"),
        *("--json-schema", f"@{schema}"),
    )
    assert result.code == 1, "-n ends it before the schema is satisfied"
    settings = cli.opened[0]
    assert (settings["model"], settings["draft-model"]) == ("a.gguf", "b.gguf")
    options = settings.engine_options()
    assert (options.n_ctx, options.gpu_layers, options.threads) == (512, "7", 2)
    assert (options.flash_attn, options.kv_type_k, options.exact) == ("on", "q8_0", "on")
    request = cli.engine.requests[0]
    params, sampling = request.params, request.params.sampling
    assert (params.draft_max, params.verify, params.max_tokens) == (0, "block", 9)
    assert (params.on_full, params.speculate) == ("shift", False)
    assert (params.stop, params.ignore_eos) == (("END", "\n\n"), True)
    assert params.json_schema == '{"type": "object"}'
    assert (sampling.temperature, sampling.top_k, sampling.typical_p) == (0.0, 5, 0.9)
    assert (sampling.repeat_penalty, sampling.dry_multiplier) == (1.1, 0.8)
    assert sampling.dry_sequence_breakers == (";", ".")
    assert sampling.logit_bias == {5: -float("inf"), 7: 1.5}
    assert request.prompt[0] == Message("system", "Be brief.")
    assert list_runs() == []


def test_quiet_says_nothing_but_warnings(cli) -> None:
    cli.reply(Reply("Hi.", notices=(Notice("by the way"), Notice("careful", "warning"))))
    assert cli("run", "-q", "x").err == "warning: careful\n"
    assert "by the way" in cli("run", "x").err


@pytest.mark.parametrize(
    ("error", "code"),
    [(PromptTooLong("too long"), 2), (PairIncompatible("differ"), 4), (EngineError("odd"), 1)],
)
def test_errors_of_the_engine(cli, error: Exception, code: int) -> None:
    cli.reply(Reply(raise_first=error))
    result = cli("run", "x")
    assert (result.code, result.out) == (code, "")
    assert result.err.startswith(f"error: {error}")
    last = cli("run", "--json", "x").json[-1]
    assert (last["type"], last["exit_code"]) == ("error", code)


def test_a_failure_midway_keeps_the_text(cli) -> None:
    cli.reply(Reply(LONG, raise_at_round=3))
    result = cli("run", "x")
    assert result.code == 1
    assert result.out.endswith("\n")
    assert LONG.startswith(result.out.rstrip("\n"))
    assert "error: the scripted engine failed" in result.err


def test_logging_trouble_is_one_warning(cli, home: Path) -> None:
    home.mkdir()
    (home / "data").write_text("in the way")
    cli.reply("All is well.")
    result = cli("run", "x")
    assert (result.code, result.out) == (0, "All is well.\n")
    assert result.err.count("warning:") == 1
    assert "nothing can be kept" in result.err
    assert "SPECLLAMA_HOME=" in result.err


def test_control_characters_stay_in_pipes_and_json(cli) -> None:
    cli.reply("a\x1b[2Jb")
    assert "\x1b[2J" in cli("run", "x").out
    result = cli("run", "--json", "x")
    assert "\x1b" not in result.out
    assert result.json[-1]["text"] == "a\x1b[2Jb"


def test_raw_output_is_exact_in_a_pipe(cli) -> None:
    cli.reply("no newline")
    assert cli("run", "--raw", "x").out == "no newline"


def test_a_closed_pipe_ends_quietly(driver) -> None:
    command = driver([{"text": LONG * 50, "delay_s": 0.002}], "run", "x")
    child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert child.stdout.read(10) == LONG[:10].encode()
    child.stdout.close()
    errors = child.stderr.read().decode()
    child.stderr.close()
    assert child.wait(timeout=20) == 0
    assert errors == ""


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_stops_within_a_round_and_keeps_the_text(driver, number: int, code: int) -> None:
    command = driver([{"text": LONG * 300, "delay_s": 0.02}], "run", "x")
    # Unbuffered: nothing may wait in a reader's buffer while communicate() collects the rest.
    child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, bufsize=0)
    first = child.stdout.read(10)
    started = time.monotonic()
    child.send_signal(number)
    rest, errors = child.communicate(timeout=60)
    assert time.monotonic() - started < 20  # the whole reply would take twice as long
    assert child.returncode == code
    assert (LONG * 300).encode().startswith((first + rest).rstrip(b"\n"))
    err = errors.decode()
    assert "stopped" in err
    assert "first token" in err
    assert "Traceback" not in err
    assert read_run(list_runs()[0]).turns[0].finished.reason == "cancelled"


def on_a_terminal(command: list[str], keys: bytes = b"") -> tuple[int, bytes]:
    """Run with stdin, stdout and stderr on a pseudo terminal; returns exit code and output."""
    leader, follower = pty.openpty()
    child = subprocess.Popen(command, stdin=follower, stdout=follower, stderr=follower)
    os.close(follower)
    if keys:
        os.write(leader, keys)
    out = b""
    while select.select([leader], [], [], 30)[0]:
        try:
            chunk = os.read(leader, 65536)
        except OSError:  # the other side is closed
            break
        if not chunk:
            break
        out += chunk
    os.close(leader)
    return child.wait(timeout=20), out


def test_nothing_from_the_model_reaches_a_terminal_raw(driver) -> None:
    hostile = "a\x1b[2Jb\x1b]0;owned\x07c\x9b31md\x00e\u202ef"
    code, out = on_a_terminal(driver([{"text": hostile}], "run", "x"))
    assert code == 0
    text = out.decode()
    assert not set(text) & {"\x1b", "\x07", "\x9b", "\x00", "\u202e"}
    assert "a␛[2Jb␛]0;owned␇c⟦9B⟧31md␀e⟦RLO⟧f" in text


def test_a_terminal_without_a_prompt_gets_a_hint(driver) -> None:
    code, out = on_a_terminal(driver([{"text": "x"}], "run"))
    assert code == 2
    assert b"there is no prompt" in out


THOUGHTFUL = "<think>\nLet me see.\n</think>\n\nParis."


@pytest.mark.parametrize(("how", "shown"), [("show", "Let me see.\n\n"), ("hide", "")])
def test_thoughts_go_to_stderr_or_nowhere(cli, how: str, shown: str) -> None:
    cli.reply(THOUGHTFUL)
    result = cli("run", "Where?", "--thoughts", how)
    assert result.out == "Paris.\n"
    *before, statistics, _ = result.err.splitlines(keepends=True)
    assert "".join(before) == shown
    assert "tok/s" in statistics


def test_the_last_line_says_whether_drafting_paid(cli) -> None:
    cli.reply(Reply(LONG * 10, accept=(3,)))
    verdict = cli("run", "x").err.splitlines()[-1]
    assert re.fullmatch(
        r"\d\.\d\d× faster \(\d\.\d\d–\d\.\d\d\) · 3\.9 tokens a pass · 50% of guesses kept",
        verdict,
    ), verdict
    cli.reply(Reply(LONG * 10, accept=(0,)))
    assert "× slower (" in cli("run", "x").err.splitlines()[-1]
    assert len(cli("run", "x", "--no-spec").err.splitlines()) == 1


def test_a_reply_without_an_answer_says_so(cli) -> None:
    cli.reply("<think>Let me see.")
    result = cli("run", "Where?", "--thoughts", "hide")
    assert result.out == ""
    assert "ended within its thought" in result.err


def test_thoughts_in_json(cli) -> None:
    cli.reply(THOUGHTFUL)
    events = cli("run", "--json", "Where?").json
    thought = "".join(e["text"] for e in events if e["type"] == "reasoning_delta")
    text = "".join(e["text"] for e in events if e["type"] == "text_delta")
    assert (thought, text) == ("Let me see.", "Paris.")
    assert (events[-1]["reasoning"], events[-1]["text"]) == (thought, text)
    assert events[-1]["seams"] == ["<think>\n", "\n</think>\n\n"]


@pytest.mark.parametrize(
    ("flags", "think"),
    [
        ((), "auto"),
        (("--think",), "on"),
        (("--no-think",), "off"),
        (("--think", "low"), "low"),
        (("--think=medium",), "medium"),
    ],
)
def test_a_prompt_may_follow_the_switch_for_thoughts(cli, flags, think: str) -> None:
    assert cli("run", *flags, "Why? --no-think").code == 0
    request = cli.engine.requests[0]
    assert request.params.think == think
    assert request.prompt == [Message("user", "Why? --no-think")]


def test_arguments_for_the_template(cli) -> None:
    given = ("--set", "template-args=a=1", "--set", "template-args=b=x", "--think-budget", "7")
    assert cli("run", "Why?", *given).code == 0
    params = cli.engine.requests[0].params
    assert (params.template_args, params.think_budget) == (("a=1", "b=x"), 7)
    assert cli("run", "Why?", "--set", "template-args=messages=[]").code == 2
    assert cli("run", "Why?", "--think", "--think-budget", "-1").code == 2


def test_a_text_and_its_round_are_one_write(monkeypatch: pytest.MonkeyPatch, cli) -> None:
    """No pass comes between them; of an engine that tells of no rounds each text is written at
    once."""
    written: list[list[str]] = []
    real = output.write_bytes

    def write(raw: bytes) -> None:
        written.append([json.loads(line)["type"] for line in raw.splitlines()])
        real(raw)

    monkeypatch.setattr(output, "write_bytes", write)
    cli.reply(Reply(LONG))
    cli("run", "--json", "x")
    rounds = [types for types in written if "round_done" in types]
    assert rounds[0] == ["round_done"]  # the first text did not wait for it
    assert rounds[1:] == [["text_delta", "round_done"]] * (len(rounds) - 1)
    assert len(rounds) > 5
    written.clear()
    Printer(as_json=True, quiet=True).show(iter([TextDelta(text="a"), TextDelta(text="b")]))
    assert written == [["text_delta"], ["text_delta"]]
