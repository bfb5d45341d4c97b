"""The pages are as wide as the code, and their links lead somewhere."""

import re
from pathlib import Path

import pytest

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
