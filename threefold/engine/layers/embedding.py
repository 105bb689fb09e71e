"""The embedding of tokens. Its gradient is computed by kernels of ours where these run, else by torch.

torch zeroes the gradient of the whole vocabulary, sorts the tokens and sums their rows in many launches; ours does the
same in fewer passes, and leaves the sum of squares for the gradient norm (`autograd/grad_squares.py`).

Shapes: B batch, S sequence, T = B * S tokens, V vocabulary, D model dim. In part_B2D, B is the number of blocks of
sorted tokens.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from threefold.engine.autograd.grad_squares import requested_squares
from threefold.engine.device import is_simulated
from threefold.engine.kernels.availability import runs_fused
from threefold.engine.kernels.launch_config import cdiv

POSITIONS = 64  # sorted tokens of a block
MAX_COLUMNS = 2048  # of a program


class TokenEmbedding(nn.Embedding):
    """`nn.Embedding` by `embed`."""

    def forward(self, tokens_BS: Tensor) -> Tensor:
        return embed(tokens_BS, self.weight)


def embed(tokens_BS: Tensor, weight_VD: Tensor) -> Tensor:
    """The row of each token."""
    if not runs_fused(weight_VD) or not tokens_BS.numel():
        return F.embedding(tokens_BS, weight_VD)
    out_BSD: Tensor = _Embed.apply(tokens_BS, weight_VD)
    return out_BSD


class _Embed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tokens_BS: Tensor, weight_VD: Tensor) -> Tensor:
        ctx.save_for_backward(tokens_BS)
        ctx.vocab, ctx.squares = len(weight_VD), requested_squares(weight_VD)
        return F.embedding(tokens_BS, weight_VD)

    @staticmethod
    def backward(ctx: Any, grad_BSD: Tensor) -> tuple[None, Tensor]:
        (tokens_BS,) = ctx.saved_tensors
        grad_TD = grad_BSD.flatten(0, -2).contiguous()
        num_tokens, dim = grad_TD.shape
        grad_VD = grad_TD.new_empty(ctx.vocab, dim)
        sorted_T, order_T = tokens_BS.flatten().to(torch.int32).sort(stable=True)
        num_blocks, num_columns = cdiv(num_tokens, POSITIONS), cdiv(dim, MAX_COLUMNS)
        part_B2D = grad_TD.new_empty(num_blocks, 2, dim, dtype=torch.float32)
        squares = grad_TD.new_empty(num_tokens + num_blocks, num_columns, dtype=torch.float32)
        if not is_simulated():
            from threefold.engine.kernels.elementwise.embedding_triton import launch_embedding_grad

            launch_embedding_grad(grad_TD, sorted_T, order_T, grad_VD, part_B2D, squares, POSITIONS)
            if ctx.squares is not None:
                ctx.squares.note(grad_VD, squares.view(-1))
        return None, grad_VD
