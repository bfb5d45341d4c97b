"""llama.cpp's own rendering of a chat template: its server, on a small model of random weights."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from pathlib import Path

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
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self._url = f"http://127.0.0.1:{probe.getsockname()[1]}"
        port = self._url.rpartition(":")[2]
        self._log = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115
        options = ["--host", "127.0.0.1", "--port", port, "--jinja", "--no-warmup"]
        self._process = subprocess.Popen(
            [
                server,
                "-m",
                model,
                "--chat-template-file",
                template,
                "-c",
                "512",
                "-t",
                "1",
                *options,
            ],
            stdout=self._log,
            stderr=subprocess.STDOUT,
        )
        for _ in range(600):
            if self._process.poll() is not None:
                self._log.seek(0)
                lines = self._log.read().strip().splitlines()
                told = [line for line in lines if "error" in line.lower()]
                raise Refused((told or lines or ["no word"])[-1][:200])
            try:
                if self._ask("/health") is not None:
                    return
            except (OSError, Refused):
                time.sleep(0.05)
        self.close()
        raise Refused("the server did not become ready")

    def render(self, messages: Sequence[Message]) -> str:
        """The prompt of a chat.

        Raises:
            Refused: the template raised.
        """
        answer = self._ask("/apply-template", {"messages": [m.to_dict() for m in messages]})
        return str(answer["prompt"])

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        self._log.close()

    def __enter__(self) -> TemplateServer:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _ask(self, path: str, body: object = None) -> dict[str, object]:
        request = urllib.request.Request(
            self._url + path,
            None if body is None else json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        )
        try:
            with urllib.request.urlopen(request, timeout=30) as reply:
                answer: dict[str, object] = json.load(reply)
                return answer
        except urllib.error.HTTPError as error:
            text = error.read().decode("utf-8", "replace")
            try:
                text = json.loads(text)["error"]["message"]
            except (ValueError, KeyError, TypeError):
                pass
            raise Refused(" ".join(text.split())[:200]) from None
