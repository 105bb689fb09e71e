"""Calls of our own engine's all-to-all dispatcher for one layer and one microbatch, forward and backward.

Routing is balanced as `job.routing = "forced-balance"` does it, so that the rows of every rank are known exactly;
`skew` multiplies the rows that arrive.
"""

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

from threefold.cost.format_support import runs_fused_experts
from threefold.cost.layer_work import BF16
from threefold.cost.traffic.threefold.calls import INT64, Call, MicrobatchSizes, all_gather, all_to_all
from threefold.plan.plan import Plan
from threefold.spec.model import MoeSpec


def expert_parallel_calls(plan: Plan, moe: MoeSpec, sizes: MicrobatchSizes, skew: float) -> Counter[Call]:
    """Calls of all ranks of one ep x etp group together."""
    found: Counter[Call] = Counter()
    layout = plan.layout
    rows = sizes.tokens * moe.top_k
    counts = row_counts(rows, moe.num_experts, layout.ep, layout.etp)
    if plan.block_factor is not None:  # every rank sends and receives full blocks
        block = min(rows, math.ceil(rows / layout.ep * plan.block_factor))
        rows, skew = block * layout.ep, 1.0
        counts = Counter({(block, rows, rows * layout.etp): layout.ep * layout.etp})
    for (kept, received, in_slices), num_ranks in counts.items():
        calls = [
            *_ep_exchange(plan, moe, sizes, rows - kept, round((received - kept) * skew)),
            *_etp_exchange(plan, moe, sizes, received, in_slices, skew),
        ]
        for call, number in Counter(calls).items():
            found[call] += number * num_ranks
    return found


def capacity_calls(plan: Plan, moe: MoeSpec, sizes: MicrobatchSizes) -> Iterator[Call]:
    """With a capacity per expert, the ranks that share a microbatch gather all its choices and weights before any token
    is dropped."""
    job, size = plan.job, plan.layout.cp * plan.layout.tp
    if job.capacity_factor is not None and job.capacity_scope == "expert":
        for element_bytes in (INT64, sizes.sum_bytes):
            yield from all_gather("cp x tp", size, sizes.tokens * moe.top_k * element_bytes)


def _ep_exchange(plan: Plan, moe: MoeSpec, sizes: MicrobatchSizes, out: int, back: int) -> Iterator[Call]:
    """Dispatch and combine of a rank of which `out` rows leave and to which `back` rows come."""
    ep = plan.layout.ep
    if ep == 1:
        return
    yield from all_to_all("ep", ep, moe.num_experts * INT64)
    row = plan.model.dim * sizes.element_bytes
    # FP8 dispatch sends one byte per number, and one for the scale of each 128.
    dispatched = plan.model.dim + plan.model.dim // 128 if plan.knobs.fp8_dispatch else row
    weight = sizes.sum_bytes
    # Rows and router weights out, their gradients back; results back, their gradients out.
    for rows, row_bytes in ((out, dispatched), (out, weight), (back, row), (back, weight), (back, row), (out, row)):
        yield "ep", "all_to_all", rows * row_bytes


def _etp_exchange(
    plan: Plan, moe: MoeSpec, sizes: MicrobatchSizes, received: int, in_slices: int, skew: float
) -> Iterator[Call]:
    """Every slice of an expert gathers the rows of all slices (`in_slices`) and the slices sum their results."""
    etp = plan.layout.etp
    if etp == 1:
        return
    yield from all_gather("etp", etp, moe.num_experts * INT64)
    row, weight = plan.model.dim * sizes.element_bytes, sizes.sum_bytes
    out, back = round(received * skew) * (etp - 1), round((in_slices - received) * skew)
    for rows, row_bytes in ((out, row), (back, row), (out, weight), (back, weight), (back, row), (out, row)):
        yield "etp", "all_to_all", rows * row_bytes


