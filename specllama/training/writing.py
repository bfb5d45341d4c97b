"""The replies of a target, several at once, with the features that the same passes leave.

Each reply has a lane of the target's pool, and every pass a token of each; a prompt is read beside
the tokens of the others. A reply is drawn as the engine draws it: with its prompt, settings and
seed the engine writes the same text. The passes that write it leave its features, so that it need
not be read again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field

from specllama.backend.base import Lane, Part
from specllama.errors import Cancelled, PromptTooLong
from specllama.settings.params import GenerateParams, SamplingParams
from specllama.speculative.noise import draw
from specllama.speculative.sampling import SamplerChain
from specllama.training.corpus import Sample
from specllama.training.features import Features, Gathering, Teacher
from specllama.training.questions import Exercise

LONGEST = 256  # tokens of a reply
LEAST_CUT = 32  # of one that is cut by the end of the writing


@dataclass(slots=True)
class _Writing:
    """A reply that is being written. ``ahead``: tokens that the lane has not read."""

    asked: Exercise
    prompt: tuple[int, ...]
    lane: Lane
    gathering: Gathering
    chain: SamplerChain
    ahead: list[int]
    reply: list[int] = field(default_factory=list)
    over: bool = False

    @property
    def sample(self) -> Sample:
        one = self.asked
        side = (one.id, one.kind, one.held_out)
        return Sample(*side, self.prompt, tuple(self.reply), one.seed, one.temperature)


class Writer:
    """A writer of replies.

    Args:
        longest: tokens of a reply, at most.
    """

    def __init__(self, teacher: Teacher, longest: int = LONGEST) -> None:
        self._teacher, self.longest = teacher, longest
        self._room = teacher.pool.n_ctx // teacher.lanes - longest  # for a prompt

    def write(
        self, asked: Iterable[Exercise], until: Callable[[], bool]
    ) -> Iterator[tuple[Sample, Features]]:
        """Yield replies as they end, until ``asked`` ends or ``until`` returns true. What has been
        written of others by then is kept, but for short beginnings.

        Prompts that are too long are passed over.

        Raises:
            EngineError: the target cannot be evaluated.
        """
        waiting, running, lanes = iter(asked), list[_Writing](), self._teacher.lanes
        try:
            with suppress(Cancelled):
                while not until():
                    while len(running) < lanes and (one := self._next(waiting)):
                        running.append(one)
                    if not running:
                        return
                    self._pass(running)
                    for one in [one for one in running if one.over and not one.ahead]:
                        yield one.sample, one.gathering.features(one.sample)
                        running.remove(one)
                        one.lane.close()
            for one in running:
                if (read := len(one.reply) - len(one.ahead)) >= LEAST_CUT:
                    del one.reply[read:]
                    yield one.sample, one.gathering.features(one.sample)
        finally:
            for one in running:
                one.lane.close()

    def _next(self, waiting: Iterator[Exercise]) -> _Writing | None:
        """Begin the next reply."""
        teacher = self._teacher
        for asked in waiting:
            params = GenerateParams(sampling=SamplingParams(temperature=asked.temperature))
            try:
                prepared = teacher.prompting.prepare(asked.messages, params, n_ctx=self._room)
            except PromptTooLong:
                continue
            ids = prepared.ids
            chain = teacher.chains.chain(params, asked.seed, ids, prepared.position)
            lane = teacher.open_lane()
            try:
                gathering = teacher.gathering(lane, ids)
            except BaseException:
                lane.close()
                raise
            return _Writing(asked, tuple(ids), lane, gathering, chain, ids[gathering.first :])
        return None

    def _pass(self, running: list[_Writing]) -> None:
        """Run one pass of all replies: what fits of each one's tokens, its last one first of all.

        The last token of a reply is read as well: its features belong to the text.
        """
        room = self._teacher.rows - len(running)
        parts: list[Part] = []
        for one in running:
            n = min(len(one.ahead), 1 + room)
            room -= n - 1
            parts.append(Part(one.lane, one.ahead[:n], "all"))
        self._teacher.pool.run(parts)
        for one, part in zip(running, parts, strict=True):
            one.gathering.take(part.rows)
            del one.ahead[: len(part.tokens)]
            if not one.ahead and not one.over:
                token, _ = draw(one.chain.law(part.rows[-1]), one.asked.seed, one.chain.position)
                one.chain.advance(token)
                one.reply.append(token)
                one.ahead.append(token)
                one.over = self._teacher.vocab.is_eog(token) or len(one.reply) >= self.longest
