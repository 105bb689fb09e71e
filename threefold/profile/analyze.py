"""From trace files to a diagnosis: reads, measures every device, names the wall and says what could help.

`threefold profile` calls `profile_traces`; `compare` and `report` use the `Profile` that it returns. The top level of a
profile is the device with the longest span.
"""

import os
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from threefold.findings import Finding, FindingsError
from threefold.notebook import ShownAsTable
from threefold.plan.plan import Plan
from threefold.profile.classify import Classified, distinct_rows
from threefold.profile.diagnose import Diagnosis, Straggler, diagnose, stragglers
from threefold.profile.evidence import evidence_of
from threefold.profile.kernel_names import CLASSES
from threefold.profile.measure import DeviceWalls, measure_devices
from threefold.profile.ranks.job import JobTrace, job_trace
from threefold.profile.ranks.rank_trace import RankTrace, rank_traces
from threefold.profile.readers.kineto import read_kineto
from threefold.profile.readers.nsight import MAGIC, read_nsight
from threefold.profile.readers.run_folder import RunLog, find_traces, read_run
from threefold.profile.readers.text_stream import unreadable
from threefold.profile.trace import Trace
from threefold.remedies.advise import Advice, advise_without_plan
from threefold.rules.all import advice
from threefold.safe_files import open_regular

MOST = 12


@dataclass(frozen=True, slots=True)
class LongKernel:
    """All calls of one kernel with operands of one shape."""

    name: str
    shape: str  # sizes and formats of a matrix multiplication's operands; empty where the trace has none
    kind: str  # communication, compute, copy or unknown
    calls: int
    seconds: float  # of all calls, also where they ran side by side
    median_seconds: float

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def longest_kernels(walls: DeviceWalls, trace: Trace, classes: Classified) -> list[LongKernel]:
    """The longest first."""
    spans, chosen = trace.device_spans, walls.spans
    texts = {operands: number for number, operands in enumerate(dict.fromkeys(trace.operands.values()))}
    shape_of = {link: texts[operands] for link, operands in trace.operands.items()}
    links, inverse = np.unique(classes.operator_link[chosen], return_inverse=True)
    shape = np.array([shape_of.get(link, -1) for link in links.tolist()], np.int64)[inverse.reshape(-1)]
    rows, where = distinct_rows(spans.name[chosen], shape, classes.label[chosen])
    length = (spans.end - spans.start)[chosen]
    total, longest, operands = np.bincount(where, length, minlength=len(rows)), list[LongKernel](), list(texts)
    for place in np.argsort(-total, kind="stable")[:MOST].tolist():
        name, number, label = rows[place]
        own = length[where == place]
        words = _words(*operands[number]) if number >= 0 else ""
        seconds, median = float(own.sum()), float(np.median(own))
        longest.append(LongKernel(trace.names[name], words, CLASSES[label], len(own), seconds, median))
    return longest


def _words(sizes: str, types: str) -> str:
    """`[[16, 2048], [2048, 768]]` and `["c10::BFloat16", ...]` in one line without quotes."""
    formats = dict.fromkeys(word.strip(' "[]').removeprefix("c10::").lower() for word in types.split(","))
    return " ".join([sizes.replace(" ", ""), *filter(None, formats)])


MOST_ADVICE = 8  # pieces that stand under a profile


