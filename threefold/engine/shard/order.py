"""Builds this rank's part of a model: every sharding axis in one visible order, each a no-op where its degree is 1.

The order is: tensor parallel, expert parallel, context parallel, recompute and offload, pipeline chunks, and only then
memory and initial weights. `engine/build.py` calls `shard_model`; it also asks which ranks hold copies of a parameter
(`replica_group`), to reduce its gradient over them.
"""

from collections import Counter
from dataclasses import dataclass, replace
from functools import cache

import torch

from threefold.engine.data_parallel.fsdp import ShardGroups
from threefold.engine.dist.mesh import Group, Mesh
from threefold.engine.dist.shard_placement import Placement
from threefold.engine.model_options import Options
from threefold.engine.models.activation_memory import apply_activation_memory, apply_to_layers
from threefold.engine.models.build import make_model
from threefold.engine.models.decoder import Decoder
from threefold.engine.models.init_weights import init_weights, materialize
from threefold.engine.models.pipeline_chunk import extract_chunk
from threefold.engine.shard.context_parallel import shard_context, shard_dynamic_context
from threefold.engine.shard.expert_parallel import shard_experts
from threefold.engine.shard.image_parallel import shard_images
from threefold.engine.shard.tensor_parallel import shard_tensors
from threefold.layout.degrees import Layout
from threefold.layout.stages import chunk_rank
from threefold.plan.plan import Plan


@dataclass(frozen=True)
class ShardedModel:
    """The part of a model that one rank holds."""

    chunks: dict[int, Decoder]  # by number of the pipeline chunk
    placements: dict[str, Placement]  # by name of the parameter: which part of the whole parameter this rank holds


def shard_model(plan: Plan, mesh: Mesh, options: Options, dtype: torch.dtype, seed: int | None) -> ShardedModel:
    """Shard on the meta device, then allocate and initialize: no rank ever holds more than its shard.

    `seed` is None where weights are loaded instead.
    """
    whole = make_model(plan.model, plan.mtp, dtype, options)
    placements_of_whole = shard_tensors(whole, mesh, plan.knobs.tp_overlap)
    placements_of_whole |= shard_experts(whole, mesh, plan)
    (shard_dynamic_context if plan.shards_dynamically else shard_context)(whole, mesh, plan)
    shard_images(whole, mesh)
    apply_activation_memory(whole, options)
    num_chunks = _num_chunks_by_parameter(plan, whole)
    pp_rank = mesh.coordinate("pp")
    chunks = {n: extract_chunk(whole, plan.chunks, n) for n in chunks_on_rank(plan, pp_rank)}
    sizes = [len(model.layers) for model in chunks.values()]
    for model, chunk_options in zip(chunks.values(), options.for_chunks(sizes), strict=True):
        model.options = chunk_options
        apply_to_layers(model, model.layers.values(), chunk_options)
    placements = {
        name: replace(
            placement,
            also_on_pp_ranks=tuple(sorted(num_chunks[name].keys() - {pp_rank})),
            in_several_chunks=max(num_chunks[name].values()) > 1,
        )
        for name, placement in placements_of_whole.items()
        if pp_rank in num_chunks[name]
    }
    for model in chunks.values():
        materialize(model, mesh.device)
        if seed is not None:
            init_weights(model, model.spec.init_std, seed, placements)
    return ShardedModel(chunks, placements)


def chunks_on_rank(plan: Plan, pp_rank: int) -> list[int]:
    """Numbers of the chunks on a pipeline rank."""
    layout = plan.layout
    v_shaped = layout.pipeline_schedule == "dualpipev"
    return [n for n in range(len(plan.chunks)) if chunk_rank(n, layout.pp, v_shaped) == pp_rank]


def replica_group(mesh: Mesh, placement: Placement) -> Group:
    """The ranks that hold the same shard of a parameter, this rank included."""
    layout, axes = mesh.layout, placement.replica_axes
    ranks = set(mesh.group(*axes).ranks)
    if placement.tp_replicas > 1:
        step, count = layout.stride("tp"), placement.tp_replicas
        shift = mesh.coordinate("tp") // count * count - mesh.coordinate("tp")
        ranks = {rank + (shift + i) * step for rank in ranks for i in range(count)}
    name = " x ".join(axes) + (" x kv" if placement.tp_replicas > 1 else "")
    if placement.also_on_pp_ranks:
        pp_rank, step = mesh.coordinate("pp"), layout.stride("pp")
        ranks |= {rank + (other - pp_rank) * step for rank in ranks for other in placement.also_on_pp_ranks}
        name += " x pp"
    return mesh.of_ranks(name, sorted(ranks))


def shard_group(mesh: Mesh, placement: Placement) -> Group:
    """The ranks whose shards together are the whole parameter; for experts, of those that this rank holds."""
    return mesh.group("etp") if "edp" in placement.replica_axes else mesh.group("tp")


def fsdp_groups(mesh: Mesh, placement: Placement) -> ShardGroups:
    """The groups for FSDP: dense parameters are sharded over dp x cp, experts over edp, in `replicate` copies."""
    axes = ("edp",) if "edp" in placement.replica_axes else ("dp", "cp")
    group = mesh.group(*axes)
    size = max(1, group.size // mesh.layout.replicate)
    first = group.rank // size * size
    shards = mesh.of_ranks(" x ".join(axes), group.ranks[first : first + size])
    copies = mesh.of_ranks(f"{' x '.join(axes)} copies", group.ranks[group.rank % size :: size])
    replicas = replica_group(mesh, placement)
    others = _ranks_alike_along(mesh.layout, axes, replicas.ranks, mesh.rank)
    return ShardGroups(shards, copies, mesh.of_ranks(replicas.name, others))


@cache
def _ranks_alike_along(layout: Layout, axes: tuple[str, ...], ranks: tuple[int, ...], rank: int) -> list[int]:
    """The ones of `ranks` that have the coordinates of `rank` along `axes`."""
    coordinates = [layout.coordinate(axis, rank) for axis in axes]
    return [other for other in ranks if [layout.coordinate(axis, other) for axis in axes] == coordinates]


def _num_chunks_by_parameter(plan: Plan, whole: Decoder) -> dict[str, Counter[int]]:
    """The pipeline ranks that hold each parameter, and in how many of its chunks each of them does."""
    num_chunks: dict[str, Counter[int]] = {}
    for rank in range(plan.layout.pp):
        for number in chunks_on_rank(plan, rank):
            for name, _ in extract_chunk(whole, plan.chunks, number).named_parameters():
                num_chunks.setdefault(name, Counter())[rank] += 1
    return num_chunks
