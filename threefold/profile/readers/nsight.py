"""Reads an SQLite export of Nsight Systems (`nsys export --type sqlite`) into columns.

Tables and columns are those of NVIDIA's documented schema: kernels, copies and memsets of CUPTI, calls of the CUDA
runtime, NVTX ranges, and the GPUs of the machine. Tables that a report lacks are empty. The file may come from a
stranger: it is opened read-only, only plain tables are read, never views, and a query that works too long is ended.
"""

import sqlite3
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from threefold.profile.readers.columns import Columns, NameTable, resolved
from threefold.profile.readers.text_stream import MAX_EVENTS, MAX_NAMES, unreadable
from threefold.profile.trace import COPY, KERNEL, Capture, Device, DeviceSpans, HostSpans, Trace, no_device_spans
from threefold.sqlite_file import connect_to_read, plain_tables

MAGIC = b"SQLite format 3\0"
MAX_SECONDS = 300.0
MAX_NAME = 2**16  # characters; names of kernels that are templates have some thousand
_BATCH = 100_000
_NANOSECOND = 1e-9
_PID_SHIFT = 24  # a global thread id is a process id and, in the lowest 24 bits, a thread id
_RANGE_TYPES = (59, 60)  # NVTX push/pop and start/end ranges
_KERNELS = "CUPTI_ACTIVITY_KIND_KERNEL"
_COPIES = ("CUPTI_ACTIVITY_KIND_MEMCPY", "CUPTI_ACTIVITY_KIND_MEMSET")
_WAITS, _EVENTS = "CUPTI_ACTIVITY_KIND_SYNCHRONIZATION", "CUPTI_ACTIVITY_KIND_CUDA_EVENT"
_STREAM_WAITS = 2  # CUPTI_ACTIVITY_SYNCHRONIZATION_TYPE_STREAM_WAIT_EVENT of CUPTI's documentation
_RUNTIME = "CUPTI_ACTIVITY_KIND_RUNTIME"


def read_nsight(path: Path) -> Trace:
    """Read an export."""
    try:
        with closing(connect_to_read(path, is_still=True)) as database:
            database.text_factory = lambda data: data.decode(errors="replace")
            with _time_limit(path, database):
                return _Export(path, database).trace()
    except (sqlite3.Error, OverflowError, ValueError) as error:
        raise unreadable(path, f"the SQLite file cannot be read: {error}", "export the report again") from None


@contextmanager
def _time_limit(path: Path, database: sqlite3.Connection) -> Iterator[None]:
    """End a query that works for too long, as one over a crafted file would."""
    end = time.monotonic() + MAX_SECONDS
    database.set_progress_handler(lambda: time.monotonic() > end, 1_000_000)
    try:
        yield
    except sqlite3.OperationalError as error:
        if "interrupted" not in str(error):
            raise
        raise unreadable(path, f"reading it takes more than {MAX_SECONDS:.0f} s", "export fewer steps") from None