@dataclass(slots=True, repr=False)
class Profile(ShownAsTable):
    """What was measured of one or more traces, and what follows from it."""

    devices: list[DeviceWalls]
    top: DeviceWalls  # the device with the longest span
    top_trace: Trace  # the file that it is in
    top_classes: Classified
    diagnosis: Diagnosis
    advice: list[Advice]
    longest: list[LongKernel]  # kernels of the device with the longest span
    slow_ranks: list[Straggler]
    plan: Plan | None
    log: RunLog
    job: JobTrace

    def summary(self) -> str:
        found = self.diagnosis
        return f"the wall is {found.dominant} (confidence {found.confidence:.0%}), {self.top.span_seconds:.4g} s"

    def table(self) -> tuple[list[str], list[list[str]]]:
        """The evidence for each wall, and then what could help."""
        rows = [[wall, text] for wall, texts in self.diagnosis.evidence.items() for text in texts]
        return ["wall", "evidence"], [*rows, *(["advice", str(piece)] for piece in self.advice)]

    def to_json(self) -> dict[str, Any]:
        walls = _walls_json(self.top, self.diagnosis, self.slow_ranks, self.log)
        return {
            "span_seconds": self.top.span_seconds,
            "walls": walls,
            "dominant": self.diagnosis.dominant,
            "confidence": self.diagnosis.confidence,
            "fixes": [piece.to_json() for piece in self.advice],
            "longest": [kernel.to_json() for kernel in self.longest],
            "part_seconds": self.log.part_seconds,
            "devices": [self._device_json(device) for device in self.devices],
            "job": self.job.to_json(),
        }

    def _device_json(self, device: DeviceWalls) -> dict[str, Any]:
        found = self.diagnosis if device is self.top else diagnose(device, self.slow_ranks, self.plan, self.log)
        return {
            "device": device.device.key,
            "name": device.device.name,
            "rank": device.rank,
            "file": str(device.path),
            "span_seconds": device.span_seconds,
            "num_events": device.num_events,
            "num_steps": device.num_steps,
            "step_seconds": device.step_seconds,
            "walls": _walls_json(device, found, self.slow_ranks, self.log),
            "dominant": found.dominant,
            "confidence": found.confidence,
        }


def profile_traces(
    paths: Sequence[Path],
    plan: Plan | None = None,
    step_range: str | None = None,
    unprofiled_seconds: float | None = None,
) -> Profile:
    """Read traces, folders of traces and run folders, and diagnose them. A run's plan serves where none is given.

    `step_range` names the range around a step, and `unprofiled_seconds` is the length of a step without a profiler.
    """
    files, log = list[Path](), RunLog()
    for path in paths:
        if path.is_dir():
            files += find_traces(path)
            own_plan, log = read_run(path)
            plan = plan or own_plan
        else:
            files.append(path)
    layout, chip = (plan.layout, plan.chip) if plan else (None, None)
    devices: list[DeviceWalls] = []
    ranks: list[RankTrace] = []
    top: tuple[DeviceWalls, Trace, Classified] | None = None
    for file in files:
        trace = read_trace(file)
        found, classes = measure_devices(trace, layout, chip if chip and chip.architecture != "cpu" else None)
        devices += found
        ranks += rank_traces(trace, classes, layout, step_range)
        longest = max(found, key=lambda device: device.span_seconds, default=None)
        if longest is not None and (top is None or longest.span_seconds > top[0].span_seconds):
            top = longest, trace, classes
    if top is None:
        raise FindingsError([_no_work(files)])
    slow = stragglers(devices)
    found_wall = diagnose(top[0], slow, plan, log)
    job = job_trace(ranks, layout, log.step_lengths, unprofiled_seconds, log.mfu)
    evidence = evidence_of(*top, found_wall, slow, plan, log)
    pieces = advice(plan, evidence, MOST_ADVICE) if plan else ()
    if not any(piece.changes for piece in pieces):
        pieces = (*pieces, *advise_without_plan(replace(evidence, seen=() if plan else evidence.seen)))
    return Profile(devices, *top, found_wall, list(pieces), longest_kernels(*top), slow, plan, log, job)


