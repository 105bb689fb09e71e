"""A layer's experts in torch, by its grouped product.

Shapes: T tokens, K experts of a token, R rows, D model dim, E experts, H expert dim.
"""

import torch
import torch.nn.functional as F
from torch import Tensor


def grouped_layer(x_TD: Tensor, weight_TK: Tensor, expert_TK: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    """As it is commonly written."""
    token_R, rows = prepared(x_TD, weight_TK, expert_TK, len(down))
    return torch.zeros_like(x_TD).index_add(0, token_R[0], grouped_rows(*rows, gate_up, down))


def gathered_layer(x_TD: Tensor, weight_TK: Tensor, expert_TK: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    """The way to write it that compiles to the fastest code, among several."""
    (_, order_R), rows = prepared(x_TD, weight_TK, expert_TK, len(down))
    place_R = torch.arange(len(order_R), device=order_R.device)
    row_TK = torch.empty_like(order_R).scatter_(0, order_R, place_R).view_as(expert_TK)
    return grouped_rows(*rows, gate_up, down)[row_TK].sum(dim=1)


def prepared(
    x_TD: Tensor, weight_TK: Tensor, expert_TK: Tensor, num_experts: int
) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor, Tensor]]:
    """-> ((token of each row, slot of each row), arguments of `grouped_rows`)."""
    flat = expert_TK.flatten()
    order_R = flat.argsort(stable=True)
    count_E = torch.zeros(num_experts, dtype=torch.long, device=flat.device).scatter_add_(
        0, flat, torch.ones_like(flat)
    )
    token_R = order_R // expert_TK.shape[1]
    return (token_R, order_R), (x_TD[token_R], weight_TK.flatten()[order_R], count_E)


def grouped_rows(x_RD: Tensor, weight_R: Tensor, count_E: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    ends_E = count_E.cumsum(0).to(torch.int32)
    gate_RH, up_RH = F.grouped_mm(x_RD, gate_up.mT, offs=ends_E).chunk(2, dim=-1)
    y_RD = F.grouped_mm(F.silu(gate_RH) * up_RH, down.mT, offs=ends_E)
    return (y_RD * weight_R[:, None]).to(x_RD.dtype)


def split_rows(x_RD: Tensor, weight_R: Tensor, count_E: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    """Gate and up by products of their own, as torchtitan has them."""
    ends_E = count_E.cumsum(0).to(torch.int32)
    gate_RH, up_RH = (F.grouped_mm(x_RD, half.mT, offs=ends_E) for half in gate_up.chunk(2, dim=1))
    y_RD = F.grouped_mm(F.silu(gate_RH) * up_RH, down.mT, offs=ends_E)
    return (y_RD * weight_R[:, None]).to(x_RD.dtype)
