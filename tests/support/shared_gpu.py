"""Starts ranks that share one GPU and have real NCCL communicators, or ranks on gloo where there is no GPU.

Tests and `benchmarks/nccl_ranks.py` use it. This module is the only one that sets the variable of
`threefold/engine/dist/join.py`. Ranks are new processes and not forks, because CUDA does not survive a fork; they
stay alive from one layout to the next (`PlanSession`). `THREEFOLD_TEST_SHARED_ON=cpu` runs the same on gloo.
"""

import json
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from repository import ROOT
from shared_gpu_cases import CASES, PRECISIONS, recipe_layouts

from threefold.engine.dist.join import SHARED_GPU
from threefold.engine.run.folder import METRICS
from threefold.launch.plan_session import PlanSession

SHARED_ON = "THREEFOLD_TEST_SHARED_ON"
LOG_LINES = 25  # of a rank that failed
REFERENCES_LIMIT = 3  # times the limit of a case
LIMIT_SECONDS = 600.0  # a hang fails, a busy machine does not
GOOD = ("equal", "near")
# A run whose ranks change: four with every axis of the fold, two, and one.
RESHARDED = {
    4: {"layout.tp": 2, "layout.ep": 2, "layout.pp": 2, "model.num_layers": 2},
    2: {"layout.ep": 2, "model.num_layers": 2},
    1: {"model.num_layers": 2},
}
# Losses of the steps behind a change of ranks, relative: sums in another order, through at most two updates.
RESHARD_TOLERANCE = {"fp32": 1e-5, "bf16": 1e-4}


def chip_here() -> str | None:
    """The chip of plans whose ranks share a device: "h200" on any GPU, "cpu" where a variable asks for it, or none."""
    if os.environ.get(SHARED_ON) == "cpu":
        return "cpu"
    import torch

    return "h200" if torch.cuda.is_available() else None


