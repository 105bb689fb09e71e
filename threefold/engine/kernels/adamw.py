"""AdamW in one pass over memory, whatever the dtypes of gradient, weight, master and moments."""

# mypy: allow-untyped-defs, allow-incomplete-defs

import triton  # type: ignore
import triton.language as tl  # type: ignore
from torch import Tensor

_BLOCK = 2048


def adamw(
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
    """All in place and in fp32, rounded once. `factor` multiplies the gradient; nothing changes where it is no finite
    number. `master` may be `value`."""
    size = value.numel()
    if size:
        _adamw[(triton.cdiv(size, _BLOCK),)](
            value, grad, master, first, second, factor, size, lr, 1.0 - lr * decay, betas[0], betas[1], eps,
            1.0 - betas[0] ** steps, 1.0 - betas[1] ** steps, master is not value, _BLOCK, num_warps=8,
        )  # fmt: skip


@triton.jit(do_not_specialize=["lr", "shrink", "left_first", "left_second"])
def _adamw(
    value_ptr, grad_ptr, master_ptr, first_ptr, second_ptr, factor_ptr, size, lr, shrink, beta_first, beta_second, eps,
    left_first, left_second, MASTER: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    factor = tl.load(factor_ptr).to(tl.float32)
    live = at < tl.where(factor - factor == 0.0, size, 0)  # else no number: nothing is live
    grad = tl.load(grad_ptr + at, mask=live, other=0.0).to(tl.float32) * factor
    first = tl.load(first_ptr + at, mask=live, other=0.0).to(tl.float32)
    second = tl.load(second_ptr + at, mask=live, other=0.0).to(tl.float32)
    weight = tl.load(master_ptr + at, mask=live, other=0.0).to(tl.float32)
    first = beta_first * first + (1.0 - beta_first) * grad
    second = beta_second * second + (1.0 - beta_second) * grad * grad
    spread = tl.sqrt(second / left_second) + eps
    weight = weight * shrink - lr * (first / left_first) / spread
    tl.store(first_ptr + at, first.to(first_ptr.dtype.element_ty), mask=live)
    tl.store(second_ptr + at, second.to(second_ptr.dtype.element_ty), mask=live)
    tl.store(master_ptr + at, weight.to(master_ptr.dtype.element_ty), mask=live)
    if MASTER:
        tl.store(value_ptr + at, weight.to(value_ptr.dtype.element_ty), mask=live)
