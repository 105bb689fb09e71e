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
from torch._subclasses.fake_tensor import FakeTensor

import threefold.engine.kernels.experts as fused
from threefold.dryrun.expert_steps import steps_for
from threefold.dryrun.tracker import Workspace
from threefold.engine.norm import wide

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
    if a.dtype == torch.bfloat16 or not (a.is_meta or isinstance(a, FakeTensor)):
        found = _GROUPED(a, b, offs, *args, **kwargs)
    else:
        found = torch.ops.threefold.grouped_mm(a, b, offs)
    return found


STAND_INS = {_GROUPED: _grouped_mm}


def with_stand_ins(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return STAND_INS.get(func, func)(*args, **kwargs)


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


def _wide_queries(q_at: int) -> Workspace:
    """The backward sums the gradient of the queries in fp32, with a number a query for its correction."""

    def size(args: tuple[Any, ...]) -> int:
        q = args[q_at]
        return 4 * (q.numel() + q.numel() // q.shape[-1])

    return size


WORKSPACES: dict[Any, Workspace] = {
    torch.ops.aten._scaled_dot_product_cudnn_attention_backward.default: _wide_queries(1),
    torch.ops.aten._flash_attention_backward.default: _wide_queries(1),
}


@contextmanager
def as_on_a_gpu() -> Iterator[None]:
    """Calls of these go to the operators here, also from a recompute."""
    with (
        mock.patch.object(F, "rms_norm", _norm),
        mock.patch.object(F, "scaled_dot_product_attention", _attention),
        mock.patch.object(fused, "_steps", steps_for),
    ):
        yield
