"""The sampler chain of a request."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Sequence
from functools import lru_cache, partial

from specllama.arrays import FloatArray, IntArray
from specllama.backend.base import Vocab
from specllama.grammar.guide import Guides
from specllama.grammar.source import source_of
from specllama.settings.params import BREAKERS_LIMIT, GenerateParams
from specllama.speculative.filling import fillers
from specllama.speculative.sampling import Constraint, SamplerChain

ConstraintMaker = Callable[[GenerateParams], Constraint | None]


class SamplerChains:
    """A maker of chains; tables that depend on the vocabulary alone are made once.

    Args:
        make_constraint: of a request that has one; None: by llguidance.
    """

    def __init__(self, vocab: Vocab, make_constraint: ConstraintMaker | None = None) -> None:
        self._vocab = vocab
        self._make_constraint = make_constraint or self._guide
        self._guides: Guides | None = None
        self._making = threading.Lock()
        self._eog_bias: dict[int, float] | None = None
        self._pieces: list[bytes] = []
        self._breaking = lru_cache(4 * BREAKERS_LIMIT)(self._breaking_now)

    def chain(
        self,
        params: GenerateParams,
        seed: int,
        tokens: Sequence[int],
        position: int,
        constraint: Constraint | None = None,
    ) -> SamplerChain:
        """Return a sampler chain after ``tokens``, for the token at ``position`` of the noise;
        ``constraint`` applies if there is no grammar."""
        sampling = params.sampling
        if params.ignore_eos:
            bias = {**self._all_eog(), **sampling.logit_bias}
            sampling = dataclasses.replace(sampling, logit_bias=bias)
        breakers: frozenset[int] = frozenset()
        if sampling.dry_multiplier > 0:
            breakers = frozenset().union(*map(self._breaking, sampling.dry_sequence_breakers))
        if params.constrained:
            constraint = self._make_constraint(params)
        return SamplerChain(
            sampling,
            seed=seed,
            tokens=tokens,
            position=position,
            breakers=breakers,
            constraint=constraint,
            is_end=self._vocab.is_eog,
            fills=self._fills if sampling.infill else None,
        )

    def _fills(self, ids: IntArray, logits: FloatArray) -> tuple[IntArray, FloatArray]:
        vocab = self._vocab
        return fillers(ids, logits, vocab.piece, vocab.is_eog, lambda: min(self._all_eog()))

    def read_vocabulary(self) -> None:
        """Read the vocabulary for grammars; this takes some 0.5 s in which no other thread runs."""
        with self._making:
            if self._guides is None:
                n, vocab = self._vocab.n_tokens, self._vocab
                self._guides = Guides(
                    [vocab.piece(t) for t in range(n)],
                    [t for t in range(n) if vocab.is_eog(t)],
                    partial(
                        vocab.tokenize, add_special=False, parse_special=False, after_text=True
                    ),
                )

    def _guide(self, params: GenerateParams) -> Constraint:
        if params.json_schema is not None:
            source = source_of("schema", params.json_schema)
        elif params.regex is not None:
            source = source_of("regex", params.regex)
        else:
            source = source_of("grammar", params.grammar or "")
        self.read_vocabulary()
        assert self._guides is not None
        return self._guides.guide(source)

    def _breaking_now(self, text: str) -> frozenset[int]:
        """Return the tokens that contain a text."""
        if not self._pieces:
            self._pieces = [self._vocab.piece(t) for t in range(self._vocab.n_tokens)]
        wanted = text.encode("utf-8", "replace")
        return frozenset(t for t, piece in enumerate(self._pieces) if wanted in piece)

    def _all_eog(self) -> dict[int, float]:
        if self._eog_bias is None:
            self._eog_bias = {
                t: float("-inf") for t in range(self._vocab.n_tokens) if self._vocab.is_eog(t)
            }
        return self._eog_bias
