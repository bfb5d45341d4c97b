"""The picker of the pair, and downloads inside the app, from a hub on this machine."""

import hashlib
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ggufs
import pytest
from app_driver import Driver, GatedEngine, Recipe
from fakehub import FakeHub, Fault
from fakes import ScriptedEngine
from textual.widgets import Input, OptionList

from specllama import paths
from specllama.backend import verdicts
from specllama.backend.same_rows import Tried
from specllama.engine import fewer_words
from specllama.models import download, library, memory, pull, trimmed
from specllama.models.gguf import read_header
from specllama.models.judgement import FAST_ENOUGH, Machine, Weights
from specllama.models.library import LocalModel
from specllama.rates import Remedy
from specllama.settings.params import EngineOptions
from specllama.text import size
from specllama.tui import choices
from specllama.tui.choices import ChoiceRow, completions
from specllama.tui.downloads import Download, figures
from specllama.tui.screens.models_screen import ModelsScreen
from specllama.tui.state import Preferences

REPO, NAME = "maker/small-GGUF", "small-Q4_0.gguf"
PAIR = "smollm2-1b7"
MACHINE = Machine(16e9, cores=2)
TARGET = ("bartowski/SmolLM2-1.7B-Instruct-GGUF", "SmolLM2-1.7B-Instruct-Q4_K_M.gguf")
DRAFT = ("bartowski/SmolLM2-135M-Instruct-GGUF", "SmolLM2-135M-Instruct-Q8_0.gguf")


