"""Values of a trace's arguments and headers, as far as they make sense: numbers, texts, ranks, devices, the capture.

`kineto.py` reads events with them, and calls `with_host_devices` for a trace without a GPU, where each process is a
device.

Communication is what the backend records (`gloo:all_reduce`); where it records nothing, as some backends do not, it is
the collective operators (`c10d::...`) themselves. Records of messages run on the program's own thread, from the request
until the program waits for it, whatever happens between. Of a received message the wait counts: what is left behind the
last operator before its end. A sent message is left out: the receiver's record shows the wait.

Compute is every operator of torch (`aten::...`, the outermost where one calls another) and every other operator that
calls none, except those that call a collective or run on the backend's threads, such as the copies that gloo makes.
Everything else (Python, autograd's bookkeeping) is the host's.
"""

import json
import math
import re
from typing import Any

import numpy as np
from numpy.typing import NDArray

from threefold.profile.intervals import Enclosing
from threefold.profile.kernel_names import COMMUNICATION, operator_class
from threefold.profile.trace import HOST_OPERATOR, Capture, Collective, Device, DeviceSpans, HostSpans, Trace

_MAX_RANKS_TEXT = 100_000
_FIRST_EPOCH = 1e15  # microseconds since 1970 in 2001: a smaller time counts from the start of the machine


def numbers_of(values: list[Any]) -> Any:
    """Whole numbers of arguments, -1 for what is none."""
    try:
        return np.array(values, np.int64)
    except (TypeError, ValueError, OverflowError):
        return np.array([number_of(value) for value in values], np.int64)


def number_of(value: Any) -> int:
    """A whole number from an argument; -1 where there is none. PyTorch's early releases wrote them as text."""
    if isinstance(value, int) and -(2**62) < value < 2**62:
        return value
    if isinstance(value, float) and math.isfinite(value) and abs(value) < 2**62:
        return int(value)
    if isinstance(value, str) and len(value) < 20 and value.lstrip("-").isdecimal():
        return int(value)
    return -1


def text_of(value: Any) -> str:
    return "" if value is None else str(value)[:200]


def ranks_of(value: Any) -> tuple[int, ...]:
    """The ranks of a process group, a list or its text; empty where the text was shortened."""
    if isinstance(value, str) and len(value) <= _MAX_RANKS_TEXT and re.fullmatch(r"\[[\d, ]*\]", value):
        return tuple(int(word) for word in re.findall(r"\d{1,9}", value))
    if isinstance(value, list) and all(isinstance(rank, int) for rank in value):
        return tuple(value)
    return ()


def from_headers(headers: dict[str, Any]) -> tuple[dict[str, Any], int | None, dict[str, Collective]]:
    """Properties of devices by id, the rank, and the process groups by name, as far as they make sense."""
    properties, info = headers.get("deviceProperties"), headers.get("distributedInfo")
    devices = {
        str(one["id"]): one
        for one in (properties if isinstance(properties, list) else [])
        if isinstance(one, dict) and "id" in one
    }
    info = info if isinstance(info, dict) else {}
    rank, listed = info.get("rank"), info.get("pg_config")
    if isinstance(listed, str) and len(listed) < 2**20:  # some releases write the list as text
        try:
            listed = json.loads(listed)
        except (ValueError, RecursionError):
            listed = None
    groups = {}
    for one in listed if isinstance(listed, list) else []:
        if isinstance(one, dict):
            name, said = text_of(one.get("pg_name")), text_of(one.get("pg_desc"))
            size = max(0, number_of(one.get("pg_size")))
            groups[name] = Collective("", name, said, ranks_of(one.get("ranks")), size)
    return devices, rank if isinstance(rank, int) and not isinstance(rank, bool) else None, groups


def device_of(key: Any, properties: Any) -> Device:
    known = properties if isinstance(properties, dict) else {}
    return Device(f"gpu {key}", text_of(known.get("name")), max(0, number_of(known.get("totalGlobalMem"))))


def capture_of(headers: dict[str, Any], first_microsecond: float) -> Capture:
    """What the headers say about the recording."""
    base, info = headers.get("baseTimeNanoseconds"), headers.get("distributedInfo")
    since = base if isinstance(base, int) and not isinstance(base, bool) else 0
    known = info if isinstance(info, dict) else {}
    size, is_absolute = known.get("world_size"), since > 0 or first_microsecond > _FIRST_EPOCH
    return Capture(
        profiler="PyTorch's profiler" if "schemaVersion" in headers else "",
        host=text_of(headers.get("host_name")),
        world_size=size if isinstance(size, int) and size > 0 else None,
        rank_source="trace" if isinstance(known.get("rank"), int) else "",
        epoch_nanoseconds=since + round(1e3 * first_microsecond) if is_absolute else None,
        call_stack_rate=1.0 if headers.get("with_stack") == 1 else None,
    )


