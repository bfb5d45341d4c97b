"""A conversation: messages, settings and an engine; every change is kept in the stores.

    session = Session(engine, store)
    for event in session.send("What is a draft model?"):
        ...
    session.undo()

Editing, retrying and continuing are all the same thing: go back to some message and generate from
there. What followed it stays, as another version (store/message_tree.py). Whatever part of a reply
arrived is kept, even if the generator is closed, the engine fails or the process is killed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, Literal

from specllama.cancel import Cancel
from specllama.errors import PromptTooLong, UsageError
from specllama.events import Event, Finished, Notice
from specllama.interface import EngineLike, Message
from specllama.settings.params import SEED_LIMIT, GenerateParams
from specllama.store.codec import changed, with_changes
from specllama.store.message_tree import START, StoredMessage, Tree
from specllama.store.open_session import OpenSession
from specllama.store.rounds import Logged, RoundLog
from specllama.store.sessions import SessionStore
from specllama.told import Told

FLUSH_S = 0.25
_UNBEGUN = Message("assistant", "")
_UNSTORED_STATS = ("text", "reasoning", "seams", "token_ids")


class Session:
    """One conversation with one engine at a time; not for use from two threads at once.

    Attributes:
        engine: may be replaced between replies (another model); a new round log begins then.
        last: the ``finish`` event of the last reply that ended by itself or was cancelled.
        log: the round log, None before the first reply or when logging is off.
    """

    def __init__(
        self,
        engine: EngineLike,
        store: SessionStore,
        *,
        params: GenerateParams | None = None,
        system: str = "",
        command: str = "chat",
        log_rounds: bool = True,
    ) -> None:
        self.last: Finished | None = None
        self._command = command
        self._log_rounds = log_rounds
        self._logged: Logged | None = None
        self.engine = engine
        self._store = store
        self._params = self._launched = params or GenerateParams()
        self._by_hand: dict[str, Any] = {}  # settings changed since, in any conversation
        self._lent: dict[str, Any] = {}
        self._launched_system = system
        self._open = OpenSession(store, system, {})
        self._notices_told = 0
        self._taken: list[int] = []  # where the path ended before each turn that was taken back
        self._writing: Callable[[], tuple[int, int, StoredMessage]] | None = None
        self._seed_chosen = False  # in the settings, since the last reply

    # ---- what it is

    @property
    def id(self) -> str | None:
        """The id in the store; None until the first message."""
        return self._open.id

    @property
    def title(self) -> str:
        return self._open.title

    @property
    def _tree(self) -> Tree:
        return self._open.tree

    @property
    def messages(self) -> list[Message]:
        """The turns so far, in their chosen versions, without the system prompt. A copy."""
        return [m.message for m in self._tree.chosen]

    @property
    def stored(self) -> dict[int, StoredMessage]:
        """The turns with their figures, by number (see ``Tree``)."""
        return {number: self._tree.messages[number] for number in self._tree.path}

    def version(self, index: int) -> tuple[int, int]:
        """Return (version of message ``index``, from 1; their number); a message past the end is
        new."""
        return self._tree.version_at(index)

    @property
    def engine(self) -> EngineLike:
        return self._engine

    @engine.setter
    def engine(self, engine: EngineLike) -> None:
        self.close()
        self._engine = engine
        self._logged = Logged(engine, command=self._command) if self._log_rounds else None

    @property
    def log(self) -> RoundLog | None:
        """The log of the rounds; None before the first reply, or if none are logged."""
        return None if self._logged is None else self._logged.log

    @property
    def system(self) -> str:
        return self._open.system

    @system.setter
    def system(self, text: str) -> None:
        self._open.configure(system=text)

    @property
    def params(self) -> GenerateParams:
        """The settings of the next reply. A change is stored with the conversation; what this
        object was made with is not."""
        return self._params

    @params.setter
    def params(self, params: GenerateParams) -> None:
        self._seed_chosen = self._seed_chosen or params.seed != self._params.seed
        now = changed(self._params, params)
        self._by_hand |= now
        self._lent = {name: value for name, value in self._lent.items() if name not in now}
        self._params = params
        self._open.configure(chosen=self._open.chosen | now)

    def lend(self, params: GenerateParams | None) -> None:
        """Use other settings as long as this conversation is on: not stored; None ends that."""
        own = with_changes(self._launched, self._open.chosen)
        self._params, self._lent = params or own, changed(own, params or own)

    @property
    def lent(self) -> bool:
        """True if a lent setting is still in use."""
        return bool(self._lent)

    # ---- what it does

    def send(self, text: str, *, cancel: Cancel | None = None) -> Iterator[Event]:
        """Ask the question and yield the engine's events. It is stored before this returns, as
        another version of one that was taken back (see ``edit``).

        A question that cannot be served at all (PromptTooLong and other UsageErrors, raised by the
        first ``next``) is taken back.

        Raises:
            UsageError: the text is empty.
        """
        if not text.strip():
            raise UsageError("the message is empty")
        leaf = self._tree.leaf
        return self._ask(text, leaf, cancel, next(reversed(self._tree.versions(leaf)), None))

    def retry(
        self, index: int | None = None, *, new_seed: bool = False, cancel: Cancel | None = None
    ) -> Iterator[Event]:
        """Answer a question again, with the seed of its reply unless another was set since.

        So the text stays the same if only the drafting changed. The former reply stays as another
        version, and is chosen again if the new one is stopped before its first character.

        Args:
            index: the question or its reply, by default the last.
            new_seed: take another seed: the next one if the settings fix it, else a drawn one.
        """
        path = self._tree.path
        if not path:
            raise UsageError("there is nothing to retry yet")
        at = self._tree.number(len(path) - 1 if index is None else index)
        former = at if self._tree.role(at) == "assistant" else self._tree.reply_to(at)
        after = at if former is None else self._tree.parents[former]
        return self._answer(cancel, after, seed=self._seed_again(former, new_seed))

    def continue_reply(
        self, *, answer: bool = False, cancel: Cancel | None = None
    ) -> Iterator[Event]:
        """Continue the last reply where it ended; ``answer``: a thought that is open ends now.

        One that was cut goes on with its seed and text; one that ended would end again with it.
        """
        last = self._tree.leaf
        if last == START or self._tree.role(last) != "assistant":
            raise UsageError("there is no reply to continue")
        seed = None if self._tree.messages[last].ended else self._seed_again(last)
        after = self._tree.parents[last]
        return self._answer(cancel, after, into=last, answer=answer, seed=seed)

    def undo(self) -> str:
        """Go back to before the last question; return it. It stays as another version of the next
        one."""
        path = self._tree.path
        asked = next((n for n in reversed(path) if self._tree.role(n) == "user"), None)
        if asked is None:
            raise UsageError("there is nothing to undo")
        taken = [*self._taken, self._tree.leaf]
        self._choose(self._tree.parents[asked])
        self._taken = taken
        return self._tree.messages[asked].content

    @property
    def taken_back(self) -> bool:
        """True if ``redo`` can bring back a turn: nothing was written or chosen since."""
        return bool(self._taken)

    def redo(self) -> str:
        """Bring back the turn that ``undo`` took back last, if one is ``taken_back``; return its
        question."""
        at, (*taken, leaf) = len(self._tree.path), self._taken
        self._choose(leaf)
        self._taken = taken
        return self.messages[at].content

    def edit(self, index: int, text: str, *, cancel: Cancel | None = None) -> Iterator[Event]:
        """Write another version of message ``index`` (from 0).

        An edited question is answered with the seed of the former reply, unless another was set
        since, or coins decide (see ``rules``). An edited reply is left for ``continue_reply``, and
        the iterator is empty.
        """
        number = self._tree.number(index)
        if not text.strip():
            raise UsageError("the message is empty")
        before, after = self._tree.messages[number], self._tree.parents[number]
        if before.role == "user":
            return self._ask(text, after, cancel, number)
        edited = replace(before, content=text, state="partial", stats=None)
        self._put(self._tree.free, after, edited)
        return iter(())

    def show_version(self, index: int | None, step: int) -> int:
        """Choose the version before (-1) or after (1) of message ``index``, with the newest
        messages after it. By default go from each version of the conversation to the one that
        was written before or after it: a turn that was taken back, then the versions of the last
        message, then those of the ones before. Returns the index of the message that changed.

        Raises:
            UsageError: there is none.
        """
        tree, before = self._tree, self._tree.path
        if index is None:
            to = tree.beside(step)
        else:
            number = tree.number(index)
            versions = tree.versions(tree.parents[number])
            at = versions.index(number) + step
            to = tree.end_of(versions[at]) if 0 <= at < len(versions) else None
        if to is None:
            raise UsageError(f"there is no {'later' if step > 0 else 'earlier'} version")
        self._choose(to)
        pairs = enumerate(zip(before, tree.path, strict=False))
        return next((i for i, (old, new) in pairs if old != new), min(len(before), len(tree.path)))

    def clear(self) -> None:
        """Begin a new conversation; the old one stays in the store.

        Settings that were changed by hand stay. System prompt and settings that came with a stored
        conversation do not.
        """
        self._continue(OpenSession(self._store, self._launched_system, dict(self._by_hand)))

    # ---- keeping it

    def load(self, selector: str = "last") -> None:
        """Continue a stored conversation, with its system prompt and settings.

        Raises:
            StoreError, UsageError: not exactly one fits the selector.
        """
        self._continue(OpenSession.stored(self._store, selector))

    def _continue(self, one: OpenSession) -> None:
        self._open = one
        self.last = None
        self._taken = []
        self._lent = {}
        self._params = with_changes(self._launched, one.chosen)

    def export(self, form: Literal["md", "json"] = "md") -> str:
        """Write the conversation; a reply that is being written is in it as far as it came."""
        writing, tree = self._writing, self._tree
        tree = Tree(dict(tree.messages), dict(tree.parents), tree.leaf)
        number, after, reply = writing() if writing is not None else (0, 0, None)
        if reply is not None and (reply.content or reply.reasoning):
            tree.put(number, after, reply)
        return self._open.export(form, self._params, tree)

    def close(self) -> None:
        """Close the round log; the engine and the store belong to the caller."""
        if self._logged is not None:
            self._logged.close()

    # ---- inside

    def _ask(
        self, text: str, after: int, cancel: Cancel | None, instead: int | None
    ) -> Iterator[Event]:
        """Ask the question; ``instead`` is the message that it replaces."""
        seed = None
        if instead is not None and self._params.verify == "match":  # coins are not thrown twice
            seed = self._seed_again(self._tree.reply_to(instead))
        former, question = self._tree.leaf, self._tree.free
        self._put(question, after, StoredMessage("user", text))
        return self._answer(cancel, question, seed=seed, refused=(question, former))

    def _answer(
        self,
        cancel: Cancel | None,
        after: int,
        *,
        into: int | None = None,
        answer: bool = False,
        seed: int | None = None,
        refused: tuple[int, int] | None = None,
    ) -> Iterator[Event]:
        """Generate the reply that follows message ``after``.

        If no text comes, the path is chosen again that was chosen before.

        Args:
            into: the reply to go on with, instead of a new one.
            answer: end its thought.
            seed: instead of the one in the settings.
            refused: a question to drop if the engine refuses the request as such, and where the
                path ends then.
        """
        told = Told()
        flushed_s = time.monotonic()
        self._seed_chosen = False
        params = self._params if seed is None else self._params.replace(seed=seed)
        if answer:
            params = params.replace(think_budget=0)
        tree = self._tree
        before, tree.leaf = tree.leaf, after
        # what others follow stays as they know it
        number = tree.free if into is None or tree.versions(into) else into
        begun = _UNBEGUN if into is None else tree.messages[into].message

        def reply() -> StoredMessage:
            end = told.finished
            return StoredMessage(
                "assistant",
                begun.content + told.text,
                "done" if told.whole else "partial",
                _figures(told, counted=into is None),
                begun.reasoning + told.reasoning,
                None if end is None else end.seams,
            )

        self._writing = lambda: (number, after, reply())
        try:
            for event in self._events(owned(self, params), cancel, begun):
                new = told.take(event)
                self.last = new.finished or self.last
                some = told.text or told.reasoning
                if some and time.monotonic() - flushed_s > FLUSH_S:
                    self._open.keep(number, after, reply())
                    flushed_s = time.monotonic()
                yield from self._store_notices()
                yield event
        except UsageError:
            if refused is not None:
                self._open.drop(*refused)
                before = refused[1]
            raise
        finally:
            self._writing = None
            # an empty reply counts: roles must alternate
            if told.text or told.reasoning or told.whole:
                self._put(number, after, reply())
            else:
                tree.leaf = before
        yield from self._store_notices()

    def _seed_again(self, former: int | None, new: bool = False) -> int | None:
        """Return the seed for writing reply ``former`` again; None leaves it to the settings."""
        used = None if former is None else self._tree.messages[former].seed
        if self._seed_chosen or used is None:
            return None
        if not new:
            return used
        return None if self._params.seed is None else (used + 1) % SEED_LIMIT

    def _events(
        self, params: GenerateParams, cancel: Cancel | None, begun: Message
    ) -> Iterator[Event]:
        """Yield the engine's events, through the round log; drop old turns that no longer fit."""
        head = [Message("system", self.system)] if self.system else []
        tail = [begun] if begun.content or begun.reasoning else []
        turns, engine = self.messages, self._logged or self._engine
        try:
            whole = _answered([*head, *turns, *tail])
            yield from engine.generate(whole, params, cancel=cancel)
        except PromptTooLong:
            if params.on_full != "shift" or not self._engine.info.target.path:
                raise  # another engine is not asked to count
            n_ctx = self._engine.info.target.n_ctx
            room = n_ctx - min(params.max_tokens or n_ctx, n_ctx // 4)
            kept = _newest_that_fit(self._engine, room, head, turns, tail)
            if not kept:
                raise
            yield Notice(
                f"the oldest {len(turns) - len(kept)} messages no longer fit the context and "
                "are left out",
                "warning",
                "context",
            )
            some = _answered([*head, *kept, *tail])
            yield from engine.generate(some, params, cancel=cancel)

    def _put(self, number: int, after: int, message: StoredMessage) -> None:
        self._taken = []
        self._open.put(number, after, message)

    def _choose(self, leaf: int) -> None:
        self._taken = []
        self._open.choose(leaf)

    def _store_notices(self) -> Iterator[Notice]:
        """Yield the store's notices since the last call."""
        while self._notices_told < len(self._store.notices):
            self._notices_told += 1
            yield Notice(self._store.notices[self._notices_told - 1], "warning", "store")


def _figures(told: Told, *, counted: bool) -> dict[str, Any] | None:
    """Return the data that is stored with a reply's text; an unfinished one can be retried, too.

    Args:
        counted: count the tokens of an unended one, too: all of them are of this request.
    """
    if told.finished is not None:
        end = told.finished.to_dict()
        return {name: value for name, value in end.items() if name not in _UNSTORED_STATS}
    if told.started is None:
        return None
    counted = counted and not told.started.unknown
    seed = told.started.to_dict()["seed"]
    emitted = sum(len(done.emitted) for done in told.rounds)
    return {"seed": seed} | ({"emitted": emitted} if counted else {})


def _newest_that_fit(
    engine: EngineLike, room: int, head: list[Message], turns: list[Message], tail: list[Message]
) -> list[Message]:
    """Return the longest tail of a conversation, from a question on, that ``room`` tokens hold."""
    for start in range(1, len(turns)):
        if turns[start].role == "user":
            kept = turns[start:]
            with suppress(PromptTooLong):  # it is not even counted
                if engine.count_tokens(_answered([*head, *kept, *tail])) <= room:
                    return kept
    return []


def owned(session: Session, params: GenerateParams) -> GenerateParams:
    """Return the parameters for a request of this conversation: its state is kept if it is
    stored."""
    return params.replace(owner=session.id or "" if session._store.keeps else "")


def upcoming(session: Session, text: str, index: int | None = None) -> list[Message]:
    """Return the messages for the engine with ``text`` as the next one, or as another version of
    message ``index``."""
    head = [Message("system", session.system)] if session.system else []
    return _answered([*head, *session.messages[:index], Message("user", text)])


def _answered(messages: Sequence[Message]) -> list[Message]:
    """Return the turns as a model may see them: a question without a reply gets an empty one."""
    out: list[Message] = []
    for message in messages:
        if out and out[-1].role == message.role == "user":
            out.append(Message("assistant", ""))
        out.append(message)
    return out
