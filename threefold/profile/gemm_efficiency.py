"""How near matrix multiplications come to what their shapes can attain on the chip.

A shape can attain the roofline: the larger of its FLOPs at the chip's dense peak and its bytes at the memory's
bandwidth. Shapes come from the operators' recorded sizes (`record_shapes=True`), durations from the kernels that the
operators launched. `measure.py` calls it.
"""

import math
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import Any

import msgspec
import numpy as np

from threefold.profile.classify import Classified
from threefold.profile.kernel_names import COMPUTE
from threefold.profile.trace import Ints, Trace
from threefold.spec.chips import ChipSpec

# Bytes of an element and the GEMM format of a chip's peaks, by the names that profilers write.
_DTYPES = {
    "bfloat16": (2, "bf16"),
    "half": (2, "bf16"),
    "float16": (2, "bf16"),
    "float8": (1, "fp8"),
    "float4": (0.5, "fp4"),
    "float": (4, "fp32"),
}


@dataclass(frozen=True, slots=True)
class GemmEfficiency:
    """Seconds of the matrix multiplications whose shapes are known."""

    measured_seconds: float
    attainable_seconds: float  # by the roofline of each shape
    peak_seconds: float  # of the FLOPs alone, at the dense peak
    num_operators: int

    @property
    def efficiency(self) -> float:
        """The attainable time as a fraction of the measured one."""
        return self.attainable_seconds / self.measured_seconds

    @property
    def shape_limit(self) -> float:
        """The fraction of the dense peak that the shapes could reach at best."""
        return self.peak_seconds / self.attainable_seconds


def gemm_efficiency(trace: Trace, found: Classified, chosen: Ints, chip: ChipSpec) -> GemmEfficiency | None:
    """What the GEMMs among the chosen device spans reach; None where the trace tells no shape of them."""
    mine = chosen[(found.label == _COMPUTE)[chosen] & (found.operator_link[chosen] >= 0)]
    links, where = np.unique(found.operator_link[mine], return_inverse=True)
    spans = trace.device_spans
    seconds = np.bincount(where.reshape(-1), (spans.end - spans.start)[mine], minlength=len(links))
    attainable = peak = measured = 0.0
    count = 0
    for link, spent in zip(links.tolist(), seconds.tolist(), strict=True):
        operands = trace.operands.get(link)
        work = _work(*operands) if operands else None
        if work is None or spent <= 0:
            continue
        flops, num_bytes, form = work
        rate = chip.peak_flops.get(form, chip.peak_flops["bf16"])
        attainable += max(flops / rate, num_bytes / chip.memory_bandwidth)
        peak += flops / rate
        measured += spent
        count += 1
    return GemmEfficiency(measured, attainable, peak, count) if measured > 0 and attainable > 0 else None


_COMPUTE = ("communication", COMPUTE).index(COMPUTE)


@lru_cache(maxsize=65_536)
def _work(dims_text: str, types_text: str) -> tuple[float, float, str] | None:
    """FLOPs, bytes and GEMM format of a multiplication, from the sizes and dtypes of its operands as JSON."""
    try:
        dims = msgspec.json.decode(dims_text, type=list[list[Any]])
        types = msgspec.json.decode(types_text or "[]", type=list[Any])
    except (msgspec.MsgspecError, RecursionError):
        return None
    matrices = [
        (shape, str(types[place]) if place < len(types) else "")
        for place, shape in enumerate(dims)
        if len(shape) >= 2 and all(isinstance(size, int) and 0 < size < 2**40 for size in shape)
    ]
    for (left, name), (right, _) in pairwise(matrices):
        inner = left[-1]
        if inner in right[-2:] and (len(right) == 2 or len(left) in (2, len(right))):
            out = right[-1] if right[-2] == inner else right[-2]
            rows = math.prod(left[:-1])
            size, form = next((known for key, known in _DTYPES.items() if key in name.lower()), (2, "bf16"))
            num_bytes = size * (math.prod(left) + math.prod(right)) + 2 * rows * out
            return 2.0 * rows * inner * out, float(num_bytes), form
    return None
