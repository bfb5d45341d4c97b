"""Files in messages: what is mentioned is found, sent exactly, and found again."""

import os
from pathlib import Path

import pytest

from specllama.errors import UsageError
from specllama.replies import attach

NASTY = (
    "plain",
    "ends with a line\n",
    "",
    "```python\nx = 1\n```\n",
    "a run of ````` five\n\n\n```notes.md\nnot a block\n```",
    "tabs\t, \x1b[31mescapes\x1b[0m, \u202e and é 🙂\r\nreturns\r",
)


def names(text: str) -> list[str]:
    return [mention.name for mention in attach.mentions(text)]


def test_mentions() -> None:
    assert names("see @a.md and @'b c.md', or @\"d e/f.md\" me@home.org @@types/node @") == [
        *("a.md", "b c.md", "d e/f.md")
    ]
    assert names("Is it @a.md? (or @b.md) no(@c.md)") == ["a.md", "b.md"]
    assert [m.means_a_file for m in attach.mentions("@anna @~/x @a/b @c.py @'d' @e.g.")] == [
        *(False, True, True, True, True, True)
    ]


def test_punctuation_belongs_to_a_name_only_if_there_is_such_a_file(tmp_path: Path) -> None:
    (tmp_path / "what?").write_text("x")
    assert names(f"@{tmp_path}/what? @{tmp_path}/who?") == [f"{tmp_path}/what?", f"{tmp_path}/who"]


@pytest.mark.parametrize("text", NASTY)
def test_a_message_keeps_the_text_exactly_and_can_be_taken_apart(text: str) -> None:
    files = {"notes.md": text, "my other.txt": "second\n"}
    typed = 'Compare @notes.md\n\nwith @"my other.txt".\n\n```sh\nls\n```'
    message = attach.attach(typed, files)
    assert text in message
    found, again = attach.split(message)
    assert found == typed
    assert list(again) == list(files)
    assert attach.attach(found, again) == message
    assert again["notes.md"].removesuffix("\n") == text.removesuffix("\n")


def test_a_block_that_was_typed_first_is_no_file() -> None:
    typed = "```sh\nls\n```\n\nWhat does @a.md say?"
    assert attach.split(attach.attach(typed, {"a.md": "x"})) == (typed, {"a.md": "x\n"})


def test_only_blocks_that_are_mentioned_are_files() -> None:
    for message in ("look\n\n```python\nx\n```", "@a.md\n\n```a.md\nx\n```\n\nand more", "@a.md"):
        assert attach.split(message) == (message, {})


def test_what_has_to_be_typed_again() -> None:
    message = attach.attach("@@types/node and @a.md, @anna", {"a.md": "x"})
    assert message == "```a.md\nx\n```\n\n@types/node and @a.md, @anna"
    assert attach.again(message) == ("@@types/node and @a.md, @anna", {"a.md": "x\n"})


def test_a_fence_is_named_in_one_line() -> None:
    message = attach.attach("@'a`b\tc'", {"a`b\tc": "x"})
    assert "```a_b_c\nx\n```" in message
    assert attach.split(message)[1] == {"a_b_c": "x\n"}


def test_what_cannot_be_attached_is_refused_in_a_sentence(tmp_path: Path) -> None:
    binary, latin, large = (tmp_path / name for name in ("b.bin", "l.txt", "large.txt"))
    binary.write_bytes(b"a\0b")
    latin.write_bytes("Ärger".encode("latin-1"))
    large.write_text("x" * 13_000)
    os.mkfifo(tmp_path / "pipe")
    for name, words in (
        ("none.txt", "there is no such file"),
        ("b.bin/x", "there is no such file"),
        ("b.bin", "is not text in UTF-8"),
        ("l.txt", "is not text in UTF-8"),
        ("large.txt", "too large: about 3,250 tokens, and the context holds 1,000"),
        ("pipe", "no ordinary file"),
        ("", "is a folder"),
        ("x" * 5000, "File name too long"),
        ("nul\0", "null"),
    ):
        with pytest.raises(UsageError) as caught:
            attach.read(f"{tmp_path}/{name}", 1000)
        assert words in caught.value.message
        assert "\n" not in caught.value.message
    assert len(attach.read(str(large), 2000)) == 13_000


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_an_unreadable_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "secret.txt"
    path.write_text("x")
    path.chmod(0)
    with pytest.raises(UsageError, match="Permission denied"):
        attach.read(str(path))


def test_home_and_a_byte_order_mark(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "b.txt").write_bytes(b"\xef\xbb\xbfwords")
    assert attach.read("~/b.txt") == "words"
    assert attach.paths("~/b") == ["~/b.txt"]
    assert attach.paths("~nobody-there/x") == []


def test_paths_continue_what_was_begun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("notes.md", "my notes.md", "Nothing.txt", ".hidden"):
        (tmp_path / name).write_text("x")
    (tmp_path / "nested").mkdir()
    (tmp_path / "nested" / "deep.md").write_text("x")
    assert attach.paths("n") == ["nested/", "Nothing.txt", "notes.md"]
    assert attach.paths("not") == ["Nothing.txt", "notes.md", "my notes.md"]
    assert attach.paths("nested/") == ["nested/deep.md"]
    assert attach.paths(".h") == [".hidden"]
    assert ".hidden" not in attach.paths("")
    assert attach.paths("nowhere/x") == []


def test_several_messages_become_one() -> None:
    first = attach.attach("see @a.md", {"a.md": "x"})
    assert attach.together([first, "and this"]) == attach.attach(
        "see @a.md\n\nand this", {"a.md": "x\n"}
    )
