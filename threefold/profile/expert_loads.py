"""Router health from a recorded load: experts and ranks by layer, entropy, drift, sources, time lost to imbalance.

`threefold load` prints a `LoadSummary`; reports and the health of runs take the time that is lost from it.
"""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from threefold.cost.estimate import UnevenLoad, estimate
from threefold.findings import FindingsError
from threefold.notebook import ShownAsTable
from threefold.plan.load import PREFIX, RecordedLoad, read_load
from threefold.plan.parse import change
from threefold.plan.plan import Plan
from threefold.units import format_many

Matrix = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class LayerLoad:
    """The load of one layer. `to_json` prints the fields under these names."""

    layer: int  # of those with experts
    busiest_expert: float  # over the mean, in the median step
    largest_rank: float  # the same for expert ranks
    entropy: float  # of the experts' shares, over that of a level load: 1 is level, 0 is one expert
    idle_experts: int  # without a token in any recorded step
    drift: float  # part of the copies that go to other experts in the next recorded step
    ragged: float  # part of the copies of a source rank that go to other experts than those of all


@dataclass(frozen=True, slots=True, repr=False)
class LoadSummary(ShownAsTable):
    """A recorded load in numbers."""

    record: RecordedLoad
    ep: int
    layers: tuple[LayerLoad, ...]
    lost: UnevenLoad | None = None  # what the load costs the plan that was given; None without one
    step_seconds: float | None = None  # predicted with the load

    @property
    def lost_fraction(self) -> float | None:
        """The part of a step that is lost to imbalance, predicted."""
        return 1 - self.lost.balanced_seconds / self.step_seconds if self.lost and self.step_seconds else None

    def summary(self) -> str:
        steps, worst = self.record.steps, max(self.layers, key=lambda layer: layer.busiest_expert)
        return (
            f"{len(steps)} recorded steps ({steps[0]} to {steps[-1]}), {len(self.layers)} layers of "
            f"{self.record.num_experts} experts; the busiest expert has {worst.busiest_expert:.2f} times the mean "
            f"(layer {worst.layer})"
        )

    def table(self) -> tuple[list[str], list[list[str]]]:
        header = [
            "layer",
            "busiest expert",
            f"largest of {format_many(self.ep, 'rank')}",
            "entropy",
            "idle",
            "drift",
            "ragged",
        ]
        rows = [
            [
                str(layer.layer),
                *(f"{value:.2f}" for value in (layer.busiest_expert, layer.largest_rank)),
                f"{layer.entropy:.3f}",
                str(layer.idle_experts),
                *(f"{value:.1%}" for value in (layer.drift, layer.ragged)),
            ]
            for layer in self.layers
        ]
        return header, rows

    def to_json(self) -> dict[str, Any]:
        return {
            "steps": list(self.record.steps),
            "experts": self.record.num_experts,
            "sources": len(self.record.sources),
            "ep": self.ep,
            "layers": [asdict(layer) for layer in self.layers],
            "lost": None if self.lost is None else asdict(self.lost) | {"fraction": self.lost_fraction},
        }


def summarize_load(path: str | Path, plan: Plan | None = None, ep: int | None = None) -> LoadSummary:
    """A recorded load in numbers. `plan` prices the load where it has as many experts; `ep` is its degree, else that of
    `plan`. Raises findings."""
    record = read_load(path)
    experts = record.num_experts
    priced = plan if plan is not None and plan.model.num_experts == experts else None
    ep = (priced.layout.ep if priced else 1) if ep is None else ep
    if ep < 1 or experts % ep:
        raise ValueError(f"{experts} experts do not divide over {ep} ranks")
    counts = np.array(record.counts)
    sources = np.array(record.sources) if record.sources else np.empty((0, *counts.shape[1:]))
    layers = tuple(_layer(n, counts[:, n], sources[:, n], ep) for n in range(counts.shape[1]))
    lost, seconds = _lost(path, priced, ep) if priced else (None, None)
    return LoadSummary(record, ep, layers, lost, seconds)


def _layer(number: int, counts_SE: Matrix, sources_XE: Matrix, ep: int) -> LayerLoad:
    shares_SE, mean_E = _shares(counts_SE), _shares(counts_SE.sum(axis=0))
    experts = len(mean_E)
    ranks_SR = shares_SE.reshape(len(shares_SE), ep, -1).sum(axis=2)
    known = mean_E[mean_E > 0]
    entropy = float(-(known * np.log(known)).sum() / math.log(experts)) if experts > 1 else 1.0
    return LayerLoad(
        number,
        float(np.median(shares_SE.max(axis=1))) * experts,
        float(np.median(ranks_SR.max(axis=1))) * ep,
        entropy,
        int((mean_E == 0).sum()),
        _moved(shares_SE[1:], shares_SE[:-1]),
        _moved(_shares(sources_XE), _shares(sources_XE.sum(axis=0))) if len(sources_XE) else 0.0,
    )


def _shares(counts: Matrix) -> Matrix:
    """Counts over their sum along the experts; level where there are none."""
    total = counts.sum(axis=-1, keepdims=True)
    return np.where(total > 0, counts / np.maximum(total, 1e-300), 1 / counts.shape[-1])


def _moved(rows: Matrix, others: Matrix) -> float:
    """The mean part of the rows that lie elsewhere than the others' (total variation)."""
    return float(np.abs(rows - others).sum(axis=-1).mean() / 2) if len(rows) else 0.0


def _lost(path: str | Path, plan: Plan, ep: int) -> tuple[UnevenLoad | None, float | None]:
    changes: dict[str, Any] = {"job.load": f"{PREFIX}{Path(path).resolve()}"}
    changes |= {"layout.ep": ep} if ep != plan.layout.ep else {}
    try:
        found = estimate(change(plan, changes))
    except (FindingsError, ValueError, ZeroDivisionError):
        return None, None
    return found.uneven, found.time.step_seconds


def lost_text(summary: LoadSummary) -> Sequence[str]:
    """The cost of the load in words; nothing where no plan was given, or experts are not spread over ranks."""
    if summary.lost is None or summary.step_seconds is None or summary.lost_fraction is None:
        return ()
    return (
        f"lost to imbalance, predicted: {summary.lost_fraction:.1%} of a step",
        *summary.lost.lines(summary.step_seconds),
    )
