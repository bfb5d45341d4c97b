"""Parameters of a caller: for loading (EngineOptions) and for generating (GenerateParams).

Each field says its default, range, help and group once. A bad value raises UsageError, which names
the accepted range, whatever the front end. Plain dataclasses: cheap to import, to log, and to send
to another process.
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
from specllama.settings import method_list
from specllama.settings.hardware import Adapter, PlaceOptions, endpoints
from specllama.settings.setting import (
    MOST,
    check,
    length,
    placement,
    rare_sampler,
    sampler,
    setting,
    speculation,
    thinking,
)

VerifyRule = str  # one of VERIFY_RULES
Repacking = Literal["auto", "on", "off"]
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
PROPOSERS = ("auto", *method_list.names(), "none")
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


def template_arguments(items: Sequence[str]) -> dict[str, Any]:
    """Read ``name=value`` items; a value that is JSON is read as such, any other is a text.

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
    (-inf forbids the token). ``infill`` is llama.cpp's sampler for text that fills a gap.
    """

    temperature: float = sampler(
        0.8,
        "Randomness; 0 takes the likeliest token.",
        flags=("--temperature", "--temp"),
        within=(0, 100),
    )
    top_k: int = sampler(40, "Keep the K likeliest tokens; 0 keeps all.", within=(0, MOST))
    top_p: float = sampler(
        0.95,
        "Keep the likeliest tokens that together reach this probability; 1 keeps all.",
        within=(0, 1),
        above=True,
    )
    min_p: float = sampler(
        0.05, "Drop tokens less likely than this fraction of the likeliest one.", within=(0, 1)
    )
    typical_p: float = rare_sampler(
        1.0,
        "Locally typical sampling; 1 is off.",
        name="typical",
        flags=("--typical", "--typical-p"),
        within=(0, 1),
        above=True,
    )
    repeat_penalty: float = sampler(
        1.0, "Divide scores of repeated tokens; 1 is off.", within=(0.01, 10)
    )
    repeat_last_n: int = rare_sampler(
        64, "How many tokens the penalties look back; -1 is the whole context.", within=(-1, MOST)
    )
    presence_penalty: float = sampler(
        0.0,
        "Penalty subtracted once from the score of every token that has occurred.",
        within=(-10, 10),
    )
    frequency_penalty: float = sampler(
        0.0, "Penalty subtracted each time a token has occurred.", within=(-10, 10)
    )
    dry_multiplier: float = rare_sampler(
        0.0, "Strength of the DRY penalty on repeated phrases; 0 is off.", within=(0, 100)
    )
    dry_base: float = rare_sampler(
        1.75, "Factor by which the DRY penalty grows with each repeated token.", within=(1, 100)
    )
    dry_allowed_length: int = rare_sampler(
        2, "Longest repeat, in tokens, that DRY does not penalize.", within=(1, MOST)
    )
    dry_penalty_last_n: int = rare_sampler(
        -1, "How many tokens DRY looks back; -1 is the whole context.", within=(-1, MOST)
    )
    dry_sequence_breakers: tuple[str, ...] = rare_sampler(
        ("\n", ":", '"', "*"),
        "Text at which DRY stops matching a repeat; repeatable.",
        name="dry-sequence-breaker",
    )
    xtc_probability: float = rare_sampler(
        0.0, "Chance to drop the top choices (XTC); 0 is off.", within=(0, 1)
    )
    xtc_threshold: float = rare_sampler(
        0.1, "XTC drops only choices above this probability.", within=(0, 1)
    )
    logit_bias: dict[int, float] = field(default_factory=dict)
    infill: bool = False

    def __post_init__(self) -> None:
        check(self)
        breakers = self.dry_sequence_breakers
        if len(breakers) > BREAKERS_LIMIT or any(not 0 < len(s) <= 64 for s in breakers):
            raise UsageError(
                f"dry-sequence-breakers takes up to {BREAKERS_LIMIT} strings of 1 to 64 characters"
            )
        for token, bias in self.logit_bias.items():
            if math.isnan(bias) or bias == math.inf:
                raise UsageError(f"logit-bias of token {token} must be finite or -inf, got {bias}")


@dataclass(frozen=True, slots=True)
class GenerateParams:
    """Parameters of one request. A field's help text, if it has one, explains it.

    Attributes:
        from_card: sampling fields that no caller chose: the engine takes them from the model's
            card.
        stop: matched across token boundaries, never shown, and not looked for in thoughts.
        draft_max: None lets the pair decide, see ``draft_limit``.
        min_speculative_tokens: a reply that is limited to fewer is decoded plainly.
        grammar: GBNF text. json_schema: JSON schema text. regex: what the whole text matches. At
            most one of the three.
        calls: what a reply may be instead of a text that fits that one: calls of tools, as rules in
            Lark and their JSON schemas (``server.tools``).
        spelled: control tokens of a reply are part of its text, but for its end: calls of tools are
            written with them.
        chances: report how likely each token was to the target, before any sampler, and so many
            others; None does not.
        scope: whose caches it may go on from: those of requests with the same one.
        fresh: it goes on from nothing: the whole prompt is read.
        owner: whose conversation it is, by which what it leaves is kept on disk; "" keeps nothing.
        slot: which of an engine's places it takes if that is free; None takes the best.
        prediction: what the reply is expected to be, to draft from; no text depends on it.
        at_suffix: a reply that fills a gap ends before it repeats the text after the gap;
            ``repeats`` are the texts by which that shows.
        indent: a line of the reply that is indented less ends it.
        most_ms: a reply that takes longer than this ends with the line that it is at; 0 is off.
        ahead: only read the conversation, whose last message is still being typed, as far as it
            stands; see ``Engine.begin``.
    """

    sampling: SamplingParams = field(default_factory=SamplingParams)
    from_card: tuple[str, ...] = ()
    max_tokens: int | None = length(
        None,
        "Longest reply, in tokens. Unset or -1: until the context is full.",
        flags=("-n", "--max-tokens"),
        within=(1, MOST),
        unset=-1,
    )
    seed: int | None = sampler(
        None,
        "Random seed. Unset or -1: drawn at random, and reported.",
        within=(0, SEED_LIMIT - 1),
        unset=-1,
    )
    stop: tuple[str, ...] = length((), "Text that ends the reply; repeatable, up to 16 times.")
    ignore_eos: bool = length(
        False, "Continue past the model's end token; a complete grammar still ends the reply."
    )
    speculate: bool = speculation(
        True,
        "Draft and verify; the text is the same. --no-spec decodes plainly.",
        flags=("--spec/--no-spec",),
    )
    proposer: str = speculation(
        "auto",
        "Method of drafting. auto is mixed: forced text and copies of the text compete with the "
        "draft model or head of the pair; a wrong name lists all methods.",
        choices=PROPOSERS,
        metavar="METHOD",
    )
    draft_max: int | None = speculation(
        None,
        "Most tokens drafted per round; 0 decodes plainly. Unset: 15 where that is bit-exact, "
        "else 6.",
        within=(0, DRAFT_MAX_LIMIT),
    )
    window: WindowKind = speculation(
        "auto",
        "auto drafts only as far as it pays on this machine, and never falls further behind than 8 "
        "plain steps, 1 % and what one round overran; fixed always drafts up to draft-max.",
        choices=WINDOWS,
    )
    draft_p_min: float = speculation(
        0.0,
        "End a draft at a token whose probability is below this; 0 is off.",
        within=(0, 1),
        flag=False,
    )
    verify: VerifyRule = speculation(
        "match",
        "Verification rule. match writes the text of plain decoding, token for token; the others "
        "keep its distribution.",
        choices=VERIFY_RULES,
    )
    min_speculative_tokens: int = setting(8, within=(0, MOST))
    on_full: OnFull = length(
        "stop",
        "When the context is full: stop, or shift out the oldest text.",
        choices=("stop", "shift"),
    )
    grammar: str | None = None
    json_schema: str | None = None
    regex: str | None = None
    calls: str = ""
    think: str = thinking(
        "auto",
        "How hard the model thinks before it answers. auto follows its template; --no-think is "
        "--think=off.",
        choices=THINK,
        metavar="on|off|low|medium|high",
    )
    think_budget: int | None = thinking(
        None,
        "Most tokens of reasoning before the answer begins. Unset: no limit.",
        within=(0, MOST),
    )
    template_args: tuple[str, ...] = thinking(
        (),
        "A variable of the chat template; a value is JSON or text; repeatable.",
        flags=("--template-arg",),
        metavar="NAME=VALUE",
        flag=False,
    )
    steady_prompts: bool = thinking(
        True,
        "In serve, leave out of system prompts what changes with each request and is meant for "
        "another service (Claude Code's billing header), so that the rest is found in the cache.",
        flag=False,
    )
    spelled: bool = False
    chances: int | None = setting(None, within=(0, CHANCES_LIMIT))
    scope: str = ""
    fresh: bool = False
    owner: str = ""
    slot: int | None = None
    prediction: str = ""
    at_suffix: bool = True
    repeats: tuple[str, ...] = ()
    indent: int = 0
    most_ms: float = 0.0
    ahead: bool = False

    def __post_init__(self) -> None:
        check(self)
        if len(self.stop) > 16 or any(not 0 < len(s) <= STOP_LIMIT for s in self.stop):
            raise UsageError(f"stop takes up to 16 strings of 1 to {STOP_LIMIT} characters")
        if len(self._constraints) > 1:
            raise UsageError("give only one of a grammar, a JSON schema and a regular expression")
        if self.template_args:
            template_arguments(self.template_args)

    @property
    def constrained(self) -> bool:
        """True if a grammar limits the tokens."""
        return bool(self._constraints)

    @property
    def _constraints(self) -> list[str]:
        return [one for one in (self.grammar, self.json_schema, self.regex) if one is not None]

    def draft_limit(self, exact_rows: int) -> int:
        """Return ``draft_max`` for a pair whose passes are bit-identical up to ``exact_rows`` rows.

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
        """Return these parameters with the sampling fields that the model's card recommends."""
        taken = {name: card[name] for name in self.from_card if name in card}
        changed = dataclasses.replace(self.sampling, **taken)  # type: ignore[arg-type]
        return self if changed == self.sampling else self.replace(sampling=changed)

    def choose(self, name: str, value: float | None) -> GenerateParams:
        """Set one sampling field; None leaves it to the model's card, else to the default."""
        left = {*self.from_card} - {name} if value is not None else {*self.from_card, name}
        value = getattr(SamplingParams(), name) if value is None else value
        sampling = dataclasses.replace(self.sampling, **{name: value})  # type: ignore[arg-type]
        return self.replace(sampling=sampling, from_card=tuple(sorted(left)))


