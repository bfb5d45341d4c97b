"""A conversation, as it is read from a request: its turns, calls of tools, and their results.

Clients send results in any order and name by an id the call that each belongs to. Templates write
no ids: a model takes the first result for that of the first call. So the results of a reply's calls
stand here in the order of these calls, at the places where the client put results.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from specllama.interface import Message
from specllama.replies.tool_calls import Call, call_text, result_text
from specllama.server.refusals import wrong


@dataclass(slots=True)
class _Called:
    """One call of a reply; ``place`` in the request, and that of its result, once there is one."""

    id: str
    name: str
    place: str
    answered: str = ""


@dataclass(slots=True)
class _Turn:
    """One message; ``results``: of tools, and nothing else."""

    role: str
    parts: list[str]
    thought: str = ""
    results: bool = False


class ChatTurns:
    """The turns of a request.

    Args:
        id: the name of the field by which a result names its call.
        name: that of the field by which it names the tool.
        ordered: clients of this family send no ids, and results in the order of the calls.
    """

    def __init__(self, id: str, name: str = "name", *, ordered: bool = False) -> None:
        self._id, self._name, self._ordered = id, name, ordered
        self._turns: list[_Turn] = []
        self._calls: list[_Called] = []  # of the last reply that has any
        self._results: list[tuple[list[str], int, int]] = []  # parts, the place there, the call
        self._replying = False  # nothing but the reply itself has come since its first call

    def __len__(self) -> int:
        return len(self._turns)

    def begin(self, role: str, text: str = "", thought: str = "") -> None:
        self._turns.append(_Turn(role, [text] if text else [], thought))
        self._replying = self._replying and role != "user"

    def reply(self, thought: str) -> None:
        """Go on with the last turn if it is a reply, else begin one."""
        if not (self._turns and self._turns[-1].role == "assistant"):
            self.begin("assistant")
        self._turns[-1].thought = self._turns[-1].thought or thought

    def write(self, text: str) -> None:
        """Add a line to the turn."""
        self._turns[-1].parts.append(text)

    def think(self, text: str) -> None:
        """Add to the thought of the turn."""
        self._turns[-1].thought += text

    def call(self, call: Call, place: str, id: str | None) -> None:
        """Add a call to the turn.

        Raises:
            Refusal: another call of the reply has this id, or one of the reply before has no
                result.
        """
        if not self._replying:
            self._settle()
            self._calls, self._replying = [], True
        if id and any(one.id == id for one in self._calls):
            raise wrong(place, f"{place}: another call of this reply has the id {id[:80]!r}")
        self._calls.append(_Called(id or "", call.name, place))
        self.write(call_text([call]))

    def result(
        self, text: str, place: str, id: str | None, name: str | None = None, *, apart: bool = False
    ) -> None:
        """Add the result of a call; ``apart``: not to this turn, but to one of results alone.

        Raises:
            Refusal: no call, or more than one, can be meant, or it has its result already.
        """
        if apart and not (self._turns and self._turns[-1].results):
            self._turns.append(_Turn("user", [], results=True))
        self._replying = False
        parts = self._turns[-1].parts
        if (nth := self._meant(place, id, name)) is not None:
            self._calls[nth].answered = place
            self._results.append((parts, len(parts), nth))
        parts.append(result_text(text))

    def _meant(self, place: str, id: str | None, name: str | None) -> int | None:
        """Return the number of the call that a result answers; None in a conversation without ids
        and calls."""
        calls, field = self._calls, self._id
        if id and (any(one.id for one in calls) or not calls):
            found = [i for i, one in enumerate(calls) if one.id == id]
            said = f"the calls before it have no id {id[:80]!r}"
        elif not calls:
            return None
        else:
            found = [i for i, one in enumerate(calls) if not name or one.name == name]
            said = f"no call before it is one of {(name or '')[:80]!r}"
            field = self._name if name or self._ordered else field
        if len(found) > 1 and not self._ordered:
            field, said = self._id, f"it is missing, and {len(found)} calls wait"
        elif left := [i for i in found if not calls[i].answered]:
            return left[0]
        elif found:
            said = f"the call has its result already, at {calls[found[0]].answered}"
        raise wrong(f"{place}.{field}", f"{place}.{field}: {said}")

    def _settle(self) -> None:
        """Put the results of the last reply's calls into the order of these calls.

        Raises:
            Refusal: some of them have no result: a model would take that of another for it.
        """
        without = [one for one in self._calls if not one.answered]
        if 0 < len(without) < len(self._calls):
            place, name = without[0].place, without[0].name[:80]
            said = f"this call of {name!r} has no result, but another of the reply has one"
            raise wrong(place, f"{place}: {said}")
        in_order = sorted((nth, parts[at]) for parts, at, nth in self._results)
        for (parts, at, _), (_, text) in zip(self._results, in_order, strict=True):
            parts[at] = text
        self._results = []

    @property
    def pending(self) -> str:
        """The place of the first call of a reply that ends the conversation; else ""."""
        ends = self._replying and self._turns[-1].role == "assistant"
        return self._calls[0].place if ends else ""

    def messages(self) -> Sequence[Message]:
        """Return the conversation so far.

        Raises:
            Refusal: a call has no result, but another of the same reply has.
        """
        self._settle()
        return tuple(Message(one.role, "\n".join(one.parts), one.thought) for one in self._turns)
