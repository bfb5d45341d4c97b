"""Laying a pair out over devices that do not exist; what the native library says about this one."""

import dataclasses
from pathlib import Path
from typing import Any

import ggufs
import pytest
from sketches import plan_of

from specllama.backend import devices as dev
from specllama.backend import placement, planning
from specllama.backend.devices import Device
from specllama.backend.placement import OffloadPlan, fewer_layers, layer_bytes, layer_weights
from specllama.engine.engine import Engine
from specllama.errors import DoesNotFit
from specllama.models import memory
from specllama.models.gguf import GgufHeader, read_header
from specllama.models.judgement import pair_memory
from specllama.settings.params import EngineOptions

GB = 1_000_000_000


def gpu(free: float, name: str = "CUDA0") -> Device:
    return Device(name, "gpu", "CUDA", "a card", int(free * GB), int(free * 1.1 * GB))


CPU = Device("CPU", "cpu", "CPU", "a processor", 16 * GB, 32 * GB)


@pytest.fixture
def target(tmp_path: Path) -> GgufHeader:
    return read_header(
        ggufs.write_llama(tmp_path / "t.gguf", blocks=8, width=256, hidden=1024, quant="Q8_0")
    )


@pytest.fixture
def draft(tmp_path: Path) -> GgufHeader:
    return read_header(ggufs.write_llama(tmp_path / "d.gguf", quant="Q8_0"))


def room(header: GgufHeader, layers: int) -> float:
    """Free memory (GB) in which the output and ``layers - 1`` blocks fit, and no more."""
    sizes = layer_bytes(header, 512)
    need = sum(sizes[-layers:]) + sizes[0] // 2
    buffer = memory.compute_bytes(header, 512, n_ubatch=512, n_outputs=16, on_cpu=False)
    return (need + buffer + planning.RESERVE_BYTES) / planning.USABLE / GB


def test_without_a_gpu_nothing_moves(target: GgufHeader, draft: GgufHeader) -> None:
    plan = plan_of(target, draft, [CPU])
    assert (plan.target.layers, plan.gpus) == (0, ())
    assert plan.draft.layers == 0
    assert plan.warnings == ()
    assert "everything runs on the CPU" in plan.lines()[0]
    assert fewer_layers(plan) is None


def test_asking_for_a_gpu_that_is_not_there_warns_once(target: GgufHeader) -> None:
    plan = plan_of(target, None, [CPU], gpu_layers="all")
    assert plan.target.layers == 0
    assert len(plan.warnings) == 1


def test_with_room_everything_moves(target: GgufHeader, draft: GgufHeader) -> None:
    plan = plan_of(target, draft, [CPU, gpu(24)])
    assert plan.target.whole
    assert plan.target.layers == 9  # eight blocks and the output
    assert plan.draft.whole
    assert "9 on CUDA0" in plan.lines()[0]


@pytest.mark.parametrize("layers", [1, 3, 6])
def test_with_little_room_some_layers_move(target: GgufHeader, layers: int) -> None:
    free = room(target, layers)
    plan = plan_of(target, None, [gpu(free)], n_ctx=512)
    assert plan.target.layers == layers
    assert plan.target.bytes[0] <= free * GB * planning.USABLE - planning.RESERVE_BYTES


def test_no_room_means_the_cpu(target: GgufHeader, draft: GgufHeader) -> None:
    plan = plan_of(target, draft, [gpu(0.3)])
    assert plan.target.layers == 0
    assert plan.draft.layers == 0


def test_the_draft_moves_whole_or_not_at_all(target: GgufHeader, draft: GgufHeader) -> None:
    for free in (0.5, 0.6, 0.7, 1.0, 4.0):
        placed = plan_of(target, draft, [gpu(free)], n_ctx=512).draft
        assert placed.layers in (0, placed.of)


def test_two_cards_share(target: GgufHeader) -> None:
    first, second = room(target, 4), room(target, 3)
    plan = plan_of(target, None, [gpu(first), gpu(second, "CUDA1")], n_ctx=512)
    assert min(plan.target.split) > 0
    assert sum(plan.target.split) == plan.target.layers
    sizes = layer_bytes(target, 512)
    buffer = memory.compute_bytes(target, 512, n_ubatch=512, n_outputs=16, on_cpu=False)
    at = plan.target.of - plan.target.layers
    for count, used, free in zip(
        plan.target.split, plan.target.bytes, (first, second), strict=True
    ):
        assert used == sum(sizes[at : at + count]) + buffer, "llama.cpp hands layers out in order"
        assert used <= free * GB * planning.USABLE - planning.RESERVE_BYTES
        at += count


def test_what_fits_one_card_is_not_spread(target: GgufHeader, draft: GgufHeader) -> None:
    plan = plan_of(target, draft, [gpu(24), gpu(24, "CUDA1")], n_ctx=512)
    assert plan.target.split == (9, 0)
    assert plan.draft.split == (3, 0)


def test_an_integrated_gpu_stands_back_for_a_card() -> None:
    small = Device("Vulkan1", "igpu", "Vulkan", "a chip", 8 * GB, 8 * GB)
    assert dev.gpus([CPU, small, gpu(8)]) == [gpu(8)]
    assert dev.gpus([CPU, small]) == [small]


