"""The peak memory of one rank on a real GPU, by memory term and by operator.

The tracker of rehearsals runs on real tensors, so that its terms can be compared with those of a rehearsal. For each
operator the CUDA allocator is asked too, which shows the memory that no tensor holds: workspaces of kernels, rounding,
libraries. `benchmarks/rehearsal_cuda.py` and the GPU tests call `measure_peak_breakdown`.
"""

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch

from threefold.dryrun.measured.real_rank import real_rank, run_real_step
from threefold.dryrun.rehearse_rank import ALLOCATOR_GRANULE_BYTES
from threefold.dryrun.tracking.allocation_origin import OriginTracker
from threefold.dryrun.tracking.memory_terms import (
    bytes_by_term,
    label_gradients,
    label_quantized_weights,
    label_states,
    moe_layer_paths,
)
from threefold.dryrun.tracking.memory_tracker import MemoryTracker
from threefold.engine.build import Parts
from threefold.plan.plan import Plan

_NUM_LISTED = 12  # tensors and operators in the result


@dataclass(frozen=True)
class PeakBreakdown:
    """The peak of a rank as the CUDA allocator reports it, taken apart.

    `peak_bytes` and `reserved_bytes` are from a step without the tracker. The other fields are from the next step, with
    it, where `tracked_bytes` is the sum of `terms`, `workspace_bytes` and `untracked_bytes`.
    """

    peak_bytes: int
    reserved_bytes: int
    tracked_bytes: int  # the allocator's peak while the tracker runs
    at: str  # phase, module and operator of that peak
    terms: dict[str, int]
    top: tuple[tuple[int, str], ...]  # the largest tensors: bytes and description
    workspace_bytes: int  # what the operator at the peak allocates beside its results
    untracked_bytes: int  # rounding of the allocator, and libraries
    operator_workspaces: dict[str, int]  # the most that each operator allocates beside its results

    def to_json(self) -> dict[str, Any]:
        return {
            "peak_bytes": self.peak_bytes,
            "reserved_bytes": self.reserved_bytes,
            "watched_bytes": self.tracked_bytes,
            "at": self.at,
            "terms": self.terms,
            "top": self.top,
            "working_bytes": self.workspace_bytes,
            "other_bytes": self.untracked_bytes,
            "beside": self.operator_workspaces,
        }


@dataclass
class AllocatorPeak:
    """The state when the allocator is at its highest."""

    num_changes: int = 0  # of the tracker
    tensor_bytes: int = 0  # live bytes that the tracker counts
    bytes_after_operator: int = 0  # allocated when the operator has returned
    at: str = ""


@dataclass
class AllocatorProbe:
    """Runs operators for the tracker and asks the device's allocator what each of them took."""

    device: torch.device
    bytes_before: int  # allocated before the rank was built; subtracted from every reading
    workspaces: dict[str, int] = field(default_factory=dict)  # by operator
    peak_bytes: int = 0  # during the last operator
    bytes_after: int = 0  # after the last operator
    highest_bytes: int = 0
    highest: AllocatorPeak = field(default_factory=AllocatorPeak)

    def __call__(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        torch.cuda.reset_peak_memory_stats(self.device)
        out = func(*args, **kwargs)
        allocated = torch.cuda.memory.memory_stats_as_nested_dict(self.device)["allocated_bytes"]["all"]
        self.peak_bytes = allocated["peak"] - self.bytes_before
        self.bytes_after = allocated["current"] - self.bytes_before
        return out

    def observer(self, tracker: MemoryTracker) -> Callable[[Any, tuple[Any, ...]], None]:
        """An observer for the tracker that keeps the highest readings."""

        def observe(func: Any, args: tuple[Any, ...]) -> None:
            name = str(func)
            self.workspaces[name] = max(self.workspaces.get(name, 0), self.peak_bytes - self.bytes_after)
            if self.peak_bytes > self.highest_bytes:
                self.highest_bytes = self.peak_bytes
                self.highest = AllocatorPeak(
                    num_changes=len(tracker.changes),
                    tensor_bytes=tracker.live_bytes,
                    bytes_after_operator=self.bytes_after,
                    at=f"{tracker.origins.current()}, {name}",
                )

        return observe

    def start_step(self) -> None:
        self.workspaces, self.highest_bytes = {}, 0


def measure_peak_breakdown(plan: Plan, rank: int, device: torch.device) -> PeakBreakdown:
    torch.cuda.init()  # the allocator has no statistics before
    before = torch.cuda.memory_allocated(device)
    origins, probe = OriginTracker(), AllocatorProbe(device, before)
    tracker = MemoryTracker(origins, ALLOCATOR_GRANULE_BYTES, run_operator=probe, ignored_device="cpu")
    tracker.observers.append(probe.observer(tracker))
    with ExitStack() as stack:
        with tracker:
            parts, reduced = stack.enter_context(real_rank(plan, rank, device))
        run_real_step(parts, reduced, plan)  # warms up: kernels are compiled, libraries allocate their memory
        torch.cuda.reset_peak_memory_stats(device)
        run_real_step(parts, reduced, plan)
        peak = torch.cuda.max_memory_allocated(device) - before
        reserved = torch.cuda.max_memory_reserved(device) - before
        with tracker, origins.module_hooks():
            origins.register_modules(parts.chunks)
            label_states(tracker, parts)
            tracker.start_step()
            probe.start_step()
            run_real_step(parts, reduced, plan, origins)
            label_gradients(tracker, parts)
            label_quantized_weights(tracker, parts)
        return _make_breakdown(parts, tracker, probe, peak, reserved)


def _make_breakdown(
    parts: Parts, tracker: MemoryTracker, probe: AllocatorProbe, peak: int, reserved: int
) -> PeakBreakdown:
    highest = probe.highest
    # The allocator's peak, with workspaces, may be at another operator than that of the tensors alone.
    tracker.num_changes_at_peak = highest.num_changes
    allocations, moe_layers = list(tracker.live_at_peak()), moe_layer_paths(parts.chunks.values())
    has_loss = any(chunk.has_loss for chunk in parts.chunks.values())
    largest = sorted(allocations, key=lambda pair: -pair[1])[:_NUM_LISTED]
    return PeakBreakdown(
        peak_bytes=peak,
        reserved_bytes=reserved,
        tracked_bytes=probe.highest_bytes,
        at=highest.at,
        terms=bytes_by_term(allocations, moe_layers, has_loss),
        top=tuple((size, f"{one.dtype_name} {list(one.shape)} {one.name or one.origin}") for one, size in largest),
        workspace_bytes=probe.highest_bytes - highest.bytes_after_operator,
        untracked_bytes=highest.bytes_after_operator - highest.tensor_bytes,
        operator_workspaces=dict(sorted(probe.workspaces.items(), key=lambda row: -row[1])[:_NUM_LISTED]),
    )
