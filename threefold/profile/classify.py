"""Decides what each device event is: communication, compute, a copy or unknown, and by which evidence.

The evidence is asked in this order, and the first that knows decides:

1. `metadata`: the arguments name a collective or a process group;
2. `operator`: the CPU operator that launched the kernel, by external id, or around the launch that has its correlation;
3. `annotation`: a range around the launch, or on the kernel's stream, that names a collective or an operator;
4. `name`: families of kernel names;
5. `region`: the range or the autograd function of a module (`threefold.experts`, `FusedDispatch`). It comes last,
   because attention has collectives and dispatch permutes.

What none of them knows is unknown. The stream is no evidence. Kernels that a CUDA graph replays all have the graph's
launch, which says nothing of each of them, so operators and host ranges are skipped there.
"""

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from threefold.profile.intervals import Enclosing
from threefold.profile.kernel_names import (
    CLASSES,
    COMMUNICATION,
    COPY,
    UNKNOWN,
    annotation_class,
    kernel_class,
    operator_class,
    region_class,
)
from threefold.profile.trace import COPY as COPY_EVENT
from threefold.profile.trace import HOST_OPERATOR, Floats, HostSpans, Ints, Trace

EVIDENCE = ("activity", "metadata", "operator", "annotation", "name", "region", "none")


@dataclass(slots=True)
class Classified:
    """Per device span of a trace: class and evidence as indices into `CLASSES` and `EVIDENCE`, and what it is linked
    to as indices of names, -1 for none."""

    label: Ints
    evidence: Ints
    operator: Ints  # name of the CPU operator that launched it
    operator_link: Ints  # external id of that operator
    annotation: Ints  # name of the innermost range that names a collective or an operator
    region: Ints  # name of the innermost range of a module
    launch_thread: Ints  # the thread that launched it, -1 where the trace does not say
    launch_start: Floats  # when the host began to launch it; NaN where the trace does not say
    launch_end: Floats
    is_replayed: NDArray[np.bool_]  # by a CUDA graph, whose launch says nothing of each kernel
    axes: list[str] = field(default_factory=list)  # of the layout; `measure.py` fills these two in
    axis_of: Ints = field(default_factory=lambda: np.empty(0, np.int64))  # index into them, -1 for no communication

    def is_label(self, label: str) -> Ints:
        return np.asarray(self.label == CLASSES.index(label))


def classify(trace: Trace) -> Classified:
    """Label every device span of a trace."""
    spans, names = trace.device_spans, trace.names
    launch = _index_of(trace.launches.link, spans.correlation)
    is_graph = _named(trace, launch, "GraphLaunch")
    thread, moment = _launch_place(trace, launch)
    operator, link, annotation, region = _linked(trace, launch, is_graph, thread, moment)
    rows, where = distinct_rows(spans.name, spans.kind, spans.collective, operator, annotation, region)
    labels, evidences = np.empty(len(rows), np.int64), np.empty(len(rows), np.int64)
    for number, (name, kind, collective, op, note, area) in enumerate(rows):
        texts = [names[index] if index >= 0 else "" for index in (name, op, note, area)]
        label, evidence = _decide(kind, collective >= 0, *texts)
        labels[number], evidences[number] = CLASSES.index(label), EVIDENCE.index(evidence)
    known = launch >= 0
    begins, ends = np.full(len(spans), np.nan), np.full(len(spans), np.nan)
    begins[known], ends[known] = trace.launches.start[launch[known]], trace.launches.end[launch[known]]
    threads = np.where(is_graph, -1, thread)
    return Classified(
        labels[where], evidences[where], operator, link, annotation, region, threads, begins, ends, is_graph
    )


def distinct_rows(*columns: Ints) -> tuple[list[list[int]], Ints]:
    """The different rows of some columns, and for each row which of them it is."""
    key = np.zeros(len(columns[0]), np.int64)
    for column in columns:  # each round keeps the key below the number of rows, so that it cannot overflow
        _, key = np.unique(key, return_inverse=True)
        key = key * (int(column.max(initial=0)) + 2) + column + 1
    _, first, where = np.unique(key, return_index=True, return_inverse=True)
    return np.stack(columns)[:, first].T.tolist(), where.reshape(-1)


def _decide(kind: int, in_collective: bool, name: str, operator: str, annotation: str, region: str) -> tuple[str, str]:
    """Class and evidence of one combination."""
    if kind == COPY_EVENT:
        return COPY, "activity"
    if kind == HOST_OPERATOR:
        return operator_class(name) or "compute", "operator"
    if in_collective:
        return COMMUNICATION, "metadata"
    asked = (
        ("operator", operator_class(operator)),
        ("annotation", annotation_class(annotation)),
        ("name", kernel_class(name)),
        ("region", region_class(region) or region_class(operator)),
    )
    return next(((label, evidence) for evidence, label in asked if label), (UNKNOWN, "none"))


