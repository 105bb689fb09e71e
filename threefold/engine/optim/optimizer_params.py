"""What an optimizer updates: a whole parameter, or the part of one that this rank keeps the state of."""

from collections.abc import Iterable, Sequence
from typing import Protocol

import torch
from torch import Tensor


class Item(Protocol):
    """`value` may be wider than `dtype`, the model's own: then it is its own master weight."""

    name: str
    value: Tensor
    matrix: bool
    dtype: torch.dtype

    @property
    def grad(self) -> Tensor | None: ...


class Named:
    """A parameter with its `.grad`."""

    def __init__(self, name: str, value: Tensor) -> None:
        self.name, self.value, self.dtype = name, value, value.dtype
        self.matrix = is_matrix(name, value.shape)

    @property
    def grad(self) -> Tensor | None:
        return self.value.grad


def as_items(named: Iterable[tuple[str, Tensor] | Item]) -> list[Item]:
    """Without what does not train."""
    items: list[Item] = []
    for one in named:
        if not isinstance(one, tuple):
            items.append(one)
        elif one[1].requires_grad:
            items.append(Named(*one))
    return items


def is_matrix(name: str, shape: Sequence[int]) -> bool:
    """Matrices, and stacks of them. A bias is a vector, also where the experts' are stacked."""
    return len(shape) >= 2 and not name.endswith("bias")


def kept_dtype(item: Item, dtype: torch.dtype) -> torch.dtype:
    """Of the state kept in `dtype`. An fp64 model is an oracle: nothing of it is rounded."""
    return torch.float64 if item.value.dtype == torch.float64 else dtype


def needs_master(item: Item) -> bool:
    return item.dtype not in (torch.float32, torch.float64)


def make_master(item: Item) -> Tensor:
    return item.value if item.value.dtype == torch.float32 else item.value.detach().float().clone()
