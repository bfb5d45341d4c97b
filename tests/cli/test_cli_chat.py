"""The plain chat: turns, commands, interruptions, and what is stored."""

import os
import pty
import select
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import click
import pytest
from fakes import Reply, ScriptedEngine
from hypothesis import example, given
from hypothesis import strategies as st

from specllama.cli import completion, diagnostics, lines, output
from specllama.cli.lines import history_file
from specllama.cli.output import WordWrap, columns, wrapped
from specllama.cli.printer import Printer
from specllama.cli.repl import COMMANDS, Repl
from specllama.errors import EngineError
from specllama.events import Event, Finished, Notice
from specllama.interface import Message
from specllama.paths import rounds_dir, sessions_file
from specllama.settings.params import GenerateParams
from specllama.store.message_tree import StoredMessage
from specllama.store.rounds import list_runs, read_run
from specllama.store.sessions import SessionStore

LONG = "The target reads all the guesses in a single pass and keeps those it agrees with. "


def questions(cli) -> list[str]:
    return [request.prompt[-1].content for request in cli.engine.requests]


def test_every_line_of_a_pipe_is_a_turn(cli) -> None:
    cli.reply("One.", "Two.")
    result = cli("chat", stdin=b"first\n\nsecond\n")
    assert (result.code, result.out) == (0, "One.\nTwo.\n")
    assert result.err.count("tok/s") == 2
    assert questions(cli) == ["first", "second"]
    assert len(cli.engine.requests[1].prompt) == 3
    with SessionStore.open() as store:
        stored = store.get(store.find())
    assert [m.content for m in stored.messages] == ["first", "One.", "second", "Two."]
    assert len(read_run(list_runs()[0]).turns) == 2


def test_messages_of_several_lines(cli) -> None:
    cli("chat", "-q", stdin=b'a \\\nb\n"""\nc\n\n d\n"""\n"""e"""\n"""open\nend')
    assert questions(cli) == ["a \nb", "c\n\n d", "e", "open\nend"]


def test_any_bytes_are_a_line(cli) -> None:
    cli("chat", stdin=b"\xff\x00 odd\r\n//not a command\n")
    assert questions(cli) == ["\ufffd\0 odd", "/not a command"]


def test_commands_change_the_conversation(cli, tmp_path: Path) -> None:
    cli.reply("A.", "A.", "B.", "C.", "D.", "E.", "F.")
    script = b"""\
/system Be brief.
/temperature 0
/draft-max 2
/proposer ngram
/seed 7
one
/retry
/retry new
/continue
/edit uno
two
/undo
/sessions
/seed none
/new
three
/quit
never
"""
    result = cli("chat", stdin=script)
    assert result.code == 0, result.err
    assert result.out == "A.\nA.\nB.\nC.\nD.\nE.\nF.\n"
    first = cli.engine.requests[0]
    assert first.prompt[0] == Message("system", "Be brief.")
    assert first.params.sampling.temperature == 0.0
    assert (first.params.draft_max, first.params.proposer, first.params.seed) == (2, "ngram", 7)
    assert [r.params.seed for r in cli.engine.requests[1:3]] == [7, 8]
    assert cli.engine.requests[3].prompt[-1] == Message("assistant", "B.")
    assert questions(cli)[4] == "uno"
    assert cli.engine.requests[6].params.seed is None
    assert "took back: two" in result.err


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("/retri", "did you mean /retry?"),
        ("/xyzzy", "there is no command /xyzzy"),
        ("/retry", "nothing to retry"),
        ("/retry please", "/retry takes nothing, or: new"),
        ("/undo", "nothing to undo"),
        ("/continue", "no reply to continue"),
        ("/edit", "nothing to edit"),
        ("/read", "/read takes a path"),
        ("/read none.txt", "none.txt: there is no such file"),
        ("/draft-max", "a value is missing"),
        ("/draft-max many", "draft-max must be a whole number"),
        ("/draft-max 100", "draft-max must be a whole number from 0 to 64"),
        ("/proposer nobody", "proposer must be one of"),
        ("/save talk.md", "there is no command /save"),
    ],
)
def test_wrong_commands_do_not_end_the_chat(cli, line: str, words: str) -> None:
    cli.reply("Still here.")
    result = cli("chat", stdin=f"{line}\nhello\n".encode())
    assert words in result.err
    assert "Traceback" not in result.err
    assert result.out == "Still here.\n"
    assert result.code != 0


def test_every_command_has_a_handler_and_a_help_line(cli) -> None:
    shown = cli("chat", stdin=b"/help\n").err
    for name in COMMANDS:
        assert f"/{name}" in shown
        assert callable(getattr(Repl, "_do_" + name.replace("-", "_")))


