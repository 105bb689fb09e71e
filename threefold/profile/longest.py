"""The kernels that take most of a device's time, by name and by the shapes of their operands where the trace has them.

`analyse.py` calls `longest_kernels` for the device with the longest span; the table stands under every profile.
"""

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from threefold.profile.classify import Classified, distinct_rows
from threefold.profile.kernel_names import CLASSES
from threefold.profile.measure import DeviceWalls
from threefold.profile.trace import Trace

MOST = 12


@dataclass(frozen=True, slots=True)
class LongKernel:
    """All calls of one kernel with operands of one shape."""

    name: str
    shape: str  # sizes and formats of a matrix multiplication's operands; empty where the trace has none
    kind: str  # communication, compute, copy or unknown
    calls: int
    seconds: float  # of all calls, also where they ran side by side
    median_seconds: float

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def longest_kernels(walls: DeviceWalls, trace: Trace, classes: Classified) -> list[LongKernel]:
    """The longest first."""
    spans, chosen = trace.device_spans, walls.spans
    texts = {operands: number for number, operands in enumerate(dict.fromkeys(trace.operands.values()))}
    shape_of = {link: texts[operands] for link, operands in trace.operands.items()}
    links, inverse = np.unique(classes.operator_link[chosen], return_inverse=True)
    shape = np.array([shape_of.get(link, -1) for link in links.tolist()], np.int64)[inverse.reshape(-1)]
    rows, where = distinct_rows(spans.name[chosen], shape, classes.label[chosen])
    length = (spans.end - spans.start)[chosen]
    total, longest, operands = np.bincount(where, length, minlength=len(rows)), list[LongKernel](), list(texts)
    for place in np.argsort(-total, kind="stable")[:MOST].tolist():
        name, number, label = rows[place]
        own = length[where == place]
        words = _words(*operands[number]) if number >= 0 else ""
        seconds, median = float(own.sum()), float(np.median(own))
        longest.append(LongKernel(trace.names[name], words, CLASSES[label], len(own), seconds, median))
    return longest


def _words(sizes: str, types: str) -> str:
    """`[[16, 2048], [2048, 768]]` and `["c10::BFloat16", ...]` in one line without quotes."""
    formats = dict.fromkeys(word.strip(' "[]').removeprefix("c10::").lower() for word in types.split(","))
    return " ".join([sizes.replace(" ", ""), *filter(None, formats)])
