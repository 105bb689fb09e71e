"""One microbatch on its way through a chunk, in steps that a schedule may run beside those of another."""

from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, nullcontext
from typing import Literal, Protocol, TypeVar

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from threefold.engine.pipeline.delay import Delay

Result = TypeVar("Result")
# It stops where an exchange has started: of rows, for which others should compute, or of counts, which are needed next.
Stop = Literal["rows", "counts"]
Steps = Generator[Stop, None, Result]
Chunk = Callable[[Tensor | None, int], Tensor]


class Passage(Protocol):
    def forward(self, x: Tensor | None) -> Steps[Tensor]: ...

    def backward(self, grad: Tensor | None) -> Steps[Tensor | None]:
        """From the gradient of the result (None: it is the loss) to that of `x`."""
        ...

    def fill(self) -> None:
        """Work that waits for a gap, if there is any."""
        ...

    def finish(self) -> None:
        """Gradients of weights that wait for this call."""
        ...


# (microbatch, whether weights wait for `finish`) -> passage
Opened = Callable[[int, bool], Passage]


class AtOnce:
    """Forward and backward in one step each."""

    def __init__(self, chunk: Chunk, microbatch: int, delay: bool) -> None:
        self.chunk, self.microbatch = chunk, microbatch
        self._delay = Delay() if delay else None
        self._x: Tensor | None = None
        self._edge: GradientEdge | None = None
        self._one: Tensor | None = None

    def forward(self, x: Tensor | None) -> Steps[Tensor]:
        if x is not None and torch.is_grad_enabled():
            x = self._x = x.detach().requires_grad_()
        with self._mode():
            y = self.chunk(x, self.microbatch)
        # Of the output only its place in the graph is needed, so that its memory goes once it is sent.
        self._edge = get_gradient_edge(y) if y.requires_grad else None
        self._one = torch.ones_like(y) if y.dim() == 0 else None
        yield from ()
        return y

    def backward(self, grad: Tensor | None) -> Steps[Tensor | None]:
        if self._edge is not None:
            with self._mode():
                torch.autograd.backward(self._edge, self._one if grad is None else grad)
        yield from ()
        return None if self._x is None else self._x.grad

    def fill(self) -> None:
        """There is none."""

    def finish(self) -> None:
        if self._delay is not None:
            self._delay.finish()

    def _mode(self) -> AbstractContextManager[object]:
        return self._delay or nullcontext()


def run_out(steps: Steps[Result]) -> Result:
    """All steps, with nothing beside them."""
    while True:
        try:
            next(steps)
        except StopIteration as end:
            result: Result = end.value
            return result