def test_an_engine_error_ends_one_turn(cli) -> None:
    cli.reply(Reply(raise_first=EngineError("odd")), "Fine.")
    result = cli("chat", stdin=b"one\ntwo\n")
    assert (result.code, result.out) == (1, "Fine.\n")
    assert "error: odd" in result.err


def test_resume(cli) -> None:
    cli.reply("One.", "Two.")
    cli("chat", "--system", "Be brief.", stdin=b"first\n")
    result = cli("chat", "--resume", stdin=b"second\n")
    assert result.code == 0
    assert [m.content for m in cli.engine.requests[1].prompt] == [
        "Be brief.",
        "first",
        "One.",
        "second",
    ]
    result = cli("chat", "--resume", "zzzz", stdin=b"second\n")
    assert result.code == 1
    assert "there is no session 'zzzz'" in result.err


def test_a_damaged_store_is_a_warning(cli, home: Path) -> None:
    home.mkdir()
    (home / "data").write_text("in the way")
    result = cli("chat", stdin=b"hello\n")
    assert result.code == 0
    assert "kept in memory" in result.err


def test_a_killed_chat_is_there_on_the_next_start(driver) -> None:
    command = driver([{"text": LONG * 200, "delay_s": 0.02}], "chat", "-q")
    child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0)
    child.stdin.write(b"Tell me\n")
    shown = b""
    while len(shown) < 300:
        shown += child.stdout.read(100)
    time.sleep(0.4)
    child.kill()
    child.wait()
    child.stdin.close()
    child.stdout.close()
    with SessionStore.open() as store:
        assert store.notices == []
        stored = store.get(store.find())
    assert stored.messages[0].content == "Tell me"
    assert stored.messages[1].state == "partial"
    assert len(stored.messages[1].content) > 100
    assert (LONG * 200).startswith(stored.messages[1].content)


class Terminal:
    """A program on a pseudo terminal, spoken to by what it shows."""

    def __init__(self, command: list[str]) -> None:
        self.leader, follower = pty.openpty()
        env = {**os.environ, "TERM": "dumb"}
        self.child = subprocess.Popen(
            command,
            stdin=follower,
            stdout=follower,
            stderr=follower,
            env=env,
            start_new_session=True,
            preexec_fn=_own_terminal,
        )
        os.close(follower)
        self.shown = ""
        self._seen = 0

    def until(self, words: str) -> None:
        """Read until the words are shown behind what was waited for before."""
        deadline = time.monotonic() + 30
        while (at := self.shown.find(words, self._seen)) < 0:
            assert time.monotonic() < deadline, self.shown
            if select.select([self.leader], [], [], 1)[0]:
                self.shown += os.read(self.leader, 65536).decode("utf-8", "replace")
        self._seen = at + len(words)

    def type(self, text: str) -> None:
        os.write(self.leader, text.encode())

    def interrupt_until(self, words: str) -> None:
        """Press Ctrl-C until it is answered.

        Python's ``input()`` checks for signals, then waits for a key: one that comes between
        the two is answered at the next key, so a single press could wait for ever.
        """
        deadline = time.monotonic() + 30
        while self.shown.find(words, self._seen) < 0:
            assert time.monotonic() < deadline, self.shown
            self.type("\x03")
            pause = time.monotonic() + 2
            while time.monotonic() < pause and self.shown.find(words, self._seen) < 0:
                if select.select([self.leader], [], [], 0.2)[0]:
                    self.shown += os.read(self.leader, 65536).decode("utf-8", "replace")
        self.until(words)

    def end(self) -> int:
        code = self.child.wait(timeout=20)
        os.close(self.leader)
        return code


def _own_terminal() -> None:
    import fcntl
    import termios

    fcntl.ioctl(0, termios.TIOCSCTTY, 0)
    # Tests started in the background of a shell inherit that Ctrl-C is ignored.
    signal.signal(signal.SIGINT, signal.SIG_DFL)


@pytest.mark.skipif(sys.platform == "win32", reason="needs a pseudo terminal")
def test_a_conversation_on_a_terminal(driver, home: Path) -> None:
    terminal = Terminal(
        driver([{"text": LONG * 100, "delay_s": 0.02}, {"text": "Short."}], "chat", "--plain")
    )
    terminal.until(">>> ")
    terminal.type("Tell me\n")
    terminal.until("guesses")
    terminal.type("\x03")  # stops the reply
    terminal.until("stopped; /continue")
    terminal.until(">>> ")
    terminal.type("half a line")
    terminal.until("half a line")
    terminal.interrupt_until("/quit leaves")  # drops the line
    terminal.until(">>> ")
    terminal.type("And?\n")
    terminal.until("Short.")
    terminal.until(">>> ")
    terminal.type("\x04")
    assert terminal.end() == 0
    assert "Traceback" not in terminal.shown
    with SessionStore.open() as store:
        stored = store.get(store.find())
    assert [m.role for m in stored.messages] == ["user", "assistant", "user", "assistant"]
    assert stored.messages[1].state == "partial"
    assert LONG.startswith(stored.messages[1].content[:40])
    assert stored.messages[3].content == "Short."
    assert "Tell me" in (home / "data" / "chat_history").read_text()


