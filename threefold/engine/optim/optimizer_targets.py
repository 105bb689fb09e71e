"""The parameters that an optimizer updates: whole ones, or the shard whose optimizer state this rank owns.

Each target offers a name, a value, a gradient, and whether it is a matrix. `ModelParam` wraps a parameter of the
model; `data_parallel/protocol.py` has the shards.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor


class OptimizerParam(Protocol):
    """One tensor that an optimizer updates."""

    name: str
    value: Tensor  # fp32 where `dtype` is 16-bit: then it is its own master weight
    matrix: bool  # whether the full parameter is a matrix or a stack of matrices
    dtype: torch.dtype  # of the model's parameter

    @property
    def grad(self) -> Tensor | None: ...


class ModelParam:
    """A whole parameter with its `.grad`."""

    def __init__(self, name: str, value: Tensor) -> None:
        self.name, self.value, self.dtype = name, value, value.dtype
        self.matrix = is_matrix(name, value.shape)

    @property
    def grad(self) -> Tensor | None:
        return self.value.grad


def as_optimizer_params(named: Iterable[tuple[str, Tensor] | OptimizerParam]) -> list[OptimizerParam]:
    """The given parameters as `OptimizerParam`, without those that do not require a gradient."""
    params: list[OptimizerParam] = []
    for entry in named:
        if not isinstance(entry, tuple):
            params.append(entry)
        elif entry[1].requires_grad:
            params.append(ModelParam(*entry))
    return params


def is_matrix(name: str, shape: Sequence[int]) -> bool:
    """Return whether a parameter is a matrix or a stack of matrices. A bias is a vector, also where experts stack
    theirs."""
    return len(shape) >= 2 and not name.endswith("bias")


def state_dtype_of(param: OptimizerParam, dtype: torch.dtype) -> torch.dtype:
    """The dtype of an optimizer state: `dtype`, or fp64 for an fp64 model, an oracle that must not be rounded."""
    return torch.float64 if param.value.dtype == torch.float64 else dtype


def needs_master_weight(param: OptimizerParam) -> bool:
    """Return whether the model's parameter has less than 32 bits."""
    return param.dtype not in (torch.float32, torch.float64)


def make_master_weight(param: OptimizerParam) -> Tensor:
    """An fp32 copy of the parameter, or its value itself where that is fp32."""
    return param.value if param.value.dtype == torch.float32 else param.value.detach().float().clone()


def refresh_master_weights(
    params: Iterable[OptimizerParam], masters: Mapping[str, Tensor], remainders: Mapping[str, Tensor]
) -> None:
    """Copy each parameter into its master weight: then it leaves no remainder."""
    for param in params:
        if param.name in remainders:
            remainders[param.name].zero_()
        elif param.name in masters and masters[param.name] is not param.value:
            masters[param.name].copy_(param.value)
