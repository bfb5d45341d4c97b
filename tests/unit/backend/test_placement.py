"""Plans for machines that do not exist: layers, experts, drafts, and what is refused."""

import dataclasses
from pathlib import Path
from typing import Any

import ggufs
import pytest
import sketches
from ggufs_nextn import write_nextn
from sketches import plan_of

from specllama.backend import placement, planning
from specllama.backend.devices import Device
from specllama.backend.placement import OffloadPlan, layer_bytes, layer_weights
from specllama.engine import gguf_pair
from specllama.errors import DoesNotFit, SpecllamaError, UsageError
from specllama.models import context, memory, running_state
from specllama.models.gguf import GgufHeader, read_header
from specllama.models.gguf_format import EXPERTS
from specllama.models.judgement import Machine, Weights
from specllama.settings.hardware import PlaceOptions
from specllama.settings.params import EngineOptions

GB = 1_000_000_000


def gpu(free: float, name: str = "CUDA0", backend: str = "CUDA") -> Device:
    sizes = int(free * GB), int(free * 1.05 * GB)
    return Device(name, "gpu", backend, "a card", *sizes, maps_ram=backend == "MTL")


def planned(
    monkeypatch: pytest.MonkeyPatch,
    target: GgufHeader,
    draft: GgufHeader | None,
    cards: list[Device],
    ram: float,
    **options: Any,
) -> gguf_pair.Pair:
    """The pair on a machine with these cards and so much free RAM, as the engine would load it."""
    found = [*cards, Device("CPU", "cpu", "CPU", "", int(ram * GB), int(ram * 1.2 * GB))]
    monkeypatch.setattr(gguf_pair.devices, "devices", lambda: found)
    monkeypatch.setattr(memory, "available_memory", lambda: int(ram * GB))
    bare = gguf_pair.Pair(target, draft, False, context.LEAST_LENGTH, EngineOptions(**options))
    return gguf_pair.with_context(bare)


def within(plan: OffloadPlan) -> bool:
    """Whether no card is given more than it has."""
    placed = [one for one in (plan.target, plan.draft) if one is not None]
    return all(
        sum(one.bytes[i] for one in placed) <= card.free * planning.USABLE
        for i, card in enumerate(plan.gpus)
    )


