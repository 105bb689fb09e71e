"""Fused gradient accumulation: the weight-gradient GEMM adds straight into the fp32 buffer (Megatron's `main_grad`).

Without it autograd first makes a bf16 gradient of the whole weight and then adds that to the buffer: memory for the
largest gradient, and half as much traffic again. `data_parallel/zero1.py` attaches the buffers. Linear layers
(`linear.py`, `linear.py`) and the expert kernels look for `main_grad_of(weight)`; where there is one, they
add to it and return no gradient to autograd.

Shapes: R rows, I and O dims in and out.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from threefold.engine.context import count_event
from threefold.engine.device import device_type, is_simulated


def attach_main_grad(weight: Tensor, buffer: Tensor, on_backward: Callable[[Tensor], None]) -> object:
    """Make weight gradients of `weight` accumulate in `buffer`.

    `on_backward(weight)` is called once for every backward that reaches the weight, even if autograd brings no
    gradient. The caller must hold on to the object that is returned: the calls stop when it is freed.
    """
    weight._threefold_main_grad = buffer  # type: ignore[attr-defined]
    view_node = weight.view_as(weight).grad_fn
    assert view_node is not None
    accumulate_node = view_node.next_functions[0][0]
    assert accumulate_node is not None
    accumulate_node.register_hook(lambda *_: on_backward(weight))
    return accumulate_node


def share_main_grad(weight: Tensor, alias: Tensor) -> bool:
    """Make gradients of `alias` accumulate where those of `weight` do. -> whether there is such a buffer."""
    buffer: Tensor | None = getattr(weight, "_threefold_main_grad", None)
    if buffer is not None:
        alias._threefold_main_grad = buffer  # type: ignore[attr-defined]
    return buffer is not None


def main_grad_of(weight: Tensor) -> Tensor | None:
    """The buffer that gradients of this weight accumulate in; None leaves the gradient to autograd."""
    buffer: Tensor | None = getattr(weight, "_threefold_main_grad", None)
    if buffer is not None:
        count_event("main_grad", "fused")
    return buffer


def accumulate_gemm(total_OI: Tensor | None, a_OR: Tensor, b_RI: Tensor, dtype: torch.dtype) -> Tensor:
    """total + a @ b in `dtype`, in place; without a total it is a @ b. A GPU adds as it stores the GEMM's result."""
    if dtype != a_OR.dtype and device_type(a_OR.device) == "cuda":
        if is_simulated():
            return a_OR.new_empty(len(a_OR), b_RI.shape[1], dtype=dtype) if total_OI is None else total_OI
        if total_OI is None:
            return torch.mm(a_OR, b_RI, out_dtype=dtype)
        return torch.addmm(total_OI, a_OR, b_RI, out_dtype=dtype, out=total_OI)
    if a_OR.dtype == torch.float16:  # a CPU would round the result to fp16, where long sums overflow
        a_OR, b_RI = a_OR.to(dtype), b_RI.to(dtype)
    gemm_OI = a_OR @ b_RI
    return gemm_OI.to(dtype) if total_OI is None else total_OI.add_(gemm_OI)


def add_to_main_grad(grad: Tensor, main_grad: Tensor | None) -> Tensor | None:
    """The gradient, or None where it was added to `main_grad`: for kernels that cannot add as they store."""
    if main_grad is None:
        return grad
    main_grad.add_(grad)
    return None
