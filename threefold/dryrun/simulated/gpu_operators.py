"""Operators whose results, saved tensors and workspaces have the sizes that they have on a GPU.

A rehearsal has no GPU, and torch's CPU operators save more for the backward (RMSNorm keeps fp32 intermediates) or
choose other kernels (attention). `use_gpu_operators` replaces RMSNorm, attention and the fused experts while a
rehearsal runs. Values do not matter here; shapes, dtypes and saved tensors do.

Shapes: B batch, H query heads, S sequence, D head dim.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor

from threefold.dryrun.simulated.expert_kernels import empty_expert_steps
from threefold.dryrun.tracking.memory_tracker import Workspace
from threefold.engine.kernels.experts import fused_experts
from threefold.engine.sum_dtype import fp32_or_wider
from threefold.units import MIB

_LIBRARY = torch.library.Library("threefold", "FRAGMENT")
_LIBRARY.define("rms_norm(Tensor x, int dims, Tensor? weight) -> (Tensor, Tensor)")
_LIBRARY.define("rms_norm_backward(Tensor grad, Tensor x, Tensor? weight, Tensor rstd) -> (Tensor, Tensor?)")
_LIBRARY.define("grouped_mm(Tensor a, Tensor b, Tensor ends) -> Tensor")
_GROUPED = torch.ops.aten._grouped_mm.default


@torch.library.register_fake("threefold::grouped_mm", lib=_LIBRARY)
def _grouped(a: Tensor, b: Tensor, ends: Tensor) -> Tensor:
    """The shape of a grouped GEMM: rows times one matrix for each group, or one weight gradient for each group."""
    shape = (len(a), b.shape[-1]) if b.dim() == 3 else (len(ends), a.shape[0], b.shape[1])
    return a.new_empty(shape)


def _grouped_mm(a: Tensor, b: Tensor, offs: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """torch's grouped GEMM. Its meta version accepts bf16 only, so other dtypes take the operator above."""
    found: Tensor
    if a.dtype == torch.bfloat16 or not a.is_meta:
        found = _GROUPED(a, b, offs, *args, **kwargs)
    else:
        found = torch.ops.threefold.grouped_mm(a, b, offs)
    return found


META_REPLACEMENTS = {_GROUPED: _grouped_mm}


@torch.library.register_fake("threefold::rms_norm", lib=_LIBRARY)
def _rms_norm(x: Tensor, dims: int, weight: Tensor | None) -> tuple[Tensor, Tensor]:
    rstd_shape = (*x.shape[: x.dim() - dims], *([1] * dims))
    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    return y, x.new_empty(rstd_shape, dtype=fp32_or_wider(x.dtype))


@torch.library.register_fake("threefold::rms_norm_backward", lib=_LIBRARY)
def _rms_norm_backward(grad: Tensor, x: Tensor, weight: Tensor | None, rstd: Tensor) -> tuple[Tensor, Tensor | None]:
    x_grad = torch.empty_like(x, memory_format=torch.contiguous_format)
    return x_grad, None if weight is None else torch.empty_like(weight)


class RmsNorm(torch.autograd.Function):
    """Saves what the fused kernel saves: its input, and one fp32 number for each row."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, dims: int, weight: Tensor | None) -> Tensor:
        y, rstd = torch.ops.threefold.rms_norm(x, dims, weight)
        ctx.save_for_backward(x, weight, rstd)
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, Tensor | None]:
        x, weight, rstd = ctx.saved_tensors
        x_grad, weight_grad = torch.ops.threefold.rms_norm_backward(grad.contiguous(), x, weight, rstd)
        return x_grad, None, weight_grad


def _norm(x: Tensor, shape: Sequence[int], weight: Tensor | None = None, eps: float | None = None) -> Tensor:
    return RmsNorm.apply(x, len(shape), weight)


def _attention(
    q: Tensor, k: Tensor, v: Tensor, *, is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False
) -> Tensor:
    """cuDNN attention, which has a meta version in torch. It saves the output and one fp32 number a query and head."""
    needs_grad = torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v))
    call = torch.ops.aten._scaled_dot_product_cudnn_attention
    out: Tensor = call(q, k, v, None, needs_grad, 0.0, is_causal, False, scale=scale)[0]
    return out


def _attention_backward(head_dim_index: int, spans_heads: bool) -> Workspace:
    """Workspace of the attention backward, as measured on an H200.

    The kernel sums the gradient of the queries in fp32 and keeps one fp32 correction for each query. Where several
    query heads share a key/value head, each first makes its own gradients of keys and values. With `spans_heads` the
    buffer has the strides of the queries, so that for a slice of the heads it spans all heads.
    """

    def size(args: tuple[Any, ...]) -> int:
        q, k, v = args[1:4]
        num_queries = q.numel() // q.shape[-1]
        is_gqa = q.shape[head_dim_index] != k.shape[head_dim_index]
        kv_grads = num_queries * (k.shape[-1] + v.shape[-1]) * q.element_size() if is_gqa else 0
        summed = q.numel()
        if spans_heads:
            summed = 1 + sum((length - 1) * stride for length, stride in zip(q.shape, q.stride(), strict=True))
        return 4 * (summed + num_queries) + kv_grads

    return size


def _embedding_backward(args: tuple[Any, ...]) -> int:
    """Workspace of the embedding backward: 1.1 fp32 rows for each token, in which rows of equal tokens are added."""
    grad = args[0]
    return 44 * grad.numel() // 10


WORKSPACES: dict[Any, Workspace] = {
    torch.ops.aten._scaled_dot_product_cudnn_attention_backward.default: _attention_backward(1, spans_heads=False),
    torch.ops.aten._flash_attention_backward.default: _attention_backward(-2, spans_heads=True),
    torch.ops.aten.embedding_dense_backward.default: _embedding_backward,
}
# On Hopper cuBLAS takes 32 MiB from torch's allocator for the forward's thread and as much for the backward's
# (torch: CUDABlas `getChosenWorkspaceSize`).
CUBLAS_WORKSPACE_BYTES = 2 * 32 * MIB


@contextmanager
def use_gpu_operators() -> Iterator[None]:
    """Replace RMSNorm, attention and the kernels of the fused experts, in the forward and in a recompute."""
    with (
        mock.patch.object(F, "rms_norm", _norm),
        mock.patch.object(F, "scaled_dot_product_attention", _attention),
        mock.patch.object(fused_experts, fused_experts._make_steps.__name__, empty_expert_steps),
    ):
        yield
