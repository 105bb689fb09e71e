"""Context parallelism for MLA that exchanges latents: each rank expands the latents of others for its own heads.

A token's latent and rotated key are 576 numbers in DeepSeek-V3; its expanded keys and values are 40,960. The ranks of
the inner group gather latents of queries, keys and values, and each attends with its own heads to all their tokens.
Latents of other inner groups arrive through the outer group, where each rank sends those of its own tokens only. Keys
and values are expanded for one span of the sequence at a time, in the forward and again in the backward, and are never
saved. The knob `cp_comm` says which ranks form the groups:

    p2p         inner: this rank alone   outer: all ranks, one after the other in a ring
    all_gather  inner: this rank alone   outer: all ranks at once
    a2a         inner: all ranks         outer: this rank alone
    a2a+p2p     inner: one fast domain   outer: one rank of each domain, in a ring

`context_parallel.py` sets `LatentExchange` as the `attend_over_ranks` of every `MlaAttention`.

Shapes: B batch, s this rank's tokens, S tokens of the inner group, H heads, h this rank's heads, d head dim, v value
dim, X other widths.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from threefold.engine.attention.attend_tiles import attend_tiles, attend_tiles_backward, empty_output
from threefold.engine.attention.mask_tiles import AttentionMask, Tile, host_documents
from threefold.engine.attention.mla import MlaAttention, key_value_heads, query_heads
from threefold.engine.autograd.main_grad import main_grad_of
from threefold.engine.autograd.saved_tensors import CORE_ATTENTION, save_output
from threefold.engine.context import count_event, override
from threefold.engine.dist.mesh import Group
from threefold.engine.layers.positions import Positions
from threefold.engine.layers.rope import rope_tables
from threefold.engine.precision.low_precision_linear import (
    LinearPrecision,
    LowPrecisionLinear,
    low_precision_linears,
)
from threefold.engine.precision.recipes import Recipe
from threefold.engine.precision.weight_cache import WeightCache
from threefold.engine.shard.ring_attention import GradientRing, ShardedMask, around_ring, zeros_to_sum
from threefold.engine.shard.sequence_layout import (
    heads_to_sequence,
    sequence_to_heads,
    start_sequence_gather,
    start_sequence_reduce,
)
from threefold.engine.sum_dtype import fp32_or_wider
from threefold.spec.model import MlaSpec


@dataclass(frozen=True)
class LatentExchange:
    """`MlaAttention.attend_over_ranks` for ranks that each hold a zigzag shard of the sequence."""

    inner_group: Group
    outer_group: Group
    gathers_outer: bool = False  # the latents of the outer group arrive all at once, not round a ring

    def __call__(self, mla: MlaAttention, positions: Positions, q_BsX: Tensor, kv_BsX: Tensor) -> Tensor:
        length = q_BsX.shape[1] * self.inner_group.size * self.outer_group.size
        bounds = positions.bounds if q_BsX.is_cuda else None
        documents = None if positions.documents_BS is None else host_documents(positions.documents_BS, bounds)
        mask = ShardedMask(self.outer_group, AttentionMask(None, documents), length, mla.scale)
        query_positions_BS = positions.at(mask.spans(self.outer_group.rank))
        scaling = mla.spec.rope_scaling
        longest = positions.length if scaling is not None and scaling.depends_on_length else None
        call = _Call(self, mla.spec, mask, query_positions_BS, longest, _recipe(mla.query_up), _recipe(mla.kv_up))
        out_BsHv: Tensor = _LatentAttention.apply(q_BsX, kv_BsX, mla.query_up.weight, mla.kv_up.weight, call)
        return out_BsHv

    def latents(self, kv_BsX: Tensor) -> Iterator[tuple[int, Tensor]]:
        """The number of each rank of the outer group, and the latents of the tokens of its inner group."""
        if self.gathers_outer:
            whole_BSX = start_sequence_gather(kv_BsX, self.outer_group, dim=1, keep_zigzag=True)()
            yield from enumerate(whole_BSX.chunk(self.outer_group.size, dim=1))
            return
        for rank, (latents_BsX,) in around_ring([kv_BsX.contiguous()], self.outer_group):
            yield rank, start_sequence_gather(latents_BsX, self.inner_group, dim=1)()


def _recipe(linear: nn.Linear) -> Recipe | None:
    return linear.precision.recipe if isinstance(linear, LowPrecisionLinear) else None


@dataclass(frozen=True)
class _Call:
    """Everything about one attention but its tensors that need a gradient."""

    exchange: LatentExchange
    spec: MlaSpec
    mask: ShardedMask
    query_positions_BS: Tensor
    longest: Tensor | None  # the length of the longest document, for rotary scalings that depend on it
    q_recipe: Recipe | None
    kv_recipe: Recipe | None

    def blocks(self, rank: int) -> Iterator[tuple[slice, list[Tile]]]:
        """The spans of an outer rank's tokens that some query of this rank attends to, and the tiles of each."""
        queries = self.mask.spans(self.mask.group.rank)
        start = 0
        for keys in self.mask.spans(rank):
            if tiles := self.mask.mask.tiles_between(queries, [keys]):
                yield slice(start, start + len(keys)), tiles
            start += len(keys)


