"""A ledger of the collectives of one step: axis, operation, bytes a rank sends, count, link."""

from threefold.cost.ledger.megatron import megatron_transfers
from threefold.cost.ledger.threefold import threefold_transfers
from threefold.cost.ledger.transfer import Transfer, merged
from threefold.plan.plan import Plan
from threefold.spec.stacks import STACKS

__all__ = ["Transfer", "traffic"]


def traffic(plan: Plan, skew: float = 1.0) -> list[Transfer]:
    """Everything a rank sends in a step, forward and backward, largest first, as the plan's stack does it.

    Routing is balanced, or the rank is the busiest of its expert group: `skew` times the balanced number of
    rows arrive there, and as many go back. A family that our engine does not train is told as Megatron Bridge's.
    """
    ours = plan.target == "threefold" and plan.model.family in STACKS["threefold"].families
    return merged((threefold_transfers if ours else megatron_transfers)(plan, skew))
