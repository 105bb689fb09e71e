"""A trace in memory: columns of numpy arrays, whichever profiler wrote the file.

The readers (`profile/readers/`) fill a `Trace`; `classify.py` and `measure.py` read it. Times are seconds since the
first event of the file. Names, threads, devices and collectives are kept once each, and columns hold their index; -1
says that there is none.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

KERNEL, COPY, HOST_OPERATOR = 0, 1, 2  # what a device event is: a kernel, a copy or memset, an operator on a CPU


@dataclass(frozen=True, slots=True)
class Collective:
    """What the arguments of a kernel say about the collective that it belongs to."""

    operation: str = ""  # "all_to_allv", "_reduce_scatter_base"
    group_name: str = ""  # torch's name of the process group, a number in most cases
    group_description: str = ""  # what the program called the group: "tp", "EXPERT_MODEL_PARALLEL_GROUP"
    ranks: tuple[int, ...] = ()  # of the group; empty where the trace leaves them out or shortens the list
    group_size: int = 0


@dataclass(frozen=True, slots=True)
class Device:
    """A GPU of a trace, or the process of a rank on CPUs."""

    key: str  # "gpu 0", "process 4242"
    name: str = ""  # "NVIDIA H200"
    memory_bytes: int = 0  # capacity; 0 where the trace does not say
    is_cpu: bool = False
    process: int | None = None  # of the host, where one file has several


@dataclass(slots=True)
class HostSpans:
    """Spans on threads of the host: operators, calls of the CUDA runtime, or annotations."""

    start: Floats
    end: Floats
    name: Ints
    thread: Ints
    link: Ints  # operators and annotations: external id; runtime calls: correlation

    def __len__(self) -> int:
        return len(self.start)

    def __getitem__(self, chosen: NDArray[np.bool_] | Ints) -> "HostSpans":
        return HostSpans(
            self.start[chosen], self.end[chosen], self.name[chosen], self.thread[chosen], self.link[chosen]
        )


@dataclass(slots=True)
class DeviceSpans:
    """Kernels and copies on devices."""

    start: Floats
    end: Floats
    name: Ints
    device: Ints
    stream: Ints
    kind: Ints  # KERNEL, COPY or HOST_OPERATOR
    correlation: Ints
    external: Ints  # external id of the operator that launched it
    collective: Ints  # index into `Trace.collectives`
    num_bytes: Ints  # that a copy moves; -1 where the trace does not say

    def __len__(self) -> int:
        return len(self.start)


@dataclass(slots=True)
class StreamWaits:
    """Waits of one stream for an event that another stream recorded. Moments are those of the host's calls, because
    profilers may write 0 as the time of the wait itself."""

    device: Ints
    stream: Ints  # that waits
    moment: Floats  # of the call that made it wait
    producer_stream: Ints  # on which the event was recorded, -1 for unknown
    recorded: Floats  # the moment of the call that recorded the event, NaN for unknown

    def __len__(self) -> int:
        return len(self.stream)


def no_waits() -> StreamWaits:
    none = np.empty(0, np.int64)
    return StreamWaits(none, none, np.empty(0), none, np.empty(0))


@dataclass(slots=True)
class Capture:
    """How a trace was recorded, as far as it says: what its numbers can prove depends on it."""

    profiler: str = ""  # with its version
    host: str = ""
    world_size: int | None = None
    rank_source: str = ""  # "trace" or "file name"
    epoch_nanoseconds: int | None = None  # the time since 1970 at which the trace's times are 0
    call_stack_rate: float | None = None  # share of the runtime's calls that have a call stack; None: not recorded
    warnings: list[str] = field(default_factory=list)  # of the profiler itself, and tables that are missing
    metrics: Mapping[str, float] = field(default_factory=dict)  # means of sampled GPU metrics, by name


@dataclass(slots=True)
class MemoryUse:
    """The highest allocated and reserved bytes of a device's allocator in the trace."""

    allocated_bytes: int = 0
    reserved_bytes: int = 0


@dataclass(slots=True)
class Trace:
    """One trace file."""

    path: Path
    names: list[str]
    devices: list[Device]
    device_spans: DeviceSpans
    operators: HostSpans
    launches: HostSpans  # calls of the CUDA runtime and driver
    annotations: HostSpans
    device_annotations: DeviceSpans
    collectives: list[Collective]
    launch_external: Ints = field(
        default_factory=lambda: np.empty(0, np.int64)
    )  # operators of `launches`, by external id
    operator_collectives: Mapping[int, int] = field(default_factory=dict)  # index of the collective, by external id
    memory: Mapping[int, MemoryUse] = field(default_factory=dict)  # by index of the device
    # Sizes and dtypes of operands, by external id of matrix multiplications: ("[[8, 4], [4, 2]]", "BFloat16").
    operands: Mapping[int, tuple[str, str]] = field(default_factory=dict)
    waits: StreamWaits = field(default_factory=no_waits)
    capture: Capture = field(default_factory=Capture)
    thread_processes: list[int] = field(default_factory=list)  # by index of the thread, where a file has several
    groups: Mapping[str, Collective] = field(default_factory=dict)  # process groups by torch's name
    rank: int | None = None
    num_unended: int = 0  # device events that begin and never end
    first_microsecond: float = 0.0  # the time of the file at which our times are 0
    end_of_events: int | None = None  # where a JSON trace closes its list of events, in bytes of decompressed text


def no_device_spans() -> DeviceSpans:
    return DeviceSpans(np.empty(0), np.empty(0), *(np.empty(0, np.int64) for _ in range(8)))
