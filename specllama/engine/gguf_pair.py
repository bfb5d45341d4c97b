"""A pair of GGUF files that can be loaded, judged by their headers before llama.cpp is imported."""

from __future__ import annotations

import logging
import platform
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from specllama.backend import devices, placement, planning, rpc, trial
from specllama.engine import fewer_words
from specllama.errors import DoesNotFit, PairIncompatible
from specllama.interface import layout_words
from specllama.models import context, memory, running_state
from specllama.models.gguf import GgufHeader, read_header
from specllama.models.judgement import pair_memory
from specllama.models.loadable import check_adapter, check_loadable
from specllama.models.pairing import compare, require_pair
from specllama.replies.card import read_card
from specllama.settings.hardware import Adapter, PlaceOptions
from specllama.settings.params import EngineOptions
from specllama.text import size

logger = logging.getLogger("specllama.engine.gguf_pair")

# In wide passes their rows differ from single steps where they are repacked (x86, llama-cpp-python
# 0.3.36: the table in exactness.md, which tests/e2e/test_exactness_measured.py
# compares with the kernels).
# IQ4_NL differs as stored instead, all others in neither.
ROUNDS_REPACKED = frozenset({"Q4_K", "Q2_K"})
_SHORT = 512  # the shortest context that is worth a word


