"""Grouped-query attention: norms on q and k, biases, sinks, windows, a gate on the output.

Shapes: B batch, S sequence, D model dim, H query heads, G key/value heads, d head dim, X = H * d.
"""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn

from threefold.engine.attention.backend import Attend, attend
from threefold.engine.offload import away
from threefold.engine.places import Places
from threefold.engine.recompute import remade
from threefold.engine.rope import place_heads
from threefold.engine.seams import Into, each
from threefold.spec.model import GqaSpec


class GqaAttention(nn.Module):
    again: frozenset[str] = frozenset()

    def __init__(self, spec: GqaSpec, dim: int, norm: Callable[[int], nn.Module]) -> None:
        super().__init__()
        self.spec = spec
        self.rope_dim = int(spec.head_dim * spec.rope_fraction)
        # A gated query projection holds, head by head, the query and then its gate.
        self.q = nn.Linear(dim, spec.q_dim * (2 if spec.gated else 1), bias=spec.bias)
        self.k = nn.Linear(dim, spec.kv_dim, bias=spec.bias)
        self.v = nn.Linear(dim, spec.kv_dim, bias=spec.bias)
        self.out = nn.Linear(spec.q_dim, dim, bias=spec.bias)
        self.q_norm = norm(spec.head_dim) if spec.qk_norm else nn.Identity()
        self.k_norm = norm(spec.head_dim) if spec.qk_norm else nn.Identity()
        if spec.sinks:
            self.sinks = nn.Parameter(torch.zeros(spec.num_heads))
        else:
            self.register_parameter("sinks", None)
        self.into: Into = each
        self.attend: Attend = attend

    def forward(self, x_BSD: Tensor, places: Places) -> Tensor:
        with away("qkv_linear"):
            parts = [part for part in self.project(x_BSD, places) if part is not None]
        with away("core_attn"):
            core = remade(partial(self.core, places), *parts, on="core_attn" in self.again)
        with core as out_BSX, away("attn_proj"):
            return self.out(out_BSX)

    def core(
        self, places: Places, q_BHSd: Tensor, k_BGSd: Tensor, v_BGSd: Tensor, gate_BSHd: Tensor | None = None
    ) -> Tensor:
        out_BHSd = self.attend(
            q_BHSd,
            k_BGSd,
            v_BGSd,
            scale=self.spec.head_dim**-0.5,
            window=self.spec.window,
            sinks=self.sinks,
            documents_BS=places.documents_BS,
            bounds=places.bounds if q_BHSd.is_cuda else None,
        )
        out_BSHd = out_BHSd.transpose(1, 2)
        return (out_BSHd if gate_BSHd is None else out_BSHd * gate_BSHd.sigmoid()).flatten(2)

    def project(self, x_BSD: Tensor, places: Places) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """Queries, keys and values ready to attend, and the output gate."""
        q_BSX, k_BSX, v_BSX = self.into(x_BSD, (self.q, self.k, self.v))
        heads = (*q_BSX.shape[:2], -1, self.spec.head_dim)
        gate_BSHd = None
        if self.spec.gated:
            q_BSHd, gate_BSHd = q_BSX.view(*q_BSX.shape[:2], -1, 2 * self.spec.head_dim).chunk(2, dim=-1)
        else:
            q_BSHd = q_BSX.view(heads)
        table = places.rope(self.rope_dim, self.spec.rope_theta, self.spec.rope_scaling)
        q_BHSd = place_heads(q_BSHd, self.q_norm, table)
        k_BGSd = place_heads(k_BSX.view(heads), self.k_norm, table)
        return q_BHSd, k_BGSd, v_BSX.view(heads).transpose(1, 2), gate_BSHd
