"""One rank on one GPU, for real, with collectives that do nothing: the allocator's peak, and compute time by module.

What a step takes on the cluster is then put together: measured compute, and communication as it is predicted.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from threefold.cost.rates import calibration
from threefold.cost.time import step_time
from threefold.dryrun.loads import Loads
from threefold.dryrun.rank import RankRehearsal, rehearse_rank
from threefold.dryrun.real import balanced, real_rank, real_step
from threefold.dryrun.stopwatch import Phases, Stopwatch
from threefold.dryrun.verdict import what_to_change
from threefold.dryrun.where import Where
from threefold.findings import Finding, FindingsError
from threefold.plan.plan import Plan
from threefold.units import format_bytes

_COMMUNICATION = ("tp", "cp", "ep", "dp")


@dataclass(frozen=True)
class Measurement:
    """`module_seconds`: forward and backward of a microbatch by kind of module; `step_seconds` is an estimate."""

    plan: Plan
    rehearsed: RankRehearsal
    peak_bytes: int
    reserved_bytes: int
    module_seconds: dict[str, tuple[float, float]]
    compute_seconds: float  # of all microbatches of a step, and the update
    communication_seconds: float  # predicted
    bubble_seconds: float
    left_out: tuple[str, ...]
    findings: tuple[Finding, ...] = ()

    @property
    def ranks(self) -> tuple[RankRehearsal, ...]:
        return (self.rehearsed,)

    @property
    def step_seconds(self) -> float:
        return self.compute_seconds + self.communication_seconds + self.bubble_seconds

    def to_json(self) -> dict[str, Any]:
        return {
            "level": "measured",
            "ranks": [{**self.rehearsed.to_json(), "measured_peak_bytes": self.peak_bytes}],
            "reserved_bytes": self.reserved_bytes,
            "modules": [
                {"module": name, "forward_seconds": ahead, "backward_seconds": back}
                for name, (ahead, back) in self.module_seconds.items()
            ],
            "step": {
                "level": "estimated",
                "seconds": self.step_seconds,
                "compute": {"level": "measured", "seconds": self.compute_seconds},
                "communication": {"level": "estimated", "seconds": self.communication_seconds},
                "bubble": {"level": "estimated", "seconds": self.bubble_seconds},
            },
            "collectives": [entry.to_json() for entry in self.rehearsed.collectives],
            "seconds": self.rehearsed.seconds,
            "left_out": list(self.left_out),
            "findings": [finding.to_json() for finding in self.findings],
        }


def measure(
    plan: Plan,
    rank: int,
    loads: Loads | None = None,
    left_out: Sequence[str] = (),
    say: Callable[[str], None] | None = None,
) -> Measurement:
    """On the first GPU."""
    if not torch.cuda.is_available():
        raise FindingsError([_finding("--device", "torch shows no CUDA device", "rehearse with --device cpu")])
    if loads is not None:
        problem = "a measured rank routes in turn: loads of your own have no effect"
        raise FindingsError([_finding("--loads", problem, "rehearse loads with --device cpu")])
    tell = say or (lambda text: None)
    tell("rehearsing without memory first")
    rehearsed = rehearse_rank(balanced(plan), rank)
    device = torch.device("cuda", torch.cuda.current_device())
    watch, phases, where = Stopwatch(device), Phases(device), Where()
    with _enough_memory(plan, rehearsed, where), real_rank(plan, rank, device) as (parts, small):
        tell("a step to warm up")
        where.name(parts.chunks)
        with where.watching():
            real_step(parts, small, plan, where)
        tell("a step for memory and time")
        torch.cuda.reset_peak_memory_stats(device)
        real_step(parts, small, plan, phases)
        peak, reserved = torch.cuda.max_memory_allocated(device), torch.cuda.max_memory_reserved(device)
        tell("a step for the time of modules")
        with watch.on(parts.chunks.values()):
            real_step(parts, small, plan)
        modules = _by_kind(watch, small.num_microbatches)
    times = plan.num_microbatches / small.num_microbatches
    run = phases.seconds["forward"] * times
    spent = step_time(plan, calibration(plan.target).rates).terms
    return Measurement(
        plan=plan,
        rehearsed=rehearsed,
        peak_bytes=peak,
        reserved_bytes=reserved,
        module_seconds=modules,
        compute_seconds=run + phases.seconds["reduce"] + phases.seconds["optimizer"],
        communication_seconds=sum(spent.get(name, 0.0) for name in _COMMUNICATION),
        bubble_seconds=run * (plan.layout.pp - 1) / (plan.layout.vpp * plan.num_microbatches),
        left_out=tuple(left_out),
    )


def _by_kind(watch: Stopwatch, num_microbatches: int) -> dict[str, tuple[float, float]]:
    """Of a microbatch, layers together, the longest first."""
    found: dict[str, tuple[float, float]] = {}
    for path, (ahead, back) in watch.seconds().items():
        kind = re.sub(r"\.\d+\.", ".", path)
        old = found.get(kind, (0.0, 0.0))
        found[kind] = old[0] + ahead / num_microbatches, old[1] + back / num_microbatches
    return dict(sorted(found.items(), key=lambda row: -sum(row[1])))


@contextmanager
def _enough_memory(plan: Plan, rehearsed: RankRehearsal, where: Where) -> Iterator[None]:
    try:
        yield
    except torch.OutOfMemoryError:
        free, total = torch.cuda.mem_get_info()
        largest, cure = what_to_change(plan, rehearsed)
        problem = (
            f"out of memory on this GPU in {where.failed or where()}: it has {format_bytes(total)}, "
            f"{format_bytes(free)} free; the rehearsal says {format_bytes(rehearsed.peak_bytes)} of tensors, "
            f"{format_bytes(rehearsed.terms[largest])} of it {largest}"
        )
        place = f"rank {rehearsed.rank}, stage {rehearsed.stage}"
        raise FindingsError([_finding(place, problem, f"{cure}; --device cpu shows all terms")]) from None


def _finding(at: str, problem: str, advice: str) -> Finding:
    return Finding(rule="rehearsal-measures", at=at, problem=problem, advice=advice)
