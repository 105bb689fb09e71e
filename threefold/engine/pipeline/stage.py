"""One chunk, as torch's schedule runtime wants to see a stage.

torch's PipelineStage keeps room for every microbatch of the step, cannot evaluate with a V-shaped schedule, and splits
the backward by walking the graph twice; this one keeps what is in flight and runs each chunk's backward once.
"""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from threefold.engine.pipeline.border import Border
from threefold.engine.pipeline.delay import Delay

Chunk = Callable[[Tensor | None, int], Tensor]


class Stage:
    """Borders are absent at the ends. `split`: microbatches whose weight gradients wait for an action of their own."""

    submod = None  # the runtime would take FSDP into its own hands

    def __init__(self, chunk: Chunk, index: int, num_chunks: int, rank: int, size: int, split: set[int]) -> None:
        self.chunk, self.stage_index, self.num_stages = chunk, index, num_chunks
        self.group_rank, self.group_size = rank, size
        self.split = split
        self.x_in: Border | None = None
        self.y_out: Border | None = None
        self.grad_in: Border | None = None
        self.grad_out: Border | None = None
        self.has_backward = True
        self.stage_index_to_group_rank: dict[int, int] = {}
        self._results: dict[int, Tensor] = {}
        self._kept: dict[int, tuple[Tensor | None, GradientEdge | None, Tensor | None]] = {}
        self._delays: dict[int, Delay] = {}

    @property
    def is_first(self) -> bool:
        return self.stage_index == 0

    @property
    def is_last(self) -> bool:
        return self.stage_index == self.num_stages - 1

    def forward_one_chunk(self, microbatch: int, *args: Any, **kwargs: Any) -> Tensor:
        x = None if self.x_in is None else self.x_in.take(microbatch)
        if x is not None and self.has_backward:
            x = x.detach().requires_grad_()
        with self._delay(microbatch):
            y = self.chunk(x, microbatch)
        if self.has_backward:
            # Of the output only its place in the graph is needed, so that its memory goes once it is sent.
            edge = get_gradient_edge(y) if y.requires_grad else None
            one = torch.ones_like(y) if self.is_last else None
            self._kept[microbatch] = x, edge, one
        if self.y_out is not None and self.y_out.crosses:
            self._results[microbatch] = y.detach()
        return y

    def backward_one_chunk(self, microbatch: int, full_backward: bool = True, **kwargs: Any) -> None:
        if not self.has_backward:
            return
        x, edge, grad = self._kept.pop(microbatch)
        if self.grad_in is not None:
            grad = self.grad_in.take(microbatch)
        if edge is not None:
            with self._delay(microbatch):
                torch.autograd.backward(edge, grad)
        if x is not None:
            self._results[microbatch] = torch.zeros_like(x) if x.grad is None else x.grad

    def backward_weight_one_chunk(self, microbatch: int, **kwargs: Any) -> None:
        if self.has_backward and microbatch in self._delays:
            self._delays.pop(microbatch).finish()

    def _delay(self, microbatch: int) -> Any:
        if not self.has_backward or microbatch not in self.split:
            return nullcontext()
        return self._delays.setdefault(microbatch, Delay())

    # What the runtime calls "ops" are started at once, and waited for where they are used.

    def get_fwd_recv_ops(self, microbatch: int) -> list[Any]:
        assert self.x_in is not None
        self.x_in.receive(microbatch)
        return []

    def get_fwd_send_ops(self, microbatch: int) -> list[Any]:
        assert self.y_out is not None
        self.y_out.send(self._results.pop(microbatch))
        return []

    def get_bwd_recv_ops(self, microbatch: int) -> list[Any]:
        if self.has_backward and self.grad_in is not None:
            self.grad_in.receive(microbatch)
        return []

    def get_bwd_send_ops(self, microbatch: int) -> list[Any]:
        if self.has_backward and self.grad_out is not None:
            self.grad_out.send(self._results.pop(microbatch))
        return []

    def set_local_fwd_input(self, y: Tensor, microbatch: int) -> None:
        assert self.x_in is not None
        self.x_in.hand_over(microbatch, y.detach())

    def get_local_bwd_output(self, microbatch: int) -> Tensor | None:
        return self._results.pop(microbatch) if self.has_backward else None

    def set_local_bwd_input(self, grad: Tensor | None, microbatch: int) -> None:
        if grad is not None and self.grad_in is not None:
            self.grad_in.hand_over(microbatch, grad)

    def perform_reduce_grad(self, factor: int) -> None:
        """Gradients are summed by whoever holds the copies."""

    def settle(self) -> None:
        for border in (self.y_out, self.grad_out):
            if border is not None:
                border.settle()
        left = [*self._kept, *self._results, *self._delays]
        assert not left, f"microbatches {left} were left on their way through chunk {self.stage_index}"
