"""What traces and a run's folder say of the remedies: which are in use, and how much time each of them is about.

`analyze.py` calls `evidence_of`; the advice itself is that of every verb (`rules/fixes.py`).
"""

import re
from collections.abc import Sequence

import numpy as np

from threefold.plan.plan import Plan
from threefold.profile.classify import Classified
from threefold.profile.diagnose import Diagnosis, Straggler
from threefold.profile.intervals import intersect, union
from threefold.profile.measure import DeviceWalls
from threefold.profile.readers.run_folder import RunLog
from threefold.profile.trace import Trace
from threefold.remedies.evidence import Evidence

# Kinds of kernels by their names. Of nvjet the letters are the formats of the operands: q is an eight-bit float.
_KERNELS = {
    "fp8": re.compile(
        r"fp8|e4m3|e5m2|float8|nvfp4|mxfp|\bnvjet_(sm\d+_)?q|scaled_mm|_quantize|blockwise", re.IGNORECASE
    ),
    "deepep": re.compile(r"deep_?ep|\b(intranode|internode|internode_ll)::", re.IGNORECASE),
    "hybridep": re.compile(r"hybrid_?ep|device_sync_kernel|update_expected_value_kernel", re.IGNORECASE),
    "fused experts": re.compile(
        r"^_fc[12]_(forward|backward)|group(ed)?_?gemm|moe_gemm|GroupProblemShape", re.IGNORECASE
    ),
    "fused permutation": re.compile(r"\b_?(un)?permute_kernel|_?permute_with_mask|moe_permute", re.IGNORECASE),
}
_LOADING = re.compile(r"DataLoader|^threefold\.data\b|next_batch|fetch_batch|data_iterator", re.IGNORECASE)
_MIN_DATA_SHARE = 0.05  # of the time, from which waiting for data is a bottleneck
_COLLAPSED = 0.5  # of all tokens, which choose one expert, from which a router has collapsed
_LEAST_OVER_MEAN = 1.5  # with few experts half of all tokens are an expert's share


def evidence_of(
    walls: DeviceWalls,
    trace: Trace,
    classes: Classified,
    diagnosis: Diagnosis,
    slow: Sequence[Straggler],
    plan: Plan | None,
    log: RunLog,
) -> Evidence:
    """What was seen on the device with the longest span."""
    seen = {
        "slow ranks": bool(slow),
        "router": has_collapsed(log.busiest_expert, plan),
        "data": _data_share(walls, trace) > _MIN_DATA_SHARE,
        "allocator": walls.allocator_calls > 0 and not walls.device.is_cpu,
    }
    return Evidence(
        wall=diagnosis.dominant,
        shares={
            "communication": walls.share(walls.communication.exposed_seconds),
            "host": walls.share(walls.host.idle_seconds),
            "compute": walls.share(walls.compute_seconds),
        },
        exposed={axis: walls.share(one.exposed_seconds) for axis, one in walls.by_axis.items()},
        kernels=frozenset(_kinds(walls, trace, classes)),
        is_cpu=walls.device.is_cpu,
        device_bytes=diagnosis.memory.peak_bytes,
        seen=tuple(name for name, is_there in seen.items() if is_there),
    )


def has_collapsed(busiest_expert: float | None, plan: Plan | None) -> bool:
    """Whether half of all tokens choose the busiest expert, by its load over the mean."""
    if busiest_expert is None or plan is None or plan.model.moe is None:
        return False
    chosen_by = busiest_expert * plan.model.moe.top_k / plan.model.num_experts
    return chosen_by >= _COLLAPSED and busiest_expert >= _LEAST_OVER_MEAN


def _kinds(walls: DeviceWalls, trace: Trace, classes: Classified) -> set[str]:
    names = {trace.names[number] for number in np.unique(trace.device_spans.name[walls.spans]).tolist()}
    found = {kind for kind, pattern in _KERNELS.items() if any(pattern.search(name) for name in names)}
    return found | ({"graphs"} if classes.is_replayed[walls.spans].any() else set())


def _data_share(walls: DeviceWalls, trace: Trace) -> float:
    """The share of the time in which the device is idle while the host loads data; on a CPU it loads itself."""
    is_loading = np.array([bool(_LOADING.search(name)) for name in trace.names] or [False])
    parts = [spans[is_loading[spans.name]] for spans in (trace.operators, trace.annotations) if len(spans)]
    if not parts or not sum(map(len, parts)):
        return 0.0
    loading = union(*(np.concatenate([getattr(part, name) for part in parts]) for name in ("start", "end")))
    return walls.share((loading if walls.device.is_cpu else intersect(loading, walls.idle)).seconds)
