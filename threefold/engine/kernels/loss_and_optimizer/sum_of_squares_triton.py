"""Sums the squares of many tensors in Triton, reading each tensor once.

`data_parallel/owned_shards.py` uses it for the gradient norm.

Shapes: P programs, counted over all tensors.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

from collections.abc import Sequence

import torch
import triton  # type: ignore
import triton.language as tl  # type: ignore
from torch import Tensor

from threefold.engine.kernels.fast_launch import fast_launch
from threefold.engine.kernels.launch_config import cdiv

_BLOCK, _MAX_PROGRAMS = 4096, 2048  # values at a time, programs for one tensor


def sum_of_squares(tensors: Sequence[Tensor]) -> Tensor:
    """In fp32, and always in the same order: inside a program, and over programs."""
    counts = [min(_MAX_PROGRAMS, cdiv(x.numel(), _BLOCK)) for x in tensors]
    part_P = torch.empty(sum(counts), dtype=torch.float32, device=tensors[0].device)
    first = 0
    for x, count in zip(tensors, counts, strict=True):
        if count:
            _sum_squares[(count,)](x, part_P[first:], x.numel(), _BLOCK, num_warps=8)
        first += count
    return part_P.sum()


@fast_launch
@triton.jit
def _sum_squares(x_ptr, part_ptr, size, BLOCK: tl.constexpr):
    total = tl.zeros((BLOCK,), tl.float32)
    n = tl.arange(0, BLOCK)
    for begin in range(tl.program_id(0).to(tl.int64) * BLOCK, size, tl.num_programs(0) * BLOCK):
        x = tl.load(x_ptr + begin + n, mask=begin + n < size, other=0.0).to(tl.float32)
        total += x * x
    tl.store(part_ptr + tl.program_id(0), tl.sum(total, 0))
