"""Token copies sorted by expert, with no wait for the device.

Shapes: T tokens, K experts of a token, R = T * K rows, E experts.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True)
class Rows:
    slot_R: Tensor  # t * K + k that each row came from
    token_R: Tensor  # t; memory of its own, as quack's kernels read it in pieces of 16 bytes
    row_TK: Tensor  # row that each copy of a token went to
    ends_E: Tensor  # end of each expert's rows
    starts_F: Tensor  # the same behind a zero: F = E + 1
    weight_R: Tensor | None = None  # router weight of each row, where they were given


def sort_rows(expert_TK: Tensor, num_experts: int, weight_TK: Tensor | None = None) -> Rows:
    """Stable: equal experts keep token order, so a recompute agrees bit for bit."""
    key_R, slot_R = expert_TK.flatten().sort(stable=True)
    place_R = torch.arange(len(slot_R), device=slot_R.device)
    row = torch.empty_like(place_R).scatter_(0, slot_R, place_R)
    expert_E = torch.arange(num_experts, dtype=key_R.dtype, device=slot_R.device)
    ends_E = torch.searchsorted(key_R, expert_E, right=True, out_int32=True)
    token_R = slot_R.div(expert_TK.shape[1], rounding_mode="floor")
    places = slot_R.to(torch.int32), token_R.to(torch.int32), row.view_as(expert_TK).to(torch.int32)
    weight_R = None if weight_TK is None else weight_TK.detach().flatten()[slot_R]
    return Rows(*places, ends_E, F.pad(ends_E, (1, 0)), weight_R)


def expert_of(ends_E: Tensor, num_rows: int) -> Tensor:
    """Of each row."""
    row_R = torch.arange(num_rows, dtype=torch.int32, device=ends_E.device)
    return torch.searchsorted(ends_E, row_R, right=True)
