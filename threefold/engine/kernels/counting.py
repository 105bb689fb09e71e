"""The sort of `sort.py` by counting: two passes over the experts of the tokens, and a running sum between them.

Shapes: T tokens, K experts of a token, R = T * K rows, E experts, C chunks of rows.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

import torch
import triton  # type: ignore
import triton.language as tl  # type: ignore
from torch import Tensor

from threefold.engine.kernels.sort import Rows

_CHUNK = 64


def counting_sort(expert_TK: Tensor, num_experts: int) -> Rows:
    num_rows, top_k = expert_TK.numel(), expert_TK.shape[1]
    expert_TK, num_chunks = expert_TK.contiguous(), triton.cdiv(num_rows, _CHUNK)
    whole = triton.next_power_of_2(num_experts)
    count_EC = torch.empty(num_experts, num_chunks, dtype=torch.int32, device=expert_TK.device)
    sizes = num_rows, num_chunks, num_experts, whole, _CHUNK
    _count[(num_chunks,)](expert_TK, count_EC, *sizes)
    # Expert by expert and in each chunk by chunk: the running sum is where each chunk's rows of an expert end.
    end_EC = count_EC.flatten().cumsum(0, dtype=torch.int32).view_as(count_EC)
    slot_R, token_R = torch.empty(2, num_rows, dtype=torch.int32, device=expert_TK.device)
    row_TK = torch.empty_like(expert_TK, dtype=torch.int32)
    _place[(num_chunks,)](expert_TK, count_EC, end_EC, slot_R, token_R, row_TK, top_k, *sizes)
    return Rows(slot_R, token_R, row_TK, end_EC[:, -1].contiguous())


@triton.jit
def _chosen(expert_ptr, num_rows, E: tl.constexpr, CHUNK: tl.constexpr):
    slot = tl.program_id(0) * CHUNK + tl.arange(0, CHUNK)
    live = slot < num_rows
    expert = tl.load(expert_ptr + slot, mask=live, other=-1).to(tl.int32)
    hit = (expert[:, None] == tl.arange(0, E)[None, :]).to(tl.int32)
    return slot, live, expert, hit


@triton.jit
def _count(expert_ptr, count_ptr, num_rows, num_chunks, num_experts, E: tl.constexpr, CHUNK: tl.constexpr):
    _, _, _, hit = _chosen(expert_ptr, num_rows, E, CHUNK)
    e = tl.arange(0, E)
    tl.store(count_ptr + e * num_chunks + tl.program_id(0), tl.sum(hit, 0), mask=e < num_experts)


@triton.jit
def _place(
    expert_ptr, count_ptr, end_ptr, slot_ptr, token_ptr, row_ptr, top_k, num_rows, num_chunks, num_experts,
    E: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    slot, live, expert, hit = _chosen(expert_ptr, num_rows, E, CHUNK)
    at = expert * num_chunks + tl.program_id(0)
    start = tl.load(end_ptr + at, mask=live, other=0) - tl.load(count_ptr + at, mask=live, other=0)
    before = tl.sum(tl.cumsum(hit, 0) * hit, 1) - 1
    row = start + before
    tl.store(row_ptr + slot, row, mask=live)
    tl.store(slot_ptr + row, slot, mask=live)
    tl.store(token_ptr + row, slot // top_k, mask=live)