class _UpProjection:
    """The up projection of this rank's heads, whose weight gradient is summed over blocks in fp32."""

    def __init__(self, weight: Tensor, group: Group, recipe: Recipe | None) -> None:
        num_rows = len(weight) // group.size
        self.rows = slice(group.rank * num_rows, (group.rank + 1) * num_rows)
        self.parameter = weight
        self.weight = weight.detach()[self.rows].requires_grad_(weight.requires_grad)
        # The cache lives as long as this call: weights are quantized once for all blocks.
        self.precision = None if recipe is None else LinearPrecision(recipe, WeightCache())
        self.weight_grad: Tensor | None = None

    def __call__(self, x: Tensor) -> Tensor:
        if self.precision is None:
            return F.linear(x, self.weight)
        with override("wgrad_queue", None):
            [y] = low_precision_linears(x, [(self.weight, self.precision)])
        return y

    def backward(self, outputs: tuple[Tensor, ...], grads: tuple[Tensor, ...], x: Tensor) -> Tensor:
        """Add this block's weight gradient to the sum, unless the weight is frozen. -> the gradient of x."""
        if not self.weight.requires_grad:
            return torch.autograd.grad(outputs, x, grads)[0]
        x_grad, weight_grad = torch.autograd.grad(outputs, (x, self.weight), grads)
        if self.weight_grad is None:
            self.weight_grad = weight_grad.to(fp32_or_wider(weight_grad.dtype))
        else:
            self.weight_grad += weight_grad
        return x_grad

    def parameter_grad(self, is_wanted: bool) -> Tensor | None:
        """The gradient for autograd. It is added to the parameter's `main_grad` instead where there is one."""
        main_grad = main_grad_of(self.parameter)
        if not is_wanted or self.weight_grad is None:
            return None
        if main_grad is not None:
            main_grad[self.rows] += self.weight_grad
            return None
        if len(self.weight_grad) == len(self.parameter):
            return self.weight_grad.to(self.parameter.dtype)
        whole = torch.zeros_like(self.parameter)
        whole[self.rows] = self.weight_grad.to(whole.dtype)
        return whole


def _attend_latents(
    q_BsX: Tensor, kv_BsX: Tensor, q_weight: Tensor, kv_weight: Tensor, call: _Call
) -> tuple[Tensor, Tensor]:
    """The outputs of all heads for this rank's tokens, and the log-sum-exps of this rank's heads."""
    spec, inner_group = call.spec, call.exchange.inner_group
    q_up = _UpProjection(q_weight, inner_group, call.q_recipe)
    kv_up = _UpProjection(kv_weight, inner_group, call.kv_recipe)
    q_BSX = start_sequence_gather(q_BsX, inner_group, dim=1)()
    q_BhSd = query_heads(spec, q_up(q_BSX), _table(call))
    del q_BSX
    out_BhSv, lse_BhS = empty_output(q_BhSd, spec.v_dim)
    for rank, latents_BSX in call.exchange.latents(kv_BsX):
        for at, tiles in call.blocks(rank):
            k, v = _expand(call, kv_up, latents_BSX[:, at])
            attend_tiles(out_BhSv, lse_BhS, q_BhSd, k, v, call.mask.scale, tiles)
    out_BShv = q_BhSd.new_empty(out_BhSv.transpose(1, 2).shape).copy_(out_BhSv.transpose(1, 2))
    # Saved as the output projection reads it, and traded for heads once more in the backward.
    return heads_to_sequence(out_BShv, inner_group), lse_BhS


