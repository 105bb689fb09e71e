"""The gradient of the logits in FP8, from the logits in one pass: by rows and transposed, in blocks of 128.

The FP8 head (`layers/head_gemms.py`) multiplies it by the weight for the gradient of the input, and its transpose by
the input for the weight gradient. The two copies are as many bytes as one in bf16, so that quantizing costs no traffic
of its own. `softmax_grad_in_place` of the logits in fp32 and then `quantize_blocks` make the same numbers bit for bit.

Shapes: C tokens, V vocabulary or a shard of it, P tokens that the transpose has room for, B blocks of them.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

import triton  # type: ignore
import triton.language as tl  # type: ignore
from torch import Tensor

from threefold.engine.kernels.fp8.blockwise_quantize import (
    column_amax,
    empty_rows,
    kernel_arguments,
    pack_rows,
    program_tile,
    store_column_scales,
    store_rows,
)
from threefold.engine.kernels.fp8.quantized_tensors import BLOCK, Fp8Columns, Fp8Rows, num_blocks
from threefold.engine.kernels.loss_and_optimizer.cross_entropy_triton import LOG2_E


def softmax_grad_fp8(
    logits_CV: Tensor, at_C: Tensor, log_sum_C: Tensor, columns: Fp8Columns | None, first_row: int = 0
) -> Fp8Rows:
    """exp(logit - log_sum), minus 1 at `at_C`, quantized.

    -> by rows, whose width is padded by zeros to whole blocks. The transpose is written into `columns` from `first_row`
    on, a multiple of 128: `columns` may have room for more tokens than these. An infinite `log_sum` makes a row of
    zeros.
    """
    num_tokens, vocab = logits_CV.shape
    rows = empty_rows(num_tokens, num_blocks(vocab) * BLOCK, logits_CV.device)
    value_VP, scale_BV = kernel_arguments(columns)
    if logits_CV.numel():
        _softmax_grad_fp8[(num_blocks(num_tokens) * num_blocks(vocab),)](
            logits_CV, at_C, log_sum_C, *kernel_arguments(rows), value_VP, scale_BV, num_tokens, vocab,
            logits_CV.stride(0), 0 if value_VP is None else value_VP.stride(0), first_row // BLOCK,
            columns is not None, BLOCK, num_warps=4,
        )  # fmt: skip
    return rows


@triton.jit
def _softmax_grad_fp8(
    logits_ptr, at_ptr, log_sum_ptr, value_ptr, scale_ptr, column_ptr, column_scale_ptr, C, V, stride, column_stride,
    first_block, COLUMNS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    column_block, block = program_tile(V, BLOCK)
    shift = column_block * BLOCK
    quad = tl.arange(0, BLOCK // 4)
    row = block * BLOCK + 4 * quad  # each g holds every fourth row: see `pack_rows`
    g0 = _load_softmax(logits_ptr, log_sum_ptr, row, shift, C, V, stride, BLOCK)
    g1 = _load_softmax(logits_ptr, log_sum_ptr, row + 1, shift, C, V, stride, BLOCK)
    g2 = _load_softmax(logits_ptr, log_sum_ptr, row + 2, shift, C, V, stride, BLOCK)
    g3 = _load_softmax(logits_ptr, log_sum_ptr, row + 3, shift, C, V, stride, BLOCK)
    every_row = block * BLOCK + tl.arange(0, BLOCK)
    at = tl.load(at_ptr + every_row, mask=every_row < C, other=-1)
    # A label of another shard may lie in the padding behind the last column.
    end = tl.minimum(shift + BLOCK, V)
    if tl.max(((at >= shift) & (at < end)).to(tl.int32), 0) > 0:  # few blocks of a large vocabulary hold a label
        g0 = _subtract_label(g0, at_ptr, row, shift, end, C, BLOCK)
        g1 = _subtract_label(g1, at_ptr, row + 1, shift, end, C, BLOCK)
        g2 = _subtract_label(g2, at_ptr, row + 2, shift, end, C, BLOCK)
        g3 = _subtract_label(g3, at_ptr, row + 3, shift, end, C, BLOCK)
    width = tl.cdiv(V, BLOCK) * BLOCK
    store_rows(g0, value_ptr, scale_ptr, row, row < C, column_block, shift, C, width, BLOCK)
    store_rows(g1, value_ptr, scale_ptr, row + 1, row + 1 < C, column_block, shift, C, width, BLOCK)
    store_rows(g2, value_ptr, scale_ptr, row + 2, row + 2 < C, column_block, shift, C, width, BLOCK)
    store_rows(g3, value_ptr, scale_ptr, row + 3, row + 3 < C, column_block, shift, C, width, BLOCK)
    if COLUMNS:
        block += first_block
        col = shift + tl.arange(0, BLOCK)
        inverse = store_column_scales(column_amax(g0, g1, g2, g3), column_scale_ptr, block, col, V)
        packed_row = block * (BLOCK // 4) + quad
        to = column_ptr + col.to(tl.int64)[:, None] * column_stride + packed_row[None, :]
        tl.store(to, pack_rows(g0, g1, g2, g3, inverse).T, mask=(col < V)[:, None])


@triton.jit
def _load_softmax(logits_ptr, log_sum_ptr, row, shift, C, V, stride, BLOCK: tl.constexpr):
    """The softmax of a block of every fourth row; zeros behind the last row and the last column."""
    col = shift + tl.arange(0, BLOCK)
    mask = (row < C)[:, None] & (col < V)[None, :]
    x = tl.load(logits_ptr + row.to(tl.int64)[:, None] * stride + col[None, :], mask=mask, other=float("-inf"))
    log_sum = tl.load(log_sum_ptr + row, mask=row < C, other=0.0) * LOG2_E
    return tl.exp2(x.to(tl.float32) * LOG2_E - log_sum[:, None])


@triton.jit
def _subtract_label(g, at_ptr, row, shift, end, C, BLOCK: tl.constexpr):
    col = shift + tl.arange(0, BLOCK)
    at = tl.load(at_ptr + row, mask=row < C, other=-1)
    return tl.where((col[None, :] == at[:, None]) & (col < end)[None, :], g - 1.0, g)