@dataclass(frozen=True, slots=True)
class Pair:
    """The files of a pair that can be loaded, and the way to load them.

    Attributes:
        target, draft: their headers.
        whole: the model of which the draft is a copy in the cache (``fewer_words``).
        adapters: headers of the adapters of the target.
        translated: the draft speaks other tokens than the target.
        length: of the context, and why it was chosen.
        options: as they were given.
        plan: what goes to the GPUs; None when there is none, or none is wanted.
        lanes: conversations that it takes at once.
    """

    target: GgufHeader
    draft: GgufHeader | None
    translated: bool
    length: context.Length
    options: EngineOptions
    plan: placement.OffloadPlan | None = None
    lanes: int = 1
    whole: GgufHeader | None = None
    adapters: tuple[GgufHeader, ...] = ()

    @property
    def n_ctx(self) -> int:
        return self.length.tokens

    def not_followed(self) -> list[str]:
        """Describe what was set and cannot be had on this machine, which goes on without."""
        options, drafts = self.options, self.draft is not None
        asked = {"gpu-layers": options.gpu_layers}
        asked |= {"draft-gpu-layers": options.draft_gpu_layers} if drafts else {}
        on_gpu = [f"{name} {n}" for name, n in asked.items() if n not in ("auto", "0")]
        said = []
        if on_gpu and (self.plan is None or not self.plan.gpus):
            said.append(
                f"{' and '.join(on_gpu)}: llama.cpp can use no GPU here, so all layers are on the "
                "CPU; specllama doctor tells why"
            )
        elif self.plan is not None:
            said += self.plan.warnings
        if options.repack == "on" and not trial.repacks():
            said.append(f"repack on: the weights stay {self.layout}")
        return said

    @property
    def fits(self) -> bool:
        """True if the part outside the GPUs fits in RAM, or that is unknown."""
        return memory.fits(self.need(self.n_ctx))

    def lines(self) -> list[str]:
        """Describe the decisions and their reasons, for ``-v`` and ``doctor``."""
        card = read_card(self.target.metadata)
        notes = [f"the model's card: not followed: {text}" for text in card.left_out]
        states = running_state.line(self.target, self.options.max_rows)
        plan = [] if self.plan is None else self.plan.lines()
        several = [self._sharing()] if self.lanes > 1 or self.lanes < self.most_lanes else []
        length = [self.length.line()]
        if self.target.sliding_window and not self.options.swa_full:
            length.append("context: sliding-window layers keep only their window, so that it fits")
        return [*length, *several, *([states] if states else []), *plan, *notes]

    def _sharing(self) -> str:
        """Describe the memory that several conversations take."""
        if self.keeps_states:
            fewer = " (more would take too much memory)" if self.lanes < self.most_lanes else ""
            return f"conversations: {self.lanes} at once{fewer}, each with a context of its own"
        need, free = self.need(self.n_ctx), memory.available_memory()
        reading = sum(part.reading for part in need.parts)
        most = self.options.idle_bytes(sum(part.weights + part.kv for part in need.parts))
        idle = min(most, max(free - need.required - memory.SPARE, 0)) if free else most
        apart = f" {size(reading)} to read prompts beside them," if reading else ""
        return (
            f"conversations: {self.lanes} at once share the context;{apart} "
            f"up to {size(idle)} for what idle ones hold (--kv-ram)"
        )

    @property
    def keeps_states(self) -> bool:
        """True if a model of it keeps a running state."""
        return _keeps_state(self.target) or (self.draft is not None and _keeps_state(self.draft))

    @property
    def most_lanes(self) -> int:
        """Conversations that fit at once if memory were no limit."""
        options = self.options
        windows_only = self.target.sliding_window and not options.swa_full
        # passes that states share have other widths than a conversation's own
        fixed = _keeps_state(self.target) and options.exact != "off"
        alone = any(
            _keeps_state(one) and one.architecture not in running_state.TOGETHER
            for one in (self.target, *((self.draft,) if self.draft else ()))
        )
        return 1 if windows_only or fixed or alone else options.parallel

    @property
    def on_gpu(self) -> bool:
        return self.plan is not None and self.plan.target.layers > 0

    def resolved(self, *, apart: bool = False) -> EngineOptions:
        """Return the options of the target, every "auto" decided; see
        ``EngineOptions.resolved``."""
        one, options = self.target.one_kv_type, replace(self.options, parallel=self.lanes)
        return options.resolved(on_gpu=self.on_gpu, one_kv_type=one, apart=apart)

    @property
    def kernels(self) -> str:
        """The name of our own kernels that compute its products on the CPU; "" if none do."""
        return trial.kernels().name if self.options.own_kernels else ""

    @property
    def repacks(self) -> bool:
        """True if the target is loaded with its weights repacked.

        llama.cpp rearranges ("repacks") weights of some types for wide products. In one of the two
        layouts a pass of several rows may compute them as single steps would, in the other not:
        that one is taken, see ``backend/exactness.py``. The rows of the two layouts differ in
        their last bits, so nothing that is timed decides: a text must not depend on what a
        measurement found.
        """
        if not trial.repacks():
            return False
        if self.options.repack != "auto":
            return self.options.repack == "on"
        on_x86 = platform.machine().lower() in ("x86_64", "amd64")
        rounds = ROUNDS_REPACKED & memory.repacked_types()
        return self.on_gpu or not (on_x86 and memory.repacked_bytes(self.target, rounds) > 0)

    @property
    def layout(self) -> str:
        """The layout of the target's weights in memory, and the reason for it."""
        if self.kernels:
            return layout_words(self.repacks, self.kernels)
        if not trial.repacks():
            return "as stored: repacked, they end this build of llama.cpp here"
        if self.options.repack != "auto":
            return "repacked where llama.cpp can" if self.options.repack == "on" else "as stored"
        if self.repacks:
            return "as llama.cpp lays them out"
        return "as stored: repacked, its Q4_K or Q2_K weights would round wide passes"

    @property
    def draft_options(self) -> EngineOptions:
        one = self.draft is not None and self.draft.one_kv_type
        return self.options.resolved(on_gpu=self.on_gpu, one_kv_type=one)

    def require_fit(self, *, anyway: bool = False) -> Pair:
        """Return this pair, after a check that the part outside the GPUs fits in RAM, if it is
        wanted or ``anyway``.

        Raises:
            DoesNotFit: it does not, with what would.
        """
        if not (self.options.check_memory or anyway):
            return self
        try:
            memory.require_fit(self.need(self.n_ctx))
        except DoesNotFit as error:
            trained = self.length.trained or self.n_ctx
            shorter = [_SHORT << i for i in range(32) if _SHORT << i < min(self.n_ctx, trained)]
            shorter += [trained] if trained < self.n_ctx else []
            most = max((n for n in shorter if memory.fits(self.need(n))), default=0)
            of_more = " (it was trained for no more)" if most == trained else ""
            ways = [f"-c {most}{of_more}"] if most else []
            alone = replace(self, lanes=1)
            if self.lanes > 1 and memory.fits(alone.need(self.n_ctx)):
                ways.append("--parallel 1")
            hint = f"what fits: {' or '.join(ways)}" if ways else error.hint
            raise DoesNotFit(error.message, hint, needed=error.needed, free=error.free) from None
        return self

    def need(self, n_ctx: int) -> memory.PairMemory:
        """Return the RAM that the pair takes with a context of N tokens."""
        options = self.resolved()
        need = pair_memory(self.target, self.draft, options, n_ctx, on_gpu=self.on_gpu)
        if self.plan is not None:
            need = placement.left_in_ram(need, self.plan, self.target, self.draft)
        return need

    def with_fewer_layers(self) -> Pair | None:
        """Return this pair with less on the GPUs; None if nothing is there."""
        plan = None if self.plan is None else placement.fewer_layers(self.plan)
        return None if plan is None else replace(self, plan=plan).require_fit()


