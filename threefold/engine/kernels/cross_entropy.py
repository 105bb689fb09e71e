"""Logits to their loss and their gradient, in place: each is read twice, the second time mostly from the cache.

Where ranks hold parts of the vocabulary, the two passes are apart, and what they say of each token is summed between.

Shapes: C tokens, V vocabulary or a part of it.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

import torch
import triton  # type: ignore
import triton.language as tl  # type: ignore
from torch import Tensor

_BLOCK = 8192
_LOG2_E: tl.constexpr = tl.constexpr(1.4426950408889634)  # a GPU has the exponential of 2
_LOWEST: tl.constexpr = tl.constexpr(-1e30)  # not infinity, of which two have no difference


def slope_in_place(logits_CV: Tensor, labels_C: Tensor, ignore: int) -> Tensor:
    """-> the loss of each token, 0 where its label is `ignore`. `logits_CV` become the gradient of their sum; the rows
    of ignored tokens zeros."""
    loss_C = _numbers(logits_CV)
    _launch(_both, logits_CV, labels_C, loss_C, ignore)
    return loss_C


def statistics(logits_CV: Tensor, at_C: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """-> each token's largest, the sum of exp(logit - largest), and the logit at `at_C`, 0 outside of the part."""
    top_C, sum_C, picked_C = (_numbers(logits_CV) for _ in range(3))
    _launch(_statistics, logits_CV, at_C, top_C, sum_C, picked_C)
    return top_C, sum_C, picked_C


def slope_of_part(logits_CV: Tensor, at_C: Tensor, log_sum_C: Tensor) -> None:
    """`logits_CV` become exp(logit - log_sum), less 1 at `at_C`."""
    _launch(_slope, logits_CV, at_C, log_sum_C)


def scaled(x: Tensor, factor: Tensor, dtype: torch.dtype) -> Tensor:
    """x times a factor on the device, in fp32, rounded once to `dtype`."""
    out = torch.empty_like(x, dtype=dtype)
    if x.numel():
        _scale[(triton.cdiv(x.numel(), _BLOCK),)](x, factor, out, x.numel(), _BLOCK, num_warps=8)
    return out


def _numbers(logits_CV: Tensor) -> Tensor:
    return torch.empty(len(logits_CV), dtype=torch.float32, device=logits_CV.device)


def _launch(kernel, logits_CV, *rest):
    num_tokens, vocab = logits_CV.shape
    if num_tokens:
        block = min(_BLOCK, triton.next_power_of_2(max(vocab, 1)))
        warps = max(4, block // 256)  # one program a multiprocessor: then the cache holds most of what they read
        kernel[(num_tokens,)](logits_CV, *rest, logits_CV.stride(0), vocab, block, num_warps=warps)


@triton.jit
def _both(logits_ptr, label_ptr, loss_ptr, ignore, stride, V: tl.constexpr, BLOCK: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    label = tl.load(label_ptr + token)
    row_ptr = logits_ptr + token * stride
    if label == ignore:
        tl.store(loss_ptr + token, 0.0)
        n = tl.arange(0, BLOCK)
        for begin in range(0, V, BLOCK):
            tl.store(row_ptr + begin + n, tl.zeros((BLOCK,), logits_ptr.dtype.element_ty), mask=begin + n < V)
    else:
        top, total = _add_up(row_ptr, V, BLOCK)
        log_sum = top + tl.log(total)
        tl.store(loss_ptr + token, log_sum - tl.load(row_ptr + label).to(tl.float32))
        # All of a row's threads have read the label's logit before any of them overwrites it.
        tl.debug_barrier()
        _write(row_ptr, label, log_sum, V, BLOCK)


@triton.jit
def _statistics(
    logits_ptr, at_ptr, top_ptr, sum_ptr, picked_ptr, stride, V: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    row_ptr = logits_ptr + token * stride
    top, total = _add_up(row_ptr, V, BLOCK)
    at = tl.load(at_ptr + token)
    tl.store(top_ptr + token, top)
    tl.store(sum_ptr + token, total)
    here = (at >= 0) & (at < V)
    tl.store(picked_ptr + token, tl.load(row_ptr + at, mask=here, other=0.0).to(tl.float32))


@triton.jit
def _slope(logits_ptr, at_ptr, log_sum_ptr, stride, V: tl.constexpr, BLOCK: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    _write(logits_ptr + token * stride, tl.load(at_ptr + token), tl.load(log_sum_ptr + token), V, BLOCK)


@triton.jit
def _scale(x_ptr, factor_ptr, out_ptr, count, BLOCK: tl.constexpr):
    n = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + n, mask=n < count).to(tl.float32) * tl.load(factor_ptr).to(tl.float32)
    tl.store(out_ptr + n, x.to(out_ptr.dtype.element_ty), mask=n < count)


@triton.jit
def _add_up(row_ptr, V: tl.constexpr, BLOCK: tl.constexpr):
    """-> the largest of a row, and the sum of exp(value - largest). Every 32 values have a largest of their own until
    the end: few threads, not the whole program, need agree on it."""
    WIDTH: tl.constexpr = 32 if BLOCK > 32 else BLOCK
    ROWS: tl.constexpr = BLOCK // WIDTH
    n = tl.arange(0, ROWS)[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
    top_R = tl.full((ROWS,), _LOWEST, tl.float32)
    sum_RW = tl.zeros((ROWS, WIDTH), tl.float32)
    for begin in range(0, V, BLOCK):
        x = tl.load(row_ptr + begin + n, mask=begin + n < V, other=float("-inf")).to(tl.float32) * _LOG2_E
        higher_R = tl.maximum(top_R, tl.max(x, 1))
        sum_RW = sum_RW * tl.exp2(top_R - higher_R)[:, None] + tl.exp2(x - higher_R[:, None])
        top_R = higher_R
    top = tl.max(top_R, 0)
    total = tl.sum(tl.sum(sum_RW, 1) * tl.exp2(top_R - top), 0)
    return tl.where(total == 0, float("-inf"), top / _LOG2_E), total


@triton.jit
def _write(row_ptr, at, log_sum, V: tl.constexpr, BLOCK: tl.constexpr):
    n = tl.arange(0, BLOCK)
    num_blocks: tl.constexpr = (V + BLOCK - 1) // BLOCK
    for turn in range(num_blocks):
        place = (num_blocks - 1 - turn) * BLOCK + n  # what was read last first: the cache still has it
        x = tl.load(row_ptr + place, mask=place < V, other=0.0, eviction_policy="evict_first").to(tl.float32)
        p = tl.exp2((x - log_sum) * _LOG2_E)
        # p - 1 in fp32: bf16 would round a p near 1 to it, and the difference away.
        p = tl.where(place == at, p - 1.0, p).to(row_ptr.dtype.element_ty)
        tl.store(row_ptr + place, p, mask=place < V, eviction_policy="evict_first")