SERVER = "server"  # the owner of what a server's clients leave


def disk_bytes(text: str) -> int | None:
    """Read a size on disk, "8G", "500M" or MiB without a unit; return None for "auto".

    Raises:
        UsageError: it is none of these, nor "off".
    """
    if text == "auto":
        return None
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmgt]?)(?:i?b)?", text.strip().lower())
    if text != "off" and found is None:
        raise UsageError(f"kv-disk must be a size such as 8G or 500M, or off, got {text!r}")
    units = {"k": 10, "": 20, "m": 20, "g": 30, "t": 40}
    return 0 if found is None else int(float(found[1]) * (1 << units[found[2]]))


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """Options for loading a pair. A field's help text, if it has one, explains it.

    Attributes:
        place: where the weights of the target go.
        swa_full: with the whole cache of sliding-window layers, any rollback is possible; without
            it, a context needs less memory. A pair that does not fit with it is loaded without.
        max_leaves: most branches of a token tree; 1 allows chains only.
        flash_attn, kv_type_k, kv_type_v: on CPUs, the rows of flash attention need not depend on
            the width of a pass.
        max_rows: the widest target pass that will be asked for (drafts + 1).
        parallel: conversations that can be written at once, in one context that they share; with a
            running state in one each, and as many as memory allows.
        kv_ram: MiB for what conversations left in a context that others have to share; None: see
            ``idle_bytes``.
        exact: "on" takes the widths that cost least, a number is the most rows of a pass.
    """

    heads: tuple[str, ...] = setting(
        (),
        "Drafting head of the target (EAGLE-3, Medusa, DFlash, MTP, assistant): a file, or the "
        "name of a model that one ships for; repeatable.",
        name="head",
        metavar="FILE|NAME",
    )
    n_ctx: int | None = setting(
        None,
        "Context length in tokens; 0: as trained. Unset: what fits, up to that.",
        name="ctx-size",
        flags=("-c", "--ctx-size"),
        within=(0, 2**24),
    )
    gpu_layers: str = setting(
        "auto",
        "Layers on the GPU: auto, all or a count.",
        flags=("-ngl", "--gpu-layers"),
        metavar="auto|all|N",
    )
    draft_gpu_layers: str = setting(
        "auto", "Layers of the draft model on the GPU: auto, all or a count.", metavar="auto|all|N"
    )
    rpc: str = placement(
        "",
        "Other machines that take layers: llama.cpp workers (specllama rpc-worker), separated by "
        "commas.",
        metavar="HOST:PORT,…",
    )
    place: PlaceOptions = field(default_factory=PlaceOptions)
    draft_devices: str = placement(
        "", "Devices for the draft model.", name="draft-device", metavar="NAME,…", flag=False
    )
    threads: int | None = setting(
        None,
        "CPU threads. Unset: the physical cores, or fewer while that is faster.",
        flags=("-t", "--threads"),
        within=(1, 1024),
    )
    rope_scale: float | None = setting(
        None, "Stretch the trained context by this factor.", within=(1e-3, 1e3), flag=False
    )
    swa_full: bool = True
    flash_attn: FlashAttention = setting(
        "auto",
        "Flash attention; auto is on for CPU and llama.cpp's own choice for GPUs.",
        choices=("auto", "on", "off"),
    )
    kv_type_k: str = setting(
        "auto",
        "Type of the K half of the KV cache; auto is f16.",
        name="cache-type-k",
        choices=KV_TYPES,
    )
    kv_type_v: str = setting(
        "auto",
        "Type of the V half of the KV cache; auto is f16.",
        name="cache-type-v",
        choices=KV_TYPES,
    )
    n_batch: int | None = setting(
        None,
        "Prompt tokens per pass. Unset: 512 on a GPU, 256 on a CPU.",
        name="batch-size",
        within=(32, 2**16),
    )
    loras: tuple[str, ...] = setting(
        (),
        "LoRA adapter for the target, with its strength if that is not 1; repeatable.",
        name="lora",
        metavar="FILE[:SCALE]",
    )
    use_mmap: bool = setting(True, "Map model files instead of reading them.", name="mmap")
    kernels: Literal["auto", "off"] = setting(
        "auto",
        "Products on a CPU: auto uses specllama's own kernels where a check of them went well, "
        "unless --repack names another layout of the weights; off leaves all to llama.cpp.",
        choices=("auto", "off"),
    )
    repack: Repacking = setting(
        "auto",
        "Rearrange weights for wide products on a CPU; auto takes the layout whose passes are "
        "bitwise, by the types of the weights. Where the other one is faster, verdicts name it.",
        choices=("auto", "on", "off"),
    )
    use_mlock: bool = setting(
        False, "Keep the model in memory (no swapping).", name="mlock", flag=False
    )
    check_memory: bool = setting(
        True, "Refuse a pair that needs more memory than is free.", flag=False
    )
    allow_other_vocab: bool = speculation(
        False, "Accept a draft model with another tokenizer; its guesses are translated."
    )
    draft_tokens: Literal["auto", "all"] = speculation(
        "auto",
        "Words that a draft model guesses: all, or in auto those of a copy that was made at rest, "
        "in the cache, where its steps take less time.",
        choices=("auto", "all"),
        flag=False,
    )
    max_leaves: int = setting(16, within=(1, 256))
    draft_from: tuple[str, ...] = speculation(
        (),
        "Copy drafts from this file, or from the texts of this folder, as well; repeatable.",
        metavar="FILE|FOLDER",
    )
    exact: str = speculation(
        "off",
        "The same bits in plain and drafted passes: all of them get a number of rows that one "
        "kernel computes. Without N, at the least cost; N is the most rows of a pass.",
        metavar="[N]",
    )
    max_rows: int = setting(DRAFT_MAX_LIMIT + 1, within=(1, 4096))
    parallel: int = setting(1, within=(1, 64))
    kv_ram: int | None = setting(
        None,
        "In serve, memory for idle conversations whose cells others need, in MiB. Unset: as much "
        "as model and context take, at most 1024.",
        "Server",
        within=(0, 2**24),
        flag=False,
    )
    kv_disk: str = setting(
        "auto",
        "Keep states of conversations on disk, up to this size (8G, 500M), so that they reopen "
        "without being read again; off keeps nothing. auto: 4G, or a tenth of what is free.",
        "Output",
        metavar="SIZE|off",
        flag=False,
    )

    def idle_bytes(self, model_bytes: int) -> int:
        """Return the memory that idle conversations may take outside the shared context: unless it
        is set, as much as the pair takes with its contexts, and at most 1 GiB."""
        return min(model_bytes, 1 << 30) if self.kv_ram is None else self.kv_ram << 20

    @property
    def coarse_cache(self) -> str:
        """A warning about a cache in which some models write rubbish; "" without need."""
        kind = self.kv_type_k
        if not kind.startswith(("q4", "q5", "iq4")):
            return ""
        return (
            f"the K half of the cache is {kind}, which is too coarse for some models: in tries, "
            "Qwen2.5-Coder 1.5B wrote rubbish with it, and SmolLM2 135M and Gemma 3 270M chose "
            "other words now and then. --cache-type-k q8_0 is safe; the V half may stay as it is"
        )

    @property
    def own_kernels(self) -> bool:
        """True if our own kernels are wanted: a named layout of the weights is llama.cpp's."""
        return self.kernels == "auto" and self.repack == "auto"

    def batch(self, *, on_gpu: bool) -> int:
        """Return the prompt tokens per pass. On a CPU a pass can be cancelled only between its
        operations, and these take longer with more rows."""
        return self.n_batch or (512 if on_gpu else 256)

    def resolved(
        self, *, on_gpu: bool, one_kv_type: bool = False, apart: bool = False
    ) -> EngineOptions:
        """Return the options with every "auto" of attention and cache types decided.

        Args:
            one_kv_type: K and V lie in one cache and can only be of one type.
            apart: on a CPU, choose types that llama.cpp's split and tiled attention do not take:
                rows are then alike in passes of every width where attention cannot be switched
                (see ``backend.symbols``), at the price of slow prompts.

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
        check(self)
        if self.n_ctx is not None and 0 < self.n_ctx < 8:
            raise UsageError(f"ctx-size must be 0, or 8 and more, got {self.n_ctx}")
        for name, layers in (
            ("gpu-layers", self.gpu_layers),
            ("draft-gpu-layers", self.draft_gpu_layers),
        ):
            if layers not in ("auto", "all") and not layers.isdigit():
                raise UsageError(f"{name} must be auto, all or a count, got {layers!r}")
        endpoints(self.rpc)
        PlaceOptions(devices=self.draft_devices)
        disk_bytes(self.kv_disk)
        for adapter in self.loras:
            Adapter.read(adapter)
        widest = DRAFT_MAX_LIMIT + 1
        if self.exact not in ("off", "on") and not (
            self.exact.isdecimal() and 2 <= int(self.exact) <= widest
        ):
            raise UsageError(
                f"exact must be on, off or a number of rows from 2 to {widest}, got {self.exact!r}"
            )
        if any(not head for head in self.heads):
            raise UsageError("--head needs a file, not an empty name")
