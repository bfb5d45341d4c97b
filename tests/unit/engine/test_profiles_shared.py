"""One profile, several processes: nothing that one of them learnt or lost is lost by the other."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from engines import FakeContext, fake_info, loaded
from fakes import learn
from table_model import FakeTable, FakeVocab
from windows import booking

from specllama.engine.engine import Engine
from specllama.engine.profiles import Profile, Windows, band, open_profile, pair_key, profile_path
from specllama.events import Notice
from specllama.settings.params import GenerateParams
from specllama.speculative.drafting.ngram import NgramDrafter
from specllama.speculative.policy.costs import CostTable
from specllama.speculative.policy.learned import Mean
from specllama.speculative.policy.ledger import Ledger
from specllama.store import profile_file as store

REPLIES = 25
LOSS = 0.125

WORKER = """
import sys, time
from pathlib import Path
from specllama.engine.profiles import Profile
from specllama.speculative.policy.learned import Mean
path, name, replies, loss = Path(sys.argv[1]), sys.argv[2], *map(float, sys.argv[3:])
profile = Profile(path)
print("ready", flush=True)
sys.stdin.readline()
kept = 0
for n in range(int(replies)):
    profile.refresh()
    profile.learned(name).source(name, "draft").labels += 1
    profile.costs.target.set(1, 5.0)
    profile.ledger.book(name, -loss)
    profile.learned("both").asked.setdefault(name, Mean()).n += 1
    time.sleep(0.002)
    kept += profile.save()
