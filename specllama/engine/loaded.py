"""What was opened for one engine: every part that it runs on, and how to free them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from specllama.backend.base import Lane, Vocab
    from specllama.engine.slot import Slot
    from specllama.interface import EngineInfo
    from specllama.params import GenerateParams
    from specllama.speculative.drafting.drafter import Drafter
    from specllama.speculative.sampling import Constraint
    from specllama.speculative.window import Window


@dataclass(frozen=True, slots=True)
class Loaded:
    """The parts of an engine, from model files or from wherever a test takes them.

    Attributes:
        target: a lane in the target's pool.
        vocab: the target's vocabulary.
        info: what to show people.
        drafters: drafting methods by name, without "none".
        more: slots for conversations beside the first.
        make_window: the draft window of a request; None: of a fixed length.
        make_constraint: the grammar of a request; None: this engine has none.
        template: Jinja chat template, None for raw prompts; ``bos`` and ``eos``: texts for it.
        on_close: frees the models.
    """

    target: Lane
    vocab: Vocab
    info: EngineInfo
    drafters: Mapping[str, Drafter] = field(default_factory=dict)
    more: tuple[Slot, ...] = ()
    make_window: Callable[[GenerateParams], Window] | None = None
    make_constraint: Callable[[GenerateParams], Constraint | None] | None = None
    template: str | None = None
    bos: str = ""
    eos: str = ""
    on_close: Callable[[], None] | None = None
