"""An engine that says what a script says, for clients whose prompts are longer than what the
bundled models read.

A script is a list of rules; the first whose ``when`` (a regular expression) is found in what came
since the last reply answers. A thought stands in ``<think>`` tags, a call of a tool is written as
models write it (see ``replies/tool_calls.py``). ``schema`` answers only requests that want JSON;
``delay_s`` are seconds a round; ``fails`` ends the request with an error before it began.
"""

import re
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from fakes import Reply, ScriptedEngine, engine_info, model_info

from specllama.errors import EngineError
from specllama.events import Event, LoadProgress
from specllama.interface import Message as Turn
from specllama.interface import Prompt
from specllama.settings.params import GenerateParams

CONTEXT = 200_000


@dataclass(frozen=True)
class Rule:
    say: str = ""
    when: str = ""
    schema: bool = False
    delay_s: float = 0.0
    fails: str = ""

    def answers(self, asked: str, params: GenerateParams) -> bool:
        wants_json = params.json_schema is not None
        return re.search(self.when, asked) is not None and (wants_json or not self.schema)


def since_last_reply(prompt: Prompt) -> str:
    """What a client said after the model did."""
    if isinstance(prompt, str):
        return prompt
    turns = [turn for turn in prompt if isinstance(turn, Turn)]
    replies = [i for i, turn in enumerate(turns) if turn.role == "assistant"]
    new = turns[replies[-1] + 1 if replies else 0 :]
    return "\n".join(turn.content for turn in new if turn.role != "system")


class RuleEngine(ScriptedEngine):
    """Answers by rules instead of by order."""

    def __init__(self, rules: Sequence[Rule], n_ctx: int = CONTEXT) -> None:
        target = model_info("target", n_ctx=n_ctx, n_ctx_train=n_ctx)
        super().__init__(info=engine_info(target=target))
        self._rules = rules

    def thinks(self) -> bool:
        return True

    def template(self) -> tuple[str, str, str]:
        return "", "", ""

    def generate(
        self, prompt: Prompt, params: GenerateParams, *, cancel: threading.Event | None = None
    ) -> Iterator[Event]:
        asked = since_last_reply(prompt)
        rule = next((r for r in self._rules if r.answers(asked, params)), Rule("Hello."))
        failed = EngineError(rule.fails) if rule.fails else None
        self.replies = [Reply(rule.say, delay_s=rule.delay_s, raise_first=failed)]
        yield from super().generate(prompt, params, cancel=cancel)


@dataclass(frozen=True)
class Rules:
    """A recipe for EngineHost that crosses into the child."""

    rules: tuple[Rule, ...]
    n_ctx: int = CONTEXT

    def __call__(self, progress: Callable[[Event], None], /) -> RuleEngine:
        progress(LoadProgress("target", "scripted.gguf", 1.0))
        return RuleEngine(self.rules, self.n_ctx)
