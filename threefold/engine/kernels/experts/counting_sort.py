"""A counting sort of token copies by expert in Triton: two passes over the chosen experts, a running sum between them.

It gives what `sorted_rows.sort_rows` gives. `fused_experts.sort_by_expert` and `dispatch/rows.py` call it. Where the
fused router has counted already (`elementwise/topk_router.py`), only the second pass is left.

Shapes: T tokens, K experts of a token, R = T * K rows, E experts, C chunks of rows.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

import torch
import triton  # type: ignore
import triton.language as tl  # type: ignore
from torch import Tensor

from threefold.engine.kernels.elementwise.topk_router import ChunkStarts
from threefold.engine.kernels.experts.sorted_rows import SortedRows
from threefold.engine.kernels.fast_launch import fast_launch
from threefold.engine.kernels.launch_config import cdiv, next_power_of_2

_CHUNK, _WARPS = 128, 1


def counting_sort(expert_TK: Tensor, num_experts: int, weight_TK: Tensor | None = None) -> SortedRows:
    """Stable: copies with the same expert keep the order of tokens."""
    num_rows, device = expert_TK.numel(), expert_TK.device
    expert_TK, num_chunks = expert_TK.contiguous(), cdiv(num_rows, _CHUNK)
    count_EC = torch.empty(num_experts, num_chunks, dtype=torch.int32, device=device)
    padded_experts = next_power_of_2(num_experts)
    _count_experts[(num_chunks,)](
        expert_TK, count_EC, num_rows, num_chunks, num_experts, padded_experts, _CHUNK, num_warps=_WARPS
    )
    # The counts lie expert by expert, and chunk by chunk inside an expert. So the running sum says where the rows of an
    # expert that come from one chunk end.
    end_EC = count_EC.flatten().cumsum(0, dtype=torch.int32)
    ends_E, starts_F = (torch.empty(num_experts + n, dtype=torch.int32, device=device) for n in range(2))
    return _scatter(expert_TK, weight_TK, None, end_EC, ends_E, starts_F, num_chunks, _CHUNK)


def finish_sort(expert_TK: Tensor, weight_TK: Tensor, starts: ChunkStarts) -> SortedRows:
    """The second half of the sort, where a router has counted and knows where the rows of each of its chunks start."""
    num_slots = starts.tokens * expert_TK.shape[1]
    num_chunks = len(starts.start_PE)
    return _scatter(expert_TK, weight_TK, starts.start_PE, None, starts.ends_E, starts.starts_F, num_chunks, num_slots)


def _scatter(
    expert_TK: Tensor,
    weight_TK: Tensor | None,
    start_CE: Tensor | None,
    end_EC: Tensor | None,
    ends_E: Tensor,
    starts_F: Tensor,
    num_chunks: int,
    num_slots: int,
) -> SortedRows:
    """Put every copy into its row. Chunks of `num_slots` copies start at `start_CE`; or their rows end at `end_EC`, and
    then `ends_E` and `starts_F` are filled too."""
    num_rows, device = expert_TK.numel(), expert_TK.device
    slot_R, token_R, row_R = (torch.empty(num_rows, dtype=torch.int32, device=device) for _ in range(3))
    weight_R = None if weight_TK is None else torch.empty(num_rows, dtype=weight_TK.dtype, device=device)
    unsorted_weight_TK = None if weight_TK is None else weight_TK.detach().contiguous()
    num_experts, chunk = len(ends_E), next_power_of_2(num_slots)
    _scatter_rows[(num_chunks,)](
        expert_TK, start_CE, end_EC, unsorted_weight_TK, slot_R, token_R, row_R, weight_R, ends_E, starts_F,
        expert_TK.shape[1], num_rows, num_chunks, num_experts, num_slots, next_power_of_2(num_experts), chunk,
        num_warps=max(_WARPS, chunk // 64),
    )  # fmt: skip
    return SortedRows(slot_R, token_R, row_R.view_as(expert_TK), ends_E, starts_F, weight_R)


@fast_launch
@triton.jit
def _count_experts(expert_ptr, count_ptr, num_rows, num_chunks, num_experts, E: tl.constexpr, CHUNK: tl.constexpr):
    slot = tl.program_id(0) * CHUNK + tl.arange(0, CHUNK)
    live = slot < num_rows
    expert = tl.load(expert_ptr + slot, mask=live, other=-1).to(tl.int32)
    e = tl.arange(0, E)
    count = tl.histogram(expert, E, mask=live)
    tl.store(count_ptr + e * num_chunks + tl.program_id(0), count, mask=e < num_experts)


@fast_launch
@triton.jit
def _scatter_rows(
    expert_ptr, start_ptr, end_ptr, unsorted_weight_ptr, slot_ptr, token_ptr, row_ptr, weight_ptr, ends_ptr,
    starts_ptr, top_k, num_rows, num_chunks, num_experts, num_slots, E: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    chunk, n = tl.program_id(0), tl.arange(0, CHUNK)
    slot = chunk * num_slots + n
    live = (n < num_slots) & (slot < num_rows)
    expert = tl.load(expert_ptr + slot, mask=live, other=-1).to(tl.int32)
    if start_ptr is not None:
        start = tl.load(start_ptr + chunk * num_experts + expert, mask=live, other=0)
    else:
        cell = expert * num_chunks + chunk
        start = tl.load(end_ptr + cell - 1, mask=live & (cell > 0), other=0)
    earlier = (expert[:, None] == expert[None, :]) & (n[:, None] > n[None, :])
    row = start + tl.sum(earlier.to(tl.int32), 1)
    tl.store(row_ptr + slot, row, mask=live)
    tl.store(slot_ptr + row, slot, mask=live)
    tl.store(token_ptr + row, slot // top_k, mask=live)
    if unsorted_weight_ptr is not None:
        tl.store(weight_ptr + row, tl.load(unsorted_weight_ptr + slot, mask=live), mask=live)
    if start_ptr is None and chunk == 0:
        e = tl.arange(0, E)
        known = e < num_experts
        end = tl.load(end_ptr + (e + 1) * num_chunks - 1, mask=known)
        tl.store(ends_ptr + e, end, mask=known)
        tl.store(starts_ptr + 1 + e, end, mask=known)
        tl.store(starts_ptr, 0)
