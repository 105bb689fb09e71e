"""Token copies sorted by expert in plain torch, and the index tensors that describe the order.

`counting_sort.py` gives the same on a GPU. Neither waits for the device. `received_rows.py` describes rows that other
ranks sent in the same way: each is a token with one copy. Example: two tokens of experts (1, 0) and
(0, 2) give slot_R = [1, 2, 0, 3], token_R = [0, 1, 0, 1], row_TK = [[2, 0], [1, 3]] and ends_E = [2, 3, 4].

Shapes: T tokens, K experts of a token, R = T * K rows, E experts.
"""

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True)
class SortedRows:
    """Where each copy of a token lies once the copies are sorted by expert."""

    slot_R: Tensor  # t * K + k of the copy in each row
    token_R: Tensor  # t of the copy in each row; 16-byte aligned, as quack's kernels read it in such pieces
    row_TK: Tensor  # the row of each copy of a token
    ends_E: Tensor  # end of each expert's rows
    starts_F: Tensor  # `ends_E` with a zero in front: F = E + 1
    weight_R: Tensor | None = None  # router weight of each row, if weights were given

    @property
    def target_R(self) -> Tensor | None:  # noqa: N802 - a tensor and its shape
        """Where a GEMM stores each row of its result: at its token, if every token has one. Else rows are summed."""
        return self.token_R if self.row_TK.shape[1] == 1 else None

    def of_first(self, num_experts: int) -> "SortedRows":
        """The same order of rows that are all of the first so many experts."""
        return replace(self, ends_E=self.ends_E[:num_experts], starts_F=self.starts_F[: num_experts + 1])


def sort_rows(expert_TK: Tensor, num_experts: int, weight_TK: Tensor | None = None) -> SortedRows:
    """Stable: copies with the same expert keep the order of tokens, so a recompute agrees bit for bit."""
    key_R, slot_R = expert_TK.flatten().sort(stable=True)
    position_R = torch.arange(len(slot_R), device=slot_R.device)
    row = torch.empty_like(position_R).scatter_(0, slot_R, position_R)
    expert_E = torch.arange(num_experts, dtype=key_R.dtype, device=slot_R.device)
    ends_E = torch.searchsorted(key_R, expert_E, right=True, out_int32=True)
    token_R = slot_R.div(expert_TK.shape[1], rounding_mode="floor")
    indices = slot_R.to(torch.int32), token_R.to(torch.int32), row.view_as(expert_TK).to(torch.int32)
    weight_R = None if weight_TK is None else weight_TK.detach().flatten()[slot_R]
    return SortedRows(*indices, ends_E, F.pad(ends_E, (1, 0)), weight_R)


def expert_of_rows(ends_E: Tensor, num_rows: int) -> Tensor:
    """The expert of each row."""
    row_R = torch.arange(num_rows, dtype=torch.int32, device=ends_E.device)
    return torch.searchsorted(ends_E, row_R, right=True)
