"""One Hugging Face tensor, and the parts of an engine tensor that have its values. `hf_names.py` makes them."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, overload

import torch
from torch import Tensor

View = Callable[[Tensor], Tensor]  # an engine tensor -> a part of it


def whole(x: Tensor) -> Tensor:
    return x


@dataclass(frozen=True)
class HfTensor:
    """One Hugging Face tensor, and the part of an engine tensor that has its values."""

    key: str  # its name in the checkpoint
    view: View = whole  # engine tensor -> the part with these values
    merge: int | None = None  # this dim of the view and the next are one dim of the Hugging Face tensor
    stored: Literal["plain", "mxfp4"] = "plain"
    more: tuple[View, ...] = ()  # further parts, which follow along the first dim of the Hugging Face tensor

    def write(self, engine_tensor: Tensor, value: Tensor) -> None:
        """Copy the values of the Hugging Face tensor into the engine tensor."""
        shapes = [self._merged_shape(target) for target in self._views(engine_tensor)]
        parts = value.split([shape[0] for shape in shapes]) if self.more else [value]
        for target, part in zip(self._views(engine_tensor), parts, strict=True):
            target.copy_(part.reshape(target.shape))

    def shape(self, engine_tensor: Tensor) -> tuple[int, ...]:
        """The shape of the Hugging Face tensor."""
        shapes = [self._merged_shape(part) for part in self._views(engine_tensor)]
        return (sum(shape[0] for shape in shapes), *shapes[0][1:]) if self.more else shapes[0]

    def read(self, engine_tensor: Tensor) -> Tensor:
        """The Hugging Face tensor, made from the engine tensor."""
        parts = [part.reshape(self._merged_shape(part)) for part in self._views(engine_tensor)]
        return (torch.cat(parts) if self.more else parts[0]).contiguous()

    def num_elements(self, engine_tensor: Tensor) -> int:
        return sum(part.numel() for part in self._views(engine_tensor))

    def _views(self, engine_tensor: Tensor) -> Iterator[Tensor]:
        return (view(engine_tensor) for view in (self.view, *self.more))

    def _merged_shape(self, part: Tensor) -> tuple[int, ...]:
        sizes = list(part.shape)
        if self.merge is not None:
            sizes[self.merge : self.merge + 2] = [sizes[self.merge] * sizes[self.merge + 1]]
        return tuple(sizes)


Layout = Sequence[HfTensor]


class TensorsOfExperts(Sequence[HfTensor]):
    """One tensor for each expert or half of one, made when it is asked for: a config.json may tell of any number."""

    def __init__(self, count: int, make: Callable[[int], HfTensor]) -> None:
        self._numbers, self._make = range(count), make

    @overload
    def __getitem__(self, index: int) -> HfTensor: ...

    @overload
    def __getitem__(self, index: slice) -> Sequence[HfTensor]: ...

    def __getitem__(self, index: int | slice) -> HfTensor | Sequence[HfTensor]:
        found = self._numbers[index]
        return self._make(found) if isinstance(found, int) else [self._make(number) for number in found]

    def __len__(self) -> int:
        return len(self._numbers)


def stored_keys(tensor: HfTensor) -> Sequence[str]:
    """The keys in the safetensors files that hold one Hugging Face tensor."""
    return (f"{tensor.key}_blocks", f"{tensor.key}_scales") if tensor.stored == "mxfp4" else (tensor.key,)
