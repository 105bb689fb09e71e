"""Where a cut module takes its input in: `shard/` puts a collective here, everything else leaves it alone."""

from collections.abc import Callable, Sequence

from torch import Tensor, nn

from threefold.engine.kernels.around import fused
from threefold.engine.kernels.linears import linears as products
from threefold.engine.precision.linear import LowLinear, low_linears

Seam = Callable[[Tensor], Tensor]
Into = Callable[[Tensor, Sequence[nn.Linear]], list[Tensor]]


def stay(x: Tensor) -> Tensor:
    return x


def each(x: Tensor, linears: Sequence[nn.Linear]) -> list[Tensor]:
    """The first products of a module. Those in a narrow format share what they keep of x."""
    if all(type(linear) is nn.Linear for linear in linears) and _joined(x):
        return products(x, [linear.weight for linear in linears], [linear.bias for linear in linears])
    low = [linear for linear in linears if isinstance(linear, LowLinear)]
    made = iter(low_linears(x, [(linear.weight, linear.low) for linear in low]) if low else ())
    return [linear.biased(next(made)) if isinstance(linear, LowLinear) else linear(x) for linear in linears]


def _joined(x: Tensor) -> bool:
    return fused(x) and x.dim() > 1
