"""Multi-head latent attention (MLA): queries, keys and values from low-rank latents, and one rotated key for all heads.

The forward has four steps: `compress` (down projections), `expand` (up projections to heads), `core` (attention) and
`project_out`. `shard/` puts its own functions in place of `gather_latents` (gathers the latents) and `attention_fn`, or
sets `attend_over_ranks`, which takes the latents and does the work of `expand` and `core` over context-parallel ranks.
`models/activation_memory.py` wraps the steps where a plan recomputes or offloads them.

Shapes: B batch, S sequence, D model dim, H heads, n unrotated head dim, r rotated head dim, v value dim,
X other widths.
"""

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor, nn

from threefold.engine.attention.backend import AttentionFn, attend
from threefold.engine.autograd.linear import linear
from threefold.engine.kernels.availability import runs_fused
from threefold.engine.kernels.mixers.mla_heads import join_key_heads, rotate_query_tails
from threefold.engine.layers.input_linears import InputHook, apply_linears, identity
from threefold.engine.layers.positions import Positions
from threefold.engine.layers.rope import logit_scale, rotate
from threefold.spec.model import MlaSpec


class MlaAttention(nn.Module):
    heads_per_group: int | None = None  # where heads are recomputed in groups; None chooses by their size

    def __init__(self, spec: MlaSpec, dim: int, norm: Callable[[int], nn.Module]) -> None:
        super().__init__()
        self.spec = spec
        self.scale = spec.qk_dim**-0.5 * logit_scale(spec.rope_scaling)
        if spec.q_rank is None:
            self.q = nn.Linear(dim, spec.num_heads * spec.qk_dim, bias=False)
        else:
            self.q_down = nn.Linear(dim, spec.q_rank, bias=False)
            self.q_norm = norm(spec.q_rank)
            self.q_up = nn.Linear(spec.q_rank, spec.num_heads * spec.qk_dim, bias=False)
        self.kv_down = nn.Linear(dim, spec.kv_rank + spec.rope_dim, bias=False)
        self.kv_norm = norm(spec.kv_rank)
        self.kv_up = nn.Linear(spec.kv_rank, spec.num_heads * (spec.nope_dim + spec.v_dim), bias=False)
        self.out = nn.Linear(spec.num_heads * spec.v_dim, dim, bias=False)
        self.gather_latents: InputHook = identity
        self.attention_fn: AttentionFn = attend
        self.attend_over_ranks: LatentAttentionFn | None = None

    def forward(self, x_BSD: Tensor, positions: Positions) -> Tensor:
        return self.attend_latents(positions, *self.compress(x_BSD))

    def attend_latents(self, positions: Positions, q_BSX: Tensor, latent_BSX: Tensor, k_BSr: Tensor) -> Tensor:
        if self.attend_over_ranks is not None:
            return self.project_out(self.core_over_ranks(positions, q_BSX, latent_BSX, k_BSr).flatten(2))
        q_BHSd, k_BHSd, v_BHSv = self.expand(positions, q_BSX, latent_BSX, k_BSr)
        return self.project_out(self.core(positions, q_BHSd, k_BHSd, v_BHSv).flatten(2))

    def project_out(self, out_BSX: Tensor) -> Tensor:
        y_BSD: Tensor = self.out(out_BSX)
        return y_BSD

    @property
    def num_heads(self) -> int:
        """Heads on this rank."""
        return len(self.kv_up.weight) // (self.spec.nope_dim + self.spec.v_dim)

    def core(self, positions: Positions, q_BHSd: Tensor, k_BHSd: Tensor, v_BHSv: Tensor) -> Tensor:
        """The outputs of the heads by token. A copy in this order, where one is needed, is made here, so that a
        recompute of the core covers it."""
        bounds = positions.bounds if q_BHSd.is_cuda else None
        out_BHSv = self.attention_fn(
            q_BHSd, k_BHSd, v_BHSv, scale=self.scale, documents_BS=positions.documents_BS, bounds=bounds
        )
        return out_BHSv.transpose(1, 2).contiguous()

    def core_over_ranks(self, positions: Positions, q_BSX: Tensor, latent_BSX: Tensor, k_BSr: Tensor) -> Tensor:
        """The outputs of all heads for this rank's tokens, by way of the latents of other ranks."""
        assert self.attend_over_ranks is not None
        table = positions.rope(self.spec.rope_dim, self.spec.rope_theta, self.spec.rope_scaling)
        k_BSr = rotate(k_BSr[:, None], table, self.spec.rope_pairs)[:, 0]
        return self.attend_over_ranks(self, positions, q_BSX, torch.cat([latent_BSX, k_BSr], dim=-1))

    def expand(
        self,
        positions: Positions,
        q_BSX: Tensor,
        latent_BSX: Tensor,
        k_BSr: Tensor,
        weights: tuple[Tensor, Tensor] | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values from their latents: of all heads, or of those whose `weights` are given."""
        spec = self.spec
        table = positions.rope(spec.rope_dim, spec.rope_theta, spec.rope_scaling)
        q_BSX, kv_BSX = (
            (self.query_up(q_BSX), self.kv_up(latent_BSX))
            if weights is None
            else (linear(q_BSX, weights[0]), linear(latent_BSX, weights[1]))
        )
        k_BSr = rotate(k_BSr[:, None], table, spec.rope_pairs)[:, 0]
        return query_heads(spec, q_BSX, table), *key_value_heads(spec, kv_BSX, k_BSr)

    @property
    def query_up(self) -> nn.Linear:
        """The linear that makes the heads of queries."""
        return self.q if self.spec.q_rank is None else self.q_up

    def compress(self, x_BSD: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The latents of queries and of keys with values, and the rotated key.

        With tensor parallelism only these small tensors are gathered: they are less to send than x, and no rank
        computes them twice.
        """
        spec = self.spec
        down = () if spec.q_rank is None else (self.q_down,)
        *queries, kv_BSX = apply_linears(x_BSD, (*down, self.kv_down))
        q_BSX = self.q_norm(*queries) if queries else x_BSD
        latent_BSX, k_BSr = kv_BSX.split([spec.kv_rank, spec.rope_dim], dim=-1)
        parts = [q_BSX, self.kv_norm(latent_BSX), k_BSr]
        if self.gather_latents is not identity:
            parts = list(
                self.gather_latents(torch.cat(parts, dim=-1)).split([part.shape[-1] for part in parts], dim=-1)
            )
        q_BSX, latent_BSX, k_BSr = parts
        return q_BSX, latent_BSX, k_BSr


class LatentAttentionFn(Protocol):
    """Attention over ranks that exchange latents; the last argument is the latent and the rotated key side by side."""

    def __call__(self, mla: MlaAttention, positions: Positions, q_BSX: Tensor, kv_BSX: Tensor, /) -> Tensor: ...


def query_heads(spec: MlaSpec, q_BSX: Tensor, table: tuple[Tensor, Tensor]) -> Tensor:
    """Queries ready to attend, (B, H, S, d), from what the up projection made of them, which may be overwritten."""
    if runs_fused(q_BSX):
        return rotate_query_tails(q_BSX, q_BSX.shape[-1] // spec.qk_dim, table, spec.rope_pairs).transpose(1, 2)
    q_BHSd = q_BSX.unflatten(-1, (-1, spec.qk_dim)).transpose(1, 2)
    q_BHSn, q_BHSr = q_BHSd.split([spec.nope_dim, spec.rope_dim], dim=-1)
    return _joined(q_BHSn, rotate(q_BHSr, table, spec.rope_pairs))


def key_value_heads(spec: MlaSpec, kv_BSX: Tensor, k_BSr: Tensor) -> tuple[Tensor, Tensor]:
    """Keys and values, (B, H, S, d), from what the up projection made of them and the rotated key of all heads."""
    if runs_fused(kv_BSX):
        kv_BSHX = kv_BSX.unflatten(-1, (-1, spec.nope_dim + spec.v_dim))
        k_BSHd, v_BSHv = join_key_heads(kv_BSHX, k_BSr, spec.nope_dim)
        return k_BSHd.transpose(1, 2), v_BSHv.transpose(1, 2)
    kv_BHSX = kv_BSX.unflatten(-1, (-1, spec.nope_dim + spec.v_dim)).transpose(1, 2)
    k_BHSn, v_BHSv = kv_BHSX.split([spec.nope_dim, spec.v_dim], dim=-1)
    return _joined(k_BHSn, k_BSr[:, None].expand(-1, k_BHSn.shape[1], -1, -1)), v_BHSv


def _joined(x_BHSn: Tensor, x_BHSr: Tensor) -> Tensor:
    """Concatenate both parts of each head, in memory order (B, S, H, d).

    Attention kernels lay out their output as their queries, so that it goes into the next GEMM without a copy.
    """
    return torch.cat([x_BHSn.transpose(1, 2), x_BHSr.transpose(1, 2)], dim=-1).transpose(1, 2)
