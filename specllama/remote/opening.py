"""The opening of any server as an engine; its kind is detected unless given."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from typing import Any

from specllama.remote.address import Address
from specllama.remote.board import Board, ServerWatch
from specllama.remote.engine import RemoteEngine
from specllama.remote.foreign import ForeignEngine
from specllama.remote.known import AUTO, recognise
from specllama.remote.wire import Look


def open_remote(
    address: Address | str, kind: str = AUTO, model: str | None = None, *, draft_model: str = ""
) -> ForeignEngine:
    """Open the engine at an address; one of ours is a ``RemoteEngine``.

    Args:
        kind: one of ``known.KINDS``; by default that of the address, which is found out.
        model: which of its models is asked; by default that of the address, else the only one.

    Raises:
        UsageError: that is no address, or the server has several models and none was named.
        EngineDied: nobody answers there. EngineError: it lets nobody in, or is no engine.
    """
    if isinstance(address, str):
        address = Address(address)
    if kind != AUTO:
        address = replace(address, kind=kind)
    if model is not None:
        address = replace(address, model=model)
    look = Look(address)
    with closing(look):
        found_kind, found = recognise(look, address.kind)
    if found_kind.name == "specllama":
        return RemoteEngine(address)
    return ForeignEngine(address, found_kind, found, draft_model=draft_model)


def watched(address: Address) -> tuple[ServerWatch, Iterator[dict[str, Any]]]:
    """Return a view of a server, and its events from now on; no model of it need be named.

    Raises:
        SpecllamaError: as ``open_remote``; the events, when nobody answers any more.
    """
    look = Look(address)
    with closing(look):
        kind, found = recognise(look, address.kind)
    if kind.name == "specllama":  # all its models at once, and none is loaded for it
        return Board(), address.events()
    with ForeignEngine(replace(address, model=address.model or "any"), kind, found) as engine:
        return engine.watch()