def _linked(
    trace: Trace, launch: Ints, is_graph: NDArray[np.bool_], thread: Ints, moment: Floats
) -> tuple[Ints, Ints, Ints, Ints]:
    """Names of the operator (with its external id), of the annotation and of the region of each device span."""
    spans = trace.device_spans
    names_annotation = np.array([annotation_class(name) is not None for name in trace.names] or [False])
    names_region = np.array([region_class(name) is not None for name in trace.names] or [False])
    external = spans.external.copy()
    if len(trace.launch_external):
        external = np.where((external < 0) & (launch >= 0), trace.launch_external[np.maximum(launch, 0)], external)
    external[is_graph] = -1
    operator = _index_of(trace.operators.link, external)
    unlinked = (operator < 0) & (launch >= 0) & ~is_graph
    if unlinked.any() and len(trace.operators):
        operator[unlinked] = Enclosing(trace.operators).innermost(thread[unlinked], moment[unlinked])
    noted = _index_of(trace.annotations.link, external)
    annotation = np.where((noted >= 0) & (operator < 0), _names_at(trace.annotations, noted), -1)
    for useful, found in ((names_annotation, annotation), (names_region, region := np.full(len(spans), -1, np.int64))):
        on_host = trace.annotations[useful[trace.annotations.name]]
        hosted = Enclosing(on_host).innermost(np.where(is_graph, -1, thread), moment)
        free = (found < 0) & (hosted >= 0)
        found[free] = on_host.name[hosted[free]]
        _add_device_annotations(trace, useful, found)
    return _names_at(trace.operators, operator), _links_at(trace.operators, operator), annotation, region


def _add_device_annotations(trace: Trace, useful: Ints, found: Ints) -> None:
    """Fill in names of ranges on the kernel's own stream, where no range of the host was found."""
    noted, spans, free = trace.device_annotations, trace.device_spans, found < 0
    chosen = np.flatnonzero(useful[noted.name]) if len(noted) else np.empty(0, np.int64)
    if not len(chosen) or not free.any():
        return
    lanes = list(zip(noted.device[chosen].tolist(), noted.stream[chosen].tolist(), strict=True))
    lane_of = {lane: number for number, lane in enumerate(dict.fromkeys(lanes))}
    there = np.array([lane_of[lane] for lane in lanes], np.int64)
    pairs = zip(spans.device[free].tolist(), spans.stream[free].tolist(), strict=True)
    here = np.array([lane_of.get(pair, -1) for pair in pairs], np.int64)
    ranges = HostSpans(noted.start[chosen], noted.end[chosen], noted.name[chosen], there, there)
    inside = Enclosing(ranges).innermost(here, (spans.start[free] + spans.end[free]) / 2)
    found[free] = np.where(inside >= 0, ranges.name[np.maximum(inside, 0)], -1)


def _launch_place(trace: Trace, launch: Ints) -> tuple[Ints, Floats]:
    """Thread and moment at which each device span was launched; a span of the host is its own place."""
    spans = trace.device_spans
    is_own = spans.kind == HOST_OPERATOR
    if not len(trace.launches):
        return np.where(is_own, spans.stream, -1), np.where(is_own, spans.start, -1.0)
    at = np.maximum(launch, 0)
    thread = np.where(launch >= 0, trace.launches.thread[at], -1)
    moment = np.where(launch >= 0, trace.launches.start[at], -1.0)
    return np.where(is_own, spans.stream, thread), np.where(is_own, spans.start, moment)


def _index_of(links: Ints, wanted: Ints) -> Ints:
    """For each wanted link, the index of the last span that has it, or -1. A negative link is none."""
    if not len(links):
        return np.full(len(wanted), -1, np.int64)
    order = np.argsort(links, kind="stable")
    place = np.searchsorted(links[order], wanted, side="right") - 1
    found = order[np.maximum(place, 0)]
    return np.where((place >= 0) & (wanted >= 0) & (links[found] == wanted), found, -1)


def _named(trace: Trace, launch: Ints, word: str) -> NDArray[np.bool_]:
    """Whether the launch of each device span has a word in its name."""
    if not len(trace.launches):
        return np.zeros(len(launch), bool)
    has_word = np.array([word in name for name in trace.names] or [False])
    return np.asarray((launch >= 0) & has_word[trace.launches.name[np.maximum(launch, 0)]])


def _names_at(spans: HostSpans, index: Ints) -> Ints:
    return np.where(index >= 0, spans.name[np.maximum(index, 0)], -1) if len(spans) else np.full(len(index), -1)


def _links_at(spans: HostSpans, index: Ints) -> Ints:
    return np.where(index >= 0, spans.link[np.maximum(index, 0)], -1) if len(spans) else np.full(len(index), -1)
