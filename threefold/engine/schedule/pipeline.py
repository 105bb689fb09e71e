"""The pipeline of one rank: runs all microbatches of a step through its chunks, in the order of the schedule.

`microbatch_runners.Pipelined` makes it. The order comes from `pipeline_order.py`; torch's schedule runtime walks
through it and says when to send and receive; `p2p.py` does that, and `stage.py` runs a chunk.
"""

import logging
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.distributed.pipelining.schedules import FORWARD, OVERLAP_F_B, _Action, _PipelineScheduleRuntime

from threefold.engine.dist.mesh import Group
from threefold.engine.schedule.interleave import StepStream, interleave_steps
from threefold.engine.schedule.p2p import Heartbeat, P2PChannel
from threefold.engine.schedule.pipeline_order import V_SHAPED, pipeline_actions, split_backwards
from threefold.engine.schedule.stage import ChunkFn, Stage
from threefold.layout.stages import chunk_rank

# On any error in a chunk torch prints the whole schedule, a line an action, on every rank.
logging.getLogger("torch.distributed.pipelining.schedules").setLevel(logging.CRITICAL)


class _Runtime(_PipelineScheduleRuntime):
    def _initialize_stages(self, *args: Any, **kwargs: Any) -> None:
        """Nothing to do: stages know their shapes, and torch would send messages to find them."""


class Pipeline:
    """The chunks of this rank, connected to their neighbors.

    `chunks` are the functions of this rank's chunks, by number: `chunk(x, microbatch)` gets None as `x` on the first
    chunk and returns the hidden states for the next one, or on the last chunk the 0-dim loss, already scaled. Gradients
    accumulate in `.grad`. `boundary_shape(n)` is the shape of the hidden states behind chunk n.

    `delay_wgrad` delays weight gradients where the schedule splits the backward. Without it they are computed with the
    input gradients, and a zero-bubble schedule idles as long as 1F1B. `overlap_f_b` overlaps the forward and the
    backward of a pair, where the schedule has pairs.
    """

    def __init__(
        self,
        chunks: Mapping[int, ChunkFn],
        num_chunks: int,
        group: Group,
        schedule: str,
        num_microbatches: int,
        boundary_shape: Callable[[int], tuple[int, ...]],
        dtype: torch.dtype,
        device: torch.device,
        delay_wgrad: bool = True,
        heartbeat: Heartbeat | None = None,
        overlap_f_b: bool = False,
    ) -> None:
        pp, v_shaped = group.size, schedule in V_SHAPED
        mine = [i for i in range(num_chunks) if chunk_rank(i, pp, v_shaped) == group.rank]
        assert sorted(chunks) == mine, (sorted(chunks), mine)
        actions = pipeline_actions(schedule, pp, num_chunks // pp, num_microbatches, overlap_f_b)
        self.num_microbatches = num_microbatches
        self.stages: list[Stage] = []
        for index in mine:
            split = split_backwards(actions[group.rank], index) if delay_wgrad else set()
            self.stages.append(Stage(chunks[index], index, num_chunks, group.rank, pp, split))

        def make_channel(description: str, boundary: int, peer: int) -> P2PChannel:
            beat = heartbeat or (lambda where: None)
            peer_rank = chunk_rank(peer, pp, v_shaped)
            return P2PChannel(description, boundary_shape(boundary), dtype, device, group, peer_rank, beat)

        for stage in self.stages:
            _connect(stage, make_channel)
        self.runtime = _Runtime(self.stages, num_microbatches, scale_grads=False)
        self.runtime._prepare_schedule_with_comms(actions)
        if overlap_f_b:
            self.runtime.register_custom_function(OVERLAP_F_B, self._run_pair)

    def run(self, train: bool = True) -> None:
        """Run all microbatches, forward and backward; only forward to evaluate."""
        for stage in self.stages:
            stage.has_backward = train
        # The runtime keeps a list of what was received, which a custom function for overlapped actions leaves behind.
        self.runtime.fwd_recv_ops.clear()
        self.runtime.bwd_recv_ops.clear()
        with nullcontext() if train else torch.no_grad():
            self.runtime._step_microbatches()
        for stage in self.stages:
            stage.finish_run()

    def _run_pair(self, action: _Action, ctx: object) -> None:
        """Run an overlapped action: the forward of one microbatch and the backward of another."""
        stages = {stage.stage_index: stage for stage in self.stages}
        one, other = action.sub_actions or ()
        forward, backward = (one, other) if one.computation_type == FORWARD else (other, one)
        outputs: list[Tensor] = []

        def forward_steps(forward_stage: Stage, microbatch: int) -> StepStream:
            outputs.append((yield from forward_stage.forward(microbatch)))
            return None

        forward_stage, backward_stage = stages[forward.stage_index], stages[backward.stage_index]
        forward_microbatch, backward_microbatch = forward.microbatch_index, backward.microbatch_index
        assert forward_microbatch is not None
        assert backward_microbatch is not None
        interleave_steps(
            backward_stage.backward(backward_microbatch),
            forward_steps(forward_stage, forward_microbatch),
            backward_stage.gap_filler(backward_microbatch),
        )
        # With a V-shaped schedule two neighboring chunks are on one rank.
        if forward_stage.stage_index + 1 in stages:
            stages[forward_stage.stage_index + 1].set_local_fwd_input(outputs[0], forward_microbatch)
        if backward_stage.stage_index - 1 in stages:
            before = stages[backward_stage.stage_index - 1]
            before.set_local_bwd_input(backward_stage.get_local_bwd_output(backward_microbatch), backward_microbatch)

    def traffic(self, train: bool = True) -> list[tuple[int, int]]:
        """(bytes, number) of the messages that this rank sends in one run."""
        channels = [channel for stage in self.stages for channel in (stage.y_out, stage.grad_out if train else None)]
        return [(channel.num_bytes, self.num_microbatches) for channel in channels if channel and channel.is_remote]


def _connect(stage: Stage, make_channel: Callable[[str, int, int], P2PChannel]) -> None:
    index = stage.stage_index
    if not stage.is_first:
        stage.x_in = make_channel(f"activation of chunk {index - 1}", index - 1, index - 1)
        stage.grad_out = make_channel(f"gradient of chunk {index}", index - 1, index - 1)
    if not stage.is_last:
        stage.y_out = make_channel(f"activation of chunk {index}", index, index + 1)
        stage.grad_in = make_channel(f"gradient of chunk {index + 1}", index, index + 1)
