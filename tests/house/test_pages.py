"""The pages are as wide as the code, their links lead somewhere, their commands are understood."""

import json
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from specllama.cli import SHORT, group
from specllama.models import catalog
from specllama.models.refs import is_reference

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted((ROOT / ".github").glob("*.md"))]
WIDTH = 100


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.name)
def test_lines_are_at_most_a_hundred_wide(page: Path) -> None:
    # a row of a table cannot be broken: those of json.md name every field of an object
    free = "|" if page.name == "json.md" else "\0"
    lines = page.read_text("utf-8").splitlines()
    assert [line for line in lines if len(line) > WIDTH and not line.startswith(free)] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.name)
def test_links_lead_to_files_and_headings(page: Path) -> None:
    for target in re.findall(r"\]\((?!https?:)([^)\s]+)\)", page.read_text("utf-8")):
        file, _, heading = target.partition("#")
        path = (page.parent / file) if file else page
        assert path.exists(), target
        if heading:
            found = re.findall(r"^#+ (.+)$", path.read_text("utf-8"), re.M)
            anchors = {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in found}
            assert heading in anchors, target


def test_the_readme_is_read_in_a_minute() -> None:
    assert (ROOT / "README.md").stat().st_size <= 4096


# ---------------------------------------------------------------------- commands

BLOCK = re.compile(r"^```(?:console|sh|bash)\n(.*?)^```", re.M | re.S)
INLINE = re.compile(r"(?<!`)`((?:specllama|make) [^`]+)`(?!`)")
JOINED = re.compile(r"\\\n\s*")
ENDS = re.compile(r"\s(?:\||&&|;|>|<|2>|#)(?:\s|$)|\)[\"']")
MAKE = set(re.findall(r"^([a-z][\w-]*):", (ROOT / "Makefile").read_text("utf-8"), re.M))


def shown(text: str) -> Iterator[str]:
    """The command lines that a page shows, those of several lines as one."""
    for block in BLOCK.findall(text):
        for line in JOINED.sub(" ", block).splitlines():
            yield from re.findall(r"(?:^|[|&;(] *)((?:specllama|make|python) .*)", line.strip())
    for command in INLINE.findall(text):
        yield " ".join(command.split())


def words_of(command: str) -> list[str]:
    """The words of the first program of a line, without what a shell does with its output."""
    first = ENDS.split(f"{command} ")[0].strip().rstrip(")")
    return shlex.split(first.replace("[", "").replace("]", ""), comments=True)


def fault(command: str) -> str:
    """Why a command would not even be understood; "" if it is."""
    try:
        program, *words = words_of(command)
    except ValueError as error:
        return str(error)
    if program == "make":
        return "" if not words or words[0] in MAKE or "=" in words[0] else "no such target"
    if program == "python":
        return "" if not words[0].endswith(".py") or (ROOT / words[0]).is_file() else "no such file"
    place: click.Command = group
    while isinstance(place, click.Group) and words:
        if words[0] in ("-v", "--verbose", "--offline"):
            words.pop(0)
            continue
        if place is group and len(words) == 1 and words[0] in ("-m", "-d"):
            return ""  # the flag itself is meant
        if place is group and words[0].startswith("-") and words[0] not in ("--help", "--version"):
            words.insert(0, "chat")
        words[:1] = SHORT.get(words[0], words[:1]) if place is group else words[:1]
        found = place.get_command(click.Context(place), words[0])
        if found is None:
            name = words[0]
            known = name in ("help", "--version", "--help", "-h", "…") or name.isupper()
            return "" if known or is_reference(name) or "." in name else f"no command {name}"
        place, words = found, words[1:]
    if {"…", "..."} & {*words} or not words or isinstance(place, click.Group):
        words = [word for word in words if word.startswith("--") and "…" not in word]
        flags = {flag for one in place.params for flag in (*one.opts, *one.secondary_opts)}
        return next((f"no flag {w}" for w in words if w.partition("=")[0] not in flags), "")
    try:
        place.make_context(place.name, list(words), resilient_parsing=False)
    except click.exceptions.Exit:
        return ""  # help or a version was asked for
    except click.BadParameter as error:
        return "" if re.search(r"'[A-Z]+'", error.message) else error.message  # it stands for one
    except click.UsageError as error:
        return error.message
    return ""


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.name)
def test_every_command_that_a_page_shows_is_understood(page: Path) -> None:
    faults = {command: fault(command) for command in shown(page.read_text("utf-8"))}
    assert {command: why for command, why in faults.items() if why} == {}


@pytest.mark.parametrize(
    "command",
    [
        "specllama rnu x",
        "specllama run --hed x y",
        "specllama quantize a.gguf b.gguf --typ q4_0",
        "specllama hub fetch x",
        "specllama prove -n many",
        "make tea",
        "python tests/lab/nothing.py",
    ],
)
def test_a_command_that_nothing_understands_is_seen(command: str) -> None:
    assert fault(command)
    assert list(shown(f"```console\n$ x | {command}\n```\n")) == [command]
    assert not fault("specllama run -m a.gguf --head smollm2-135m 'Hi' | cat")


# ---------------------------------------------------------------------- the picture


def test_picture_recording_and_offered_file_are_told_apart_or_are_one() -> None:
    """README names the file that its picture is of, with the figure of the picture; the app's
    recording is of the same; and where ``make chat`` gets another file, README says so."""
    readme = " ".join((ROOT / "README.md").read_text("utf-8").split())
    race = json.loads((ROOT / ".github/screenshots/data/moving-race.json").read_text("utf-8"))
    model = race["where"].partition(" · ")[0]
    plain, drafted = (
        (race[arm]["tokens"] - 1) / race[arm]["pieces"][-1]["at_s"] for arm in ("plain", "drafted")
    )
    assert f"*{model}: {drafted / plain:.2f}×" in readme
    first = (ROOT / "tui" / "recorded.jsonl").read_text("utf-8").splitlines()[0]
    recorded = json.loads(first)["target"]["quantization"]
    assert f"({recorded})" in model
    offered = catalog.load()[catalog.FIRST].target.hub.quant
    assert recorded == offered or f"{offered} file" in readme
