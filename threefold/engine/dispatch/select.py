"""Makes the dispatcher that the knob `dispatcher` of a plan names, for the ranks at hand.

`shard/expert_parallel.py` calls `make_dispatcher` once for the layers of a model that have the same number of experts.
"""

from threefold.engine.dispatch.alltoall import AllToAllDispatcher
from threefold.engine.dispatch.capacity import Capacity, TokenOrder
from threefold.engine.dispatch.deepep import DeepEpDispatcher
from threefold.engine.dispatch.hybridep import HybridEpDispatcher
from threefold.engine.dispatch.local import LocalDispatcher
from threefold.engine.dispatch.protocol import AnyDispatcher
from threefold.engine.dist.mesh import TRIVIAL_GROUP, Group
from threefold.findings import Finding, FindingsError

_FLEX = {"deepep": DeepEpDispatcher, "hybridep": HybridEpDispatcher}


def make_dispatcher(
    name: str,
    num_experts: int,
    ep: Group = TRIVIAL_GROUP,
    etp: Group = TRIVIAL_GROUP,
    *,
    token_group: Group = TRIVIAL_GROUP,  # the ranks over which the tokens of a microbatch are spread (CP x TP)
    token_order: TokenOrder | None = None,  # where each of their tokens stands in the microbatch, for a capacity
    capacity_factor: float | None = None,  # None: dropless
    chip: str = "cpu",
    num_sms: int | None = None,  # SMs that a flex package may use; None: its own choice
    fp8_rows: bool = False,  # the all-to-all dispatcher sends rows in FP8
    count_group: Group | None = None,  # a second EP communicator, so that counts do not queue behind rows
) -> AnyDispatcher:
    """The dispatcher called `name`; a `LocalDispatcher` where this rank holds all experts and nothing need travel."""
    spread_capacity = capacity_factor is not None and not token_group.is_trivial
    if ep.is_trivial and etp.is_trivial and not spread_capacity:
        return LocalDispatcher(num_experts, capacity_factor)
    capacity = None if capacity_factor is None else Capacity(capacity_factor, num_experts, token_group, token_order)
    if name in _FLEX and ep.size > 1:
        return _FLEX[name](num_experts, ep, etp, capacity, chip, num_sms)
    if name == "local" and ep.size * etp.size > 1:
        problem = f"local dispatch with EP {ep.size} x ETP {etp.size}"
        fix = {"knobs.dispatcher": "alltoall"}
        raise FindingsError([Finding(rule="dispatcher-available", at="knobs.dispatcher", problem=problem, fix=fix)])
    return AllToAllDispatcher(num_experts, ep, etp, capacity, fp8_rows, count_group)