def test_states_of_several_conversations_take_half_of_what_one_leaves_free(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    header = read_header(write_nextn(tmp_path / "h.gguf"))
    options = {"n_ctx": 512, "parallel": 4, "gpu_layers": "0"}
    pair = planned(monkeypatch, header, None, [], 64.0, **options)
    assert pair.lanes == pair.resolved().parallel == 4
    one, three = (dataclasses.replace(pair, lanes=n).need(512).required for n in (1, 3))
    room = (one + (three - one) / context.SHARE) / memory.MARGIN
    for free, lanes in ((room * 1.01, 3), (room * 0.99, 2), (one, 1)):
        pair = planned(monkeypatch, header, None, [], free / GB, **options)
        assert pair.lanes == pair.resolved().parallel == lanes
        assert any("more would take too much memory" in line for line in pair.lines())
    assert planned(monkeypatch, header, None, [], 64.0, exact="on", **options).lanes == 1
    monkeypatch.setattr(running_state, "TOGETHER", frozenset({"mamba"}))
    assert planned(monkeypatch, header, None, [], 64.0, **options).lanes == 1


def test_8b_on_8_gb(monkeypatch: pytest.MonkeyPatch) -> None:
    alone = planned(monkeypatch, sketches.llama_8b(), None, [gpu(7.5)], 12)
    assert alone.require_fit().lines() == [
        "context: 8,192 of 131,072 tokens: more would push weights off the GPU, or take over half"
        " of the free RAM (-c N chooses)",
        "offload: target 33 of 33 layers: 33 on CUDA0 (5.6 GB)",
    ]
    pair = planned(monkeypatch, sketches.llama_8b(), sketches.llama_1b(), [gpu(7.5)], 12)
    pair = pair.require_fit()
    assert pair.lines()[1:] == [
        "offload: target 31 of 33 layers: 31 on CUDA0 (5.2 GB)",
        "offload: draft 17 of 17 layers: 17 on CUDA0 (1.0 GB)",
    ]


def test_30b_a3b_on_12_gb_and_32_gb_of_ram(monkeypatch: pytest.MonkeyPatch) -> None:
    cards, draft = [gpu(11.6)], sketches.qwen_600m()
    pair = planned(monkeypatch, sketches.qwen_30b_a3b(), draft, cards, 28).require_fit()
    assert pair.plan is not None
    assert within(pair.plan)
    assert pair.lines()[1:] == [
        "offload: target 49 of 49 layers: 49 on CUDA0 (8.5 GB)",
        "offload: target experts of the first 28 of 48 layers in RAM (9.5 GB)",
        "offload: draft 29 of 29 layers: 29 on CUDA0 (1.6 GB)",
    ]
    # what the card does not take is counted in RAM
    assert 9.5 * GB < pair.need(pair.n_ctx).required < 12 * GB


def test_120b_on_24_gb_and_64_gb_of_ram(monkeypatch: pytest.MonkeyPatch) -> None:
    pair = planned(monkeypatch, sketches.gpt_oss_120b(), None, [gpu(23.3)], 60).require_fit()
    assert pair.plan is not None
    assert within(pair.plan)
    assert pair.lines()[0].startswith("context: 16,384 of 131,072 tokens")
    assert pair.lines()[1:] == [
        "offload: target 37 of 37 layers: 37 on CUDA0 (20.8 GB)",
        "offload: target experts of the first 25 of 36 layers in RAM (42.3 GB)",
    ]
    with pytest.raises(DoesNotFit):
        planned(monkeypatch, sketches.gpt_oss_120b(), None, [gpu(23.3)], 30).require_fit()


def test_70b_on_two_cards_of_unequal_size(monkeypatch: pytest.MonkeyPatch) -> None:
    cards = [gpu(23.3), gpu(11.6, "CUDA1")]
    pair = planned(monkeypatch, sketches.llama_70b(), sketches.llama_1b(), cards, 60).require_fit()
    assert pair.plan is not None
    assert within(pair.plan)
    assert pair.lines()[1:] == [
        "offload: target 56 of 81 layers: 38 on CUDA0 (19.8 GB), 18 on CUDA1 (9.9 GB)",
        "offload: draft 17 of 17 layers: 17 on CUDA0 (1.0 GB)",
    ]


def test_a_mac_of_36_gb(monkeypatch: pytest.MonkeyPatch) -> None:
    cards = [gpu(27, "MTL0", "MTL")]
    pair = planned(monkeypatch, sketches.qwen_32b(), sketches.qwen_600m(), cards, 28).require_fit()
    assert pair.lines() == [
        "context: 8,192 of 40,960 tokens: more would push weights off the GPU, or take over half of"
        " the free RAM (-c N chooses)",
        "offload: target 65 of 65 layers: 65 on MTL0 (20.5 GB)",
        "offload: draft 29 of 29 layers: 29 on MTL0 (1.6 GB)",
    ]


def test_without_a_gpu_the_context_leaves_half_of_the_ram(monkeypatch: pytest.MonkeyPatch) -> None:
    pair = planned(monkeypatch, sketches.llama_8b(), sketches.llama_1b(), [], 12).require_fit()
    assert pair.plan is None
    assert pair.lines() == [
        "context: 16,384 of 131,072 tokens: more would take over half of the memory that the"
        " weights leave free (-c N chooses)"
    ]
    asked = planned(monkeypatch, sketches.llama_8b(), None, [], 12, n_ctx=4096)
    assert asked.lines() == ["context: 4,096 tokens, as asked"]
    big = planned(monkeypatch, sketches.llama_8b(), None, [], 200)
    assert big.lines() == ["context: 131,072 tokens, the trained length"]


@pytest.mark.parametrize(
    ("asked", "ram", "hint"),
    [
        (4_000_000, 64, "what fits: -c 131072 (it was trained for no more)"),
        (4_000_000, 12, "what fits: -c 32768"),
        (100_000, 12, "what fits: -c 32768"),
    ],
)
def test_no_context_is_suggested_beyond_what_a_model_was_trained_for(
    monkeypatch: pytest.MonkeyPatch, asked: int, ram: int, hint: str
) -> None:
    with pytest.raises(DoesNotFit) as caught:
        planned(monkeypatch, sketches.llama_8b(), None, [], ram, n_ctx=asked).require_fit()
    assert caught.value.hint == hint


def test_a_longer_context_never_costs_a_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    target = sketches.llama_8b()
    for free in (6.0, 7.5, 9.0, 12.0, 24.0):
        pair = planned(monkeypatch, target, None, [gpu(free)], 100)
        short = planned(monkeypatch, target, None, [gpu(free)], 100, n_ctx=8192)
        assert pair.plan.target.layers == short.plan.target.layers
    assert pair.n_ctx == 65536


# ------------------------------------------------------------------ experts


def test_as_few_experts_as_possible_stay_in_ram() -> None:
    target = sketches.qwen_30b_a3b()
    kept = [
        plan_of(target, None, [gpu(free)], n_ctx=8192).target.experts for free in (4, 8, 12, 16, 24)
    ]
    assert kept == sorted(kept, reverse=True)
    assert kept[-1] == 0
    plan = plan_of(target, None, [gpu(12)], n_ctx=8192).target
    assert plan.expert_bytes == sum(layer_weights(target, experts=True)[: plan.experts])
    fixed = PlaceOptions(n_cpu_moe=plan.experts - 1)
    assert not plan_of(target, None, [gpu(12)], n_ctx=8192, place=fixed).target.whole


def test_a_small_card_takes_layers_without_experts() -> None:
    plan = plan_of(sketches.qwen_30b_a3b(), None, [gpu(2)], n_ctx=8192).target
    assert 0 < plan.layers < plan.of
    assert plan.experts == plan.of - 1
    assert plan.lines([gpu(2)])[1].startswith("offload: target experts of every layer in RAM")


def test_experts_as_asked() -> None:
    target = sketches.qwen_30b_a3b()
    every = plan_of(target, None, [gpu(80)], place=PlaceOptions(cpu_moe=True)).target
    assert every.patterns == ((EXPERTS, "CPU"),)
    assert every.expert_bytes == sum(layer_weights(target, experts=True))
    two = plan_of(target, None, [gpu(80)], place=PlaceOptions(n_cpu_moe=2)).target
    assert [pattern for pattern, _ in two.patterns] == [
        rf"blk\.{i}\.ffn_(up|down|gate|gate_up)_(ch|)exps" for i in (0, 1)
    ]
    # one that was asked for comes first: llama.cpp takes the first that matches
    moved = PlaceOptions(n_cpu_moe=1, overrides=(r"blk\.0\.=CUDA0",))
    assert plan_of(target, None, [gpu(80)], place=moved).target.patterns[0] == (
        r"blk\.0\.",
        "CUDA0",
    )
    with pytest.raises(UsageError, match="no experts"):
        plan_of(sketches.llama_8b(), None, [gpu(80)], place=PlaceOptions(cpu_moe=True))


def test_moved_tensors_take_no_place_on_the_card() -> None:
    target = sketches.llama_8b()
    moved = PlaceOptions(overrides=(r"\.ffn_=CPU",))
    plain = plan_of(target, None, [gpu(24)], n_ctx=8192).target
    less = plan_of(target, None, [gpu(24)], n_ctx=8192, place=moved).target
    ffn = sum(tensor.n_bytes for tensor in target.tensors if ".ffn_" in tensor.name)
    assert plain.bytes[0] - less.bytes[0] == ffn


def test_windows_alone_are_kept_where_the_whole_cache_does_not_fit(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    header = read_header(ggufs.write_windows(tmp_path / "w.gguf", context=131072))
    options: dict[str, Any] = {"n_ctx": 131072, "n_batch": 64}
    roomy = planned(monkeypatch, header, None, [], 64, parallel=2, **options)
    whole = roomy.need(roomy.n_ctx).required
    assert (roomy.options.swa_full, roomy.lanes, roomy.fits) == (True, 2, True)
    short = planned(monkeypatch, header, None, [], 0.9 * whole / GB, parallel=2, **options)
    assert (short.options.swa_full, short.lanes, short.fits) == (False, 1, True)
    assert any("only their window" in line for line in short.lines())
    none = planned(monkeypatch, header, None, [], 0.01 * whole / GB, **options)
    assert (none.options.swa_full, none.fits) == (True, False)
    with pytest.raises(DoesNotFit):
        none.require_fit()


# ------------------------------------------------------------------ devices


def test_devices_and_shares_as_asked() -> None:
    target, cards = sketches.llama_8b(), [gpu(24), gpu(24, "CUDA1")]

    def placed(**options: Any) -> placement.Placement:
        return plan_of(target, None, cards, n_ctx=8192, place=PlaceOptions(**options)).target

    assert placed().devices == ("CUDA0",), "the other one takes nothing"
    assert placed(devices="CUDA1").devices == ("CUDA1",)
    assert placed(devices="CUDA1").own_split == (33,)
    assert placed(tensor_split="3,1").split == (25, 8)  # layer 24 of 33 lies before 3/4
    assert placed(tensor_split="0,1").split == (0, 33)
    turned = placed(devices="CUDA1,CUDA0", tensor_split="3,1")
    assert (turned.devices, turned.own_split) == (("CUDA1", "CUDA0"), (25, 8))
    assert placed(devices="none").layers == 0


def test_a_draft_on_a_device_of_its_own() -> None:
    cards = [gpu(24), gpu(8, "CUDA1")]
    plan = plan_of(
        sketches.qwen_32b(), sketches.qwen_600m(), cards, n_ctx=8192,
        place=PlaceOptions(devices="CUDA0"), draft_devices="CUDA1",
    )  # fmt: skip
    assert (plan.target.split[1], plan.draft.split[0]) == (0, 0)
    assert (plan.target.devices, plan.draft.devices) == (("CUDA0",), ("CUDA1",))
    assert plan.target.own_split == (plan.target.layers,)


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"devices": "CUDA7"}, "no device 'CUDA7'"),
        ({"tensor_split": "1,1,1"}, "3 shares, there are 2 devices"),
        ({"devices": "CUDA0", "tensor_split": "1,1"}, "2 shares, there are 1 devices"),
        ({"overrides": (r"ffn=CUDA7",)}, "no device 'CUDA7'"),
        ({"overrides": (r"nothing_like_it=CPU",)}, "no tensor"),
    ],
)
def test_what_is_not_there_is_refused(options: dict[str, Any], why: str) -> None:
    cards = [gpu(24), gpu(24, "CUDA1")]
    with pytest.raises(UsageError, match=why):
        plan_of(sketches.llama_8b(), None, cards, place=PlaceOptions(**options))


