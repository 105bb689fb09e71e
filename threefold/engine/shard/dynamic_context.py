"""Dynamic context parallelism: the degree of context parallelism changes from microbatch to microbatch.

`shard_dynamic_context` makes the process groups of every degree at the start and gives each mixer its function for each
of them. The microbatch runner then calls `Decoder.use_cp_degree` before a forward (`schedule/microbatch_runners.py`);
the backward follows before the next forward, so that a recompute sees the same degree.
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
from threefold.engine.attention.state_space.mamba import Mamba
from threefold.engine.device import device_type
from threefold.engine.dist.mesh import Group, Mesh
from threefold.engine.layers.positions import DocumentBounds, document_bounds
from threefold.engine.models.decoder import Decoder
from threefold.engine.moe.layer import MoeLayer
from threefold.engine.shard.context_parallel import CpGroups, Mixer, cp_comm_of_layer, make_cp_groups, mixer_function
from threefold.engine.shard.sequence_layout import shard_sequence
from threefold.layout.dynamic_cp import cp_degrees
from threefold.plan.plan import Plan


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
    """What a mixer calls at one degree. A single rank needs no exchange; latents are expanded span by span there too,
    because saving them expanded would take more memory than at any other degree."""
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
