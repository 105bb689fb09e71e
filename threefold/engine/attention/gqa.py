"""Grouped-query attention, with optional norms on q and k, biases, sinks, windows and a gate on the output.

`shard/` puts its own functions in place of `input_linears` (the input projections) and `attention_fn` (attention).
`models/activation_memory.py` wraps `project`, `core` and `project_out` where a plan recomputes or offloads them.

Shapes: B batch, S sequence, D model dim, H query heads, G key/value heads, d head dim, X = H * d.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from threefold.engine.attention.backend import AttentionFn, attend
from threefold.engine.layers.input_linears import InputLinears, apply_linears
from threefold.engine.layers.positions import Positions
from threefold.engine.layers.rope import norm_and_rotate_heads
from threefold.spec.model import GqaSpec


class GqaAttention(nn.Module):
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
        self.input_linears: InputLinears = apply_linears
        self.attention_fn: AttentionFn = attend

    def forward(self, x_BSD: Tensor, positions: Positions) -> Tensor:
        q_BHSd, k_BGSd, v_BGSd, gate_BSHd = self.project(x_BSD, positions)
        return self.project_out(self.core(positions, q_BHSd, k_BGSd, v_BGSd, gate_BSHd))

    def project_out(self, out_BSX: Tensor) -> Tensor:
        y_BSD: Tensor = self.out(out_BSX)
        return y_BSD

    def core(
        self, positions: Positions, q_BHSd: Tensor, k_BGSd: Tensor, v_BGSd: Tensor, gate_BSHd: Tensor | None = None
    ) -> Tensor:
        out_BHSd = self.attention_fn(
            q_BHSd,
            k_BGSd,
            v_BGSd,
            scale=self.spec.head_dim**-0.5,
            window=self.spec.window,
            sinks=self.sinks,
            documents_BS=positions.documents_BS,
            bounds=positions.bounds if q_BHSd.is_cuda else None,
        )
        out_BSHd = out_BHSd.transpose(1, 2)
        return (out_BSHd if gate_BSHd is None else out_BSHd * gate_BSHd.sigmoid()).flatten(2)

    def project(self, x_BSD: Tensor, positions: Positions) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """Queries, keys and values ready to attend, and the output gate."""
        q_BSX, k_BSX, v_BSX = self.input_linears(x_BSD, (self.q, self.k, self.v))
        heads = (*q_BSX.shape[:2], -1, self.spec.head_dim)
        gate_BSHd = None
        if self.spec.gated:
            q_BSHd, gate_BSHd = q_BSX.view(*q_BSX.shape[:2], -1, 2 * self.spec.head_dim).chunk(2, dim=-1)
        else:
            q_BSHd = q_BSX.view(heads)
        table = positions.rope(self.rope_dim, self.spec.rope_theta, self.spec.rope_scaling, self.spec.rope_sections)
        q_BHSd = norm_and_rotate_heads(q_BSHd, self.q_norm, table)
        k_BGSd = norm_and_rotate_heads(k_BSX.view(heads), self.k_norm, table)
        return q_BHSd, k_BGSd, v_BSX.view(heads).transpose(1, 2), gate_BSHd
