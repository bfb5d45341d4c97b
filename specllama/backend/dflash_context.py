"""DFlash, DFlash2 and DSpark drafters through llama.cpp.

    a pass of states     becomes keys and values of every layer, at the states' own positions
    a pass of tokens     the last token and masks behind it, which see those and each other

The second leaves keys and values, too, which are cut at once: a lane holds states of the target
and nothing else.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import llama_cpp as ll
import numpy as np

from specllama.arrays import Rows
from specllama.backend.base import Filled
from specllama.backend.head_model import head_params, load_head
from specllama.backend.llama import LlamaModel
from specllama.backend.llama_pool import LlamaPool
from specllama.backend.markov import MarkovRows
from specllama.backend.state_lanes import HeadContext, LlamaHead, StateBatch
from specllama.backend.symbols import rows as view
from specllama.errors import ContextFull, UnsupportedModel
from specllama.models.dflash_file import DflashFacts, read_facts
from specllama.models.layer_inputs import check_target

if TYPE_CHECKING:
    from specllama.backend.loaded_target import LoadedTarget
    from specllama.models.gguf import GgufHeader

logger = logging.getLogger("specllama.backend.dflash_context")


class BlockContext(HeadContext):
    """The drafter's context.

    Args:
        model: the drafter. pool: the target's, whose matrices it may borrow.
        markov: of a DSpark, where its types are read here.
    """

    def __init__(
        self,
        model: LlamaModel,
        pool: LlamaPool,
        facts: DflashFacts,
        *,
        threads: int,
        lanes: int = 1,
        markov: MarkovRows | None = None,
    ) -> None:
        self.facts, self.markov = facts, markov
        params = head_params(pool, threads)
        params.n_ctx += facts.block
        super().__init__(
            model,
            params,
            width=len(facts.layers) * facts.target_width,
            lanes=lanes,
            outputs_only=facts.kind != "dflash2",
        )
        self._places = StateBatch(facts.block, 0)
        ll.llama_set_causal_attn(self.handle, facts.causal)

    def open(self) -> LlamaBlocks:
        return LlamaBlocks(self, self.take())

    def read(self, sequence: int, at: int, states: Rows) -> None:
        """Make keys and values of states [n, width] from position ``at`` on."""
        self.run(self.states.fill(sequence, at, states, "none"))

    def places(self, sequence: int, at: int, token: int, n: int) -> Filled:
        """Guess ``n`` places behind ``token`` at position ``at``."""
        facts, k = self.facts, self.facts.candidates
        first = 0 if facts.anchored else 1  # that guesses what follows the token
        tokens = [token] + [facts.mask] * (n + first - 1)
        self.run(self._places.fill(sequence, at, None, "none" if k else "all", tokens))
        said = len(tokens) if k or facts.confident else 0
        beside = view(self._nextn(self.handle), said, facts.width)[first:]
        if k:  # tokens, which are exact as floats, and how each follows each
            scores = beside[:, k : k + k * k].reshape(n, k, k)
            return Filled(beside[:0], None, beside[:, :k].astype(np.int32), scores)
        rows = view(ll.llama_get_logits(self.handle), len(tokens), self.n_vocab)[first:]
        sure = beside[:, 0] if said else None
        return Filled(rows, sure, scale=facts.scale, cap=facts.cap)

    def close(self) -> None:
        if self.handle:
            self._places.close()
        super().close()


class LlamaBlocks(LlamaHead):
    """A lane of a drafter, see ``asking.BlockLane``."""

    def __init__(self, context: BlockContext, sequence: int) -> None:
        super().__init__(context, sequence)
        self._drafter, self.markov = context, context.markov
        self.layers, self.guesses = context.facts.layers, context.facts.guesses

    def read(self, states: Rows) -> None:
        self._take(states)
        try:
            self._drafter.read(self._sequence, self.end, states)
        except BaseException:
            self._cut(self.end)  # what was read of it
            raise
        self.end += len(states)

    def fill(self, token: int, n: int) -> Filled:
        self._know((token,))
        if not 0 < n <= self.guesses:
            raise ValueError(f"{n} places of {self.guesses}")
        if self.end - self.first + n + 1 > self.n_ctx:
            raise ContextFull("the cache of the drafting layer is full")
        try:
            return self._drafter.places(self._sequence, self.end, token, n)
        finally:
            self._cut(self.end)


def _markov(header: GgufHeader, facts: DflashFacts) -> MarkovRows | None:
    try:
        return MarkovRows(header) if facts.kind == "dspark" else None
    except UnsupportedModel as error:  # its guesses do without
        logger.info("%s", error)
        return None


def open_dflash(header: GgufHeader, target: LoadedTarget) -> BlockContext:
    """The drafter of a file.

    Raises:
        PairIncompatible: no such drafter, one of another target, or an architecture whose hidden
            states llama.cpp does not give away.
        BadGguf, UnsupportedModel, CannotLoad: damaged, or refused by llama.cpp.
        DoesNotFit: not enough memory is free beside the target.
    """
    facts = read_facts(header)
    check_target(facts, header, target.header)
    target.pool.require_layers(facts.layers)
    model = load_head(header, target)
    context = BlockContext(
        model,
        target.pool,
        facts,
        threads=target.threads,
        lanes=target.options.parallel,
        markov=_markov(header, facts),
    )
    target.on_close.callback(context.close)
    return context
