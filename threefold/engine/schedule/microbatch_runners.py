"""The microbatch loop: forward and backward over the microbatches of one step. `step.py` calls `run`.

There are three runners: `Sequential` (one microbatch after the other), `Overlapped` (the forward of a microbatch beside
the backward of the one before, to hide expert exchanges) and `Pipelined` (through the stages of a pipeline).

Shapes: K hidden states handed from chunk to chunk, B batch, S sequence, D model dim.
"""

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Protocol

import torch
from torch import Tensor, nn

from threefold.engine.batch import Batch
from threefold.engine.dist.mesh import Mesh
from threefold.engine.graphs.scopes import ModelGraphs, make_model_graphs
from threefold.engine.graphs.stats import GraphStats
from threefold.engine.models.compile import compile_parts
from threefold.engine.models.decoder import Decoder
from threefold.engine.models.inputs import Inputs, make_inputs
from threefold.engine.models.pipeline_chunk import num_hidden_states
from threefold.engine.moe.balance import attach_loss
from threefold.engine.schedule.interleave import run_overlap_pairs
from threefold.engine.schedule.overlappable_pass import OverlappedPass
from threefold.plan.plan import Plan

LabelShare = float | Tensor  # the fraction of the step's labels that a microbatch has


class StepSums(dict[str, Tensor]):
    """Losses and router statistics of a step: losses are weighted by label share, counts are added up."""

    def add(self, aux: dict[str, Tensor], share: LabelShare) -> None:
        for name, value in aux.items():
            if name != "num_labels":
                part = value * share if value.dim() == 0 else value
                self[name] = self[name] + part if name in self else part


class MicrobatchRunner(Protocol):
    graph_stats: GraphStats | None  # what the CUDA graphs did; None without graphs

    def run(self, batches: Sequence[Batch], shares: Sequence[LabelShare], train: bool = True) -> StepSums:
        """Forward and, with `train`, backward. `shares` are the label shares of the microbatches."""
        ...


class Sequential:
    """One microbatch after the other, through a whole model."""

    def __init__(self, model: Decoder, model_graphs: ModelGraphs | None = None, reduces_grads: bool = False) -> None:
        compile_parts(model)
        self.model = model
        self.model_graphs = model_graphs or make_model_graphs(model, reduces_grads=reduces_grads)
        self.graph_stats = self.model_graphs.graph_stats

    def run(self, batches: Sequence[Batch], shares: Sequence[LabelShare], train: bool = True) -> StepSums:
        sums = StepSums()
        self.model_graphs.reset()
        for batch, share in zip(batches, shares, strict=True):
            self.model.use_cp_degree(batch.cp_degree)
            with torch.set_grad_enabled(train):
                aux = self.model_graphs.run(batch, share) or self._run(batch, share, train)
            if not batch.is_empty:
                sums.add(aux, share)
        return sums

    def _run(self, batch: Batch, share: LabelShare, train: bool) -> dict[str, Tensor]:
        self.model.expected_loss_grad = share
        # A graph holds the collectives of one CP degree.
        with self.model_graphs.microbatch() if batch.cp_degree is None else nullcontext():
            out = self.model(
                *(batch.tokens_BS, batch.labels_BS, batch.documents_BS, batch.positions_BS),
                *(batch.images, batch.positions_3BS, batch.num_useful_B),
            )
        assert out.loss is not None
        if train:
            (out.loss * share).backward()
        return out.aux


class Overlapped:
    """Each microbatch's forward beside the backward of the one before, through a whole model."""

    def __init__(self, model: Decoder, delay_wgrad: bool) -> None:
        self.model, self.wgrad = model, "soon" if delay_wgrad else "now"
        self._sequential = Sequential(model)
        self.model_graphs = self._sequential.model_graphs
        self.graph_stats = self.model_graphs.graph_stats

    def run(self, batches: Sequence[Batch], shares: Sequence[LabelShare], train: bool = True) -> StepSums:
        if not train:
            return self._sequential.run(batches, shares, train)
        sums = StepSums()
        self.model_graphs.reset()

        def open_pass(number: int) -> OverlappedPass:
            inputs, in_graphs = inputs_of(self.model, batches[number]), self.model_graphs.microbatch
            return OverlappedPass(self.model, inputs, shares[number], sums.add, self.wgrad, in_graphs)

        run_overlap_pairs(open_pass, len(batches))
        return sums


