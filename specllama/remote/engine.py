"""A running ``specllama serve`` as an engine: a second window need not load the model again."""

from __future__ import annotations

import json
import threading
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import httpx2

from specllama.cancel import Cancel
from specllama.errors import EngineError, PromptTooLong, SpecllamaError, UsageError
from specllama.events import Event, event_from_dict
from specllama.interface import EngineInfo, Message, MethodInfo, ModelInfo, Prompt
from specllama.params import GenerateParams
from specllama.store.codec import params_to_dict

_START = "start one with: specllama serve"


class RemoteEngine:
    """See ``EngineLike``; everything it asks goes to ``url``.

    Raises:
        UsageError: that is no address.
        EngineError: nobody answers there, or somebody else than a specllama.
    """

    def __init__(self, url: str, key: str = "") -> None:
        self.url = url.rstrip("/")
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        self._http = httpx2.Client(timeout=httpx2.Timeout(10.0, read=60.0), headers=headers)
        with self._spoken():
            self.info = _info(_checked(self._http.get(f"{self.url}/specllama/info")).json())

    def __enter__(self) -> RemoteEngine:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        self._http.close()

    def count_tokens(self, prompt: str | Sequence[Message]) -> int:
        with self._spoken():
            answer = self._http.post(f"{self.url}/specllama/count", json=_asked(prompt))
            return int(_checked(answer).json()["tokens"])

    def generate(
        self, prompt: Prompt, params: GenerateParams, *, cancel: Cancel | None = None
    ) -> Iterator[Event]:
        """See ``EngineLike.generate``."""
        id = uuid.uuid4().hex
        body = {**_asked(prompt), "params": params_to_dict(params), "id": id}
        cancel = cancel or Cancel()

        def stop() -> None:  # whoever cancels need not wait
            threading.Thread(target=self._stop, args=(id,), daemon=True).start()

        with (
            self._spoken(),
            self._http.stream("POST", f"{self.url}/specllama/generate", json=body) as answer,
        ):
            if answer.status_code != 200:
                answer.read()
            _checked(answer)
            with cancel.calling(stop):
                for line in answer.iter_lines():
                    if not line.startswith("data: "):
                        continue
                    told = json.loads(line[6:])
                    if told.get("type") == "error":
                        raise _error(told["error"])
                    yield event_from_dict(told)

    def _stop(self, id: str) -> None:
        with suppress(httpx2.HTTPError):
            self._http.post(f"{self.url}/specllama/stop", json={"id": id})

    @contextmanager
    def _spoken(self) -> Iterator[None]:
        try:
            yield
        except (httpx2.InvalidURL, httpx2.UnsupportedProtocol):
            raise UsageError(
                f"{self.url!r} is no address of a server", "for example http://127.0.0.1:8484"
            ) from None
        except (httpx2.HTTPError, ValueError, KeyError, TypeError) as error:
            raise EngineError(f"no specllama answers at {self.url}: {error}", _START) from None


def _asked(prompt: Prompt) -> dict[str, Any]:
    if isinstance(prompt, str):
        return {"text": prompt}
    turns = [one for one in prompt if isinstance(one, Message)]
    if turns:
        return {"messages": [{**turn.to_dict(), "seams": turn.seams} for turn in turns]}
    return {"ids": list(prompt)}


def _checked(answer: httpx2.Response) -> httpx2.Response:
    """Raises SpecllamaError: what the server said went wrong."""
    if answer.status_code == 200:
        return answer
    try:
        error = answer.json()["error"]
    except (ValueError, KeyError, TypeError):
        raise EngineError(f"the server answered {answer.status_code}", _START) from None
    raise _error(error)


def _error(error: dict[str, Any]) -> SpecllamaError:
    message = str(error.get("message"))
    if error.get("code") == "context_length_exceeded":
        return PromptTooLong(message)
    if error.get("type") == "invalid_request_error":
        return UsageError(message)
    return EngineError(message)


def _info(told: dict[str, Any]) -> EngineInfo:
    def model(found: dict[str, Any]) -> ModelInfo:
        return ModelInfo(**_known(ModelInfo, found))

    draft = told.get("draft")
    return EngineInfo(
        **{
            **_known(EngineInfo, told),
            "target": model(told["target"]),
            "draft": None if draft is None else model(draft),
            "methods": tuple(MethodInfo(**_known(MethodInfo, m)) for m in told["methods"]),
        }
    )


def _known(kind: Any, told: dict[str, Any]) -> dict[str, Any]:
    """The fields that we know: newer servers may say more."""
    return {name: told[name] for name in kind.__dataclass_fields__ if name in told}
