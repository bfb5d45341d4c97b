"""What can be asked of the machine is checked before llama.cpp sees it."""

from __future__ import annotations

import os
from typing import Any

import pytest

from specllama.errors import UsageError
from specllama.settings.hardware import Adapter, PlaceOptions
from specllama.settings.params import EngineOptions


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
