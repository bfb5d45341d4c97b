"""Files in a message: ``@name`` where it is typed, and the file's text above in a fenced block.

    ```notes.md
    the text, exactly
    ```

    Summarise @notes.md

So a file can be read while the rest is typed.
A name may begin with ``~``, and is quoted if it has spaces: ``@"my notes.md"``. ``@@`` is an @ that
names no file.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from specllama.errors import UsageError
from specllama.files import MOST_BYTES, read_file
from specllama.text import number_of

CHARS_PER_TOKEN = 4  # of English; for an estimate that is named as such
MOST_BYTES_PER_TOKEN = 12  # no text has more on average: a file beyond it cannot fit
LISTED = 200

_MENTION = re.compile(r"""(?<!\S)@(?:"([^"\n]+)"|'([^'\n]+)'|([^\s@"'][^\s"']*))""")
_ESCAPED = re.compile(r"(?<!\S)@@")
_BLOCK = re.compile(r"^(`{3,})([^`\n]+)\n(.*?)^\1[ ]*$", re.DOTALL | re.MULTILINE)
_NAMES_A_FILE = re.compile(r"[/\\~]|\.\w{1,5}$")
_ENDS_A_SENTENCE = ".,;:!?)]}"


@dataclass(frozen=True, slots=True)
class Mention:
    """``@name`` in a text, from ``start`` to ``end``; ``quoted`` if the name certainly is one."""

    name: str
    start: int
    end: int
    quoted: bool

    @property
    def means_a_file(self) -> bool:
        """True if a person who writes this wants a file, even if there is none."""
        return self.quoted or _NAMES_A_FILE.search(self.name) is not None


def mentions(text: str) -> Iterator[Mention]:
    """Yield every ``@name`` of a text. Punctuation that follows a bare name belongs to it only if
    there is a file of that name."""
    for m in _MENTION.finditer(text):
        quoted = m[1] or m[2]
        name, end = quoted or m[3], m.end()
        if not quoted and not exists(name):
            bare = name.rstrip(_ENDS_A_SENTENCE) or name
            end -= len(name) - len(bare)
            name = bare
        yield Mention(name, m.start(), end, bool(quoted))


def named(path: str) -> str:
    """Return the mention of a path."""
    if not re.search(r"[\s\"']", path):
        return f"@{path}"
    return f"@'{path}'" if '"' in path else f'@"{path}"'


def unquoted(name: str) -> str:
    """Remove the quotes around a name."""
    quoted = len(name) > 2 and name[0] == name[-1] and name[0] in "\"'"
    return name[1:-1] if quoted else name


def exists(name: str) -> bool:
    try:
        return _path(name).exists()
    except (OSError, ValueError):  # no name that a file could have
        return False


def read(name: str, n_ctx: int = 0) -> str:
    """Return the text of a file, exactly as it is.

    Args:
        n_ctx: tokens that the context holds, 0 if that is not known yet.

    Raises:
        UsageError: it is missing, no file, unreadable, not text or certainly too large; in a
            sentence.
    """
    path = _path(name)
    try:
        found = path.stat()
    except (OSError, ValueError) as error:
        missing = isinstance(error, (FileNotFoundError, NotADirectoryError))
        why = "there is no such file" if missing else getattr(error, "strerror", "") or str(error)
        raise UsageError(f"{name}: {why}", f"to send it as text, write @@{name}") from None
    if stat.S_ISDIR(found.st_mode):
        raise UsageError(f"{name} is a folder", "name a file in it")
    if not stat.S_ISREG(found.st_mode):
        raise UsageError(f"{name} is no ordinary file")
    if n_ctx and found.st_size > MOST_BYTES_PER_TOKEN * n_ctx:
        raise UsageError(
            f"{name} is too large: {about(found.st_size // CHARS_PER_TOKEN)}, "
            f"and the context holds {n_ctx:,}",
            "give a part of it, or a larger context with -c",
        )
    data = read_file(path, "the file", MOST_BYTES)
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError:
        text = "\0"
    if "\0" in text:
        raise UsageError(f"{name} is not text in UTF-8", "only text can be attached")
    return text


def attach(typed: str, files: Mapping[str, str]) -> str:
    """Build the message: a block for each file, then the typed text."""
    blocks = [_block(name, text) for name, text in files.items()]
    return "\n\n".join([*blocks, _ESCAPED.sub("@", typed)])


def again(message: str) -> tuple[str, dict[str, str]]:
    """Return the text to type for this message again, and the files attached to it."""
    typed, files = split(message)
    for mention in reversed(list(mentions(typed))):
        if mention.means_a_file and _label(mention.name) not in files:
            typed = f"{typed[: mention.start]}@{typed[mention.start :]}"
    return typed, files


def split(message: str) -> tuple[str, dict[str, str]]:
    """Return the typed text and the attached files: blocks above it whose names the text
    mentions."""
    rests, files = [message], {}
    while (block := _BLOCK.match(rests[-1])) and rests[-1].startswith("\n\n", block.end()):
        files[block[2]] = block[3]
        rests.append(rests[-1][block.end() + 2 :])
    for n in range(len(rests) - 1, 0, -1):
        names = {_label(mention.name) for mention in mentions(rests[n])}
        if names.issuperset(list(files)[:n]):
            return rests[n], dict(list(files.items())[:n])
    return message, {}


def together(messages: Iterable[str]) -> str:
    """Join several messages into one."""
    parts = [split(message) for message in messages]
    files = {name: text for _, found in parts for name, text in found.items()}
    return attach("\n\n".join(typed for typed, _ in parts), files)


def size_of(n: int) -> str:
    """Format bytes: "2.1 kB"."""
    return f"{n} bytes" if n < 1000 else f"{n / 1e3:.1f} kB" if n < 1e6 else f"{n / 1e6:.1f} MB"


def about(tokens: int) -> str:
    """Format an estimate: "about 530 tokens"."""
    return f"about {tokens_of(round(tokens, -1) if tokens > 100 else max(1, tokens))}"


def size(text: str) -> str:
    """Format the size of a file's text: "2.1 kB"."""
    return size_of(len(text.encode("utf-8", "replace")))