def test_read_message() -> None:
    def read(*parts: str):
        left = list(parts)
        return lines.read_message(lambda prompt: left.pop(0) if left else None)

    assert read() is None
    assert read("") == ""
    assert read("a\\", "b\\", "c") == "a\nb\nc"
    assert read("a\\") == "a"
    assert read('"""a', 'b"""') == "a\nb"
    assert read('"""', "a", "") == "a"


def test_thoughts_are_stored_and_answered_on_command(cli) -> None:
    cli.reply("<think>Hm, so", "<think>Well.</think>Yes.")
    result = cli("chat", "--plain", stdin=b"Why?\n/think off\n/answer\n")
    assert result.code == 0, result.err
    asked, answered = cli.engine.requests
    assert asked.params.think == "auto"
    assert (answered.params.think, answered.params.think_budget) == ("off", 0)
    assert answered.prompt[-1] == Message("assistant", "", "Hm, so", answered.prompt[-1].seams)


def test_a_file_goes_with_the_next_message(cli, tmp_path: Path) -> None:
    cli.reply("One.", "Two.")
    (tmp_path / "my notes.md").write_text("Drafts guess.\n")
    result = cli("chat", stdin=b'/read "my notes.md"\nSum up\nAnd again\n')
    assert result.code == 0, result.err
    assert "my notes.md: 14 bytes, about 3 tokens; it goes with your next message" in result.err
    said = '```my notes.md\nDrafts guess.\n```\n\n@"my notes.md" Sum up'
    assert questions(cli) == [said, "And again"]


# -- chatting without a trace, and deleting what was kept --


def test_an_unstored_chat_leaves_nothing(cli, home: Path) -> None:
    result = cli("chat", "--unstored", stdin=b"a secret\n/sessions\n")
    assert result.code == 0
    assert result.out
    assert not sessions_file().exists()
    assert not list(rounds_dir().glob("*"))
    assert not any(b"a secret" in path.read_bytes() for path in home.rglob("*") if path.is_file())
    assert cli("chat", "--unstored", "--resume").code == 2


def test_conversations_are_listed_and_deleted_for_good(cli, home: Path) -> None:
    for text in (b"the first words\n", b"second thoughts\n"):
        assert cli("chat", "--plain", "--no-log", stdin=text).code == 0
    (listed,) = cli("history", "ls", "--json").json
    titles = [one["title"] for one in listed["conversations"]]
    assert sorted(titles) == ["second thoughts", "the first words"]
    assert "second thoughts" in cli("history", "ls").out
    (found,) = cli("history", "ls", "first", "--json").json
    assert [one["title"] for one in found["conversations"]] == ["the first words"]
    assert cli("history", "rm").code == 2
    assert cli("history", "rm", "last").code == 2, "there is no terminal to ask on"
    assert "[second]" in cli("history", "ls", "second").out  # there is an index now
    assert cli("history", "rm", "-y", found["conversations"][0]["id"]).code == 0
    (left,) = cli("history", "ls", "--json").json
    assert [one["title"] for one in left["conversations"]] == ["second thoughts"]
    history_file().write_text("typed\n")
    assert cli("history", "rm", "--all", "--typed", "-y").code == 0
    assert cli("history", "ls").err.startswith("no conversation is stored")
    assert not history_file().exists()
    kept = [path for path in home.rglob("*") if path.is_file()]
    assert sessions_file() in kept
    for part in (b"thoughts", b"thought", b"houghts"):
        assert not any(part in path.read_bytes() for path in kept), "for good"
    assert not any(b"tho" in path.read_bytes() for path in kept if path.name == "sessions.db")


def test_words_are_found_and_marked(cli, home: Path) -> None:
    with SessionStore.open() as store:
        for question, reply in (("About apples", "They are Red."), ("Pears", "Red, at times.")):
            session = store.create()
            store.put(session, 0, StoredMessage("user", question))
            store.put(session, 1, StoredMessage("assistant", reply))
    (found,) = cli("history", "ls", "red", "appl", "--json").json
    assert [one["title"] for one in found["conversations"]] == ["About apples"]
    assert found["conversations"][0]["found"] in ("About apples", "They are Red.")
    assert "[Red], at times." in cli("history", "ls", "red").out
    assert "They [are Red]." in cli("history", "ls", "are red").out
    assert cli("history", "ls", "red are").out == ""
    assert cli("history", "ls", "zebra").err.startswith("no conversation holds")


