"""Gradients of the gated delta rule within its chunks, where flash-linear-attention has no kernel that is right.

The package refuses the backward of its gated rule on Hopper with Triton 3.4 to 3.7.0 (torch 2.11 brings 3.6): these
compile the transposed result of a GEMM into a wrong operand of the next one
(https://github.com/fla-org/flash-linear-attention/issues/640). This kernel computes that operand by a GEMM of its own.
`fla_on_hopper.py` registers it with the package as one of its backends.

Shapes: B batch, S sequence, N chunks, K key heads, H value heads, k key dim, v value dim, 2 columns: a document and a
chunk of it.
"""

import torch
from torch import Tensor

CHUNK = 64  # tokens


def chunk_grads(
    q_BSKk: Tensor,
    k_BSKk: Tensor,
    v_BSHv: Tensor,
    out_grad_BSHv: Tensor,
    state_BNHkv: Tensor,
    state_grad_BNHkv: Tensor,
    decay_BSH: Tensor,
    v_grad_BSHv: Tensor,
    scale: float,
    edges: Tensor | None = None,
    chunks_N2: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of queries, keys, `w` and of the decay, in the words of the package.

    `v` are corrected values, u - w @ state, and `v_grad` is their gradient. `state` is what each chunk reads,
    `state_grad` the gradient of what it leaves. `decay` is summed from the start of the chunk, as a power of 2, in
    fp32; its gradient is that of the natural logarithm. With `edges` (where documents start, and the end) all documents
    lie in one row, and `chunks_N2` names the document and the chunk in it for each chunk.
    """
    batch, length, keys, k_dim = q_BSKk.shape
    heads = v_BSHv.shape[2]
    wide = q_BSKk.new_empty(3, batch, length, heads, k_dim)  # gradients by value head
    decay_grad_BSH = torch.empty_like(decay_BSH, dtype=torch.float32)
    from threefold.engine.kernels.mixers.delta_chunk_grads_triton import launch_chunk_grads

    inputs = q_BSKk, k_BSKk, v_BSHv, out_grad_BSHv, state_BNHkv, state_grad_BNHkv, decay_BSH, v_grad_BSHv
    launch_chunk_grads(inputs, wide, decay_grad_BSH, scale, edges, chunks_N2)
    q_grad, k_grad, w_grad = wide
    if heads != keys:
        q_grad, k_grad = (grad.unflatten(2, (keys, -1)).sum(dim=3) for grad in (q_grad, k_grad))
    return q_grad, k_grad, w_grad, decay_grad_BSH
