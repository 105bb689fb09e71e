"""The oracle: a layout must give the losses, the gradients and, after some steps, the weights of one rank, in fp64.

Every rank sends home the rectangles it owns; together they must be every parameter, once. The one-rank run works on
the same microbatches. Near ties of the router would make the comparison a matter of luck: they are looked for.
"""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from threefold.engine.agreement import Comparison, Observed, Pieces, judge
from threefold.engine.build import Parts, build, options_of
from threefold.engine.data.loader import Batch
from threefold.engine.loss import IGNORE
from threefold.engine.mesh import Mesh
from threefold.engine.moe.router import Router
from threefold.engine.options import Options
from threefold.engine.pieces import Piece
from threefold.engine.ranks import run_ranks
from threefold.engine.runner import Piped
from threefold.engine.shard.collectives import Call, observed
from threefold.engine.shard.fsdp import Fsdp
from threefold.engine.shard.placement import Placement
from threefold.engine.step import StepResult, train_step
from threefold.layout.degrees import Layout
from threefold.plan.plan import Knobs, Plan

LR = 1e-3
# Of the router's scores: no choice may depend on it. A thousand times what rounding does to them, a few in fp32, where
# more would find ties everywhere.
_NUDGE = {torch.float64: 1e-9, torch.float32: 1e-6}


def compare(
    plan: Plan,
    steps: int = 3,
    dtype: torch.dtype = torch.float64,
    options: Options | None = None,
    limit: float = 120.0,
) -> Comparison:
    """Run the plan on forked ranks and on one, and compare."""
    options = options or replace(options_of(plan), expert_backend="loop")
    alone = one_rank(plan, steps, dtype, options, limit)
    ranks = run_ranks(plan.layout.gpus, on_rank, plan, steps, dtype, options, limit=limit)
    return judge(plan, alone, ranks)


def one_rank(plan: Plan, steps: int, dtype: torch.dtype, options: Options, limit: float = 120.0) -> Observed:
    """The same microbatches, one after the other, on a model that is whole, with no knob turned that need not be."""
    job = replace(plan.job, dynamic_length=False)
    knobs = Knobs(precision=plan.knobs.precision, optimizer_dtype=plan.knobs.optimizer_dtype, dispatcher="local")
    plain = replace(options, shared_overlap=False, recompute=(), recompute_method=None, recompute_layers=None)
    plain = replace(plain, activation_offload=(), activation_offload_layers=0, expert_fusion=False)
    whole = replace(plan, layout=Layout(), job=job, knobs=knobs)
    # Forked too: with a GPU in the machine, a process that has run a backward can fork no ranks that will.
    (alone,) = run_ranks(1, on_rank, whole, steps, dtype, plain, limit=limit)
    return alone


def on_rank(rank: int, plan: Plan, steps: int, dtype: torch.dtype, options: Options) -> Observed:
    mesh = Mesh(plan.layout, rank)
    parts = build(plan, mesh, dtype=dtype, options=options, with_data=False)
    seen = Observed()

    def note(call: Call) -> None:
        seen.calls[call.group.name, call.operation] += 1

    with _TieFinder(parts, seen), observed(note):
        for step in range(steps):
            batches = [batch_of(plan, step, m, mesh.place("dp")) for m in range(plan.num_microbatches)]
            noting = replace(parts, data=_Noting(parts, seen.gradients)) if step == 0 else parts
            result = train_step(noting, batches, LR, plan.job)
            seen.losses.append(_losses(result))
            seen.norms.append(result.grad_norm)
            seen.skipped += not result.applied
    _note_the_rest(parts, seen)
    _note_kept(parts, seen)
    return seen


def _losses(result: StepResult) -> dict[str, float]:
    """Of the routers' health what is exact: the rest is rounded to fp32, or of this rank alone."""
    aux = {n: value for n, value in result.aux.items() if n == "router/dropped" or not n.startswith("router/")}
    return {"ce": result.loss, **aux}


