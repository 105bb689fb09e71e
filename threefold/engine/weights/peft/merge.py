"""The tensors of a model with its adapters merged into its weights. `convert.py` exports them.

A merged weight is W + scale B A, computed in fp32 or more and rounded to the dtype of W once. In bf16 that rounding is
coarser than what the adapter may have learnt; the unmerged adapter keeps it.
"""

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from threefold.engine.lora import LORA_A, LORA_B, LoraSettings, is_adapter
from threefold.engine.weights.peft.adapter_tensors import weight_of


class MergedTensors(Mapping[str, Tensor]):
    """The tensors of a model by name, without its adapters. Each weight is merged when it is asked for."""

    def __init__(self, state: Mapping[str, Tensor], settings: LoraSettings) -> None:
        self.state, self.settings = state, settings
        self._adapters = {weight_of(name): name.removesuffix(LORA_A) for name in state if name.endswith(LORA_A)}

    def __getitem__(self, name: str) -> Tensor:
        weight = self.state[name]
        prefix = self._adapters.get(name)
        if prefix is None:
            return weight
        return merge(weight, self.state[f"{prefix}{LORA_A}"], self.state[f"{prefix}{LORA_B}"], self.settings.scale)

    def __iter__(self) -> Iterator[str]:
        return (name for name in self.state if not is_adapter(name))

    def __len__(self) -> int:
        return sum(1 for _ in self)


def merge(weight: Tensor, a: Tensor, b: Tensor, scale: float) -> Tensor:
    """The weight, or the stack of weights, with its adapter."""
    dtype = torch.promote_types(weight.dtype, torch.float32)
    merged = weight.to(dtype).add(b.to(dtype) @ a.to(dtype), alpha=scale)
    return merged.to(weight.dtype)
