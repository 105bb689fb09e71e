"""What the FP8 kernels hand each other: e4m3 values with their scales, laid out as the products read them.

A value is `fp8 * scale`. A scale is the smallest power of two by which its block fits under 448; that of a weight or of
a whole row any number from SMALLEST_SCALE on, by which the largest becomes 448 (1 for zeros). Blocks are BLOCK long
along what the product sums over: the columns of a row (1x128), the rows of one expert (128x1), or both (128x128) for
what a product has on its right: weights, and inputs in the gradient of a weight.

Shapes: R rows sorted by expert, K columns, C blocks of columns, B blocks of rows (an upper bound), P = B * BLOCK rows
with each expert's filled up by zeros to whole blocks, E experts, O rows of a weight, I its columns.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

BLOCK = 128
LARGEST = 448.0  # of torch.float8_e4m3fn: 1.75 * 2 ** 8
# Of those that are no powers of two. Below it what is left of a division would leave the range of fp32, and
# `quantize.divided` would not round as a division does; its inverse is infinite from 2 ** -128 on.
SMALLEST_SCALE = 2.0**-93
E4M3 = torch.float8_e4m3fn


@dataclass(frozen=True)
class Rows8:
    """For a product that sums over columns."""

    value_RK: Tensor
    scale_CR: Tensor


@dataclass(frozen=True)
class Columns8:
    """For a product that sums over rows, turned because Hopper sums 8-bit values only along what lies together."""

    value_KP: Tensor
    scale: Tensor  # (B, K); of squares (B, C)


@dataclass(frozen=True)
class Weight8:
    """One weight an expert, for the product forward (`value`) and that of its input's gradient (`turned`)."""

    value_EOI: Tensor
    turned_EIO: Tensor
    scale: Tensor  # blockwise (E, O / 128, I / 128); row-wise (E, O)
    turned_scale: Tensor  # blockwise the same numbers as (E, I / 128, O / 128); row-wise (E, I)


@dataclass(frozen=True)
class QuantizedWeights:
    gate_up: Weight8
    down: Weight8


@dataclass(frozen=True)
class Blocks:
    """Which rows a block of rows is: none crosses from one expert to the next."""

    table: Tensor  # (3, B): expert, first row, end of the expert's rows
    total: Tensor  # (1,): blocks in use
    ends_E: Tensor  # the end of each expert's blocks

    @property
    def num(self) -> int:
        return self.table.shape[1]


def num_blocks(size: int) -> int:
    return -(-size // BLOCK)


def most_blocks(num_rows: int, num_experts: int) -> int:
    """However the rows are shared out."""
    return num_rows // BLOCK + num_experts
