"""Every setting: its flag, its key in files, its type, default and help text.

One table serves ``--help``, settings files, environment variables and ``config show``. Defaults are
those of the parameter classes, so they are written down once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from specllama.params import (
    KV_TYPES,
    PROPOSERS,
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
        name: the long option and the key in files, in kebab case.
        kind: type of the value; "texts" is a list.
        field: where it goes: ``engine.X``, ``generate.X``, ``sampling.X``, or ``app.X`` for what
            the front ends use themselves.
        help: one sentence, shown by ``--help`` and ``config show``.
        group: heading in ``--help``.
        flags: how it is typed; the long name unless given.
        choices: the only values allowed.
        metavar: how the value is called in ``--help``.
        flag: can be typed on the command line, not only set.
        unset: what other tools write for "as if it were not given".
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


DEFAULTS: dict[str, Any] = {
    "engine": EngineOptions(),
    "generate": GenerateParams(),
    "sampling": SamplingParams(),
}
_APP_DEFAULTS: dict[str, Any] = {
    "model": None,
    "draft_model": None,
    "system": None,
    "log": True,
    "model_dirs": (),
}

_M, _S, _T, _L, _O = "Model", "Speculation", "Sampling", "Length", "Output"
_SWITCH = ("auto", "on", "off")

SCHEMA: tuple[Setting, ...] = (
    Setting(
        "model",
        "text",
        "app.model",
        "Target: a path, user/repo[:quant] or a catalogue name; if none is given the bundled "
        "tiny pair, in the terminal app the one opened last.",
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
        "Drafting head trained for the target (an EAGLE-3 or Medusa file); may be given several "
        "times.",
        _M,
        metavar="FILE",
    ),
    Setting(
        "ctx-size",
        "int",
        "engine.n_ctx",
        "Context length in tokens, 0 for the trained length; that, up to 8192, unless given.",
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
        "threads",
        "int",
        "engine.threads",
        "CPU threads. Unless given: the number of physical cores, or fewer while that is faster.",
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
        "Prompt tokens per pass. Unless given: 512 on a GPU, 256 on a CPU.",
        _M,
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
        "Most branches of a token tree; 1 prepares for chains only.",
        _S,
    ),
    Setting(
        "keep-texts",
        "bool",
        "engine.keep_texts",
        "Keep texts on disk, as token ids, for the suffix proposer to copy from in later runs.",
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
        "Who drafts: auto is mixed, copies of the text and what the pair has to draft with.",
        _S,
        choices=PROPOSERS,
    ),
    Setting(
        "draft-max",
        "int",
        "generate.draft_max",
        "Most tokens drafted per round, 0 decodes plainly; 15 where that is bit-exact, else 6.",
        _S,
    ),
    Setting(
        "window",
        "text",
        "generate.window",
        "auto drafts as far as it pays on this machine, all drafting of a pair together never more "
        "than 8 plain steps behind, then 1 %; fixed always up to draft-max.",
        _S,
        choices=WINDOWS,
    ),
    Setting("draft-min", "int", "generate.draft_min", "Fewest tokens worth a draft.", _S),
    Setting(
        "draft-p-min", "float", "generate.draft_p_min", "Stop drafting below this confidence.", _S
    ),
    Setting(
        "verify",
        "text",
        "generate.verify",
        "Verification rule; match gives the text of plain decoding, the others its distribution.",
        _S,
        choices=tuple(VERIFY_RULES),
    ),
    Setting(
        "exact",
        "bool",
        "generate.exact",
        "No target pass wider than those whose rows are computed as in plain decoding.",
        _S,
    ),
    Setting(
        "min-speculative-tokens",
        "int",
        "generate.min_speculative_tokens",
        "Do not speculate for replies limited to fewer tokens.",
        _S,
    ),
    Setting(
        "seed",
        "int",
        "generate.seed",
        "Random seed; drawn and reported if none, or -1, is given.",
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
        "Keep the likeliest tokens up to this probability; 1 keeps all.",
        _T,
    ),
    Setting(
        "min-p",
        "float",
        "sampling.min_p",
        "Drop tokens below this share of the likeliest one's probability.",
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
        "Tokens looked back at by the penalties; -1 is the context.",
        _T,
    ),
    Setting(
        "presence-penalty",
        "float",
        "sampling.presence_penalty",
        "Subtracted once from tokens that occurred.",
        _T,
    ),
    Setting(
        "frequency-penalty",
        "float",
        "sampling.frequency_penalty",
        "Subtracted for each time a token occurred.",
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
        "Tokens DRY looks back at; -1 is the context.",
        _T,
    ),
    Setting(
        "dry-sequence-breaker",
        "texts",
        "sampling.dry_sequence_breakers",
        "Text that ends a repeat for DRY; may be given several times.",
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
        "Longest reply; until the context is full if none, or -1, is given.",
        _L,
        ("-n", "--max-tokens"),
        unset=-1,
    ),
    Setting(
        "stop",
        "texts",
        "generate.stop",
        "Text that ends the reply; may be given up to 16 times.",
        _L,
    ),
    Setting(
        "ignore-eos",
        "bool",
        "generate.ignore_eos",
        "Go on after the model's end token; a complete grammar still ends the reply.",
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
