"""Times steps of one rank of a large layout on one device, with rehearsed peers: collectives that do nothing.

`launch/plan_session.py` starts `python -m threefold.dryrun.measured.rank_steps RANK JOBS RESULTS` for the trials of
`threefold tune --rank`. A step on the cluster is then the measured compute plus the communication and the pipeline
bubble that the estimate predicts.
"""

import gc
import sys
from pathlib import Path
from typing import Any, NamedTuple

import torch

from threefold.cost.rates import rates_of
from threefold.cost.time.step import step_time
from threefold.dryrun.measured.real_rank import real_rank, run_real_step
from threefold.dryrun.measured.timers import PhaseTimer
from threefold.engine.build import device_of
from threefold.engine.tune.session_rank import add_result, in_words, plan_of, read_jobs
from threefold.engine.tune.trial_steps import LEAST_STEPS, TrialWindow, free_gpu_memory
from threefold.launch.cpu_cores import choose_threads
from threefold.plan.plan import Plan
from threefold.spec.flops import flops_per_token

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
