"""The oracle: trains a model in a layout and on one rank in fp64, and checks that losses, gradients and weights agree.

`threefold verify` and the tests call `compare_with_one_rank`. Every rank sends the rectangles that it owns; together
they must cover each parameter exactly once. The one-rank run works on the same microbatches. Near ties of the router
would make the comparison a matter of luck, so they are counted.
"""

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from threefold.engine.batch import Batch
from threefold.engine.build import Parts, build, dynamic_grid, options_of
from threefold.engine.context import context
from threefold.engine.data.dynamic_cp import DynamicSteps
from threefold.engine.data.packing import Sample
from threefold.engine.data_parallel.fsdp import Fsdp
from threefold.engine.dispatch.capacity import Capacity
from threefold.engine.dispatch.flex_base import FlexDispatcher
from threefold.engine.dist.collectives import CollectiveCall, observe_collectives
from threefold.engine.dist.mesh import Mesh
from threefold.engine.dist.shard_placement import Placement
from threefold.engine.layers.cross_entropy import IGNORE
from threefold.engine.model_options import Options
from threefold.engine.moe.layer import MoeLayer
from threefold.engine.moe.router import Router
from threefold.engine.run.dcp import CheckpointShard
from threefold.engine.schedule.microbatch_runners import Pipelined
from threefold.engine.step import StepResult, evaluate_batches, to_device, train_step
from threefold.engine.verify.compare import Comparison, RankResults, ShardValues, compare_results
from threefold.engine.verify.forked_ranks import LIMIT_SECONDS, run_ranks
from threefold.engine.verify.sample_data import JobData, add_images, open_job_data
from threefold.engine.verify.skewed_routing import skew_routers
from threefold.layout.degrees import Layout
from threefold.plan.plan import Knobs, Plan

LR = 1e-3
EVALUATION = 1000  # number of the step whose samples are evaluated on
_UNLABELED = 5  # one sample in this many has no label
# Relative change of the router's scores on which no choice of experts may depend: a thousand times the rounding in
# fp64, a few times in fp32, where more would find ties everywhere.
_NUDGE = {torch.float64: 1e-9, torch.float32: 1e-6}


def compare_with_one_rank(
    plan: Plan,
    steps: int = 3,
    dtype: torch.dtype = torch.float64,
    options: Options | None = None,
    limit: float = LIMIT_SECONDS,
    rates: Sequence[float] = (),
    reads_data: bool = False,
) -> Comparison:
    """Run the plan on forked ranks and on one rank, and compare.

    `rates` are the learning rates of the steps; without any they are LR. With `reads_data` the ranks train and evaluate
    on the data of the job, otherwise on made-up samples.
    """
    options = options or replace(options_of(plan), expert_backend="loop")
    if options.lora is not None:  # with a B of zeros no gradient of A would be compared
        options = replace(options, lora=replace(options.lora, draws_b=True))
    one_rank = run_one_rank(plan, steps, dtype, options, limit, rates, reads_data)
    args = (plan, steps, dtype, options, None, None, rates, reads_data)
    ranks = run_ranks(plan.layout.gpus, run_rank, *args, limit=limit)
    return compare_results(plan, one_rank, ranks)


def run_one_rank(
    plan: Plan,
    steps: int,
    dtype: torch.dtype,
    options: Options,
    limit: float = LIMIT_SECONDS,
    rates: Sequence[float] = (),
    reads_data: bool = False,
) -> RankResults:
    """Train the unsharded model on the same microbatches, one after the other, with the plainest knobs."""
    one_rank_plan, plain = on_one_rank(plan, options)
    same_rows = plan if plan.shards_dynamically or reads_data else None
    # This rank is forked too: with a GPU in the machine, a process that has run a backward cannot fork ranks that do.
    args = (one_rank_plan, steps, dtype, plain, None, same_rows, rates, reads_data, plan.layout.dp)
    (one_rank,) = run_ranks(1, run_rank, *args, limit=limit)
    return one_rank


