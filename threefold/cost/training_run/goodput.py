"""Goodput: the fraction of a run's time that ends up in the model, when nodes fail and checkpoints bring it back.

The model, which `tests/support/simulated_failures.py` plays out event by event:

- Failures come at random, at `failure_rate` a second, whenever the ranks run, also while they save or restart.
- Every `interval` seconds of training the ranks stop for `save_seconds` to copy their states to the host. A background
  write of `write_seconds` then makes the checkpoint usable.
- A failure costs the work since the newest usable checkpoint and `restart_seconds`.
- A fraction of the failures takes a node away for `repair_seconds`. A spare node replaces it; without one the run waits
  for the first node that comes back.

The expected time of a checkpoint's interval is Daly's (A higher order estimate of the optimum checkpoint interval,
2006). A background write only lengthens what a failure costs, exactly as a longer restart does: a checkpoint is usable
`write_seconds` later, and that much more is lost. Nodes in repair are the customers of a loss system with
`spare_nodes` + 1 servers: waiting is Erlang's B formula, whatever the distribution of repair times.
"""

import math
from dataclasses import dataclass

_LARGEST_EXPONENT = 30.0  # failures while one checkpoint comes about, beyond which none ever does
_LEAST_WAITING = 1e-3  # of the time, below which another spare node is not worth it
_MOST_SPARES = 1_000_000


@dataclass(frozen=True, slots=True)
class FailureModel:
    """One run's failures and what they cost, in seconds."""

    failure_rate: float  # failures a second of all ranks together
    hardware_fraction: float  # of the failures, after which a node is gone
    save_seconds: float  # the ranks stand still while states are copied to the host
    write_seconds: float  # from then until the checkpoint is usable
    restart_seconds: float  # detection, new start, loading
    repair_seconds: float  # until a failed node is back


@dataclass(frozen=True, slots=True)
class Goodput:
    """Fractions of the run's time; they add up to 1."""

    useful: float  # ends up in the model
    saving: float  # the ranks stand still for checkpoints
    lost: float  # work that failures undid, and restarts
    waiting: float  # no spare node was left


def goodput(model: FailureModel, interval: float, spare_nodes: int) -> Goodput:
    """What failures leave of the time of a run that saves after every `interval` seconds of training."""
    rate, segment = model.failure_rate, interval + model.save_seconds
    if rate == 0:
        return Goodput(interval / segment, model.save_seconds / segment, 0.0, 0.0)
    if rate * (segment + model.restart_seconds + model.write_seconds) > _LARGEST_EXPONENT:
        return Goodput(0.0, 0.0, 1.0, 0.0)
    # Expected seconds until one more checkpoint is usable.
    seconds = math.exp(rate * (model.restart_seconds + model.write_seconds)) * math.expm1(rate * segment) / rate
    waiting = waiting_fraction(model, spare_nodes)
    useful, saving = (part / seconds * (1 - waiting) for part in (interval, model.save_seconds))
    return Goodput(useful, saving, max(0.0, 1 - useful - saving - waiting), waiting)


def best_interval(model: FailureModel) -> float:
    """Seconds of training between checkpoints that leave the most goodput; infinite where nothing fails.

    With `x` the failures in an interval and `d` those in a save, the best `x` has 1 - x = exp(-x - d). Young's square
    root of 2 `save_seconds` / `failure_rate` is its limit for rare failures. The next save waits for the background
    write of the one before.
    """
    if model.failure_rate == 0:
        return math.inf
    low, high, save = 0.0, 1.0, model.failure_rate * model.save_seconds
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if 1 - middle > math.exp(-middle - save) else (low, middle)
    return max(high / model.failure_rate, model.write_seconds - model.save_seconds)


def waiting_fraction(model: FailureModel, spare_nodes: int) -> float:
    """The fraction of the time in which all spare nodes and one more are in repair."""
    load = model.failure_rate * model.hardware_fraction * model.repair_seconds
    blocked = 1.0
    for servers in range(1, spare_nodes + 2):
        blocked = load * blocked / (servers + load * blocked)
    return blocked


def enough_spare_nodes(model: FailureModel) -> int:
    """The fewest spare nodes with which the run waits less than a thousandth of its time."""
    load = model.failure_rate * model.hardware_fraction * model.repair_seconds
    blocked, servers = load / (1 + load), 1
    while blocked > _LEAST_WAITING and servers < _MOST_SPARES:
        servers += 1
        blocked = load * blocked / (servers + load * blocked)
    return servers - 1
