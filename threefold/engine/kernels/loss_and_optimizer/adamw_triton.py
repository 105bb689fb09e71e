"""One AdamW step of a tensor, or of many small ones in one launch, in one pass over memory.

Gradient, weight, master weight and moments may have any dtypes. `optim/adamw.py` calls it. Its reference is `AdamW` on
a CPU; that of a master weight in two parts is `optim/param_remainders.py`.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

from collections.abc import Sequence

import torch
import triton  # type: ignore
import triton.language as tl  # type: ignore
from torch import Tensor

from threefold.engine.kernels.fast_launch import fast_launch
from threefold.engine.kernels.launch_config import cdiv
from threefold.engine.kernels.loss_and_optimizer.many_tensors import distances, divide_into_blocks, tensor_start

# Eight elements for each thread. On an H200 this moves 4.1 TB/s with any kind of states, as a copy does.
_BLOCK, _WARPS = 1024, 4


def adamw_step(
    value: Tensor,
    grad: Tensor,
    master: Tensor,
    first: Tensor,
    second: Tensor,
    factor: Tensor,
    *,
    lr: float,
    decay: float,
    betas: tuple[float, float],
    eps: float,
    steps: int,
) -> None:
    """Update `value`, `master` and both moments in place. All is computed in fp32 and rounded once.

    `factor` multiplies the gradient; where it is not finite, nothing changes. `master` may be `value` itself, or the
    int16 remainders of master weights whose upper halves are the bf16 `value`.
    """
    if value.numel():
        has_remainder = master.dtype == torch.int16
        _adamw[(cdiv(value.numel(), _BLOCK),)](
            _bits(value, master), grad, master, first, second, factor, value.numel(),
            *_scalars(lr, decay, betas, eps, steps), master is not value, has_remainder, _BLOCK, num_warps=_WARPS,
        )  # fmt: skip


def adamw_step_of_many(
    values: Sequence[Tensor],
    grads: Sequence[Tensor],
    masters: Sequence[Tensor],
    firsts: Sequence[Tensor],
    seconds: Sequence[Tensor],
    factor: Tensor,
    *,
    lr: float,
    decay: float,
    betas: tuple[float, float],
    eps: float,
    steps: int,
) -> None:
    """`adamw_step` of several tensors in one launch. All tensors of a kind have one dtype, and `can_go_together`."""
    blocks = divide_into_blocks(tuple(x.numel() for x in values), _BLOCK, values[0].device)
    table_KN = distances(values, grads, masters, firsts, seconds)
    value, grad, master, first, second = (tensors[0] for tensors in (values, grads, masters, firsts, seconds))
    _adamw_of_many[(len(blocks.tensor_B),)](
        _bits(value, master), grad, master, first, second, factor, table_KN, *blocks, len(values),
        *_scalars(lr, decay, betas, eps, steps), master is not value, master.dtype == torch.int16, _BLOCK,
        num_warps=_WARPS,
    )  # fmt: skip


def _bits(value: Tensor, master: Tensor) -> Tensor:
    """The upper halves of master weights as integers, where `master` has the lower ones."""
    return value.view(torch.int16) if master.dtype == torch.int16 else value


def _scalars(lr: float, decay: float, betas: tuple[float, float], eps: float, steps: int) -> tuple[float, ...]:
    return lr, 1.0 - lr * decay, betas[0], betas[1], eps, 1.0 - betas[0] ** steps, 1.0 - betas[1] ** steps


@fast_launch
@triton.jit(do_not_specialize=["lr", "decay_factor", "first_correction", "second_correction"])
def _adamw(
    value_ptr, grad_ptr, master_ptr, first_ptr, second_ptr, factor_ptr, size, lr, decay_factor, beta_first,
    beta_second, eps, first_correction, second_correction, MASTER: tl.constexpr, REMAINDER: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    offset = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    _update(
        value_ptr + offset, grad_ptr + offset, master_ptr + offset, first_ptr + offset, second_ptr + offset,
        factor_ptr, offset, size, lr, decay_factor, beta_first, beta_second, eps, first_correction, second_correction,
        MASTER, REMAINDER,
    )  # fmt: skip


@fast_launch
@triton.jit(do_not_specialize=["num_tensors", "lr", "decay_factor", "first_correction", "second_correction"])
def _adamw_of_many(
    value_ptr, grad_ptr, master_ptr, first_ptr, second_ptr, factor_ptr, table_ptr, tensor_ptr, begin_ptr, count_ptr,
    num_tensors, lr, decay_factor, beta_first, beta_second, eps, first_correction, second_correction,
    MASTER: tl.constexpr, REMAINDER: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(0)
    place_ptr = table_ptr + tl.load(tensor_ptr + block)
    offset = tl.multiple_of(tl.load(begin_ptr + block), BLOCK) + tl.arange(0, BLOCK)
    value_ptrs = tensor_start(value_ptr, place_ptr) + offset
    grad_ptrs = tensor_start(grad_ptr, place_ptr + num_tensors) + offset
    master_ptrs = tensor_start(master_ptr, place_ptr + 2 * num_tensors) + offset
    first_ptrs = tensor_start(first_ptr, place_ptr + 3 * num_tensors) + offset
    second_ptrs = tensor_start(second_ptr, place_ptr + 4 * num_tensors) + offset
    _update(
        value_ptrs, grad_ptrs, master_ptrs, first_ptrs, second_ptrs, factor_ptr, tl.arange(0, BLOCK),
        tl.multiple_of(tl.load(count_ptr + block), 16), lr, decay_factor, beta_first, beta_second, eps,
        first_correction, second_correction, MASTER, REMAINDER,
    )  # fmt: skip


@triton.jit
def _update(
    value_ptrs, grad_ptrs, master_ptrs, first_ptrs, second_ptrs, factor_ptr, number, size, lr, decay_factor,
    beta_first, beta_second, eps, first_correction, second_correction, MASTER: tl.constexpr, REMAINDER: tl.constexpr,
):  # fmt: skip
    """Update the elements whose `number` is below `size`."""
    factor = tl.load(factor_ptr).to(tl.float32)
    live = number < tl.where(factor - factor == 0.0, size, 0)  # a factor that is inf or nan leaves nothing live
    grad = tl.load(grad_ptrs, mask=live, other=0.0).to(tl.float32) * factor
    first = tl.load(first_ptrs, mask=live, other=0.0).to(tl.float32)
    second = tl.load(second_ptrs, mask=live, other=0.0).to(tl.float32)
    if REMAINDER:
        upper = tl.load(value_ptrs, mask=live, other=0).to(tl.int32)
        remainder = tl.load(master_ptrs, mask=live, other=0).to(tl.int32)
        weight = ((upper << 16) + remainder).to(tl.float32, bitcast=True)
    else:
        weight = tl.load(master_ptrs, mask=live, other=0.0).to(tl.float32)
    first = beta_first * first + (1.0 - beta_first) * grad
    second = beta_second * second + (1.0 - beta_second) * grad * grad
    denominator = tl.sqrt(second / second_correction) + eps
    weight = weight * decay_factor - lr * (first / first_correction) / denominator
    tl.store(first_ptrs, first.to(first_ptrs.dtype.element_ty), mask=live)
    tl.store(second_ptrs, second.to(second_ptrs.dtype.element_ty), mask=live)
    if REMAINDER:
        bits = weight.to(tl.int32, bitcast=True)
        # To the nearest, at a tie to the even one. Added to a NaN the carry would make it a number.
        upper = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        upper = tl.where(weight == weight, upper, 0x7FC0)
        remainder = tl.maximum(tl.minimum(bits - (upper << 16), 32767), -32768)
        tl.store(value_ptrs, upper.to(tl.int16), mask=live)
        tl.store(master_ptrs, remainder.to(tl.int16), mask=live)
    else:
        tl.store(master_ptrs, weight.to(master_ptrs.dtype.element_ty), mask=live)
        if MASTER:
            tl.store(value_ptrs, weight.to(value_ptrs.dtype.element_ty), mask=live)