def test_every_command_names_a_damaged_file(cli, home: Path) -> None:
    for args in (("history", "ls"), ("history", "rm", "--all", "-y"), ("chat", "--plain")):
        sessions_file().parent.mkdir(parents=True, exist_ok=True)
        sessions_file().write_bytes(b"no database at all" * 400)
        result = cli(*args, stdin=b"Hi\n")
        assert result.code == 0
        assert "the sessions file was damaged; it was moved to" in result.err, args


def test_completing_leaves_a_damaged_file_where_it_is(home: Path) -> None:
    sessions_file().parent.mkdir(parents=True)
    sessions_file().write_bytes(b"no database at all" * 400)
    completion.conversations(click.Context(click.Command("x")), click.Argument(["id"]), "")
    assert sessions_file().read_bytes().startswith(b"no database")
    assert len(list(sessions_file().parent.iterdir())) == 1


# -- lines of a plain chat end between words, and its figures take one line --


PROSE = "The blue light is absorbed by water, and so the sea looks blue to us."


def test_no_word_is_broken() -> None:
    assert wrapped(PROSE, 24).split("\n") == [
        "The blue light is",
        "absorbed by water, and",
        "so the sea looks blue to",
        "us.",
    ]
    assert wrapped("a " + "b" * 30 + " c", 10) == "a\n" + "b" * 30 + "\nc"
    assert wrapped("  indented  text\n\n- item", 80) == "  indented  text\n\n- item"


def test_signs_of_two_columns_end_a_line_between_them() -> None:
    assert wrapped("漢字漢字漢字", 8) == "漢字漢字\n漢字"
    family = "👨\u200d👩\u200d👧"
    assert family in wrapped(f"{family}{family}", 3)
    assert columns("cafe\u0301") == 4


def test_code_keeps_its_lines() -> None:
    code = "```python\nprint('a line that is longer than the screen is wide')\n```\n"
    assert wrapped(code + PROSE, 24) == code + wrapped(PROSE, 24)


@example(text="\u200d` ``", cuts=[1], width=2)
@given(
    text=st.text("ab \n`漢\u200d", max_size=60),
    cuts=st.lists(st.integers(1, 5), min_size=1, max_size=60),
    width=st.integers(2, 20),
)
def test_pieces_do_not_matter(text: str, cuts: list[int], width: int) -> None:
    wrap, out, at = WordWrap(width), "", 0
    for n in cuts:
        out += wrap.feed(text[at : at + n])
        at += n
    out += wrap.feed(text[at:]) + wrap.finish()
    assert out == wrapped(text, width)
    assert "".join(out.split()) == "".join(text.split())
    if "```" not in text:
        assert all(columns(line) <= width or " " not in line.strip() for line in out.split("\n"))


def events(text: str) -> list[Event]:
    engine = ScriptedEngine([Reply(text)])
    return list(engine.generate([Message("user", "Hi")], GenerateParams(seed=1)))


def test_a_chat_on_a_terminal_wraps_the_stream_and_says_things_once(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(output, "is_terminal", lambda stream=None: True)
    monkeypatch.setattr(output, "width", lambda: 24)
    monkeypatch.setattr(diagnostics, "width", lambda: 24)
    known: set[str] = set()
    told = [Notice("one thing to know of this conversation"), *events(PROSE)]
    for _ in range(2):
        Printer(known=known).show(iter(told))
    out, err = capsys.readouterr()
    assert out == (wrapped(PROSE, 24) + "\n") * 2
    assert err.count("one thing to know of") == 1
    assert all(len(line) <= 24 for line in err.splitlines())
    assert "seed" not in err
    assert "rounds" not in err


@pytest.mark.parametrize("known", [None, set()])
def test_an_ending_before_the_first_token_has_no_figures_of_one(
    capsys: pytest.CaptureFixture[str], known: set[str] | None
) -> None:
    end = events(PROSE)[-1]
    assert isinstance(end, Finished)
    none = replace(end, text="", token_ids=(), rounds=0, reason="cancelled", verdict=None)
    Printer(known=known).show(iter([none]))
    Printer(known=known).show(iter([replace(none, token_ids=(0,), reason="stop_token")]))
    stopped, empty = capsys.readouterr().err.splitlines()
    assert "first token" not in stopped
    assert stopped.endswith("stopped")
    assert empty.endswith("the model ended at once")
