"""Requests wait in one order: clients take turns, and what is taken back leaves no trace."""

from __future__ import annotations

from specllama.engine.fair_queue import Turns


def turns_of(*waiting: tuple[str, int]) -> Turns[int]:
    turns = Turns[int]()
    for client, one in waiting:
        turns.put(client, one)
    return turns


def test_what_is_first_is_what_is_taken() -> None:
    turns = turns_of(("a", 1), ("a", 2), ("b", 3), ("a", 4))
    assert sorted(turns) == [1, 2, 3, 4]
    taken = []
    while turns:
        first = turns.first
        taken.append(turns.pop())
        assert taken[-1] == first
    assert taken == [1, 3, 2, 4]


def test_what_is_taken_back_costs_its_client_no_turn() -> None:
    turns = turns_of(("a", 1), ("b", 2), ("b", 3), ("c", 4))
    assert turns.remove("b", 2)
    assert not turns.remove("b", 2)
    assert not turns.remove("nobody", 4)
    assert turns.remove("c", 4)
    turns.put("c", 5)
    assert [turns.pop() for _ in range(3)] == [1, 3, 5]
    assert not turns
