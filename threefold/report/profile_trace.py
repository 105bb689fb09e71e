"""Writes a trace with the walls drawn into it, for Perfetto (`threefold profile --out FILE.json.gz`).

The tracks of a process called `threefold walls` show when communication was exposed, when the device was idle, and when
unknown kernels ran. A Kineto trace is copied as it is, with these tracks added at the end of its events; from an Nsight
export, whose format Perfetto does not read, kernels are written too. The trace is that of the device with the longest
span.
"""

import gzip
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from threefold.profile.analyze import Profile
from threefold.profile.classify import EVIDENCE
from threefold.profile.intervals import Union, union
from threefold.profile.kernel_names import CLASSES, UNKNOWN
from threefold.profile.readers.text_stream import text_pieces
from threefold.safe_files import open_regular

WALLS_PROCESS = 900_000_001  # a process id that no kernel of an operating system hands out
MAX_SLICES = 200_000  # of a track; the longest are kept


def write_annotated_trace(found: Profile, path: Path) -> None:
    """Write the trace, gzipped where the name ends in .gz. The trace itself may not be the target."""
    source = found.top_trace.path
    if path.exists() and path.resolve() == source.resolve():
        raise ValueError("this is the trace that is read")
    with gzip.open(path, "wb", compresslevel=3) if path.suffix == ".gz" else path.open("wb") as out:
        if found.top_trace.end_of_events is None:
            _write_anew(found, out)
        else:
            _copy_with_walls(found, source, found.top_trace.end_of_events, out)


def _write_anew(found: Profile, out: Any) -> None:
    """A trace of kernels and walls alone."""
    events = [*_kernels(found), *_walls(found)]
    out.write(json.dumps({"displayTimeUnit": "ms", "traceEvents": events}).encode())


def _copy_with_walls(found: Profile, source: Path, end_of_events: int, out: Any) -> None:
    """Copy the text of a trace, and add the walls before the bracket that closes its events."""
    added = b"".join(b",\n" + json.dumps(event).encode() for event in _walls(found))
    with open_regular(source) as file:
        for piece in _with_insertion(source, file, end_of_events, added):
            out.write(piece)


def _with_insertion(source: Path, file: BinaryIO, place: int, added: bytes) -> Iterator[bytes]:
    offset = 0
    with text_pieces(source, file) as pieces:
        for piece in pieces:
            if offset <= place < offset + len(piece):
                yield piece[: place - offset]
                yield added
                yield piece[place - offset :]
            else:
                yield piece
            offset += len(piece)


def _walls(found: Profile) -> Iterator[dict[str, Any]]:
    """Tracks of one process: their names, then their slices."""
    top, trace = found.top, found.top_trace
    spans, label = trace.device_spans, found.top_classes.label[top.spans]
    unknown = top.spans[label == CLASSES.index(UNKNOWN)]
    tracks = {
        "exposed communication": top.exposed,
        "idle": top.idle,
        "unknown kernels": union(spans.start[unknown], spans.end[unknown]),
    }
    yield _name("process_name", 0, f"threefold walls of {top.name}")
    for number, (name, times) in enumerate(tracks.items(), start=1):
        yield _name("thread_name", number, name)
        for start, length in _longest(times, trace.first_microsecond):
            yield {
                "ph": "X", "cat": "threefold", "name": name, "pid": WALLS_PROCESS, "tid": number,
                "ts": start, "dur": length,
            }  # fmt: skip


def _name(kind: str, track: int, text: str) -> dict[str, Any]:
    return {"ph": "M", "name": kind, "pid": WALLS_PROCESS, "tid": track, "args": {"name": text}}


def _longest(times: Union, origin: float) -> Iterator[tuple[float, float]]:
    """Starts and lengths in microseconds of the file, in ascending order."""
    length = times.end - times.start
    chosen = np.sort(np.argsort(-length, kind="stable")[:MAX_SLICES])
    for start, seconds in zip(times.start[chosen].tolist(), length[chosen].tolist(), strict=True):
        yield round(origin + start * 1e6, 3), round(seconds * 1e6, 3)


def _kernels(found: Profile) -> Iterator[dict[str, Any]]:
    """The kernels of the device with what they were taken for."""
    trace, classes = found.top_trace, found.top_classes
    spans = trace.device_spans
    yield {"ph": "M", "name": "process_name", "pid": 0, "tid": 0, "args": {"name": found.top.name}}
    for place in found.top.spans.tolist():
        yield {
            "ph": "X",
            "cat": "kernel",
            "name": trace.names[spans.name[place]],
            "pid": 0,
            "tid": int(spans.stream[place]),
            "ts": round(trace.first_microsecond + spans.start[place] * 1e6, 3),
            "dur": round(float(spans.end[place] - spans.start[place]) * 1e6, 3),
            "args": {"class": CLASSES[classes.label[place]], "evidence": EVIDENCE[classes.evidence[place]]},
        }
