"""Bad values are refused where they enter, by name and with the range that is accepted."""

import dataclasses
import math
import os
import pickle
import re
from pathlib import Path
from typing import Any

import pytest

import specllama
from specllama.errors import UsageError
from specllama.settings.duration import seconds, told
from specllama.settings.hardware import Adapter, PlaceOptions
from specllama.settings.params import DRAFT_MAX_LIMIT, EngineOptions, GenerateParams, SamplingParams
from specllama.settings.schema import AppOptions

NAN, INF = math.nan, math.inf

SAMPLING: list[tuple[str, list[Any], list[Any]]] = [
    # field, accepted, refused
    ("temperature", [0.0, 0.7, 100.0, 1], [-0.1, NAN, INF, 100.1, "hot", None]),
    ("top_k", [0, 1, 2**31 - 1], [-1, 2**31, 1.5, True, None]),
    ("top_p", [1.0, 0.01], [0.0, -0.1, 1.01, NAN, INF]),
    ("min_p", [0.0, 1.0], [-0.01, 1.01, NAN]),
    ("typical_p", [1.0, 0.2], [0.0, 1.5, NAN]),
    ("repeat_penalty", [1.0, 0.5, 10.0], [0.0, -1.0, 11.0, NAN]),
    ("frequency_penalty", [0.0, -2.0], [-11.0, 11.0, NAN]),
    ("presence_penalty", [0.0, 2.0], [-11.0, 11.0, INF]),
    ("repeat_last_n", [-1, 0, 64], [-2, 1.0, 2**31]),
    ("dry_multiplier", [0.0, 0.8], [-0.1, 101.0, NAN]),
    ("dry_base", [1.0, 1.75], [0.9, NAN, 101.0]),
    ("dry_allowed_length", [1, 2], [0, -1, 1.5]),
    ("dry_penalty_last_n", [-1, 0, 9], [-2]),
    ("xtc_probability", [0.0, 1.0], [-0.1, 1.1, NAN]),
    ("xtc_threshold", [0.0, 0.6, 1.0], [-0.1, 1.1, NAN]),
    ("logit_bias", [{}, {3: 1.0, 4: -INF}], [{3: NAN}, {3: INF}]),
]

REQUEST: list[tuple[str, list[Any], list[Any]]] = [
    ("max_tokens", [None, 1, 10**6], [0, -1, 1.5, True]),
    ("seed", [None, 0, 2**64 - 1], [-1, 2**64, 1.5, True]),
    ("stop", [(), ("a",), tuple("abcdefghijklmnop")], [("",), ("a", ""), tuple("x" * 17)]),
    ("proposer", ["auto", "draft", "ngram", "mixed", "none"], ["eagle9", ""]),
    ("verify", ["match", "rejection", "block"], ["typical?", ""]),
    ("draft_max", [0, 1, DRAFT_MAX_LIMIT], [-1, DRAFT_MAX_LIMIT + 1, 2.0]),
    ("draft_p_min", [0.0, 1.0], [-0.1, 1.1, NAN]),
    ("min_speculative_tokens", [0, 8], [-1]),
    ("on_full", ["stop", "shift"], ["burst"]),
    ("grammar", [None, "root ::= [a-z]"], []),
]

OPTIONS: list[tuple[str, list[Any], list[Any]]] = [
    ("n_ctx", [None, 0, 8, 4096], [1, 7, -1, 2**24 + 1, 1.5]),
    ("threads", [None, 1, 64], [0, -1, 100_000]),
    ("gpu_layers", ["auto", "all", "0", "33"], ["-1", "some", ""]),
    ("draft_gpu_layers", ["auto", "5"], ["x"]),
    ("flash_attn", ["auto", "on", "off"], ["maybe"]),
    ("kv_type_k", ["f16", "q8_0"], ["q3_k", ""]),
    ("kv_type_v", ["f32"], ["int8"]),
    ("n_batch", [None, 32, 512], [0, 31, 2**16 + 1]),
    ("max_rows", [1, 65], [0, 5000]),
]


@pytest.mark.parametrize(
    ("cls", "table"),
    [(SamplingParams, SAMPLING), (GenerateParams, REQUEST), (EngineOptions, OPTIONS)],
)
def test_every_value_of_the_table(cls: Any, table: list[tuple[str, list[Any], list[Any]]]) -> None:
    for name, accepted, refused in table:
        for value in accepted:
            assert getattr(cls(**{name: value}), name) == value
        for value in refused:
            with pytest.raises(UsageError) as caught:
                cls(**{name: value})
            assert caught.value.exit_code == 2
            shown = name.removeprefix("n_").replace("_", "-").replace("kv-type-", "cache-type-")
            words = {
                "ctx": "ctx-size", "draft-ctx": "ctx-size", "batch": "batch-size",
                "typical-p": "typical",
            }  # fmt: skip
            assert words.get(shown, shown).lower() in caught.value.message.lower()


