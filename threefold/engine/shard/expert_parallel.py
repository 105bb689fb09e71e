"""Expert parallelism: blocks of experts are sharded over `ep`, the width of each over `etp`.

Every MoE layer gets the dispatcher that sends token rows to the ranks of their experts. `order.py` calls this.
"""

from dataclasses import replace

import torch
from torch import Tensor, nn

from threefold.engine.dispatch.alltoall import AllToAllDispatcher
from threefold.engine.dispatch.capacity import order_by_position
from threefold.engine.dispatch.protocol import AnyDispatcher
from threefold.engine.dispatch.select import make_dispatcher
from threefold.engine.dist.mesh import Mesh
from threefold.engine.dist.shard_placement import Placement, Range, even_range, shard_parameter
from threefold.engine.models.decoder import Decoder
from threefold.engine.moe.copies import CopiedExperts
from threefold.engine.moe.experts import Experts
from threefold.engine.moe.layer import MoeLayer
from threefold.engine.shard.sequence_layout import rank_spans
from threefold.plan.plan import Plan


def shard_experts(model: nn.Module, mesh: Mesh, plan: Plan) -> dict[str, Placement]:
    """Shard the experts of a model on the meta device; the placement of each of their parameters, by name."""
    placements = {}
    if isinstance(model, Decoder) and model.options.block_factor is not None:
        model.all_ranks = mesh.world
    dispatchers: dict[int, AnyDispatcher] = {}  # shared by layers, because the buffers of one can be gigabytes
    for path, layer in list(model.named_modules()):
        if isinstance(layer, MoeLayer):
            num_experts = len(layer.experts.down)
            if num_experts not in dispatchers:
                dispatchers[num_experts] = _make_dispatcher(layer, mesh, plan)
            layer.dispatcher, layer.token_group = dispatchers[num_experts], mesh.group("cp", "tp")
            layer.router.expert_group_rank = mesh.group("ep", "etp").rank
            layer.experts.adds_bias = mesh.coordinate("etp") == 0
            for name, placement in _expert_placements(layer.experts, mesh).items():
                shard_parameter(layer.experts, name, placement)
                placements[f"{path}.experts.{name}" if path else f"experts.{name}"] = placement
            if slots := plan.expert_slots:
                assert isinstance(layer.dispatcher, AllToAllDispatcher)
                layer.copies = CopiedExperts(layer.experts, mesh.group("ep"), slots, f"{path}.experts")
                layer.dispatcher = replace(layer.dispatcher, slots=layer.copies)
    return placements


def _make_dispatcher(layer: MoeLayer, mesh: Mesh, plan: Plan) -> AnyDispatcher:
    token_group, capacity = mesh.group("cp", "tp"), layer.options.capacity_factor
    token_order = None
    if capacity is not None and token_group.size > 1:
        token_order = order_by_position(_positions_by_rank(plan.job.seq_len, mesh.layout.cp, mesh.layout.tp))
    return make_dispatcher(
        plan.knobs.dispatcher,
        len(layer.experts.down),
        mesh.group("ep"),
        mesh.group("etp"),
        token_group=token_group,
        capacity_factor=capacity,
        token_order=token_order,
        chip=plan.chip.name,
        num_sms=plan.knobs.dispatch_sms,
        fp8_rows=plan.knobs.fp8_dispatch,
        count_group=mesh.second_communicator(mesh.group("ep")) if plan.knobs.ep_overlap else None,
    )


def _positions_by_rank(length: int, cp: int, tp: int) -> Tensor:
    """The positions of a sequence on each rank of cp x tp: a cp rank's zigzag shard, in equal parts for tp."""
    positions = [position for rank in range(cp) for span in rank_spans(length, cp, rank) for position in span]
    return torch.tensor(positions).view(cp * tp, -1)


def _expert_placements(experts: Experts, mesh: Mesh) -> dict[str, Placement]:
    num_experts, dim, width = experts.down.shape
    layout = mesh.layout
    local_experts = (even_range(num_experts, mesh.coordinate("ep"), layout.ep),)
    columns = even_range(width, mesh.coordinate("etp"), layout.etp)
    # The fused weight holds all columns of gate, then all columns of up; a rank takes the same columns of both.
    fc1_width = experts.gate_up.shape[1]
    fc1_parts = [(first + columns[0], first + columns[1]) for first in range(0, fc1_width, width)]
    gate_and_up: tuple[Range, ...] = ((0, fc1_width),) if layout.etp == 1 else tuple(fc1_parts)
    whole_dim = ((0, dim),)
    placements = {
        "gate_up": Placement((num_experts, fc1_width, dim), (local_experts, gate_and_up, whole_dim), ("edp",)),
        "down": Placement((num_experts, dim, width), (local_experts, whole_dim, (columns,)), ("edp",)),
        "gate_up_bias": Placement((num_experts, fc1_width), (local_experts, gate_and_up), ("edp",)),
        "down_bias": Placement((num_experts, dim), (local_experts, whole_dim), ("edp", "etp")),
    }
    if experts.lora is not None:
        # The result of a rank of ETP is a part of a sum: so are the gradients of what every such rank has a copy of.
        rank, both = ((0, experts.lora.rank),), ("edp", "etp")
        sizes = num_experts, experts.lora.rank
        placements |= {
            "gate_up_lora_a": Placement((*sizes, dim), (local_experts, rank, whole_dim), both),
            "gate_up_lora_b": Placement(
                (num_experts, fc1_width, sizes[1]), (local_experts, gate_and_up, rank), ("edp",)
            ),
            "down_lora_a": Placement((*sizes, width), (local_experts, rank, (columns,)), ("edp",)),
            "down_lora_b": Placement((num_experts, dim, sizes[1]), (local_experts, whole_dim, rank), both),
        }
    return {name: placement for name, placement in placements.items() if getattr(experts, name) is not None}