def summary(text: str, tokens: int | None = None) -> str:
    """Return size and tokens of a file's text; estimate the tokens if they were not counted."""
    counted = about(len(text) // CHARS_PER_TOKEN) if tokens is None else tokens_of(tokens)
    return f"{size(text)}, {counted}"


def tokens_of(n: int) -> str:
    """Format a count: "2,850 tokens"."""
    return number_of(n, "token", ",")


def paths(begun: str) -> list[str]:
    """List files and folders (with a slash at their end) that continue a path, folders first."""
    head, slash, tail = begun.rpartition("/")
    folder = _path(head + slash) if slash else Path()
    wanted = tail.lower()
    found: list[tuple[bool, bool, str]] = []
    try:
        with os.scandir(folder) as entries:
            for entry in entries:
                at = entry.name.lower().find(wanted)
                hidden = entry.name.startswith(".") and not tail.startswith(".")
                if at < 0 or hidden or (at > 0 and len(wanted) < 2):
                    continue
                is_folder = entry.is_dir()
                found.append((at > 0, not is_folder, entry.name + "/" * is_folder))
    except (OSError, ValueError):
        return []
    return [head + slash + name for _, _, name in sorted(found)[:LISTED]]


def _path(name: str) -> Path:
    try:
        return Path(name).expanduser()
    except RuntimeError:  # no such user
        return Path(name)


def _label(name: str) -> str:
    """Return a name for the line of a fence: one line, and nothing that could end it."""
    return "".join(c if c.isprintable() and c != "`" else "_" for c in name)


def _block(name: str, text: str) -> str:
    longest = max((len(run) for run in re.findall("`+", text)), default=0)
    fence = "`" * max(3, longest + 1)
    end = "" if text.endswith("\n") or not text else "\n"
    return f"{fence}{_label(name)}\n{text}{end}{fence}"
