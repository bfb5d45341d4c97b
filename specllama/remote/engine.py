"""A running ``specllama serve`` as an engine: a second window need not load the model again."""

from __future__ import annotations

import threading
import uuid
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, suppress
from time import sleep
from typing import Any

import httpx2
import msgspec

from specllama.cancel import Cancel
from specllama.events import Event, event_from_dict
from specllama.interface import EngineInfo, Message, Prompt
from specllama.remote.address import Address, checked, code_of, error_of, events_of
from specllama.remote.board import Board, ServerWatch
from specllama.remote.foreign import ForeignEngine
from specllama.remote.kinds import specllama
from specllama.remote.kinds.kind import Found
from specllama.settings.params import GenerateParams
from specllama.store.codec import params_to_dict

_STOP_S = 5.0  # the connection that carries a stop is not closed under it
_LOADING_S = 0.5  # between two looks at a server that loads its model


class RemoteEngine(ForeignEngine):
    """A running server of ours as an engine (see ``EngineLike``): its events come round by round.
    While the server loads its model, this one waits. Several threads may ask at once.

    Raises:
        UsageError: that is no address.
        EngineDied: no server answers there, or one that is no specllama.
        EngineError: it does not let us in.
    """

    def __init__(self, address: Address) -> None:
        super().__init__(address, specllama.KIND, Found())
        self._here = address.client()
        try:
            with self.address.spoken():
                where = self.address.at("info")
                named = {"load": "true", **({"model": address.model} if address.model else {})}
                while code_of(answer := self._here.get(where, params=named)) == "loading":
                    sleep(_LOADING_S)
                self._info = msgspec.convert(checked(answer).json(), EngineInfo)
        except BaseException:
            self.close()
            raise

    @property
    def info(self) -> EngineInfo:
        return self._info

    def close(self) -> None:
        super().close()
        self._here.close()

    def watch(self) -> tuple[ServerWatch, Iterator[dict[str, Any]]]:
        """See ``ForeignEngine.watch``: its lanes, round by round."""
        return Board(), self.address.events()

    def count_tokens(self, prompt: str | Sequence[Message]) -> int:
        with self.address.spoken():
            answer = self._here.post(self.address.at("count"), json=self._question(prompt))
            return int(checked(answer).json()["tokens"])

    def generate(
        self, prompt: Prompt, params: GenerateParams, *, cancel: Cancel | None = None
    ) -> Iterator[Event]:
        """See ``EngineLike.generate``."""
        id = uuid.uuid4().hex
        body = {**self._question(prompt), "params": params_to_dict(params), "id": id}
        cancel = cancel or Cancel()
        stopping: list[threading.Thread] = []

        def stop() -> None:  # the caller need not wait
            stopping.append(threading.Thread(target=self._stop, args=(id,), daemon=True))
            stopping[-1].start()

        def stopped() -> None:
            for thread in stopping:
                thread.join(_STOP_S)

        with (
            ExitStack() as over,
            self.address.spoken(),
            self._here.stream("POST", self.address.at("generate"), json=body) as answer,
        ):
            checked(answer)
            over.callback(stopped)
            with cancel.calling(stop):
                for told in events_of(answer.iter_bytes()):
                    if told.get("type") == "error":
                        raise error_of(told["error"])
                    yield event_from_dict(told)

    def _stop(self, id: str) -> None:
        with suppress(httpx2.HTTPError, RuntimeError):  # the client may be closed by now
            self._here.post(self.address.at("stop"), json={"id": id})

    def _question(self, prompt: Prompt) -> dict[str, Any]:
        named = {"model": self.address.model} if self.address.model else {}
        if isinstance(prompt, str):
            return {**named, "text": prompt}
        turns = [one for one in prompt if isinstance(one, Message)]
        if turns:
            told = [{**turn.to_dict(), "seams": turn.seams} for turn in turns]
            return {**named, "messages": told}
        return {**named, "ids": list(prompt)}