def read_trace(path: Path) -> Trace:
    """Read one trace file of a kind that its first bytes tell."""
    try:
        with open_regular(path) as file:
            head = file.read(len(MAGIC))
            file.seek(0)
            size = os.fstat(file.fileno()).st_size
            if size == 0:
                raise unreadable(path, "the file is empty")
            if head[:4] == b"PK\x03\x04":
                raise unreadable(path, "it is a zip file", "unpack it, and give the trace inside")
            if head[:4] == b"\x80\x04\x95\x00" or path.suffix == ".pickle":
                raise unreadable(path, "it is a pickle, and no trace", "threefold diagnose FILE reads memory snapshots")
            if path.name.endswith((".nsys-rep", ".qdrep")):
                raise unreadable(path, "it is a report of Nsight Systems", "nsys export --type sqlite REPORT")
            trace = read_nsight(path) if head == MAGIC else read_kineto(path, file)
    except OSError as error:
        advice = "give a trace file, a folder of traces or the folder of a run"
        raise unreadable(path, f"cannot be read: {error.strerror or error}", advice) from None
    if trace.rank is None:
        named = re.search(r"rank[-_]?(\d{1,6})", path.name)
        if named:
            trace.rank, trace.capture.rank_source = int(named[1]), "file name"
    return trace


def _no_work(files: Sequence[Path]) -> Finding:
    return Finding(
        rule="trace-has-work",
        at=", ".join(str(file) for file in files[:3]),
        problem="there is neither a GPU kernel nor a CPU operator with a length in it",
        advice="record with activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA], over at least one step",
    )


def _walls_json(walls: DeviceWalls, found: Diagnosis, slow: Sequence[Straggler], log: RunLog) -> dict[str, Any]:
    host, room = walls.host, found.memory
    return {
        "memory": {
            "peak_bytes": room.peak_bytes,
            "capacity_bytes": room.capacity_bytes,
            "headroom_bytes": room.headroom_bytes,
            "source": room.source,
            "allocator_calls": walls.allocator_calls,
            "allocator_seconds": walls.allocator_seconds,
            "evidence": found.evidence["memory"],
        },
        "communication": {
            "total_seconds": walls.communication.total_seconds,
            "exposed_seconds": walls.communication.exposed_seconds,
            "hidden_fraction": walls.communication.hidden_fraction,
            "by_axis": {
                axis: {
                    "total_seconds": one.total_seconds,
                    "exposed_seconds": one.exposed_seconds,
                    "hidden_fraction": one.hidden_fraction,
                }
                for axis, one in walls.by_axis.items()
            },
            "bubble_seconds": walls.by_axis["pp"].exposed_seconds if "pp" in walls.by_axis else None,
            "stragglers": [
                {"device": one.device, "own_seconds": one.own_seconds, "over_median": one.over_median} for one in slow
            ],
            "evidence": found.evidence["communication"],
        },
        "host": {
            "idle_seconds": host.idle_seconds,
            "host_bound_seconds": host.host_bound_seconds if host.has_launches else None,
            "launch_gap_seconds": host.launch_gap_seconds if host.has_launches else None,
            "num_gaps": host.num_gaps,
            "longest_gap_seconds": host.longest_gap_seconds,
            "sync_seconds": host.sync_seconds,
            "num_launches": host.num_launches,
            "evidence": found.evidence["host"],
        },
        "compute": {
            "total_seconds": walls.compute_seconds,
            "by_kind": walls.compute_by_kind,
            "by_region": walls.by_region,
            "median_kernel_seconds": walls.median_kernel_seconds,
            "gemm_efficiency": walls.gemm.efficiency if walls.gemm else None,
            "gemm_shape_limit": walls.gemm.shape_limit if walls.gemm else None,
            "expert_imbalance": log.expert_imbalance,
            "evidence": found.evidence["compute"],
        },
        "link": {
            direction: {
                "bytes": one.num_bytes,
                "total_seconds": one.total_seconds,
                "exposed_seconds": one.exposed_seconds,
                "bytes_per_second": one.bytes_per_second,
            }
            for direction, one in walls.links.items()
        },
        "unknown": {
            "total_seconds": walls.unknown_seconds,
            "names": walls.unknown_names,
            "num_unended": walls.num_unended,
            "evidence": found.evidence["unknown"],
        },
    }
