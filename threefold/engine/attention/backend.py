"""Causal attention on CPU and CUDA: grouped heads, sliding windows, attention sinks and packed documents.

`attend` is the one entry: it chooses a kernel (cuDNN, flash, FlashAttention-4, or plain torch) by device, dtype and
mask. `GqaAttention` and `MlaAttention` call it as their `attention_fn`.

Shapes: B batch, H query heads, G key/value heads (H a multiple of G), S sequence, D head dim, N = B * S.

A sink is a learnt logit per head that takes probability and gives no value. With it the softmax's
log-sum-exp becomes lse' = logaddexp(lse, sink) and the output shrinks by exp(lse - lse'). The backward
kernels recompute probabilities from the lse they are given, so giving them lse' and the shrunk output
yields exact gradients; the gradient of the sink itself is -sum(p_sink * <dout, out>).
"""

from dataclasses import dataclass
from functools import cache, partial
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from threefold.engine.attention.flash_attention_4 import (
    flash_attention_4,
    has_flash_attention_4,
    has_measured_release,
)
from threefold.engine.attention.head_groups.cudnn_head_groups import attend_in_head_groups, query_heads_per_group
from threefold.engine.attention.kernel_speeds import fastest_first, speeds_measured_here
from threefold.engine.attention.query_blocks import CausalMask, attend_in_blocks
from threefold.engine.attention.torch_kernels import (
    FLASH_CPU,
    FLASH_CPU_BACKWARD,
    FLASH_CUDA,
    FLASH_CUDA_BACKWARD,
    HEAD_DIM_MULTIPLE,
    SDPA,
    add_sink,
    flash_supports,
    pad_head_dim,
    sink_gradient,
    with_dense_rows,
)
from threefold.engine.autograd.recompute import is_recomputed, recompute_output
from threefold.engine.autograd.saved_tensors import CORE_ATTENTION, save_output, saves_outputs
from threefold.engine.context import context, count_event
from threefold.engine.device import device_type, is_simulated
from threefold.engine.layers.positions import DocumentBounds, document_bounds


def attend(
    q_BHSD: Tensor,
    k_BGSD: Tensor,
    v_BGSD: Tensor,
    *,
    scale: float,
    window: int | None = None,
    sinks: Tensor | None = None,
    documents_BS: Tensor | None = None,
    bounds: DocumentBounds | None = None,
) -> Tensor:
    """Each token attends to itself and to the tokens before it in its document, at most `window` tokens in all.

    `bounds` are the bounds of the documents; without them the CUDA path computes them, which waits for the device.
    """
    if window is not None and window >= q_BHSD.shape[2]:
        window = None
    if bounds is not None and len(bounds.cu_seqlens) == len(q_BHSD) + 1:
        documents_BS = bounds = None  # every row is one document, so that the faster kernels can be used
    masking = _Masking(window, sinks, documents_BS, bounds)
    kernel = _select_kernel(q_BHSD, masking)
    if kernel is not _sdpa:
        count_event("attention", _KERNEL_NAMES[kernel])
    return kernel(q_BHSD, k_BGSD, v_BGSD, scale, masking)


class AttentionFn(Protocol):
    """The signature of `attend`, and of its replacement where a sequence is sharded over ranks."""

    def __call__(
        self,
        q_BHSD: Tensor,
        k_BGSD: Tensor,
        v_BGSD: Tensor,
        *,
        scale: float,
        window: int | None = None,
        sinks: Tensor | None = None,
        documents_BS: Tensor | None = None,
        bounds: DocumentBounds | None = None,
    ) -> Tensor: ...


class _Kernel(Protocol):
    def __call__(self, q: Tensor, k: Tensor, v: Tensor, scale: float, masking: "_Masking") -> Tensor: ...


@dataclass(frozen=True)
class _Masking:
    """Everything about the mask except that it is causal."""

    window: int | None
    sinks: Tensor | None
    documents_BS: Tensor | None
    bounds: DocumentBounds | None


def _select_kernel(q: Tensor, masking: _Masking) -> _Kernel:
    hides_keys = masking.window is not None or masking.documents_BS is not None
    if device_type(q.device) != "cuda":
        return _in_blocks if hides_keys else _on_cpu  # flash on the CPU wants the mask of the whole sequence
    if not flash_supports(q):
        return _in_blocks
    return _on_cuda if hides_keys or masking.sinks is not None else _sdpa


