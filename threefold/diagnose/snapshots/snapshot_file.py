"""Reads a snapshot of `torch.cuda.memory._dump_snapshot` into plain records, without running the pickle.

A snapshot has the allocator's segments as they are at its end, the events that led there (the newest ones, a ring of
100,000 entries by default in Megatron), and the ranges of the profiler if one ran. The file may be crafted: nothing in
it is called, and lists that refer to each other again and again are bounded.

The innermost frame outside of PyTorch is the line that asked for the memory. Where that is code of Threefold's engine,
or of a predicted snapshot, the allocation also has a term of `plan/terms.py`, so that it can be set against an
estimate.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from threefold.inert_pickle import read_inert
from threefold.plan.terms import MEMORY_TERMS
from threefold.safe_files import read_bounded

PREDICTED = "threefold predicts"  # the file name of frames in predicted snapshots; the frame's name is the term
NO_SOURCE = "no source recorded"
_MAX_FRAMES = 256
_NOT_THE_PROGRAM = re.compile(
    r"(^|/)torch/|(^|/)(contextlib|functools|threading)\.py$|\.(cpp|cc|cu|h|hpp|so[\d.]*)$|^\?\?$|^<|^$|^:0$"
)
# Part of a path in the engine -> term. The first match counts.
_TERMS = (
    ("/autograd/recompute", "recompute"),
    ("/optim/", "optimizer"),
    ("/data_parallel/", "gradients"),
    ("/models/init_weights", "weights"),
    ("/models/build", "weights"),
    ("/weights/", "weights"),
    ("/precision/weight_cache", "quantized_weights"),
    ("/vision/", "vision"),
    ("/attention/", "attention"),
    ("/moe/router", "router"),
    ("/moe/balance", "router"),
    ("/moe/experts", "experts"),
    ("/precision/low_precision_experts", "experts"),
    ("/dispatch/", "dispatch"),
    ("/models/head", "logits"),
    ("/graphs/", "graphs"),
    ("/layers/", "norms"),
    ("/moe/layer", "dispatch"),
    ("/models/", "norms"),
)


class Sources:
    """Stacks by number, each with its line and its term. A pickle has equal stacks once, and each is looked at once."""

    def __init__(self) -> None:
        self.lines: list[str] = [NO_SOURCE]
        self.terms: list[str] = [""]
        self._known: dict[tuple[str, str], int] = {(NO_SOURCE, ""): 0}
        self._of_object: dict[int, int] = {}

    def index(self, frames: Any) -> int:
        """The number of a stack's line and term. The caller keeps the frames alive."""
        key = id(frames)
        if key not in self._of_object:
            place = _line_and_term(frames if isinstance(frames, list) else [])
            if place not in self._known:
                self._known[place] = len(self.lines)
                self.lines.append(place[0])
                self.terms.append(place[1])
            self._of_object[key] = self._known[place]
        return self._of_object[key]


def _line_and_term(frames: list[Any]) -> tuple[str, str]:
    line, term = "", ""
    for frame in frames[:_MAX_FRAMES]:
        if not isinstance(frame, dict):
            continue
        file, name = str(frame.get("filename"))[:1000], str(frame.get("name"))[:200]
        if file == PREDICTED:
            return f"{PREDICTED}: {name}", name if name in MEMORY_TERMS else ""
        if not line and not _NOT_THE_PROGRAM.search(file):
            number = frame.get("line")
            line = f"{file}:{number if isinstance(number, int) else 0} {name}"
        if not term and "threefold/engine/" in file:
            term = next((found for part, found in _TERMS if part in file), "")
    if not line and frames and isinstance(frames[0], dict):
        line = f"PyTorch alone: {str(frames[0].get('name'))[:100]}"
    return line or NO_SOURCE, term


MAX_BYTES = 2**28  # of a file: a ring of 200,000 entries with stacks has some 60 MiB
MAX_RECORDS = 4_000_000  # events and blocks that are looked at
_LIVE = ("active_allocated", "active_pending_free", "active_awaiting_free")
_RANK = re.compile(r"rank-?(\d{1,6})|[_-](\d{1,6})\.pickle$")


@dataclass(frozen=True, slots=True)
class Event:
    """One entry of the allocator's history."""

    action: str  # alloc, free_requested, free_completed, segment_alloc, segment_free, segment_map, segment_unmap, oom
    address: int
    num_bytes: int
    source: int  # index into `Snapshot.sources`
    microsecond: int
    free_bytes: int = 0  # of the device, at an OOM


