"""The ledger of a plan's collectives by its stack: the one place where a target picks its traffic model.

`threefold estimate` prints it. A new stack is a function of plan and skew that yields `Transfer`s, and a line in
`TRAFFIC_MODELS`.
"""

from collections.abc import Callable, Iterable

from threefold.cost.expert_load import load_of
from threefold.cost.traffic.megatron import megatron_transfers
from threefold.cost.traffic.threefold.step import threefold_transfers
from threefold.cost.traffic.transfers import Transfer, merge_transfers
from threefold.plan.plan import Plan
from threefold.spec.stacks import STACKS

TrafficModel = Callable[[Plan, float], Iterable[Transfer]]
TRAFFIC_MODELS: dict[str, TrafficModel] = {"megatron-bridge": megatron_transfers, "threefold": threefold_transfers}


def traffic(plan: Plan, skew: float | None = None) -> list[Transfer]:
    """Everything that a rank sends in a step, forward and backward, largest first.

    Routing is balanced, or the rank is the busiest of its expert group: `skew` times the balanced number of rows arrive
    there, and as many go back. A family that the plan's stack does not train is counted as Megatron Bridge would send
    it. Without a skew it is the mean of the plan's load.
    """
    is_trained = plan.model.family in STACKS[plan.target].families
    model = TRAFFIC_MODELS[plan.target] if is_trained else megatron_transfers
    return merge_transfers(model(plan, load_of(plan).skew if skew is None else skew))
