"""Where a cut module takes its input in: `shard/` puts a collective here, everything else leaves it alone."""

from collections.abc import Callable, Sequence

from torch import Tensor, nn

Seam = Callable[[Tensor], Tensor]
Into = Callable[[Tensor, Sequence[nn.Linear]], list[Tensor]]


def stay(x: Tensor) -> Tensor:
    return x


def each(x: Tensor, linears: Sequence[nn.Linear]) -> list[Tensor]:
    """The first products of a module."""
    return [linear(x) for linear in linears]
