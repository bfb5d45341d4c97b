"""What can be asked of the machine is checked before llama.cpp sees it."""

from __future__ import annotations

import os
from typing import Any

import pytest

from specllama.errors import UsageError
from specllama.settings.hardware import Adapter, CpuOptions, PlaceOptions, RopeOptions
from specllama.settings.params import EngineOptions


@pytest.mark.parametrize(
    ("kind", "options", "why"),
    [
        (PlaceOptions, {"split_mode": "tensor"}, "split-mode"),
        (PlaceOptions, {"tensor_split": "1,x"}, "tensor split"),
        (PlaceOptions, {"tensor_split": "0,0"}, "tensor split"),
        (PlaceOptions, {"tensor_split": "1,-1"}, "tensor split"),
        (PlaceOptions, {"tensor_split": "1,nan"}, "tensor split"),
        (PlaceOptions, {"devices": "A,A"}, "twice"),
        (PlaceOptions, {"devices": "A,"}, "names"),
        (PlaceOptions, {"n_cpu_moe": -1}, "n-cpu-moe"),
        (PlaceOptions, {"n_cpu_moe": 1, "cpu_moe": True}, "not both"),
        (PlaceOptions, {"main_gpu": -1}, "main-gpu"),
        (PlaceOptions, {"overrides": ("exps",)}, "override"),
        (PlaceOptions, {"overrides": ("=CPU",)}, "override"),
        (PlaceOptions, {"overrides": ("(=CPU",)}, "pattern"),
        (PlaceOptions, {"overrides": (r"(?P<x>ffn)=CPU",)}, "llama.cpp cannot read"),
        (PlaceOptions, {"overrides": (r"(?<=ffn)_up=CPU",)}, "llama.cpp cannot read"),
        (PlaceOptions, {"overrides": (r"ffn\Z=CPU",)}, "llama.cpp cannot read"),
        (PlaceOptions, {"overrides": ("ffn\0=CPU",)}, "llama.cpp cannot read"),
        (CpuOptions, {"numa": "mirror"}, "numa"),
        (CpuOptions, {"mask": "xyz"}, "hexadecimal"),
        (CpuOptions, {"mask": "0"}, "one is needed"),
        (CpuOptions, {"mask": "f" * 129}, "counted from 0"),
        (CpuOptions, {"cores": "3-"}, "cannot read"),
        (CpuOptions, {"cores": "0-512"}, "counted from 0"),
        (CpuOptions, {"cores": "3-2"}, "one is needed"),
        (CpuOptions, {"mask": "1", "cores": "0"}, "not both"),
        (CpuOptions, {"poll": 101}, "poll"),
        (CpuOptions, {"priority": "urgent"}, "prio"),
        (RopeOptions, {"scaling": "ntk"}, "scaling"),
        (RopeOptions, {"scale": 2.0, "freq_scale": 0.5}, "not both"),
        (RopeOptions, {"scale": float("nan")}, "rope-scale"),
        (RopeOptions, {"freq_base": 0.0}, "rope-freq-base"),
        (RopeOptions, {"yarn_orig_ctx": 0}, "yarn-orig-ctx"),
        (RopeOptions, {"yarn_ext_factor": -1.0}, "yarn-ext-factor"),
    ],
)
def test_what_cannot_be_is_refused(kind: Any, options: dict[str, Any], why: str) -> None:
    with pytest.raises(UsageError, match=why):
        kind(**options)


def test_cores() -> None:
    assert CpuOptions(mask="0x8000000f").allowed == (0, 1, 2, 3, 31)
    assert CpuOptions(cores="0-2,8").allowed == (0, 1, 2, 8)
    assert CpuOptions().usual
    assert not CpuOptions(cores="0").usual
    assert not CpuOptions(priority="high").usual
    with pytest.raises(UsageError, match="--cpu-strict"):
        EngineOptions(cpu=CpuOptions(strict=True))


def test_an_override_may_hold_equals_signs() -> None:
    assert PlaceOptions(overrides=(r"(?=ffn)ffn_up=CPU",)).moves == ((r"(?=ffn)ffn_up", "CPU"),)


def test_only_what_was_chosen_is_said_of_rope() -> None:
    assert RopeOptions().given == {}
    assert RopeOptions(scaling="yarn", scale=4.0, yarn_orig_ctx=32768).given == {
        "rope_scaling_type": 2,
        "rope_freq_scale": 0.25,
        "yarn_orig_ctx": 32768,
    }


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
