"""Everything specllama raises on purpose.

    SpecllamaError                 exit 1   something failed; message says what, hint says what next
    ├── UsageError                 exit 2   an argument or a setting is wrong
    │   └── ConfigError            exit 2   a settings file is wrong
    ├── ModelUnavailable           exit 3   the model is not here (missing, offline, gated)
    ├── PairIncompatible           exit 4   draft and target do not fit together
    ├── CannotLoad                 exit 5   the file is not a model we can run
    │   ├── BadGguf                exit 5   damaged, truncated, lying or foreign file
    │   ├── UnsupportedModel       exit 5   a sound file of a kind that cannot generate text
    │   └── DoesNotFit             exit 5   more memory than the machine has
    ├── PromptTooLong              exit 2   the prompt does not fit the context
    ├── ContextFull                exit 1   the context ran out while generating
    │   └── PoolFull               exit 1   other conversations hold the cells that one needs
    ├── EngineError                exit 1   llama.cpp refused or returned nonsense
    │   ├── Cancelled              exit 130 a pass or a load was stopped on request
    │   └── EngineDied             exit 1   the engine process ended
    │       └── EngineStuck        exit 1   it ended no pass for long, and was ended
    └── StoreError                 exit 1   a log or session file cannot be read or written

This module imports nothing heavy: ``specllama --help`` may import it.
"""

from __future__ import annotations

import re
from typing import Any


class SpecllamaError(Exception):
    """A failure a person can act on.

    Args:
        message: one line: what went wrong and why.
        hint: the next command or action, or None.
        facts: values of the attributes that a subclass declares.
    """

    exit_code = 1

    def __init__(self, message: str, hint: str | None = None, **facts: int) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint
        vars(self).update(facts)

    def __reduce__(self) -> tuple[type[SpecllamaError], tuple[str, str | None], dict[str, Any]]:
        return (type(self), (self.message, self.hint), self.__dict__)


class UsageError(SpecllamaError):
    exit_code = 2


class ConfigError(UsageError):
    pass


class PromptTooLong(UsageError):
    """An error: the prompt does not fit the context.

    Attributes:
        n_prompt, n_ctx: tokens that the prompt has, and those that there is room for.
    """

    n_prompt = 0
    n_ctx = 0


class ModelUnavailable(SpecllamaError):
    exit_code = 3


class PairIncompatible(SpecllamaError):
    exit_code = 4


class CannotLoad(SpecllamaError):
    exit_code = 5


class BadGguf(CannotLoad):
    pass


class UnsupportedModel(CannotLoad):
    pass


class DoesNotFit(CannotLoad):
    """An error: the model needs more memory than there is.

    Attributes:
        needed, free: bytes of memory; 0 where they are not known.
    """

    needed = 0
    free = 0


class ContextFull(SpecllamaError):
    pass


class PoolFull(ContextFull):
    pass


class EngineError(SpecllamaError):
    pass


class Cancelled(EngineError):
    exit_code = 130


class EngineDied(EngineError):
    """An error: the engine process ended.

    Attributes:
        heard: False if it had not got this request yet.
    """

    heard = True


class EngineStuck(EngineDied):
    """An error: the engine process ended no pass for long, and was ended.

    Attributes:
        culprit: whether it was stuck in this very request.
    """

    culprit = False


class StoreError(SpecllamaError):
    pass


# of the system's and of libraries' words where memory is refused: to a thread, a file, C++
_NO_MEMORY = re.compile(
    "can't start new thread|failed to map segment|annot allocate memory|zero-fill pages|bad_alloc"
)


def out_of_memory(error: BaseException) -> bool:
    """True if memory was refused: to an object, a thread, or a library that was to be loaded."""
    return isinstance(error, MemoryError) or bool(_NO_MEMORY.search(cause(error)))


def cause(error: BaseException) -> str:
    """Return the first line of the cause that lies deepest: packages put advice around it."""
    while error.__cause__ is not None:
        error = error.__cause__
    return str(error).strip().partition("\n")[0]


def as_ours(error: BaseException, said: str = "") -> SpecllamaError:
    """Return any error as one of ours; ``said``: what failed, for one that is not."""
    if isinstance(error, SpecllamaError):
        return error
    if not out_of_memory(error):
        return EngineError(": ".join(filter(None, (said, type(error).__name__, cause(error)))))
    return DoesNotFit(
        ": ".join(filter(None, (said, "there is no memory left for it", cause(error)))),
        "choose a smaller model or a shorter context (-c), or raise the limit that is set: "
        "specllama doctor shows it",
    )