def on_one_rank(plan: Plan, options: Options) -> tuple[Plan, Options]:
    """The plan that one rank trains for the comparison: the unsharded model with the plainest knobs."""
    # They change what is computed and which states there are. Remainders of master weights are held to whole ones.
    kept = ("precision", "optimizer_dtype", "master_weights", "muon_dtype")
    knobs = Knobs(dispatcher="local", **{name: getattr(plan.knobs, name) for name in kept})
    plain = replace(options, shared_overlap=False, recompute=(), recompute_method=None, recompute_layers=None)
    plain = replace(plain, recompute_save=(), vision_recompute=())
    plain = replace(plain, activation_offload=(), activation_offload_layers=0, expert_fusion=False)
    plain = replace(plain, graphs=(), compile=False, wgrad_overlap=False)
    return replace(plan, layout=Layout(), knobs=knobs), plain


def run_rank(
    rank: int,
    plan: Plan,
    steps: int,
    dtype: torch.dtype,
    options: Options,
    mesh: Mesh | None = None,
    same_rows: Plan | None = None,
    rates: Sequence[float] = (),
    reads_data: bool = False,
    num_sources: int | None = None,
) -> RankResults:
    """Train some steps as one rank of the plan's layout and return what it computed, in host memory.

    The rank computes on the device of its mesh, by default on the CPU. With `same_rows`, a plan of several ranks, it
    computes the microbatches of all ranks of that plan. `num_sources` are the data-parallel ranks of the plan that one
    rank stands for, where `job.load` differs between them.
    """
    mesh = mesh or Mesh(plan.layout, rank)
    parts = build(plan, mesh, dtype=dtype, options=options, with_data=False)
    # Under dynamic CP the rank that has a microbatch follows from its lengths, which one rank does not know.
    has_sources = not (same_rows or plan).shards_dynamically or plan.job.load != "ragged-sources"
    skewed = skew_routers(parts, plan, num_sources or plan.layout.dp) if has_sources else None
    results = RankResults(frozen=set(parts.data.frozen))
    frozen = _frozen_weights(parts)

    def count(call: CollectiveCall) -> None:
        results.calls[call.group.name, call.operation] += 1

    capacity_factor = plan.job.capacity_factor if plan.layout.gpus == 1 else None
    with ExitStack() as entered:
        samples: _MadeUpSamples | JobData = _MadeUpSamples(plan, mesh, same_rows)
        if reads_data:
            samples = entered.enter_context(open_job_data(plan, mesh, same_rows))
        entered.enter_context(_TieFinder(parts, results, capacity_factor))
        entered.enter_context(observe_collectives(count))
        for step in range(steps):
            batches = samples.batches(step)
            if skewed is not None:
                skewed.begin_step(step)
            degrees = [batch.cp_degree or 1 for batch in batches if not batch.is_empty]
            results.largest_cp = max([results.largest_cp, *degrees])
            recording = replace(parts, data=_GradientRecorder(parts, results.gradients)) if step == 0 else parts
            rate = rates[step] if rates else LR
            result = train_step(recording, batches, rate, plan.job)
            while result.overflowed:  # fp16 looks for its loss scale, and skips such a step: the same one again
                if step == 0:
                    results.gradients.clear()
                result = train_step(recording, batches, rate, plan.job)
            results.losses.append(_losses(result))
            results.norms.append(result.grad_norm)
            results.skipped += not result.applied
            results.loss_scale = result.loss_scale or 1.0
            if step == 0:  # the steps after it show what an evaluation leaves behind
                results.evaluation = samples.evaluate(parts)
    _count_unobserved_calls(parts, results)
    if parts.runner.graph_stats is not None:
        results.graphs = parts.runner.graph_stats.tally()
    _record_weights_and_states(parts, results)
    results.moved = {name for name, value in _frozen_weights(parts).items() if not torch.equal(value, frozen[name])}
    return results


def _frozen_weights(parts: Parts) -> dict[str, Tensor]:
    """Copies of what this rank holds of frozen parameters."""
    held, frozen = parts.data.local_tensors(), set(parts.data.frozen)
    return {name: memory.detach().clone() for name, _, memory, _ in held if name in frozen}


