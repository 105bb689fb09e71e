"""Reads a trace of PyTorch's profiler (Kineto) or another Chrome trace into columns.

An event's category says what it is: a kernel, a copy, an operator, a call of the runtime, an annotation. Flows and
Python frames are skipped: a kernel names the call that launched it by `correlation` and the operator by `External id`.
Device events may also come as pairs of begin and end (`B`, `E`); one without an end has no length and is left out.
"""

import gc
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from threefold.profile.readers.columns import Columns, NameTable, resolved
from threefold.profile.readers.json_events import Args, Event, EventReader
from threefold.profile.readers.kineto_values import (
    capture_of,
    device_of,
    from_headers,
    number_of,
    numbers_of,
    ranks_of,
    text_of,
    with_host_devices,
)
from threefold.profile.readers.text_stream import MAX_EVENTS, MAX_NAMES, text_pieces, unreadable
from threefold.profile.trace import COPY, KERNEL, Collective, DeviceSpans, HostSpans, MemoryUse, Trace

# What the categories of PyTorch's releases (and of ROCm's and XPU's profilers) stand for, in lower case.
_KINDS = {
    "kernel": "kernel",
    "concurrent_kernel": "kernel",
    "gpu_memcpy": "copy",
    "gpu_memset": "copy",
    "memcpy": "copy",
    "memset": "copy",
    "cpu_op": "operator",
    "operator": "operator",
    "cuda_runtime": "launch",
    "cuda_driver": "launch",
    "runtime": "launch",
    "hip_runtime": "launch",
    "xpu_runtime": "launch",
    "user_annotation": "annotation",
    "gpu_user_annotation": "device_annotation",
    "cuda_sync": "wait",
    "cpu_instant_event": "instant",
}
_ON_DEVICE = ("kernel", "copy", "device_annotation")
_MATMULS = re.compile(r"(^|::)_?(scaled_)?(addmm|mm|bmm|baddbmm|linear|grouped_mm|matmul)\b")
_MICROSECOND = 1e-6
_CUDA = 1  # the device type of CUDA in memory events


def read_kineto(path: Path, file: BinaryIO) -> Trace:
    """Read a Chrome trace from an open file."""
    with text_pieces(path, file) as pieces, _without_gc():
        reader = EventReader(path, pieces)
        collector = _Collector(path)
        for events in reader.events():
            collector.add(events)
    trace = collector.trace(reader.headers)
    trace.end_of_events = reader.end_of_events if reader.num_events else None
    return trace