class _Export:
    def __init__(self, path: Path, database: sqlite3.Connection) -> None:
        self.path, self.database = path, database
        self.tables = plain_tables(database)
        self.names, self.threads, self.devices = NameTable(), NameTable(), NameTable()
        self.num_rows = 0

    def trace(self) -> Trace:
        if _KERNELS not in self.tables:
            advice = "record with `nsys profile --trace=cuda,nvtx`, and export with `nsys export --type sqlite`"
            raise unreadable(self.path, f"it has no table {_KERNELS}: no GPU was traced", advice)
        rows = self._rows("StringIds", ("id", "value"))
        strings = {number: text[:MAX_NAME] for number, text in rows if isinstance(text, str)}
        on_device = Columns(10)
        self._add_device_spans(on_device, _KERNELS, KERNEL, strings)
        for table in _COPIES:
            self._add_device_spans(on_device, table, COPY, strings)
        launches, ranges, waits = Columns(5), Columns(5), Columns(7)
        self._add_host_spans(launches, _RUNTIME, ("nameId", "correlationId"), strings)
        self._add_ranges(ranges, strings)
        self._add_waits(waits)
        columns = (on_device, launches, ranges)
        origin = min((column.first() for column in columns if len(column)), default=0.0)
        gpus = self._gpus()
        empty = Columns(5)
        trace = Trace(
            path=self.path,
            names=self.names.values(),
            devices=[_device(pid, number, gpus) for pid, number in self.devices.values()],
            device_spans=DeviceSpans(*on_device.joined(origin, _NANOSECOND)),
            operators=HostSpans(*empty.joined(origin, _NANOSECOND)),
            launches=HostSpans(*launches.joined(origin, _NANOSECOND)),
            annotations=HostSpans(*ranges.joined(origin, _NANOSECOND)),
            device_annotations=no_device_spans(),
            collectives=[],
            first_microsecond=origin / 1e3,
            capture=read_capture(self.tables, self._rows, origin),
            thread_processes=[
                thread >> _PID_SHIFT if isinstance(thread, int) else 0 for thread in self.threads.values()
            ],
        )
        if len(waits):
            trace.waits = resolved(trace.launches, *waits.joined(origin, _NANOSECOND))
        return trace

    def _add_device_spans(self, columns: Columns, table: str, kind: int, strings: dict[Any, Any]) -> None:
        name = next((one for one in ("demangledName", "shortName") if one in self.tables.get(table, ())), "NULL")
        wanted = ("start", "end", "deviceId", "streamId", "correlationId", "globalPid", name)
        of_copy = ("bytes", "copyKind", "srcKind", "dstKind") if kind == COPY else ()
        labels = copy_labels(self.tables, self._rows) if kind == COPY else {}
        for rows in self._batches(table, (*wanted, *of_copy)):
            start, end, device, stream, correlation, pid, name_id, *copied = zip(*rows, strict=True)
            if kind == COPY:
                names = [copy_name(table, labels, *kinds) for kinds in zip(*copied[1:], strict=True)]
            else:
                names = [strings.get(one, str(one)) for one in name_id]
            pids = [one >> _PID_SHIFT if isinstance(one, int) else 0 for one in pid]
            self._check(table, start, end)
            columns.add(
                np.array(start, float), np.array(end, float), self.names.indices(names),
                self.devices.indices(list(zip(pids, device, strict=True))), _whole(stream), np.full(len(rows), kind),
                _keys(pids, correlation), np.full(len(rows), -1), np.full(len(rows), -1),
                _whole(copied[0]) if kind == COPY else np.full(len(rows), -1),
            )  # fmt: skip

    def _add_waits(self, columns: Columns) -> None:
        """Waits of streams for events, with the streams on which these were recorded."""
        found = list(self._rows(_EVENTS, ("globalPid", "eventSyncId", "streamId", "correlationId")))
        recorded = {(pid, number): (stream, correlation) for pid, number, stream, correlation in found}
        wanted = ("globalPid", "eventSyncId", "deviceId", "streamId", "correlationId", "start", "syncType")
        for rows in self._batches(_WAITS, wanted):
            rows = [row for row in rows if row[6] == _STREAM_WAITS and isinstance(row[5], int)]
            if not rows:
                continue
            pid, number, device, stream, correlation, start, _ = zip(*rows, strict=True)
            pids = [one >> _PID_SHIFT if isinstance(one, int) else 0 for one in pid]
            events = [recorded.get(pair, (-1, -1)) for pair in zip(pid, number, strict=True)]
            moment = np.array(start, float)
            columns.add(
                moment, moment, self.devices.indices(list(zip(pids, device, strict=True))), _whole(stream),
                _keys(pids, correlation), _whole([one[0] for one in events]), _keys(pids, [one[1] for one in events]),
            )  # fmt: skip

    def _add_host_spans(self, columns: Columns, table: str, wanted: tuple[str, str], strings: dict[Any, Any]) -> None:
        for rows in self._batches(table, ("start", "end", "globalTid", *wanted)):
            start, end, thread, name_id, link = zip(*rows, strict=True)
            self._check(table, start, end)
            pids = [one >> _PID_SHIFT if isinstance(one, int) else 0 for one in thread]
            names = [str(strings.get(one, one)) for one in name_id]
            columns.add(
                np.array(start, float), np.array(end, float), self.names.indices(names),
                self.threads.indices(list(thread)), _keys(pids, link),
            )  # fmt: skip

    def _add_ranges(self, columns: Columns, strings: dict[Any, Any]) -> None:
        """NVTX ranges. Their text is in the row or in the table of strings; ranges without an end are skipped."""
        wanted = ("start", "end", "globalTid", "text", "textId", "eventType")
        for rows in self._batches("NVTX_EVENTS", wanted):
            whole = [
                (row[0], row[1], row[2], row[3] if row[3] is not None else strings.get(row[4], ""))
                for row in rows
                if row[1] is not None and row[5] in (*_RANGE_TYPES, None)
            ]
            if whole:
                start, end, thread, text = zip(*whole, strict=True)
                self._check("NVTX_EVENTS", start, end)
                columns.add(
                    np.array(start, float), np.array(end, float), self.names.indices([str(one) for one in text]),
                    self.threads.indices(list(thread)), np.full(len(whole), -1),
                )  # fmt: skip

    def _batches(self, table: str, wanted: tuple[str, ...]) -> Iterator[list[Any]]:
        """Rows of a table in pieces; a column that it lacks is NULL."""
        if table not in self.tables:
            return
        known = self.tables[table]
        listed = ", ".join(f'"{name}"' if name in known else "NULL" for name in wanted)
        cursor = self.database.execute(f"SELECT {listed} FROM {table}")
        while rows := cursor.fetchmany(_BATCH):
            self.num_rows += len(rows)
            if self.num_rows > MAX_EVENTS or len(self.names) > MAX_NAMES:
                raise unreadable(self.path, f"it has more than {MAX_EVENTS:,} events", "export fewer steps")
            yield rows

    def _rows(self, table: str, wanted: tuple[str, ...]) -> Iterator[Any]:
        for rows in self._batches(table, wanted):
            yield from rows

    def _check(self, table: str, start: Any, end: Any) -> None:
        """Raise for times that are no numbers or run backwards."""
        for begin, finish in zip(start, end, strict=True):
            if not (isinstance(begin, int) and isinstance(finish, int) and -(2**62) < begin <= finish < 2**62):
                raise unreadable(self.path, f"an event of {table} runs from {begin!r:.40} to {finish!r:.40} ns")

    def _gpus(self) -> dict[Any, tuple[str, int]]:
        """Name and memory of each GPU by its number."""
        wanted = ("id", "name", "totalMemory")
        return {
            number: (str(name or ""), memory if isinstance(memory, int) and memory > 0 else 0)
            for number, name, memory in self._rows("TARGET_INFO_GPU", wanted)
        }


