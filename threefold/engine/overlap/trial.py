"""The A/B of overlap: the same steps without it, with it, and with delayed weight gradients too."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import mean, stdev

import torch

from threefold.engine.build import build, options_of
from threefold.engine.mesh import Mesh
from threefold.engine.oracle import batch_of
from threefold.engine.overlap.record import Recorder, Seen
from threefold.engine.step import train_step
from threefold.plan.plan import Plan

VARIANTS = {
    "no overlap": {"ep_overlap": False, "delay_wgrad": False},
    "overlap": {"ep_overlap": True, "delay_wgrad": False},
    "overlap, delayed weights": {"ep_overlap": True, "delay_wgrad": True},
}
_LR = 1e-3


@dataclass(frozen=True)
class Trial:
    """One variant on one rank; the steps of the steady window."""

    variant: str
    losses: list[float]
    steps: list[Seen]

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
    def hidden(self) -> float:
        return 1 - self.exposed_seconds / self.exchange_seconds if self.exchange_seconds else 0.0

    @property
    def exposed(self) -> dict[tuple[str, str], float]:
        """Mean seconds of a step by layer and phase, the longest first."""
        keys = {key for seen in self.steps for key in seen.exposed}
        means = {key: mean(seen.exposed.get(key, 0.0) for seen in self.steps) for key in keys}
        return dict(sorted(means.items(), key=lambda pair: -pair[1]))


def on_rank(
    rank: int, plan: Plan, warmup: int, steps: int, variants: Sequence[str] = tuple(VARIANTS), device: str = "cpu"
) -> list[Trial]:
    """Matched conditions: each variant starts from the same weights and sees the same tokens."""
    return [_run(rank, plan, name, warmup, steps, torch.device(device)) for name in variants]


def _run(rank: int, plan: Plan, name: str, warmup: int, steps: int, device: torch.device) -> Trial:
    plan = replace(plan, knobs=replace(plan.knobs, **VARIANTS[name]))
    if plan.knobs.ep_overlap:  # it places the shared experts itself
        plan = replace(plan, knobs=replace(plan.knobs, shared_expert_overlap=False))
    mesh = Mesh(plan.layout, rank, device=device)
    parts = build(plan, mesh, options=options_of(plan), with_data=False)
    recorder, trial = Recorder(device), Trial(name, [], [])
    for step in range(warmup + steps):
        batches = [batch_of(plan, step, m, mesh.place("dp")).to(device) for m in range(plan.num_microbatches)]
        with recorder.step() as seen:
            result = train_step(parts, batches, _LR, plan.job)
        trial.losses.append(result.loss)
        if step >= warmup:
            trial.steps += seen
    return trial