def _note_the_rest(parts: Parts, seen: Observed) -> None:
    """Calls of torch's and of the pipeline are not observed: that they had something to carry is."""
    if isinstance(parts.runner, Piped):
        seen.calls["pp", "send"] += sum(count for _, count in parts.runner.pipeline.traffic())
    if isinstance(parts.data, Fsdp):
        for shard in parts.data.shards:
            seen.calls[shard.groups.shards.name, "fsdp"] += 1
            if not shard.groups.copies.alone:
                seen.calls[shard.groups.copies.name, "fsdp"] += 1


def _note_kept(parts: Parts, seen: Observed) -> None:
    parts.data.wait_gathered()
    for name, placement, memory, first in parts.data.held():
        seen.weights += pieces_of(name, placement, memory.detach(), first)
    owned = {one.name: one for one in parts.data.owned}
    for name, value in parts.optimizer.state_dict().items():
        one = owned.get(name.partition(".")[2])
        if one is not None:
            seen.states += pieces_of(name, one.placement, value.view(-1), one.first)
    for chunk in parts.chunks.values():
        seen.biases |= {name: buffer.clone() for name, buffer in chunk.named_buffers()}


class _Noting:
    """The plan's way of data parallelism, which writes down the gradients when they are complete."""

    def __init__(self, parts: Parts, into: Pieces) -> None:
        self.parts, self.inner, self.into = parts, parts.data, into

    def finish(self) -> None:
        self.inner.finish()
        for owned in self.inner.owned:
            grad = torch.zeros_like(owned.value) if owned.grad is None else owned.grad
            self.into += pieces_of(owned.name, owned.placement, grad, owned.first)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


def pieces_of(name: str, placement: Placement, memory: Tensor, first: int | None) -> Pieces:
    """Copies of the rectangles that a piece, or its elements from `first` on, holds."""
    parts = Piece(placement, memory, first).parts
    return [(name, placement.shape, offsets, part.clone()) for offsets, part in parts.items()]


def batch_of(plan: Plan, step: int, microbatch: int, dp_rank: int) -> Batch:
    """Made up: uneven documents, labels missing here and there, different for every sample."""
    job = plan.job
    first = (microbatch * plan.layout.dp + dp_rank) * job.micro_batch + step * job.global_batch
    rows = [_sample(plan, first + n) for n in range(job.micro_batch)]
    tokens, labels, documents = (torch.stack(each) for each in zip(*rows, strict=True))
    return Batch(tokens, labels, documents if job.packing else None)


def _sample(plan: Plan, number: int) -> tuple[Tensor, Tensor, Tensor]:
    draw = torch.Generator().manual_seed(1000 + number)
    length = plan.job.seq_len
    tokens = torch.randint(plan.model.vocab, (length + 1,), generator=draw)
    ignored = torch.rand(length, generator=draw) < 0.1 * (1 + number % 3)
    starts = torch.rand(length, generator=draw) < 3.0 / length
    return tokens[:-1], tokens[1:].masked_fill(ignored, IGNORE), starts.long().cumsum(0)


class _TieFinder:
    """Counts choices of experts that a nudge of the scores would change."""

    def __init__(self, parts: Parts, seen: Observed) -> None:
        self.routers = [r for chunk in parts.chunks.values() for r in chunk.routers() if not r.forced_balance]
        self.seen = seen

    def __enter__(self) -> None:
        self.handles = [router.register_forward_hook(self._look) for router in self.routers]

    def __exit__(self, *error: object) -> None:
        for handle in self.handles:
            handle.remove()

    def _look(self, router: Router, given: Any, routing: Any) -> None:
        draw = torch.Generator().manual_seed(0)
        size = _NUDGE[routing.logits_TE.dtype]
        noise = 1 + size * (torch.rand(routing.logits_TE.shape, generator=draw, dtype=torch.float64) - 0.5)
        logits = (routing.logits_TE.detach() * noise).to(routing.logits_TE.dtype)
        scores = (routing.scores_TE.detach() * noise).to(routing.scores_TE.dtype)
        self.seen.near_ties += int((router.choose(logits, scores) != routing.expert_TK).sum())
