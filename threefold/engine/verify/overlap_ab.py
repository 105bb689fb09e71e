"""The A/B measurement of expert-parallel overlap: the same steps without it, with it, and with delayed wgrad too.

`threefold overlap-ab` runs `run_variants` on every rank, then `summarize` and `loss_difference` on what they return.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import inf, isfinite
from statistics import mean, stdev

import torch

from threefold.engine.build import build, options_of
from threefold.engine.dist.mesh import Mesh
from threefold.engine.step import to_device, train_step
from threefold.engine.verify.exchange_times import ExchangeRecorder, StepExchanges
from threefold.engine.verify.oracle import synthetic_batch
from threefold.plan.plan import Plan

VARIANTS = {  # ep_overlap, delay_wgrad
    "no overlap": (False, False),
    "overlap": (True, False),
    "overlap, delayed weights": (True, True),
}
_LR = 1e-3


@dataclass(frozen=True)
class Trial:
    """One variant on one rank."""

    variant: str
    losses: list[float]  # of all steps
    steps: list[StepExchanges]  # of the steps after the warm-up

    @property
    def seconds(self) -> float:
        return mean(seen.step_seconds for seen in self.steps)

    @property
    def spread(self) -> float:
        return stdev([seen.step_seconds for seen in self.steps]) if len(self.steps) > 1 else 0.0

    @property
    def exchange_seconds(self) -> float:
        return mean(seen.exchange_seconds for seen in self.steps)

    @property
    def exposed_seconds(self) -> float:
        return mean(seen.exposed_seconds for seen in self.steps)

    @property
    def exposed(self) -> dict[tuple[str, str], float]:
        """Mean seconds of a step by layer and phase."""
        keys = {key for seen in self.steps for key in seen.exposed}
        return {key: mean(seen.exposed.get(key, 0.0) for seen in self.steps) for key in keys}


def run_variants(
    rank: int,
    plan: Plan,
    warmup: int,
    steps: int,
    variants: Sequence[str] = tuple(VARIANTS),
    device: str = "cpu",
    by_turns: bool = False,
) -> list[Trial]:
    """Run the variants from the same weights on the same tokens.

    The variants run one after the other, or `by_turns`: then all are in memory, and whatever else the machine does
    slows all of them alike.
    """
    trials: list[Trial] = []
    for names in [variants] if by_turns else [[name] for name in variants]:
        running = [_run_steps(rank, plan, name, warmup, steps, torch.device(device)) for name in names]
        finished: list[Trial | None] = [None]
        while None in finished:
            finished = [next(variant) for variant in running]
        trials += [trial for trial in finished if trial]
    return trials


def _run_steps(
    rank: int, plan: Plan, name: str, warmup: int, steps: int, device: torch.device
) -> Iterator[Trial | None]:
    """Train; yields None after each step but the last, and the trial after the last."""
    overlap, delay = VARIANTS[name]
    # EP overlap schedules the shared experts itself.
    shared = plan.knobs.shared_expert_overlap and not overlap
    knobs = replace(plan.knobs, ep_overlap=overlap, delay_wgrad=delay, shared_expert_overlap=shared)
    plan = replace(plan, knobs=knobs)
    mesh = Mesh(plan.layout, rank, device=device)
    parts = build(plan, mesh, options=options_of(plan), with_data=False)
    recorder, trial = ExchangeRecorder(device), Trial(name, [], [])
    for step in range(warmup + steps):
        batches = [
            to_device(synthetic_batch(plan, step, m, mesh.coordinate("dp")), device)
            for m in range(plan.num_microbatches)
        ]
        with recorder.step() as seen:
            result = train_step(parts, batches, _LR, plan.job)
        trial.losses.append(result.loss)
        if step >= warmup:
            trial.steps.extend(seen)
        if step + 1 < warmup + steps:
            yield None
    yield trial


@dataclass(frozen=True)
class VariantSummary:
    """A variant over all ranks: means over ranks, and the step time and spread of the slowest rank."""

    variant: str
    seconds: float
    spread: float
    exchange_seconds: float
    exposed_seconds: float
    exposed: dict[tuple[str, str], float]

    @property
    def hidden(self) -> float:
        return 1 - self.exposed_seconds / self.exchange_seconds if self.exchange_seconds else 0.0


def summarize(ranks: Sequence[Sequence[Trial]]) -> list[VariantSummary]:
    """One summary for each variant, from the trials of all ranks."""
    rows = []
    for trials in zip(*ranks, strict=True):
        slowest = max(trials, key=lambda trial: trial.seconds)
        exposed = {key: mean(t.exposed.get(key, 0.0) for t in trials) for t in trials for key in t.exposed}
        rows.append(
            VariantSummary(
                slowest.variant,
                slowest.seconds,
                slowest.spread,
                mean(trial.exchange_seconds for trial in trials),
                mean(trial.exposed_seconds for trial in trials),
                dict(sorted(exposed.items(), key=lambda pair: -pair[1])),
            )
        )
    return rows


def loss_difference(ranks: Sequence[Sequence[Trial]]) -> float:
    """The largest relative difference of losses between a variant and the first; infinite where one is not finite."""
    differences = [
        abs(one - other) / abs(other)
        for first, *others in ranks
        for trial in others
        for one, other in zip(trial.losses, first.losses, strict=True)
    ]
    return max(differences) if all(map(isfinite, differences)) else inf
