"""Operators whose results and saved tensors have the sizes they have on a GPU, for fake tensors that stay on the CPU.

torch's own CPU versions keep more (a norm in fp32, piece by piece) or choose other kernels (attention). What is
computed does not matter here; shapes, dtypes and what the backward keeps do.

Shapes: B batch, H query heads, S sequence, D head dim.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor

import threefold.engine.kernels.experts as fused
from threefold.dryrun.expert_steps import steps_for
from threefold.dryrun.tracker import Workspace
from threefold.engine.norm import wide
from threefold.units import MIB

_LIBRARY = torch.library.Library("threefold", "FRAGMENT")
_LIBRARY.define("rms_norm(Tensor x, int dims, Tensor? weight) -> (Tensor, Tensor)")
_LIBRARY.define("rms_norm_backward(Tensor grad, Tensor x, Tensor? weight, Tensor rstd) -> (Tensor, Tensor?)")
_LIBRARY.define("grouped_mm(Tensor a, Tensor b, Tensor ends) -> Tensor")
_GROUPED = torch.ops.aten._grouped_mm.default


@torch.library.register_fake("threefold::grouped_mm", lib=_LIBRARY)
def _grouped(a: Tensor, b: Tensor, ends: Tensor) -> Tensor:
    """Rows by a matrix a group, or columns by columns to one matrix a group."""
    shape = (len(a), b.shape[-1]) if b.dim() == 3 else (len(ends), a.shape[0], b.shape[1])
    return a.new_empty(shape)


def _grouped_mm(a: Tensor, b: Tensor, offs: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """Without memory torch knows it in bf16 only."""
    found: Tensor
    if a.dtype == torch.bfloat16 or not a.is_meta:
        found = _GROUPED(a, b, offs, *args, **kwargs)
    else:
        found = torch.ops.threefold.grouped_mm(a, b, offs)
    return found


STAND_INS = {_GROUPED: _grouped_mm}


@torch.library.register_fake("threefold::rms_norm", lib=_LIBRARY)
def _rms_norm(x: Tensor, dims: int, weight: Tensor | None) -> tuple[Tensor, Tensor]:
    kept = (*x.shape[: x.dim() - dims], *([1] * dims))
    return torch.empty_like(x, memory_format=torch.contiguous_format), x.new_empty(kept, dtype=wide(x.dtype))


@torch.library.register_fake("threefold::rms_norm_backward", lib=_LIBRARY)
def _rms_norm_backward(grad: Tensor, x: Tensor, weight: Tensor | None, rstd: Tensor) -> tuple[Tensor, Tensor | None]:
    made = torch.empty_like(x, memory_format=torch.contiguous_format)
    return made, None if weight is None else torch.empty_like(weight)


class RmsNorm(torch.autograd.Function):
    """As the fused kernel: beside its input it keeps one number a row."""

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
    q: Tensor, k: Tensor, v: Tensor, *, is_causal: bool, scale: float | None = None, enable_gqa: bool = False
) -> Tensor:
    """cuDNN's, whose shapes torch knows: it keeps the output and one fp32 number a query and head."""
    needs = torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v))
    call = torch.ops.aten._scaled_dot_product_cudnn_attention
    out: Tensor = call(q, k, v, None, needs, 0.0, is_causal, False, scale=scale)[0]
    return out


def _attention_backward(heads_at: int) -> Workspace:
    """The gradient of the queries is summed in fp32, with a number a query for its correction; where several of them
    share keys and values, each makes gradients of its own for these first. So measured on an H200."""

    def size(args: tuple[Any, ...]) -> int:
        q, k, v = args[1:4]
        num_queries = q.numel() // q.shape[-1]
        shared = q.shape[heads_at] != k.shape[heads_at]
        apart = num_queries * (k.shape[-1] + v.shape[-1]) * q.element_size() if shared else 0
        # Laid out as the queries are: for some heads among others it spans them all.
        span = 1 + sum((length - 1) * stride for length, stride in zip(q.shape, q.stride(), strict=True))
        return 4 * (span + num_queries) + apart

    return size


def _embedding_backward(args: tuple[Any, ...]) -> int:
    """Rows of the gradient in fp32, one a token and one more for ten of them, in which it adds them up."""
    grad = args[0]
    return 44 * grad.numel() // 10


WORKSPACES: dict[Any, Workspace] = {
    torch.ops.aten._scaled_dot_product_cudnn_attention_backward.default: _attention_backward(1),
    torch.ops.aten._flash_attention_backward.default: _attention_backward(-2),
    torch.ops.aten.embedding_dense_backward.default: _embedding_backward,
}
# cuBLAS takes as much for the thread of the forward and for that of the backward, from torch's allocator, on Hopper
# (torch: CUDABlas `getChosenWorkspaceSize`).
LIBRARIES = 2 * 32 * MIB


@contextmanager
def as_on_a_gpu() -> Iterator[None]:
    """Calls of these go to the operators here, also from a recompute."""
    with (
        mock.patch.object(F, "rms_norm", _norm),
        mock.patch.object(F, "scaled_dot_product_attention", _attention),
        mock.patch.object(fused, "_steps", steps_for),
    ):
        yield
