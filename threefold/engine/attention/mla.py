"""Multi-head latent attention: queries and keys/values through low-rank latents, one rotated key for all heads.

Shapes: B batch, S sequence, D model dim, H heads, n unrotated head dim, r rotated head dim, v value dim,
X other widths.
"""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn

from threefold.engine.attention.backend import Attend, attend
from threefold.engine.offload import away
from threefold.engine.places import Places
from threefold.engine.recompute import remade
from threefold.engine.rope import logit_scale, rotate
from threefold.engine.seams import Seam, stay
from threefold.spec.model import MlaSpec


class MlaAttention(nn.Module):
    again: frozenset[str] = frozenset()

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
        self.enter: Seam = stay
        self.attend: Attend = attend

    def forward(self, x_BSD: Tensor, places: Places) -> Tensor:
        with away("qkv_linear"):
            latents = self.latents(x_BSD)
            heads = remade(partial(self.up, places), *latents, on="mla_up_proj" in self.again)
        with heads as qkv:
            with away("core_attn"):
                core = remade(partial(self.core, places), *qkv, on="core_attn" in self.again)
            with core as out_BSX, away("attn_proj"):
                return self.out(out_BSX)

    def core(self, places: Places, q_BHSd: Tensor, k_BHSd: Tensor, v_BHSv: Tensor) -> Tensor:
        bounds = places.bounds if q_BHSd.is_cuda else None
        out_BHSv = self.attend(
            q_BHSd, k_BHSd, v_BHSv, scale=self.scale, documents_BS=places.documents_BS, bounds=bounds
        )
        return out_BHSv.transpose(1, 2).flatten(2)

    def up(self, places: Places, q_BSX: Tensor, latent_BSX: Tensor, k_BSr: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values of every head, out of their latents."""
        spec = self.spec
        table = places.rope(spec.rope_dim, spec.rope_theta, spec.rope_scaling)
        up = self.q if spec.q_rank is None else self.q_up
        q_BHSd = up(q_BSX).unflatten(-1, (-1, spec.qk_dim)).transpose(1, 2)
        q_BHSn, q_BHSr = q_BHSd.split([spec.nope_dim, spec.rope_dim], dim=-1)

        kv_BHSX = self.kv_up(latent_BSX).unflatten(-1, (-1, spec.nope_dim + spec.v_dim)).transpose(1, 2)
        k_BHSn, v_BHSv = kv_BHSX.split([spec.nope_dim, spec.v_dim], dim=-1)
        k_BHSr = rotate(k_BSr[:, None], table, spec.rope_pairs).expand(-1, k_BHSn.shape[1], -1, -1)

        q_BHSd = torch.cat([q_BHSn, rotate(q_BHSr, table, spec.rope_pairs)], dim=-1)
        return q_BHSd, torch.cat([k_BHSn, k_BHSr], dim=-1), v_BHSv

    def latents(self, x_BSD: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """What the queries, the keys with values, and the rotated key are made of. Only these narrow tensors enter a
        module that is cut by heads: less to send than x, and no rank makes them twice."""
        spec = self.spec
        q_BSX = x_BSD if spec.q_rank is None else self.q_norm(self.q_down(x_BSD))
        latent_BSX, k_BSr = self.kv_down(x_BSD).split([spec.kv_rank, spec.rope_dim], dim=-1)
        parts = [q_BSX, self.kv_norm(latent_BSX), k_BSr]
        if self.enter is not stay:
            parts = list(self.enter(torch.cat(parts, dim=-1)).split([part.shape[-1] for part in parts], dim=-1))
        q_BSX, latent_BSX, k_BSr = parts
        return q_BSX, latent_BSX, k_BSr
