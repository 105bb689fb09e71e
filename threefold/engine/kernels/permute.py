"""Tokens to their rows, and rows summed by token, each value read once where it can be.

Shapes: T tokens, D model dim, K experts of a token, R rows.
"""

import torch
from torch import Tensor

from threefold.engine.ways import stood_for


def spread_rows(x_TD: Tensor, token_R: Tensor, row_TK: Tensor, padded: bool) -> Tensor:
    """Each token's values in its rows; zeros in a row that belongs to none."""
    out_RD = x_TD.new_empty(len(token_R), x_TD.shape[1])
    if not stood_for():
        from threefold.engine.kernels.permute_passes import launch_from_tokens, launch_to_rows

        if padded:
            launch_to_rows(x_TD.contiguous(), token_R, out_RD)
        else:
            launch_from_tokens(x_TD.contiguous(), row_TK, out_RD)
    return out_RD


def sum_by_token(y_RD: Tensor, row_TK: Tensor, padded: bool) -> Tensor:
    """In fp32 and in one order; a row of -1 adds nothing."""
    out_TD = torch.empty(len(row_TK), y_RD.shape[1], dtype=y_RD.dtype, device=y_RD.device)
    if not stood_for():
        from threefold.engine.kernels.permute_passes import launch_sum

        launch_sum(y_RD.contiguous(), row_TK, out_TD, padded)
    return out_TD
