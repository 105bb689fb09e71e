"""Hidden states and gradients that a pipeline rank of our own engine has sent and still holds, over a schedule.

`activations.py` and the searches for the peak (`peak.py`, `overlap_peak.py`) count them at each moment.

Mirrors `engine/schedule/p2p.py`, `engine/schedule/stage.py`.
"""

from collections.abc import Sequence
from itertools import accumulate

from threefold.cost.stage_contents import StageContents
from threefold.cost.vision import num_picture_states_behind
from threefold.layout.stages import chunk_rank
from threefold.plan.plan import Plan


class PipelineBuffers:
    """Hidden states and gradients that a rank has sent to a neighbor and that are not yet freed (at most PP for each
    border between chunks), and one that is being received."""

    def __init__(self, plan: Plan, stage: int, contents: StageContents) -> None:
        layout = plan.layout
        self.most = min(layout.pp, max(1, plan.num_microbatches))
        self.received = 0 if layout.pp == 1 or (stage == 0 and layout.vpp == 1) else 1
        self.borders: list[tuple[int, int]] = []  # states that each chunk sends after a forward, and after a backward
        if layout.pp == 1:
            return
        is_v = layout.pipeline_schedule == "dualpipev"
        of_rank = [number for number in range(len(plan.chunks)) if chunk_rank(number, layout.pp, is_v) == stage]
        # Behind a depth of MTP the hidden states of that depth travel too, and features of pictures as far as they are
        # needed: before each chunk, and behind the last one.
        depths = [0, *accumulate(chunk.mtp for chunk in plan.chunks)]
        depths = [mtp + num_picture_states_behind(plan, number - 1) for number, mtp in enumerate(depths)]
        # Features of pictures are received with the hidden states.
        self.received *= 1 + max(num_picture_states_behind(plan, number - 1) for number in of_rank)
        is_tip = is_v and stage == layout.pp - 1  # of DualPipeV's V, where both chunks are on one rank
        for number, chunk in enumerate(contents.chunks):
            sends_states = not chunk.loss and not (is_tip and number == 0)
            sends_gradients = not chunk.embedding and not (is_tip and number == 1)
            states = 1 + depths[of_rank[number] + 1] if sends_states else 0
            gradients = 1 + depths[of_rank[number]] if sends_gradients else 0
            self.borders.append((states, gradients))

    def by_chunk(self, num_chunks: int) -> tuple[list[int], list[int]]:
        """States that each chunk sends after a forward, and after a backward."""
        borders = [*self.borders, *[(0, 0)] * (num_chunks - len(self.borders))]
        return [states for states, _ in borders], [gradients for _, gradients in borders]

    def count(self, in_flight: Sequence[int], finished: Sequence[int]) -> int:
        num_sent = 0
        for (states, gradients), flying, done in zip(self.borders, in_flight, finished, strict=False):
            num_sent += states * min(self.most, flying + done) + gradients * min(self.most, done)
        return num_sent + self.received
