"""The gated delta rule layer (linear attention of Qwen3-Next): projections, short convolution, recurrence, gated norm.

`models/mixers.py` makes it as the mixer of a layer. The recurrence has a state S (k x v) per value head, which decays
and which each token corrects: S <- exp(g) S; S <- S + k (beta (v - S^T k))^T; out = S^T q.

Shapes: B batch, S sequence, D model dim, K key heads, H value heads, k key dim, v value dim, W channels of the
convolution, X and Y columns of a key head.
"""

from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from threefold.engine.attention.delta_chunks import CHUNK, EPS, chunk_delta_rule, l2_normalize
from threefold.engine.attention.fused_delta import count_delta_rule, fused_delta_rule
from threefold.engine.kernels.availability import runs_fused
from threefold.engine.kernels.mixers.conv_heads import MAX_TAPS, ConvHeads, conv_heads
from threefold.engine.layers.input_linears import InputLinears, apply_linears
from threefold.engine.layers.norm import GatedRMSNorm
from threefold.engine.layers.positions import DocumentBounds, Positions, document_bounds, document_starts
from threefold.engine.sum_dtype import fp32_or_wider
from threefold.spec.model import DeltaSpec


class GatedDelta(nn.Module):
    kernels: str | None = None  # `knobs.delta_kernels`

    def __init__(self, spec: DeltaSpec, dim: int, eps: float) -> None:
        super().__init__()
        self.spec = spec
        # Both projections are ordered by key head, so that a tensor-parallel split keeps heads whole.
        self.qkvz = nn.Linear(dim, 2 * spec.keys + 2 * spec.values, bias=False)
        self.ba = nn.Linear(dim, 2 * spec.num_v_heads, bias=False)
        self.conv = nn.Parameter(torch.empty(2 * spec.keys + spec.values, spec.conv))
        self.dt_bias = nn.Parameter(torch.ones(spec.num_v_heads))
        self.a_log = nn.Parameter(torch.zeros(spec.num_v_heads))
        self.norm = GatedRMSNorm(spec.v_dim, eps)
        self.out = nn.Linear(spec.values, dim, bias=False)
        self.input_linears: InputLinears = apply_linears
        self.mix_over_ranks: MixFn | None = None

    def forward(self, x_BSD: Tensor, positions: Positions) -> Tensor:
        qkv_BSKX, ba_BSKY, z_BSKX = self.project(x_BSD)
        out_BSHv = self.core(qkv_BSKX, ba_BSKY, positions)
        return self.project_out(self.normalize_output(out_BSHv, z_BSKX))

    def core(self, qkv_BSKX: Tensor, ba_BSKY: Tensor, positions: Positions) -> Tensor:
        """The delta rule over whole sequences, on this rank or over the ranks of context parallelism."""
        mix = GatedDelta.mix if self.mix_over_ranks is None else self.mix_over_ranks
        bounds = positions.bounds if qkv_BSKX.is_cuda else None
        return mix(self, qkv_BSKX, ba_BSKY, positions.documents_BS, bounds)

    def normalize_output(self, out_BSHv: Tensor, z_BSKX: Tensor) -> Tensor:
        normed_BSHv: Tensor = self.norm(out_BSHv, z_BSKX)
        return normed_BSHv

    def project_out(self, out_BSHv: Tensor) -> Tensor:
        y_BSD: Tensor = self.out(out_BSHv.flatten(2))
        return y_BSD

    def project(self, x_BSD: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values, step and decay, and the output's gate, by the key heads that the weights hold."""
        spec, shared = self.spec, self.values_per_key
        qkvz_BSX, ba_BSX = self.input_linears(x_BSD, (self.qkvz, self.ba))
        values = shared * spec.v_dim
        qkvz_BSKX = qkvz_BSX.unflatten(-1, (-1, 2 * spec.k_dim + 2 * values))
        qkv_BSKX, z_BSKX = qkvz_BSKX.split([2 * spec.k_dim + values, values], dim=-1)
        if not runs_fused(z_BSKX):  # a copy, so that a saved gate does not hold the projected columns
            z_BSKX = z_BSKX.reshape(*z_BSKX.shape[:2], -1, spec.v_dim)
        return qkv_BSKX, ba_BSX.unflatten(-1, (-1, 2 * shared)), z_BSKX

    def mix(
        self,
        qkv_BSKX: Tensor,
        ba_BSKY: Tensor,
        documents_BS: Tensor | None,
        bounds: DocumentBounds | None = None,
        head_weights: "HeadWeights | None" = None,
    ) -> Tensor:
        """Over whole sequences, before the norm; of the heads that the weights or a share of them belong to.

        `bounds` are those of the documents; without them flash-linear-attention has them computed, which waits for the
        device.
        """
        weights = head_weights or HeadWeights(self.conv, self.dt_bias, self.a_log)
        if bounds is not None and len(bounds.cu_seqlens) == len(qkv_BSKX) + 1:
            documents_BS = bounds = None  # every row is one document
        fused = fused_delta_rule(qkv_BSKX, self.spec.k_dim, self.spec.v_dim, self.kernels)
        q, k, v = self.convolve(qkv_BSKX, weights.conv_WT, documents_BS, normalize=fused is not None)
        count_delta_rule(fused)
        if fused is None:
            q, k = (part.repeat_interleave(self.values_per_key, dim=2) for part in (q, k))
            return delta_rule(q, k, v, *weights.gates(ba_BSKY), documents_BS)
        edges = None if documents_BS is None else (bounds or document_bounds(documents_BS)).cu_seqlens
        return fused.mix(q, k, v, *weights.raw_gates(ba_BSKY), weights.a_log_H, weights.dt_bias_H, edges)

    def convolve(
        self, qkv_BSKX: Tensor, conv_WT: Tensor, documents_BS: Tensor | None, normalize: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        """q and k of each key head and v of each value head, behind the convolution and its activation.

        With `normalize`, queries and keys have length 1; otherwise the rule divides them by theirs.
        """
        spec = self.spec
        if runs_fused(qkv_BSKX) and conv_WT.shape[1] <= MAX_TAPS:
            document_BS = None if documents_BS is None else document_numbers(documents_BS).int()
            sizes = ConvHeads(spec.k_dim, spec.v_dim, self.values_per_key, EPS if normalize else None)
            return conv_heads(qkv_BSKX, conv_WT, document_BS, sizes)
        q, k, v = self.split_heads(F.silu(short_conv(self.channels(qkv_BSKX), conv_WT, documents_BS)))
        return (l2_normalize(q), l2_normalize(k), v) if normalize else (q, k, v)

    @property
    def values_per_key(self) -> int:
        return self.spec.num_v_heads // self.spec.num_k_heads

    def channels(self, qkv_BSKX: Tensor) -> Tensor:
        """What the convolution mixes, as all queries, all keys, all values."""
        k_dim = self.spec.k_dim
        parts = qkv_BSKX.split([k_dim, k_dim, self.values_per_key * self.spec.v_dim], dim=-1)
        return torch.cat([part.flatten(2) for part in parts], dim=-1)

    def heads(self, mixed_BSW: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """q, k and v of each value head."""
        q, k, v = self.split_heads(mixed_BSW)
        q, k = (part.repeat_interleave(self.values_per_key, dim=2) for part in (q, k))
        return q, k, v

    def split_heads(self, mixed_BSW: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """q and k of each key head, v of each value head."""
        spec = self.spec
        keys = mixed_BSW.shape[-1] // (2 * spec.k_dim + self.values_per_key * spec.v_dim) * spec.k_dim
        q, k, v = mixed_BSW.split([keys, keys, mixed_BSW.shape[-1] - 2 * keys], dim=-1)
        q, k = (part.unflatten(-1, (-1, spec.k_dim)) for part in (q, k))
        return q, k, v.unflatten(-1, (-1, spec.v_dim))

    def head_weights(self, rank: int, degree: int) -> "HeadWeights":
        """The weights of an even part of the key heads."""
        keys = len(self.a_log) // self.values_per_key * self.spec.k_dim
        parts = self.conv.split([keys, keys, len(self.conv) - 2 * keys])
        conv_WT = torch.cat([part.chunk(degree)[rank] for part in parts])
        return HeadWeights(conv_WT, self.dt_bias.chunk(degree)[rank], self.a_log.chunk(degree)[rank])


class MixFn(Protocol):
    """`GatedDelta.mix`, or what takes its place where a sequence is spread over ranks; documents are of the whole."""

    def __call__(
        self,
        layer: GatedDelta,
        qkv_BSKX: Tensor,
        ba_BSKY: Tensor,
        documents_BS: Tensor | None,
        bounds: DocumentBounds | None,
        /,
    ) -> Tensor: ...


@dataclass(frozen=True)
class HeadWeights:
    """Weights of some heads."""

    conv_WT: Tensor
    dt_bias_H: Tensor
    a_log_H: Tensor

    def gates(self, ba_BSKY: Tensor) -> tuple[Tensor, Tensor]:
        """Log decay g and step beta."""
        a_BSH, b_BSH = self.raw_gates(ba_BSKY)
        a_BSH = a_BSH.to(fp32_or_wider(a_BSH.dtype))
        g_BSH = -self.a_log_H.to(a_BSH.dtype).exp() * F.softplus(a_BSH + self.dt_bias_H.to(a_BSH.dtype))
        return g_BSH, b_BSH.sigmoid()

    @staticmethod
    def raw_gates(ba_BSKY: Tensor) -> tuple[Tensor, Tensor]:
        """What decay and step are computed from, of each value head."""
        b, a = ba_BSKY.chunk(2, dim=-1)
        return a.flatten(2), b.flatten(2)


def short_conv(x_BSW: Tensor, weight_WT: Tensor, documents_BS: Tensor | None) -> Tensor:
    """Causal convolution per channel over the last few tokens of the document; the last tap is the token itself."""
    taps = weight_WT.shape[1]
    if documents_BS is None:
        x_BWS = F.pad(x_BSW.transpose(1, 2), (taps - 1, 0))
        return F.conv1d(x_BWS, weight_WT[:, None], groups=x_BSW.shape[2]).transpose(1, 2)
    document_BS = document_numbers(documents_BS)
    out_BSW = x_BSW * weight_WT[:, -1]
    for back in range(1, min(taps, x_BSW.shape[1])):
        same_BS1 = (document_BS[:, back:] == document_BS[:, :-back])[..., None]
        term = x_BSW[:, :-back] * weight_WT[:, -1 - back] * same_BS1
        out_BSW = out_BSW + F.pad(term, (0, 0, back, 0))
    return out_BSW


def delta_rule_by_token(
    q_BSHk: Tensor, k_BSHk: Tensor, v_BSHv: Tensor, g_BSH: Tensor, beta_BSH: Tensor, documents_BS: Tensor | None = None
) -> Tensor:
    """The definition, one token after the other: the oracle of `delta_rule`."""
    dtype = fp32_or_wider(q_BSHk.dtype)
    q, k, v, g, beta = (x.to(dtype) for x in (q_BSHk, k_BSHk, v_BSHv, g_BSH, beta_BSH))
    q, k = l2_normalize(q) * q.shape[-1] ** -0.5, l2_normalize(k)
    state_BHkv = q.new_zeros(q.shape[0], q.shape[2], k.shape[-1], v.shape[-1])
    outs = []
    for t in range(q.shape[1]):
        keep = g[:, t].exp()
        if documents_BS is not None and t:
            keep = keep * (documents_BS[:, t] == documents_BS[:, t - 1])[:, None]
        state_BHkv = state_BHkv * keep[..., None, None]
        known_BHv = torch.einsum("bhkv,bhk->bhv", state_BHkv, k[:, t])
        step_BHv = beta[:, t, :, None] * (v[:, t] - known_BHv)
        state_BHkv = state_BHkv + k[:, t, :, :, None] * step_BHv[:, :, None]
        outs.append(torch.einsum("bhkv,bhk->bhv", state_BHkv, q[:, t]))
    return torch.stack(outs, dim=1).to(q_BSHk.dtype)


def delta_rule(
    q_BSHk: Tensor,
    k_BSHk: Tensor,
    v_BSHv: Tensor,
    g_BSH: Tensor,
    beta_BSH: Tensor,
    documents_BS: Tensor | None = None,
    chunk: int = CHUNK,
) -> Tensor:
    """Chunk by chunk: matrix products inside, the state passed on between. State and sums in fp32 at least."""
    document_BS = None if documents_BS is None else document_numbers(documents_BS)
    return chunk_delta_rule(q_BSHk, k_BSHk, v_BSHv, g_BSH, beta_BSH, document_BS, chunk=chunk).output()


def document_numbers(documents_BS: Tensor) -> Tensor:
    """Documents counted from 1 along each row."""
    return document_starts(documents_BS).cumsum(dim=1)
