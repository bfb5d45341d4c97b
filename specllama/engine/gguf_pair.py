"""A pair of GGUF files that can be loaded: told from their headers, before llama.cpp comes."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from pathlib import Path

from specllama.backend import devices
from specllama.errors import CannotLoad
from specllama.models import memory
from specllama.models.gguf import GgufHeader, read_header
from specllama.models.loadable import check_loadable
from specllama.models.pairing import VOCABULARY_KINDS, compare, require_pair
from specllama.params import EngineOptions

logger = logging.getLogger("specllama.engine.gguf_pair")


@dataclass(frozen=True, slots=True)
class Pair:
    """The files of a pair that can be loaded, and how.

    Attributes:
        target, draft: their headers.
        translated: the draft speaks other tokens than the target.
        n_ctx: tokens of the context.
        options: as they were given.
        plan: how many layers go to the GPUs; None when there is none, or none is wanted.
    """

    target: GgufHeader
    draft: GgufHeader | None
    translated: bool
    n_ctx: int
    options: EngineOptions
    plan: devices.OffloadPlan | None = None

    @property
    def on_gpu(self) -> bool:
        return self.plan is not None and self.plan.target.layers > 0

    def resolved(self, *, apart: bool = False) -> EngineOptions:
        """The options of the target, every "auto" decided; see ``EngineOptions.resolved``."""
        one = self.target.one_kv_type
        return self.options.resolved(on_gpu=self.on_gpu, one_kv_type=one, apart=apart)

    @property
    def draft_options(self) -> EngineOptions:
        one = self.draft is not None and self.draft.one_kv_type
        return self.options.resolved(on_gpu=self.on_gpu, one_kv_type=one)

    def fitting(self) -> Pair:
        """This pair, once what the GPUs do not take was found to fit in RAM.

        Raises:
            DoesNotFit: it does not.
        """
        if not self.options.check_memory:
            return self
        options = self.resolved()
        need = memory.estimate_pair(
            self.target,
            self.draft,
            n_ctx=self.n_ctx,
            parallel=options.parallel,
            type_k=options.kv_type_k,
            type_v=options.kv_type_v,
            n_ubatch=options.batch(on_gpu=self.on_gpu),
            n_outputs=options.max_rows,
            flash_attn=options.flash_attn != "off",
        )
        if self.plan is not None:
            need = devices.left_in_ram(need, self.plan, self.target, self.draft)
        memory.require_fit(need)
        return self

    def with_fewer_layers(self) -> Pair | None:
        """This pair with less on the GPUs; None when nothing is there."""
        plan = None if self.plan is None else devices.fewer_layers(self.plan)
        return None if plan is None else replace(self, plan=plan).fitting()


def read_pair(target: Path, draft: Path | None, options: EngineOptions) -> Pair:
    """The headers of a pair, checked, and where its layers go.

    Raises:
        BadGguf, UnsupportedModel, PairIncompatible, DoesNotFit, CannotLoad.
    """
    header = read_header(target)
    check_loadable(header, "target")
    second, translated = None, False
    if draft is not None:
        second = read_header(draft)
        check_loadable(second, "draft")
        if options.allow_other_vocab:
            kinds = {problem.kind for problem in compare(header, second).problems}
            translated = bool(kinds) and kinds <= VOCABULARY_KINDS
        if not translated:
            require_pair(header, second)
    if not options.n_ctx and header.context_length <= 0:
        raise CannotLoad(
            f"{target.name} does not say how long a context it was trained for",
            "choose one with --ctx-size",
        )
    n_ctx = memory.context_length(header, options.n_ctx)
    pair = Pair(header, second, translated, n_ctx, options)
    return replace(pair, plan=_offload(pair)).fitting()


def _offload(pair: Pair) -> devices.OffloadPlan | None:
    """See ``Pair.plan``."""
    options = pair.options
    if options.gpu_layers == "0" and options.draft_gpu_layers in ("0", "auto"):
        return None
    found = devices.devices()
    if not devices.gpus(found):
        return None
    plan = devices.plan_offload(
        pair.target,
        pair.draft,
        found,
        gpu_layers=options.gpu_layers,
        draft_gpu_layers=options.draft_gpu_layers,
        n_ctx=pair.n_ctx,
        n_ubatch=options.batch(on_gpu=True),
        n_outputs=options.max_rows,
        flash_attn=options.flash_attn != "off",
        type_k=options.kv_type_k,
        type_v=options.kv_type_v,
    )
    for line in plan.lines():
        logger.info("%s", line)
    return plan
