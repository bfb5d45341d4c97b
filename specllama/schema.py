"""Every setting: its flag, its key in files, its type, default and help text.

One table serves ``--help``, settings files, environment variables and ``config show``. Defaults are
those of the parameter classes, so each is written down once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from specllama.hardware import (
    NUMA,
    PRIORITIES,
    ROPE_SCALINGS,
    SPLIT_MODES,
    CpuOptions,
    PlaceOptions,
    RopeOptions,
)
from specllama.params import (
    KV_TYPES,
    PROPOSERS,
    THINK,
    VERIFY_RULES,
    WINDOWS,
    EngineOptions,
    GenerateParams,
    SamplingParams,
)

Kind = Literal["int", "float", "bool", "text", "texts"]


@dataclass(frozen=True, slots=True)
class Setting:
    """One option.

    Attributes:
        name: the long option, and the key in files, in kebab case.
        kind: type of the value; "texts" is a list.
        field: where it goes: ``engine.X`` or a part of it (ENGINE_PARTS), ``generate.X``,
            ``sampling.X``, or ``app.X`` for what the front ends use themselves.
        help: one or two sentences, shown by ``--help`` and ``config show``.
        group: heading in ``--help``.
        flags: how it is typed, if not by its long name.
        choices: the only values allowed.
        metavar: what ``--help`` calls the value.
        flag: whether it can be typed on the command line, not only set.
        unset: the value by which other tools say "not given".
    """

    name: str
    kind: Kind
    field: str
    help: str
    group: str
    flags: tuple[str, ...] = ()
    choices: tuple[str, ...] = ()
    metavar: str = ""
    flag: bool = True
    unset: int | None = None

    @property
    def default(self) -> Any:
        room, _, name = self.field.partition(".")
        return _APP_DEFAULTS[name] if room == "app" else getattr(DEFAULTS[room], name)

    @property
    def variable(self) -> str:
        """Name of its environment variable."""
        return "SPECLLAMA_" + self.name.upper().replace("-", "_")


# fields of EngineOptions with settings of their own
ENGINE_PARTS: dict[str, Any] = {
    "place": PlaceOptions(),
    "draft_place": PlaceOptions(),
    "cpu": CpuOptions(),
    "rope": RopeOptions(),
}
DEFAULTS: dict[str, Any] = {
    "engine": EngineOptions(),
    **ENGINE_PARTS,
    "generate": GenerateParams(),
    "sampling": SamplingParams(),
}
_APP_DEFAULTS: dict[str, Any] = {
    "model": None,
    "draft_model": None,
    "system": None,
    "log": True,
    "thoughts": "show",
    "model_dirs": (),
}

_M, _S, _T, _L, _O = "Model", "Speculation", "Sampling", "Length", "Output"
_H = "Thoughts and template"
_P, _R = "Placement", "Long context"
_SWITCH = ("auto", "on", "off")

SCHEMA: tuple[Setting, ...] = (
    Setting(
        "model",
        "text",
        "app.model",
        "Target: a path, user/repo[:quant] or a catalogue name. Without it: the bundled tiny "
        "pair; in the terminal app, the pair opened last.",
        _M,
        ("-m", "--model"),
        metavar="REF",
    ),
    Setting(
        "draft-model",
        "text",
        "app.draft_model",
        "Draft model, named in the same ways.",
        _M,
        ("-d", "--draft-model"),
        metavar="REF",
    ),
    Setting(
        "head",
        "texts",
        "engine.heads",
        "Drafting head trained for the target (an EAGLE-3 or Medusa file); repeatable.",
        _M,
        metavar="FILE",
    ),
    Setting(
        "ctx-size",
        "int",
        "engine.n_ctx",
        "Context length in tokens; 0 is the trained length. Unset: what fits, up to that.",
        _M,
        ("-c", "--ctx-size"),
    ),
    Setting(
        "gpu-layers",
        "text",
        "engine.gpu_layers",
        "Layers of the target on the GPU: auto, all or a count.",
        _M,
        ("-ngl", "--gpu-layers"),
        metavar="auto|all|N",
    ),
    Setting(
        "draft-gpu-layers",
        "text",
        "engine.draft_gpu_layers",
        "The same for the draft model.",
        _M,
        metavar="auto|all|N",
    ),
    Setting(
        "device",
        "text",
        "place.devices",
        "Devices for the target, apart by commas; none is the CPU alone. Unset: every GPU. doctor "
        "names them.",
        _P,
        metavar="NAME,…",
    ),
    Setting(
        "split-mode",
        "text",
        "place.split_mode",
        "Over several devices: whole layers, the rows of each matrix, or no splitting.",
        _P,
        choices=SPLIT_MODES,
    ),
    Setting(
        "tensor-split",
        "text",
        "place.tensor_split",
        "Shares of the devices, such as 3,1. Unset: by their free memory.",
        _P,
        metavar="N,N,…",
    ),
    Setting(
        "main-gpu",
        "int",
        "place.main_gpu",
        "Number of the device that takes what is not split.",
        _P,
    ),
    Setting(
        "cpu-moe",
        "bool",
        "place.cpu_moe",
        "Keep the experts of every layer in RAM.",
        _P,
        ("--cpu-moe/--no-cpu-moe",),
    ),
    Setting(
        "n-cpu-moe",
        "int",
        "place.n_cpu_moe",
        "Keep the experts of the first N layers in RAM. Unset: as many as the GPUs have no room "
        "for.",
        _P,
    ),
    Setting(
        "override-tensor",
        "texts",
        "place.overrides",
        "Put the tensors whose names match a pattern on a device; repeatable.",
        _P,
        ("-ot", "--override-tensor"),
        metavar="PATTERN=DEVICE",
    ),
    Setting(
        "draft-device",
        "text",
        "draft_place.devices",
        "Devices for the draft model.",
        _P,
        metavar="NAME,…",
    ),
    Setting(
        "draft-cpu-moe",
        "bool",
        "draft_place.cpu_moe",
        "Keep the draft model's experts in RAM.",
        _P,
    ),
    Setting(
        "draft-n-cpu-moe",
        "int",
        "draft_place.n_cpu_moe",
        "Keep the experts of its first N layers in RAM.",
        _P,
    ),
    Setting(
        "draft-override-tensor",
        "texts",
        "draft_place.overrides",
        "Put tensors of the draft model on a device; repeatable.",
        _P,
        metavar="PATTERN=DEVICE",
    ),
    Setting(
        "threads-batch",
        "int",
        "engine.threads_batch",
        "CPU threads for prompts. Unset: as many as --threads.",
        _P,
    ),
    Setting(
        "numa",
        "text",
        "cpu.numa",
        "On a machine of several NUMA nodes: distribute over all, isolate on the one it starts on, "
        "or keep to numactl's.",
        _P,
        choices=NUMA,
    ),
    Setting(
        "cpu-mask",
        "text",
        "cpu.mask",
        "Cores that may compute, as a hexadecimal mask.",
        _P,
        metavar="HEX",
    ),
    Setting(
        "cpu-range",
        "text",
        "cpu.cores",
        "Cores that may compute, as ranges.",
        _P,
        metavar="0-7,16",
    ),
    Setting(
        "cpu-strict",
        "bool",
        "cpu.strict",
        "Bind each thread to one of these cores.",
        _P,
    ),
    Setting(
        "prio",
        "text",
        "cpu.priority",
        "Priority of the computing threads.",
        _P,
        choices=PRIORITIES,
    ),
    Setting(
        "poll",
        "int",
        "cpu.poll",
        "How busily they wait between passes: 0 sleeps, 100 never does.",
        _P,
    ),
    Setting(
        "swa-full",
        "bool",
        "engine.swa_full",
        "Keep the whole cache of layers that see only a window.",
        _R,
    ),
    Setting(
        "rope-scaling",
        "text",
        "rope.scaling",
        "Scaling of positions beyond the trained length; auto is the model's.",
        _R,
        choices=ROPE_SCALINGS,
    ),
    Setting(
        "rope-scale",
        "float",
        "rope.scale",
        "Stretch the context by this factor.",
        _R,
    ),
    Setting(
        "rope-freq-base",
        "float",
        "rope.freq_base",
        "Base of RoPE. Unset: the model's.",
        _R,
    ),
    Setting(
        "rope-freq-scale",
        "float",
        "rope.freq_scale",
        "The inverse of --rope-scale.",
        _R,
    ),
    Setting(
        "yarn-orig-ctx",
        "int",
        "rope.yarn_orig_ctx",
        "Trained length that YaRN starts from. Unset: the model's.",
        _R,
    ),
    Setting(
        "yarn-ext-factor",
        "float",
        "rope.yarn_ext_factor",
        "YaRN's mix of extrapolation; 0 only interpolates.",
        _R,
    ),
    Setting(
        "yarn-attn-factor",
        "float",
        "rope.yarn_attn_factor",
        "YaRN's scaling of attention.",
        _R,
    ),
    Setting(
        "yarn-beta-fast",
        "float",
        "rope.yarn_beta_fast",
        "YaRN's upper bound of rotations.",
        _R,
    ),
    Setting(
        "yarn-beta-slow",
        "float",
        "rope.yarn_beta_slow",
        "YaRN's lower bound.",
        _R,
    ),
    Setting(
        "threads",
        "int",
        "engine.threads",
        "CPU threads. Unset: the physical cores, or fewer while that is faster.",
        _M,
        ("-t", "--threads"),
    ),
    Setting(
        "flash-attn",
        "text",
        "engine.flash_attn",
        "Flash attention; auto is on for CPU and llama.cpp's own choice for GPUs.",
        _M,
        choices=_SWITCH,
    ),
    Setting(
        "cache-type-k",
        "text",
        "engine.kv_type_k",
        "Type of the K half of the KV cache; auto is f16.",
        _M,
        choices=KV_TYPES,
    ),
    Setting(
        "cache-type-v",
        "text",
        "engine.kv_type_v",
        "Type of the V half; auto is f16.",
        _M,
        choices=KV_TYPES,
    ),
    Setting(
        "batch-size",
        "int",
        "engine.n_batch",
        "Prompt tokens per pass. Unset: 512 on a GPU, 256 on a CPU.",
        _M,
    ),
    Setting(
        "ubatch-size",
        "int",
        "engine.n_ubatch",
        "Of these, how many are computed at once. Unset: all.",
        _M,
    ),
    Setting(
        "lora",
        "texts",
        "engine.loras",
        "LoRA adapter for the target, with its strength if that is not 1; repeatable.",
        _M,
        metavar="FILE[:SCALE]",
    ),
    Setting("mmap", "bool", "engine.use_mmap", "Map model files instead of reading them.", _M),
    Setting("mlock", "bool", "engine.use_mlock", "Keep the model in memory (no swapping).", _M),
    Setting(
        "check-memory",
        "bool",
        "engine.check_memory",
        "Refuse a pair that needs more memory than is free.",
        _M,
    ),
    Setting(
        "allow-other-vocab",
        "bool",
        "engine.allow_other_vocab",
        "Accept a draft model with another tokenizer; its guesses are translated.",
        _S,
    ),
    Setting(
        "max-leaves",
        "int",
        "engine.max_leaves",
        "Most branches in a token tree; 1 allows chains only.",
        _S,
    ),
    Setting(
        "keep-texts",
        "bool",
        "engine.keep_texts",
        "Keep texts on disk, as token ids, so that the suffix method can copy from them in later "
        "runs.",
        _S,
    ),
    Setting(
        "speculate",
        "bool",
        "generate.speculate",
        "Draft and verify; --no-spec decodes plainly, with the same text.",
        _S,
        ("--spec/--no-spec",),
    ),
    Setting(
        "proposer",
        "text",
        "generate.proposer",
        "Method of drafting. auto is mixed: copies of the text compete with the draft model or "
        "head of the pair.",
        _S,
        choices=PROPOSERS,
    ),
    Setting(
        "draft-max",
        "int",
        "generate.draft_max",
        "Most tokens drafted per round; 0 decodes plainly. Unset: 15 where that is bit-exact, "
        "else 6.",
        _S,
    ),
    Setting(
        "window",
        "text",
        "generate.window",
        "auto drafts only as far as it pays on this machine, and never falls more than 8 plain "
        "steps plus 1 % behind; fixed always drafts up to draft-max.",
        _S,
        choices=WINDOWS,
    ),
    Setting(
        "draft-min",
        "int",
        "generate.draft_min",
        "Do not draft at all where fewer tokens than this would be drafted.",
        _S,
    ),
    Setting(
        "draft-p-min", "float", "generate.draft_p_min", "Stop drafting below this confidence.", _S
    ),
    Setting(
        "verify",
        "text",
        "generate.verify",
        "Verification rule. match writes the text of plain decoding, token for token; the others "
        "keep its distribution.",
        _S,
        choices=tuple(VERIFY_RULES),
    ),
    Setting(
        "exact",
        "bool",
        "generate.exact",
        "Keep target passes narrow enough that every row is computed as in plain decoding.",
        _S,
    ),
    Setting(
        "min-speculative-tokens",
        "int",
        "generate.min_speculative_tokens",
        "Decode plainly when a reply is limited to fewer tokens.",
        _S,
    ),
    Setting(
        "seed",
        "int",
        "generate.seed",
        "Random seed. Unset or -1: drawn at random, and reported.",
        _T,
        unset=-1,
    ),
    Setting(
        "temperature",
        "float",
        "sampling.temperature",
        "0 always takes the likeliest token.",
        _T,
        ("--temperature", "--temp"),
    ),
    Setting("top-k", "int", "sampling.top_k", "Keep the K likeliest tokens; 0 keeps all.", _T),
    Setting(
        "top-p",
        "float",
        "sampling.top_p",
        "Keep the likeliest tokens that sum to this probability; 1 keeps all.",
        _T,
    ),
    Setting(
        "min-p",
        "float",
        "sampling.min_p",
        "Drop tokens less likely than this fraction of the likeliest one.",
        _T,
    ),
    Setting(
        "typical",
        "float",
        "sampling.typical_p",
        "Locally typical sampling; 1 is off.",
        _T,
        ("--typical", "--typical-p"),
    ),
    Setting(
        "repeat-penalty",
        "float",
        "sampling.repeat_penalty",
        "Divide scores of repeated tokens; 1 is off.",
        _T,
    ),
    Setting(
        "repeat-last-n",
        "int",
        "sampling.repeat_last_n",
        "How many tokens the penalties look back; -1 is the whole context.",
        _T,
    ),
    Setting(
        "presence-penalty",
        "float",
        "sampling.presence_penalty",
        "Subtracted once from the score of every token that occurred.",
        _T,
    ),
    Setting(
        "frequency-penalty",
        "float",
        "sampling.frequency_penalty",
        "Subtracted for every time a token occurred.",
        _T,
    ),
    Setting(
        "dry-multiplier",
        "float",
        "sampling.dry_multiplier",
        "Strength of the DRY penalty on repeated phrases; 0 is off.",
        _T,
    ),
    Setting("dry-base", "float", "sampling.dry_base", "DRY grows by this factor per token.", _T),
    Setting(
        "dry-allowed-length",
        "int",
        "sampling.dry_allowed_length",
        "Repeats up to this length are free.",
        _T,
    ),
    Setting(
        "dry-penalty-last-n",
        "int",
        "sampling.dry_penalty_last_n",
        "How many tokens DRY looks back; -1 is the whole context.",
        _T,
    ),
    Setting(
        "dry-sequence-breaker",
        "texts",
        "sampling.dry_sequence_breakers",
        "Text at which DRY stops matching a repeat; repeatable.",
        _T,
    ),
    Setting(
        "xtc-probability",
        "float",
        "sampling.xtc_probability",
        "Chance to drop the top choices (XTC); 0 is off.",
        _T,
    ),
    Setting(
        "xtc-threshold",
        "float",
        "sampling.xtc_threshold",
        "XTC drops only choices above this probability.",
        _T,
    ),
    Setting(
        "max-tokens",
        "int",
        "generate.max_tokens",
        "Longest reply, in tokens. Unset or -1: until the context is full.",
        _L,
        ("-n", "--max-tokens"),
        unset=-1,
    ),
    Setting(
        "stop",
        "texts",
        "generate.stop",
        "Text that ends the reply; repeatable, up to 16 times.",
        _L,
    ),
    Setting(
        "ignore-eos",
        "bool",
        "generate.ignore_eos",
        "Continue past the model's end token; a complete grammar still ends the reply.",
        _L,
    ),
    Setting(
        "on-full",
        "text",
        "generate.on_full",
        "When the context is full: stop, or shift out the oldest text.",
        _L,
        choices=("stop", "shift"),
    ),
    Setting(
        "think",
        "text",
        "generate.think",
        "Whether, or how hard, the model thinks before it answers; auto is its template's way. "
        "--no-think is --think=off.",
        _H,
        choices=THINK,
    ),
    Setting(
        "think-budget",
        "int",
        "generate.think_budget",
        "Most tokens of thoughts; then the thought is closed and the answer begins.",
        _H,
    ),
    Setting(
        "thoughts",
        "text",
        "app.thoughts",
        "Thoughts in the terminal: shown on stderr, folded to one line, or hidden.",
        _H,
        choices=("show", "fold", "hide"),
    ),
    Setting(
        "template-args",
        "texts",
        "generate.template_args",
        "A variable of the chat template; a value is JSON or text; repeatable.",
        _H,
        ("--template-arg",),
        metavar="NAME=VALUE",
    ),
    Setting("system", "text", "app.system", "System prompt.", _O),
    Setting("log", "bool", "app.log", "Write a round log (see specllama log).", _O),
    Setting(
        "model-dirs",
        "texts",
        "app.model_dirs",
        "More folders in which to look for model files.",
        _M,
        flag=False,
    ),
)
BY_NAME: dict[str, Setting] = {setting.name: setting for setting in SCHEMA}