_SEND = re.compile(r"^(gloo|mpi|ucc):send|^c10d::send", re.IGNORECASE)
_COLUMNS = ("start", "end", "name", "thread", "link")


def with_host_devices(trace: Trace, threads: list[tuple[Any, Any]]) -> Trace:
    """The trace with a device for each process. `threads` are pairs of process and thread, by index."""
    if not len(trace.operators):
        return trace
    labels = [operator_class(name) for name in trace.names]
    is_collective = np.array([label == COMMUNICATION for label in labels])
    is_known = np.array([label is not None for label in labels])
    is_send = np.array([bool(_SEND.search(name)) for name in trace.names])
    recorded = trace.annotations[is_collective[trace.annotations.name]]
    called = trace.operators[is_collective[trace.operators.name]]
    communication = recorded if len(recorded) else called
    communication = communication[~is_send[communication.name]]
    is_message = np.isin(communication.thread, called.thread) & (len(recorded) > 0)  # on a thread of the program
    on_backend = communication[~is_message]
    work = trace.operators[~is_collective[trace.operators.name]]
    work = work[is_known[work.name] | _is_leaf(work)]
    work = work[~_calls(work, called) & (Enclosing(on_backend).innermost(work.thread, work.start) < 0)]
    work = work[_is_outermost(work)]
    communication.start[is_message] = _wait_start(communication[is_message], work)
    processes = [process for process, _ in threads]
    keys = list(dict.fromkeys(processes))
    process_of = np.array([keys.index(process) for process in processes], np.int64)
    start, end, name, thread, link = (
        np.concatenate([getattr(part, column) for part in (communication, work)]) for column in _COLUMNS
    )
    none = np.full(len(start), -1, np.int64)
    kind = np.full(len(start), HOST_OPERATOR)
    trace.device_spans = DeviceSpans(start, end, name, process_of[thread], thread, kind, none, link, none, none)
    trace.devices = [Device(f"process {key}", "cpu", is_cpu=True) for key in keys]
    trace.memory = {}
    return trace


def _in_order(spans: HostSpans) -> Any:
    """Thread by thread, by start; of spans that begin together, the outer one first."""
    return np.lexsort((-spans.end, spans.start, spans.thread))


def _is_leaf(spans: HostSpans) -> NDArray[np.bool_]:
    """Whether no other span of the same thread begins inside."""
    order = _in_order(spans)
    start, end, thread = spans.start[order], spans.end[order], spans.thread[order]
    is_leaf = np.ones(len(order), bool)
    is_leaf[:-1] = (thread[1:] != thread[:-1]) | (start[1:] >= end[:-1])
    return _put_back(is_leaf, order)


def _is_outermost(spans: HostSpans) -> NDArray[np.bool_]:
    """Whether the span begins inside no other one of the same thread."""
    order = _in_order(spans)
    offset = spans.thread[order] * (float(spans.end.max(initial=0.0)) + 1.0)
    start, end = spans.start[order] + offset, spans.end[order] + offset
    is_outermost = np.ones(len(order), bool)
    is_outermost[1:] = start[1:] >= np.maximum.accumulate(end)[:-1]
    return _put_back(is_outermost, order)


def _calls(spans: HostSpans, called: HostSpans) -> NDArray[np.bool_]:
    """Whether one of the `called` spans begins inside."""
    length = max(float(part.end.max(initial=0.0)) for part in (spans, called)) + 1.0
    starts = np.sort(called.start + called.thread * length)
    offset = spans.thread * length
    counts = [np.searchsorted(starts, moment + offset, side="left") for moment in (spans.start, spans.end)]
    return np.asarray(counts[1] > counts[0])


def _wait_start(messages: HostSpans, work: HostSpans) -> NDArray[np.float64]:
    """When the program began to wait for each message: behind the last operator of its thread that ended before."""
    length = max(float(part.end.max(initial=0.0)) for part in (messages, work)) + 1.0
    ends = np.sort(work.end + work.thread * length)
    place = np.searchsorted(ends, messages.end + messages.thread * length, side="right") - 1
    last = ends[np.maximum(place, 0)] - messages.thread * length if len(ends) else np.full(len(messages), -np.inf)
    return np.asarray(np.maximum(messages.start, np.where(place >= 0, last, -np.inf)))


def _put_back(sorted_values: NDArray[np.bool_], order: Any) -> NDArray[np.bool_]:
    """Values of sorted spans in the spans' own order."""
    found = np.empty(len(order), bool)
    found[order] = sorted_values
    return found
