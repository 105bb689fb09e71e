"""Deals the samples of a step out to ranks and microbatches so that their picture tokens are level.

Ranks of a step wait for each other, so the slowest encoder sets the pace. All ranks compute the same assignment from
the same numbers; which samples a step has does not change. `loader.py` asks `BalancedSteps`.
"""

import heapq
from collections.abc import Callable, Sequence


def assign_samples(loads: Sequence[int], samples_per_slot: int) -> list[list[int]]:
    """The samples of each slot (the microbatches of all ranks), each with `samples_per_slot` of them, in order.

    The largest sample goes next to the slot with the smallest load that has room; equal loads go to the first slot.
    With one sample in a slot the slots are therefore sorted by size: the ranks of one microbatch, which are
    neighbouring slots, get similar samples, and the totals of two ranks differ by less than the largest sample.
    """
    num_slots, rest = divmod(len(loads), samples_per_slot)
    if rest:
        raise ValueError(f"{len(loads)} samples do not fill slots of {samples_per_slot}")
    slots: list[list[int]] = [[] for _ in range(num_slots)]
    free = [(0, slot) for slot in range(num_slots)]  # sorted, so already a heap
    for sample in sorted(range(len(loads)), key=lambda number: -loads[number]):
        load, slot = heapq.heappop(free)
        slots[slot].append(sample)
        if len(slots[slot]) < samples_per_slot:
            heapq.heappush(free, (load + loads[sample], slot))
    return [sorted(members) for members in slots]


class BalancedSteps:
    """Which samples each slot of a step has. The last steps are remembered, since each is asked for slot by slot."""

    def __init__(self, load_of: Callable[[int], int], global_batch: int, micro_batch: int) -> None:
        """`load_of` gives the picture tokens of a sample by its number in the global sequence."""
        self.load_of, self.global_batch, self.micro_batch = load_of, global_batch, micro_batch
        self._assigned: dict[int, list[list[int]]] = {}

    def samples(self, first: int, slot: int) -> list[int]:
        """The samples of a slot of the step that begins at sample `first`."""
        slots = self._assigned.get(first)
        if slots is None:
            loads = [self.load_of(first + number) for number in range(self.global_batch)]
            slots = assign_samples(loads, self.micro_batch)
            # A new table: the prefetch thread and the training loop may both ask.
            self._assigned = dict([*list(self._assigned.items())[-3:], (first, slots)])
        return [first + number for number in slots[slot]]