def _in_blocks(q: Tensor, k: Tensor, v: Tensor, scale: float, masking: _Masking) -> Tensor:
    make_mask = partial(CausalMask, masking.window)
    return attend_in_blocks(q, k, v, scale, make_mask, masking.documents_BS, sinks=masking.sinks)


def _sdpa(q: Tensor, k: Tensor, v: Tensor, scale: float, masking: _Masking) -> Tensor:
    """Plain causal attention by the kernel that is fastest at this size, or the next one that supports it."""
    measured = speeds_measured_here(q.device), has_measured_release(q.device)
    names = fastest_first(q.shape[-1], v.shape[-1], q.shape[2], *measured)
    is_saved = saves_outputs(CORE_ATTENTION)  # then a kernel whose log-sum-exps can be had
    heads = query_heads_per_group(q.shape[1], k.shape[1], 4 * q.numel() // q.shape[1])
    if names[0] == "fa4" and not is_saved and heads == q.shape[1] and has_flash_attention_4(q.device):
        count_event("attention", "FlashAttention-4")
        return flash_attention_4(q, k, v, scale=scale)
    names = [name for name in names if name in SDPA]
    backends = [*(SDPA[name] for name in names), SDPBackend.EFFICIENT_ATTENTION]
    grouped = q.shape[1] != k.shape[1]
    if (heads < q.shape[1] or is_saved) and names[:1] == ["cudnn"] and _cudnn_supports(q, k, v, grouped):
        count_event("attention", "cuDNN, some heads at a time" if heads < q.shape[1] else "cuDNN, output saved")
        return attend_in_head_groups(q, k, v, scale, heads)
    if is_saved:
        count_event("attention", "torch's flash attention, output saved")
        return _on_cuda(q, k, v, scale, masking)
    value_dim = v.shape[-1] if _supports_value_dim(q, k, v, grouped) else q.shape[-1]
    if not is_simulated():
        _let_torch_order_kernels(q.device)
    recomputes = value_dim > v.shape[-1] and is_recomputed(v)
    with (
        recompute_output(partial(pad_head_dim, value_dim), v, enabled=recomputes) as padded_v,
        sdpa_kernel(backends, set_priority=True),
    ):
        if context.event_counts is not None:
            _count_torchs_choice(q, k, padded_v, scale, grouped)
        out = F.scaled_dot_product_attention(q, k, padded_v, is_causal=True, scale=scale, enable_gqa=grouped)
    return out[..., : v.shape[-1]]


def _count_torchs_choice(q: Tensor, k: Tensor, v: Tensor, scale: float, grouped: bool) -> None:
    """Count the kernel that torch takes among those that are allowed here."""
    choice = torch._fused_sdp_choice(q, k, v, is_causal=True, scale=scale, enable_gqa=grouped)
    count_event("attention", f"torch's {SDPBackend(choice).name.lower().replace('_', ' ')}")


@cache
def _let_torch_order_kernels(device: torch.device) -> None:
    """Make torch choose its order of kernels for this GPU now.

    torch does so at its first choice. Inside `sdpa_kernel` that order would be undone at the end of the `with` block,
    and other code of this process would get slower kernels from then on.
    """
    if device.type == "cuda":
        probe = torch.empty(1, 1, 64, 64, dtype=torch.bfloat16, device=device)
        torch._fused_sdp_choice(probe, probe, probe)


def _supports_value_dim(q: Tensor, k: Tensor, v: Tensor, grouped: bool) -> bool:
    """Whether values that are narrower than keys need no padding: a recent cuDNN takes them, flash does not."""
    if v.shape[-1] % HEAD_DIM_MULTIPLE:
        return False
    return v.shape[-1] == q.shape[-1] or _cudnn_supports(q, k, v, grouped)


def _cudnn_supports(q: Tensor, k: Tensor, v: Tensor, grouped: bool) -> bool:
    if is_simulated():
        return True
    masking = torch.backends.cuda.SDPAParams(q, k, v, None, 0.0, True, grouped)
    return torch.backends.cuda.can_use_cudnn_attention(masking)


def _on_cpu(q: Tensor, k: Tensor, v: Tensor, scale: float, masking: _Masking) -> Tensor:
    q, k, v = with_dense_rows(q, k, v)
    with recompute_output(partial(pad_head_dim, q.shape[-1]), v, enabled=is_recomputed(v)) as padded_v:
        out = _CpuFlash.apply(q, k, padded_v, masking.sinks, scale)
    return out[..., : v.shape[-1]]


class _CpuFlash(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, scale: float) -> Tensor:
        def compute() -> tuple[Tensor, Tensor]:
            out, lse_BHS = FLASH_CPU(q, k, v, 0.0, True, scale=scale)
            return (out, lse_BHS) if sinks is None else add_sink(out, lse_BHS, sinks.view(-1, 1))

        out, lse_BHS = save_output(CORE_ATTENTION, compute, 2)
        ctx.save_for_backward(q, k, v, out, lse_BHS, sinks)
        ctx.scale = scale
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse_BHS, sinks = ctx.saved_tensors
        (grad,) = with_dense_rows(grad)
        grads = FLASH_CPU_BACKWARD(grad, q, k, v, out, lse_BHS, 0.0, True, scale=ctx.scale)
        sink_grad = None
        if sinks is not None:
            sink_grad = sink_gradient(grad, out, lse_BHS, sinks.view(-1, 1)).sum(dim=(0, 2)).to(sinks.dtype)
        return *grads, sink_grad, None


def _on_cuda(q: Tensor, k: Tensor, v: Tensor, scale: float, masking: _Masking) -> Tensor:
    bounds = masking.bounds
    if masking.documents_BS is not None and bounds is None:
        bounds = document_bounds(masking.documents_BS)
    batch, heads, length, _ = q.shape

    def to_kernel_layout(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        """(B, H, S, D) in the kernel's layout: (B, S, H, D), or (N, H, D) with documents."""
        transposed = tuple(x.transpose(1, 2) for x in (q, k, pad_head_dim(q.shape[-1], v)))
        return transposed if bounds is None else tuple(x.reshape(batch * length, *x.shape[2:]) for x in transposed)

    with recompute_output(to_kernel_layout, q, k, v, enabled=is_recomputed(v)) as qkv:
        out = _CudaFlash.apply(*qkv, masking.sinks, bounds, masking.window, scale)
    return out.view(batch, length, heads, -1).transpose(1, 2)[..., : v.shape[-1]]


class _CudaFlash(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sinks: Tensor | None,
        bounds: DocumentBounds | None,
        window: int | None,
        scale: float,
    ) -> Tensor:
        cu_seqlens, max_seqlen = (None, q.shape[1]) if bounds is None else (bounds.cu_seqlens, bounds.max_seqlen)
        # The kernel's window counts the tokens left of the query; ours includes the query.
        left, right = (None, None) if window is None else (window - 1, 0)
        ctx.call = {"scale": scale, "window_size_left": left, "window_size_right": right}
        lengths = (cu_seqlens, cu_seqlens, max_seqlen, max_seqlen)

        def compute() -> tuple[Tensor, ...]:
            out, lse, rng, unused, _ = FLASH_CUDA(q, k, v, *lengths, 0.0, True, False, **ctx.call)
            if sinks is not None:
                # lse is (B, H, S), or (H, N) with documents; out has the heads in the last dim but one.
                rows = lse.transpose(-1, -2)
                out, rows = add_sink(out, rows, sinks)
                lse = rows.transpose(-1, -2).contiguous()
            return out, lse, rng, unused

        out, lse, rng, unused = save_output(CORE_ATTENTION, compute, 4)
        ctx.save_for_backward(q, k, v, out, lse, sinks, cu_seqlens, rng, unused)
        ctx.max_seqlen = max_seqlen
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse, sinks, cu_seqlens, rng, unused = ctx.saved_tensors
        lengths = (cu_seqlens, cu_seqlens, ctx.max_seqlen, ctx.max_seqlen)
        grads = FLASH_CUDA_BACKWARD(grad.contiguous(), q, k, v, out, lse, *lengths, 0.0, True, rng, unused, **ctx.call)
        sink_grad = None
        if sinks is not None:
            rows = sink_gradient(grad, out, lse.transpose(-1, -2), sinks)
            sink_grad = rows.flatten(0, -2).sum(dim=0).to(sinks.dtype)
        return *grads, sink_grad, None, None, None


_KERNEL_NAMES: dict[_Kernel, str] = {
    _on_cpu: "flash on the CPU",
    _in_blocks: "plain torch, blocks of queries",
    _on_cuda: "torch's flash attention, masked",
}