class _LatentAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q_BsX: Tensor, kv_BsX: Tensor, q_weight: Tensor, kv_weight: Tensor, call: _Call) -> Tensor:
        count_event("attention", "tiles over ranks, latents exchanged")
        compute = partial(_attend_latents, q_BsX, kv_BsX, q_weight, kv_weight, call)
        out_BsHv, lse_BhS = save_output(CORE_ATTENTION, compute, 2)
        ctx.save_for_backward(q_BsX, kv_BsX, q_weight, kv_weight, out_BsHv, lse_BhS)
        ctx.call = call
        return out_BsHv

    @staticmethod
    def backward(ctx: Any, grad_BsHv: Tensor) -> tuple[Tensor | None, ...]:
        q_BsX, kv_BsX, q_weight, kv_weight, out_BsHv, lse_BhS = ctx.saved_tensors
        call: _Call = ctx.call
        inner_group = call.exchange.inner_group
        q_up = _UpProjection(q_weight, inner_group, call.q_recipe)
        kv_up = _UpProjection(kv_weight, inner_group, call.kv_recipe)
        grad, out = (x.transpose(1, 2) for x in sequence_to_heads([grad_BsHv, out_BsHv], inner_group))
        q_BSX = start_sequence_gather(q_BsX, inner_group, dim=1)().detach().requires_grad_()
        with torch.enable_grad():
            q_BhSd = query_heads(call.spec, q_up(q_BSX), _table(call))
        q_grad = zeros_to_sum(q_BhSd)
        latent_grads = _LatentGrads(call.exchange)
        for rank, latents_BSX in call.exchange.latents(kv_BsX):
            grad_BSX = zeros_to_sum(latents_BSX)
            for at, tiles in call.blocks(rank):
                block_BSX = latents_BSX[:, at].detach().requires_grad_()
                with torch.enable_grad():
                    k, v = _expand(call, kv_up, block_BSX)
                sums = q_grad, zeros_to_sum(k), zeros_to_sum(v)
                saved = q_BhSd.detach(), k.detach(), v.detach(), out, lse_BhS
                attend_tiles_backward(sums, grad, *saved, call.mask.scale, tiles)
                kv_grads = tuple(x.to(k.dtype) for x in sums[1:])
                del sums
                grad_BSX[:, at] = kv_up.backward((k, v), kv_grads, block_BSX)
                del k, v, kv_grads, saved
            latent_grads.add(rank, grad_BSX)
        q_grad_BSX = q_up.backward((q_BhSd,), (q_grad.to(q_BhSd.dtype),), q_BSX)
        q_grad_BSX = q_grad_BSX.to(fp32_or_wider(q_grad_BSX.dtype))
        q_grad_BsX = start_sequence_reduce(q_grad_BSX, inner_group, dim=1)()
        wants_q, wants_kv = ctx.needs_input_grad[2:4]
        return (
            q_grad_BsX.to(q_BsX.dtype),
            latent_grads.total().to(kv_BsX.dtype),
            q_up.parameter_grad(wants_q),
            kv_up.parameter_grad(wants_kv),
            None,
        )


def _table(call: _Call) -> tuple[Tensor, Tensor]:
    """The rotary tables of the inner group's tokens. They are made anew: all layers together would hold many."""
    spec = call.spec
    return rope_tables(call.query_positions_BS, spec.rope_dim, spec.rope_theta, spec.rope_scaling, call.longest)


def _expand(call: _Call, kv_up: _UpProjection, latents_BSX: Tensor) -> tuple[Tensor, Tensor]:
    latent_BSX, k_BSr = latents_BSX.split([call.spec.kv_rank, call.spec.rope_dim], dim=-1)
    return key_value_heads(call.spec, kv_up(latent_BSX), k_BSr)


class _LatentGrads:
    """Gradients of latents on their way to the ranks that own the tokens, summed in fp32."""

    def __init__(self, exchange: LatentExchange) -> None:
        self.exchange = exchange
        self.ring = GradientRing(exchange.outer_group)
        self.whole_SBX: Tensor | None = None  # of all ranks, where their latents were gathered

    def add(self, rank: int, grad_BSX: Tensor) -> None:
        """The gradient from this rank's heads and queries for the latents of an outer rank."""
        if not self.exchange.gathers_outer:
            self.ring.add([start_sequence_reduce(grad_BSX, self.exchange.inner_group, dim=1)()])
            return
        batch, length, width = grad_BSX.shape
        if self.whole_SBX is None:
            self.whole_SBX = grad_BSX.new_empty(self.exchange.outer_group.size * length, batch, width)
        self.whole_SBX[rank * length : (rank + 1) * length] = grad_BSX.movedim(1, 0)

    def total(self) -> Tensor:
        if self.whole_SBX is None:
            return self.ring.total()[0]
        whole_BSX = self.whole_SBX.movedim(0, 1)
        return start_sequence_reduce(whole_BSX, self.exchange.outer_group, dim=1, in_zigzag=True)()
