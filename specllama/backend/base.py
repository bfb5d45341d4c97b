"""What the loop needs from an inference library. ``llama.py`` is the real one, ``fake.py`` a table.

A Context holds one conversation's KV cache. ``tokens`` are the tokens whose KV is present, in
order; ``forward`` appends to them and ``rollback`` cuts them to an absolute length.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, runtime_checkable

from specllama.backend.hidden import HiddenRows
from specllama.speculative.types import HiddenNeed, Rows

Outputs = Literal["all", "last", "none"]


@dataclass(frozen=True, slots=True)
class SpecialToken:
    """A token that is found by its text, before anything is merged.

    Attributes:
        control: found only where special tokens are asked for; user-defined ones always are.
        strips_left, strips_right: it swallows the white space beside it.
    """

    id: int
    text: str
    control: bool
    strips_left: bool = False
    strips_right: bool = False


class Vocab(Protocol):
    @property
    def n_tokens(self) -> int: ...

    @property
    def adds_bos(self) -> bool:
        """Whether ``add_special`` puts a begin token in front."""
        ...

    @property
    def specials(self) -> Sequence[SpecialToken]:
        """Every special token, longest text first."""
        ...

    def special(self, token: int) -> SpecialToken | None:
        """The special token of this id; None for others."""
        ...

    def tokenize(
        self, text: str, *, add_special: bool, parse_special: bool, after_text: bool = False
    ) -> list[int]:
        """Token ids; ``after_text`` says that the text goes on from another, not afresh."""
        ...

    def piece(self, token: int, *, special: bool = False) -> bytes:
        """The bytes of a token; control tokens are empty unless ``special``."""
        ...

    def is_eog(self, token: int) -> bool:
        """Whether the token ends a turn."""
        ...


class Context(Protocol):
    """One KV cache and its passes."""

    @property
    def n_ctx(self) -> int: ...

    @property
    def n_vocab(self) -> int: ...

    @property
    def n_batch(self) -> int:
        """Most tokens in one pass."""
        ...

    @property
    def max_rows(self) -> int:
        """Most rows with logits in one pass."""
        ...

    @property
    def max_leaves(self) -> int:
        """Most leaves of a tree pass; 1 where only chains are possible."""
        ...

    @property
    def tokens(self) -> list[int]:
        """Tokens in the cache; read-only for callers."""
        ...

    @property
    def n_past(self) -> int:
        """``len(tokens)``, as the cache itself reports it."""
        ...

    def forward(
        self, tokens: Sequence[int], *, outputs: Outputs, parents: Sequence[int] | None = None
    ) -> Rows:
        """Evaluate tokens after the present ones.

        ``parents`` (tree passes): parents[i] is the index, within ``tokens``, of the token that
        token i follows, -1 for the cached prefix; None is a chain. Returns logits
        [n_rows, n_vocab]: a view that the next pass of this context overwrites. A tree pass must
        be settled with ``keep_path`` or ``rollback`` before the next.

        Raises:
            ContextFull: no room for the tokens.
            Cancelled: the engine's stop flag is set; the cache holds what it held before, or the
                beginning of it where the model cannot roll back.
            EngineError: the library refused; the cache is as it was before.
        """
        ...

    def keep_path(self, path: Sequence[int]) -> None:
        """After a tree pass, keep the root-to-node ``path`` (indices within that pass) only."""
        ...

    def rollback(self, keep_len: int) -> None:
        """Cut the cache to its first ``keep_len`` tokens.

        Raises:
            ValueError: keep_len is negative or beyond the end.
            EngineError: the library could not cut; the cache was cleared.
        """
        ...

    def close(self) -> None: ...


@runtime_checkable
class Capturing(Protocol):
    """A context that can keep hidden states of its passes."""

    @property
    def hidden(self) -> HiddenRows:
        """What was kept, by position; follows every rollback of the cache."""
        ...

    def capture(self, need: HiddenNeed) -> None:
        """Keep this state of the passes from here on, "nothing" to stop.

        "final_hidden" is kept of the tokens whose rows are returned. Logits do not change.
        """
        ...