@contextmanager
def _without_gc() -> Iterator[None]:
    """Millions of small objects come and go; the collector would look at them again and again for nothing."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


class _Collector:
    """Sorts events by what they are and keeps their fields in columns."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.names, self.threads, self.devices = NameTable(), NameTable(), NameTable()
        self.collectives: dict[Collective, int] = {}
        self.on_device = Columns(10)
        self.device_annotations = Columns(10)
        self.waits = Columns(7)
        self.operators, self.launches, self.annotations = Columns(5), Columns(5), Columns(5)
        self.launch_external: list[Any] = [np.empty(0, np.int64)]
        self.operator_collectives: dict[int, int] = {}
        self.operands: dict[int, tuple[str, str]] = {}
        self.memory: dict[int, MemoryUse] = {}
        self.halves: list[tuple[str, str, Event]] = []  # begins and ends of device events: lane, kind, event
        self._kind_of: dict[str | None, str] = {}
        self._seen_args: dict[bytes, str] = {}
        self._said: dict[Any, int] = {}  # indices of collectives by what the arguments say

    def add(self, events: list[Event]) -> None:
        """Sort one piece of the trace."""
        sorted_events: dict[str, list[Event]] = {}
        by_category = {category: sorted_events.setdefault(kind, []) for category, kind in self._kind_of.items()}
        for event in events:
            found = by_category.get(event.cat)
            if found is None:
                if event.args is None and event.cat is None:
                    continue
                kind = self._kind(event)
                found = sorted_events.setdefault(kind, [])
                if event.cat in self._kind_of:
                    by_category[event.cat] = found
            found.append(event)
        sorted_events.pop("other", None)
        self._add_memory(sorted_events.pop("instant", []))
        for kind, found in sorted_events.items():
            self._add_spans(kind, self._whole(kind, found))
        self._check_limits()

    def _kind(self, event: Event) -> str:
        """The kind of a category that was not seen before. An event without one may still be a kernel by its fields."""
        category = (event.cat or "").lower()
        if not category:
            args = event.args
            is_kernel = args is not None and args.stream is not None and args.correlation is not None
            return "kernel" if is_kernel and event.ph in ("X", "B", "E") else "other"
        kind = next((_KINDS[word] for word in category.split(",") if word in _KINDS), "other")
        if len(self._kind_of) < 1000:
            self._kind_of[event.cat] = kind
        return kind

    def _whole(self, kind: str, events: list[Event]) -> list[Event]:
        """The events with a start and a length; begins and ends are set aside until all are known."""
        found = [event for event in events if event.ph == "X" and event.dur is not None and event.ts is not None]
        if len(found) < len(events):
            halves = (event for event in events if event.ph in ("B", "E") or (event.ph == "X" and event.dur is None))
            self.halves += [(f"{event.pid} {event.tid}", kind, event) for event in halves]
        return found

    def _add_spans(self, kind: str, events: list[Event]) -> None:
        if not events:
            return
        start = np.array([event.ts for event in events])
        length = np.array([event.dur for event in events])
        self._check_times(kind, events, start, length)
        names = self.names.indices([event.name for event in events])
        args = [event.args or _NO_ARGS for event in events]
        if kind == "wait":
            self._add_waits(events, args, start)
            return
        if kind in _ON_DEVICE:
            self._add_device_spans(kind, events, args, start, length, names)
            return
        threads = self.threads.indices(_plain_all([(event.pid, event.tid) for event in events]))
        links = numbers_of([one.correlation for one in args] if kind == "launch" else [one.external for one in args])
        {"operator": self.operators, "launch": self.launches, "annotation": self.annotations}[kind].add(
            start, start + length, names, threads, links
        )
        if kind == "launch":
            self.launch_external.append(numbers_of([one.external for one in args]))
        elif kind == "operator":
            self._add_operands(events, names)
            for one in args:
                if one.group_name or one.operation is not None:
                    self.operator_collectives[number_of(one.external)] = self._collective(one)

    def _add_device_spans(
        self, kind: str, events: list[Event], args: list[Args], start: Any, length: Any, names: Any
    ) -> None:
        pairs = list(zip(events, args, strict=True))
        devices = [(event.pid if one.device is None else one.device,) for event, one in pairs]
        streams = [event.tid if one.stream is None else one.stream for event, one in pairs]
        collectives = [-1 if one.operation is None and not one.group_name else self._collective(one) for one in args]
        indices = self.devices.indices(_plain_all(devices))
        is_copy = kind == "copy"
        columns = self.device_annotations if kind == "device_annotation" else self.on_device
        columns.add(
            start,
            start + length,
            names,
            indices,
            numbers_of(streams),
            np.full(len(events), COPY if is_copy else KERNEL),
            numbers_of([one.correlation for one in args]),
            numbers_of([one.external for one in args]),
            np.array(collectives, np.int64),
            numbers_of([one.num_bytes for one in args]) if is_copy else np.full(len(events), -1),
        )

    def _add_waits(self, events: list[Event], args: list[Args], start: Any) -> None:
        """Waits of a stream for an event, with the calls that made it wait and that recorded the event."""
        pairs = [pair for pair in zip(events, args, start, strict=True) if pair[0].name == "Stream Wait Event"]
        if pairs:
            devices = _plain_all([(event.pid if one.device is None else one.device,) for event, one, _ in pairs])
            streams = [event.tid if one.stream is None else one.stream for event, one, _ in pairs]
            sides = [(one.correlation, one.wait_on_stream, one.recorded_by) for _, one, _ in pairs]
            moment = np.array([at for _, _, at in pairs])
            columns = [numbers_of(list(column)) for column in zip(*sides, strict=True)]
            self.waits.add(moment, moment, self.devices.indices(devices), numbers_of(streams), *columns)

    def _collective(self, args: Args) -> int:
        """The index of what a kernel or an operator says of its collective."""
        said = (args.operation, args.group_name, args.group_description, args.group_ranks, args.group_size)
        try:
            known, is_plain = self._said.get(said), True
        except TypeError:  # a list among them
            known, is_plain = None, False
        if known is not None:
            return known
        operation, name, description, ranks, size = said
        found = Collective(
            text_of(operation), text_of(name), text_of(description), ranks_of(ranks), max(0, number_of(size))
        )
        index = self.collectives.setdefault(found, len(self.collectives))
        if is_plain and len(self._said) < 100_000:
            self._said[said] = index
        return index

    def _add_operands(self, events: list[Event], names: Any) -> None:
        """Remember the sizes of matrix multiplications, by the operator's external id."""
        distinct, where = np.unique(names, return_inverse=True)
        texts = self.names.values()
        is_matmul = np.array([bool(_MATMULS.search(texts[name])) for name in distinct.tolist()])
        for place in np.flatnonzero(is_matmul[where]).tolist():
            args = events[place].args
            if args and args.input_dims:
                dims, kinds = self._shared(args.input_dims), self._shared(args.input_types)
                self.operands[number_of(args.external)] = dims, kinds

    def _shared(self, raw: Any) -> str:
        """The text of a value, once for all events that have the same."""
        view = bytes(raw)
        found = self._seen_args.get(view)
        if found is None:
            found = view.decode(errors="replace")
            if len(self._seen_args) < 100_000 and len(view) < 10_000:
                self._seen_args[view] = found
        return found

    def _add_memory(self, events: list[Event]) -> None:
        for event in events:
            args = event.args
            if event.name == "[memory]" and args is not None and number_of(args.device_type) == _CUDA:
                device = int(self.devices.indices([(_plain(args.device_id),)])[0])
                use = self.memory.setdefault(device, MemoryUse())
                use.allocated_bytes = max(use.allocated_bytes, number_of(args.allocated))
                use.reserved_bytes = max(use.reserved_bytes, number_of(args.reserved))

    def _check_times(self, kind: str, events: list[Event], start: Any, length: Any) -> None:
        bad = ~(np.isfinite(start) & np.isfinite(length)) | (length < 0) | (np.abs(start) > 1e18) | (length > 1e15)
        if bad.any():
            event = events[int(np.argmax(bad))]
            name = event.name if len(event.name) <= 60 else event.name[:57] + "..."
            raise unreadable(self.path, f"{kind} {name!r} at {event.ts} us lasts {event.dur} us")

    def _check_limits(self) -> None:
        columns = (self.on_device, self.device_annotations, self.operators, self.launches, self.annotations)
        if sum(map(len, columns)) + len(self.halves) > MAX_EVENTS:
            raise unreadable(self.path, f"it has more than {MAX_EVENTS:,} events", "record fewer steps")
        if max(map(len, (self.names, self.threads, self.devices))) > MAX_NAMES:
            raise unreadable(self.path, f"it has more than {MAX_NAMES:,} different names", "record fewer steps")

    def trace(self, headers: dict[str, Any]) -> Trace:
        """The columns as one trace."""
        num_unended = self._pair_halves()
        columns = (self.on_device, self.operators, self.launches, self.annotations, self.device_annotations)
        firsts = [float(column.first()) for column in columns if len(column)]
        origin = min(firsts, default=0.0)
        names, (info, rank, groups) = self.names, from_headers(headers)
        trace = Trace(
            path=self.path,
            names=names.values(),
            devices=[device_of(key, info.get(str(key))) for (key,) in self.devices.values()],
            device_spans=DeviceSpans(*self.on_device.joined(origin, _MICROSECOND)),
            operators=HostSpans(*self.operators.joined(origin, _MICROSECOND)),
            launches=HostSpans(*self.launches.joined(origin, _MICROSECOND)),
            annotations=HostSpans(*self.annotations.joined(origin, _MICROSECOND)),
            device_annotations=DeviceSpans(*self.device_annotations.joined(origin, _MICROSECOND)),
            launch_external=np.concatenate(self.launch_external),
            collectives=list(self.collectives),
            operator_collectives=self.operator_collectives,
            memory=self.memory,
            operands=self.operands,
            capture=capture_of(headers, origin),
            groups=groups,
            rank=rank,
            num_unended=num_unended,
            first_microsecond=origin,
        )
        if len(self.waits):
            trace.waits = resolved(trace.launches, *self.waits.joined(origin, _MICROSECOND))
        return trace if len(trace.device_spans) else with_host_devices(trace, self.threads.values())

    def _pair_halves(self) -> int:
        """Make spans of begins and ends; the number of device events that have no end."""
        if not self.halves:
            return 0
        open_events: dict[str, list[tuple[str, Event]]] = {}
        num_unended, pairs = 0, dict[str, list[Event]]()
        timed = [half for half in self.halves if half[2].ts is not None]
        for lane, kind, event in sorted(timed, key=lambda half: half[2].ts or 0.0):
            if event.ph == "B":
                open_events.setdefault(lane, []).append((kind, event))
            elif event.ph == "E" and open_events.get(lane):
                kind, begin = open_events[lane].pop()
                begin.dur = (event.ts or 0.0) - (begin.ts or 0.0)
                pairs.setdefault(kind, []).append(begin)
            elif event.ph == "X":
                num_unended += 1
        for left in open_events.values():
            num_unended += sum(kind in _ON_DEVICE[:2] for kind, _ in left)
        for kind, events in pairs.items():
            if kind != "instant":
                self._add_spans(kind, events)
        return num_unended


_NO_ARGS = Args()


def _plain(value: Any) -> Any:
    """A process, thread or device as a key; the same number written as text is the same key."""
    if type(value) is int:
        return value
    return int(value) if isinstance(value, str) and len(value) < 20 and value.isdecimal() else str(value)


def _plain_all(keys: list[tuple[Any, ...]]) -> list[Any]:
    """Keys whose parts are plain. Few of millions differ, so that each is looked at once."""
    try:
        plain = {key: tuple(map(_plain, key)) for key in dict.fromkeys(keys)}
        return list(map(plain.__getitem__, keys))
    except TypeError:  # a list or an object in the place of a number
        return [tuple(map(_plain, key)) for key in keys]
