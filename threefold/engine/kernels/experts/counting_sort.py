"""A counting sort of token copies by expert in Triton: two passes over the chosen experts, a running sum between them.

It gives what `sorted_rows.sort_rows` gives. `fused_experts.sort_by_expert` and `dispatch/rows.py` call it.

Shapes: T tokens, K experts of a token, R = T * K rows, E experts, C chunks of rows.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

import torch
import triton  # type: ignore
import triton.language as tl  # type: ignore
from torch import Tensor

from threefold.engine.kernels.experts.sorted_rows import SortedRows

_CHUNK, _WARPS = 128, 1


def counting_sort(expert_TK: Tensor, num_experts: int, weight_TK: Tensor | None = None) -> SortedRows:
    """Stable: copies with the same expert keep the order of tokens."""
    num_rows, top_k = expert_TK.numel(), expert_TK.shape[1]
    expert_TK, num_chunks = expert_TK.contiguous(), triton.cdiv(num_rows, _CHUNK)
    padded_experts, device = triton.next_power_of_2(num_experts), expert_TK.device
    count_EC = torch.empty(num_experts, num_chunks, dtype=torch.int32, device=device)
    sizes = num_rows, num_chunks, num_experts, padded_experts, _CHUNK
    _count_experts[(num_chunks,)](expert_TK, count_EC, *sizes, num_warps=_WARPS)
    # The counts lie expert by expert, and chunk by chunk inside an expert. So the running sum says where the rows of an
    # expert that come from one chunk end.
    end_EC = count_EC.flatten().cumsum(0, dtype=torch.int32)
    slot_R, token_R, row_R = (torch.empty(num_rows, dtype=torch.int32, device=device) for _ in range(3))
    ends_E, starts_F = (torch.empty(num_experts + n, dtype=torch.int32, device=device) for n in range(2))
    weight_R = None if weight_TK is None else torch.empty(num_rows, dtype=weight_TK.dtype, device=device)
    unsorted_weight_TK = None if weight_TK is None else weight_TK.detach().contiguous()
    _scatter_rows[(num_chunks,)](
        expert_TK, end_EC, unsorted_weight_TK, slot_R, token_R, row_R, weight_R, ends_E, starts_F, top_k, *sizes,
        num_warps=_WARPS,
    )  # fmt: skip
    return SortedRows(slot_R, token_R, row_R.view_as(expert_TK), ends_E, starts_F, weight_R)


@triton.jit
def _load_experts(expert_ptr, num_rows, CHUNK: tl.constexpr):
    slot = tl.program_id(0) * CHUNK + tl.arange(0, CHUNK)
    live = slot < num_rows
    return slot, live, tl.load(expert_ptr + slot, mask=live, other=-1).to(tl.int32)


@triton.jit
def _count_experts(expert_ptr, count_ptr, num_rows, num_chunks, num_experts, E: tl.constexpr, CHUNK: tl.constexpr):
    _, live, expert = _load_experts(expert_ptr, num_rows, CHUNK)
    e = tl.arange(0, E)
    count = tl.histogram(expert, E, mask=live)
    tl.store(count_ptr + e * num_chunks + tl.program_id(0), count, mask=e < num_experts)


@triton.jit
def _scatter_rows(
    expert_ptr, end_ptr, unsorted_weight_ptr, slot_ptr, token_ptr, row_ptr, weight_ptr, ends_ptr, starts_ptr, top_k,
    num_rows, num_chunks, num_experts, E: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    slot, live, expert = _load_experts(expert_ptr, num_rows, CHUNK)
    cell = expert * num_chunks + tl.program_id(0)
    start = tl.load(end_ptr + cell - 1, mask=live & (cell > 0), other=0)
    n = tl.arange(0, CHUNK)
    earlier = (expert[:, None] == expert[None, :]) & (n[:, None] > n[None, :])
    row = start + tl.sum(earlier.to(tl.int32), 1)
    tl.store(row_ptr + slot, row, mask=live)
    tl.store(slot_ptr + row, slot, mask=live)
    tl.store(token_ptr + row, slot // top_k, mask=live)
    if unsorted_weight_ptr is not None:
        tl.store(weight_ptr + row, tl.load(unsorted_weight_ptr + slot, mask=live), mask=live)
    if tl.program_id(0) == 0:
        e = tl.arange(0, E)
        known = e < num_experts
        end = tl.load(end_ptr + (e + 1) * num_chunks - 1, mask=known)
        tl.store(ends_ptr + e, end, mask=known)
        tl.store(starts_ptr + 1 + e, end, mask=known)
        tl.store(starts_ptr, 0)
