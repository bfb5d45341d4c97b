import dataclasses

import pytest
from app_driver import record_of
from demo_engine import DemoEngine
from fakes import Reply, ScriptedEngine
from textual.theme import BUILTIN_THEMES

from specllama.events import RoundDone
from specllama.figures import depths
from specllama.settings.params import GenerateParams
from specllama.speculative.drafting.method import Facts, menu
from specllama.told import news
from specllama.tui.record import Record, fate_of, glyph_run
from specllama.tui.screens import inspector_screen
from specllama.tui.themes import DARK, UNICODE, ink_for
from specllama.tui.widgets import walk

INK = ink_for(DARK)
METHODS = menu(Facts())
NAMING = dataclasses.replace(UNICODE, methods=METHODS)


def rounds(reply: Reply) -> list[RoundDone]:
    events = ScriptedEngine([reply]).generate("x", GenerateParams(seed=1, draft_max=4))
    return record_of("t", events).rounds


def test_a_tree_is_drawn_as_a_tree() -> None:
    done = rounds(Reply("One two three four five six", accept=(2,), tree=True))[1]
    assert not done.is_chain
    drawn = walk.table(done, 2, UNICODE, INK).plain
    assert "├─␣two" in drawn
    assert "│ ├─␣three" in drawn
    assert "└─␣other" in drawn
    assert "recovered token" in drawn
    assert drawn.count("✓") == 2


def test_stages_show_what_is_known_by_then() -> None:
    done = rounds(Reply("One two three four five six", accept=(2,)))[1]
    first, second, third = (walk.table(done, stage, UNICODE, INK).plain for stage in range(3))
    assert "verdict" not in first
    assert "drew " in second
    assert second.count("✗") == 1
    assert "unread" in second
    assert "recovered token" not in second
    assert "recovered token" in third


@pytest.mark.parametrize("rule", ["rejection", "block"])
def test_a_residual_sample_is_not_called_the_targets_choice(rule: str) -> None:
    reply = Reply("One two three four five six seven eight", accept=(1,))
    record = Record("t")
    for verify in ("match", rule):
        events = ScriptedEngine([reply]).generate(
            "x", GenerateParams(seed=1, draft_max=4, verify=verify)
        )
        for event in events:
            record.take(news(event))
    second = record.starts[1][0]
    assert [record.verify_at(i) for i in (0, second - 1, second)] == ["match", "match", rule]
    for at, words in ((1, "own choice"), (second + 1, "drawn from the residual")):
        done = record.rounds[at]
        assert done.target_kind == "recovered"
        shown = walk.table(done, 2, UNICODE, INK, verify=record.verify_at(at)).plain
        assert ("own choice" in shown) == (words == "own choice")
        assert words in shown


def test_the_rule_is_an_equation() -> None:
    done = rounds(Reply("One two three four five six", accept=(1,)))[1]
    assert done.drafted_text[:2] == (" two", " wrong")
    drawn = walk.table(done, 2, UNICODE, INK).plain
    assert "drew ␣two ✓" in drawn
    assert "drew ␣three ✗" in drawn
    laws = dataclasses.replace(done, p=(0.4, 0.01, None, None), q=(0.8, 0.05, None, None))
    drawn = walk.table(laws, 2, UNICODE, INK, verify="rejection").plain
    assert "u < p/q 0.50 ✓" in drawn
    assert "u ≥ p/q 0.20 ✗" in drawn
    certain = dataclasses.replace(laws, p=(0.9, 0.0, None, None))
    drawn = walk.table(certain, 2, UNICODE, INK, verify="rejection").plain
    assert "p = 0 ✗" in drawn
    assert "p ≥ q ✓" in walk.table(certain, 2, UNICODE, INK, verify="rejection").plain
    copied = dataclasses.replace(laws, q=(None,) * 4)
    assert "u < p/q 0.40 ✓" in walk.table(copied, 2, UNICODE, INK, verify="rejection").plain
    assert "kept" in walk.table(laws, 2, UNICODE, INK, verify="block").plain


def test_a_refused_sibling_is_told_what_was_drawn_in_its_place() -> None:
    done = rounds(Reply("One two three four five six", accept=(2,), tree=True))[1]
    drawn = walk.table(done, 2, UNICODE, INK).plain.splitlines()
    beside = [line for line in drawn if "␣other" in line and "drew" in line]
    assert ["drew ␣two ✗" in line for line in beside] == [False, False, True]
    laws = dataclasses.replace(done, p=(0.4, 0.1) * 4, q=(0.5, None) * 4)
    for line in walk.table(laws, 2, UNICODE, INK, verify="rejection").plain.splitlines():
        assert ("␣other" in line) <= ("p/q" not in line)  # nobody knows the residual


def test_what_nobody_knows_has_no_column() -> None:
    done = rounds(Reply("One two three four five six", accept=(1,)))[1]
    head = walk.table(done, 2, UNICODE, INK, 110).plain.splitlines()[0].split()
    assert head == ["token", "conf", "verdict"]
    assert "–" not in walk.table(done, 2, UNICODE, INK, 110).plain


def test_what_a_round_cost_in_words() -> None:
    done = rounds(Reply("One two three four five six", accept=(0,)))[1]
    lost = dataclasses.replace(done, draft_ms=100.0, verify_ms=60.0, other_ms=0.0, plain_ms=47.0)
    assert walk.cost(lost) == "160 ms for 1 token; plain 47 ms: lost 113 ms."
    assert walk.caption(lost, 2, UNICODE) == walk.cost(lost)
    won = dataclasses.replace(lost, emitted=(1,) * 4)
    assert walk.cost(won) == "160 ms for 4 tokens; plain 188 ms: saved 28 ms."
    assert walk.cost(dataclasses.replace(done, plain_ms=None)) == ""


