"""Permute and unpermute: copy tokens to rows sorted by expert, and sum the rows of each token.

`dispatch/rows.py` calls it. With `padded`, some rows belong to no token (token -1) and some copies of a token have no
row (row -1).

Shapes: T tokens, D model dim, K experts of a token, R rows.
"""

import torch
from torch import Tensor

from threefold.engine.device import is_simulated


def permute_tokens(x_TD: Tensor, token_R: Tensor, row_TK: Tensor, padded: bool) -> Tensor:
    """Copy each token to its rows. A row without a token is zero."""
    out_RD = x_TD.new_empty(len(token_R), x_TD.shape[1])
    if not is_simulated():
        from threefold.engine.kernels.elementwise.permute_triton import launch_gather_rows, launch_scatter_tokens

        if padded:
            launch_gather_rows(x_TD.contiguous(), token_R, out_RD)
        else:
            launch_scatter_tokens(x_TD.contiguous(), row_TK, out_RD)
    return out_RD


def unpermute_sum(y_RD: Tensor, row_TK: Tensor, padded: bool) -> Tensor:
    """Sum the rows of each token, in fp32 and always in the same order. A row of -1 adds nothing."""
    out_TD = torch.empty(len(row_TK), y_RD.shape[1], dtype=y_RD.dtype, device=y_RD.device)
    if not is_simulated():
        from threefold.engine.kernels.elementwise.permute_triton import launch_sum_rows

        launch_sum_rows(y_RD.contiguous(), row_TK, out_TD, padded)
    return out_TD
