"""Causal attention through one door: windows, sinks, packed documents, grouped heads, on CPU and CUDA.

Shapes: B batch, H query heads, G key/value heads (H a multiple of G), S sequence, D head dim, N = B * S.

A sink is a learnt logit per head that takes probability and gives no value. With it the softmax's
log-sum-exp becomes lse' = logaddexp(lse, sink) and the output shrinks by exp(lse - lse'). The backward
kernels recompute probabilities from the lse they are handed, so handing them lse' and the shrunk output
gives exact gradients, and the sink's own is -sum(p_sink * <dout, out>).
"""

from dataclasses import dataclass
from functools import cache, partial
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from threefold.engine.attention.fa4 import flash4, flash4_works
from threefold.engine.attention.flash import CPU, CPU_BACKWARD, CUDA, CUDA_BACKWARD, DIM_STEP, SDPA, cuda_takes, widen
from threefold.engine.attention.grouped import attend_by_groups, heads_at_a_time
from threefold.engine.attention.speeds import fastest_first
from threefold.engine.attention.tune import measured_here
from threefold.engine.places import Bounds, bounds_of
from threefold.engine.recompute import is_hidden, remade
from threefold.engine.ways import stood_for, way


def attend(
    q_BHSD: Tensor,
    k_BGSD: Tensor,
    v_BGSD: Tensor,
    *,
    scale: float,
    window: int | None = None,
    sinks: Tensor | None = None,
    documents_BS: Tensor | None = None,
    bounds: Bounds | None = None,
) -> Tensor:
    """Each token sees itself and what came before it in its document, at most `window` tokens in all.

    `bounds` of the documents, where the caller has them, spare the CUDA kernel a wait for the device.
    """
    if window is not None and window >= q_BHSD.shape[2]:
        window = None
    if bounds is not None and len(bounds.starts) == len(q_BHSD) + 1:
        documents_BS = bounds = None  # one document a row: nothing to keep apart, and the faster kernels take it
    asked = _Asked(window, sinks, documents_BS, bounds)
    return _choose(q_BHSD, asked)(q_BHSD, k_BGSD, v_BGSD, scale, asked)


class Attend(Protocol):
    """`attend`, or what takes its place where a sequence is spread over ranks."""

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
        bounds: Bounds | None = None,
    ) -> Tensor: ...


class _Kernel(Protocol):
    def __call__(self, q: Tensor, k: Tensor, v: Tensor, scale: float, asked: "_Asked") -> Tensor: ...


@dataclass(frozen=True)
class _Asked:
    window: int | None
    sinks: Tensor | None
    documents_BS: Tensor | None
    bounds: Bounds | None


def _choose(q: Tensor, asked: _Asked) -> _Kernel:
    if way(q.device) != "cuda":
        return _on_cpu
    if not cuda_takes(q):
        return _eager
    plain = asked.window is None and asked.sinks is None and asked.documents_BS is None
    return _sdpa if plain else _on_cuda


def reference(
    q_BHSD: Tensor,
    k_BGSD: Tensor,
    v_BGSD: Tensor,
    *,
    scale: float,
    window: int | None = None,
    sinks: Tensor | None = None,
    documents_BS: Tensor | None = None,
) -> Tensor:
    """The same with every score in memory: the oracle of the kernels, and the path of fp32 on CUDA."""
    groups = q_BHSD.shape[1] // k_BGSD.shape[1]
    k, v = (x.repeat_interleave(groups, dim=1) for x in (k_BGSD, v_BGSD))
    logits = q_BHSD @ k.transpose(-1, -2) * scale
    logits = logits.masked_fill(~visible(q_BHSD, window, documents_BS), float("-inf"))
    if sinks is not None:
        column = sinks.to(logits.dtype).view(1, -1, 1, 1).expand(*logits.shape[:3], 1)
        logits = torch.cat([logits, column], dim=-1)
    weight = logits.softmax(dim=-1)[..., : k.shape[2]]
    return weight @ v


