"""Drives conversations: runs what they ask for and hands back what they say.

A pass is run only when nobody has anything to say and everybody's next wish is known, those of
drafting models first: lanes of one pool share it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import cast

from specllama.backend.base import Lane, Part, Pool
from specllama.engine.conversation import Saying
from specllama.errors import ContextFull, EngineError
from specllama.events import Event, Finished
from specllama.speculative.asking import Ask, Pass, grant

Said = tuple[int, Event | Exception]


@dataclass(slots=True)
class _Running:
    id: int
    saying: Saying[None]
    on_end: Callable[[], None]
    ask: Ask | None = None


class Scheduler:
    """Conversations that are being written, by id.

    Args:
        target: the pool that is asked last, when every draft is ready.
    """

    def __init__(self, target: Pool) -> None:
        self._target = target
        self._running: dict[int, _Running] = {}

    def __len__(self) -> int:
        return len(self._running)

    def __contains__(self, id: int) -> bool:
        return id in self._running

    def add(self, id: int, saying: Saying[None], on_end: Callable[[], None]) -> None:
        """A conversation begins; ``on_end`` is called once when it is over, however it ends."""
        self._running[id] = _Running(id, saying, on_end)

    def step(self) -> list[Said]:
        """Go on until somebody says something: at most one event of each conversation.

        An exception is what ended its conversation; the others go on. [] when none is left.
        """
        while self._running:
            if len(self._running) == 1:
                [one] = self._running.values()
                saying = self._resume(one, None if one.ask is None else _tried(one.ask))
                if saying is not None:
                    return [(one.id, saying)]
                continue
            said = [
                (one.id, saying)
                for one in list(self._running.values())
                if one.ask is None and (saying := self._resume(one, None)) is not None
            ]
            if said := said or list(self._answers()):
                return said
        return []

    def _answers(self) -> Iterator[Said]:
        """Answer what can be answered now; what is said to it."""
        asking = [(one, _pool_of(one.ask)) for one in self._running.values()]
        answers = [(one, _tried(one.ask)) for one, pool in asking if pool is None]
        if not answers:
            # drafting models first: the target's pass is the one that all wait for
            pools = [pool for _, pool in asking if pool is not None]
            pool = next((pool for pool in pools if pool is not self._target), self._target)
            answers = _shared(pool, [one for one, its in asking if its is pool])
            for one, _ in answers:  # who had to wait comes first in the next pass
                self._running[one.id] = self._running.pop(one.id)
        for one, answer in answers:
            saying = self._resume(one, answer)
            if saying is not None:
                yield one.id, saying

    def end(self, id: int) -> None:
        """Stop a conversation where it is."""
        one = self._running.get(id)
        if one is not None:
            try:
                one.saying.close()
            finally:
                self._over(one)

    def _resume(self, one: _Running, answer: object) -> Event | Exception | None:
        """Send an answer, or raise an error where it was asked for; what is said then, if any.

        Raises:
            KeyboardInterrupt, SystemExit: as they come; the conversation is over.
        """
        one.ask = None
        try:
            if isinstance(answer, BaseException):
                item = one.saying.throw(answer)
            else:
                item = one.saying.send(answer)
        except StopIteration:
            self._over(one)
            return None
        except Exception as error:
            self._over(one)
            return error
        except BaseException:
            self._over(one)
            raise
        if isinstance(item, Ask):
            one.ask = item
            return None
        if isinstance(item, Finished):  # its last word
            self.end(one.id)
        return item

    def _over(self, one: _Running) -> None:
        if self._running.pop(one.id, None) is not None:
            one.on_end()


def _pool_of(ask: Ask | None) -> Pool | None:
    """Where a pass could be shared with others."""
    return cast(Lane, ask.lane).pool if isinstance(ask, Pass) else None


def _tried(ask: Ask | None) -> object:
    """The answer to it, or the error that it ended with."""
    assert ask is not None
    try:
        return grant(ask)
    except BaseException as error:
        return error


def _shared(pool: Pool, asking: Sequence[_Running]) -> list[tuple[_Running, object]]:
    """Answer passes of one pool together, as far as one pass takes them."""
    together: list[_Running] = []
    parts: list[Part] = []
    tokens = rows = leaves = 0
    most = pool.kernels.exact_rows if pool.kernels.exact_rows > 1 else pool.max_rows
    for one in asking:
        part = _part(one.ask)
        n = len(part.tokens)
        tokens += n
        rows += n if part.outputs == "all" else part.outputs == "last"
        leaves += 0 if part.parents is None else n
        if parts and (tokens > pool.n_batch or rows > most or leaves > pool.free_leaves):
            break
        together.append(one)
        parts.append(part)
    if len(parts) <= 1:
        return [(one, _tried(one.ask)) for one in together]
    for one in together:
        ask = cast(Pass, one.ask)
        if ask.keep is not None:
            cast(Lane, ask.lane).rollback(ask.keep)
    try:
        return list(zip(together, pool.run(parts), strict=True))
    except (ContextFull, EngineError, ValueError):
        # one of them cannot have it: each hears for itself
        return [(one, _tried(one.ask)) for one in together]


def _part(ask: Ask | None) -> Part:
    assert isinstance(ask, Pass)
    return Part(cast(Lane, ask.lane), ask.tokens, ask.outputs, ask.parents)