def _device(pid: int, number: Any, gpus: dict[Any, tuple[str, int]]) -> Device:
    name, memory = gpus.get(number, ("", 0))
    return Device(f"gpu {number}" + (f" of process {pid}" if pid else ""), name, memory, process=pid or None)


def _whole(values: Any) -> Any:
    return np.array([one if isinstance(one, int) and abs(one) < 2**62 else -1 for one in values], np.int64)


def _keys(pids: list[int], correlations: Any) -> Any:
    """Correlation ids of several processes in one column: they are unique only within a process."""
    numbers = [one if isinstance(one, int) and 0 <= one < 2**38 else -1 for one in correlations]
    pairs = zip(pids, numbers, strict=True)
    return np.array([(pid % 2**24 << 38) + one if one >= 0 else -1 for pid, one in pairs], np.int64)


Rows = Callable[[str, tuple[str, ...]], Iterable[Any]]

_WANTED = {
    "CUPTI_ACTIVITY_KIND_RUNTIME": "calls of the CUDA runtime: launch-starved time cannot be told (--trace=cuda)",
    "NVTX_EVENTS": "NVTX ranges: steps are found by a recurring kernel (--trace=cuda,nvtx)",
    "CUPTI_ACTIVITY_KIND_SYNCHRONIZATION": "waits for events: producers on other streams stay unknown "
    "(--cuda-event-trace=true)",
    "CUPTI_ACTIVITY_KIND_CUDA_EVENT": "records of events: producers on other streams stay unknown "
    "(--cuda-event-trace=true)",
    "TARGET_INFO_SESSION_START_TIME": "the start of the session: clocks of files are joined by collectives alone",
}
_COPY_KINDS = {1: "HtoD", 2: "DtoH", 8: "DtoD", 9: "HtoH", 10: "PtoP"}  # CUpti_ActivityMemcpyKind
_MAX_WARNINGS = 20
_METRICS = ("SM Issue", "Tensor Active", "NVLink")  # words in names of GPU metrics that say something about a wall


