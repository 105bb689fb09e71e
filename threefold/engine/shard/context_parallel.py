"""Context parallelism: each rank holds a shard of every sequence, and attention works over all of them.

`order.py` calls `shard_context`, which replaces the attention function of every mixer. With dynamic context parallelism
the degree changes from microbatch to microbatch: `shard_dynamic_context` makes the process groups of every degree at
the start and gives each mixer its function for each of them. The microbatch runner then calls `Decoder.use_cp_degree`
before a forward (`schedule/microbatch_runners.py`); the backward follows before the next forward, so that a recompute
sees the same degree.

Shapes: B batch, H query heads, G key/value heads, S this rank's shard of the sequence, D head dim.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from threefold.engine.attention.backend import attend
from threefold.engine.attention.gated_delta import GatedDelta
from threefold.engine.attention.gqa import GqaAttention
from threefold.engine.attention.mask_tiles import AttentionMask, host_documents
from threefold.engine.attention.mla import MlaAttention
from threefold.engine.attention.state_space.mamba import Mamba
from threefold.engine.autograd.recompute import is_recomputed, recompute_output
from threefold.engine.context import count_event
from threefold.engine.device import device_type
from threefold.engine.dist.mesh import TRIVIAL_GROUP, Group, Mesh
from threefold.engine.layers.positions import DocumentBounds, document_bounds
from threefold.engine.models.decoder import Decoder
from threefold.engine.moe.layer import MoeLayer
from threefold.engine.shard.latent_attention import LatentExchange
from threefold.engine.shard.recurrent_context import ContextParallelDelta, ContextParallelMamba
from threefold.engine.shard.ring_attention import AllGatherAttention, RingAttention, ShardedMask
from threefold.engine.shard.sequence_layout import heads_to_sequence, sequence_to_heads, shard_sequence
from threefold.layout.degrees import cp_degrees
from threefold.plan.plan import Plan


@dataclass(frozen=True)
class ContextParallelAttention:
    """`backend.attend` where each rank holds a zigzag shard of the sequence; documents and bounds are of the whole.

    The knob `cp_comm` says how: `p2p` passes keys and values round a ring, `all_gather` gathers them, `a2a` exchanges
    sequence for heads (Ulysses), and `a2a+p2p` does the exchange inside a fast domain and the ring between domains.
    """

    cp_comm: str
    group: Group
    inner_group: Group = TRIVIAL_GROUP  # for `a2a+p2p`: the ranks that exchange heads
    outer_group: Group = TRIVIAL_GROUP  # for `a2a+p2p`: the ranks of the ring

    def __post_init__(self) -> None:
        if self.cp_comm == "a2a+p2p":
            assert self.inner_group.size * self.outer_group.size == self.group.size
            assert self.outer_group.rank * self.inner_group.size + self.inner_group.rank == self.group.rank

    def __call__(
        self,
        q_BHSD: Tensor,
        k_BGSD: Tensor,
        v_BGSD: Tensor,
        *,
        scale: float,
        window: int | None = None,
        sinks: Tensor | None = None,
        documents_BS: Tensor | None = None,
        bounds: DocumentBounds | None = None,
    ) -> Tensor:
        ulysses_group = {"a2a": self.group, "a2a+p2p": self.inner_group}.get(self.cp_comm, TRIVIAL_GROUP)
        ring_group = {"a2a": TRIVIAL_GROUP, "a2a+p2p": self.outer_group}.get(self.cp_comm, self.group)
        length = self.group.size * q_BHSD.shape[2]
        if sinks is not None:
            sinks = sinks.chunk(ulysses_group.size)[ulysses_group.rank]
        # Where queries, keys and values are recomputed, their exchanged copies are recomputed with them.
        exchange = partial(_to_heads, ulysses_group, self.cp_comm in ("p2p", "a2a+p2p"))
        with recompute_output(exchange, q_BHSD, k_BGSD, v_BGSD, enabled=is_recomputed(v_BGSD)) as (q, k, v):
            if ring_group.is_trivial:
                out = attend(q, k, v, scale=scale, window=window, sinks=sinks, documents_BS=documents_BS, bounds=bounds)
            else:
                documents = None if documents_BS is None else host_documents(documents_BS, bounds)
                sharded_mask = ShardedMask(ring_group, AttentionMask(window, documents), length, scale)
                count_event("attention", f"tiles over {ring_group.size} ranks, {self.cp_comm}")
                function = AllGatherAttention if self.cp_comm == "all_gather" else RingAttention
                out = function.apply(q, k, v, sinks, sharded_mask)
        return heads_to_sequence(out.transpose(1, 2), ulysses_group).transpose(1, 2)


def _to_heads(group: Group, is_ring: bool, *parts: Tensor) -> tuple[Tensor, ...]:
    """`sequence_to_heads` for queries, keys and values of shape (B, H, S, D); a ring sends contiguous keys and
    values."""
    q, k, v = (x.transpose(1, 2) for x in sequence_to_heads([x.transpose(1, 2) for x in parts], group))
    return (q, k.contiguous(), v.contiguous()) if is_ring else (q, k, v)


Mixer = GatedDelta | GqaAttention | Mamba | MlaAttention


@dataclass(frozen=True)
class CpGroups:
    """The ranks of one context-parallel exchange."""

    group: Group  # all of them
    inner: Group  # for `a2a+p2p`: those that exchange heads
    outer: Group  # for `a2a+p2p`: those of the ring


def make_cp_groups(mesh: Mesh, plan: Plan, degree: int) -> CpGroups:
    """The groups of `degree` neighboring ranks of `cp`, which begin at a multiple of it.

    For `a2a+p2p` ranks of one fast domain exchange heads; within a single domain only the ring is left.
    """
    all_ranks, size = mesh.group("cp"), min(plan.cp_inner, degree)
    first = all_ranks.rank // degree * degree
    group = all_ranks
    if degree < all_ranks.size:
        group = mesh.of_ranks(f"cp {degree}", all_ranks.ranks[first : first + degree])
    if "a2a+p2p" not in {plan.knobs.cp_comm, *plan.knobs.cp_comm}:
        return CpGroups(group, TRIVIAL_GROUP, TRIVIAL_GROUP)
    first = group.rank // size * size
    inner = mesh.of_ranks("cp inner", group.ranks[first : first + size])
    return CpGroups(group, inner, mesh.of_ranks("cp outer", group.ranks[group.rank % size :: size]))


def shard_context(model: Decoder, mesh: Mesh, plan: Plan) -> None:
    """Let every mixer work over the ranks of `cp`, and let the model shard the sequences it is given."""
    group = mesh.group("cp")
    if group.is_trivial:
        return
    groups = make_cp_groups(mesh, plan, group.size)
    model.shard_sequence = partial(shard_sequence, group=group, dim=1)
    for name, module in model.named_modules():
        if isinstance(module, Mixer):
            setattr(module, *mixer_function(module, plan, cp_comm_of_layer(plan, name), groups))


def mixer_function(module: Mixer, plan: Plan, cp_comm: str, groups: CpGroups) -> tuple[str, Callable[..., Tensor]]:
    """The attribute of a mixer that makes it work over ranks, and the function to put there."""
    if isinstance(module, GatedDelta):
        return "mix_over_ranks", ContextParallelDelta(cp_comm, groups.group)
    if isinstance(module, Mamba):
        return "mix_over_ranks", ContextParallelMamba(cp_comm, groups.group)
    if isinstance(module, MlaAttention) and plan.exchanges_latents:
        inner, outer = {
            "a2a": (groups.group, TRIVIAL_GROUP),
            "a2a+p2p": (groups.inner, groups.outer),
        }.get(cp_comm, (TRIVIAL_GROUP, groups.group))
        return "attend_over_ranks", LatentExchange(inner, outer, gathers_outer=cp_comm == "all_gather")
    return "attention_fn", ContextParallelAttention(cp_comm, groups.group, groups.inner, groups.outer)


def cp_comm_of_layer(plan: Plan, name: str) -> str:
    """The knob's value for the layer in a module's name; MTP depths do as the last layer does."""
    layer_choices = plan.knobs.cp_comm
    if isinstance(layer_choices, str):
        return layer_choices
    parts = name.split(".")
    return layer_choices[int(parts[1])] if parts[0] == "layers" and len(parts) > 1 else layer_choices[-1]


@dataclass
class DegreeSwitch:
    """The degree of the present microbatch, and what changes with it."""

    degree: int
    full_degree: int
    moe_layers: list[MoeLayer] = field(default_factory=list)
    token_groups: dict[int, Group] = field(default_factory=dict)  # the ranks over which a microbatch is spread

    def use(self, degree: int | None) -> None:
        """Run the next microbatch at a degree; None is the degree of the layout."""
        self.degree = degree or self.full_degree
        for layer in self.moe_layers:
            layer.token_group = self.token_groups[self.degree]


@dataclass(frozen=True)
class ByDegree:
    """A function for each degree; a call goes to that of the present one."""

    switch: DegreeSwitch
    functions: Mapping[int, Callable[..., Any]]

    def __call__(self, *inputs: Any, **options: Any) -> Any:
        return self.functions[self.switch.degree](*inputs, **options)


def shard_dynamic_context(model: Decoder, mesh: Mesh, plan: Plan) -> None:
    """Let every mixer work over the ranks of any degree, and let the model switch between degrees."""
    cp = mesh.layout.cp
    switch = DegreeSwitch(cp, cp)
    # All ranks make the groups of the larger degrees first, so that no two wait for each other.
    groups = {degree: make_cp_groups(mesh, plan, degree) for degree in reversed(cp_degrees(cp))}
    switch.token_groups = {degree: _token_group(mesh, degree) for degree in groups}
    shards = {degree: partial(shard_sequence, group=each.group, dim=1) for degree, each in groups.items()}
    model.shard_sequence = ByDegree(switch, shards)
    model.use_cp_degree = switch.use
    for name, module in model.named_modules():
        if isinstance(module, MoeLayer):
            switch.moe_layers.append(module)
        elif isinstance(module, Mixer):
            cp_comm = cp_comm_of_layer(plan, name)
            slot, _ = mixer_function(module, plan, cp_comm, groups[cp])
            functions = {degree: _function(module, plan, cp_comm, each) for degree, each in groups.items()}
            setattr(module, slot, ByDegree(switch, functions))


def _token_group(mesh: Mesh, degree: int) -> Group:
    """The ranks of a block of `degree` CP ranks and of their tensor-parallel groups."""
    layout = mesh.layout
    first = mesh.coordinate("cp") // degree * degree
    block = range(first, first + degree)
    ranks = [rank for rank in mesh.group("cp", "tp").ranks if layout.coordinate("cp", rank) in block]
    return mesh.of_ranks("cp x tp" if degree == layout.cp else f"cp {degree} x tp", ranks)


def _function(module: Mixer, plan: Plan, cp_comm: str, groups: CpGroups) -> Callable[..., Any]:
    """The function that a mixer calls at one degree. A single rank needs no exchange; latents are expanded span by span
    there too, because saving them expanded would take more memory than at any other degree."""
    slot, function = mixer_function(module, plan, cp_comm, groups)
    if not groups.group.is_trivial or slot == "attend_over_ranks":
        return function
    return type(module).mix if isinstance(module, GatedDelta | Mamba) else attend_each_document


def attend_each_document(
    q_BHSD: Tensor,
    k_BGSD: Tensor,
    v_BGSD: Tensor,
    *,
    documents_BS: Tensor | None = None,
    bounds: DocumentBounds | None = None,
    **options: Any,
) -> Tensor:
    """`attend` for a row of short documents. The CPU's kernel would compute the whole square of the row and mask it, so
    that it is given one document after the other."""
    if documents_BS is None or len(documents_BS) > 1 or device_type(q_BHSD.device) == "cuda":
        return attend(q_BHSD, k_BGSD, v_BGSD, documents_BS=documents_BS, bounds=bounds, **options)
    edges = (bounds or document_bounds(documents_BS)).edges_on_host()
    sizes = [stop - start for start, stop in pairwise(edges)]
    parts = zip(*(x.split(sizes, dim=2) for x in (q_BHSD, k_BGSD, v_BGSD)), strict=True)
    return torch.cat([attend(*part, **options) for part in parts], dim=2)
