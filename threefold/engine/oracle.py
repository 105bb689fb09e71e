"""The oracle: a layout must give the loss, the gradients and, after some steps, the weights of one rank, in fp64.

Every rank sends home the rectangles it owns; together they must be every parameter, once. The one-rank run works on
the same microbatches. Near ties of the router would make the comparison a matter of luck: they are looked for.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from threefold.engine.build import Parts, build, options_of
from threefold.engine.data.loader import Batch
from threefold.engine.loss import IGNORE
from threefold.engine.mesh import Mesh
from threefold.engine.moe.router import Router
from threefold.engine.options import Options
from threefold.engine.pieces import Piece
from threefold.engine.ranks import run_ranks
from threefold.engine.shard.placement import Placement
from threefold.engine.step import train_step
from threefold.layout.degrees import Layout
from threefold.plan.plan import Plan

LR = 1e-3
_NUDGE = 1e-9  # of the router's scores: no choice may depend on it

Pieces = list[tuple[str, tuple[int, ...], tuple[int, ...], Tensor]]  # name, whole shape, offsets, values


@dataclass
class Observed:
    """What one rank saw."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    gradients: Pieces = field(default_factory=list)  # of the first step; what this rank owns
    weights: Pieces = field(default_factory=list)  # behind the last step; all this rank holds
    biases: dict[str, Tensor] = field(default_factory=dict)
    near_ties: int = 0


@dataclass(frozen=True)
class Comparison:
    """Largest relative differences to one rank; `worst` names the parameter of the gradient's."""

    loss: float
    gradient: float
    weight: float
    bias: float
    worst: str
    near_ties: int

    @property
    def largest(self) -> float:
        return max(self.loss, self.gradient, self.weight, self.bias)


def compare(
    plan: Plan,
    steps: int = 3,
    dtype: torch.dtype = torch.float64,
    options: Options | None = None,
    limit: float = 120.0,
) -> Comparison:
    """Run the plan on forked ranks and on one, and compare."""
    options = options or replace(options_of(plan), expert_backend="loop")
    alone = one_rank(plan, steps, dtype, options)
    ranks = run_ranks(plan.layout.gpus, on_rank, plan, steps, dtype, options, limit=limit)
    return judge(alone, ranks)


def one_rank(plan: Plan, steps: int, dtype: torch.dtype, options: Options) -> Observed:
    """The same microbatches, one after the other, on a model that is whole."""
    job = replace(plan.job, dynamic_length=False)
    knobs = replace(plan.knobs, data_parallel="zero1", cp_comm="p2p", dispatcher="local")
    return on_rank(0, replace(plan, layout=Layout(), job=job, knobs=knobs), steps, dtype, options)


def on_rank(rank: int, plan: Plan, steps: int, dtype: torch.dtype, options: Options) -> Observed:
    mesh = Mesh(plan.layout, rank)
    parts = build(plan, mesh, dtype=dtype, options=options, with_data=False)
    seen = Observed()
    with _TieFinder(parts, seen):
        for step in range(steps):
            batches = [batch_of(plan, step, m, mesh.place("dp")) for m in range(plan.num_microbatches)]
            noting = replace(parts, data=_Noting(parts, seen.gradients)) if step == 0 else parts
            result = train_step(noting, batches, LR, plan.job)
            seen.losses.append(result.loss)
            seen.norms.append(result.grad_norm)
    parts.data.wait_gathered()
    for name, placement, memory, first in parts.data.held():
        seen.weights += pieces_of(name, placement, memory.detach(), first)
    for chunk in parts.chunks.values():
        for name, buffer in chunk.named_buffers():
            seen.biases[name] = buffer.clone()
    return seen


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
        noise = 1 + _NUDGE * (torch.rand(routing.logits_TE.shape, generator=draw, dtype=torch.float64) - 0.5)
        logits = (routing.logits_TE.detach() * noise).to(routing.logits_TE.dtype)
        scores = (routing.scores_TE.detach() * noise).to(routing.scores_TE.dtype)
        self.seen.near_ties += int((router.choose(logits, scores) != routing.expert_TK).sum())


def judge(alone: Observed, ranks: list[Observed]) -> Comparison:
    """Differences relative to the largest element of the one-rank tensor."""
    wanted, worst = _assemble([alone.gradients], once=True), ("", 0.0)
    found = _assemble([seen.gradients for seen in ranks], once=True)
    assert wanted.keys() == found.keys(), wanted.keys() ^ found.keys()
    for name, value in wanted.items():
        difference = relative(found[name], value)
        worst = max(worst, (name, difference), key=lambda pair: pair[1])
    weight = max(_copy_differences(_assemble([alone.weights], once=True), ranks), default=0.0)
    losses = [
        abs(a - b) / abs(b)
        for seen in ranks
        for a, b in zip([*seen.losses, *seen.norms], [*alone.losses, *alone.norms], strict=True)
    ]
    biases = [relative(value, alone.biases[name]) for seen in ranks for name, value in seen.biases.items()]
    ties = sum(seen.near_ties for seen in (alone, *ranks))
    return Comparison(max(losses), worst[1], weight, max(biases, default=0.0), worst[0], ties)


def _assemble(pieces: list[Pieces], once: bool) -> dict[str, Tensor]:
    whole_of: dict[str, Tensor] = {}
    times: dict[str, Tensor] = {}
    for name, shape, offsets, values in (piece for rank in pieces for piece in rank):
        if name not in whole_of:
            whole_of[name] = torch.zeros(shape, dtype=values.dtype)
            times[name] = torch.zeros(shape, dtype=torch.int)
        at = tuple(slice(o, o + n) for o, n in zip(offsets, values.shape, strict=True))
        whole_of[name][at] = values
        times[name][at] += 1
    if once:
        for name, count in times.items():
            assert (count == 1).all(), f"{name}: elements owned by {count.min()} to {count.max()} ranks"
    return whole_of


def _copy_differences(wanted: dict[str, Tensor], ranks: list[Observed]) -> Iterator[float]:
    """Every copy on every rank, not only the owner's."""
    for seen in ranks:
        for name, _, offsets, values in seen.weights:
            at = tuple(slice(o, o + n) for o, n in zip(offsets, values.shape, strict=True))
            yield float((values - wanted[name][at]).abs().max() / wanted[name].abs().max()) if values.numel() else 0.0


def relative(found: Tensor, wanted: Tensor) -> float:
    """To the largest element; where one rank has nothing but zeros, the difference itself."""
    if not wanted.numel():
        return 0.0
    size = float(wanted.abs().max())
    return float((found - wanted).abs().max()) / (size or 1.0)