def test_rounds_as_rows_are_as_long_as_they_took() -> None:
    done = rounds(Reply("One two three four five six", accept=(1,)))[1]
    some = [dataclasses.replace(done, verify_ms=float(ms)) for ms in range(1, 41)]
    drawn = inspector_screen.rounds_rows(some, 20, INK, 30, 12).plain.splitlines()
    assert len(drawn) == 12
    assert next(line for line in drawn if "▶" in line).split()[1] == "21"
    lengths = [line.count("█") + line.count("▒") for line in drawn]
    assert lengths == sorted(lengths)
    shaded = ["▒" in line for line in drawn]  # those that lost time, without colours, too
    assert shaded == sorted(shaded)
    assert True in shaded
    assert False in shaded
    assert max(map(len, drawn)) <= 30
    assert inspector_screen.rounds_rows([], 0, INK, 30, 12).plain == ""
    for height in range(1, 9):
        shown = inspector_screen.rounds_rows(some[:5], 2, INK, 28, height).plain
        assert len(shown.splitlines()) <= height
        assert "▶" in shown


def test_fates_of_a_chain_and_of_a_cut_round() -> None:
    done = rounds(Reply("One two three four five six", accept=(1,)))[1]
    assert fate_of(done) == ["accepted", "rejected", "untested", "untested"]
    assert glyph_run(done, UNICODE) == [
        ("accepted", "■"),
        ("rejected", "□"),
        ("untested", "··"),
        ("target", "+"),
    ]
    cut = rounds(Reply("One two", accept=(4,)))[-1]
    assert cut.cut == 1
    assert "unused" in walk.table(cut, 2, UNICODE, INK).plain
    assert not any(kind == "target" for kind, _ in glyph_run(cut, UNICODE))


def test_depths_of_a_tree() -> None:
    done = dataclasses.replace(
        rounds(Reply("One two three four five", accept=(1,)))[1], parents=(-1, -1, 0, 1)
    )
    assert depths(done.parents) == [1, 1, 2, 2]


def test_the_passage_keeps_the_place_where_it_happens() -> None:
    done = rounds(Reply("One two three four five six", accept=(2,)))[1]
    long = "".join(f"line {i}\n" for i in range(400))
    for width, height in ((40, 3), (116, 5), (10, 2)):
        shown = walk.passage(long, done, 2, INK, width, height).plain
        assert shown.endswith("▍")
        assert walk.line_count(shown, width) <= height + 1
    assert walk.last_lines("a\nb\nc", 10, 2) == "b\nc"
    assert walk.last_lines("x" * 100, 10, 2) == "x" * 18


def test_every_round_of_a_record_has_a_sentence() -> None:
    for done in record_of("t", DemoEngine().generate("x", GenerateParams())).rounds:
        for stage in range(3):
            assert walk.caption(done, stage, UNICODE).endswith(".")


def test_tokens_are_made_visible_and_harmless() -> None:
    assert walk.token_text(" the") == "␣the"
    assert walk.token_text("\n\n") == "⏎⏎"
    assert walk.token_text("") == '""'
    assert "\x1b" not in walk.token_text("\x1b[2J")


def test_sources_have_words_and_inks() -> None:
    assert NAMING.label("ngram+draft") == "n-gram + draft model"
    assert NAMING.label("none") == UNICODE.label("none") == "none"
    assert UNICODE.label("ngram+draft") == "ngram + draft"
    assert INK.source("never heard of") == "$source-draft"
    assert NAMING.source("ngram+draft") == "ⁿᵈ"
    assert ink_for(BUILTIN_THEMES["ansi-dark"]).muted == "dim"


@pytest.mark.parametrize("source", ["eagle3", "medusa", "tree", "ngram", "self"])
def test_trees_of_any_source_are_drawn_as_trees_in_its_ink(source: str) -> None:
    engine = DemoEngine(tree=True)
    events = engine.generate("x", GenerateParams(seed=1, draft_max=4, proposer="draft"))
    done = next(e for e in events if isinstance(e, RoundDone) and len(e.drafted) > 2)
    done = dataclasses.replace(done, source=source, sources=(source,) * len(done.drafted))
    drawn = walk.table(done, 1, UNICODE, INK)
    assert "└─" in drawn.plain
    assert "├─" in drawn.plain
    assert any(INK.source(source) == str(span.style) for span in drawn.spans)
    assert len(NAMING.source(source)) == 1
    assert NAMING.label(source) in walk.headline(done, 1, 2, NAMING, INK).plain


def test_letters_of_sources_differ() -> None:
    letters = [method.letter for method in METHODS if method.letter]
    assert len(set(letters)) == len(letters) == len(METHODS) - 2  # two only join others
    assert all(len(NAMING.source(method.name)) == 1 for method in METHODS if method.letter)


def test_a_stop_token_is_shown_as_the_end_and_not_as_text() -> None:
    events = list(DemoEngine().generate("x", GenerateParams(seed=1, speculate=False)))
    done = [e for e in events if isinstance(e, RoundDone)][-1]
    done = dataclasses.replace(done, target_text="<|im_end|>", emitted_text=("<|im_end|>",))
    done = dataclasses.replace(done, emitted=(2,), target_token=2)
    assert "the reply ends here" in walk.table(done, 2, UNICODE, INK).plain
    passage = walk.passage("The end.", done, 2, INK, 60, 4)
    assert INK.target not in [str(span.style) for span in passage.spans]