class _MadeUpSamples:
    """The microbatches of a rank, and those of an evaluation, that no step trains on.

    With `same_rows`, a plan with dynamic context parallelism, they are those of all ranks of that plan.
    """

    def __init__(self, plan: Plan, mesh: Mesh, same_rows: Plan | None) -> None:
        self.plan, self.mesh, self.same_rows = plan, mesh, same_rows

    def batches(self, step: int) -> list[Batch]:
        plan, same_rows = self.plan, self.same_rows
        if same_rows is not None:
            made = list(synthetic_rows(same_rows, Mesh(Layout())).all_rows(step * same_rows.job.global_batch))
        elif plan.shards_dynamically:
            rows, first = synthetic_rows(plan, self.mesh), step * plan.job.global_batch
            made = [rows.batch(first, number) for number in range(len(rows.rounds(first)))]
        else:
            made = [synthetic_batch(plan, step, m, self.mesh.coordinate("dp")) for m in range(plan.num_microbatches)]
        return [to_device(batch, self.mesh.device) for batch in made]

    def evaluate(self, parts: Parts) -> dict[str, float]:
        num_per_run = self.plan.num_microbatches if self.plan.layout.pp > 1 else 1
        return {"made up": evaluate_batches(parts, self.batches(EVALUATION), num_per_run)}


def synthetic_rows(plan: Plan, mesh: Mesh) -> DynamicSteps:
    """The same samples as `synthetic_batch`, packed for dynamic context parallelism."""

    def sample_of(number: int) -> Sample:
        tokens, labels, documents = (each.numpy() for each in _sample(plan, number))
        num_padding = plan.job.seq_len - _num_useful(plan, number)
        return Sample(tokens, labels, documents if plan.job.packing else None, num_padding=num_padding)

    return DynamicSteps(dynamic_grid(plan, mesh), sample_of, plan.job.global_batch, plan.job.seq_len)


def _losses(result: StepResult) -> dict[str, float]:
    """The losses, and of the routers' metrics the exact ones: others are rounded to fp32, or are of this rank alone."""
    aux = {n: value for n, value in result.aux.items() if n == "router/dropped" or not n.startswith("router/")}
    return {"ce": result.loss, **aux}


def _count_unobserved_calls(parts: Parts, results: RankResults) -> None:
    """Count what no observer sees: calls of torch's FSDP and the pipeline, by what they had to carry, and exchanges of
    the packages for tokens."""
    if isinstance(parts.runner, Pipelined):
        results.calls["pp", "send"] += sum(count for _, count in parts.runner.pipeline.traffic())
    if isinstance(parts.data, Fsdp):
        for shard in parts.data.shards:
            results.calls[shard.groups.shards.name, "fsdp"] += 1
            if not shard.groups.replicas.is_trivial:
                results.calls[shard.groups.replicas.name, "fsdp"] += 1
    for module in (module for chunk in parts.chunks.values() for module in chunk.modules()):
        if isinstance(module, MoeLayer) and isinstance(module.dispatcher, FlexDispatcher):
            results.calls["ep", "dispatch"] += module.dispatcher.num_dispatches


def _record_weights_and_states(parts: Parts, results: RankResults) -> None:
    parts.data.finish_param_sync()
    for name, placement, memory, start in parts.data.local_tensors():
        results.weights += shard_values(name, placement, memory.detach(), start)
    owned = {shard.name: shard for shard in parts.data.owned}
    for name, value in parts.optimizer.state_dict().items():
        shard = owned.get(name.partition(".")[2])
        if shard is not None:
            results.states += shard_values(name, shard.placement, value.view(-1), shard.start)
    for chunk in parts.chunks.values():
        results.biases |= {name: buffer.to("cpu", copy=True) for name, buffer in chunk.named_buffers()}


class _GradientRecorder:
    """The plan's data parallelism, which also records the gradients when they are complete."""

    def __init__(self, parts: Parts, into: ShardValues) -> None:
        self.parts, self.inner, self.into = parts, parts.data, into

    def finish_grad_sync(self) -> None:
        self.inner.finish_grad_sync()
        frozen = set(self.inner.frozen)
        for owned in self.inner.owned:
            if owned.name in frozen:
                continue
            grad = torch.zeros_like(owned.value) if owned.grad is None else owned.grad
            self.into += shard_values(owned.name, owned.placement, grad, owned.start)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


def shard_values(name: str, placement: Placement, memory: Tensor, start: int | None) -> ShardValues:
    """Copies in host memory of the rectangles that a shard, or its flat elements from `start` on, holds."""
    chunks = CheckpointShard(placement, memory, start).chunks
    return [(name, placement.shape, offsets, chunk.to("cpu", copy=True)) for offsets, chunk in chunks.items()]


