"""Tables by which one launch works on many small tensors: where each tensor lies, and which program does what of it.

The host takes tens of microseconds for a launch, and an optimizer has hundreds of small tensors. `adamw_triton.py` and
`sum_of_squares_triton.py` give all of them to one launch. A program finds its tensor in `Blocks`, and the tensor's
address in a table of distances from the first tensor of its kind, which the kernel gets as a pointer of the right type.

Shapes: B blocks, which are programs; N tensors; K kinds of tensors, such as weights and gradients.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import torch
import triton  # type: ignore
import triton.language as tl  # type: ignore
from torch import Tensor

# Elements of a tensor that is launched on its own: the device works on it much longer than the host takes to launch.
LARGE_NUMEL = 2**26
_ALIGN = 16  # bytes
_COUNT_ALIGN = 16  # elements, of which a load takes no more


class Blocks(NamedTuple):
    """The work of each program."""

    tensor_B: Tensor  # number of the tensor
    begin_B: Tensor  # the first element
    count_B: Tensor  # elements, a multiple of 16


@lru_cache(maxsize=32)
def divide_into_blocks(sizes: tuple[int, ...], block: int, device: torch.device) -> Blocks:
    """Blocks of tensors with these numbers of elements; the same in every step, so that they are kept."""
    size_N = torch.tensor(sizes)
    blocks_N = (size_N + block - 1) // block
    tensor_B = torch.repeat_interleave(torch.arange(len(sizes)), blocks_N)
    first_N = blocks_N.cumsum(0) - blocks_N
    begin_B = (torch.arange(len(tensor_B)) - first_N[tensor_B]) * block
    count_B = (size_N[tensor_B] - begin_B).clamp(max=block)
    return Blocks(*(x.to(torch.int32).to(device) for x in (tensor_B, begin_B, count_B)))


def can_go_together(*tensors: Tensor) -> bool:
    """Whether tensors of one size lie as the kernels for many tensors expect it, and are small enough to gain by them.

    The kernels load 16 bytes at a time: tensors begin at multiples of that, and no load goes beyond their ends.
    """
    numel, addresses = tensors[0].numel(), 0
    for x in tensors:
        addresses |= x.data_ptr()
    is_aligned = addresses % _ALIGN == 0 and numel % _COUNT_ALIGN == 0
    return is_aligned and 0 < numel < LARGE_NUMEL and all(x.is_contiguous() for x in tensors)


def distances(*kinds: Sequence[Tensor]) -> Tensor:
    """The distance of each tensor from the first one of its kind in elements, on the device."""
    rows = []
    for tensors in kinds:
        first, size = tensors[0].data_ptr(), tensors[0].element_size()
        rows.append([(x.data_ptr() - first) // size for x in tensors])
    device = kinds[0][0].device
    if device.type != "cuda":
        return torch.tensor(rows)
    return torch.tensor(rows, pin_memory=True).to(device, non_blocking=True)


@triton.jit
def tensor_start(first_ptr, distance_ptr):
    """The pointer of the tensor with this entry in the table of distances."""
    # Tensors begin at multiples of 16 bytes, so that their distances are multiples of this number of elements.
    ALIGN: tl.constexpr = 128 // first_ptr.dtype.element_ty.primitive_bitwidth
    return first_ptr + tl.multiple_of(tl.load(distance_ptr), ALIGN)