@lru_cache(maxsize=256)
def row_counts(rows: int, num_experts: int, ep: int, etp: int) -> Counter[tuple[int, int, int]]:
    """The number of ranks of an ep x etp group by (rows kept, rows received, rows received by all slices of the
    expert).

    Balanced routing takes experts in turn, and each rank goes on where the one before it ended.
    """
    if rows % num_experts == 0:
        return Counter({(rows // ep, rows, rows * etp): ep * etp})
    local = num_experts // ep
    received = [
        [
            sum(_rows_between((x * etp + y) * rows, rows, num_experts, to * local, local) for x in range(ep))
            for y in range(etp)
        ]
        for to in range(ep)
    ]
    kept = [
        [_rows_between((x * etp + y) * rows, rows, num_experts, x * local, local) for y in range(etp)]
        for x in range(ep)
    ]
    return Counter((kept[x][y], received[x][y], sum(received[x])) for x in range(ep) for y in range(etp))


def _rows_between(start: int, rows: int, num_experts: int, first: int, num_local: int) -> int:
    """How many of `rows` rows from row `start` on, which go to experts 0, 1, 2, ... in turn, meet the `num_local`
    experts from `first` on."""

    def until(end: int) -> int:
        laps, rest = divmod(end, num_experts)
        return laps * num_local + min(max(rest - first, 0), num_local)

    return until(start + rows) - until(start)


_BLOCK, _SCALE = 128, 4  # numbers of a block, bytes of its scale or of a router weight
_WIDEST_IN_PLACE = 1024  # of experts whose weight gradients our kernels compute from tokens: others want rows


@dataclass(frozen=True, slots=True)
class RowBytes:
    """Bytes a token and layer.

    `ends` are those of the exchange's own ends in the forward and in the backward: rows that are written to be sent
    and, where they travel in FP8, dequantized as they arrive. `sums` are those of the sum over copies, which each
    direction has once: with `ends` the least that any kernels could move.
    """

    forward: float
    backward: float
    sums: float
    ends: tuple[float, float] = (0.0, 0.0)


def expert_row_bytes(plan: Plan) -> RowBytes | None:
    """None where the rows take another way than those above."""
    moe, knobs, layout = plan.model.moe, plan.knobs, plan.layout
    is_fused = moe is not None and runs_fused_experts(plan) and layout.etp == 1 and plan.job.capacity_factor is None
    is_sent = layout.ep > 1
    if not is_fused or moe is None or moe.shared_gate or moe.own_norms or plan.model.num_experts == layout.ep:
        return None
    if (is_sent and knobs.dispatcher != "alltoall") or knobs.precision not in ("bf16", "fp8-blockwise"):
        return None
    dim, copies = plan.model.dim, moe.top_k
    moved = BF16 * dim * (1 + copies)  # from tokens to rows, or from rows to sums
    packed = copies * dim * (1 + 1 / _BLOCK)
    sent = BF16 * dim + packed + packed + copies * BF16 * dim if knobs.fp8_dispatch else moved
    forward = backward = float(moved + 3 * BF16 * dim * (moe.num_shared > 0))
    if plan.low_precision:
        forward_fp8, backward_fp8 = _blockwise_bytes(dim, moe.expert_dim)
        forward, backward = forward + copies * forward_fp8, backward + copies * backward_fp8
    elif moe.expert_dim > _WIDEST_IN_PLACE and not is_sent:
        backward += 2 * moved
    if not is_sent:
        return RowBytes(forward, backward, moved)
    return RowBytes(forward + sent, backward + moved, moved, (sent, moved))


def _blockwise_bytes(dim: int, hidden: int) -> tuple[float, float]:
    """Forward and backward of a row: the input and its gradient quantized by rows and columns, the activation, and
    both gradients of it."""
    scale = _SCALE / _BLOCK
    quantized = dim * (BF16 + 1 + 1 + scale)
    forward = quantized + dim * scale / _BLOCK + hidden * (2 * BF16 + 1 + 2 * scale)
    by_row = hidden * (3 * BF16 + 2 + 5 * scale)
    by_column = hidden * (3 * BF16 + 3 + 2 * scale + scale / _BLOCK + 2 * _SCALE / 32)  # 32 columns a program
    return forward, quantized + dim * scale + by_row + by_column