def synthetic_batch(plan: Plan, step: int, microbatch: int, dp_rank: int) -> Batch:
    """A made-up microbatch: documents of uneven length, some labels missing, in some samples all of them, every sample
    different. Those of fine-tuning are padded."""
    job = plan.job
    first = (microbatch * plan.layout.dp + dp_rank) * job.micro_batch + step * job.global_batch
    numbers = range(first, first + job.micro_batch)
    rows = [_sample(plan, number) for number in numbers]
    tokens, labels, documents = (torch.stack(each) for each in zip(*rows, strict=True))
    batch = Batch(tokens, labels, documents if job.packing else None)
    if job.task == "sft":
        batch = replace(batch, num_useful_B=torch.tensor([_num_useful(plan, number) for number in numbers]))
    return batch if plan.model.vision is None else add_images(plan.model.vision, batch, first)


def _num_useful(plan: Plan, number: int) -> int:
    """The tokens of a sample that are no padding."""
    length = plan.job.seq_len
    return length - number % 4 * (length // 5) if plan.job.task == "sft" else length


def _sample(plan: Plan, number: int) -> tuple[Tensor, Tensor, Tensor]:
    draw = torch.Generator().manual_seed(1000 + number)
    length = plan.job.seq_len
    tokens = torch.randint(plan.model.vocab, (length + 1,), generator=draw)
    ignored = torch.rand(length, generator=draw) < 0.1 * (1 + number % 3)
    if number % _UNLABELED == _UNLABELED - 1:  # as where a prompt fills its sequence in fine-tuning
        ignored = torch.ones(length, dtype=torch.bool)
    starts = torch.rand(length, generator=draw) < 3.0 / length
    num_useful = _num_useful(plan, number)
    ignored[num_useful:] = True
    starts[num_useful : num_useful + 1] = True  # padding is a document of its own
    return tokens[:-1], tokens[1:].masked_fill(ignored, IGNORE), starts.long().cumsum(0)


class _TieFinder:
    """Counts choices of experts that a small change of the scores would turn, and with a capacity factor the copies
    that it would keep or drop. The latter are asked of one rank, which sees all tokens of a microbatch."""

    def __init__(self, parts: Parts, results: RankResults, capacity_factor: float | None) -> None:
        self.routers = [r for chunk in parts.chunks.values() for r in chunk.routers() if not r.forced_balance]
        self.results, self.capacity_factor = results, capacity_factor

    def __enter__(self) -> None:
        self.handles = [router.register_forward_hook(self._count_ties) for router in self.routers]

    def __exit__(self, *error: object) -> None:
        for handle in self.handles:
            handle.remove()

    def _count_ties(self, router: Router, inputs: Any, routing: Any) -> None:
        if context.recording_graph:
            return  # a graph records nothing that waits for the device
        draw = torch.Generator().manual_seed(0)
        size = _NUDGE[routing.logits_TE.dtype]
        noise = 1 + size * (torch.rand(routing.logits_TE.shape, generator=draw, dtype=torch.float64) - 0.5)
        noise = noise.to(routing.logits_TE.device)
        logits = (routing.logits_TE.detach() * noise).to(routing.logits_TE.dtype)
        scores = (routing.scores_TE.detach() * noise).to(routing.scores_TE.dtype)
        if router.expert_of_token is None:  # a table is not turned by scores
            self.results.near_ties += int((router.choose_experts(logits, scores) != routing.expert_TK).sum())
        if self.capacity_factor is not None:
            self.results.near_ties += self._count_capacity_ties(routing, size, draw)

    def _count_capacity_ties(self, routing: Any, size: float, draw: torch.Generator) -> int:
        expert_TK, weight_TK = routing.expert_TK, routing.weight_TK.detach()
        capacity = Capacity(self.capacity_factor or 1.0, routing.logits_TE.shape[1])
        noise = 1 + size * (torch.rand(weight_TK.shape, generator=draw, dtype=torch.float64) - 0.5)
        noise = noise.to(weight_TK.device)
        dropped, nudged = (
            capacity.sort_and_pad(expert_TK, weights)[0].row_TK < 0
            for weights in (weight_TK, (weight_TK * noise).to(weight_TK.dtype))
        )
        return int((dropped != nudged).sum())
