"""Any server as an engine: its kind is detected unless given.

A running ``specllama serve`` is one whose events come round by round; with it, a second window need
not load the model again.
"""

from __future__ import annotations

import threading
import uuid
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, suppress
from dataclasses import replace
from time import sleep
from typing import Any

import httpx2
import msgspec

from specllama.cancel import Cancel
from specllama.errors import EngineError, UsageError
from specllama.events import Event, event_from_dict
from specllama.interface import EngineInfo, Message, Prompt
from specllama.remote.address import KEY_HINT, Address, Look, checked, code_of, error_of, events_of
from specllama.remote.board import Board, ServerWatch
from specllama.remote.foreign import ForeignEngine
from specllama.remote.kinds import engines
from specllama.remote.kinds.kind import Found, Kind
from specllama.settings.params import GenerateParams
from specllama.store.codec import params_to_dict

_STOP_S = 5.0  # the connection that carries a stop is not closed under it
_LOADING_S = 0.5  # between two looks at a server that loads its model


AUTO = "auto"
KINDS: dict[str, Kind] = {
    kind.name: kind
    for kind in (
        engines.SPECLLAMA, engines.LLAMA_SERVER, engines.SGLANG, engines.LMSTUDIO, engines.VLLM,
        engines.TRTLLM, engines.TGI, engines.OLLAMA, engines.MLX_LM, engines.TRANSFORMERS,
        engines.OPENAI
    )
}  # fmt: skip
"""In the order in which they are recognised: some answer as others do. SGLang has Ollama's paths,
everybody has OpenAI's."""


class RemoteEngine(ForeignEngine):
    """A running server of ours as an engine (see ``EngineLike``): its events come round by round.
    While the server loads its model, this one waits. Several threads may ask at once.

    Raises:
        UsageError: that is no address.
        EngineDied: no server answers there, or one that is no specllama.
        EngineError: it does not let us in.
    """

    def __init__(self, address: Address) -> None:
        super().__init__(address, engines.SPECLLAMA, Found())
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


def open_remote(address: Address | str) -> ForeignEngine:
    """Open the engine at an address; one of ours is a ``RemoteEngine``.

    Raises:
        UsageError: that is no address, or the server has several models and none was named.
        EngineDied: nobody answers there. EngineError: it lets nobody in, or is no engine.
    """
    if isinstance(address, str):
        address = Address(address)
    kind, found = _recognise(address)
    if kind.name == "specllama":
        return RemoteEngine(address)
    return ForeignEngine(address, kind, found)


def watched(address: Address) -> tuple[ServerWatch, Iterator[dict[str, Any]]]:
    """Return a view of a server, and its events from now on; no model of it need be named.

    Raises:
        SpecllamaError: as ``open_remote``; the events, when nobody answers any more.
    """
    kind, found = _recognise(address)
    if kind.name == "specllama":  # all its models at once, and none is loaded for it
        return Board(), address.events()
    with ForeignEngine(replace(address, model=address.model or "any"), kind, found) as engine:
        return engine.watch()


def _recognise(address: Address) -> tuple[Kind, Found]:
    """Find the kind of engine that answers, and its report of itself; trust a kind that is given.

    Raises:
        UsageError: there is no such kind.
        EngineDied: nobody answers. EngineError: nothing that answers there is known.
    """
    name = address.kind
    if name not in (AUTO, *KINDS):
        raise UsageError(f"there is no kind of server {name!r}", f"one of {', '.join(KINDS)}")
    with closing(Look(address)) as look:
        if name != AUTO:
            return KINDS[name], KINDS[name].recognise(look) or Found()
        for kind in KINDS.values():
            found = kind.recognise(look)
            if found is not None and (kind.name != "openai" or found.models):
                return kind, found
    if look.locked:
        raise EngineError(f"the server at {address.url} wants a key", KEY_HINT)
    raise EngineError(
        f"what answers at {address.url} is no engine that is known",
        "check the address; if it speaks as OpenAI does: --remote-kind openai --remote-model ID",
    )
