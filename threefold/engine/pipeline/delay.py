"""Weight gradients that wait: products in a chunk leave theirs in a queue, to be computed when the schedule says.

torch's own split walks the autograd graph twice, and so runs every custom Function with a weight twice, with the
collectives and the recompute in it. Here the backward runs once, and only matrix products of weights are left over.

Shapes: X any leading dims, R rows, I and O dims in and out, E experts.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

# A weight, as the product used it, and how to compute its gradient.
Left = tuple[Tensor, Callable[[], Tensor]]


class Delay(TorchFunctionMode):
    """Around forward and backward of one microbatch; `finish` computes what waits. Hooks of the weights fire then.

    The backward must start from a GradientEdge: for a tensor torch sets the mode aside, and recompute would differ.
    """

    def __init__(self) -> None:
        super().__init__()
        self.left: list[Left] = []

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is F.linear and not kwargs and _waits(*args[:2]):
            bias = args[2] if len(args) > 2 else None
            return _Linear.apply(args[0], args[1].detach(), bias, (self.left, args[1]))
        if func is torch._grouped_mm and len(args) == 2 and _plain(kwargs) and _waits(*args):
            return _Grouped.apply(args[0], args[1].detach(), kwargs["offs"], (self.left, args[1]))
        return func(*args, **kwargs)

    def finish(self) -> None:
        sums: dict[int, tuple[Tensor, Tensor]] = {}
        for weight, compute in self.left:
            grad = compute()
            sums[id(weight)] = (weight, sums[id(weight)][1] + grad if id(weight) in sums else grad)
        self.left.clear()
        if sums:
            # One call, so that a parameter used in several views is told of its gradient once.
            weights, grads = zip(*sums.values(), strict=True)
            torch.autograd.backward(weights, grads)


def left_of(x: Tensor, weight: Tensor) -> list[Left] | None:
    """Where a product of their own should leave its weight gradient; None: nowhere, it is computed at once."""
    mode = torch.overrides._get_current_function_mode()
    return mode.left if isinstance(mode, Delay) and _waits(x, weight) else None


def _waits(x: Tensor, weight: Tensor) -> bool:
    """A parameter or a view of one; what lies deeper (a cast, a gathered weight) has a backward of its own to run."""
    base = weight._base if weight._is_view() else weight
    if base is None or not base.is_leaf or x.dim() < 2:
        return False
    return torch.is_grad_enabled() and x.requires_grad and weight.requires_grad


def _plain(kwargs: Mapping[str, Any]) -> bool:
    return kwargs.get("offs") is not None and all(value is None for name, value in kwargs.items() if name != "offs")


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x_XI: Tensor, weight_OI: Tensor, bias_O: Tensor | None, owner: tuple[list[Left], Tensor]
    ) -> Tensor:
        ctx.save_for_backward(x_XI, weight_OI)
        ctx.owner = owner
        return F.linear(x_XI, weight_OI, bias_O)

    @staticmethod
    def backward(ctx: Any, grad_XO: Tensor) -> tuple[Tensor, None, Tensor | None, None]:
        x_XI, weight_OI = ctx.saved_tensors
        left, weight = ctx.owner
        x_RI, grad_RO = x_XI.flatten(0, -2), grad_XO.flatten(0, -2)
        left.append((weight, lambda: grad_RO.t() @ x_RI))
        bias = grad_RO.sum(dim=0) if ctx.needs_input_grad[2] else None
        return grad_XO @ weight_OI, None, bias, None


class _Grouped(torch.autograd.Function):
    """Rows of each expert by its own weight; `ends_E` says where they end."""

    @staticmethod
    def forward(ctx: Any, x_RI: Tensor, weight_EIO: Tensor, ends_E: Tensor, owner: tuple[list[Left], Tensor]) -> Tensor:
        ctx.save_for_backward(x_RI, weight_EIO, ends_E)
        ctx.owner = owner
        return torch._grouped_mm(x_RI, weight_EIO, offs=ends_E)

    @staticmethod
    def backward(ctx: Any, grad_RO: Tensor) -> tuple[Tensor, None, None, None]:
        x_RI, weight_EIO, ends_E = ctx.saved_tensors
        left, weight = ctx.owner
        grad_RO = grad_RO.contiguous()

        def product() -> Tensor:
            return torch._grouped_mm(grad_RO.t(), x_RI, offs=ends_E).transpose(-2, -1)

        left.append((weight, product))
        return torch._grouped_mm(grad_RO, weight_EIO.transpose(-2, -1), offs=ends_E), None, None, None
