"""A pipeline stage: one model chunk with the interface that torch's pipeline schedule runtime expects.

torch's own `PipelineStage` allocates memory for every microbatch of the step, cannot evaluate with a V-shaped schedule,
and splits the backward by walking the graph twice. This one holds only microbatches in flight and runs each backward
once. `pipeline.py` makes the stages.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from threefold.engine.schedule.microbatch_pass import (
    ChunkFn,
    MicrobatchPass,
    OpenPass,
    PassSteps,
    UnsplitPass,
    run_to_end,
)
from threefold.engine.schedule.p2p import P2PChannel


class Stage:
    """One chunk of this rank and its channels; the first and the last chunk lack some of them.

    `split` are the microbatches whose weight gradients are delayed until an action of their own. A chunk that has
    `open_pass` makes passes that pause at exchanges; the passes of other chunks run without pauses.
    """

    submod = None  # with a module the runtime would handle FSDP itself

    def __init__(self, chunk: ChunkFn, index: int, num_chunks: int, rank: int, size: int, split: set[int]) -> None:
        self.chunk, self.stage_index, self.num_stages = chunk, index, num_chunks
        self.group_rank, self.group_size = rank, size
        self.split = split
        self._open: OpenPass = getattr(chunk, "open_pass", None) or (lambda m, delay: UnsplitPass(chunk, m, delay))
        self.x_in: P2PChannel | None = None
        self.y_out: P2PChannel | None = None
        self.grad_in: P2PChannel | None = None
        self.grad_out: P2PChannel | None = None
        self.has_backward = True
        self.stage_index_to_group_rank: dict[int, int] = {}
        self._results: dict[int, Tensor] = {}
        self._in_flight: dict[int, MicrobatchPass] = {}
        self._delayed_wgrads: dict[int, MicrobatchPass] = {}

    @property
    def is_first(self) -> bool:
        return self.stage_index == 0

    @property
    def is_last(self) -> bool:
        return self.stage_index == self.num_stages - 1

    def forward_one_chunk(self, microbatch: int, *args: Any, **kwargs: Any) -> Tensor:
        return run_to_end(self.forward(microbatch))

    def backward_one_chunk(self, microbatch: int, full_backward: bool = True, **kwargs: Any) -> None:
        run_to_end(self.backward(microbatch))

    def backward_weight_one_chunk(self, microbatch: int, **kwargs: Any) -> None:
        if self.has_backward and microbatch in self._delayed_wgrads:
            self._delayed_wgrads.pop(microbatch).finish_wgrads()

    def forward(self, microbatch: int) -> PassSteps[Tensor]:
        x = None if self.x_in is None else self.x_in.get(microbatch)
        microbatch_pass = self._open(microbatch, self.has_backward and microbatch in self.split)
        y = yield from microbatch_pass.forward(x)
        if self.has_backward:
            self._in_flight[microbatch] = microbatch_pass
        if self.y_out is not None and self.y_out.is_remote:
            self._results[microbatch] = y.detach()
        return y

    def gap_filler(self, microbatch: int) -> Callable[[], object]:
        """What to do in the gaps of the forward that overlaps with the backward of a microbatch."""
        return self._in_flight[microbatch].fill_gap if self.has_backward else lambda: None

    def backward(self, microbatch: int) -> PassSteps[None]:
        if not self.has_backward:
            return
        microbatch_pass = self._in_flight.pop(microbatch)
        grad = None if self.grad_in is None else self.grad_in.get(microbatch)
        x_grad = yield from microbatch_pass.backward(grad)
        if self.grad_out is not None:
            if x_grad is None:
                out = self.grad_out
                x_grad = torch.zeros(out.shape, dtype=out.dtype, device=out.device)
            self._results[microbatch] = x_grad
        if microbatch in self.split:
            self._delayed_wgrads[microbatch] = microbatch_pass

    # The runtime asks for "ops" to start. Sends and receives are started here instead, and waited for where used.

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
        self.x_in.put_local(microbatch, y.detach())

    def get_local_bwd_output(self, microbatch: int) -> Tensor | None:
        return self._results.pop(microbatch) if self.has_backward else None

    def set_local_bwd_input(self, grad: Tensor | None, microbatch: int) -> None:
        if grad is not None and self.grad_in is not None:
            self.grad_in.put_local(microbatch, grad)

    def perform_reduce_grad(self, factor: int) -> None:
        """Nothing to do: the data-parallel wrapper reduces gradients."""

    def finish_run(self) -> None:
        """Wait for all sends; fail where a microbatch is unfinished."""
        for channel in (self.y_out, self.grad_out):
            if channel is not None:
                channel.wait_for_sends()
        left = [*self._in_flight, *self._results, *self._delayed_wgrads]
        assert not left, f"microbatches {left} were left on their way through chunk {self.stage_index}"
