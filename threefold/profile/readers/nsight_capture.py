"""How an Nsight Systems report was captured: version, host, start, warnings, missing tables, call stacks, GPU metrics;
and what the numbers of its copies mean. `nsight.py` calls it.

A table that is missing proves nothing: it was not traced, or nothing happened. So it is a warning of the capture.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from threefold.profile.trace import Capture

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
