"""Which dispatcher a plan's knob means on these ranks."""

from threefold.engine.dispatch.alltoall import AllToAllDispatcher
from threefold.engine.dispatch.capacity import Capacity, Order
from threefold.engine.dispatch.deepep import DeepEpDispatcher
from threefold.engine.dispatch.hybridep import HybridEpDispatcher
from threefold.engine.dispatch.local import LocalDispatcher
from threefold.engine.dispatch.protocol import AnyDispatcher
from threefold.engine.mesh import ALONE, Group
from threefold.findings import Finding, FindingsError

_FLEX = {"deepep": DeepEpDispatcher, "hybridep": HybridEpDispatcher}


def make_dispatcher(
    name: str,
    num_experts: int,
    ep: Group = ALONE,
    etp: Group = ALONE,
    *,
    tokens: Group = ALONE,
    capacity_factor: float | None = None,
    order: Order | None = None,
    chip: str = "cpu",
    num_sms: int | None = None,
    narrow: bool = False,
    news: Group | None = None,
) -> AnyDispatcher:
    """`tokens`, `order`: who shares a microbatch, and in which order (`Capacity`). With all experts here, `local`.

    `narrow`: rows travel in FP8, by all-to-all. `news`: `ep` once more, for the counts.
    """
    spread = capacity_factor is not None and not tokens.alone
    if ep.alone and etp.alone and not spread:
        return LocalDispatcher(num_experts, capacity_factor)
    capacity = None if capacity_factor is None else Capacity(capacity_factor, num_experts, tokens, order)
    if name in _FLEX and ep.size > 1:
        return _FLEX[name](num_experts, ep, etp, capacity, chip, num_sms)
    if name == "local" and ep.size * etp.size > 1:
        problem = f"local dispatch with EP {ep.size} x ETP {etp.size}"
        fix = {"knobs.dispatcher": "alltoall"}
        raise FindingsError([Finding(rule="dispatcher-available", at="knobs.dispatcher", problem=problem, fix=fix)])
    return AllToAllDispatcher(num_experts, ep, etp, capacity, narrow, news)
