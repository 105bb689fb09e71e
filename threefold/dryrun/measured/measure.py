"""Measures one rank on one GPU, with collectives that do nothing: peak memory, and compute time by module.

`threefold dry-run --device cuda` calls `measure`. It also estimates the time of a step on the cluster as the sum of the
measured compute, the predicted communication and the pipeline bubble.
"""

import gc
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

from threefold.cost.rates import rates_of
from threefold.cost.time.step import step_time
from threefold.dryrun.measured.real_rank import real_rank, run_real_step, with_balanced_routing
from threefold.dryrun.measured.timers import ModuleTimer, PhaseTimer
from threefold.dryrun.memory_fit import largest_term
from threefold.dryrun.rehearse_rank import RankRehearsal, rehearse_rank
from threefold.dryrun.simulated.expert_load import ExpertLoads
from threefold.dryrun.tracking.allocation_origin import OriginTracker
from threefold.engine.build import device_of
from threefold.engine.tune.session_rank import add_result, in_words, plan_of, read_jobs
from threefold.engine.tune.trial_steps import LEAST_STEPS, TrialWindow, free_gpu_memory
from threefold.findings import Finding, FindingsError
from threefold.launch.cpu_cores import choose_threads
from threefold.plan.plan import Plan
from threefold.spec.flops import flops_per_token
from threefold.units import format_bytes


@dataclass(frozen=True)
class Measurement:
    """The measurement of one rank, beside its rehearsal. `step_seconds` is an estimate."""

    plan: Plan
    rehearsed: RankRehearsal
    peak_bytes: int
    reserved_bytes: int
    # (forward, backward) of one microbatch by kind of module, such as layers.ffn.experts, summed over layers
    module_seconds: dict[str, tuple[float, float]]
    compute_seconds: float  # all microbatches of a step, and the update
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
                {"module": name, "forward_seconds": forward, "backward_seconds": backward}
                for name, (forward, backward) in self.module_seconds.items()
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
    loads: ExpertLoads | None = None,
    left_out: Sequence[str] = (),
    say: Callable[[str], None] | None = None,
) -> Measurement:
    """Measure a rank on the current CUDA device. `say` is called with a line of text before each step."""
    if not torch.cuda.is_available():
        raise FindingsError([_finding("--device", "torch shows no CUDA device", "rehearse with --device cpu")])
    if loads is not None:
        problem = "a measured rank routes in turn: loads of your own have no effect"
        raise FindingsError([_finding("--loads", problem, "rehearse loads with --device cpu")])
    report = say or (lambda text: None)
    report("rehearsing without memory first")
    rehearsed = rehearse_rank(with_balanced_routing(plan), rank)
    device = torch.device("cuda", torch.cuda.current_device())
    modules, phases, origins = ModuleTimer(device), PhaseTimer(device), OriginTracker()
    with _out_of_memory_as_finding(plan, rehearsed, origins), real_rank(plan, rank, device) as (parts, reduced):
        report("a step to warm up")
        origins.register_modules(parts.chunks)
        with origins.module_hooks():
            run_real_step(parts, reduced, plan, origins)
        report("a step for memory and time")
        torch.cuda.reset_peak_memory_stats(device)
        run_real_step(parts, reduced, plan, phases)
        peak, reserved = torch.cuda.max_memory_allocated(device), torch.cuda.max_memory_reserved(device)
        report("a step for the time of modules")
        with modules.module_hooks(parts.chunks.values()):
            run_real_step(parts, reduced, plan)
        module_seconds = _seconds_by_kind(modules, reduced.num_microbatches)
    step = step_on_cluster(plan, reduced, phases)
    return Measurement(
        plan=plan,
        rehearsed=rehearsed,
        peak_bytes=peak,
        reserved_bytes=reserved,
        module_seconds=module_seconds,
        compute_seconds=step.compute,
        communication_seconds=step.communication,
        bubble_seconds=step.bubble,
        left_out=tuple(left_out),
    )