def read_capture(tables: Mapping[str, Any], rows: Rows, origin: float) -> Capture:
    """What the report says about its own recording. `origin` is the time of its first event, in nanoseconds."""
    environment = {str(name): value for name, value in rows("TARGET_INFO_SYSTEM_ENV", ("name", "value"))}
    exported = {str(name): value for name, value in rows("META_DATA_EXPORT", ("name", "value"))}
    starts = [one for (one,) in rows("TARGET_INFO_SESSION_START_TIME", ("utcEpochNs",)) if isinstance(one, int)]
    version = next((str(value) for name, value in exported.items() if "VERSION" in name.upper()), "")
    return Capture(
        profiler=f"Nsight Systems {version}".strip()[:100],
        host=str(environment.get("Hostname") or "")[:100],
        epoch_nanoseconds=starts[0] + round(origin) if starts else None,
        call_stack_rate=_call_stack_rate(tables, rows),
        warnings=[*_diagnostics(rows), *(f"no {said}" for table, said in _WANTED.items() if table not in tables)],
        metrics=_metrics(rows),
    )


def _diagnostics(rows: Rows) -> list[str]:
    """Warnings and errors of the profiler itself."""
    found = [text for severity, text in rows("DIAGNOSTIC_EVENT", ("severity", "text")) if _is_bad(severity)]
    return [str(text)[:200] for text in dict.fromkeys(found)][:_MAX_WARNINGS]


def _is_bad(severity: Any) -> bool:
    return isinstance(severity, int) and severity > 1  # 0 and 1 are debug and information


def _call_stack_rate(tables: Mapping[str, Any], rows: Rows) -> float | None:
    """The share of the runtime's calls that have a call stack; None where none was asked for."""
    runtime = "CUPTI_ACTIVITY_KIND_RUNTIME"
    if "callchainId" not in tables.get(runtime, ()):
        return None
    links = [one for (one,) in rows(runtime, ("callchainId",))]
    return sum(isinstance(one, int) and one > 0 for one in links) / len(links) if any(links) else None


def _metrics(rows: Rows) -> dict[str, float]:
    """Means of the sampled metrics that tell a wall, over the whole report."""
    names = {number: str(name)[:100] for number, name in rows("TARGET_INFO_GPU_METRICS", ("metricId", "metricName"))}
    sums: dict[str, tuple[float, int]] = {}
    wanted = {number: name for number, name in names.items() if any(word in name for word in _METRICS)}
    for number, value in rows("GPU_METRICS", ("metricId", "value")) if wanted else ():
        if number in wanted and isinstance(value, int | float):
            total, count = sums.get(wanted[number], (0.0, 0))
            sums[wanted[number]] = total + value, count + 1
    return {name: total / count for name, (total, count) in sums.items()}


def copy_labels(tables: Mapping[str, Any], rows: Rows) -> dict[int, str]:
    """Names of the kinds of memory ("Pinned", "Device"), by number, from the report's own table."""
    table = "ENUM_CUDA_MEM_KIND"
    return {number: str(label)[:40] for number, label in rows(table, ("id", "label"))} if table in tables else {}


def copy_name(table: str, labels: Mapping[int, str], kind: Any, source: Any, target: Any) -> str:
    """The name that PyTorch's profiler gives to such a copy: "Memcpy HtoD (Pinned -> Device)"."""
    if table.endswith("SET"):
        return "Memset"
    direction = _COPY_KINDS.get(kind, "")
    places = f" ({labels[source]} -> {labels[target]})" if source in labels and target in labels else ""
    return f"Memcpy {direction}".rstrip() + places
