"""Recurrences over the chunks of a sequence (gated delta rule, Mamba) as a few operators, whatever its length.

In plain torch the engine computes the state chunk by chunk, in thousands of small operators for a long sequence. From
`MIN_CHUNKS` chunks on, a rehearsal makes the tensors of all chunks at once: what the loops save, their results, and the
gradients that autograd sums for them. `rehearse_rank` enters `use_single_recurrences`.

Shapes: B batch, H heads, G groups, N chunks, C tokens of a chunk, k key dim, v value dim, n state dim, R heads of a
group, X their columns.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from threefold.engine.attention.delta_chunks import ChunkedDelta
from threefold.engine.attention.state_space.chunk_scan import ChunkedScan

MIN_CHUNKS = 384  # with fewer the loops themselves take less than a second


class _DeltaStates(torch.autograd.Function):
    """Outputs of all chunks, or the last state. States and corrections of all chunks are saved."""

    @staticmethod
    def forward(ctx: Any, has_output: bool, columns: int, state_BHkv: Tensor | None, *parts: Tensor) -> Tensor:
        u_BHNCv, w_BHNCk = parts[:2]
        batch, heads, chunks, tokens, keys = w_BHNCk.shape
        states = w_BHNCk.new_empty(batch, heads, chunks, keys, columns)
        corrections = u_BHNCv.new_empty(batch, heads, chunks, tokens, columns)
        ctx.save_for_backward(*parts, states, corrections)
        if has_output:
            outs = torch.empty_like(corrections)
            return torch.empty_like(outs)  # stacked
        return states[:, :, 0].clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        parts = ctx.saved_tensors[:-2]
        grads = [torch.empty_like(part, memory_format=torch.contiguous_format) for part in parts]
        # A chunk's part of a gradient is as large as the whole, and autograd adds both into a third tensor.
        largest = max(grads, key=Tensor.numel)
        torch.stack([torch.empty_like(largest)]).copy_(largest)
        state_grad = ctx.saved_tensors[-2][:, :, 0].clone() if ctx.needs_input_grad[2] else None
        return None, None, state_grad, *grads


class _ScanStates(torch.autograd.Function):
    """The states before all chunks, and after the last one."""

    @staticmethod
    def forward(ctx: Any, state_BGnX: Tensor | None, added_BGNnX: Tensor, decay_BGNR: Tensor) -> tuple[Tensor, Tensor]:
        states = torch.empty_like(added_BGNnX)
        ctx.save_for_backward(states, decay_BGNR)
        return states, added_BGNnX[:, :, 0].clone()

    @staticmethod
    def backward(ctx: Any, states_grad: Tensor, last_grad: Tensor) -> tuple[Tensor | None, Tensor, Tensor]:
        _, decay = ctx.saved_tensors
        state_grad = last_grad.clone() if ctx.needs_input_grad[0] else None
        return state_grad, torch.empty_like(states_grad), torch.empty_like(decay)


_delta_output, _delta_transition, _scan_states = ChunkedDelta.output, ChunkedDelta.transition, ChunkedScan._states


def _output(self: ChunkedDelta, state_BHkv: Tensor | None = None) -> Tensor:
    if self.decay_BHN.shape[2] < MIN_CHUNKS:
        return _delta_output(self, state_BHkv)
    parts = self.u_BHNCv, self.w_BHNCk, self.query_BHNCk, self.key_BHNCk, self.scores_BHNCC, self.decay_BHN
    outs: Tensor = _DeltaStates.apply(True, self.u_BHNCv.shape[-1], state_BHkv, *parts)
    return outs.flatten(2, 3)[:, :, : self.length].transpose(1, 2).to(self.dtype)


def _transition(self: ChunkedDelta) -> Tensor:
    if self.decay_BHN.shape[2] < MIN_CHUNKS:
        return _delta_transition(self)
    columns = self.u_BHNCv.shape[-1] + self.w_BHNCk.shape[-1]
    parts = self.u_BHNCv, self.w_BHNCk, self.key_BHNCk, self.decay_BHN
    last: Tensor = _DeltaStates.apply(False, columns, None, *parts)
    return last


def _states(self: ChunkedScan, state_BGnX: Tensor | None) -> list[Tensor]:
    if self.decay_BGNR.shape[2] < MIN_CHUNKS:
        return _scan_states(self, state_BGnX)
    states, last = _ScanStates.apply(state_BGnX, self.added_BGNnX, self.decay_BGNR)
    return [*states.unbind(2), last]


@contextmanager
def use_single_recurrences() -> Iterator[None]:
    """Replace the loops over chunks, in the forward and in a recompute."""
    with (
        mock.patch.object(ChunkedDelta, "output", _output),
        mock.patch.object(ChunkedDelta, "transition", _transition),
        mock.patch.object(ChunkedScan, "_states", _states),
    ):
        yield
