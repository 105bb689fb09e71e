"""The steps of a device in a trace: by a range of the program that recurs, else by a kernel that runs once a step.

Sums over a whole trace mix steps with what stands around them, so every number of `budget.py` belongs to one window.
Steps that start a profiler or capture a graph, and a first step that is much longer than the others, are left out, with
the reason.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from threefold.profile.trace import Floats, HostSpans, Ints, Trace

# Names of ranges around a step, most special first: PyTorch's numbered ones, the engine's, then what programs write.
_RANGES = (
    r"^ProfilerStep#",
    r"^threefold\.step$",
    r"(^|[^a-z])(train(ing)?[ _.]?)?(step|iteration|iter)([^a-z]|$)",
)
_NOT_STEADY = re.compile(r"StreamBeginCapture|GraphInstantiate|ProfilerStart|ProfilerStop")
_WARM_UP = 1.5  # times the median of the other steps, from which the first one is a warm-up
_MIN_ANCHORS = 3  # windows between kernels that recur
_MAX_SPREAD = 0.2  # standard deviation over mean of the distances between them
_MIN_COVER = 0.5  # of the trace
_MAX_STEPS = 10_000


@dataclass(frozen=True, slots=True)
class Window:
    name: str
    start: float
    end: float

    @property
    def seconds(self) -> float:
        return self.end - self.start

    @property
    def number(self) -> int | None:
        """The step of the run, where the range has it in its name."""
        match = re.search(r"(\d{1,9})$", self.name)
        return int(match[1]) if match and not self.name.startswith(INTERVAL) else None


@dataclass(frozen=True, slots=True)
class StepWindows:
    """The steps that count, what marks them, and those that were left out with the reason."""

    source: str  # "range threefold.step", "kernel embedding_kernel", "whole trace"
    windows: tuple[Window, ...]
    dropped: tuple[tuple[Window, str], ...] = ()

    @property
    def is_known(self) -> bool:
        return self.source != WHOLE


WHOLE, INTERVAL = "whole trace", "interval"


def find_steps(trace: Trace, device: int, chosen: Ints, name: str | None = None) -> StepWindows:
    """The steps of a device whose events are `chosen`. `name` is the range to take, where the caller knows it."""
    marked = _by_range(trace, device, name)
    if marked is None:
        marked = _by_kernel(trace, chosen)
    if marked is None:
        spans = trace.device_spans
        first, last = float(spans.start[chosen].min()), float(spans.end[chosen].max())
        return StepWindows(WHOLE, (Window("all", first, last),))
    source, windows = marked
    reasons = dict(_unsteady(trace, windows))
    steady = tuple(window for window in windows if window not in reasons)
    if not steady:  # of a short capture something is better than nothing
        return StepWindows(source, tuple(windows))
    return StepWindows(source, steady, tuple(reasons.items()))


def _by_range(trace: Trace, device: int, name: str | None) -> tuple[str, list[Window]] | None:
    """Ranges of one thread that mark steps. Of nested ones the outermost counts."""
    notes = of_process(trace, trace.annotations, trace.devices[device].process)
    patterns = (f"^{re.escape(name)}",) if name else _RANGES
    for pattern in patterns:
        matches = np.array([bool(re.search(pattern, text, re.IGNORECASE)) for text in trace.names] or [False])
        found = notes[matches[notes.name]] if len(notes) else notes
        if not len(found):
            continue
        threads, counts = np.unique(found.thread, return_counts=True)
        found = found[found.thread == threads[int(np.argmax(counts))]]
        order = np.lexsort((-found.end, found.start))[:_MAX_STEPS]
        windows, reach = list[Window](), -np.inf
        for place in order.tolist():
            start, end = float(found.start[place]), float(found.end[place])
            if start >= reach and end > start:
                windows.append(Window(trace.names[int(found.name[place])], start, end))
                reach = end
        if windows:
            return f"range {re.sub(r'[#_ ]?[0-9]+$', '', windows[0].name)}", windows
    return None


def of_process(trace: Trace, spans: HostSpans, process: int | None) -> HostSpans:
    """Spans of the process that drives a device; all of them where the file has one process."""
    if process is None or not trace.thread_processes or not len(spans):
        return spans
    return spans[np.array(trace.thread_processes, np.int64)[spans.thread] == process]


def _by_kernel(trace: Trace, chosen: Ints) -> tuple[str, list[Window]] | None:
    """Windows between runs of the rarest kernel that recurs at even distances over most of the trace."""
    spans = trace.device_spans
    names, counts = np.unique(spans.name[chosen], return_counts=True)
    order = np.lexsort((names, counts))
    whole = float(spans.end[chosen].max() - spans.start[chosen].min())
    for place in order.tolist():
        if not _MIN_ANCHORS < counts[place] <= _MAX_STEPS:
            continue
        start = np.sort(spans.start[chosen[spans.name[chosen] == names[place]]])
        gaps = np.diff(start)
        if gaps.sum() >= _MIN_COVER * whole and gaps.std() <= _MAX_SPREAD * gaps.mean():
            label = trace.names[int(names[place])]
            edges = zip(start[:-1].tolist(), start[1:].tolist(), strict=True)
            windows = [Window(f"{INTERVAL} {number}", *pair) for number, pair in enumerate(edges)]
            return f"kernel {label if len(label) <= 60 else label[:57] + '...'}", windows
    return None


def _unsteady(trace: Trace, windows: list[Window]) -> Iterator[tuple[Window, str]]:
    """Windows that do not show a steady step, with the reason."""
    calls = trace.launches
    matches = np.array([bool(_NOT_STEADY.search(name)) for name in trace.names] or [False])
    moments: Floats = np.sort(calls.start[matches[calls.name]]) if len(calls) else np.empty(0)
    rest = [window.seconds for window in windows[1:]]
    for number, window in enumerate(windows):
        inside = np.searchsorted(moments, [window.start, window.end])
        if inside[1] > inside[0]:
            yield window, "a graph is captured or the profiler starts or stops in it"
        elif number == 0 and len(rest) > 1 and window.seconds > _WARM_UP * float(np.median(rest)):
            yield window, "warm-up: the first step is much longer than the others"
