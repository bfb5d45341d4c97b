"""Which layout of the weights is loaded: told by the file and the processor, never by a time."""

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import pytest

from specllama.backend import trial
from specllama.engine import gguf_pair
from specllama.engine.gguf_pair import Pair
from specllama.models import context, memory
from specllama.settings.params import EngineOptions


@pytest.fixture(autouse=True)
def x86(monkeypatch: pytest.MonkeyPatch) -> None:
    on(monkeypatch, "x86_64", {"Q4_0", "Q4_K", "Q2_K", "IQ4_NL", "MXFP4"})


def on(monkeypatch: pytest.MonkeyPatch, machine: str, types: set[str]) -> None:
    """A processor on which llama.cpp repacks these types."""
    monkeypatch.setattr(gguf_pair.platform, "machine", lambda: machine)
    monkeypatch.setattr(memory, "repacked_types", lambda: frozenset(types))


def pair(types: Mapping[str, str] | None = None, *, on_gpu: bool = False, **options: Any) -> Pair:
    tensors = [
        SimpleNamespace(name=name, type=kind, n_bytes=1000, is_matrix=True, shape=(256, 256))
        for name, kind in (types or {"blk.0.ffn_up.weight": "Q4_K"}).items()
    ]
    header: Any = SimpleNamespace(tensors=tensors)
    plan: Any = SimpleNamespace(target=SimpleNamespace(layers=int(on_gpu)))
    wanted = EngineOptions(**{"kernels": "off", **options})
    return Pair(header, None, False, context.LEAST_LENGTH, wanted, plan)


@pytest.mark.parametrize(
    ("types", "repack"),
    [
        ({"blk.0.attn_q.weight": "Q4_0"}, True),
        ({"blk.0.attn_q.weight": "IQ4_NL"}, True),
        ({"blk.0.attn_q.weight": "Q8_0", "blk.0.ffn_up.weight": "Q4_K"}, False),
        ({"blk.0.attn_q.weight": "Q2_K"}, False),
        # rows are looked up in it, not multiplied
        ({"token_embd.weight": "Q4_K", "blk.0.attn_q.weight": "Q8_0"}, True),
    ],
)
def test_the_types_of_the_tensors_decide(types: dict[str, str], repack: bool) -> None:
    assert pair(types).repacks is repack


@pytest.mark.parametrize("wish", ["on", "off"])
def test_a_wish_is_followed(wish: str) -> None:
    assert pair(repack=wish).repacks is (wish == "on")


def test_elsewhere_llama_cpps_own_layout_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    assert pair(on_gpu=True).repacks
    on(monkeypatch, "aarch64", {"Q4_0", "Q4_K"})
    assert pair().repacks
    on(monkeypatch, "x86_64", set())  # it has no AVX2: nothing is repacked
    assert pair().repacks


def test_why_is_said() -> None:
    assert pair().layout.startswith("as stored: ")
    assert pair(repack="off").layout == "as stored"
    assert pair(on_gpu=True).layout == "as llama.cpp lays them out"


def test_our_kernels_are_taken_unless_a_layout_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trial, "kernels", lambda: trial.OwnKernels("avx2"))
    assert pair(kernels="auto").kernels
    assert pair(kernels="auto").layout == "packed for specllama's kernels (avx2)"
    assert not pair().kernels
    assert not pair(kernels="auto", repack="on").kernels
    monkeypatch.setattr(trial, "kernels", lambda: trial.OwnKernels(why="they die of SIGILL here"))
    assert not pair(kernels="auto").kernels
