"""Grouped-query attention, with optional norms on q, k, v and the output, biases, sinks, windows and an output gate.

`shard/` puts its own functions in place of `input_linears` (the input projections) and `attention_fn` (attention).
`models/activation_memory.py` wraps `project`, `core` and `project_out` where a plan recomputes or offloads them, and
`head_groups/gqa_head_groups.py` runs `prepare` and `core` for some heads at a time.

Shapes: B batch, S sequence, D model dim, H query heads, G key/value heads, d head dim, X = H * d.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from threefold.engine.attention.backend import AttentionFn, attend
from threefold.engine.layers.input_linears import InputLinears, apply_linears
from threefold.engine.layers.norm import PlainRMSNorm, ProjectionNorm, RMSNorm
from threefold.engine.layers.positions import Positions
from threefold.engine.layers.rope import norm_and_rotate_heads, rotate
from threefold.spec.model import GqaSpec


class GqaAttention(nn.Module):
    heads_per_group: int | None = None  # query heads, where heads run in groups; None chooses by their size

    def __init__(self, spec: GqaSpec, dim: int, norm: Callable[[int], nn.Module]) -> None:
        super().__init__()
        self.spec = spec
        # A gated query projection holds, head by head, the query and then its gate.
        self.q = nn.Linear(dim, spec.q_dim * (2 if spec.gated else 1), bias=spec.bias)
        self.k = nn.Linear(dim, spec.kv_dim, bias=spec.bias)
        self.v = None if spec.shared_kv else nn.Linear(dim, spec.kv_dim, bias=spec.bias)
        self.out = nn.Linear(spec.q_dim, dim, bias=spec.has_out_bias)
        self.q_norm = _make_norm(spec, spec.q_dim, norm)
        self.k_norm = _make_norm(spec, spec.kv_dim, norm)
        self.v_norm = _plain_norm(norm(spec.head_dim)) if spec.v_norm else None
        self.out_norm = norm(dim) if spec.out_norm else None
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
        return y_BSD if self.out_norm is None else self.out_norm(y_BSD)

    def core(
        self,
        positions: Positions,
        q_BHSd: Tensor,
        k_BGSd: Tensor,
        v_BGSd: Tensor,
        gate_BSHd: Tensor | None = None,
        heads: slice | None = None,
    ) -> Tensor:
        """Attention and the output gate, for all heads or for those whose queries are given."""
        out_BHSd = self.attention_fn(
            q_BHSd,
            k_BGSd,
            v_BGSd,
            scale=self.spec.logit_scale,
            window=self.spec.window,
            sinks=self.sinks if self.sinks is None or heads is None else self.sinks[heads],
            documents_BS=positions.documents_BS,
            bounds=positions.bounds if q_BHSd.is_cuda else None,
        )
        out_BSHd = out_BHSd.transpose(1, 2)
        return (out_BSHd if gate_BSHd is None else out_BSHd * gate_BSHd.sigmoid()).flatten(2)

    def project(self, x_BSD: Tensor, positions: Positions) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """Queries, keys and values ready to attend, and the output gate."""
        return self.prepare(positions, *self._project_inputs(x_BSD))

    def prepare(
        self, positions: Positions, q_BSX: Tensor, k_BSX: Tensor, v_BSX: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """`project` from the outputs of the linears on, for all heads or some."""
        q_BSX, k_BSX, v_BSX = self._normalize_projections(q_BSX, k_BSX, v_BSX)
        heads = (*q_BSX.shape[:2], -1, self.spec.head_dim)
        gate_BSHd = None
        if self.spec.gated:
            q_BSHd, gate_BSHd = q_BSX.view(*q_BSX.shape[:2], -1, 2 * self.spec.head_dim).chunk(2, dim=-1)
        else:
            q_BSHd = q_BSX.view(heads)
        table = None
        if self.spec.use_rope:
            table = positions.rope(
                self.spec.rope_dim, self.spec.rope_theta, self.spec.rope_scaling, self.spec.rope_sections
            )
        q_BHSd = self._prepare_heads(q_BSHd, self.q_norm, table)
        k_BGSd = self._prepare_heads(k_BSX.view(heads), self.k_norm, table)
        v_BSGd = v_BSX.view(heads) if self.v_norm is None else self.v_norm(v_BSX.view(heads))
        return q_BHSd, k_BGSd, v_BSGd.transpose(1, 2), gate_BSHd

    def _project_inputs(self, x_BSD: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values of all heads. Where keys serve as values, both are the same tensor."""
        if self.v is None:
            q_BSX, k_BSX = self.input_linears(x_BSD, (self.q, self.k))
            return q_BSX, k_BSX, k_BSX
        q_BSX, k_BSX, v_BSX = self.input_linears(x_BSD, (self.q, self.k, self.v))
        return q_BSX, k_BSX, v_BSX

    def _normalize_projections(self, q_BSX: Tensor, k_BSX: Tensor, v_BSX: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """What some families do to all heads of a token together: norms, a limit, and a factor on the output."""
        spec = self.spec
        if isinstance(self.q_norm, ProjectionNorm):
            q_BSX, k_BSX = self.q_norm(q_BSX), self.k_norm(k_BSX)
        if spec.clip_qkv is not None:
            q_BSX, k_BSX, v_BSX = (x.clamp(-spec.clip_qkv, spec.clip_qkv) for x in (q_BSX, k_BSX, v_BSX))
        if spec.out_scale != 1.0:
            v_BSX = v_BSX * spec.out_scale  # the output is linear in the values, which are fewer
        return q_BSX, k_BSX, v_BSX

    def _prepare_heads(self, x_BSHd: Tensor, norm: nn.Module, table: tuple[Tensor, Tensor] | None) -> Tensor:
        """Heads after their norm and the rotation, in the order of the family, as (B, H, S, d)."""
        if isinstance(norm, ProjectionNorm):
            norm = nn.Identity()
        if not self.spec.norm_after_rope or table is None:
            return norm_and_rotate_heads(x_BSHd, norm, table, self.spec.rope_pairs)
        rotated_BSHd = rotate(x_BSHd.transpose(1, 2), table, self.spec.rope_pairs).transpose(1, 2)
        normed_BSHd: Tensor = norm(rotated_BSHd)
        return normed_BSHd.transpose(1, 2)


def _make_norm(spec: GqaSpec, width: int, make_norm: Callable[[int], nn.Module]) -> nn.Module:
    """The norm of queries or keys, whose projection is `width` wide: none, of each head, or of the projection."""
    if not spec.qk_norm:
        return nn.Identity()
    if spec.qk_norm_over == "head":
        return make_norm(spec.head_dim)
    like = make_norm(width)
    assert isinstance(like, RMSNorm)
    return ProjectionNorm(like)


def _plain_norm(like: nn.Module) -> PlainRMSNorm:
    """A norm as `like`, without weights."""
    assert isinstance(like, RMSNorm)
    return PlainRMSNorm(len(like.weight), like.eps)