def test_the_order_of_devices_is_that_of_llama_cpp() -> None:
    remote = [
        Device(f"RPC{i}", "gpu", "RPC", f"10.0.0.{i}:50052", 8 * GB, 8 * GB) for i in range(2)
    ]
    chip = Device("Vulkan1", "igpu", "Vulkan", "a chip", 8 * GB, 8 * GB, id="0000:00:02.0")
    seen = Device("SYCL0", "igpu", "SYCL", "a chip", 8 * GB, 8 * GB, id="0000:00:02.0")
    card = dataclasses.replace(gpu(8), id="0000:01:00.0")
    again = dataclasses.replace(card, name="Vulkan0", backend="Vulkan")
    found = [card, again, chip, seen, CPU, *remote]
    assert dev.gpus(found) == [*remote, card], "remote ones first, a card that two see once"
    assert dev.gpus([chip, seen, CPU, *remote]) == [*remote, chip], "remote ones are no card here"
    assert dev.gpus([gpu(8), gpu(8, "CUDA1")]) == [gpu(8), gpu(8, "CUDA1")], "ids may be unknown"


@pytest.mark.parametrize("layers", ["all", "6", "1", "0"])
def test_ram_is_for_what_the_cards_do_not_take(
    target: GgufHeader, draft: GgufHeader, layers: str
) -> None:
    plan = plan_of(target, draft, [gpu(24)], n_ctx=512, gpu_layers=layers)
    whole = pair_memory(target, draft, EngineOptions(), 512)
    left = placement.left_in_ram(whole, plan, target, draft)
    weights = layer_weights(target)
    assert left.target.weights == whole.target.weights - sum(weights[9 - plan.target.layers :])
    blocks = 9 - plan.target.layers if plan.target.layers else 8
    assert left.target.kv == whole.target.kv * blocks // 8
    assert left.target.tokenizer == whole.target.tokenizer
    assert whole.draft is not None
    gone = layers != "0"
    assert (left.draft.kv == 0) is gone, "where its target goes: first, and whole"
    assert (left.required < whole.required) is gone
    shared = [Device("MTL0", "gpu", "Metal", "an Apple chip", 24 * GB, 24 * GB, maps_ram=True)]
    apple = plan_of(target, draft, shared, n_ctx=512, gpu_layers=layers)
    assert placement.left_in_ram(whole, apple, target, draft) == whole


def test_a_number_is_taken_as_asked(target: GgufHeader) -> None:
    assert plan_of(target, None, [gpu(24)], gpu_layers="3").target.layers == 3
    assert plan_of(target, None, [gpu(24)], gpu_layers="99").target.layers == 9
    tight = plan_of(target, None, [gpu(0.3)], gpu_layers="5")
    assert tight.target.layers == 5
    assert "would fit" in tight.warnings[0]


def test_a_failed_load_steps_down_to_the_cpu(target: GgufHeader, draft: GgufHeader) -> None:
    plan: OffloadPlan | None = plan_of(target, draft, [gpu(24)])
    seen = []
    while plan is not None:
        assert sum(plan.target.split) == plan.target.layers
        seen.append((plan.target.layers, plan.draft.layers if plan.draft else 0))
        plan = fewer_layers(plan)
    assert seen[0] == (9, 3)
    assert seen[-1] == (0, 0)
    assert len(seen) < 10
    assert seen == sorted(seen, reverse=True)


def test_more_context_leaves_fewer_layers(target: GgufHeader) -> None:
    free = room(target, 6)
    small = plan_of(target, None, [gpu(free)], n_ctx=512).target.layers
    assert plan_of(target, None, [gpu(free)], n_ctx=65536).target.layers < small


def test_this_machine() -> None:
    found = dev.devices()
    assert any(device.kind == "cpu" for device in found)
    build = dev.build_info()
    assert build.binding == "0.3.36"
    assert build.backends


def test_the_command_for_a_gpu_build(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.platform", "linux")
    monkeypatch.setattr("os.path.exists", lambda path: "nvidia" in str(path))
    seen = dev.gpu_build_command([CPU])
    assert seen[0] == "NVIDIA GPU"
    assert "-DGGML_CUDA=on" in seen[1]
    assert "llama-cpp-python==0.3.36" in seen[1]
    assert dev.gpu_build_command([CPU, gpu(8)]) is None


class Refused(Exception):
    """Stands for a load that went as far as llama.cpp."""


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """What llama.cpp is asked to load, on a machine with a card of 24 GB."""
    from specllama.backend import llama

    seen: list[dict[str, Any]] = []

    def model(path: Path, **options: Any) -> None:
        seen.append(options)
        raise Refused

    monkeypatch.setattr(dev, "devices", lambda: [CPU, gpu(24), gpu(24, "CUDA1")])
    monkeypatch.setattr(llama, "LlamaModel", model)
    return seen


def test_llama_cpp_is_given_the_planned_split(asked: list[dict[str, Any]]) -> None:
    with pytest.raises(Refused):
        Engine.load("tiny", None, EngineOptions(n_ctx=512))
    place = asked[0]["place"]
    assert place.layers == sum(place.split) > 0
    assert place.split[1] == 0


def test_ram_is_checked_with_a_card_too(
    asked: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "available_memory", lambda: 75 << 20)
    with pytest.raises(DoesNotFit, match="are free"):
        Engine.load("tiny", None, EngineOptions(n_ctx=2048, gpu_layers="1"))
    assert not asked
    with pytest.raises(Refused):  # what the card takes needs no RAM
        Engine.load("tiny", None, EngineOptions(n_ctx=2048))
