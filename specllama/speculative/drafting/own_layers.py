"""Self-speculation: the target drafts with some of its own layers.

They are a second model, opened when the first reply asks for it: having the choice costs nothing.
"""

from __future__ import annotations

from collections.abc import Callable

from specllama.backend.base import Context
from specllama.speculative.drafting.draft_model import ChainDrafter
from specllama.speculative.drafting.drafter import Request
from specllama.speculative.drafting.method import Method, with_own

Opener = Callable[[], tuple[Context, str]]  # the lane of those layers, and what they are and cost


class SelfDrafter(ChainDrafter):
    """A drafter with the target's own layers, opened at the first ``start``.

    Args:
        open_layers: see ``Opener``; called once.
        n_vocab: vocabulary size of the target.
    """

    name = "self"

    def __init__(self, open_layers: Opener, *, n_vocab: int) -> None:
        self._open = open_layers
        self._target_vocab = n_vocab
        self._advice = ""

    def start(self, request: Request) -> None:
        """Open the layers if that was not done yet, and begin a reply.

        Raises:
            DoesNotFit, CannotLoad: no memory for a second model.
            SpecllamaError: its file cannot be written.
        """
        if not self.lanes:
            lane, self._advice = self._open()
            super().__init__(lane, n_vocab=self._target_vocab)
        super().start(request)

    def advice(self) -> str:
        """Describe the draft and its cost, once."""
        said, self._advice = self._advice, ""
        return said

    def forget(self) -> None:
        if self.lanes:
            super().forget()


METHOD = Method(
    name="self", label="Self-speculative", short="layer skip", letter="k",
    blurb="The target drafts with some of its own layers. Pays if a few layers predict it well.",
    cost="own", why_not=with_own("self", "layers cannot be dropped from this architecture"),
    open=lambda kit: SelfDrafter(kit.own("self").open, n_vocab=kit.target.n_vocab),
    on_request=True,
)  # fmt: skip