@dataclass(frozen=True, slots=True)
class Block:
    """A piece of a segment at the end of the recording."""

    address: int
    num_bytes: int  # as the allocator rounds it
    requested_bytes: int
    state: str
    source: int

    @property
    def is_active(self) -> bool:
        return self.state in _LIVE


@dataclass(slots=True)
class DeviceMemory:
    """One device of a snapshot."""

    number: int
    events: list[Event] = field(default_factory=list)
    blocks: list[Block] = field(default_factory=list)
    reserved_bytes: int = 0


@dataclass(slots=True)
class Snapshot:
    path: Path
    rank: int | None  # by the file's name, the only place that has it
    is_oom: bool
    devices: list[DeviceMemory]
    sources: Sources
    steps: list[tuple[str, int, int]]  # names, starts and ends of the profiler's steps, in microseconds
    settings: dict[str, Any]


def read_snapshot(path: Path) -> Snapshot:
    """Read a file. Raises OSError or ValueError."""
    content = read_inert(read_bounded(path, MAX_BYTES), lambda name: False, "a memory snapshot")
    if not isinstance(content, dict) or not isinstance(content.get("segments"), list):
        raise ValueError("it is no memory snapshot: it has no segments")
    reader = _Reader(content)
    named = _RANK.search(path.name)
    return Snapshot(
        path=path,
        rank=int(named[1] or named[2]) if named else None,
        is_oom="oom" in path.name,
        devices=[one for one in reader.devices() if one.events or one.blocks],
        sources=reader.sources,
        steps=list(_steps(content.get("external_annotations"))),
        settings=content["allocator_settings"] if isinstance(content.get("allocator_settings"), dict) else {},
    )


class _Reader:
    def __init__(self, content: dict[Any, Any]) -> None:
        self.content, self.sources = content, Sources()
        self.by_number: dict[int, DeviceMemory] = {}

    def devices(self) -> list[DeviceMemory]:
        listed = [segment.get("blocks") for segment in _dicts(self.content["segments"])]
        traces = self.content.get("device_traces")
        listed += traces if isinstance(traces, list) else []
        if sum(len(one) for one in listed if isinstance(one, list)) > MAX_RECORDS:  # lists may be shared
            raise ValueError(f"it has more than {MAX_RECORDS:,} events and blocks")
        for segment in _dicts(self.content["segments"]):
            self._add_segment(segment)
        for number, trace in enumerate(traces if isinstance(traces, list) else []):
            for event in _dicts(trace):
                address, size = _whole(event.get("addr")), _whole(event.get("size"))
                source = self.sources.index(event.get("frames"))
                more = (source, _whole(event.get("time_us")), _whole(event.get("device_free")))
                self._device(number).events.append(Event(str(event.get("action"))[:40], address, size, *more))
        return [self.by_number[number] for number in sorted(self.by_number)]

    def _device(self, number: int) -> DeviceMemory:
        return self.by_number.setdefault(number, DeviceMemory(number))

    def _add_segment(self, segment: dict[Any, Any]) -> None:
        device = self._device(_whole(segment.get("device")))
        device.reserved_bytes += _whole(segment.get("total_size"))
        at = _whole(segment.get("address"))
        for block in _dicts(segment.get("blocks")):
            size = _whole(block.get("size"))
            history = block.get("history")  # of releases before 2.1
            frames = block.get("frames")
            if frames is None and isinstance(history, list) and history and isinstance(history[0], dict):
                frames = history[0].get("frames")
            requested = _whole(block.get("requested_size"), size)
            address = _whole(block.get("address"), at)
            source = self.sources.index(frames)
            device.blocks.append(Block(address, size, requested, str(block.get("state"))[:40], source))
            at += size


def _dicts(value: Any) -> Iterator[dict[Any, Any]]:
    yield from (one for one in (value if isinstance(value, list) else []) if isinstance(one, dict))


def _whole(value: Any, default: int = 0) -> int:
    return value if isinstance(value, int) and 0 <= value < 2**64 else default


def _steps(annotations: Any) -> Iterator[tuple[str, int, int]]:
    """The profiler's steps; there are none unless its trace was recorded in the same run."""
    opened: dict[str, int] = {}
    for one in _dicts(annotations):
        name, at = str(one.get("name"))[:100], _whole(one.get("time_us"))
        if not name.startswith("ProfilerStep#"):
            continue
        if one.get("stage") == "START":
            opened[name] = at
        elif name in opened:
            yield name, opened.pop(name), at
