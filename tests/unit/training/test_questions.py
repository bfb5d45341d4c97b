"""Questions for a target: the list that ships, a person's texts and chats."""

from collections import Counter
from itertools import islice
from pathlib import Path

import pytest

from specllama.errors import UsageError
from specllama.interface import Message
from specllama.store.message_tree import StoredMessage
from specllama.store.sessions import SessionStore
from specllama.training.questions import (
    GREEDY,
    LEAST_HELD,
    MOST_HELD,
    WARM,
    Exercise,
    PromptList,
    of_chats,
    of_texts,
    shipped,
)

KINDS = ("code", "edit", "list", "prose", "question")


def asked(prompts: PromptList, n: int, seed: int = 1) -> list[Exercise]:
    return list(islice(prompts.asked(seed), n))


def text_of(exercise: Exercise) -> str:
    return exercise.messages[-1].content


def test_the_list_has_thousands_of_different_questions_of_five_kinds() -> None:
    found = shipped()
    every = [
        chat for side in (found.trained, found.held) for kind in side.values() for chat in kind
    ]
    assert len(set(every)) == len(every) >= 3000
    assert found.kinds == KINDS
    assert not any("{" in chat[0].content.replace("{x}", "{") and "{x}" in chat[0].content
                   for chat in every)  # fmt: skip


def test_held_out_questions_have_topics_of_their_own() -> None:
    import tomllib
    from importlib.resources import files

    data = tomllib.loads(files("specllama.training").joinpath("questions.toml").read_text("utf-8"))
    found = shipped()
    for kind, part in data.items():
        assert not set(part["topics"]) & set(part["held"])
        for topic in part["held"]:
            assert not [chat for chat in found.trained[kind] if topic in chat[0].content]
            assert [chat for chat in found.held[kind] if topic in chat[0].content]


def test_a_twentieth_is_held_out_and_some_of_every_kind_from_the_start() -> None:
    first, many = asked(shipped(), len(KINDS) * LEAST_HELD), asked(shipped(), 2000)
    assert Counter(one.kind for one in first if one.held_out) == dict.fromkeys(KINDS, LEAST_HELD)
    held = [one for one in many if one.held_out]
    assert 0.04 < len(held) / len(many) < 0.06
    assert max(Counter(one.kind for one in held).values()) <= MOST_HELD
    assert {one.temperature for one in held} == {0.0}
    assert not {text_of(one) for one in held} & {text_of(one) for one in many if not one.held_out}


def test_most_replies_are_warm_and_some_greedy() -> None:
    trained = [one for one in asked(shipped(), 2000) if not one.held_out]
    greedy = sum(one.temperature == 0.0 for one in trained) / len(trained)
    assert abs(greedy - GREEDY) < 0.05
    assert {one.temperature for one in trained} == {0.0, WARM}


def test_the_questions_are_a_function_of_the_seed_and_go_on_where_they_were_left() -> None:
    whole = asked(shipped(), 60)
    assert whole == asked(shipped(), 60) != asked(shipped(), 60, seed=2)
    done = {one.id for one in whole[:25]} | {whole[40].id}
    rest = list(islice(shipped().asked(1, done), 34))
    assert rest == [one for one in whole[25:] if one.id not in done]


def test_all_are_asked_once_before_one_is_asked_again_which_is_never_at_zero() -> None:
    chats = {kind: [(Message("user", f"{kind} {i}"),) for i in range(n)] for kind, n in
             {"a": 30, "b": 3}.items()}  # fmt: skip
    found = asked(PromptList(chats, {"a": [(Message("user", "held"),)]}), 80)
    times = Counter(text_of(one) for one in found)
    assert times.pop("held") == 1
    assert set(times) == {chat[0].content for side in chats.values() for chat in side}
    first = [text_of(one) for one in found[: 30 + 3 + 1]]
    assert len(set(first)) == len(first)
    seen: set[str] = set()
    for one in found:
        assert one.temperature == WARM or text_of(one) not in seen
        seen.add(text_of(one))
    assert len({(text_of(one), one.seed) for one in found}) == len(found)


# -- texts and chats of a person --


def written(folder: Path) -> Path:
    paragraphs = [f"Paragraph {i} tells of boats and harbors. " * 8 for i in range(40)]
    (folder / "story.md").write_text("\n\n".join(paragraphs), "utf-8")
    lines = [f"def function_{i}(value):\n    return value + {i}\n" * 3 for i in range(60)]
    (folder / "code.py").write_text("\n\n".join(lines), "utf-8")
    (folder / "picture.png").write_bytes(b"\0\1\2")
    return folder


def test_texts_become_questions_of_the_kinds_that_people_ask(tmp_path: Path) -> None:
    found, without = of_texts([str(written(tmp_path))])
    assert without == "1 no text"
    assert set(found.kinds) == set(KINDS)
    for kind in KINDS:
        assert len(found.held[kind]) >= LEAST_HELD
    explained = [c[0].content for c in found.trained["question"] if "```" in c[0].content]
    assert explained
    assert all(text.count("def function_") >= 3 for text in explained)


def test_no_piece_of_a_text_is_on_both_sides(tmp_path: Path) -> None:
    found, _ = of_texts([str(written(tmp_path))])

    def pieces(side: object) -> set[str]:
        chats = [chat for kind in side.values() for chat in kind]  # type: ignore[attr-defined]
        return {word for chat in chats for word in chat[-1].content.split() if "function_" in word}

    assert pieces(found.held)
    assert not pieces(found.held) & pieces(found.trained)


def test_what_holds_no_text_is_refused(tmp_path: Path) -> None:
    (tmp_path / "short.txt").write_text("too short")
    with pytest.raises(UsageError, match="no text to learn from"):
        of_texts([str(tmp_path)])
    with pytest.raises(UsageError, match=r"cannot learn from .*nowhere"):
        of_texts([str(tmp_path / "nowhere")])


def test_only_finished_chats_are_taken_from_the_store(tmp_path: Path) -> None:
    with SessionStore.open(tmp_path / "sessions.db") as store:
        whole, cut = store.create(system="Be kind."), store.create()
        for session, state in ((whole, "done"), (cut, "partial")):
            store.put(session, 0, StoredMessage("user", f"asked {state}"))
            store.put(session, 1, StoredMessage("assistant", "told", state))  # type: ignore[arg-type]
        store.put(whole, 2, StoredMessage("user", "and then"))
        store.put(whole, 3, StoredMessage("assistant", "this", "done"))
        store.put(whole, 4, StoredMessage("user", "no reply yet"))
    found = of_chats(tmp_path / "sessions.db")
    first = (Message("system", "Be kind."), Message("user", "asked done"))
    assert dict(found.trained) == {
        "chat": [first, (*first, Message("assistant", "told"), Message("user", "and then"))]
    }
    assert len(of_chats(tmp_path / "nowhere.db")) == 0


def test_lists_are_joined_by_kind(tmp_path: Path) -> None:
    texts, _ = of_texts([str(written(tmp_path))])
    both = shipped() + texts
    assert len(both) == len(shipped()) + len(texts)
    assert both.kinds == KINDS
    own = {chat for kind in texts.trained.values() for chat in kind}
    first = [one.messages in own for one in asked(both, 150) if one.kind in ("code", "edit")]
    assert 0.3 < sum(first) / len(first) < 0.6
    assert not asked(PromptList({}, {}), 3)
