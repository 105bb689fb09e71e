"""Sums the squares of many tensors in Triton, reading each tensor once, and all small ones in one launch.

`data_parallel/protocol.py` uses it for the gradient norm.

Shapes: P programs, counted over all tensors.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

from collections import defaultdict
from collections.abc import Sequence

import torch
import triton  # type: ignore
import triton.language as tl  # type: ignore
from torch import Tensor

from threefold.engine.kernels.fast_launch import fast_launch
from threefold.engine.kernels.launch_config import cdiv
from threefold.engine.kernels.loss_and_optimizer.many_tensors import (
    can_go_together,
    distances,
    divide_into_blocks,
    tensor_start,
)

_BLOCK, _MAX_PROGRAMS = 4096, 8192  # values at a time, programs for one tensor


def sum_of_squares(tensors: Sequence[Tensor]) -> Tensor:
    """In fp32, and always in the same order: inside a program, and over programs."""
    together: dict[torch.dtype, list[Tensor]] = defaultdict(list)
    alone: list[Tensor] = []
    for x in tensors:
        (together[x.dtype] if can_go_together(x) else alone).append(x)
    device = tensors[0].device
    divided = [divide_into_blocks(tuple(x.numel() for x in some), _BLOCK, device) for some in together.values()]
    counts = [min(_MAX_PROGRAMS, cdiv(x.numel(), _BLOCK)) for x in alone] + [len(one.tensor_B) for one in divided]
    every_P = torch.empty(sum(counts), dtype=torch.float32, device=device)
    parts = every_P.split(counts)
    for x, part_P in zip(alone, parts, strict=False):
        if x.numel():
            _sum_squares[(len(part_P),)](x, part_P, x.numel(), _BLOCK, num_warps=8)
    for some, blocks, part_P in zip(together.values(), divided, parts[len(alone) :], strict=True):
        _sum_squares_of_many[(len(part_P),)](some[0], distances(some), *blocks, part_P, _BLOCK, num_warps=8)
    return every_P.sum()


@fast_launch
@triton.jit
def _sum_squares(x_ptr, part_ptr, size, BLOCK: tl.constexpr):
    total = tl.zeros((BLOCK,), tl.float32)
    n = tl.arange(0, BLOCK)
    for begin in range(tl.program_id(0).to(tl.int64) * BLOCK, size, tl.num_programs(0) * BLOCK):
        x = tl.load(x_ptr + begin + n, mask=begin + n < size, other=0.0).to(tl.float32)
        total += x * x
    tl.store(part_ptr + tl.program_id(0), tl.sum(total, 0))


@fast_launch
@triton.jit
def _sum_squares_of_many(x_ptr, table_ptr, tensor_ptr, begin_ptr, count_ptr, part_ptr, BLOCK: tl.constexpr):
    block = tl.program_id(0)
    n = tl.arange(0, BLOCK)
    begin = tl.multiple_of(tl.load(begin_ptr + block), BLOCK)
    x_ptrs = tensor_start(x_ptr, table_ptr + tl.load(tensor_ptr + block)) + begin + n
    x = tl.load(x_ptrs, mask=n < tl.multiple_of(tl.load(count_ptr + block), 16), other=0.0).to(tl.float32)
    tl.store(part_ptr + block, tl.sum(x * x, 0))
