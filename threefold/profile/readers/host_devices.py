"""Device spans of a trace without a GPU: each process is a device, and its operators are its kernels.

Communication is what the backend records (`gloo:all_reduce`); where it records nothing, as some backends do not, it is
the collective operators (`c10d::...`) themselves. Records of messages run on the program's own thread, from the request
until the program waits for it, whatever happens between. Of a received message the wait counts: what is left behind the
last operator before its end. A sent message is left out: the receiver's record shows the wait.

Compute is every operator of torch (`aten::...`, the outermost where one calls another) and every other operator that
calls none, except those that call a collective or run on the backend's threads, such as the copies that gloo makes.
Everything else (Python, autograd's bookkeeping) is the host's. `kineto.py` calls it for traces of CPU ranks.
"""

import re
from typing import Any

import numpy as np
from numpy.typing import NDArray

from threefold.profile.kernel_names import COMMUNICATION, operator_class
from threefold.profile.nesting import Enclosing
from threefold.profile.trace import HOST_OPERATOR, Device, DeviceSpans, HostSpans, Trace

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
