"""One AdamW step of a tensor in one pass over memory, for any dtypes of gradient, weight, master weight and moments.

`optim/adamw.py` calls it.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

import triton  # type: ignore
import triton.language as tl  # type: ignore
from torch import Tensor

from threefold.engine.kernels.fast_launch import fast_launch
from threefold.engine.kernels.launch_config import cdiv

_BLOCK = 2048


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

    `factor` multiplies the gradient; where it is not finite, nothing changes. `master` may be `value` itself.
    """
    size = value.numel()
    if size:
        _adamw[(cdiv(size, _BLOCK),)](
            value, grad, master, first, second, factor, size, lr, 1.0 - lr * decay, betas[0], betas[1], eps,
            1.0 - betas[0] ** steps, 1.0 - betas[1] ** steps, master is not value, _BLOCK, num_warps=8,
        )  # fmt: skip


@fast_launch
@triton.jit(do_not_specialize=["lr", "decay_factor", "first_correction", "second_correction"])
def _adamw(
    value_ptr, grad_ptr, master_ptr, first_ptr, second_ptr, factor_ptr, size, lr, decay_factor, beta_first,
    beta_second, eps, first_correction, second_correction, MASTER: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    offset = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    factor = tl.load(factor_ptr).to(tl.float32)
    live = offset < tl.where(factor - factor == 0.0, size, 0)  # a factor that is inf or nan leaves nothing live
    grad = tl.load(grad_ptr + offset, mask=live, other=0.0).to(tl.float32) * factor
    first = tl.load(first_ptr + offset, mask=live, other=0.0).to(tl.float32)
    second = tl.load(second_ptr + offset, mask=live, other=0.0).to(tl.float32)
    weight = tl.load(master_ptr + offset, mask=live, other=0.0).to(tl.float32)
    first = beta_first * first + (1.0 - beta_first) * grad
    second = beta_second * second + (1.0 - beta_second) * grad * grad
    denominator = tl.sqrt(second / second_correction) + eps
    weight = weight * decay_factor - lr * (first / first_correction) / denominator
    tl.store(first_ptr + offset, first.to(first_ptr.dtype.element_ty), mask=live)
    tl.store(second_ptr + offset, second.to(second_ptr.dtype.element_ty), mask=live)
    tl.store(master_ptr + offset, weight.to(master_ptr.dtype.element_ty), mask=live)
    if MASTER:
        tl.store(value_ptr + offset, weight.to(value_ptr.dtype.element_ty), mask=live)
