"""Traces of known content, as PyTorch's profiler and Nsight Systems write them. Times are in microseconds."""

import gzip
import json
import sqlite3
from collections.abc import Sequence
from pathlib import Path
from typing import Any

Event = dict[str, Any]
H200 = {"id": 0, "name": "NVIDIA H200", "totalGlobalMem": 150_109_880_320, "numSms": 132}
NCCL = "ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)"
GEMM = "nvjet_hsh_128x256_64x4_1x2_h_bz_coopA_NNT"
OPAQUE = "kernel_7f3a"


def kernel(name: str, start: float, length: float, stream: int = 7, device: int = 0, **args: Any) -> Event:
    """A kernel on a device. Further arguments use the profiler's names, with underscores for spaces."""
    said = {"device": device, "stream": stream, **{_ARGUMENTS.get(key, key): value for key, value in args.items()}}
    return _whole("kernel", name, start, length, device, stream, said)


def copy(
    start: float,
    length: float,
    stream: int = 9,
    device: int = 0,
    name: str = "Memcpy DtoD (Device -> Device)",
    **args: Any,
) -> Event:
    return _whole("gpu_memcpy", name, start, length, device, stream, {"device": device, "stream": stream, **args})


def operator(name: str, start: float, length: float, external: int, thread: int = 100, **args: Any) -> Event:
    return _whole("cpu_op", name, start, length, 4242, thread, {"External id": external, **args})


def launch(start: float, length: float, correlation: int, name: str = "cudaLaunchKernel", thread: int = 100) -> Event:
    return _whole("cuda_runtime", name, start, length, 4242, thread, {"correlation": correlation})


def annotation(name: str, start: float, length: float, thread: int = 100, external: int | None = None) -> Event:
    args = {} if external is None else {"External id": external}
    return _whole("user_annotation", name, start, length, 4242, thread, args)


def device_annotation(name: str, start: float, length: float, stream: int = 7, device: int = 0) -> Event:
    return _whole("gpu_user_annotation", name, start, length, device, stream, {"device": device, "stream": stream})


def stream_wait(stream: int, correlation: int, producer: int, recorded_by: int, device: int = 0) -> Event:
    """A wait of a stream for an event, whose own time is missing as CUPTI allows: calls of the host have the times."""
    said = {"stream": stream, "correlation": correlation, "device": device, "wait_on_stream": producer}
    said["wait_on_cuda_event_record_corr_id"] = recorded_by
    return _whole("cuda_sync", "Stream Wait Event", 0.0, 0.0, device, stream, said)


def memory_event(at: float, allocated: int, reserved: int, device: int = 0) -> Event:
    args = {"Total Allocated": allocated, "Total Reserved": reserved, "Device Type": 1, "Device Id": device}
    said = {"ph": "i", "cat": "cpu_instant_event", "s": "t", "name": "[memory]", "pid": 4242, "tid": 100, "ts": at}
    return {**said, "args": args}


_ARGUMENTS = {
    "external": "External id",
    "operation": "Collective name",
    "group": "Process Group Name",
    "description": "Process Group Description",
    "ranks": "Process Group Ranks",
    "group_size": "Group size",
}


def _whole(category: str, name: str, start: float, length: float, pid: int, tid: int, args: dict[str, Any]) -> Event:
    times = {"ts": start, "dur": length}
    return {"ph": "X", "cat": category, "name": name, "pid": pid, "tid": tid, **times, "args": args}


def write_trace(
    path: Path, events: Sequence[Event], form: str = "object", indent: int | None = None, **headers: Any
) -> Path:
    """Write a trace: an object with `traceEvents` or a plain array, gzipped where the name ends in .gz."""
    content: Any = list(events)
    if form == "object":
        said = {"schemaVersion": 1, "deviceProperties": [H200], **headers}
        content = {**said, "traceEvents": list(events), "traceName": path.name}
    text = json.dumps(content, indent=indent).encode()
    path.write_bytes(gzip.compress(text) if path.suffix == ".gz" else text)
    return path


