"""Text files that people name: a byte order mark is skipped, another encoding is named."""

import io
import sys
from pathlib import Path

import pytest

from specllama.bench.prompts import load_prompts
from specllama.cli.lines import PipedLines
from specllama.cli.options import read_text
from specllama.cli.run import read_prompt
from specllama.errors import UsageError
from specllama.replies import attach
from specllama.replies.template import render_template
from specllama.settings.config_file import read_file, write_setting
from specllama.store.texts import read_texts

MARK = b"\xef\xbb\xbf"


def written(folder: Path, name: str, data: bytes) -> Path:
    path = folder / name
    path.write_bytes(MARK + data)
    return path


def test_a_mark_of_utf8_is_no_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = written(tmp_path, "a.txt", "sch\u00f6n".encode())
    assert read_text(path, "the file") == "sch\u00f6n"
    assert read_prompt(path, raw=True) == "sch\u00f6n"
    assert attach.read(str(path)) == "sch\u00f6n"
    assert read_texts([str(path)])[0] == ["sch\u00f6n"]
    [prompt] = load_prompts(written(tmp_path, "b.jsonl", b'{"prompt": "x"}\n'))
    assert prompt.text == "x"
    [line] = load_prompts(path)
    assert "\ufeff" not in str(line)
    piped = io.TextIOWrapper(io.BytesIO(MARK + b"one\n"))
    monkeypatch.setattr(sys, "stdin", piped)
    assert PipedLines().message() == "one"
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(MARK + b"two\n")))
    assert read_prompt("-", raw=False) == "two"
    assert render_template("\ufeff{{ a }}", {"a": "b"}, max_chars=10) == "b"


def test_settings_with_a_mark_are_read_and_changed(tmp_path: Path) -> None:
    path = written(tmp_path, "config.toml", b"temperature = 0.5\n")
    assert read_file(path) == {"temperature": 0.5}
    write_setting(path, "seed", 3)
    assert read_file(path) == {"temperature": 0.5, "seed": 3}


@pytest.mark.parametrize(
    ("data", "place", "code"),
    [
        ("ab\ncd\u00e4".encode("latin-1"), "byte 0xE4, line 2", "LATIN1"),
        ("ab".encode("utf-16"), "byte 0xFF, line 1", "UTF-16"),
    ],
)
def test_another_encoding_is_named_with_its_place(
    tmp_path: Path, data: bytes, place: str, code: str
) -> None:
    path = tmp_path / "a.gbnf"
    path.write_bytes(data)
    with pytest.raises(UsageError, match=place) as caught:
        read_text(path, "the grammar file")
    assert f"iconv -f {code} -t UTF-8" in (caught.value.hint or "")