def test_it_is_refused_on_a_machine_without_gpus_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    for options in (
        {"place": PlaceOptions(devices="CUDA0")},
        {"place": PlaceOptions(cpu_moe=True)},
        {"draft_devices": "CUDA0"},
        {"gpu_layers": "0", "place": PlaceOptions(overrides=("nothing_like_it=CPU",))},
    ):
        with pytest.raises(SpecllamaError):
            planned(monkeypatch, sketches.llama_8b(), None, [], 12, **options)


# ------------------------------------------------------------------ what is expected


def test_a_step_over_experts_reads_only_those_that_it_uses() -> None:
    dense, sparse = Weights(GB), Weights(16 * GB, 1 / 16)
    assert dense.read == pytest.approx(sparse.read)
    machine = Machine(64 * GB, 8, on_gpu=True)
    assert machine.speed(dense) == pytest.approx(machine.speed(sparse))


def test_a_draft_goes_where_its_target_goes() -> None:
    """Whole, while layers of the target fit beside it; one that is named is taken as asked."""
    target, draft = sketches.llama_8b(), sketches.llama_1b()
    for free in (1.2, 1.7, 2.2, 3.0, 7.5, 24.0):
        plan = plan_of(target, draft, [gpu(free)], n_ctx=8192)
        assert plan.draft.layers == (plan.draft.of if free > 2.5 else 0)
        assert plan.target.layers > 0
    plan = plan_of(target, draft, [gpu(3)], n_ctx=8192, gpu_layers="0", draft_devices="CUDA0")
    assert (plan.target.layers, plan.draft.whole) == (0, True)


def test_the_layers_of_a_sketch_are_those_of_its_model() -> None:
    """The sketches are of the size of the files: they would else prove nothing."""
    for header, size in (
        (sketches.llama_8b(), 4.9), (sketches.llama_70b(), 42), (sketches.gpt_oss_120b(), 63),
        (sketches.qwen_30b_a3b(), 18.6), (sketches.qwen_32b(), 19.8),
    ):  # fmt: skip
        assert header.tensor_bytes / 1e9 == pytest.approx(size, rel=0.08)
        assert sum(layer_bytes(header, 8192)) > header.tensor_bytes * 0.9