@pytest.fixture(autouse=True)
def _nobody_else(nobody_else: Path) -> None:
    """Only what a test puts there is on this machine."""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder of the settings with a target, a draft that fits it, and a ruin."""
    home = tmp_path / "shelf"
    home.mkdir()
    ggufs.write_llama(home / "large-F32.gguf", quant="F32", width=128)
    ggufs.write_llama(home / "little-F32.gguf", quant="F32", width=64, blocks=1)
    (home / "ruin.gguf").write_bytes(b"GGUFnot a model")
    paths.config_file().parent.mkdir(parents=True, exist_ok=True)
    paths.config_file().write_text(f"model-dirs = ['{home}']")
    return home


@pytest.fixture
def two_models(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def model(name: str) -> LocalModel:
        path = ggufs.write_llama(tmp_path / f"{name[:4]}.gguf", quant="F32")
        return LocalModel(path, "folder", name, None, "Q4_0", 5_000_000, 0.0)

    found = [model("alpha"), model("beta-[/x]")]
    monkeypatch.setattr("specllama.models.library.scan", lambda *a, **k: found)


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[FakeHub]:
    large = ggufs.write_llama(tmp_path / "t.gguf", quant="F32").read_bytes()
    small = ggufs.write_llama(tmp_path / "d.gguf", quant="Q4_0").read_bytes()
    with FakeHub() as fake:
        monkeypatch.setenv("HF_ENDPOINT", fake.url)
        monkeypatch.setattr(download, "STALL_TIMEOUT_S", 1.0)
        monkeypatch.setattr(download, "sleep", lambda seconds: None)
        fake.add(REPO, {NAME: large, "small-Q8_0.gguf": large + b""})
        fake.add(TARGET[0], {TARGET[1]: large})
        fake.add(DRAFT[0], {DRAFT[1]: small})
        yield fake


async def opened(d: Driver) -> ModelsScreen:
    await d.press("f6", until=lambda: isinstance(d.app.screen, ModelsScreen))
    screen = d.app.screen
    await d.until(lambda: " on this machine" in d.shown)
    return screen


async def lit(d: Driver, screen: ModelsScreen, ref: str) -> ChoiceRow:
    """Highlight the row of a reference in the active column."""

    def there() -> bool:
        return any(row is not None and row.ref == ref for _, row in screen.active._lines)

    await d.until(there)
    refs = [row.ref if row is not None else None for _, row in screen.active._lines]
    screen.active.query_one(OptionList).highlighted = refs.index(ref)
    await d.until(lambda: screen.active.row is not None and screen.active.row.ref == ref)
    assert screen.active.row is not None
    return screen.active.row


def detail(screen: ModelsScreen) -> str:
    return str(screen.query_one("#detail").render())


# ---------------------------------------------------------------------- the pair


async def test_favourites_stand_first_and_are_remembered(start: Any, two_models: None) -> None:
    async with start() as d:
        screen = await opened(d)
        refs = [row.ref for _, row in screen.targets._lines if row is not None][:2]
        await lit(d, screen, refs[1])
        await d.press("ctrl+y", until=lambda: screen.targets._lines[0][1].ref == refs[1])
        assert screen.targets.row.ref == refs[1]
        assert "★" in d.shown
        await d.pilot.press("escape")
        screen = await opened(d)
        await d.until(lambda: screen.targets._lines[0][1].ref == refs[1])
        await lit(d, screen, refs[1])
        await d.press("ctrl+y", until=lambda: screen.targets._lines[0][1].ref == refs[0])
        assert "★" not in d.shown
    assert Preferences.load().favourites == []


async def test_target_and_draft_are_switched_without_a_restart(
    start: Any, two_models: None
) -> None:
    asked: list[tuple[str, str | None]] = []
    recipes = {
        "scripted": Recipe(ScriptedEngine(["Old."])),
        "beta-[/x]": Recipe(ScriptedEngine(["New."])),
    }

    def factory(target: str, draft: str | None) -> Recipe:
        asked.append((target, draft))
        return recipes[target]

    async with start(recipe=recipes["scripted"], factory_for=factory) as d:
        await d.say("q")
        screen = await opened(d)
        await d.until(lambda: "beta-[/x]" in d.shown)
        await d.press(*"beta", until=lambda: len(screen.targets._lines) == 3)
        await d.press("enter", until=lambda: screen.active is screen.drafts)
        await d.until(lambda: "repeated text is still guessed" in d.shown)
        await lit(d, screen, "none")
        await d.press("enter", until=lambda: d.app.screen is d.app.chat)
        await d.until(lambda: d.app.loader.ready)
        await d.say("q2")
        assert d.texts[-1] == ("assistant", "New.")
        assert asked[-1] == ("beta-[/x]", "none")
        assert Preferences.load().last_target == "beta-[/x]"


async def test_every_candidate_says_whether_it_fits_and_why_not(start: Any, folder: Path) -> None:
    async with start("Ok.", size=(120, 36)) as d:
        screen = await opened(d)
        await d.until(lambda: all(row.fits is not None for row in screen.targets.here))
        ruin = next(row for row in screen.targets.here if row.name == "ruin.gguf")
        assert ruin.refused
        assert ruin.reason
        large = str(folder / "large-F32.gguf")
        await lit(d, screen, large)
        await d.until(lambda: screen._compared is not None and screen._compared[0] == large)
        rows = {row.name: row for row in screen.drafts.here}
        assert rows["best: little-F32.gguf"].fits
        assert rows["little-F32.gguf"].fits
        assert rows["tiny-draft"].refused
        assert rows["tiny-draft"].reason.startswith("tokenizer differs: ")
        assert rows["ruin.gguf"].refused
        assert screen.drafts.row is rows["best: little-F32.gguf"]
        await d.until(lambda: "needs about" in detail(screen))
        assert "free" in detail(screen)
        # an incompatible draft cannot be taken
        await d.pilot.press("tab")
        await lit(d, screen, "tiny-draft")
        await d.press("enter", until=lambda: "tokenizer differs" in detail(screen))
        assert d.app.screen is screen
        await lit(d, screen, str(folder / "little-F32.gguf"))
        await d.press("enter", until=lambda: d.app.screen is d.app.chat)
        assert d.app.loader.wanted == (large, str(folder / "little-F32.gguf"))


def test_what_does_not_fit_into_memory_says_so(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = folder / "large-F32.gguf"
    row = ChoiceRow(str(path), path.name, path=path)
    judged = choices.judged_target(row, EngineOptions(), MACHINE)
    assert (judged.fits, judged.reason) == (True, "")
    monkeypatch.setattr(memory, "available_memory", lambda: 10_000_000)
    judged = choices.judged_target(row, EngineOptions(), MACHINE)
    assert judged.fits is False
    assert not judged.refused
    assert judged.reason.startswith("does not fit: needs ")
    drafts = choices.draft_rows(row, EngineOptions())
    little = next(r for r in drafts if r.name == "little-F32.gguf")
    assert little.reason.startswith("does not fit: needs ")


def test_a_draft_model_is_listed_as_what_runs_of_it(folder: Path) -> None:
    """The copy of fewer words that was made by itself, or the whole one."""
    target, options = folder / "large-F32.gguf", EngineOptions()
    row = ChoiceRow(str(target), target.name, path=target)
    whole = read_header(folder / "little-F32.gguf")
    whole.read_contents()
    key = fewer_words._key(whole, options, "here")

    def listed() -> str:
        rows = choices.draft_rows(row, options, "here")
        return next(one.size for one in rows if one.name == "little-F32.gguf")

    assert listed() == size(whole.file_bytes)
    verdicts.keep(fewer_words.SCHEMA, key, Tried(200, why_not="it saves too little"))
    assert listed() == f"{size(whole.file_bytes)}, whole"
    trimmed.place(whole).parent.mkdir(parents=True)
    copy = trimmed.write(whole, trimmed.place(whole), trimmed.choose(whole, 200, {}))
    verdicts.keep(fewer_words.SCHEMA, key, Tried(200, share=0.7))
    assert listed() == f"{size(copy.file_bytes)}, copy of 200 words"


async def test_paths_are_completed_and_checked(start: Any, folder: Path) -> None:
    (folder / "deep").mkdir()
    async with start("Ok.") as d:
        screen = await opened(d)
        screen.targets.type(str(folder)[:-2])
        await d.pilot.press("tab")
        assert screen.targets.text == f"{folder}/"
        await d.until(lambda: "deep/" in d.shown)
        await d.pilot.press(*"rui", "tab")
        assert screen.targets.text == str(folder / "ruin.gguf")
        await d.press("enter", until=lambda: "ends inside" in detail(screen))
        assert screen.active is screen.targets
        screen.targets.type(f"{folder}/la")
        await d.until(lambda: screen.targets.row is not None)
        await d.press("enter", until=lambda: screen.active is screen.drafts)
        screen.drafts.type(f"{folder}/ruin.gguf")
        await d.press("enter", until=lambda: "ends inside" in detail(screen))
        assert d.app.screen is screen
        screen.drafts.type(f"{folder}/little-F32.gguf")
        await d.press("enter", until=lambda: d.app.screen is d.app.chat)
        assert d.app.loader.wanted == (
            str(folder / "large-F32.gguf"),
            str(folder / "little-F32.gguf"),
        )


def test_completions_are_folders_and_models_only(folder: Path) -> None:
    (folder / "deep").mkdir()
    (folder / ".hidden").mkdir()
    (folder / "notes.txt").touch()
    (folder / "big-00002-of-00003.gguf").touch()
    names = [row.name for row in completions(f"{folder}/")]
    assert names == ["large-F32.gguf", "little-F32.gguf", "ruin.gguf", "deep/"]
    assert [row.name for row in completions(f"{folder}/.h")] == [".hidden/"]
    assert [row.name for row in completions(f"{folder}/L")] == ["large-F32.gguf", "little-F32.gguf"]
    assert [row.ref for row in completions("~")] == ["~/"]
    (gone,) = completions("/nowhere/at/all/")
    assert gone.does == "nothing"
    assert gone.reason


async def test_a_first_start_without_a_model_asks_for_one(start: Any, two_models: None) -> None:
    async with start(target=None, wait=False) as d:
        await d.until(lambda: isinstance(d.app.screen, ModelsScreen))
        await d.until(lambda: "2 on this machine" in d.shown)
        await d.press("escape", until=lambda: d.app.screen is d.app.chat)
        assert "no model" in d.shown
        await d.send("hello")
        await d.pilot.pause()
        assert d.app.chat.prompt.text == "hello"


@pytest.mark.parametrize("size", [(60, 16), (80, 24), (100, 30), (160, 50)])
async def test_both_columns_can_be_reached_at_every_size(
    start: Any, folder: Path, size: tuple[int, int]
) -> None:
    async with start("Ok.", size=size) as d:
        screen = await opened(d)
        for column in (screen.drafts, screen.targets):
            await d.press("tab", until=lambda column=column: screen.active is column)
            field = column.query_one(Input)
            assert d.app.focused is field
            assert field.region.height == 1
            assert column.query_one(OptionList).region.height >= 3


# ---------------------------------------------------------------------- downloads


async def test_a_pair_of_the_catalogue_is_downloaded_while_one_chats_and_loaded_with_one_key(
    start: Any, hub: FakeHub
) -> None:
    hub.faults[TARGET[1]] = Fault(bytes_per_s=150_000)
    asked: list[tuple[str, str | None]] = []
    recipe = Recipe(ScriptedEngine(["Old."]))

    def factory(target: str, draft: str | None) -> Recipe:
        asked.append((target, draft))
        return recipe

    async with start(recipe=recipe, factory_for=factory, size=(120, 36)) as d:
        screen = await opened(d)
        await lit(d, screen, PAIR)
        await d.until(lambda: "Enter downloads it" in detail(screen))
        await d.press("enter", until=lambda: "left" in d.shown)
        assert "%" in detail(screen)
        await d.press("escape", until=lambda: "F6 stops it" in d.shown)
        await d.say("meanwhile")
        assert d.texts[-1] == ("assistant", "Old.")
        hub.faults.clear()
        await d.until(lambda: f"{PAIR} is here: Ctrl+L loads it" in d.shown)
        await d.press("ctrl+l", until=lambda: len(asked) == 2 and d.app.loader.ready)
        assert asked[-1] == (f"{TARGET[0]}:Q4_K_M", f"{DRAFT[0]}:Q8_0")
        assert "is here" not in d.shown
    large = paths.models_dir() / TARGET[0] / TARGET[1]
    assert large.read_bytes() == hub.repos[TARGET[0]][TARGET[1]]


async def test_a_download_is_stopped_kept_and_continued_even_by_another_app(
    start: Any, hub: FakeHub
) -> None:
    data = hub.repos[REPO][NAME]
    hub.faults[NAME] = Fault(bytes_per_s=100_000)
    part = paths.models_dir() / REPO / f"{NAME}.{hashlib.sha256(data).hexdigest()[:16]}.part"
    async with start("Ok.", size=(120, 36)) as d:
        screen = await opened(d)
        screen.targets.type(f"{REPO}:Q4_0")
        await d.until(lambda: f"get {REPO}:Q4_0" in d.shown)
        await lit(d, screen, f"{REPO}:Q4_0")
        await d.press("enter", until=lambda: part.exists() and part.stat().st_size > 5000)
        screen.targets.type("")
        row = await lit(d, screen, f"{REPO}:Q4_0")
        assert row.does == "stop"
        await d.press("enter", until=lambda: "Enter continues" in detail(screen))
        kept = part.stat().st_size
        assert 0 < kept < len(data)
        hub.faults.clear()
        await d.press("enter", until=lambda: d.app.downloads.all[f"{REPO}:Q4_0"].state == "done")
        assert hub.of(NAME)[-1].range == f"bytes={kept}-"
    assert (paths.models_dir() / REPO / NAME).read_bytes() == data
    # an app that is closed leaves a part that the next one offers to continue
    other = "small-Q8_0.gguf"
    hub.faults[other] = Fault(bytes_per_s=100_000)
    async with start("Ok.", size=(120, 36)) as d:
        closed = d.app.downloads.begin(f"{REPO}:Q8_0")
        await d.until(lambda: closed.done > 5000)
    while closed.active:
        time.sleep(0.01)
    assert list(pull.unfinished()) == [f"{REPO}/{other}"]
    hub.faults.clear()
    async with start("Ok.", size=(120, 36)) as d:
        screen = await opened(d)
        row = await lit(d, screen, f"{REPO}/{other}")
        assert row.does == "continue"
        await d.press("enter", until=lambda: d.app.downloads.all[row.ref].state == "done")
        assert d.app.downloads.all[row.ref].target is not None
    assert not pull.unfinished()


@pytest.mark.parametrize(
    ("fault", "what"),
    [
        (Fault(status=403, code="GatedRepo"), "is gated"),
        (Fault(status=404, code="EntryNotFound"), "not on the hub"),
        (Fault(cut_after=0), "times in a row"),
        (Fault(corrupt=True), "arrived damaged"),
    ],
    ids=["gated", "gone", "breaks off", "damaged"],
)
async def test_a_download_that_fails_says_what_and_what_next(
    start: Any, hub: FakeHub, fault: Fault, what: str
) -> None:
    hub.faults[NAME] = fault
    async with start("Ok.", size=(120, 36)) as d:
        screen = await opened(d)
        download = d.app.downloads.begin(f"{REPO}:Q4_0")
        await d.until(lambda: download.state == "failed")
        await lit(d, screen, download.ref)
        await d.until(lambda: "Enter tries again" in detail(screen))
        assert what in detail(screen)
        hub.faults.clear()
        await d.press("enter", until=lambda: d.app.downloads.all[download.ref].state == "done")


async def test_the_hub_is_searched_and_a_file_of_a_hit_chosen(start: Any, hub: FakeHub) -> None:
    async with start("Ok.", size=(120, 36)) as d:
        screen = await opened(d)
        await d.press(*"small", "ctrl+f", until=lambda: REPO in d.shown)
        await lit(d, screen, REPO)
        await d.until(lambda: "downloads" in detail(screen))
        await d.pilot.press("enter")
        await lit(d, screen, f"{REPO}:Q8_0")
        assert screen.targets.text == REPO
        assert screen.targets.found[0].ref == f"{REPO}:Q4_0"
        screen.targets.type("nothing like it")
        await d.press("ctrl+f", until=lambda: "nothing on the hub" in d.shown)


@pytest.mark.parametrize("how", ["switched off", "unreachable"])
async def test_offline_is_said_at_once(
    start: Any, monkeypatch: pytest.MonkeyPatch, hub: FakeHub, how: str
) -> None:
    words = "cannot be reached"
    if how == "switched off":
        monkeypatch.setenv("HF_HUB_OFFLINE", "1")
        words = "switched off"
    else:
        monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    async with start("Ok.", size=(120, 36)) as d:
        screen = await opened(d)
        await d.pilot.press(*"small", "ctrl+f")
        await d.until(lambda: words in detail(screen) and words in d.shown.split("Downloads")[0])
        assert "asking the hub" not in d.shown
        assert "Enter asks again" in d.shown
        screen.targets.type("")
        await lit(d, screen, PAIR)
        await d.press("enter", until=lambda: d.app.downloads.all[PAIR].state == "failed")
        await d.until(lambda: words in d.shown)
    assert not hub.requests


async def test_a_second_download_waits_for_the_first(start: Any, hub: FakeHub) -> None:
    hub.faults[NAME] = Fault(bytes_per_s=100_000)
    async with start("Ok.", size=(120, 36)) as d:
        first = d.app.downloads.begin(f"{REPO}:Q4_0")
        await d.until(lambda: first.done > 0)
        second = d.app.downloads.begin(f"{REPO}:Q8_0")
        assert d.app.downloads.begin(f"{REPO}:Q4_0") is first
        assert second.state == "waiting"
        assert d.app.downloads.newest is first
        d.app.downloads.stop(f"{REPO}:Q4_0")
        await d.until(lambda: first.state == "stopped" and second.state == "done")


async def test_a_reply_is_written_while_a_download_runs(start: Any, hub: FakeHub) -> None:
    hub.faults[NAME] = Fault(bytes_per_s=100_000)
    engine = GatedEngine([" ".join(f"word{i}" for i in range(30))])
    async with start(recipe=Recipe(engine), size=(120, 36)) as d:
        await d.send("go", until=lambda: "word2" in d.shown)
        running = d.app.downloads.begin(f"{REPO}:Q4_0")
        await d.until(lambda: "F6 stops it" in d.shown)
        engine.gate.set()
        await d.idle()
        assert "word29" in d.shown
        assert running.active


def test_speed_and_time_left_are_those_of_the_last_seconds() -> None:
    one = Download("x", state="running", total=10_000_000)
    for second in range(20):
        one.count(second * (50_000 if second < 10 else 200_000), float(second))
    assert one.speed == pytest.approx(200_000, rel=0.2)
    assert figures(one)[0] == "38%"
    assert figures(one)[-1].endswith("s left")
    one.state = "stopped"
    assert one.speed is None


def test_sizes_in_words() -> None:
    assert [size(n) for n in (900, 250_000, 5_440_000, 99_000_000, 5_440_000_000)] == [
        "1 kB",
        "250 kB",
        "5.4 MB",
        "99 MB",
        "5.4 GB",
    ]


# ---------------------------------------------------------------------- what to expect


def local(ref: str, repo: str | None, source: Any = "huggingface", used: float = 0.0) -> LocalModel:
    path = Path("/models") / f"{ref.replace('/', '-')}-Q8_0.gguf"
    return LocalModel(path, source, ref, repo, "Q8_0", 5_000_000, used)


def test_the_loaded_target_comes_first_and_drafts_are_no_targets() -> None:
    models = [
        local("tiny-target", None, "bundled"),
        local("tiny-draft", None, "bundled"),
        local(f"{DRAFT[0]}:Q8_0", DRAFT[0]),
        local("old", "maker/old", used=1e9),
        local("new", "maker/new", used=2e9),
    ]
    assert [row.ref for row in choices.local_rows(models)] == ["new", "old", "tiny-target"]
    loaded = choices.local_rows(models, models[0].path)
    assert [row.ref for row in loaded] == ["tiny-target", "new", "old"]


def test_downloads_begin_with_what_is_best_here_and_say_how_fast_it_is() -> None:
    rows = choices.offered_rows([], MACHINE)
    best = MACHINE.recommended()
    first = rows[0]
    assert (first.ref, first.bold) == (best.name, True)
    assert first.name == "SmolLM2 1.7B: best here"
    assert re.fullmatch(r"about \d+ tok/s plain", first.reason)
    assert f"{best.bytes / 1e9:.1f} GB" == first.size
    speeds = [
        float(found[1]) for row in rows if (found := re.search(r"about ([\d.]+)", row.reason))
    ]
    slow = [speed for speed in speeds if speed < FAST_ENOUGH]
    assert speeds[: len(speeds) - len(slow)] == [one for one in speeds if one >= FAST_ENOUGH]
    assert len({row.name for row in rows}) == len(rows)


def test_an_estimate_is_said_of_models_that_wait_for_memory() -> None:
    two, eight = Machine(16e9, cores=2), Machine(16e9, cores=8)
    plain = two.speed(Weights(1e9))
    assert eight.speed(Weights(1e9)) > plain
    assert plain == pytest.approx(2 * two.speed(Weights(2e9)))
    assert two.speed(Weights(10e9, 0.1)) == pytest.approx(plain)  # experts


async def test_the_loaded_file_its_folder_and_pairs_used_before_are_listed(
    start: Any, tmp_path: Path
) -> None:
    apart, asked = tmp_path / "apart", list[tuple[str, str | None]]()
    apart.mkdir()
    target, other = (ggufs.write_llama(apart / f"{n}-F32.gguf", quant="F32") for n in "tu")
    far = tmp_path / "far"
    far.mkdir()
    draft = ggufs.write_llama(far / "small-F32.gguf", quant="F32", width=64, blocks=1)
    library.remember(other, draft)

    def factory(target: str, draft: str | None) -> Recipe:
        asked.append((target, draft))
        return Recipe()

    async with start(target=str(target), factory_for=factory, size=(120, 36)) as d:
        screen = await opened(d)
        await d.until(lambda: screen.targets.row is not None and screen.targets.row.path == target)
        assert {target, other, draft} <= set([row.path for row in screen.targets.here])
        assert (await lit(d, screen, str(other))).path == other
        await d.until(lambda: screen.drafts.row is not None and screen.drafts.row.path == draft)
        (pair,) = [row for row in screen.targets.here if row.does == "pair"]
        assert pair.name == "u-F32 + small-F32"
        screen.targets.query_one(OptionList).highlighted = 0
        await d.press("enter", until=lambda: asked[-1] == (str(other), str(draft)))


def test_what_was_measured_to_be_faster_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    target = ggufs.write_llama(tmp_path / "t-F32.gguf", quant="F32")
    better = Remedy("-t 1", 1.2, "texts stay as they are")
    monkeypatch.setattr(choices, "remedies_of", lambda here, *files: (better,) if here else None)
    row = ChoiceRow(str(target), "t", path=target)

    def said(here: str) -> str:
        options = EngineOptions()
        return choices.estimate(row, None, options, MACHINE, "", brief=True, here=here).plain

    assert said("this machine").endswith("-t 1 would write 1.20×; " + better.then)
    assert "-t 1" not in said("")


async def test_a_typed_draft_is_judged_and_a_pair_that_cannot_be_has_no_speed(
    start: Any, tmp_path: Path
) -> None:
    target = ggufs.write_llama(tmp_path / "t-F32.gguf", quant="F32")
    words = ["<unk>", "<s>", "</s>", *(f"other{i}" for i in range(61))]
    other = ggufs.write_llama(tmp_path / "far-F32.gguf", quant="F32", tokens=words)
    options, machine = EngineOptions(), MACHINE
    row = ChoiceRow(str(target), "t", path=target)
    wrong = choices.judged_draft(row, ChoiceRow(str(other), "o", path=other), options)
    assert wrong.refused
    said = choices.estimate(row, wrong, options, machine, "", brief=False).plain
    assert "tok/s" not in said
    assert "needs about" not in said
    async with start(target=str(target), size=(120, 36)) as d:
        screen = await opened(d)
        await lit(d, screen, str(target))
        await d.pilot.press("tab")
        screen.drafts.type(str(other))
        await d.until(lambda: screen.drafts.row is not None and screen.drafts.row.refused)