def inputs_of(model: Decoder, batch: Batch) -> Inputs:
    return make_inputs(
        *(batch.tokens_BS, batch.labels_BS, batch.documents_BS, batch.positions_BS),
        *(model.num_mtp, model.shard_sequence, batch.images, batch.positions_3BS),
        *(batch.num_useful_B, model.shard_hidden),
    )


class ChunkForward(nn.Module):
    """The forward of one pipeline chunk: hidden states in, hidden states or the loss out."""

    def __init__(self, model: Decoder, model_graphs: ModelGraphs | None = None) -> None:
        super().__init__()
        self.model, self.model_graphs = model, model_graphs or ModelGraphs(model)
        self.batches: Sequence[Batch] = ()
        self.shares: Sequence[LabelShare] = ()
        self.sums = StepSums()

    def forward(self, x_KBSD: Tensor | None, microbatch: int) -> Tensor:
        model, share = self.model, self.shares[microbatch]
        inputs = inputs_of(model, self.batches[microbatch])
        hidden = [] if x_KBSD is None else list(x_KBSD.unbind(0))
        with self.model_graphs.microbatch():
            hidden, router_stats = model.forward_chunk(hidden, inputs)
        if model.has_loss:
            model.expected_loss_grad = share
            out = model.compute_loss(hidden, router_stats, inputs)
            assert out.loss is not None
            self.sums.add(out.aux, share)
            return out.loss * share
        total, aux = model.sum_losses({}, router_stats)
        self.sums.add(aux, share)
        y_KBSD = torch.stack(hidden)
        return y_KBSD if total is None else attach_loss(y_KBSD, total * share)


class OverlappedChunk(ChunkForward):
    """A pipeline chunk whose passes stop wherever an exchange of experts has started."""

    def __init__(self, model: Decoder, delay_wgrad: bool, model_graphs: ModelGraphs | None = None) -> None:
        super().__init__(model, model_graphs)
        self.wgrad = "soon" if delay_wgrad else "now"

    def open_pass(self, microbatch: int, later: bool) -> OverlappedPass:
        inputs = inputs_of(self.model, self.batches[microbatch])
        wgrad = "later" if later else self.wgrad
        share, in_graphs = self.shares[microbatch], self.model_graphs.microbatch
        return OverlappedPass(self.model, inputs, share, self.sums.add, wgrad, in_graphs)


class Pipelined:
    """Microbatches through the chunks of a pipeline rank, in the order of the plan's schedule."""

    def __init__(self, chunks: dict[int, Decoder], plan: Plan, mesh: Mesh, dtype: torch.dtype) -> None:
        layout, job = plan.layout, plan.job
        local_seq_len = job.seq_len // (layout.cp * layout.tp)

        def boundary_shape(number: int) -> tuple[int, ...]:
            return (
                num_hidden_states(plan.model, plan.chunks, number),
                job.micro_batch,
                local_seq_len,
                plan.model.stream_dim,
            )

        # FSDP reduces gradients when the backward leaves a module, so that none may come later.
        delay, overlap = plan.knobs.data_parallel == "zero1", plan.knobs.ep_overlap
        for model in chunks.values():
            compile_parts(model)
        graph_stats = GraphStats()
        self.chunks = {
            number: OverlappedChunk(model, delay and plan.knobs.delay_wgrad, make_model_graphs(model, graph_stats))
            if overlap
            else ChunkForward(model, make_model_graphs(model, graph_stats))
            for number, model in chunks.items()
        }
        self.graph_stats = (
            graph_stats if any(chunk.model_graphs.graph_stats for chunk in self.chunks.values()) else None
        )
        # Here, because torch's schedules import its compiler, which takes most of a second.
        from threefold.engine.schedule.pipeline import Pipeline

        self.pipeline = Pipeline(
            self.chunks,
            num_chunks=len(plan.chunks),
            group=mesh.group("pp"),
            schedule=layout.pipeline_schedule,
            num_microbatches=plan.num_microbatches,
            boundary_shape=boundary_shape,
            dtype=dtype,
            device=mesh.device,
            delay_wgrad=delay,
            overlap_f_b=overlap,
        )

    def run(self, batches: Sequence[Batch], shares: Sequence[LabelShare], train: bool = True) -> StepSums:
        for chunk in self.chunks.values():
            chunk.batches, chunk.shares, chunk.sums = batches, shares, StepSums()
            chunk.model_graphs.reset()
        self.pipeline.run(train)
        sums = StepSums()
        for chunk in self.chunks.values():
            for name, value in chunk.sums.items():
                sums[name] = sums[name] + value if name in sums else value
        return sums
