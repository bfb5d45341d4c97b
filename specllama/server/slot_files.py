"""llama-server's slots on disk: ``POST /slots/{id}?action=save|restore|erase``."""

from __future__ import annotations

import re
from time import perf_counter
from typing import Any, cast

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from specllama.errors import EngineDied, SpecllamaError
from specllama.interface import SlotAction
from specllama.server.exchange import Json
from specllama.server.refusals import not_offered, wrong
from specllama.server.service import Row, Service

# of a file in one folder, on any system
_NAME = re.compile(r"(?!.*[. ]$)[^\s./\\:*?\"<>|\x00-\x1f\x7f][^/\\:*?\"<>|\x00-\x1f\x7f]{0,200}")
_DONE = {"save": ("saved", "written"), "restore": ("restored", "read")}


class SlotRequest(msgspec.Struct):
    filename: str = ""


def rows(service: Service) -> list[Row]:
    async def act(request: Request) -> Response:
        service.require_slots()
        folder = service.slot_folder
        if folder is None:
            raise not_offered("slots on disk", "this server was started without --slot-save-path")
        id, action = request.path_params["id"], request.query_params.get("action", "")
        queue = (await service.named(request)).queue
        if not (id.isascii() and id.isdecimal() and int(id) < queue.lanes):
            raise wrong("id_slot", f"Invalid slot ID: 0 to {queue.lanes - 1}")
        if action not in ("save", "restore", "erase"):
            raise wrong("action", "Invalid action: save, restore or erase")
        name = ""
        if action != "erase":
            name = (await service.read(request, SlotRequest)).filename
            if not _NAME.fullmatch(name):
                raise wrong("filename", "Invalid filename: a plain name, without a folder")
            queue = (await service.model(request)).queue
        path = folder / name if name else None
        begin = perf_counter()
        try:
            tokens, n_bytes = await queue.slot(cast(SlotAction, action), int(id), path)
        except EngineDied:
            raise
        except SpecllamaError as error:
            raise wrong("id_slot", f"Unable to {action} slot: {error.message}") from None
        return Json(_told(action, int(id), name, tokens, n_bytes, perf_counter() - begin))

    return [("POST /slots/{id}", act)]


def _told(
    action: str, id: int, name: str, tokens: int, n_bytes: int, seconds: float
) -> dict[str, Any]:
    if action == "erase":
        return {"id_slot": id, "n_erased": tokens}
    done, moved = _DONE[action]
    return {
        "id_slot": id,
        "filename": name,
        f"n_{done}": tokens,
        f"n_{moved}": n_bytes,
        "timings": {f"{action}_ms": seconds * 1e3},
    }
