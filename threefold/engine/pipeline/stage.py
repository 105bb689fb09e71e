"""One chunk, as torch's schedule runtime wants to see a stage.

torch's PipelineStage keeps room for every microbatch of the step, cannot evaluate with a V-shaped schedule, and splits
the backward by walking the graph twice; this one keeps what is in flight and runs each chunk's backward once.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from threefold.engine.pipeline.border import Border
from threefold.engine.pipeline.passage import AtOnce, Chunk, Opened, Passage, Steps, run_out


class Stage:
    """Borders are absent at the ends. `split`: microbatches whose weight gradients wait for an action of their own.

    A chunk may open passages that stop on their way (`opened`); else its microbatches pass at once.
    """

    submod = None  # the runtime would take FSDP into its own hands

    def __init__(self, chunk: Chunk, index: int, num_chunks: int, rank: int, size: int, split: set[int]) -> None:
        self.chunk, self.stage_index, self.num_stages = chunk, index, num_chunks
        self.group_rank, self.group_size = rank, size
        self.split = split
        self._open: Opened = getattr(chunk, "opened", None) or (lambda m, delay: AtOnce(chunk, m, delay))
        self.x_in: Border | None = None
        self.y_out: Border | None = None
        self.grad_in: Border | None = None
        self.grad_out: Border | None = None
        self.has_backward = True
        self.stage_index_to_group_rank: dict[int, int] = {}
        self._results: dict[int, Tensor] = {}
        self._under_way: dict[int, Passage] = {}
        self._weights_left: dict[int, Passage] = {}

    @property
    def is_first(self) -> bool:
        return self.stage_index == 0

    @property
    def is_last(self) -> bool:
        return self.stage_index == self.num_stages - 1

    def forward_one_chunk(self, microbatch: int, *args: Any, **kwargs: Any) -> Tensor:
        return run_out(self.forward(microbatch))

    def backward_one_chunk(self, microbatch: int, full_backward: bool = True, **kwargs: Any) -> None:
        run_out(self.backward(microbatch))

    def backward_weight_one_chunk(self, microbatch: int, **kwargs: Any) -> None:
        if self.has_backward and microbatch in self._weights_left:
            self._weights_left.pop(microbatch).finish()

    def forward(self, microbatch: int) -> Steps[Tensor]:
        x = None if self.x_in is None else self.x_in.take(microbatch)
        passage = self._open(microbatch, self.has_backward and microbatch in self.split)
        y = yield from passage.forward(x)
        if self.has_backward:
            self._under_way[microbatch] = passage
        if self.y_out is not None and self.y_out.crosses:
            self._results[microbatch] = y.detach()
        return y

    def filler(self, microbatch: int) -> Callable[[], object]:
        """For the gaps of whatever runs beside the backward of a microbatch."""
        return self._under_way[microbatch].fill if self.has_backward else lambda: None

    def backward(self, microbatch: int) -> Steps[None]:
        if not self.has_backward:
            return
        passage = self._under_way.pop(microbatch)
        grad = None if self.grad_in is None else self.grad_in.take(microbatch)
        x_grad = yield from passage.backward(grad)
        if self.grad_out is not None:
            if x_grad is None:
                out = self.grad_out
                x_grad = torch.zeros(out.shape, dtype=out.dtype, device=out.device)
            self._results[microbatch] = x_grad
        if microbatch in self.split:
            self._weights_left[microbatch] = passage

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
        left = [*self._under_way, *self._results, *self._weights_left]
        assert not left, f"microbatches {left} were left on their way through chunk {self.stage_index}"
