"""Multi-head latent attention: queries and keys/values through low-rank latents, one rotated key for all heads.

Shapes: B batch, S sequence, D model dim, H heads, n unrotated head dim, r rotated head dim, v value dim,
X other widths.
"""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn

from threefold.engine.attention.backend import Attend, attend
from threefold.engine.chunks import WIDEST_BYTES
from threefold.engine.kept import inside_closed
from threefold.engine.offload import away
from threefold.engine.places import Places
from threefold.engine.products import linear
from threefold.engine.recompute import again, remade
from threefold.engine.rope import logit_scale, rotate
from threefold.engine.seams import Seam, each, stay
from threefold.spec.model import MlaSpec


class MlaAttention(nn.Module):
    again: frozenset[str] = frozenset()
    at_a_time: int | None = None  # heads, where they are made again; None: by their size

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
        size = self.heads_at_a_time(latents[1])
        if size < self.num_heads and ("mla_up_proj" in self.again or inside_closed()):
            return self.by_heads(places, latents, size)
        with away("qkv_linear"):
            heads = remade(partial(self.up, places, None), *latents, on="mla_up_proj" in self.again)
        with heads as qkv:
            with away("core_attn"):
                core = remade(partial(self.core, places), *qkv, on="core_attn" in self.again)
            with core as out_BSHv, away("attn_proj"):
                return self.out(out_BSHv.flatten(2))

    @property
    def num_heads(self) -> int:
        """Of this rank."""
        return len(self.kv_up.weight) // (self.spec.nope_dim + self.spec.v_dim)

    def heads_at_a_time(self, latent_BSX: Tensor) -> int:
        """So many that their queries are no wider than what else is cut by size; all where ranks meet inside."""
        if self.attend is not attend or type(self.kv_up) is not nn.Linear:
            return self.num_heads
        if self.at_a_time is not None:
            return min(self.at_a_time, self.num_heads)
        head_bytes = latent_BSX.shape[:2].numel() * self.spec.qk_dim * latent_BSX.element_size()
        groups = max(1, -(-self.num_heads * head_bytes // WIDEST_BYTES))
        return -(-self.num_heads // groups)

    def by_heads(self, places: Places, latents: tuple[Tensor, Tensor, Tensor], size: int) -> Tensor:
        """Some heads after the other, so that queries, keys and values of all of them never lie side by side: they
        are made of the latents, attend, and are made again for their backward."""
        spec = self.spec
        up = self.q if spec.q_rank is None else self.q_up
        q_weights = up.weight.split(size * spec.qk_dim)
        kv_weights = self.kv_up.weight.split(size * (spec.nope_dim + spec.v_dim))
        outs = []
        for weights in zip(q_weights, kv_weights, strict=True):
            with remade(partial(self.up, places, weights), *latents) as qkv, away("core_attn"):
                outs.append(again(partial(self.core, places), *qkv, on="core_attn" in self.again))
        # The kernels keep what they gave: all of it side by side is not kept beside that.
        with remade(_beside, *outs) as out_BSX, away("attn_proj"):
            return self.out(out_BSX)

    def core(self, places: Places, q_BHSd: Tensor, k_BHSd: Tensor, v_BHSv: Tensor) -> Tensor:
        bounds = places.bounds if q_BHSd.is_cuda else None
        return self.attend(
            q_BHSd, k_BHSd, v_BHSv, scale=self.scale, documents_BS=places.documents_BS, bounds=bounds
        ).transpose(1, 2)

    def up(
        self, places: Places, weights: tuple[Tensor, Tensor] | None, q_BSX: Tensor, latent_BSX: Tensor, k_BSr: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values of every head, or of those whose `weights` are given, out of their latents."""
        spec = self.spec
        table = places.rope(spec.rope_dim, spec.rope_theta, spec.rope_scaling)
        up = self.q if spec.q_rank is None else self.q_up
        q_BSX, kv_BSX = (
            (up(q_BSX), self.kv_up(latent_BSX))
            if weights is None
            else (linear(q_BSX, weights[0]), linear(latent_BSX, weights[1]))
        )
        q_BHSd = q_BSX.unflatten(-1, (-1, spec.qk_dim)).transpose(1, 2)
        q_BHSn, q_BHSr = q_BHSd.split([spec.nope_dim, spec.rope_dim], dim=-1)

        kv_BHSX = kv_BSX.unflatten(-1, (-1, spec.nope_dim + spec.v_dim)).transpose(1, 2)
        k_BHSn, v_BHSv = kv_BHSX.split([spec.nope_dim, spec.v_dim], dim=-1)
        k_BHSr = rotate(k_BSr[:, None], table, spec.rope_pairs).expand(-1, k_BHSn.shape[1], -1, -1)
        return _joined(q_BHSn, rotate(q_BHSr, table, spec.rope_pairs)), _joined(k_BHSn, k_BHSr), v_BHSv

    def latents(self, x_BSD: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """What the queries, the keys with values, and the rotated key are made of. Only these narrow tensors enter a
        module that is cut by heads: less to send than x, and no rank makes them twice."""
        spec = self.spec
        down = () if spec.q_rank is None else (self.q_down,)
        *queries, kv_BSX = each(x_BSD, (*down, self.kv_down))
        q_BSX = self.q_norm(*queries) if queries else x_BSD
        latent_BSX, k_BSr = kv_BSX.split([spec.kv_rank, spec.rope_dim], dim=-1)
        parts = [q_BSX, self.kv_norm(latent_BSX), k_BSr]
        if self.enter is not stay:
            parts = list(self.enter(torch.cat(parts, dim=-1)).split([part.shape[-1] for part in parts], dim=-1))
        q_BSX, latent_BSX, k_BSr = parts
        return q_BSX, latent_BSX, k_BSr


def _joined(x_BHSn: Tensor, x_BHSr: Tensor) -> Tensor:
    """Laid out with the heads inside of the sequence: a kernel's output lies as its queries, and so goes into the
    next product without a copy."""
    return torch.cat([x_BHSn.transpose(1, 2), x_BHSr.transpose(1, 2)], dim=-1).transpose(1, 2)


def _beside(*outs_BSHv: Tensor) -> Tensor:
    return torch.cat(outs_BSHv, dim=2).flatten(2)
