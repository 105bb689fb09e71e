"""Microbatches through the chunks of this rank and of its pipeline peers, forward and backward."""

import logging
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.distributed.pipelining.schedules import FORWARD, OVERLAP_F_B, _Action, _PipelineScheduleRuntime

from threefold.engine.mesh import Group
from threefold.engine.overlap.merge import Stream, alternate
from threefold.engine.pipeline.border import Beat, Border
from threefold.engine.pipeline.order import V_SHAPED, order, split_backwards
from threefold.engine.pipeline.stage import Chunk, Stage
from threefold.layout.stages import chunk_rank

# On any error in a chunk torch prints the whole schedule, a line an action, on every rank.
logging.getLogger("torch.distributed.pipelining.schedules").setLevel(logging.CRITICAL)


class _Runtime(_PipelineScheduleRuntime):
    def _initialize_stages(self, *args: Any, **kwargs: Any) -> None:
        """Stages know their shapes: torch would send messages to find them."""


class Pipeline:
    """`chunks` are this rank's, by number: `chunk(x, microbatch)` gets None on the first, returns what it hands on, the
    last the 0-dim loss, already scaled. Gradients add up in `.grad`.

    `delay_weights` lets weight gradients wait where the schedule splits the backward; without it they are computed
    with the others, and a zero-bubble schedule idles as long as 1F1B. `merged` runs the forward and the backward of a
    pair beside each other, where the schedule has pairs.
    """

    def __init__(
        self,
        chunks: Mapping[int, Chunk],
        num_chunks: int,
        group: Group,
        schedule: str,
        num_microbatches: int,
        border_shape: Callable[[int], tuple[int, ...]],
        dtype: torch.dtype,
        device: torch.device,
        delay_weights: bool = True,
        beat: Beat | None = None,
        merged: bool = False,
    ) -> None:
        pp, v_shaped = group.size, schedule in V_SHAPED
        mine = [i for i in range(num_chunks) if chunk_rank(i, pp, v_shaped) == group.rank]
        assert sorted(chunks) == mine, (sorted(chunks), mine)
        actions = order(schedule, pp, num_chunks // pp, num_microbatches, merged)
        self.num_microbatches = num_microbatches
        self.stages: list[Stage] = []
        for index in mine:
            split = split_backwards(actions[group.rank], index) if delay_weights else set()
            self.stages.append(Stage(chunks[index], index, num_chunks, group.rank, pp, split))

        def border(what: str, of: int, peer: int) -> Border:
            place = chunk_rank(peer, pp, v_shaped)
            return Border(what, border_shape(of), dtype, device, group, place, beat or (lambda where: None))

        for stage in self.stages:
            _connect(stage, border)
        self.runtime = _Runtime(self.stages, num_microbatches, scale_grads=False)
        self.runtime._prepare_schedule_with_comms(actions)
        if merged:
            self.runtime.register_custom_function(OVERLAP_F_B, self._run_pair)

    def run(self, train: bool = True) -> None:
        """All microbatches, forward and backward; forward alone to evaluate."""
        for stage in self.stages:
            stage.has_backward = train
        # Its own notes of what was received; a custom function for merged actions leaves them behind.
        self.runtime.fwd_recv_ops.clear()
        self.runtime.bwd_recv_ops.clear()
        with nullcontext() if train else torch.no_grad():
            self.runtime._step_microbatches()
        for stage in self.stages:
            stage.settle()

    def _run_pair(self, action: _Action, ctx: object) -> None:
        stages = {stage.stage_index: stage for stage in self.stages}
        one, other = action.sub_actions or ()
        forward, backward = (one, other) if one.computation_type == FORWARD else (other, one)
        made: list[Tensor] = []

        def stream(of: Stage, microbatch: int) -> Stream:
            made.append((yield from of.forward(microbatch)))
            return None

        of, back = stages[forward.stage_index], stages[backward.stage_index]
        number, number_back = forward.microbatch_index, backward.microbatch_index
        assert number is not None
        assert number_back is not None
        alternate(back.backward(number_back), stream(of, number), back.filler(number_back))
        # With a V shape two neighbours are on one rank.
        if of.stage_index + 1 in stages:
            stages[of.stage_index + 1].set_local_fwd_input(made[0], number)
        if back.stage_index - 1 in stages:
            before = stages[back.stage_index - 1]
            before.set_local_bwd_input(back.get_local_bwd_output(number_back), number_back)

    def traffic(self, train: bool = True) -> list[tuple[int, int]]:
        """(bytes, how many) of the messages this rank sends in one run."""
        borders = [border for stage in self.stages for border in (stage.y_out, stage.grad_out if train else None)]
        return [(border.num_bytes, self.num_microbatches) for border in borders if border and border.crosses]


def _connect(stage: Stage, border: Callable[[str, int, int], Border]) -> None:
    at = stage.stage_index
    if not stage.is_first:
        stage.x_in = border(f"activation of chunk {at - 1}", at - 1, at - 1)
        stage.grad_out = border(f"gradient of chunk {at}", at - 1, at - 1)
    if not stage.is_last:
        stage.y_out = border(f"activation of chunk {at}", at, at + 1)
        stage.grad_in = border(f"gradient of chunk {at + 1}", at, at + 1)
