"""FP8 tensors that the kernels of this folder exchange: e4m3 values with their scales, laid out as the GEMMs read them.

The number that is meant is `value * scale`. Weights, and the rows of the rowwise recipe, have the fp32 scale amax /
448, at least SMALLEST_SCALE, where amax is the largest magnitude of the block. Rows and columns of activations and
gradients have that scale rounded up to a power of two. A block of zeros has scale 1.

A block is BLOCK long along the dim that the GEMM sums over: 1x128 for the columns of a row, 128x1 for the rows of one
expert, and 128x128 ("square") for the right-hand side: weights, and inputs in the weight-gradient GEMM.

Example: 300 rows of 512 columns are an Fp8Rows of value (300, 512) and scale (4, 300).

Shapes: R rows sorted by expert, K columns, C blocks of columns, B blocks of rows (an upper bound), P = B * BLOCK rows
with each expert's padded by zeros to whole blocks, E experts, O rows of a weight, I its columns.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

BLOCK = 128
E4M3_MAX = 448.0  # the largest number of torch.float8_e4m3fn: 1.75 * 2 ** 8
# The smallest fp32 scale. Below it the remainder of a division leaves the range of fp32, and
# `blockwise_quantize.divide_rn` no longer rounds as a division does; the inverse is infinite from 2 ** -128 on.
SMALLEST_SCALE = 2.0**-93
E4M3 = torch.float8_e4m3fn


@dataclass(frozen=True)
class Fp8Rows:
    """Rows quantized in 1x128 blocks, or with one scale per row (C = 1), for a GEMM that sums over columns."""

    value_RK: Tensor
    scale_CR: Tensor


@dataclass(frozen=True)
class Fp8Columns:
    """Rows quantized in blocks of 128 rows, for a GEMM that sums over rows (the weight gradient).

    The values are transposed, because Hopper sums 8-bit values only along the contiguous dim.
    """

    value_KP: Tensor
    scale: Tensor  # (B, K) for 128x1 blocks, (B, C) for 128x128 blocks


@dataclass(frozen=True)
class Fp8Weight:
    """The weights of all experts: `value` for the forward GEMM, `transposed` for the gradient of its input."""

    value_EOI: Tensor
    transposed_EIO: Tensor
    scale: Tensor  # blockwise (E, O / 128, I / 128); row-wise (E, O)
    transposed_scale: Tensor  # blockwise the same numbers as (E, I / 128, O / 128); row-wise (E, I)


@dataclass(frozen=True)
class Fp8ExpertWeights:
    """Both layers of the experts, quantized."""

    gate_up: Fp8Weight
    down: Fp8Weight


@dataclass(frozen=True)
class RowBlocks:
    """The table of blocks of rows. No block holds rows of two experts."""

    table: Tensor  # (3, B): expert, first row, end of the expert's rows
    total: Tensor  # (1,): number of blocks in use
    ends_E: Tensor  # the end of each expert's blocks

    @property
    def max_blocks(self) -> int:
        return self.table.shape[1]


def num_blocks(size: int) -> int:
    """The blocks that `size` rows or columns take; the last one may be short."""
    return -(-size // BLOCK)


def max_row_blocks(num_rows: int, num_experts: int) -> int:
    """An upper bound of the blocks of rows, whatever the load of each expert."""
    return num_rows // BLOCK + num_experts