def visible(x: Tensor, window: int | None, documents_BS: Tensor | None) -> Tensor:
    """Which keys (last dim) each query (last but one) may read: (S, S), or (B, 1, S, S) with documents."""
    place = torch.arange(x.shape[2], device=x.device)
    distance = place[:, None] - place[None, :]
    mask = distance >= 0 if window is None else (distance >= 0) & (distance < window)
    if documents_BS is None:
        return mask
    return mask & (documents_BS[:, None, :, None] == documents_BS[:, None, None, :])


def _eager(q: Tensor, k: Tensor, v: Tensor, scale: float, asked: _Asked) -> Tensor:
    return reference(q, k, v, scale=scale, window=asked.window, sinks=asked.sinks, documents_BS=asked.documents_BS)


def _sdpa(q: Tensor, k: Tensor, v: Tensor, scale: float, asked: _Asked) -> Tensor:
    """By the kernel that is fastest at this size, or the next one that takes it."""
    names = fastest_first(q.shape[-1], v.shape[-1], q.shape[2], measured_here(q.device))
    if names[0] == "fa4" and flash4_works(q.device):
        return flash4(q, k, v, scale=scale)
    names = [name for name in names if name in SDPA]
    order = [*(SDPA[name] for name in names), SDPBackend.EFFICIENT_ATTENTION]
    grouped = q.shape[1] != k.shape[1]
    size = heads_at_a_time(q, k.shape[1])
    if size < k.shape[1] and names[:1] == ["cudnn"] and _cudnn_takes(q, k, v, grouped):
        return attend_by_groups(q, k, v, scale, size)
    width = v.shape[-1] if _takes_narrow(q, k, v, grouped) else q.shape[-1]
    if not stood_for():
        _torch_has_chosen(q.device)
    with (
        remade(partial(widen, width), v, on=width > v.shape[-1] and is_hidden(v)) as value,
        sdpa_kernel(order, set_priority=True),
    ):
        out = F.scaled_dot_product_attention(q, k, value, is_causal=True, scale=scale, enable_gqa=grouped)
    return out[..., : v.shape[-1]]


@cache
def _torch_has_chosen(device: torch.device) -> None:
    """torch puts its kernels in order for this GPU when it first chooses one. Within `sdpa_kernel` that order would be
    taken back at the end, and whoever else attends in this process would get slower kernels from then on."""
    if device.type == "cuda":
        probe = torch.empty(1, 1, 64, 64, dtype=torch.bfloat16, device=device)
        torch._fused_sdp_choice(probe, probe, probe)


def _takes_narrow(q: Tensor, k: Tensor, v: Tensor, grouped: bool) -> bool:
    """Whether cuDNN here is new enough for values that are narrower than keys; flash never takes them."""
    if v.shape[-1] % DIM_STEP:
        return False
    return v.shape[-1] == q.shape[-1] or _cudnn_takes(q, k, v, grouped)


def _cudnn_takes(q: Tensor, k: Tensor, v: Tensor, grouped: bool) -> bool:
    if stood_for():
        return True
    asked = torch.backends.cuda.SDPAParams(q, k, v, None, 0.0, True, grouped)
    return torch.backends.cuda.can_use_cudnn_attention(asked)


def _on_cpu(q: Tensor, k: Tensor, v: Tensor, scale: float, asked: _Asked) -> Tensor:
    mask = None
    if asked.window is not None or asked.documents_BS is not None:
        seen = visible(q, asked.window, asked.documents_BS)
        # The kernel takes an additive mask of the query's dtype only.
        mask = torch.zeros(seen.shape, dtype=q.dtype, device=q.device).masked_fill_(~seen, float("-inf"))
    with remade(partial(widen, q.shape[-1]), v, on=is_hidden(v)) as wide_v:
        out = _CpuFlash.apply(q, k, wide_v, asked.sinks, mask, scale)
    return out[..., : v.shape[-1]]


