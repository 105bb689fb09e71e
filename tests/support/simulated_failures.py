"""A run under failures, played out event by event: what the formula of `cost/training_run/training_run.py` is held to.

Nothing of the formula is used. Failures, restarts, repairs and checkpoints happen one after another on a clock.
"""

import heapq
import math
import random

from threefold.cost.training_run.training_run import FailureModel


def simulated_goodput(
    model: FailureModel, interval: float, spare_nodes: int, num_failures: int, seed: int
) -> tuple[float, float]:
    """Fractions of the time that were useful and that the run waited for a node, after so many failures.

    Repairs take their mean time, spread evenly by half of it to either side: the formula must not need exponential
    ones.
    """
    draw = random.Random(seed)
    clock, useful, waited = 0.0, 0.0, 0.0
    in_repair: list[float] = []  # when each node is back
    segment, failures = interval + model.save_seconds, 0
    while failures < num_failures:
        # The ranks restart. A failure meanwhile makes them begin again.
        left = draw.expovariate(model.failure_rate)
        if left < model.restart_seconds:
            clock += left
        else:
            useful += interval * usable_checkpoints(left - model.restart_seconds, segment, model.write_seconds)
            clock += left
        failures += 1
        if draw.random() < model.hardware_fraction:
            heapq.heappush(in_repair, clock + model.repair_seconds * draw.uniform(0.5, 1.5))
        while in_repair and in_repair[0] <= clock:
            heapq.heappop(in_repair)
        if len(in_repair) > spare_nodes:
            waited += in_repair[0] - clock
            clock = heapq.heappop(in_repair)
    return useful / clock, waited / clock


def usable_checkpoints(seconds: float, segment: float, write_seconds: float) -> int:
    """Checkpoints that become usable before a failure `seconds` after training went on: the first at the end of the
    first segment and its write, each next one a segment later."""
    return max(0, math.floor((seconds - write_seconds) / segment))
