"""A model cut over ranks: every axis in one visible order, each a no-op where its degree is 1."""

from dataclasses import dataclass, replace
from functools import cache

import torch

from threefold.engine.mesh import Group, Mesh
from threefold.engine.models.build import make_model
from threefold.engine.models.chunk import prune
from threefold.engine.models.decoder import Decoder
from threefold.engine.models.init import init_weights, materialize
from threefold.engine.options import Options
from threefold.engine.shard.context import shard_context
from threefold.engine.shard.expert import shard_experts
from threefold.engine.shard.fsdp import Shards
from threefold.engine.shard.placement import Placement
from threefold.engine.shard.tensor import shard_tensors
from threefold.layout.degrees import Layout
from threefold.layout.stages import chunk_rank
from threefold.plan.plan import Plan


@dataclass(frozen=True)
class Sharded:
    """What this rank holds: chunks of the model by number, and where each of their parameters lies in the whole."""

    chunks: dict[int, Decoder]
    placements: dict[str, Placement]


def shard(plan: Plan, mesh: Mesh, options: Options, dtype: torch.dtype, seed: int | None) -> Sharded:
    """Cut before there is memory, then fill: no rank ever holds more than its share."""
    whole = make_model(plan.model, plan.mtp, dtype, options)
    found = shard_tensors(whole, mesh, plan.knobs.tp_overlap)
    found |= shard_experts(whole, mesh, plan)
    shard_context(whole, mesh, plan)
    homes = _homes(plan, whole)
    here = mesh.place("pp")
    chunks = {n: prune(whole, plan.chunks, n) for n in chunks_of(plan, here)}
    sizes = [len(model.layers) for model in chunks.values()]
    for model, of_chunk in zip(chunks.values(), options.spread(sizes), strict=True):
        model.options = of_chunk
    placements = {
        name: replace(place, also_on=tuple(sorted(homes[name] - {here})))
        for name, place in found.items()
        if here in homes[name]
    }
    for model in chunks.values():
        materialize(model, mesh.device)
        if seed is not None:
            init_weights(model, type(model).init_std, seed, placements)
    return Sharded(chunks, placements)


def chunks_of(plan: Plan, pp_rank: int) -> list[int]:
    """Numbers of the chunks on a pipeline rank."""
    layout = plan.layout
    v_shaped = layout.pipeline_schedule == "dualpipev"
    return [n for n in range(len(plan.chunks)) if chunk_rank(n, layout.pp, v_shaped) == pp_rank]


def copies_group(mesh: Mesh, placement: Placement) -> Group:
    """The ranks that hold the same piece, this one among them."""
    layout, axes = mesh.layout, placement.copies
    ranks = set(mesh.group(*axes).ranks)
    if placement.shared_by > 1:
        step, count = layout.stride("tp"), placement.shared_by
        shift = mesh.place("tp") // count * count - mesh.place("tp")
        ranks = {rank + (shift + i) * step for rank in ranks for i in range(count)}
    name = " x ".join(axes) + (" x kv" if placement.shared_by > 1 else "")
    if placement.also_on:
        here, step = mesh.place("pp"), layout.stride("pp")
        ranks |= {rank + (other - here) * step for rank in ranks for other in placement.also_on}
        name += " x pp"
    return mesh.of_ranks(name, sorted(ranks))


def cut_group(mesh: Mesh, placement: Placement) -> Group:
    """The ranks whose pieces together are the whole, of the experts this rank holds."""
    return mesh.group("etp") if "edp" in placement.copies else mesh.group("tp")


def shards_of(mesh: Mesh, placement: Placement) -> Shards:
    """The same ranks as FSDP wants them: dense parameters over dp x cp, experts over edp, in `replicate` copies."""
    axes = ("edp",) if "edp" in placement.copies else ("dp", "cp")
    group = mesh.group(*axes)
    size = max(1, group.size // mesh.layout.replicate)
    first = group.rank // size * size
    shards = mesh.of_ranks(" x ".join(axes), group.ranks[first : first + size])
    copies = mesh.of_ranks(f"{' x '.join(axes)} copies", group.ranks[group.rank % size :: size])
    alike = copies_group(mesh, placement)
    return Shards(shards, copies, mesh.of_ranks(alike.name, _beside(mesh.layout, axes, alike.ranks, mesh.rank)))


@cache
def _beside(layout: Layout, axes: tuple[str, ...], ranks: tuple[int, ...], rank: int) -> list[int]:
    """Those of the ranks that are where `rank` is along `axes`."""
    here = [layout.coordinate(axis, rank) for axis in axes]
    return [other for other in ranks if [layout.coordinate(axis, other) for axis in axes] == here]


def _homes(plan: Plan, whole: Decoder) -> dict[str, set[int]]:
    """The pipeline ranks that hold each parameter."""
    homes: dict[str, set[int]] = {}
    for rank in range(plan.layout.pp):
        for number in chunks_of(plan, rank):
            for name, _ in prune(whole, plan.chunks, number).named_parameters():
                homes.setdefault(name, set()).add(rank)
    return homes
