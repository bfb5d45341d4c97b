"""What a caller can ask for: how to load (EngineOptions) and how to generate (GenerateParams).

Values are validated here, once, for every front end. A bad value raises UsageError, which names
the accepted range. Plain dataclasses: cheap to import, to log, and to send to another process.
"""

from __future__ import annotations

import dataclasses
import json
import math
import platform
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from specllama.errors import UsageError
from specllama.settings import methods
from specllama.settings.hardware import Adapter, CpuOptions, PlaceOptions, RopeOptions, endpoints

VerifyRule = str  # one of VERIFY_RULES
FlashAttention = Literal["auto", "on", "off"]
OnFull = Literal["stop", "shift"]
WindowKind = Literal["auto", "fixed"]

# where each rule is; those who list rules need not import them
VERIFY_RULES: dict[VerifyRule, str] = {
    "match": "specllama.speculative.rules:MATCH",
    "rejection": "specllama.speculative.rules:REJECTION",
    "block": "specllama.speculative.rules:BLOCK",
}
WINDOWS: tuple[WindowKind, ...] = ("auto", "fixed")
PROPOSERS = ("auto", *methods.names(), "none")
KV_TYPES = ("auto", "f16", "f32", "bf16", "q8_0", "q4_0", "q4_1", "q5_0", "q5_1", "iq4_nl")
# Types of K and V on CPUs where they must differ. On x86 a bf16 K costs less than f16 (a step at
# 600 tokens: 0.97), a bf16 V more (1.11); other processors have no vector code for a bf16 K.
KV_APART_X86 = ("bf16", "f16")
KV_APART = ("f16", "bf16")
THINK = ("auto", "on", "off", "low", "medium", "high")
EFFORTS = THINK[3:]
DRAFT_MAX_LIMIT = 64
DRAFT_MAX_EXACT = 15  # unless given, where passes of 16 rows are bit-identical to single ones
DRAFT_MAX = 6  # and elsewhere
_VARIABLE = re.compile(r"[A-Za-z_]\w*")
CHANCES_LIMIT = 128
BREAKERS_LIMIT = 32
STOP_LIMIT = 1024  # characters of a stop string
SEED_LIMIT = 2**64
SEED_DRAWN = 2**53  # a drawn seed is below: many readers of JSON keep no larger integer


def _is_x86() -> bool:
    return platform.machine().lower() in ("x86_64", "amd64", "i686", "x86")


def _finite(name: str, value: float, low: float, high: float, *, open_low: bool = False) -> None:
    if not isinstance(value, (int, float)) or not math.isfinite(value):
        raise UsageError(f"{name} must be a finite number, got {value!r}")
    if value < low or value > high or (open_low and value == low):
        bracket = "(" if open_low else "["
        raise UsageError(f"{name} must be in {bracket}{low:g}, {high:g}], got {value!r}")


