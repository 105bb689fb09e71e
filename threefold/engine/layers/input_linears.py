"""The first linears of a module, which read the same input: gate and up, or query, key and value.

A module calls `self.input_linears(x, linears)` and not its linears one by one, for two reasons: linears that share an
input save it once for the backward, and `shard/tensor_parallel.py` replaces the attribute by a function that gathers
the sequence first. `InputHook` is the same for a module that gathers something narrower than its input (MLA's latents).
"""

from collections.abc import Callable, Sequence

from torch import Tensor, nn

from threefold.engine.autograd.linear import shared_input_linears
from threefold.engine.kernels.availability import runs_fused
from threefold.engine.lora import LoraLinear
from threefold.engine.precision.low_precision_linear import LinearPrecision, LowPrecisionLinear, low_precision_linears

InputHook = Callable[[Tensor], Tensor]  # a tensor of this rank -> the tensor that the module works on
InputLinears = Callable[[Tensor, Sequence[nn.Linear]], list[Tensor]]  # input, linears -> the output of each


def identity(x: Tensor) -> Tensor:
    """The default `InputHook`: nothing is sharded."""
    return x


def apply_linears(x: Tensor, linears: Sequence[nn.Linear]) -> list[Tensor]:
    """The default `InputLinears`: the output of each linear. They share the saved (or quantized) input."""
    outputs = zip(_apply_without_adapters(x, linears), linears, strict=True)
    return [linear.add_adapter(y, x) if isinstance(linear, LoraLinear) else y for y, linear in outputs]


def _apply_without_adapters(x: Tensor, linears: Sequence[nn.Linear]) -> list[Tensor]:
    if all(_is_plain(linear) for linear in linears) and _can_share_input(x):
        return shared_input_linears(x, [linear.weight for linear in linears], [linear.bias for linear in linears])
    low = [(one.weight, precision) for one in linears if (precision := _precision(one)) is not None]
    outputs = iter(low_precision_linears(x, low) if low else ())
    return [_forward(one, x) if _precision(one) is None else _add_bias(one, next(outputs)) for one in linears]


def _is_plain(linear: nn.Linear) -> bool:
    return type(linear) is nn.Linear or (isinstance(linear, LoraLinear) and linear.precision is None)


def _precision(linear: nn.Linear) -> LinearPrecision | None:
    return linear.precision if isinstance(linear, LowPrecisionLinear | LoraLinear) else None


def _add_bias(linear: nn.Linear, y: Tensor) -> Tensor:
    return y if linear.bias is None else y + linear.bias


def _forward(linear: nn.Linear, x: Tensor) -> Tensor:
    y: Tensor = linear.forward_frozen(x) if isinstance(linear, LoraLinear) else linear(x)
    return y


def _can_share_input(x: Tensor) -> bool:
    return runs_fused(x) and x.dim() > 1
