"""Sums of squares of a gradient that its kernel computes as it stores it, so that the norm need not read it again.

`data_parallel/single_rank.py` asks for them with `request_grad_squares` where a step has one microbatch, and takes them
with `grad_squares_of`. The kernels of expert weight gradients answer with `GradSquares.note`; where they are replayed
as a CUDA graph, `graphs/full_iteration.py` does. A gradient that was changed or copied since then has no sums, and is
read as ever: it is recognized by its address and by torch's count of changes in place.

Shapes: P parts of a gradient, one sum each.
"""

from torch import Tensor, nn

_NAME = "_threefold_grad_squares"


class GradSquares:
    """Sums of squares of one parameter's gradient, and which gradient they belong to."""

    def __init__(self) -> None:
        self._sums_P: Tensor | None = None
        self._address = self._version = 0  # of the gradient that the sums are of

    def note(self, grad: Tensor, sums_P: Tensor) -> None:
        """Record that `sums_P` add up to the sum of squares of `grad`."""
        self._sums_P, self._address, self._version = sums_P, grad.data_ptr(), grad._version

    def copy_from(self, other: "GradSquares") -> None:
        self._sums_P, self._address, self._version = other._sums_P, other._address, other._version

    def of(self, grad: Tensor) -> Tensor | None:
        """The sums, if they are those of this gradient as it is now."""
        is_same = grad.data_ptr() == self._address and grad._version == self._version
        return self._sums_P if is_same else None


def request_grad_squares(parameter: nn.Parameter, wanted: bool) -> None:
    """Ask for the sums of the next gradient, or for none. Those of the last one are forgotten."""
    if wanted:
        setattr(parameter, _NAME, GradSquares())
    elif requested_squares(parameter) is not None:
        delattr(parameter, _NAME)


def requested_squares(weight: Tensor) -> GradSquares | None:
    """The place for a kernel's sums of this weight's gradient; None where nobody wants them."""
    squares: GradSquares | None = getattr(weight, _NAME, None)
    return squares


def grad_squares_of(parameter: nn.Parameter) -> Tensor | None:
    """Sums that add up to the sum of squares of the parameter's gradient, if a kernel has left them."""
    squares = requested_squares(parameter)
    return None if squares is None or parameter.grad is None else squares.of(parameter.grad)
