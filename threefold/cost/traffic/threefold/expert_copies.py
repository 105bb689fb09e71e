"""Calls of our own engine for copies of hot experts: weights to the slots once a step, their gradients back.

They are those of a step that fills all slots, in which each rank sends as many experts.
"""

from collections import Counter

from threefold.cost.local_parameters import first_vocab_rows, stage_parameters
from threefold.cost.traffic.threefold.calls import Call, MicrobatchSizes
from threefold.cost.traffic.threefold.zero1 import grad_bytes
from threefold.plan.plan import Plan


def expert_copy_calls(plan: Plan, sizes: MicrobatchSizes) -> Counter[Call]:
    """Calls of all ranks together."""
    found: Counter[Call] = Counter()
    if not plan.expert_slots:
        return found
    for parameters in stage_parameters(plan, first_vocab_rows(plan)):
        for one in parameters:
            if one.is_expert:
                elements = one.elements * plan.layout.ep // plan.model.num_experts * plan.expert_slots
                bytes_of = [sizes.element_bytes] if one.is_frozen else [sizes.element_bytes, grad_bytes(plan)]
                for element_bytes in bytes_of:
                    found["ep", "all_to_all", elements * element_bytes] += plan.layout.gpus // plan.layout.pp
    return found