def _seconds_by_kind(timer: ModuleTimer, num_microbatches: int) -> dict[str, tuple[float, float]]:
    """Times of one microbatch by module path without layer numbers, the longest first."""
    sums: dict[str, tuple[float, float]] = {}
    for path, (forward, backward) in timer.seconds().items():
        kind = re.sub(r"\.\d+\.", ".", path)
        before = sums.get(kind, (0.0, 0.0))
        sums[kind] = before[0] + forward / num_microbatches, before[1] + backward / num_microbatches
    return dict(sorted(sums.items(), key=lambda row: -sum(row[1])))


@contextmanager
def _out_of_memory_as_finding(plan: Plan, rehearsed: RankRehearsal, origins: OriginTracker) -> Iterator[None]:
    try:
        yield
    except torch.OutOfMemoryError:
        free, total = torch.cuda.mem_get_info()
        largest = largest_term(rehearsed)
        problem = (
            f"out of memory on this GPU in {origins.failed_at or origins.current()}: it has {format_bytes(total)}, "
            f"{format_bytes(free)} free; the rehearsal says {format_bytes(rehearsed.peak_bytes)} of tensors, "
            f"{format_bytes(rehearsed.terms[largest])} of it {largest}"
        )
        at = f"rank {rehearsed.rank}, stage {rehearsed.stage}"
        raise FindingsError([_finding(at, problem, "--device cpu shows all terms, and what could help")]) from None


def _finding(at: str, problem: str, advice: str) -> Finding:
    return Finding(rule="rehearsal-measures", at=at, problem=problem, advice=advice)


_COMMUNICATION = ("tp", "cp", "ep", "dp")


class ClusterStep(NamedTuple):
    """The seconds of a step on the cluster, by where they come from."""

    compute: float  # measured: all microbatches of a step, and the update
    communication: float  # predicted
    bubble: float  # predicted from the measured microbatches

    @property
    def seconds(self) -> float:
        return self.compute + self.communication + self.bubble


def step_on_cluster(plan: Plan, reduced: Plan, phases: PhaseTimer) -> ClusterStep:
    """A step of the plan, from the phases of a step with the microbatches of the `reduced` plan."""
    # The phase "forward" is that of all microbatches, with their backward.
    microbatches = phases.seconds["forward"] * (plan.num_microbatches / reduced.num_microbatches)
    predicted = step_time(plan, rates_of(plan)).terms
    return ClusterStep(
        compute=microbatches + phases.seconds["reduce"] + phases.seconds["optimizer"],
        communication=sum(predicted.get(name, 0.0) for name in _COMMUNICATION),
        bubble=microbatches * (plan.layout.pp - 1) / (plan.layout.vpp * plan.num_microbatches),
    )


def time_rank(plan: Plan, rank: int, device: torch.device, window: TrialWindow) -> dict[str, Any]:
    """The result of a trial as `engine.tune.trial_steps.run_trial` gives it, without losses: the tokens of a rank
    whose peers do not exist lead nowhere."""
    on_gpu = device.type == "cuda"
    torch.set_num_threads(choose_threads(plan, 1, None, on_gpu)[0])
    if on_gpu:
        torch.cuda.reset_peak_memory_stats(device)
    steps: list[float] = []
    try:
        with real_rank(plan, rank, device) as (parts, reduced):
            for number in range(window.warmup + window.steps):
                phases = PhaseTimer(device)
                run_real_step(parts, reduced, plan, phases)
                if number >= window.warmup:
                    steps.append(step_on_cluster(plan, reduced, phases).seconds)
                if len(steps) >= LEAST_STEPS and sum(steps) > window.seconds:
                    break
            del parts
    finally:
        gc.collect()
        free_gpu_memory()
    tokens = plan.tokens_per_step
    return {
        "steps": steps,
        "losses": [],
        "skipped": 0,
        "dropped": 0.0,
        "peak_bytes": torch.cuda.max_memory_allocated(device) if on_gpu else None,
        "work": {
            "tokens": tokens,
            "useful_tokens": tokens,
            "flops": tokens * flops_per_token(plan.model, plan.job.seq_len, plan.mtp, plan.layout.tp),
        },
        "effects": [],
    }


def main(rank: str, jobs: str, results: str) -> int:
    for job in read_jobs(Path(jobs)):
        plan = plan_of(job["fields"])
        try:
            found = time_rank(plan, int(rank), device_of(plan), TrialWindow(**job["window"]))
        except Exception as error:
            found = {"error": in_words(error)}
        add_result(Path(results), found)
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