def test_a_cpu_reads_in_passes_that_end_soon_when_cancelled() -> None:
    assert EngineOptions().batch(on_gpu=False) == 256
    assert EngineOptions().batch(on_gpu=True) == 512
    assert EngineOptions(n_batch=1024).batch(on_gpu=False) == 1024


def test_a_refusal_names_the_accepted_range() -> None:
    for make, texts in (
        (lambda: SamplingParams(temperature=-1.0), ("temperature", "0", "100")),
        (lambda: GenerateParams(draft_max=99), ("draft-max", "0", "64")),
        (lambda: SamplingParams(top_p=2.0), ("top-p", "(0, 1]")),
    ):
        with pytest.raises(UsageError) as caught:
            make()
        assert all(text in caught.value.message for text in texts)
    with pytest.raises(UsageError) as caught:
        GenerateParams(verify="typo")
    assert "match, rejection, block" in caught.value.message


def test_a_grammar_and_a_schema_are_too_many() -> None:
    with pytest.raises(UsageError, match="only one"):
        GenerateParams(grammar="root ::= [a-z]", json_schema="{}")


def test_replace_validates_again() -> None:
    params = GenerateParams()
    assert params.replace(draft_max=2).draft_max == 2
    with pytest.raises(UsageError):
        params.replace(draft_max=-2)


def test_parameters_cross_a_process_boundary() -> None:
    params = GenerateParams(sampling=SamplingParams(logit_bias={1: -INF}), stop=("x",), seed=7)
    assert pickle.loads(pickle.dumps(params)) == params
    options = EngineOptions(n_ctx=512)
    assert pickle.loads(pickle.dumps(options)) == options


def test_defaults_are_those_of_llama_cpp() -> None:
    p = SamplingParams()
    assert (p.temperature, p.top_k, p.top_p, p.min_p) == (0.8, 40, 0.95, 0.05)
    assert (p.repeat_penalty, p.repeat_last_n, p.typical_p) == (1.0, 64, 1.0)
    assert GenerateParams().verify == "match"


def test_unless_told_a_measuring_window_reaches_as_far_as_passes_are_exact() -> None:
    assert GenerateParams().draft_limit(64) == 15
    assert GenerateParams().draft_limit(16) == 15
    assert GenerateParams().draft_limit(7) == GenerateParams().draft_limit(1) == 6
    assert GenerateParams(window="fixed").draft_limit(64) == 6
    assert GenerateParams(draft_max=20).draft_limit(7) == 20
    assert GenerateParams(draft_max=0).draft_limit(64) == 0


def test_cache_types_are_chosen_apart_only_where_they_must_be(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def types(options: EngineOptions, *, on_gpu: bool = False, apart: bool = True) -> list[str]:
        found = options.resolved(on_gpu=on_gpu, apart=apart)
        return [found.kv_type_k, found.kv_type_v, found.flash_attn]

    assert types(EngineOptions(), apart=False) == ["f16", "f16", "on"]
    assert types(EngineOptions(kv_type_v="q8_0"), apart=False) == ["f16", "q8_0", "on"]
    assert types(EngineOptions(), on_gpu=True) == ["f16", "f16", "auto"]
    monkeypatch.setattr("platform.machine", lambda: "AMD64")
    assert types(EngineOptions()) == ["bf16", "f16", "on"]
    monkeypatch.setattr("platform.machine", lambda: "aarch64")
    assert types(EngineOptions()) == ["f16", "bf16", "on"]
    assert types(EngineOptions(kv_type_k="f16")) == ["f16", "bf16", "on"]
    assert types(EngineOptions(kv_type_k="q8_0")) == ["q8_0", "f16", "on"]
    assert types(EngineOptions(kv_type_v="q8_0")) == ["f16", "q8_0", "on"]
    assert types(EngineOptions(kv_type_k="f16", kv_type_v="f16")) == ["f16", "f16", "on"]
    assert types(EngineOptions(flash_attn="off")) == ["f16", "f16", "off"]


def test_one_cache_for_k_and_v_has_one_type(monkeypatch: pytest.MonkeyPatch) -> None:
    def types(options: EngineOptions, *, on_gpu: bool = False) -> tuple[str, str]:
        found = options.resolved(on_gpu=on_gpu, one_kv_type=True, apart=True)
        return found.kv_type_k, found.kv_type_v

    found = EngineOptions().resolved(on_gpu=False, one_kv_type=True)
    assert (found.kv_type_k, found.kv_type_v) == ("f16", "f16")
    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    assert types(EngineOptions()) == ("bf16", "bf16")
    assert types(EngineOptions(flash_attn="off")) == types(EngineOptions(), on_gpu=True)
    assert types(EngineOptions(), on_gpu=True) == ("f16", "f16")
    assert types(EngineOptions(kv_type_v="q8_0")) == ("q8_0", "q8_0")
    with pytest.raises(UsageError, match="cannot be q8_0 and f16"):
        types(EngineOptions(kv_type_k="q8_0", kv_type_v="f16"))


@pytest.mark.parametrize("kind", [GenerateParams, SamplingParams])
def test_no_parameter_is_a_switch_that_nothing_reads(kind: type[Any]) -> None:
    """What only a form and the stores know would be promised and never done."""
    package = Path(specllama.__file__).parent
    source = "".join(
        path.read_text("utf-8")
        for path in sorted(package.rglob("*.py"))
        if not {"tui", "cli", "store"} & set(path.relative_to(package).parts)
        and path.name not in ("params.py", "schema.py")
    )
    unread = [f.name for f in dataclasses.fields(kind) if not re.search(rf"\.{f.name}\b", source)]
    assert set(unread) <= {"from_card"}  # which only ``on_card`` reads


# -- lengths of time, as people and other servers write them --


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("10m", 600), ("1h30m", 5400), ("1.5h", 5400), ("300ms", 0.3), ("90", 90), (90, 90),
        (0, 0), ("0", 0), ("0s", 0), (-1, math.inf), ("-1", math.inf), ("-1m", math.inf),
        ("never", math.inf), ("Off", math.inf), (" 24h ", 86400), (5.5, 5.5),
    ],
)  # fmt: skip
def test_what_is_meant(written: str | float, meant: float) -> None:
    assert seconds(written) == meant


