"""Copies of a device by direction and stream: bytes, time, rate, whether host memory was pinned, and what they block.

A copy is a bottleneck only where its stream is full of them or compute waits for it, so both are stated.
"""

import re
from dataclasses import dataclass

import numpy as np

from threefold.profile.intervals import Union, clip, union
from threefold.profile.kernel_names import COPY
from threefold.profile.steps.budget import DeviceSteps
from threefold.profile.steps.taxonomy import KINDS
from threefold.profile.trace import COPY as COPY_EVENT
from threefold.profile.trace import Ints, Trace

_DIRECTION = re.compile(r"\b([HDP]to[HDP])\b")
FULL = 0.9  # of the step, from which a stream of copies is full


@dataclass(frozen=True, slots=True)
class CopyUse:
    """Copies in one direction on one stream, per step."""

    direction: str  # "HtoD", "DtoH", "DtoD", "PtoP" or "Memset"
    stream: int
    count: float
    num_bytes: float | None  # None where the trace does not say
    seconds: float
    share: float  # of the step
    is_pinned: bool | None  # of host memory; None where the trace does not say, or no host memory takes part
    blocking_seconds: float  # compute waited for copies of this direction, on any stream

    @property
    def bytes_per_second(self) -> float | None:
        return self.num_bytes / self.seconds if self.num_bytes and self.seconds else None

    @property
    def is_bottleneck(self) -> bool:
        return self.share >= FULL or self.blocking_seconds > 0


def copies_of(trace: Trace, chosen: Ints, kinds: Ints, steps: DeviceSteps) -> list[CopyUse]:
    """The copies of a device inside its steps, longest first."""
    spans = trace.device_spans
    own = chosen[(kinds[chosen] == KINDS.index(COPY)) & (spans.kind[chosen] == COPY_EVENT)]
    is_inside = [(spans.start[own] < one.end) & (spans.end[own] > one.start) for one in steps.windows.windows]
    own = own[np.logical_or.reduce(is_inside)]
    directions = np.array([_direction(name) for name in trace.names] or [""])[spans.name[own]]
    found = []
    for direction, stream in sorted(set(zip(directions.tolist(), spans.stream[own].tolist(), strict=True))):
        part = own[(directions == direction) & (spans.stream[own] == stream)]
        found.append(_use(trace, part, direction, stream, steps))
    return sorted(found, key=lambda one: -one.seconds)


def _use(trace: Trace, part: Ints, direction: str, stream: int, steps: DeviceSteps) -> CopyUse:
    spans, windows = trace.device_spans, steps.windows.windows
    num_steps, total = len(windows), sum(window.seconds for window in windows)

    def inside(times: Union) -> float:
        return sum(clip(times, window.start, window.end).seconds for window in windows)

    seconds, sizes = inside(union(spans.start[part], spans.end[part])), spans.num_bytes[part]
    blocked_by = {label: times for label, times in steps.causes.blocked_by.items() if label.startswith("Mem")}
    return CopyUse(
        direction=direction,
        stream=stream,
        count=len(part) / num_steps,
        num_bytes=float(sizes.sum(dtype=np.float64)) / num_steps if (sizes >= 0).all() else None,
        seconds=seconds / num_steps,
        share=seconds / total if total else 0.0,
        is_pinned=_is_pinned({trace.names[name] for name in spans.name[part].tolist()}),
        blocking_seconds=sum(inside(one) for label, one in blocked_by.items() if _direction(label) == direction)
        / num_steps,
    )


def _direction(name: str) -> str:
    match = _DIRECTION.search(name)
    return match[1] if match else "Memset" if "set" in name.lower() else "copy"


def _is_pinned(names: set[str]) -> bool | None:
    """Whether host memory was pinned, by the names of the copies: "Memcpy HtoD (Pinned -> Device)"."""
    if any("Pageable" in name for name in names):
        return False
    return True if any("Pinned" in name for name in names) else None
