"""Forward and backward over the microbatches of a step: one after the other, or through a pipeline.

Shapes: K hidden states handed on, B batch, S sequence, D model dim.
"""

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor, nn

from threefold.engine.compiled import compile_parts
from threefold.engine.data.loader import Batch
from threefold.engine.graphs.model import Graphed, graphed_of
from threefold.engine.graphs.tally import Tally
from threefold.engine.inputs import Inputs, make_inputs
from threefold.engine.mesh import Mesh
from threefold.engine.models.chunk import states_behind
from threefold.engine.models.decoder import Decoder
from threefold.engine.moe.balance import attach
from threefold.engine.overlap.merge import in_pairs
from threefold.engine.overlap.walk import Walk
from threefold.engine.pipeline.schedule import Pipeline
from threefold.plan.plan import Plan

Share = float | Tensor  # a microbatch's part of the step's labels


class Sums(dict[str, Tensor]):
    """What the microbatches said: losses by their share of the step's labels, counts as they are."""

    def note(self, aux: dict[str, Tensor], share: Share) -> None:
        for name, value in aux.items():
            if name != "num_labels":
                part = value * share if value.dim() == 0 else value
                self[name] = self[name] + part if name in self else part


class Runner(Protocol):
    tally: Tally | None  # of graphs, where there are

    def run(self, batches: Sequence[Batch], shares: Sequence[Share], train: bool = True) -> Sums:
        """`shares` are of each microbatch's labels in the step's."""
        ...


class InTurn:
    """No pipeline: the whole model is here."""

    def __init__(self, model: Decoder, graphed: Graphed | None = None) -> None:
        compile_parts(model)
        self.model, self.graphed = model, graphed or graphed_of(model)
        self.tally = self.graphed.tally

    def run(self, batches: Sequence[Batch], shares: Sequence[Share], train: bool = True) -> Sums:
        sums = Sums()
        self.graphed.reset()
        for batch, share in zip(batches, shares, strict=True):
            with torch.set_grad_enabled(train):
                aux = self.graphed.run(batch, share) or self._run(batch, share, train)
            sums.note(aux, share)
        return sums

    def _run(self, batch: Batch, share: Share, train: bool) -> dict[str, Tensor]:
        with self.graphed.microbatch():
            out = self.model(batch.tokens_BS, batch.labels_BS, batch.documents_BS, batch.positions_BS)
        assert out.loss is not None
        if train:
            (out.loss * share).backward()
        return out.aux


class Merged:
    """No pipeline: each microbatch's forward beside the backward of the one before (`overlap/`)."""

    def __init__(self, model: Decoder, delay_weights: bool) -> None:
        self.model, self.weights = model, "soon" if delay_weights else "now"
        self.tally: Tally | None = None
        self._in_turn = InTurn(model)

    def run(self, batches: Sequence[Batch], shares: Sequence[Share], train: bool = True) -> Sums:
        if not train:
            return self._in_turn.run(batches, shares, train)
        sums = Sums()

        def walk(number: int) -> Walk:
            return Walk(self.model, inputs_of(self.model, batches[number]), shares[number], sums.note, self.weights)

        in_pairs(walk, len(batches))
        return sums


def inputs_of(model: Decoder, batch: Batch) -> Inputs:
    return make_inputs(
        batch.tokens_BS, batch.labels_BS, batch.documents_BS, batch.positions_BS, model.num_mtp, model.cut
    )


class ChunkRun(nn.Module):
    """A chunk as the pipeline calls it: hidden states in, hidden states or the loss out."""

    def __init__(self, model: Decoder, graphed: Graphed | None = None) -> None:
        super().__init__()
        self.model, self.graphed = model, graphed or Graphed(model)
        self.batches: Sequence[Batch] = ()
        self.shares: Sequence[Share] = ()
        self.sums = Sums()

    def forward(self, x_KBSD: Tensor | None, microbatch: int) -> Tensor:
        model, share = self.model, self.shares[microbatch]
        inputs = inputs_of(model, self.batches[microbatch])
        handed = [] if x_KBSD is None else list(x_KBSD.unbind(0))
        with self.graphed.microbatch():
            states, balances = model.advance(handed, inputs)
        if model.has_loss:
            out = model.conclude(states, balances, inputs)
            assert out.loss is not None
            self.sums.note(out.aux, share)
            return out.loss * share
        total, aux = model.add_up({}, balances)
        self.sums.note(aux, share)
        y_KBSD = torch.stack(states)
        return y_KBSD if total is None else attach(y_KBSD, total * share)


class WalkedChunk(ChunkRun):
    """A chunk whose microbatches stop where an exchange has started."""

    def __init__(self, model: Decoder, delay_weights: bool) -> None:
        super().__init__(model)
        self.weights = "soon" if delay_weights else "now"

    def opened(self, microbatch: int, later: bool) -> Walk:
        inputs = inputs_of(self.model, self.batches[microbatch])
        return Walk(self.model, inputs, self.shares[microbatch], self.sums.note, "later" if later else self.weights)


class Piped:
    """Several stages: chunks run in the order of the plan's schedule."""

    def __init__(self, chunks: dict[int, Decoder], plan: Plan, mesh: Mesh, dtype: torch.dtype) -> None:
        layout, job = plan.layout, plan.job
        share = job.seq_len // (layout.cp * layout.tp)

        def border(number: int) -> tuple[int, ...]:
            return states_behind(plan.chunks, number), job.micro_batch, share, plan.model.dim

        # FSDP reduces a gradient when the backward leaves the module: none may come later.
        delay, overlap = plan.knobs.data_parallel == "zero1", plan.knobs.ep_overlap
        for model in chunks.values():
            compile_parts(model)
        tally = Tally()
        self.chunks = {
            number: WalkedChunk(model, delay and plan.knobs.delay_wgrad)
            if overlap
            else ChunkRun(model, graphed_of(model, tally))
            for number, model in chunks.items()
        }
        self.tally = tally if any(chunk.graphed.tally for chunk in self.chunks.values()) else None
        self.pipeline = Pipeline(
            self.chunks,
            num_chunks=len(plan.chunks),
            group=mesh.group("pp"),
            schedule=layout.pipeline_schedule,
            num_microbatches=plan.num_microbatches,
            border_shape=border,
            dtype=dtype,
            device=mesh.device,
            delay_weights=delay,
            merged=overlap,
        )

    def run(self, batches: Sequence[Batch], shares: Sequence[Share], train: bool = True) -> Sums:
        for chunk in self.chunks.values():
            chunk.batches, chunk.shares, chunk.sums = batches, shares, Sums()
            chunk.graphed.reset()
        self.pipeline.run(train)
        sums = Sums()
        for chunk in self.chunks.values():
            for name, value in chunk.sums.items():
                sums[name] = sums[name] + value if name in sums else value
        return sums