@pytest.mark.parametrize("written", ["", "soon", "10 minutes", "m", "5m!", "nan", math.nan, "1d"])
def test_what_is_none(written: str | float) -> None:
    with pytest.raises(UsageError, match="cannot read the duration"):
        seconds(written)


def test_a_setting_names_itself() -> None:
    with pytest.raises(UsageError, match=r"^idle-unload: cannot read the duration 'soon'"):
        AppOptions(idle_unload="soon")


@pytest.mark.parametrize(
    ("left", "words"),
    [(math.inf, "never"), (7200, "2 h"), (600, "10 min"), (59.4, "59 s"), (-3, "0 s")],
)
def test_for_people(left: float, words: str) -> None:
    assert told(left) == words


# -- the machine's part of the options, checked before llama.cpp sees it --


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"tensor_split": "1,x"}, "tensor split"),
        ({"tensor_split": "0,0"}, "tensor split"),
        ({"tensor_split": "1,-1"}, "tensor split"),
        ({"tensor_split": "1,nan"}, "tensor split"),
        ({"devices": "A,A"}, "twice"),
        ({"devices": "A,"}, "names"),
        ({"n_cpu_moe": -1}, "n-cpu-moe"),
        ({"n_cpu_moe": 1, "cpu_moe": True}, "not both"),
        ({"overrides": ("exps",)}, "override"),
        ({"overrides": ("=CPU",)}, "override"),
        ({"overrides": ("(=CPU",)}, "pattern"),
        ({"overrides": (r"(?P<x>ffn)=CPU",)}, "llama.cpp cannot read"),
        ({"overrides": (r"(?<=ffn)_up=CPU",)}, "llama.cpp cannot read"),
        ({"overrides": (r"ffn\Z=CPU",)}, "llama.cpp cannot read"),
        ({"overrides": ("ffn\0=CPU",)}, "llama.cpp cannot read"),
    ],
)
def test_what_cannot_be_is_refused(options: dict[str, Any], why: str) -> None:
    with pytest.raises(UsageError, match=why):
        PlaceOptions(**options)


def test_an_override_may_hold_equals_signs() -> None:
    assert PlaceOptions(overrides=(r"(?=ffn)ffn_up=CPU",)).moves == ((r"(?=ffn)ffn_up", "CPU"),)


@pytest.mark.parametrize(
    ("text", "path", "scale"),
    [("a.gguf", "a.gguf", 1.0), ("a.gguf:0.5", "a.gguf", 0.5), ("C:\\a.gguf", "C:\\a.gguf", 1.0),
     ("C:\\a.gguf:-1", "C:\\a.gguf", -1.0), ("~/a.gguf", os.path.expanduser("~/a.gguf"), 1.0),
     ("~nobodyx9/a.gguf", "~nobodyx9/a.gguf", 1.0)],
)  # fmt: skip
def test_adapters(text: str, path: str, scale: float) -> None:
    assert Adapter.read(text) == Adapter(path, scale)


@pytest.mark.parametrize("text", ["", ":1", "a.gguf:inf", "a.gguf:1000"])
def test_adapters_that_are_none(text: str) -> None:
    with pytest.raises(UsageError, match="adapter"):
        EngineOptions(loras=(text,))


@pytest.mark.parametrize(
    ("k", "v", "warns"),
    [("q4_0", "q4_0", True), ("iq4_nl", "auto", True), ("q5_1", "f16", True),
     ("q8_0", "q4_0", False), ("auto", "q4_0", False), ("bf16", "bf16", False)],
)  # fmt: skip
def test_a_k_cache_that_is_too_coarse_for_some_models_is_named(k: str, v: str, warns: bool) -> None:
    said = EngineOptions(kv_type_k=k, kv_type_v=v).coarse_cache
    assert (k in said and "q8_0" in said) if warns else said == ""