# The tables of an export that are read, with the columns of NVIDIA's documented schema that matter here.
_SCHEMA = """
CREATE TABLE StringIds (id INTEGER NOT NULL PRIMARY KEY, value TEXT NOT NULL);
CREATE TABLE TARGET_INFO_GPU (vmId INTEGER, id INTEGER NOT NULL, name TEXT, busLocation TEXT, totalMemory INTEGER);
CREATE TABLE CUPTI_ACTIVITY_KIND_KERNEL (start INTEGER NOT NULL, end INTEGER NOT NULL, deviceId INTEGER NOT NULL,
  contextId INTEGER NOT NULL, streamId INTEGER NOT NULL, correlationId INTEGER, globalPid INTEGER,
  demangledName INTEGER NOT NULL, shortName INTEGER NOT NULL, gridX INTEGER NOT NULL);
CREATE TABLE CUPTI_ACTIVITY_KIND_MEMCPY (start INTEGER NOT NULL, end INTEGER NOT NULL, deviceId INTEGER NOT NULL,
  contextId INTEGER NOT NULL, streamId INTEGER NOT NULL, correlationId INTEGER, globalPid INTEGER,
  bytes INTEGER NOT NULL, copyKind INTEGER NOT NULL, srcKind INTEGER, dstKind INTEGER);
CREATE TABLE CUPTI_ACTIVITY_KIND_MEMSET (start INTEGER NOT NULL, end INTEGER NOT NULL, deviceId INTEGER NOT NULL,
  contextId INTEGER NOT NULL, streamId INTEGER NOT NULL, correlationId INTEGER, globalPid INTEGER,
  value INTEGER NOT NULL, bytes INTEGER NOT NULL);
CREATE TABLE CUPTI_ACTIVITY_KIND_RUNTIME (start INTEGER NOT NULL, end INTEGER NOT NULL, eventClass INTEGER NOT NULL,
  globalTid INTEGER, correlationId INTEGER, nameId INTEGER NOT NULL, returnValue INTEGER NOT NULL);
CREATE TABLE CUPTI_ACTIVITY_KIND_SYNCHRONIZATION (start INTEGER NOT NULL, end INTEGER NOT NULL, deviceId INTEGER,
  contextId INTEGER, streamId INTEGER, correlationId INTEGER, globalPid INTEGER, syncType INTEGER NOT NULL,
  eventId INTEGER, eventSyncId INTEGER);
CREATE TABLE CUPTI_ACTIVITY_KIND_CUDA_EVENT (deviceId INTEGER, contextId INTEGER, streamId INTEGER,
  correlationId INTEGER, globalPid INTEGER, eventId INTEGER, eventSyncId INTEGER);
CREATE TABLE TARGET_INFO_SESSION_START_TIME (utcEpochNs INTEGER, utcTime TEXT, localTime TEXT);
CREATE TABLE TARGET_INFO_SYSTEM_ENV (globalVid INTEGER, devStateName TEXT, name TEXT, nameEnum INTEGER, value TEXT);
CREATE TABLE META_DATA_EXPORT (name TEXT, value TEXT);
CREATE TABLE DIAGNOSTIC_EVENT (timestamp INTEGER, timestampType INTEGER, source INTEGER, severity INTEGER,
  text TEXT, globalPid INTEGER);
CREATE TABLE ENUM_CUDA_MEM_KIND (id INTEGER, name TEXT, label TEXT);
CREATE TABLE TARGET_INFO_GPU_METRICS (typeId INTEGER, sourceId INTEGER, typeName TEXT, metricId INTEGER,
  metricName TEXT);
CREATE TABLE GPU_METRICS (timestamp INTEGER, typeId INTEGER, metricId INTEGER, value INTEGER);
CREATE TABLE NVTX_EVENTS (start INTEGER NOT NULL, end INTEGER, eventType INTEGER NOT NULL, rangeId INTEGER,
  text TEXT, globalTid INTEGER, textId INTEGER, domainId INTEGER);
"""


class NsightExport:
    """Writes an SQLite export of Nsight Systems. Times are in nanoseconds."""

    def __init__(self, path: Path) -> None:
        self.path, self.database = path, sqlite3.connect(path)
        self.database.executescript(_SCHEMA)
        self.strings: dict[str, int] = {}

    def add(self, table: str, **columns: Any) -> None:
        names, marks = ", ".join(f'"{name}"' for name in columns), ", ".join("?" * len(columns))
        self.database.execute(f"INSERT INTO {table} ({names}) VALUES ({marks})", list(columns.values()))

    def string(self, text: str) -> int:
        if text not in self.strings:
            self.strings[text] = len(self.strings) + 1
            self.add("StringIds", id=self.strings[text], value=text)
        return self.strings[text]

    def kernel(
        self, name: str, start: int, end: int, stream: int = 7, device: int = 0, pid: int = 9, **more: Any
    ) -> None:
        same = {"contextId": 1, "gridX": 1, "globalPid": pid << 24, "correlationId": None}
        named = {"demangledName": self.string(name), "shortName": self.string(name.partition("<")[0])}
        place = {"start": start, "end": end, "deviceId": device, "streamId": stream}
        self.add("CUPTI_ACTIVITY_KIND_KERNEL", **{**place, **same, **named, **more})

    def copy(self, start: int, end: int, device: int = 0, pid: int = 9, **more: Any) -> None:
        place = {"start": start, "end": end, "deviceId": device, "streamId": 9, "contextId": 1, "globalPid": pid << 24}
        said = {"correlationId": None, "bytes": 1, "copyKind": 8}
        self.add("CUPTI_ACTIVITY_KIND_MEMCPY", **{**place, **said, **more})

    def stream_wait(self, stream: int, wait: int, producer: int, record: int, event: int, pid: int = 9) -> None:
        """A wait of a stream for an event of another one; `wait` and `record` are correlations of the calls."""
        same = {"deviceId": 0, "contextId": 1, "globalPid": pid << 24, "eventId": 5, "eventSyncId": event}
        self.add("CUPTI_ACTIVITY_KIND_CUDA_EVENT", **same, streamId=producer, correlationId=record)
        table = "CUPTI_ACTIVITY_KIND_SYNCHRONIZATION"
        self.add(table, **same, start=0, end=0, streamId=stream, correlationId=wait, syncType=2)

    def launch(
        self, start: int, end: int, correlation: int, pid: int = 9, name: str = "cudaLaunchKernel_v7000"
    ) -> None:
        said = {"eventClass": 0, "nameId": self.string(name), "returnValue": 0, "correlationId": correlation}
        self.add("CUPTI_ACTIVITY_KIND_RUNTIME", start=start, end=end, globalTid=(pid << 24) + 1, **said)

    def range(self, text: str, start: int, end: int | None, pid: int = 9, is_shared: bool = False) -> None:
        """An NVTX range. A registered text is shared: it stands in the table of strings."""
        said = {"textId": self.string(text)} if is_shared else {"text": text}
        self.add("NVTX_EVENTS", start=start, end=end, eventType=59, globalTid=(pid << 24) + 1, **said)

    def close(self) -> Path:
        self.database.commit()
        self.database.close()
        return self.path