sys.exit(0 if kept == replies else 1)
"""


def test_two_processes_lose_nothing_of_each_other(tmp_path: Path) -> None:
    path = tmp_path / "profiles" / "pair.json"
    workers = [
        subprocess.Popen(
            [sys.executable, "-c", WORKER, str(path), name, str(REPLIES), str(LOSS)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )
        for name in ("greedy", "warm")
    ]  # fmt: skip
    for worker in workers:
        assert worker.stdout is not None
        assert worker.stdout.readline() == "ready\n"
    for worker in workers:  # both begin now
        worker.communicate("go\n", timeout=60)
    assert [worker.returncode for worker in workers] == [0, 0]
    profile = Profile(path)
    assert not profile.trouble
    for name in ("greedy", "warm"):
        assert profile.learned(name).source(name, "draft").labels == REPLIES
        assert profile.learned("both").asked[name].n == REPLIES
    assert profile.ledger.total == pytest.approx(Ledger().total - 2 * REPLIES * LOSS)
    assert {p.name for p in path.parent.iterdir()} == {"pair.json", ".lock"}


def test_a_tune_elsewhere_survives_the_reply_that_is_under_way(tmp_path: Path) -> None:
    path = tmp_path / "pair.json"
    app = Profile(path)
    app.costs.target.set(1, 9.0)
    app.ledger.book("mixed", -1.0)
    assert app.save()
    # a reply begins here; before it ends, another process tunes
    tuned = Profile(path)
    for rows, ms in ((1, 10.0), (2, 15.0), (4, 17.0)):
        tuned.costs.target.set(rows, ms)
    tuned.advice = {"words": "keep speculation on"}
    tuned.learned("greedy").source("draft", "draft").labels = 70
    assert tuned.save()
    # the reply ends: it timed passes, and lost a little
    app.costs.target.observe(1, 9.1)
    app.ledger.book("mixed", -0.5)
    app.ledger.book("ngram", -0.25)
    assert app.save()
    for profile in (Profile(path), app):
        assert profile.advice == {"words": "keep speculation on"}
        assert profile.costs.target.ms(4) == pytest.approx(17.0)
        assert profile.learned("greedy").sources["draft"].labels == 70
        assert profile.ledger.total == pytest.approx(Ledger().total - 1.75)


def test_the_next_reply_sees_what_another_process_saved(tmp_path: Path) -> None:
    info = fake_info()
    app, other = open_profile(info, tmp_path), open_profile(info, tmp_path)
    windows = Windows(app, info)
    other.costs.target.set(1, 10.0)
    other.ledger.book("draft", -3.0)
    assert other.save()
    windows(GenerateParams())
    assert app.costs.target.level == 10.0
    assert app.ledger.total == pytest.approx(Ledger().total - 3.0)
    assert app.ledger.covers("mixed") < Ledger().total - 3.0


def test_practising_elsewhere_is_not_booked_by_a_reply(tmp_path: Path) -> None:
    path = tmp_path / "pair.json"
    app, tuned = Profile(path), Profile(path)
    for profile in (app, tuned):
        profile.costs.target.set(1, 10.0)
    with tuned.practice():
        tuned.ledger.book("mixed", -6.0)
        assert tuned.save()
        app.ledger.book("mixed", -2.0)
        assert app.save()
        assert tuned.save()
        assert tuned.ledger.total == pytest.approx(Ledger().total - 6.0)
    assert tuned.save()
    assert Profile(path).ledger.total == pytest.approx(Ledger().total - 2.0)
    assert tuned.ledger.total == pytest.approx(Ledger().total - 2.0)


def test_a_damaged_profile_is_said_once_and_begun_anew(home: Path) -> None:
    info = fake_info()
    path = profile_path(pair_key(info), home)
    home.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b'{"schema": ' + b"[" * 200_000)
    engine = Engine(
        loaded(
            target=FakeContext(FakeTable(seed=3)),
            vocab=FakeVocab(),
            info=info,
            drafters={"ngram": NgramDrafter()},
            make_window=Windows(open_profile(info, home), info),
        )
    )
    params = GenerateParams(max_tokens=80, seed=1, proposer="ngram", ignore_eos=True)
    told = []
    with engine:
        for _ in range(2):
            events = engine.generate("the rain in spain", params)
            told.append([e.message for e in events if isinstance(e, Notice)])
    assert [len(messages) for messages in told] == [1, 0]
    assert str(path) in told[0][0]
    assert "\n" not in told[0][0]
    again = open_profile(info, home)
    assert again.warm
    assert not again.trouble


def test_what_is_saved_right_behind_a_save_is_not_taken_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "pair.json"
    mine = Profile(path)
    mine.costs.target.set(1, 10.0)
    assert mine.save()
    theirs = Profile(path)
    theirs.learned("warm").source("warm", "draft").labels = 7
    update = store.update

    def and_then_another(path: Path, change: Callable[[], store.Data]) -> store.Stamp:
        stamp = update(path, change)
        with monkeypatch.context() as patch:
            patch.setattr(store, "update", update)
            assert theirs.save()
        return stamp

    with monkeypatch.context() as patch:
        patch.setattr(store, "update", and_then_another)
        assert mine.save()
    assert mine.save()
    assert Profile(path).learned("warm").source("warm", "draft").labels == 7


def test_tables_in_use_are_updated_not_replaced(tmp_path: Path) -> None:
    """Two conversations of one process, while another process saves: both go on learning into the
    profile."""
    path = tmp_path / "pair.json"
    app, other = Profile(path), Profile(path)
    band = app.learned("greedy")
    source, asked = band.source("draft", "draft"), band.asked.setdefault("draft", Mean())
    app.costs.target.set(1, 9.0)
    own = app.costs.own.setdefault("ngram", CostTable())
    assert app.save()
    tables = (app.costs.target, app.costs.draft, band.asked)
    other.refresh()
    other.costs.target.set(2, 12.0)
    other.learned("greedy").source("draft", "draft").labels = 70
    assert other.save()
    app.refresh()  # the next request of this process begins
    assert app.learned("greedy") is band
    assert band.sources["draft"] is source
    assert band.asked["draft"] is asked
    assert app.costs.own.get("ngram", own) is own
    for mine, now in zip(tables, (app.costs.target, app.costs.draft, band.asked), strict=True):
        assert mine is now
    assert source.labels == 70
    assert app.costs.target.seen(2) > 0
    source.labels += 1  # by the conversation that goes on
    assert app.save()
    assert Profile(path).learned("greedy").sources["draft"].labels == 71


def test_what_a_reply_learns_while_the_profile_is_refreshed_is_kept(tmp_path: Path) -> None:
    """Another process saves in the middle of a reply, and another request of this one begins."""
    info = fake_info()
    app, other = open_profile(info, tmp_path), open_profile(info, tmp_path)
    app.costs.target.set(1, 9.0)
    assert app.save()
    windows, params = Windows(app, info), GenerateParams()
    window = windows(params)
    window.drafts_with(booking("draft"))
    learned = app.learned(band(params))
    rounds = 0

    def go_on() -> None:
        nonlocal rounds
        judge = window.plan(8).judge
        if judge is not None and judge.read("draft", 1):
            judge.take(0.9, 4.0, 7)
            rounds += 1
        learn(window, 0, 0, (7,), 0.1, 9.1)

    for _ in range(20):
        go_on()
    other.refresh()
    other.learned(band(params)).source("draft", "draft").labels = 100
    other.learned(band(params)).asked.setdefault("draft", Mean()).add(0.5)
    other.costs.draft.set(1, 0.5)
    other.costs.target.set(2, 9.9)
    assert other.save()
    windows(params)  # the next request
    assert learned.sources["draft"].labels == 100
    before = rounds
    for _ in range(20):
        go_on()
    assert rounds > before
    window.finish()
    kept = Profile(app.path).learned(band(params))
    assert kept.sources["draft"].labels == 100 + rounds - before
    assert kept.pace == learned.pace
