"""The first linears of a module, which read the same input: gate and up, or query, key and value.

A module calls `self.input_linears(x, linears)` and not its linears one by one, for two reasons: linears that share an
input save it once for the backward, and `shard/tensor_parallel.py` replaces the attribute by a function that gathers
the sequence first. `InputHook` is the same for a module that gathers something narrower than its input (MLA's latents).
"""

from collections.abc import Callable, Sequence

from torch import Tensor, nn

from threefold.engine.autograd.shared_input_linear import shared_input_linears
from threefold.engine.kernels.fusion_switch import runs_fused
from threefold.engine.precision.low_precision_linear import LowPrecisionLinear, low_precision_linears

InputHook = Callable[[Tensor], Tensor]  # a tensor of this rank -> the tensor that the module works on
InputLinears = Callable[[Tensor, Sequence[nn.Linear]], list[Tensor]]  # input, linears -> the output of each


def identity(x: Tensor) -> Tensor:
    """The default `InputHook`: nothing is sharded."""
    return x


def apply_linears(x: Tensor, linears: Sequence[nn.Linear]) -> list[Tensor]:
    """The default `InputLinears`: the output of each linear. They share the saved (or quantized) input."""
    if all(type(linear) is nn.Linear for linear in linears) and _can_share_input(x):
        return shared_input_linears(x, [linear.weight for linear in linears], [linear.bias for linear in linears])
    low = [linear for linear in linears if isinstance(linear, LowPrecisionLinear)]
    outputs = iter(low_precision_linears(x, [(linear.weight, linear.precision) for linear in low]) if low else ())
    return [
        linear.add_bias(next(outputs)) if isinstance(linear, LowPrecisionLinear) else linear(x) for linear in linears
    ]


def _can_share_input(x: Tensor) -> bool:
    return runs_fused(x) and x.dim() > 1