def shared_gpu_environment() -> dict[str, str]:
    """Variables of processes whose ranks share a GPU."""
    paths = [str(ROOT), str(ROOT / "tests" / "support"), os.environ.get("PYTHONPATH", "")]
    return {SHARED_GPU: "1", "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}


@dataclass(frozen=True)
class Outcome:
    """What became of one case: a kind of GOOD, DIFFERENT or ERROR, and what there is to say."""

    name: str
    kind: str
    said: str
    seconds: float
    log: str = ""  # of an error: the ends of the ranks' logs

    @property
    def is_good(self) -> bool:
        return self.kind in GOOD

    def __str__(self) -> str:
        return f"{self.name:<52} {self.kind:<10} {self.seconds:6.1f} s  {self.said}"


class SharedGpuRanks:
    """Some ranks that share a GPU, and the work that they can do."""

    def __init__(self, folder: Path, ranks: int, chip: str, limit: float = LIMIT_SECONDS) -> None:
        script = ROOT / "tests" / "support" / "shared_gpu_rank.py"
        self.folder, self.ranks, self.chip, self.limit = folder, ranks, chip, limit
        self._session = PlanSession(folder, ranks, shared_gpu_environment(), (str(script),))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._session.close()

    def compute_references(self, precisions: Sequence[str] = PRECISIONS) -> Outcome:
        """Compute what all cases are compared with, shared among the ranks. It is no loss where that fails: the first
        rank computes a reference that it does not have."""
        cases = [f"{name}/{precision}" for precision in precisions for name in CASES[self.ranks]]
        return self._outcome("references", "compute_references", cases=cases)

    def compare_layout(self, name: str, precision: str) -> Outcome:
        return self._outcome(f"{name} [{precision}]", "compare_layout", name=name, precision=precision)

    def start_groups(self) -> list[Outcome]:
        """Start the groups of every recipe's layout, scaled down to these ranks."""
        found = []
        for layout, recipes in recipe_layouts(self.ranks).items():
            degrees = {name: value for name, value in asdict(layout).items() if isinstance(value, int) and value > 1}
            text = " ".join(f"{name}{value}" for name, value in degrees.items() if name != "gpus")
            found.append(self._outcome(f"groups of {text} ({len(recipes)} recipes)", "start_groups", degrees=degrees))
        return found

    def train(
        self, fields: dict[str, Any], folder: Path, stop_at: int | None = None, copies: Sequence[Path] = ()
    ) -> dict[str, Any]:
        """Train a tiny plan, or go on with it; returns `error` where that failed."""
        return self._work(
            "train", fields=fields, folder=str(folder), stop_at=stop_at, copies=[str(copy) for copy in copies]
        )

    def _outcome(self, title: str, call: str, **more: Any) -> Outcome:
        began = time.monotonic()
        found = self._work(call, **more)
        kind, said = ("ERROR", found["error"]) if "error" in found else (found["kind"], found["said"])
        log = self.log() if kind == "ERROR" else ""
        return Outcome(f"{self.ranks} ranks: {title}", kind, said, time.monotonic() - began, log)

    def log(self) -> str:
        """The end of each rank's log, which the next start of the ranks clears."""
        paths = sorted(self.folder.glob("rank-*.log"))
        texts = ((path.stem, path.read_text(encoding="utf-8", errors="replace").splitlines()) for path in paths)
        return "\n".join(f"  {rank} | {line}" for rank, lines in texts for line in lines[-LOG_LINES:])

    def _work(self, call: str, **more: Any) -> dict[str, Any]:
        limit = REFERENCES_LIMIT if call == "compute_references" else 1
        return self._session.measure({"chip": self.chip, "call": call, **more}, {}, limit * self.limit)


def train_and_reshard(four: SharedGpuRanks, two: SharedGpuRanks, folder: Path, precision: str) -> list[Outcome]:
    """Two steps on four ranks; two more of the same run on four, on two and on one. Losses must go on alike."""
    base = {"job.steps": 4, "job.data": "synthetic", "job.micro_batch": 1, "knobs.precision": precision}
    # A rate at which weights move: a checkpoint that was not read shows in the next loss.
    base |= {"knobs.dispatcher": "alltoall", "job.lr": 5e-3, "job.warmup_steps": 1}
    fields = {n: {**base, "cluster.gpus": n, **layout} for n, layout in RESHARDED.items()}
    runs = {n: folder / f"{precision}-{n}" for n in fields}
    began = time.monotonic()
    steps = [lambda: four.train(fields[4], runs[4], 2, [runs[2], runs[1]]), lambda: four.train(fields[4], runs[4])]
    failed = next((found["error"] for step in steps if "error" in (found := step())), None)
    log = four.log() if failed else ""
    outcomes = []
    for ranks in (2, 1):
        name = f"resume 4 ranks on {ranks} [{precision}]"
        error = failed or two.train(fields[ranks], runs[ranks]).get("error")
        result = ("ERROR", error) if error else _compare_losses(runs[4], runs[ranks], RESHARD_TOLERANCE[precision])
        outcomes.append(Outcome(name, *result, time.monotonic() - began, (log or two.log()) if error else ""))
        began = time.monotonic()
    return outcomes


def _compare_losses(left: Path, right: Path, tolerance: float) -> tuple[str, str]:
    (a, b) = (losses_of(folder) for folder in (left, right))
    if a.keys() != b.keys() or not a:
        return "DIFFERENT", f"steps {sorted(a)} and {sorted(b)}"
    gap = max(abs(a[step] - b[step]) / abs(a[step]) for step in a)
    return "equal" if gap <= tolerance else "DIFFERENT", f"losses differ by {gap:.0e}"


def losses_of(folder: Path) -> dict[int, float]:
    """The loss of each step of a run; none of a run that never came to one."""
    path = folder / METRICS
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    lines = (json.loads(line) for line in text.splitlines())
    return {line["step"]: line["loss"] for line in lines if "loss" in line}


def run_cases(
    ranks: SharedGpuRanks, precisions: Sequence[str], tell: Callable[[Outcome], None], end: float = float("inf")
) -> None:
    """All layouts of so many ranks, until the monotonic clock says `end`."""
    for name in CASES[ranks.ranks]:
        for precision in precisions:
            if time.monotonic() > end:
                tell(Outcome(f"{ranks.ranks} ranks: {name} [{precision}]", "not run", "out of time", 0.0))
            else:
                tell(ranks.compare_layout(name, precision))
