"""Servers of any engine as arms of a comparison.

They run already, and are used as a client uses them: they get the same messages, limits, seeds and
sampler settings; each puts the messages into its own chat template. Times are those of the client,
from the request on.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from specllama.bench.experiment import RunFigures, Task
from specllama.errors import UsageError
from specllama.remote.address import Address
from specllama.remote.foreign import ForeignEngine
from specllama.remote.remote_engine import open_remote
from specllama.settings.params import GenerateParams

LONG = 24  # tokens of a reply whose pace tells something: an event may hold a whole round
Count = Callable[[str], int]
# what changes nothing at temperature 0, and is refused by some engines while they draft
IDLE: dict[str, Any] = {"top_k": 0, "top_p": 1.0, "min_p": 0.0}


@dataclass(slots=True)
class RemoteArm:
    """A server under some parameters.

    Args:
        params: sampling; temperature, seed and length come from the task.
        speculation: on or off, where a request can say so; None leaves it to the server.
        count: tokens of a text, for replies that the server does not count.
    """

    engine: ForeignEngine
    params: GenerateParams
    speculation: bool | None = None
    name: str = ""
    count: Count | None = None

    def __post_init__(self) -> None:
        state = {None: "", False: " plain", True: " drafting"}[self.speculation]
        self.name = self.name or self.engine.kind.title + state
        self.params = self.params.replace(from_card=())

    def run(self, task: Task, repetition: int, *, alone: bool = True) -> RunFigures:
        """Run a task; ``alone``, the server's counters replace figures that the answer lacks."""
        chosen = {"temperature": task.temperature} | ({} if task.temperature else IDLE)
        params = task.wish(self.params, sampling=replace(self.params.sampling, **chosen))
        answered = self.engine.ask(
            task.prompt.content, params, stream=True, speculation=self.speculation, counted=alone
        )
        first_s, draft = answered.first_s or answered.seconds, answered.draft
        text, tokens = answered.reasoning + answered.text, answered.tokens
        if tokens is None:
            tokens = 0 if self.count is None else self.count(text)
        return RunFigures.told(
            self.name,
            task,
            repetition,
            tokens=tokens,
            decode_s=answered.seconds - first_s if tokens >= LONG else 0.0,
            total_s=answered.seconds,
            ttft_s=first_s,
            drafted=None if draft is None else draft.drafted,
            accepted=None if draft is None else draft.accepted,
            text=text,
        )

    def close(self) -> None:
        self.engine.close()

    def to_dict(self) -> dict[str, str]:
        """Describe the server, as far as it reports itself: for the provenance of a report."""
        engine = self.engine
        return {
            "arm": self.name,
            "url": engine.address.url,
            "engine": engine.name,
            "model": engine.model.id,
            "flags": engine.flags,
        }


def remote_arms(
    server: Address, params: GenerateParams, *, ignore_eos: bool, count: Count | None = None
) -> list[RemoteArm]:
    """Open an arm for a server; two, plain and drafting, if a request can switch it.

    Raises:
        SpecllamaError: nobody answers there.
        UsageError: it ends its replies before the length that every arm is to write.
    """
    engine = open_remote(server)
    if ignore_eos and "ignore_eos" not in engine.kind.fields:
        engine.close()
        raise UsageError(
            f"{engine.kind.title} ends a reply where its model does, and the other arms go on",
            "compare whole replies: --no-ignore-eos",
        )
    ways = (False, True) if engine.kind.switches else (None,)
    return [RemoteArm(engine, params, speculation=way, count=count) for way in ways]
