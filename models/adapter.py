"""LoRA adapters: whether a file is one, and one of this model."""

from __future__ import annotations

from specllama.errors import CannotLoad, PairIncompatible
from specllama.models.gguf import GgufHeader

_PARTS = (".lora_a", ".lora_b")


def check_adapter(adapter: GgufHeader, target: GgufHeader) -> None:
    """Refuse what llama.cpp would refuse, or would end the process over.

    Raises:
        CannotLoad: it is no LoRA adapter, or a damaged one.
        PairIncompatible: it is one of another model.
    """
    file = adapter.path.name
    if adapter.kind != "adapter" or adapter.text("adapter.type") != "lora":
        raise CannotLoad(f"{file} is not a LoRA adapter", "choose the file of one with --lora")
    if adapter.kinds.get("adapter.lora.alpha", "f32") != "f32":
        raise CannotLoad(f"{file}: adapter.lora.alpha is not a 32-bit float")
    if any(key.startswith("adapter.alora.") for key in (*adapter.kinds, *adapter.arrays)):
        raise CannotLoad(f"{file} is an activated LoRA, which is not supported")
    if adapter.architecture != target.architecture:
        raise PairIncompatible(
            f"{file} is an adapter for {adapter.architecture or 'another'} models, "
            f"{target.path.name} is {target.architecture}"
        )
    if not adapter.tensors:
        raise CannotLoad(f"{file} holds no tensors")
    for tensor in adapter.tensors:
        name = next((tensor.name.removesuffix(p) for p in _PARTS if tensor.name.endswith(p)), "")
        if name and name not in target.by_name:
            raise PairIncompatible(f"{file} changes {name}, which {target.path.name} does not have")