def _whole(name: str, value: int, low: int, high: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise UsageError(f"{name} must be a whole number from {low} to {high}, got {value!r}")


def template_arguments(items: Sequence[str]) -> dict[str, Any]:
    """``name=value`` each; a value that is JSON is taken as such, any other is a text.

    Raises:
        UsageError: an item is something else, or names what only a conversation can give.
    """
    found: dict[str, Any] = {}
    for item in items:
        name, equals, text = item.partition("=")
        name = name.strip()
        if not equals or not _VARIABLE.fullmatch(name):
            raise UsageError(
                f"cannot read the template argument {item!r}",
                "write NAME=VALUE, for example enable_thinking=false",
            )
        if name == "messages":
            raise UsageError("messages come from the conversation, not from a template argument")
        try:
            found[name] = json.loads(text)
        except ValueError:
            found[name] = text
    return found


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """The user's sampler chain, under llama.cpp's names and with its defaults and order:
    penalties, DRY, logit bias, grammar, top-k, typical, top-p, min-p, XTC, temperature.

    ``temperature == 0`` is greedy. ``top_k == 0``, ``top_p == 1``, ``min_p == 0`` and
    ``typical_p == 1`` switch each off. ``logit_bias`` maps token id to an added logit
    (-inf forbids the token).
    """

    temperature: float = 0.8
    top_k: int = 40
    top_p: float = 0.95
    min_p: float = 0.05
    typical_p: float = 1.0
    repeat_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repeat_last_n: int = 64
    dry_multiplier: float = 0.0
    dry_base: float = 1.75
    dry_allowed_length: int = 2
    dry_penalty_last_n: int = -1
    dry_sequence_breakers: tuple[str, ...] = ("\n", ":", '"', "*")
    xtc_probability: float = 0.0
    xtc_threshold: float = 0.1
    logit_bias: dict[int, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        _finite("temperature", self.temperature, 0.0, 100.0)
        _whole("top-k", self.top_k, 0, 2**31 - 1)
        _finite("top-p", self.top_p, 0.0, 1.0, open_low=True)
        _finite("min-p", self.min_p, 0.0, 1.0)
        _finite("typical-p", self.typical_p, 0.0, 1.0, open_low=True)
        _finite("repeat-penalty", self.repeat_penalty, 0.01, 10.0)
        _finite("frequency-penalty", self.frequency_penalty, -10.0, 10.0)
        _finite("presence-penalty", self.presence_penalty, -10.0, 10.0)
        _whole("repeat-last-n", self.repeat_last_n, -1, 2**31 - 1)
        _finite("dry-multiplier", self.dry_multiplier, 0.0, 100.0)
        _finite("dry-base", self.dry_base, 1.0, 100.0)
        _whole("dry-allowed-length", self.dry_allowed_length, 1, 2**31 - 1)
        _whole("dry-penalty-last-n", self.dry_penalty_last_n, -1, 2**31 - 1)
        breakers = self.dry_sequence_breakers
        if len(breakers) > BREAKERS_LIMIT or any(not 0 < len(s) <= 64 for s in breakers):
            raise UsageError(
                f"dry-sequence-breakers takes up to {BREAKERS_LIMIT} strings of 1 to 64 characters"
            )
        _finite("xtc-probability", self.xtc_probability, 0.0, 1.0)
        _finite("xtc-threshold", self.xtc_threshold, 0.0, 1.0)
        for token, bias in self.logit_bias.items():
            if math.isnan(bias) or bias == math.inf:
                raise UsageError(f"logit-bias of token {token} must be finite or -inf, got {bias}")


@dataclass(frozen=True, slots=True)
class GenerateParams:
    """One request.

    Attributes:
        from_card: sampling fields that nobody chose: ``on_card`` takes them from the model's card.
        max_tokens: upper bound on generated tokens; None means until the context is full.
        seed: 0 <= seed < 2**64; None draws one, which every ``finish`` reports.
        stop: strings that end the answer; matched across token boundaries, never shown, and not
            looked for in thoughts.
        proposer: one of PROPOSERS; "auto" is mixed: copies, and a draft model or head if any.
        draft_max: most tokens drafted per round (0 means plain decoding); None lets the pair
            decide, see ``reach``.
        window: "auto" drafts as far as it was measured to pay here, possibly not at all; "fixed"
            always drafts ``draft_max``.
        min_speculative_tokens: below this ``max_tokens`` speculation is skipped.
        ignore_eos: continue past the model's end token; a complete grammar still ends the reply.
        grammar: GBNF text. json_schema: JSON schema text. regex: what the whole text matches. At
            most one of the three.
        think: one of THINK: thoughts on or off, or how hard to think; "auto" is the template's way.
        think_budget: most tokens of thoughts; behind them the thought is closed.
        template_args: variables of the chat template, ``name=value`` each; a value is JSON or text.
        spelled: control tokens of a reply are part of its text, but for its end: calls of tools are
            written with them.
        chances: tell how likely each token was to the target, before any sampler, and so many
            others; None does not.
        scope: whose caches it may go on from: those of requests with the same one.
    """

    sampling: SamplingParams = field(default_factory=SamplingParams)
    from_card: tuple[str, ...] = ()
    max_tokens: int | None = None
    seed: int | None = None
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False
    speculate: bool = True
    proposer: str = "auto"
    verify: VerifyRule = "match"
    draft_max: int | None = None
    window: WindowKind = "auto"
    draft_min: int = 0
    draft_p_min: float = 0.0
    min_speculative_tokens: int = 8
    on_full: OnFull = "stop"
    grammar: str | None = None
    json_schema: str | None = None
    regex: str | None = None
    think: str = "auto"
    think_budget: int | None = None
    template_args: tuple[str, ...] = ()
    spelled: bool = False
    chances: int | None = None
    scope: str = ""

    def __post_init__(self) -> None:
        if self.max_tokens is not None:
            _whole("max-tokens", self.max_tokens, 1, 2**31 - 1)
        if self.seed is not None:
            _whole("seed", self.seed, 0, SEED_LIMIT - 1)
        if len(self.stop) > 16 or any(not 0 < len(s) <= STOP_LIMIT for s in self.stop):
            raise UsageError(f"stop takes up to 16 strings of 1 to {STOP_LIMIT} characters")
        if self.proposer not in PROPOSERS:
            raise UsageError(
                f"unknown proposer {self.proposer!r}", f"choose one of {', '.join(PROPOSERS)}"
            )
        if self.verify not in VERIFY_RULES:
            raise UsageError(
                f"unknown verification rule {self.verify!r}",
                f"choose one of {', '.join(VERIFY_RULES)}",
            )
        if self.window not in WINDOWS:
            raise UsageError(f"window must be auto or fixed, got {self.window!r}")
        if self.draft_max is not None:
            _whole("draft-max", self.draft_max, 0, DRAFT_MAX_LIMIT)
        _whole("draft-min", self.draft_min, 0, DRAFT_MAX_LIMIT)
        _finite("draft-p-min", self.draft_p_min, 0.0, 1.0)
        _whole("min-speculative-tokens", self.min_speculative_tokens, 0, 2**31 - 1)
        if self.on_full not in ("stop", "shift"):
            raise UsageError(f"on-full must be stop or shift, got {self.on_full!r}")
        if len(self._constraints) > 1:
            raise UsageError("give only one of a grammar, a JSON schema and a regular expression")
        if self.think not in THINK:
            raise UsageError(f"think must be one of {', '.join(THINK)}, got {self.think!r}")
        if self.think_budget is not None:
            _whole("think-budget", self.think_budget, 0, 2**31 - 1)
        if self.template_args:
            template_arguments(self.template_args)
        if self.chances is not None:
            _whole("chances", self.chances, 0, CHANCES_LIMIT)

    @property
    def constrained(self) -> bool:
        """Whether a grammar limits the tokens."""
        return bool(self._constraints)

    @property
    def _constraints(self) -> list[str]:
        given = (self.grammar, self.json_schema, self.regex)
        return [one for one in given if one is not None]

    def reach(self, exact_rows: int) -> int:
        """``draft_max`` for a pair whose passes are bit-identical up to ``exact_rows`` rows.

        If it is not given, the adaptive window may use up to 16 rows where that cannot change a
        token: long copies pay best there. Elsewhere passes stay narrow: fewer near-ties.
        """
        if self.draft_max is not None:
            return self.draft_max
        wide = self.window == "auto" and exact_rows > DRAFT_MAX_EXACT
        return DRAFT_MAX_EXACT if wide else DRAFT_MAX

    def replace(self, **changes: Any) -> GenerateParams:
        return dataclasses.replace(self, **changes)

    def on_card(self, card: Mapping[str, float]) -> GenerateParams:
        """The same for a model whose card recommends these sampling fields."""
        taken = {name: card[name] for name in self.from_card if name in card}
        changed = dataclasses.replace(self.sampling, **taken)  # type: ignore[arg-type]
        return self if changed == self.sampling else self.replace(sampling=changed)

    def choose(self, name: str, value: float | None) -> GenerateParams:
        """Set one sampling field; None leaves it to the model's card, else to the default."""
        left = {*self.from_card} - {name} if value is not None else {*self.from_card, name}
        value = getattr(SamplingParams(), name) if value is None else value
        sampling = dataclasses.replace(self.sampling, **{name: value})  # type: ignore[arg-type]
        return self.replace(sampling=sampling, from_card=tuple(sorted(left)))


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """How to load a pair.

    Attributes:
        n_ctx: context length; None takes what fits, up to the trained length, 0 that length.
        gpu_layers: "auto" (all if a GPU backend is built in), "all", or a count.
        rpc: workers of llama.cpp, HOST:PORT separated by commas, whose devices are used, too.
        place, draft_place: where the weights of target and draft go.
        threads: None takes the number of physical cores, or fewer while that is faster.
        threads_batch: for prompts; None takes ``threads``.
        cpu: which cores compute. rope: how positions are turned into angles.
        swa_full: keep the whole cache of layers that see only a window: any rollback is possible.
        flash_attn, kv_type_k, kv_type_v: "auto" is f16, with flash attention on CPUs (whose rows
            need not depend on the width of a pass), llama.cpp's own choice on GPUs.
        max_rows: the widest target pass that will be asked for (drafts + 1).
        max_leaves: most branches of a token tree; 1 makes a context for chains only.
        n_batch: prompt tokens per call; None takes 512 on a GPU, 256 on a CPU.
        n_ubatch: prompt tokens that are computed at once; None takes ``n_batch``.
        loras: adapters for the target, FILE or FILE:SCALE.
        heads: files of drafting heads for the target.
        allow_other_vocab: accept a draft model with another tokenizer and translate.
        keep_texts: let the suffix proposer keep this machine's texts (as token ids, on disk) and
            copy from them in later runs.
        parallel: conversations that can be written at once, in one context that they share.
        kv_ram: MiB for what conversations left in a context that others have to share.
        exact: keep the target's passes to widths in which every row has the same bits, in plain
            decoding, too: "on" takes those that cost least, a number is the most rows of a pass.
        check_memory: refuse a pair that needs more memory than is free.
    """

    n_ctx: int | None = None
    gpu_layers: str = "auto"
    draft_gpu_layers: str = "auto"
    rpc: str = ""
    place: PlaceOptions = field(default_factory=PlaceOptions)
    draft_place: PlaceOptions = field(default_factory=PlaceOptions)
    threads: int | None = None
    threads_batch: int | None = None
    cpu: CpuOptions = field(default_factory=CpuOptions)
    rope: RopeOptions = field(default_factory=RopeOptions)
    swa_full: bool = True
    flash_attn: FlashAttention = "auto"
    kv_type_k: str = "auto"
    kv_type_v: str = "auto"
    n_batch: int | None = None
    n_ubatch: int | None = None
    loras: tuple[str, ...] = ()
    max_rows: int = DRAFT_MAX_LIMIT + 1
    max_leaves: int = 16
    heads: tuple[str, ...] = ()
    parallel: int = 1
    kv_ram: int = 1024
    exact: str = "off"
    allow_other_vocab: bool = False
    keep_texts: bool = False
    use_mmap: bool = True
    use_mlock: bool = False
    check_memory: bool = True

    def batch(self, *, on_gpu: bool) -> int:
        """Prompt tokens per pass. On a CPU a pass can be cancelled only between its operations, and
        these take longer with more rows."""
        return self.n_batch or (512 if on_gpu else 256)

    def resolved(
        self, *, on_gpu: bool, one_kv_type: bool = False, apart: bool = False
    ) -> EngineOptions:
        """The same with every "auto" of attention and cache types decided.

        Args:
            one_kv_type: K and V lie in one cache and can only be of one type.
            apart: on a CPU, choose types that llama.cpp's split and tiled attention do not take:
                rows are then alike in passes of every width where attention cannot be switched
                (see ``backend.attention``), at the price of slow prompts.

        Raises:
            UsageError: two types were chosen for one cache.
        """
        flash = self.flash_attn
        if flash == "auto" and not on_gpu:
            flash = "on"
        kind_k, kind_v = self.kv_type_k, self.kv_type_v
        apart = apart and not on_gpu and flash != "off"
        if one_kv_type:
            given = {kind for kind in (kind_k, kind_v) if kind != "auto"}
            if len(given) > 1:
                raise UsageError(
                    f"this model keeps K and V in one cache, which cannot be {kind_k} and {kind_v}",
                    "choose one type, or leave --cache-type-k and --cache-type-v out",
                )
            kind_k = kind_v = given.pop() if given else "bf16" if apart and _is_x86() else "f16"
        elif apart:
            if kind_k == kind_v == "auto":
                kind_k, kind_v = KV_APART_X86 if _is_x86() else KV_APART
            elif kind_v == "auto":
                kind_v = "bf16" if kind_k == "f16" else "f16"
        return dataclasses.replace(
            self,
            flash_attn=flash,
            kv_type_k="f16" if kind_k == "auto" else kind_k,
            kv_type_v="f16" if kind_v == "auto" else kind_v,
        )

    def __post_init__(self) -> None:
        if self.n_ctx:
            _whole("ctx-size", self.n_ctx, 8, 2**24)
        for name, threads in (("threads", self.threads), ("threads-batch", self.threads_batch)):
            if threads is not None:
                _whole(name, threads, 1, 1024)
        for name, layers in (
            ("gpu-layers", self.gpu_layers),
            ("draft-gpu-layers", self.draft_gpu_layers),
        ):
            if layers not in ("auto", "all") and not layers.isdigit():
                raise UsageError(f"{name} must be auto, all or a count, got {layers!r}")
        endpoints(self.rpc)
        if self.flash_attn not in ("auto", "on", "off"):
            raise UsageError(f"flash-attn must be auto, on or off, got {self.flash_attn!r}")
        for kind in (self.kv_type_k, self.kv_type_v):
            if kind not in KV_TYPES:
                raise UsageError(
                    f"unknown KV cache type {kind!r}", f"choose one of {', '.join(KV_TYPES)}"
                )
        if self.n_batch is not None:
            _whole("batch-size", self.n_batch, 32, 2**16)
        if self.n_ubatch is not None:
            _whole("ubatch-size", self.n_ubatch, 32, 2**16)
        for adapter in self.loras:
            Adapter.read(adapter)
        if self.cpu.strict and not self.cpu.allowed:
            raise UsageError("--cpu-strict needs cores to keep to", "add --cpu-range 0-7")
        _whole("max rows", self.max_rows, 1, 4096)
        _whole("max leaves", self.max_leaves, 1, 256)
        _whole("parallel", self.parallel, 1, 64)
        _whole("kv-ram", self.kv_ram, 0, 2**24)
        if self.exact not in ("off", "on"):
            if not self.exact.isdecimal():
                raise UsageError(f"exact must be on, off or a number of rows, got {self.exact!r}")
            _whole("exact", int(self.exact), 2, DRAFT_MAX_LIMIT + 1)
        if any(not head for head in self.heads):
            raise UsageError("--head needs a file, not an empty name")
