"""A bounded record of how the router loaded the experts: by step and layer, and by source rank and layer.

A hook of the run adds each step (`engine/train_hooks.py`). Loads stay on the device until the run ends, when
`routing.json` is written. `threefold load` reads it, and `job.load = "file:RUN"` predicts with it (`plan/load.py`).
Where there are too many steps, every second one is left out, so that a record of any run is small.

Shapes: L layers with experts, E experts.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from threefold.engine.dist.consensus import run_on_all_ranks
from threefold.engine.dist.mesh import Group, Mesh
from threefold.engine.run.folder import replace_file
from threefold.findings import FindingsError
from threefold.plan.load import ROUTING, read_load

MOST_STEPS, LEAST_STEPS, MOST_SOURCES = 32, 4, 8
MOST_NUMBERS = 2**18  # of the steps of a record, which is then of some 1.5 MB


class RoutingRecord:
    """The record of this start of a run, on each rank."""

    def __init__(self, mesh: Mesh) -> None:
        self.mesh = mesh
        self.stride = 1  # steps from one that is recorded to the next
        self._loads: dict[int, Tensor] = {}  # of all ranks, by step, on the device
        self._own_LE: Tensor | None = None  # of this rank, in the recorded steps together
        self._sources: list[Any] = []

    def add(self, step: int, load_LE: Tensor | None, own_LE: Tensor | None) -> None:
        """Add a step; no wait for the device."""
        if load_LE is None or step % self.stride:
            return
        self._loads[step] = load_LE.to(torch.float32)
        if own_LE is not None:
            self._own_LE = own_LE.clone() if self._own_LE is None else self._own_LE + own_LE
        while len(self._loads) > most_steps(*load_LE.shape):
            self.stride *= 2
            self._loads = {step: kept_LE for step, kept_LE in self._loads.items() if step % self.stride == 0}

    def gather_sources(self, group: Group) -> None:
        """Bring the loads of some data-parallel ranks to the first rank. All ranks call it."""
        dp, size = self.mesh.coordinate("dp"), self.mesh.layout.dp
        is_source = dp in {n * size // min(size, MOST_SOURCES) for n in range(min(size, MOST_SOURCES))}
        own_LE = self._own_LE if is_source else None
        self._sources = run_on_all_ranks(group, lambda: None if own_LE is None else (dp, own_LE.long().tolist()))

    def write(self, folder: Path) -> None:
        """Write the record of the run, with what earlier starts recorded. The first rank calls it."""
        if not self._loads:
            return
        shape = next(iter(self._loads.values())).shape
        counts = _earlier(folder, min(self._loads), tuple(shape))
        counts |= {step: load_LE.round().long().tolist() for step, load_LE in self._loads.items()}
        steps = sorted(counts)
        while len(steps) > most_steps(*shape):
            steps = steps[-1::-2][::-1]
        sums: dict[int, Tensor] = {}
        for dp, rows in filter(None, self._sources):
            sums[dp] = sums.get(dp, 0) + torch.tensor(rows)
        sources = [sums[dp].tolist() for dp in sorted(sums)] if len(sums) > 1 else []
        record = {"steps": steps, "counts": [counts[step] for step in steps], "sources": sources}
        replace_file(folder / ROUTING, json.dumps(record, separators=(",", ":")).encode())


def most_steps(num_layers: int, num_experts: int) -> int:
    return max(LEAST_STEPS, min(MOST_STEPS, MOST_NUMBERS // (num_layers * num_experts)))


def _earlier(folder: Path, before: int, shape: Sequence[int]) -> dict[int, Any]:
    """Steps that earlier starts recorded, where the model is the same."""
    try:
        old = read_load(folder / ROUTING)
    except FindingsError:
        return {}
    if (len(old.counts[0]), old.num_experts) != tuple(shape):
        return {}
    return {
        step: [[round(n) for n in row] for row in rows]
        for step, rows in zip(old.steps, old.counts, strict=True)
        if step < before
    }
