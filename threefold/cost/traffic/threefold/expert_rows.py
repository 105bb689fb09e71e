"""Bytes that kernels around the experts' GEMMs read and write in our own engine, in closed form, a token and MoE layer.

It follows `engine/dispatch/` and `engine/kernels/` for fused experts in bf16 and fp8-blockwise, dropless, with experts
on one rank or over EP by `alltoall`. GEMMs, the exchange itself, indices, router and shared experts are left out, but
for the sum of both outputs. `threefold dry-run` prints it next to what the rehearsal has counted.
"""

from dataclasses import dataclass

from threefold.cost.format_support import runs_fused_experts
from threefold.cost.layer_work import BF16
from threefold.plan.plan import Plan

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
