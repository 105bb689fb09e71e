"""How fast a run is: useful and padded tokens, model FLOPs, MFU, and the memory of the rank that uses most.

`train.py` asks for the numbers after every step. Padding is computed, and so it is in `tokens_per_second`; it is in no
other number. FLOPs are those that `threefold estimate` counts, with attention over the useful tokens of each sequence.
"""

import resource
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch

from threefold.engine.batch import Batch
from threefold.engine.dist.collectives import all_reduce
from threefold.engine.dist.mesh import Mesh
from threefold.plan.plan import Plan
from threefold.spec.flops import flops_per_token


class StepWork(NamedTuple):
    """What all ranks together did in a step."""

    num_tokens: float  # padding included
    num_useful_tokens: float
    flops: float  # of the model, without padding and without recompute
    memory_bytes: float  # the peak of the rank that uses most


class Throughput:
    """Counts the work of steps. All ranks make the same calls."""

    def __init__(self, plan: Plan, mesh: Mesh) -> None:
        self.plan, self.mesh = plan, mesh
        self.peak_name, self.peak_flops = named_peak(plan) if mesh.device.type == "cuda" else (None, None)
        # One length is nearly all there is in pretraining; chats have thousands.
        self._flops_per_token = lru_cache(maxsize=65_536)(
            lambda length: flops_per_token(plan.model, length, plan.mtp, plan.layout.tp)
        )

    def count_work(self, batches: Sequence[Batch]) -> StepWork:
        """The work of the step that had these microbatches on this rank. Waits for the device."""
        lengths = [length for batch in batches for length in useful_lengths(batch)]
        flops = sum(length * self._flops_per_token(length) for length in lengths if length)
        num_tokens = sum(batch.tokens_BS.numel() for batch in batches)
        device = self.mesh.device
        sums = torch.tensor([num_tokens, sum(lengths), flops], dtype=torch.float64, device=device)
        largest = torch.tensor([_peak_memory_bytes(device)], dtype=torch.float64, device=device)
        pending = [all_reduce(sums, self.mesh.group("dp")), all_reduce(largest, self.mesh.world, "max")]
        for collective in pending:
            collective.wait()
        return StepWork(*torch.cat([sums, largest]).tolist())

    def metrics(self, work: StepWork, seconds: float) -> dict[str, Any]:
        """The numbers of a line of `metrics.jsonl`. Where no peak is known, there is no MFU."""
        per_gpu = work.flops / seconds / self.plan.layout.gpus
        named = {
            "tokens_per_second": work.num_tokens / seconds,
            "useful_tokens_per_second": work.num_useful_tokens / seconds,
            "tflops": work.flops / seconds / 1e12,
            "tflops_per_gpu": per_gpu / 1e12,
            "memory_bytes": int(work.memory_bytes),
        }
        return (
            named if self.peak_flops is None else named | {"mfu": per_gpu / self.peak_flops, "mfu_peak": self.peak_name}
        )


def named_peak(plan: Plan) -> tuple[str | None, float | None]:
    """The dense peak of the plan's precision, in words and in FLOP/s; none for a CPU, whose figures are nominal."""
    if plan.chip.architecture == "cpu":
        return None, None
    name, flops = plan.chip.dense_peak(plan.knobs.precision)
    return f"{plan.cluster.chip} {name} dense", flops


def useful_lengths(batch: Batch) -> tuple[int, ...]:
    """The tokens of each sequence that are no padding."""
    rows, length = batch.tokens_BS.shape
    return (length,) * rows if batch.lengths is None else batch.lengths


def _peak_memory_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
