"""Cross entropy in Triton: the loss of each token, and the gradient of the logits in place of the logits.

`layers/cross_entropy.py` calls it. The logits are read twice, the second time mostly from the L2 cache. Where the
vocabulary is sharded over ranks, the two passes are two kernels: `softmax_statistics` of the shard, then a reduction
over ranks by the caller, then `softmax_grad_in_place`.

Shapes: C tokens, V vocabulary or a shard of it.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

import torch
import triton  # type: ignore
import triton.language as tl  # type: ignore
from torch import Tensor

from threefold.engine.kernels.fast_launch import fast_launch
from threefold.engine.kernels.launch_config import cdiv, next_power_of_2, num_programs

_BLOCK = 8192
_PROGRAMS_PER_SM = 8  # that scale a gradient
LOG2_E: tl.constexpr = tl.constexpr(1.4426950408889634)  # GPUs have an instruction for 2^x
SCALE_TOLERANCE: tl.constexpr = tl.constexpr(2.0**-20)  # far below the rounding of bf16
_MIN_LOGIT: tl.constexpr = tl.constexpr(-1e30)  # not -inf, because -inf - -inf is nan


def cross_entropy_in_place(logits_CV: Tensor, labels_C: Tensor, ignore: int, scale: Tensor | None = None) -> Tensor:
    """-> the loss of each token, 0 where its label is `ignore`.

    The logits are overwritten with the gradient of the summed loss, which is 0 in the rows of ignored tokens. It is
    multiplied by `scale`, a one-element tensor, unless that is 0.
    """
    loss_C = _empty_per_token(logits_CV)
    _launch(_cross_entropy, logits_CV, scale, labels_C, loss_C, ignore)
    return loss_C


def softmax_statistics(logits_CV: Tensor, at_C: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """-> for each token (largest logit, sum of exp(logit - largest), logit at `at_C` or 0 if that is not in the
    shard)."""
    top_C, sum_C, picked_C = (_empty_per_token(logits_CV) for _ in range(3))
    _launch(_softmax_statistics, logits_CV, None, at_C, top_C, sum_C, picked_C)
    return top_C, sum_C, picked_C


def softmax_grad_in_place(logits_CV: Tensor, at_C: Tensor, log_sum_C: Tensor, scale: Tensor | None = None) -> None:
    """Overwrite the logits with exp(logit - log_sum), minus 1 at `at_C`, times `scale` unless that is 0."""
    _launch(_softmax_grad, logits_CV, scale, at_C, log_sum_C)


def scale_and_cast(x: Tensor, factor: Tensor, scale: Tensor | None, dtype: torch.dtype) -> Tensor:
    """x * factor / scale in fp32, rounded once to `dtype`: in place if x has this dtype.

    Both numbers are one-element tensors. `scale` is what x was multiplied by before, which a value of 0 did not do.
    Where they are equal up to rounding in fp32, and x stays in place, x is not read.
    """
    out = x if x.dtype == dtype else torch.empty_like(x, dtype=dtype)
    if x.numel():
        num_blocks = min(cdiv(x.numel(), _BLOCK), num_programs(x.device, _PROGRAMS_PER_SM))
        _scale[(num_blocks,)](x, factor, scale, out, x.numel(), _BLOCK, out is x, scale is not None, num_warps=8)
    return out


def _empty_per_token(logits_CV: Tensor) -> Tensor:
    return torch.empty(len(logits_CV), dtype=torch.float32, device=logits_CV.device)


def _launch(kernel, logits_CV, scale, *rest):
    num_tokens, vocab = logits_CV.shape
    if num_tokens:
        block = min(_BLOCK, next_power_of_2(max(vocab, 1)))
        warps = max(4, block // 256)  # with one program on a multiprocessor the L2 cache holds most of what they read
        sizes = logits_CV.stride(0), vocab, block, scale is not None
        kernel[(num_tokens,)](logits_CV, scale, *rest, *sizes, num_warps=warps)


@fast_launch
@triton.jit
def _cross_entropy(
    logits_ptr, scale_ptr, label_ptr, loss_ptr, ignore, stride, V: tl.constexpr, BLOCK: tl.constexpr,
    SCALED: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    label = tl.load(label_ptr + token)
    row_ptr = logits_ptr + token * stride
    if label == ignore:
        tl.store(loss_ptr + token, 0.0)
        n = tl.arange(0, BLOCK)
        for begin in range(0, V, BLOCK):
            tl.store(row_ptr + begin + n, tl.zeros((BLOCK,), logits_ptr.dtype.element_ty), mask=begin + n < V)
    else:
        top, total = _max_and_sum(row_ptr, V, BLOCK)
        log_sum = top + tl.log(total)
        tl.store(loss_ptr + token, log_sum - tl.load(row_ptr + label).to(tl.float32))
        # All of a row's threads have read the label's logit before any of them overwrites it.
        tl.debug_barrier()
        _write_grad(row_ptr, scale_ptr, label, log_sum, V, BLOCK, SCALED)


@fast_launch
@triton.jit
def _softmax_statistics(
    logits_ptr, scale_ptr, at_ptr, top_ptr, sum_ptr, picked_ptr, stride, V: tl.constexpr, BLOCK: tl.constexpr,
    SCALED: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    row_ptr = logits_ptr + token * stride
    top, total = _max_and_sum(row_ptr, V, BLOCK)
    at = tl.load(at_ptr + token)
    tl.store(top_ptr + token, top)
    tl.store(sum_ptr + token, total)
    here = (at >= 0) & (at < V)
    tl.store(picked_ptr + token, tl.load(row_ptr + at, mask=here, other=0.0).to(tl.float32))


@fast_launch
@triton.jit
def _softmax_grad(
    logits_ptr, scale_ptr, at_ptr, log_sum_ptr, stride, V: tl.constexpr, BLOCK: tl.constexpr, SCALED: tl.constexpr
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    at, log_sum = tl.load(at_ptr + token), tl.load(log_sum_ptr + token)
    _write_grad(logits_ptr + token * stride, scale_ptr, at, log_sum, V, BLOCK, SCALED)


@fast_launch
@triton.jit
def _scale(
    x_ptr, factor_ptr, scale_ptr, out_ptr, count, BLOCK: tl.constexpr, IN_PLACE: tl.constexpr, SCALED: tl.constexpr
):  # fmt: skip
    factor = tl.load(factor_ptr).to(tl.float32)
    tolerance = 0.0
    if SCALED:
        factor = factor / _load_scale(scale_ptr)
        tolerance = SCALE_TOLERANCE
    is_one = tl.abs(factor - 1.0) <= tolerance  # not so if it is NaN
    if not IN_PLACE or is_one == 0:
        n = tl.arange(0, BLOCK)
        for begin in range(tl.program_id(0).to(tl.int64) * BLOCK, count, tl.num_programs(0) * BLOCK):
            x = tl.load(x_ptr + begin + n, mask=begin + n < count).to(tl.float32) * factor
            tl.store(out_ptr + begin + n, x.to(out_ptr.dtype.element_ty), mask=begin + n < count)


@triton.jit
def _load_scale(scale_ptr):
    """The scale, or 1 where it is 0: what was multiplied by 0 could not be scaled to anything else later."""
    scale = tl.load(scale_ptr).to(tl.float32)
    return tl.where(scale == 0.0, 1.0, scale)


@triton.jit
def _max_and_sum(row_ptr, V: tl.constexpr, BLOCK: tl.constexpr):
    """-> (largest value of a row, sum of exp(value - largest)).

    Until the end every 32 values have their own maximum, so that only a few threads have to exchange it.
    """
    WIDTH: tl.constexpr = 32 if BLOCK > 32 else BLOCK
    ROWS: tl.constexpr = BLOCK // WIDTH
    n = tl.arange(0, ROWS)[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
    top_R = tl.full((ROWS,), _MIN_LOGIT, tl.float32)
    sum_RW = tl.zeros((ROWS, WIDTH), tl.float32)
    for begin in range(0, V, BLOCK):
        x = tl.load(row_ptr + begin + n, mask=begin + n < V, other=float("-inf")).to(tl.float32) * LOG2_E
        higher_R = tl.maximum(top_R, tl.max(x, 1))
        sum_RW = sum_RW * tl.exp2(top_R - higher_R)[:, None] + tl.exp2(x - higher_R[:, None])
        top_R = higher_R
    top = tl.max(top_R, 0)
    total = tl.sum(tl.sum(sum_RW, 1) * tl.exp2(top_R - top), 0)
    return tl.where(total == 0, float("-inf"), top / LOG2_E), total


@triton.jit
def _write_grad(row_ptr, scale_ptr, at, log_sum, V: tl.constexpr, BLOCK: tl.constexpr, SCALED: tl.constexpr):
    n = tl.arange(0, BLOCK)
    num_blocks: tl.constexpr = (V + BLOCK - 1) // BLOCK
    log_sum = log_sum * LOG2_E
    if SCALED:
        scale = _load_scale(scale_ptr)
    for block in range(num_blocks):
        col = (num_blocks - 1 - block) * BLOCK + n  # backwards, because the cache still holds what was read last
        x = tl.load(row_ptr + col, mask=col < V, other=0.0, eviction_policy="evict_first").to(tl.float32)
        p = tl.exp2(x * LOG2_E - log_sum)
        # p - 1 is taken in fp32: bf16 would round a p near 1 to 1, and the difference to 0.
        p = tl.where(col == at, p - 1.0, p)
        if SCALED:
            p *= scale
        tl.store(row_ptr + col, p.to(row_ptr.dtype.element_ty), mask=col < V, eviction_policy="evict_first")
