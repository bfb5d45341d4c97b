"""llama.cpp's own rendering of a chat template: its server, on a small model of random weights."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from peer_server import LlamaServer

from specllama.errors import EngineError
from specllama.interface import Message


class Refused(Exception):
    """llama.cpp did not take the template or the chat; the text says why."""


def find_server(folder: Path) -> Path | None:
    """A built ``llama-server``: $LLAMA_SERVER, or in the places where llama.cpp's build puts it."""
    if named := os.environ.get("LLAMA_SERVER"):
        return Path(named)
    places = (*folder.glob("build*/bin"), folder / "bin", folder)
    found = (place / name for place in places for name in ("llama-server", "llama-server.exe"))
    return next((path for path in found if path.is_file()), None)


class TemplateServer:
    """``llama-server`` with one chat template.

    Raises:
        Refused: it ended before it was ready.
    """

    def __init__(self, server: Path, model: Path, template: Path) -> None:
        command = [str(server), "-m", str(model), "--chat-template-file", str(template)]
        command += ["-c", "512", "-t", "1", "--jinja", "--no-warmup"]
        self._server = LlamaServer("llama-server", command)
        try:
            self._server.start()
        except EngineError as error:
            raise Refused(str(error)) from None

    def render(self, messages: Sequence[Message]) -> str:
        """The prompt of a chat.

        Raises:
            Refused: the template raised.
        """
        body = {"messages": [m.to_dict() for m in messages]}
        try:
            return str(self._server.ask("/apply-template", body)["prompt"])
        except EngineError as error:
            raise Refused(str(error)) from None

    def close(self) -> None:
        self._server.close()

    def __enter__(self) -> TemplateServer:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
