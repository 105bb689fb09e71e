"""Attention some heads at a time, in layers that are recomputed: where all heads at once take too much memory.

`activation_memory.py` puts these in place of methods of MLA and of grouped-query attention. The number of heads is
chosen by their size; where ranks communicate inside a module all heads run at once.

Shapes: B batch, S sequence, D model dim, H heads, v value dim, r rotated head dim, X other widths.
"""

from collections.abc import Callable
from functools import partial
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn

from threefold.engine.attention.backend import attend
from threefold.engine.attention.gqa import GqaAttention
from threefold.engine.attention.head_groups.cudnn_head_groups import query_heads_per_group
from threefold.engine.attention.head_groups.gqa_head_groups import attend_in_groups
from threefold.engine.attention.mla import MlaAttention
from threefold.engine.autograd.offload import offload_activations
from threefold.engine.autograd.recompute import recompute, recompute_output
from threefold.engine.autograd.saved_tensors import inside_recompute
from threefold.engine.autograd.token_chunks import MAX_CHUNK_BYTES
from threefold.engine.layers.input_linears import apply_linears
from threefold.engine.layers.norm import ProjectionNorm
from threefold.engine.layers.positions import Positions


class GqaHeadGroups:
    """`GqaAttention.forward` in a layer that is recomputed whole."""

    def __init__(self, gqa: GqaAttention, eager: Callable[..., Tensor]) -> None:
        self._gqa, self.eager = ref(gqa), eager

    def __call__(self, x_BSD: Tensor, positions: Positions) -> Tensor:
        gqa = self._gqa()
        assert gqa is not None
        num_heads, num_kv = (n // gqa.spec.head_dim for n in (gqa.out.weight.shape[1], len(gqa.k.weight)))
        size = _query_heads(gqa, x_BSD, num_heads, num_kv) if _has_plain_heads(gqa) else num_heads
        if size < num_heads and inside_recompute():
            return attend_in_groups(gqa, x_BSD, positions, size)
        return self.eager(x_BSD, positions)


def _query_heads(gqa: GqaAttention, x_BSD: Tensor, num_heads: int, num_kv: int) -> int:
    if gqa.heads_per_group is not None:
        return min(gqa.heads_per_group, num_heads)
    head_bytes = x_BSD.shape[:2].numel() * gqa.spec.head_dim * x_BSD.element_size()
    return query_heads_per_group(num_heads, num_kv, head_bytes)


def _has_plain_heads(gqa: GqaAttention) -> bool:
    """Whether heads can run apart: nothing is exchanged or normed over all of them, and no linear is quantized or has
    an adapter."""
    linears = (gqa.q, gqa.k, gqa.out) if gqa.v is None else (gqa.q, gqa.k, gqa.v, gqa.out)
    is_alone = gqa.attention_fn is attend and gqa.input_linears is apply_linears
    return is_alone and not isinstance(gqa.q_norm, ProjectionNorm) and all(type(one) is nn.Linear for one in linears)


class MlaHeadGroups:
    """`MlaAttention.attend_latents` where up projections are recomputed.

    Queries, keys and values of all heads then never exist at once: those of a group are made from the latents, attend,
    and are made again for their backward.
    """

    def __init__(self, mla: MlaAttention, eager: Callable[..., Tensor], names: frozenset[str]) -> None:
        self._mla, self.eager, self.names = ref(mla), eager, names

    @property
    def mla(self) -> MlaAttention:
        mla = self._mla()
        assert mla is not None
        return mla

    def __call__(self, positions: Positions, q_BSX: Tensor, latent_BSX: Tensor, k_BSr: Tensor) -> Tensor:
        size = self.heads_per_group(latent_BSX)
        if size < self.mla.num_heads and ("mla_up_proj" in self.names or inside_recompute()):
            return self._attend_in_groups(positions, (q_BSX, latent_BSX, k_BSr), size)
        return self.eager(positions, q_BSX, latent_BSX, k_BSr)

    def heads_per_group(self, latent_BSX: Tensor) -> int:
        """So many heads that their queries fit the limit of a chunk; all where ranks communicate between the steps."""
        mla = self.mla
        if mla.attention_fn is not attend or mla.attend_over_ranks is not None or type(mla.kv_up) is not nn.Linear:
            return mla.num_heads
        if mla.heads_per_group is not None:
            return min(mla.heads_per_group, mla.num_heads)
        head_bytes = latent_BSX.shape[:2].numel() * mla.spec.qk_dim * latent_BSX.element_size()
        num_groups = max(1, -(-mla.num_heads * head_bytes // MAX_CHUNK_BYTES))
        return -(-mla.num_heads // num_groups)

    def _attend_in_groups(self, positions: Positions, latents: tuple[Tensor, ...], size: int) -> Tensor:
        mla, spec = self.mla, self.mla.spec
        q_weights = mla.query_up.weight.split(size * spec.qk_dim)
        kv_weights = mla.kv_up.weight.split(size * (spec.nope_dim + spec.v_dim))
        core = offload_activations("core_attn", partial(recompute, enabled="core_attn" in self.names, name="core_attn"))
        outs: list[Any] = []
        for weights in zip(q_weights, kv_weights, strict=True):
            expand = partial(MlaAttention.expand, mla, positions, weights=weights)
            with recompute_output(expand, *latents, name="mla_up_proj") as qkv:
                outs.append(core(partial(MlaAttention.core, mla, positions), *qkv))
        # The attention kernels save the outputs of their groups: the concatenation is not saved beside them.
        with recompute_output(_concat_heads, *outs, name="mla_up_proj") as out_BSX:
            return mla.project_out(out_BSX)


def _concat_heads(*outs_BSHv: Tensor) -> Tensor:
    return torch.cat(outs_BSHv, dim=2).flatten(2)