class _CpuFlash(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, mask: Tensor | None, scale: float
    ) -> Tensor:
        out, lse_BHS = CPU(q, k, v, 0.0, mask is None, attn_mask=mask, scale=scale)
        if sinks is not None:
            out, lse_BHS = shrink(out, lse_BHS, sinks.view(-1, 1))
        ctx.save_for_backward(q, k, v, out, lse_BHS, sinks, mask)
        ctx.scale = scale
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse_BHS, sinks, mask = ctx.saved_tensors
        grads = CPU_BACKWARD(grad, q, k, v, out, lse_BHS, 0.0, mask is None, attn_mask=mask, scale=ctx.scale)
        sink_grad = None
        if sinks is not None:
            sink_grad = sink_gradient(grad, out, lse_BHS, sinks.view(-1, 1)).sum(dim=(0, 2)).to(sinks.dtype)
        return *grads, sink_grad, None, None


def shrink(out: Tensor, lse: Tensor, sinks: Tensor) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp with the sink among the logits; `sinks` is broadcast against `lse`."""
    with_sink = torch.logaddexp(lse, sinks.to(lse.dtype))
    return out * (lse - with_sink).exp().unsqueeze(-1).to(out.dtype), with_sink


def sink_gradient(grad: Tensor, out: Tensor, lse: Tensor, sinks: Tensor) -> Tensor:
    """Per query: minus the sink's probability times <dout, out>."""
    inner = (grad.to(lse.dtype) * out.to(lse.dtype)).sum(dim=-1)
    return -(sinks.to(lse.dtype) - lse).exp() * inner


def _on_cuda(q: Tensor, k: Tensor, v: Tensor, scale: float, asked: _Asked) -> Tensor:
    bounds = asked.bounds
    if asked.documents_BS is not None and bounds is None:
        bounds = bounds_of(asked.documents_BS)
    batch, heads, length, _ = q.shape

    def laid_out(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        """The kernel's layout is (B, S, H, D); documents of all rows lie one behind the other as (1, N, H, D)."""
        turned = tuple(x.transpose(1, 2) for x in (q, k, widen(q.shape[-1], v)))
        return turned if bounds is None else tuple(x.reshape(batch * length, *x.shape[2:]) for x in turned)

    with remade(laid_out, q, k, v, on=is_hidden(v)) as qkv:
        out = _CudaFlash.apply(*qkv, asked.sinks, bounds, asked.window, scale)
    return out.view(batch, length, heads, -1).transpose(1, 2)[..., : v.shape[-1]]


class _CudaFlash(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sinks: Tensor | None,
        bounds: Bounds | None,
        window: int | None,
        scale: float,
    ) -> Tensor:
        edges, longest = (None, q.shape[1]) if bounds is None else (bounds.starts, bounds.longest)
        # The kernel's window counts the tokens left of the query, ours the query too.
        left = None if window is None else window - 1
        ctx.call = {"scale": scale, "window_size_left": left, "window_size_right": None if left is None else 0}
        out, lse, rng, unused, _ = CUDA(q, k, v, edges, edges, longest, longest, 0.0, True, False, **ctx.call)
        if sinks is not None:
            # lse is (B, H, S), or (H, N) for documents; out has the heads last but one.
            rows = lse.transpose(-1, -2)
            out, rows = shrink(out, rows, sinks)
            lse = rows.transpose(-1, -2).contiguous()
        ctx.save_for_backward(q, k, v, out, lse, sinks, edges, rng, unused)
        ctx.longest = longest
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse, sinks, edges, rng, unused = ctx.saved_tensors
        lengths = (edges, edges, ctx.longest, ctx.longest)
        grads = CUDA_BACKWARD(grad.contiguous(), q, k, v, out, lse, *lengths, 0.0, True, rng, unused, **ctx.call)
        sink_grad = None
        if sinks is not None:
            rows = sink_gradient(grad, out, lse.transpose(-1, -2), sinks)
            sink_grad = rows.flatten(0, -2).sum(dim=0).to(sinks.dtype)
        return *grads, sink_grad, None, None, None