def read_pair(target: Path, draft: Path | None, options: EngineOptions) -> Pair:
    """Read and check the headers of a pair, and place its layers.

    Raises:
        BadGguf, UnsupportedModel, PairIncompatible, DoesNotFit, CannotLoad.
    """
    trial.require()
    rpc.use(options.rpc)
    header = read_header(target)
    check_loadable(header, "target")
    second = whole = None
    translated = False
    if draft is not None:
        second = read_header(draft)
        check_loadable(second, "draft")
        translated = options.allow_other_vocab and not compare(header, second).compatible
        if translated and second.rows:
            raise PairIncompatible(
                f"{second.path.name} knows only {second.rows:,} of its tokens: too few to be "
                "translated",
                "draft with the whole model",
            )
        for warning in () if translated else require_pair(header, second).warnings:
            logger.info("pair: %s", warning)
        if not translated and (copy := fewer_words.chosen(second, options)) is not None:
            second, whole = copy, second
    adapters = tuple(read_header(Adapter.read(text).path) for text in options.loras)
    for adapter in adapters:
        check_adapter(adapter, header)
    made = Pair(header, second, translated, context.LEAST_LENGTH, options)
    pair = with_context(replace(made, whole=whole, adapters=adapters))
    for line in pair.lines():
        logger.info("%s", line)
    return pair.require_fit()


def with_context(pair: Pair) -> Pair:
    """Return the pair with the requested context length, else with one that fits.

    Of sliding-window layers only the windows are kept if the whole cache does not fit.

    Raises:
        CannotLoad: neither file nor options say how long it should be.
    """
    found = _with_length(pair)
    if pair.target.sliding_window and pair.options.swa_full and not found.fits:
        windows = _with_length(replace(pair, options=replace(pair.options, swa_full=False)))
        return windows if windows.fits else found
    return found


def _with_length(pair: Pair) -> Pair:
    """Choose the length.

    What fits takes nothing from the target's place on the GPUs that a short context leaves it, and
    in RAM no more than its share.
    """
    options = pair.options
    found = devices.devices()
    pair = replace(pair, lanes=1 if pair.keeps_states else pair.most_lanes)

    def plan_for(pair: Pair, n_ctx: int) -> placement.OffloadPlan | None:
        return _offload(pair, found, n_ctx)

    def with_length(pair: Pair, length: context.Length) -> Pair:
        return replace(pair, length=length, plan=plan_for(pair, length.tokens))

    if options.n_ctx is not None or pair.target.context_length <= context.LEAST:
        asked = context.choose(options.n_ctx, pair.target, lambda n: True, "")
        return _with_lanes(with_length(pair, asked), plan_for)
    at_least = _with_lanes(with_length(pair, context.LEAST_LENGTH), plan_for)

    def need(n_ctx: int) -> int:
        return at_least.need(n_ctx).required

    in_ram = context.within_share(need, memory.available_memory())

    def fits(n_ctx: int) -> bool:
        if at_least.plan is None:
            return in_ram(n_ctx)
        longer = plan_for(at_least, n_ctx)
        if longer is None or not longer.as_good_as(at_least.plan):
            return False
        return in_ram(n_ctx) if at_least.plan.uses_ram else True

    limit = "more would take over half of the memory that the weights leave free"
    if at_least.plan is not None:
        limit = "more would push weights off the GPU, or take over half of the free RAM"
    return with_length(at_least, context.choose(None, pair.target, fits, limit))


def _keeps_state(header: GgufHeader) -> bool:
    return header.is_recurrent or header.is_hybrid


def _with_lanes(pair: Pair, plan_for: Callable[[Pair, int], placement.OffloadPlan | None]) -> Pair:
    """Return the pair with the requested number of conversations at once. If each needs states and
    a context of its own: as many as take no more than half of the memory that one leaves free, and
    nothing from its place on the GPUs."""
    one = pair.need(pair.n_ctx).required
    free = memory.available_memory()
    for lanes in range(pair.most_lanes, pair.lanes, -1):
        more = replace(pair, lanes=lanes)
        more = replace(more, plan=plan_for(more, pair.n_ctx))
        if more.plan is not None and pair.plan is not None:
            if not more.plan.as_good_as(pair.plan):
                continue
            if not more.plan.uses_ram:
                return more
        room = context.SHARE * (free * memory.MARGIN - one)
        if not free or more.need(pair.n_ctx).required - one <= room:
            return more
    return pair


def _offload(
    pair: Pair, found: Sequence[devices.Device], n_ctx: int
) -> placement.OffloadPlan | None:
    """See ``Pair.plan``."""
    options = pair.options
    gpus = devices.gpus(found)
    drafts = PlaceOptions(devices=options.draft_devices)
    for one, header in ((options.place, pair.target), (drafts, pair.draft)):
        # what cannot be followed is said, GPU or not
        chosen = planning.chosen_devices(one, found)
        if header is not None:
            planning.checked_moves(one, header, chosen)
    moved = options.place.overrides
    none_asked = options.gpu_layers == "0" and options.draft_gpu_layers in ("0", "auto")
    if not moved and (none_asked or not gpus):
        return None
    return planning.plan_offload(
        pair.target, pair.draft, found, options, n_ctx=n_ctx, lanes=pair.lanes
    )
