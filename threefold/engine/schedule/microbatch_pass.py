"""The protocol of one microbatch's pass through a model chunk, in steps that a schedule may interleave with another's.

`Stage` (pipeline) and `interleave.py` run passes. `UnsplitPass` is the plain one; `overlappable_pass.py` has the one
that pauses at the expert-parallel exchanges.
"""

from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, nullcontext
from typing import Literal, Protocol, TypeVar

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from threefold.engine.autograd.delayed_wgrad import WgradQueue

Result = TypeVar("Result")
# A pass pauses where an exchange has started: of token rows, so that another microbatch should compute meanwhile, or of
# counts, which are needed next.
Pause = Literal["rows", "counts"]
PassSteps = Generator[Pause, None, Result]
ChunkFn = Callable[[Tensor | None, int], Tensor]


class MicrobatchPass(Protocol):
    """Forward and backward of one microbatch; both are generators that yield at their pauses."""

    def forward(self, x: Tensor | None) -> PassSteps[Tensor]: ...

    def backward(self, grad: Tensor | None) -> PassSteps[Tensor | None]:
        """From the gradient of the result (None: the result is the loss) to the gradient of `x`."""
        ...

    def fill_gap(self) -> None:
        """Do work that was left for a gap, if there is any."""
        ...

    def finish_wgrads(self) -> None:
        """Compute the weight gradients that are delayed until this call."""
        ...


# (microbatch, whether weight gradients are delayed until `finish_wgrads`) -> pass
OpenPass = Callable[[int, bool], MicrobatchPass]


class UnsplitPass:
    """Forward and backward without pauses."""

    def __init__(self, chunk: ChunkFn, microbatch: int, delay_wgrad: bool) -> None:
        self.chunk, self.microbatch = chunk, microbatch
        self._wgrad_queue = WgradQueue() if delay_wgrad else None
        self._x: Tensor | None = None
        self._edge: GradientEdge | None = None
        self._loss_grad: Tensor | None = None

    def forward(self, x: Tensor | None) -> PassSteps[Tensor]:
        if x is not None and torch.is_grad_enabled():
            x = self._x = x.detach().requires_grad_()
        with self._delaying_wgrads():
            y = self.chunk(x, self.microbatch)
        # Only the gradient edge of the output is kept, so that its memory is freed once it is sent.
        self._edge = get_gradient_edge(y) if y.requires_grad else None
        self._loss_grad = torch.ones_like(y) if y.dim() == 0 else None
        yield from ()
        return y

    def backward(self, grad: Tensor | None) -> PassSteps[Tensor | None]:
        if self._edge is not None:
            with self._delaying_wgrads():
                torch.autograd.backward(self._edge, self._loss_grad if grad is None else grad)
        yield from ()
        return None if self._x is None else self._x.grad

    def fill_gap(self) -> None:
        """Nothing is left for gaps."""

    def finish_wgrads(self) -> None:
        if self._wgrad_queue is not None:
            self._wgrad_queue.finish()

    def _delaying_wgrads(self) -> AbstractContextManager[object]:
        return self._wgrad_queue or nullcontext()


def run_to_end(steps: PassSteps[Result]) -> Result:
    """Run all steps without anything between them; the result."""
    while True:
        try:
            next(steps)
        except StopIteration as end:
            result: Result = end.value
            return result
