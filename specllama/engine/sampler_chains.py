"""The sampler chain of a request."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

from specllama.backend.base import Vocab
from specllama.errors import UsageError
from specllama.params import GenerateParams
from specllama.speculative.sampling import Constraint, SamplerChain

ConstraintMaker = Callable[[GenerateParams], Constraint | None]


class SamplerChains:
    """Makes chains; what depends on the vocabulary alone is worked out once.

    Args:
        make_constraint: builds the grammar of a request; None where grammars are not known.
    """

    def __init__(self, vocab: Vocab, make_constraint: ConstraintMaker | None = None) -> None:
        self._vocab = vocab
        self._make_constraint = make_constraint
        self._eog_bias: dict[int, float] | None = None
        self._breakers: dict[tuple[str, ...], frozenset[int]] = {}

    def chain(
        self,
        params: GenerateParams,
        seed: int,
        tokens: Sequence[int],
        constraint: Constraint | None = None,
    ) -> SamplerChain:
        """A chain behind ``tokens``; ``constraint``: where no grammar was asked for."""
        sampling = params.sampling
        if params.ignore_eos:
            bias = {**self._all_eog(), **sampling.logit_bias}
            sampling = dataclasses.replace(sampling, logit_bias=bias)
        breakers: frozenset[int] = frozenset()
        if sampling.dry_multiplier > 0:
            strings = sampling.dry_sequence_breakers
            if strings not in self._breakers:
                wanted = [s.encode() for s in strings]
                self._breakers[strings] = frozenset(
                    t
                    for t in range(self._vocab.n_tokens)
                    if any(w in self._vocab.piece(t) for w in wanted)
                )
            breakers = self._breakers[strings]
        if params.constrained:
            if self._make_constraint is None:
                raise UsageError("this engine has no grammar support")
            constraint = self._make_constraint(params)
        return SamplerChain(
            sampling,
            seed=seed,
            tokens=tokens,
            breakers=breakers,
            constraint=constraint,
            is_end=self._vocab.is_eog,
        )

    def _all_eog(self) -> dict[int, float]:
        if self._eog_bias is None:
            self._eog_bias = {
                t: float("-inf") for t in range(self._vocab.n_tokens) if self._vocab.is_eog(t)
            }
        return self._eog_bias
