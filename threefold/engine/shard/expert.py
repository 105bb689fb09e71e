"""Expert parallel: blocks of experts cut over `ep`, the width of each over `etp`, and rows sent to where they are."""

import torch
from torch import Tensor, nn

from threefold.engine.dispatch.capacity import by_position
from threefold.engine.dispatch.choose import make_dispatcher
from threefold.engine.dispatch.protocol import AnyDispatcher
from threefold.engine.mesh import Mesh
from threefold.engine.moe.experts import Experts
from threefold.engine.moe.layer import MoeLayer
from threefold.engine.shard.placement import Placement, Range, cut_parameter, even_part
from threefold.engine.shard.zigzag import spans_of
from threefold.plan.plan import Plan


def shard_experts(model: nn.Module, mesh: Mesh, plan: Plan) -> dict[str, Placement]:
    """Cut a model that has no memory yet; where every parameter of its experts lies, by name."""
    placements = {}
    dispatchers: dict[int, AnyDispatcher] = {}  # shared by layers: the buffers of one can be gigabytes
    for path, layer in list(model.named_modules()):
        if isinstance(layer, MoeLayer):
            num_experts = len(layer.experts.down)
            if num_experts not in dispatchers:
                dispatchers[num_experts] = _dispatcher(layer, mesh, plan)
            layer.dispatcher, layer.tokens = dispatchers[num_experts], mesh.group("cp", "tp")
            layer.router.turn = mesh.group("ep", "etp").rank
            layer.experts.adds_bias = mesh.place("etp") == 0
            for name, placement in _places(layer.experts, mesh).items():
                cut_parameter(layer.experts, name, placement)
                placements[f"{path}.experts.{name}" if path else f"experts.{name}"] = placement
    return placements


def _dispatcher(layer: MoeLayer, mesh: Mesh, plan: Plan) -> AnyDispatcher:
    tokens, capacity = mesh.group("cp", "tp"), layer.options.capacity_factor
    order = None
    if capacity is not None and tokens.size > 1:
        order = by_position(_positions(plan.job.seq_len, mesh.layout.cp, mesh.layout.tp))
    return make_dispatcher(
        plan.knobs.dispatcher,
        len(layer.experts.down),
        mesh.group("ep"),
        mesh.group("etp"),
        tokens=tokens,
        capacity_factor=capacity,
        order=order,
        chip=plan.cluster.chip,
        num_sms=plan.knobs.dispatch_sms,
        narrow=plan.knobs.fp8_dispatch,
        news=mesh.beside(mesh.group("ep")) if plan.knobs.ep_overlap else None,
    )


def _positions(length: int, cp: int, tp: int) -> Tensor:
    """Of a sequence, on each rank of cp x tp: what a rank of cp holds is cut into equal parts for tp."""
    held = [place for rank in range(cp) for span in spans_of(length, cp, rank) for place in span]
    return torch.tensor(held).view(cp * tp, -1)


def _places(experts: Experts, mesh: Mesh) -> dict[str, Placement]:
    num_experts, dim, width = experts.down.shape
    layout = mesh.layout
    held = (even_part(num_experts, mesh.place("ep"), layout.ep),)
    part = even_part(width, mesh.place("etp"), layout.etp)
    # Gate and up lie one behind the other, each of the whole width.
    both: tuple[Range, ...] = ((0, 2 * width),) if layout.etp == 1 else (part, (width + part[0], width + part[1]))
    every = ((0, dim),)
    places = {
        "gate_up": Placement((num_experts, 2 * width, dim), (held, both, every), ("edp",)),
        "down": Placement((num_experts, dim, width), (held, every, (part,)), ("edp",)),
        "gate_up_bias": Placement((num_experts, 2 * width), (held, both), ("edp",)),
        "down_bias": Placement((num_experts, dim), (held, every), ("edp", "etp")),
    }
    return {name: place for name, place in places.items() if getattr(experts, name) is not None}
