"""Tensor parallelism with sequence parallelism: heads, FFN widths and the vocabulary are sharded over `tp`.

Between modules a rank holds a shard of the sequence. A sharded module gathers it (`input_linears`), computes with its
heads or columns, and its last linear reduces over ranks and scatters along the sequence (`RowParallelLinear`). Parts
that are not sharded (norms, routers, latents) work on the rank's shard of the sequence, so their gradients are partial
sums over `tp`. `order.py` calls `shard_tensors`.

With `knobs.tp_overlap` the all-gather before a column-parallel linear and the reduce-scatter after a row-parallel one
become rings: a piece of the sequence is multiplied while the next one travels. The bytes are the same; sums are taken
in the order of the ring.

Shapes: B batch, S sequence (all pieces of a ring), s this rank's piece of it, D model dim, V this rank's shard of the
vocabulary, I inner dim, O outer dim of a GEMM, ... any dims.
"""

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from threefold.engine.attention.gated_delta import GatedDelta
from threefold.engine.attention.gqa import GqaAttention
from threefold.engine.attention.mla import MlaAttention
from threefold.engine.attention.sparse.compressed import CompressedAttention
from threefold.engine.attention.state_space.mamba import Mamba
from threefold.engine.autograd.linear import linear
from threefold.engine.autograd.recompute import is_recomputed, recompute_output
from threefold.engine.context import count_event
from threefold.engine.dist.collectives import gather_along, reduce_scatter_along, send_recv
from threefold.engine.dist.mesh import Group, Mesh
from threefold.engine.dist.shard_placement import Placement, Range, even_range, replicated, shard_parameter
from threefold.engine.layers.cross_entropy import VocabShard
from threefold.engine.layers.embedding import embed
from threefold.engine.layers.input_linears import apply_linears
from threefold.engine.layers.mlp import Mlp
from threefold.engine.layers.norm import NormShard, ProjectionNorm
from threefold.engine.lora import LORA_A, LORA_B, LoraLinear, add_low_rank
from threefold.engine.models.block import StreamBlock
from threefold.engine.models.decoder import Decoder
from threefold.engine.precision.low_precision_linear import LowPrecisionLinear, low_precision_linears


def all_gather_linears(x_sI: Tensor, linears: Sequence[nn.Linear], group: Group) -> list[Tensor]:
    """The output of each linear for the whole sequence, from this rank's piece of the input."""
    if group.is_trivial:
        return [linear(x_sI) for linear in linears]
    outs = _AllGatherLinears.apply(x_sI, group, *(linear.weight for linear in linears))
    biases = [linear.bias for linear in linears]
    return [out if bias is None else out + bias for out, bias in zip(outs, biases, strict=True)]


def linear_reduce_scatter(x_SI: Tensor, weight_OI: Tensor, group: Group) -> Tensor:
    """This rank's piece of the output, summed over ranks."""
    return linear(x_SI, weight_OI) if group.is_trivial else _LinearReduceScatter.apply(x_SI, weight_OI, group)


def ring_pieces(piece: Tensor, group: Group) -> Iterator[tuple[int, Tensor]]:
    """Every rank's piece with its index, this rank's first. The next piece arrives while the caller uses one."""
    rank, size = group.rank, group.size
    for step in range(size):
        pending, arriving = None, piece
        if step < size - 1:
            arriving = torch.empty_like(piece)
            pending = send_recv([arriving], [piece], group, (rank + 1) % size, (rank - 1) % size)
        yield (rank - step) % size, piece
        if pending is not None:
            pending.wait()
        piece = arriving


def ring_reduce(parts: "_PartialGemms", group: Group) -> Tensor:
    """This rank's piece of the sum over ranks. The next partial product is computed while the sum so far travels."""
    rank, size = group.rank, group.size
    summed = parts((rank - 1) % size)
    for step in range(1, size):
        arriving = torch.empty_like(summed)
        pending = send_recv([arriving], [summed.contiguous()], group, (rank + 1) % size, (rank - 1) % size)
        part = parts((rank - 1 - step) % size)
        pending.wait()
        summed = arriving.add_(part)
    return summed


class _PartialGemms:
    """This rank's partial products, computed one piece of the sequence at a time."""

    def __init__(self, inputs: Sequence[Tensor], weights: Sequence[Tensor], size: int) -> None:
        self.inputs, self.weights, self.size = inputs, weights, size

    def __call__(self, index: int) -> Tensor:
        products = [_piece(x, index, self.size) @ w for x, w in zip(self.inputs, self.weights, strict=True)]
        return products[0] if len(products) == 1 else torch.stack(products).sum(dim=0)


def _piece(x: Tensor, index: int, size: int) -> Tensor:
    step = x.shape[-2] // size
    return x.narrow(-2, index * step, step)


def _weight_grad(grad_SO: Tensor, x_SI: Tensor) -> Tensor:
    return grad_SO.flatten(0, -2).T @ x_SI.flatten(0, -2)


class _AllGatherLinears(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_sI: Tensor, group: Group, *weights: Tensor) -> tuple[Tensor, ...]:
        count_event("tensor-parallel ring", "all-gather")
        size = group.size
        lead, length = x_sI.shape[:-2], x_sI.shape[-2] * size
        x_SI = x_sI.new_empty(*lead, length, x_sI.shape[-1])
        outs = [x_sI.new_empty(*lead, length, len(weight)) for weight in weights]
        for index, piece in ring_pieces(x_sI.contiguous(), group):
            _piece(x_SI, index, size).copy_(piece)
            for out, weight in zip(outs, weights, strict=True):
                _piece(out, index, size).copy_(F.linear(piece, weight))
        # The gathered input is for the weight gradients alone: frozen weights need none.
        ctx.save_for_backward(x_SI if any(ctx.needs_input_grad[2:]) else None, *weights)
        ctx.group = group
        return tuple(outs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x_SI, *weights = ctx.saved_tensors
        wants_x, _, *wants = ctx.needs_input_grad
        x_grad = ring_reduce(_PartialGemms(grads, weights, ctx.group.size), ctx.group) if wants_x else None
        return x_grad, None, *(_weight_grad(grad, x_SI) if w else None for grad, w in zip(grads, wants, strict=True))


class _LinearReduceScatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_SI: Tensor, weight_OI: Tensor, group: Group) -> Tensor:
        count_event("tensor-parallel ring", "reduce-scatter")
        ctx.save_for_backward(x_SI if ctx.needs_input_grad[1] else None, weight_OI)
        ctx.group, ctx.shape = group, x_SI.shape
        return ring_reduce(_PartialGemms([x_SI], [weight_OI.T], group.size), group)

    @staticmethod
    def backward(ctx: Any, grad_sO: Tensor) -> tuple[Tensor, Tensor | None, None]:
        x_SI, weight_OI = ctx.saved_tensors
        size = ctx.group.size
        x_grad = grad_sO.new_empty(ctx.shape)
        weight_grad = None if x_SI is None else torch.zeros_like(weight_OI)
        for index, piece in ring_pieces(grad_sO.contiguous(), ctx.group):
            _piece(x_grad, index, size).copy_(piece @ weight_OI)
            if weight_grad is not None:
                weight_grad += _weight_grad(piece, _piece(x_SI, index, size))
        return x_grad, weight_grad, None


ParameterShards = Iterator[tuple[str, int, list[Range], int]]  # parameter, dim, ranges, tp ranks with the same shard
# The axes along which ranks hold the same values of a parameter: one that tp shards, and one that every tp rank copies.
REPLICAS_OF_SHARDED, REPLICAS_OF_COPIED = ("dp", "cp"), ("dp", "cp", "tp")


class RowParallelLinear(nn.Module):
    """A linear whose inner dim is sharded: outputs are reduced over ranks and scattered along the sequence, then the
    bias is added."""

    def __init__(self, inner: nn.Linear, group: Group, overlap: bool) -> None:
        super().__init__()
        self.weight, self.group, self.overlap = inner.weight, group, overlap
        self.bias: nn.Parameter | None = inner.bias
        self.precision = inner.precision if isinstance(inner, LowPrecisionLinear | LoraLinear) else None
        self.lora_a = self.lora_b = self.lora = None
        if isinstance(inner, LoraLinear):
            assert not overlap, "a rule refuses adapters with knobs.tp_overlap"
            self.lora_a, self.lora_b, self.lora = inner.lora_a, inner.lora_b, inner.lora

    def forward(self, x: Tensor) -> Tensor:
        if self.overlap:
            y = linear_reduce_scatter(x, self.weight, self.group)
        else:
            y = reduce_scatter_along(self._add_adapter(self._gemm(x), x), self.group, dim=-2)
        return y if self.bias is None else y + self.bias

    def _add_adapter(self, y: Tensor, x: Tensor) -> Tensor:
        """A has this rank's columns of the weight and B all rows, so that the ranks' outputs are parts of one sum."""
        if self.lora is None or self.lora_a is None or self.lora_b is None:
            return y
        return add_low_rank(y, x, self.lora_a, self.lora_b, self.lora.scale)

    def _gemm(self, x: Tensor) -> Tensor:
        return (
            linear(x, self.weight)
            if self.precision is None
            else low_precision_linears(x, [(self.weight, self.precision)])[0]
        )


class VocabParallelEmbedding(nn.Module):
    """An embedding whose rows are sharded: tokens of other ranks are zeros here, and the ranks' outputs are summed."""

    def __init__(self, inner: nn.Embedding, vocab_shard: VocabShard) -> None:
        super().__init__()
        self.weight, self.vocab_shard = inner.weight, vocab_shard

    def forward(self, tokens_BS: Tensor) -> Tensor:
        index_BS = tokens_BS - self.vocab_shard.first
        is_remote_BS = (index_BS < 0) | (index_BS >= len(self.weight))
        if len(self.weight):
            x_BSD = embed(index_BS.masked_fill(is_remote_BS, 0), self.weight)
            x_BSD = x_BSD.masked_fill(is_remote_BS[..., None], 0)
        else:  # there are more ranks than rows to share
            x_BSD = self.weight.new_zeros(*tokens_BS.shape, self.weight.shape[1]) + self.weight.sum()
        return reduce_scatter_along(x_BSD, self.vocab_shard.group, dim=1)


def shard_tensors(model: Decoder, mesh: Mesh, overlap: bool) -> dict[str, Placement]:
    """Shard a model on the meta device; the placement of every parameter except those of experts, by name.

    With `overlap` the sequence travels in pieces while GEMMs compute; MLA's small latents are gathered at once.
    """
    group = mesh.group("tp")
    dense = {name: p for name, p in model.named_parameters() if ".experts." not in name}
    placements = {name: replicated(p.shape, REPLICAS_OF_COPIED) for name, p in dense.items()}
    if group.is_trivial:
        return placements
    for path, module in list(model.named_modules()):
        for name, dim, ranges, shared_by in _with_adapters(module, _parameter_shards(module, model, group)):
            full = f"{path}.{name}" if path else name
            placements[full] = _shard_placement(placements[full], dim, ranges, shared_by)
            owner, _, leaf = full.rpartition(".")
            shard_parameter(model.get_submodule(owner), leaf, placements[full])
        if isinstance(module, GqaAttention):
            _share_projection_norms(module, group)
        if isinstance(module, StreamBlock):
            module.shard_tokens = partial(_take_shard, group)
        if isinstance(module, MlaAttention | CompressedAttention):
            module.gather_latents = partial(gather_along, group=group, dim=-2)
        elif isinstance(module, GqaAttention | GatedDelta | Mamba | Mlp):
            module.input_linears = partial(all_gather_linears if overlap else _gather_then_apply, group=group)
        else:
            continue
        last = "down" if isinstance(module, Mlp) else "out"
        setattr(module, last, RowParallelLinear(getattr(module, last), group, overlap))
    first, _ = even_range(model.spec.vocab, group.rank, group.size)
    vocab_shard = VocabShard(first, -(-model.spec.vocab // group.size), group)
    model.vocab_shard, model.gather_loss_input = vocab_shard, partial(gather_along, group=group, dim=1)
    model.shard_hidden = partial(_take_shard, group)
    if model.embed is not None:
        assert isinstance(model.embed, nn.Embedding)
        model.embed = VocabParallelEmbedding(model.embed, vocab_shard)
    return placements


def _share_projection_norms(module: GqaAttention, group: Group) -> None:
    """Let the ranks take the norms of all queries and all keys of a token together."""
    spec = module.spec
    if isinstance(module.q_norm, ProjectionNorm) and isinstance(module.k_norm, ProjectionNorm):
        module.q_norm.shard = NormShard(group, 1, spec.q_dim)
        module.k_norm.shard = NormShard(group, group.size // min(group.size, spec.num_kv_heads), spec.kv_dim)


def _take_shard(group: Group, x_BSD: Tensor) -> Tensor:
    return x_BSD.chunk(group.size, dim=1)[group.rank]


def _gather_then_apply(x: Tensor, linears: Sequence[nn.Linear], group: Group) -> list[Tensor]:
    with recompute_output(partial(gather_along, group=group, dim=-2), x, enabled=is_recomputed(x)) as whole_x:
        return apply_linears(whole_x, linears)


def _shard_placement(old: Placement, dim: int, ranges: list[Range], shared_by: int) -> Placement:
    parts = tuple(tuple(ranges) if d == dim else unchanged for d, unchanged in enumerate(old.ranges))
    return Placement(old.shape, parts, REPLICAS_OF_SHARDED, tp_replicas=shared_by)


def _with_adapters(module: nn.Module, shards: ParameterShards) -> ParameterShards:
    """The shards, and after each sharded weight that of its adapter: B has the rows of the weight, A its columns, and
    every rank has a copy of the other one."""
    for name, dim, ranges, shared_by in shards:
        yield name, dim, ranges, shared_by
        path, _, leaf = name.rpartition(".")
        if leaf == "weight" and isinstance(module.get_submodule(path), LoraLinear):
            yield f"{path}.{LORA_A if dim else LORA_B}", dim, ranges, shared_by


def _parameter_shards(module: nn.Module, model: Decoder, group: Group) -> ParameterShards:
    rank, degree = group.rank, group.size
    if isinstance(module, GqaAttention):
        yield from _gqa_shards(module, rank, degree)
    elif isinstance(module, MlaAttention):
        up = "q.weight" if module.spec.q_rank is None else "q_up.weight"
        for name, dim in ((up, 0), ("kv_up.weight", 0), ("out.weight", 1)):
            yield name, dim, [_even_range(module, name, dim, rank, degree)], 1
    elif isinstance(module, CompressedAttention):
        for name, dim in (("q_up.weight", 0), ("sinks", 0), ("group_down", 0), ("out.weight", 1)):
            yield name, dim, [_even_range(module, name, dim, rank, degree)], 1
    elif isinstance(module, GatedDelta):
        yield from _delta_shards(module, rank, degree)
    elif isinstance(module, Mamba):
        yield from _mamba_shards(module, rank, degree)
    elif isinstance(module, Mlp):
        for name, dim in (("gate.weight", 0), ("up.weight", 0), ("down.weight", 1)):
            if name != "gate.weight" or module.gate is not None:
                yield name, dim, [_even_range(module, name, dim, rank, degree)], 1
    elif module is model:
        for name in ("embed.weight", "head.weight"):
            if getattr(model, name.partition(".")[0]) is not None:
                yield name, 0, [even_range(model.spec.vocab, rank, degree)], 1
        if model.head is not None and model.spec.head_bias:
            yield "head.bias", 0, [even_range(model.spec.vocab, rank, degree)], 1


def _even_range(module: nn.Module, name: str, dim: int, rank: int, degree: int) -> Range:
    return even_range(module.get_parameter(name).shape[dim], rank, degree)


def _gqa_shards(module: GqaAttention, rank: int, degree: int) -> ParameterShards:
    """Ranks get whole heads. With more ranks than key/value heads, neighboring ranks hold the same one."""
    spec = module.spec
    num_shards = min(degree, spec.num_kv_heads)
    copies = degree // num_shards
    kinds = ("weight", "bias") if spec.bias else ("weight",)
    for kind in kinds:
        yield f"q.{kind}", 0, [_even_range(module, f"q.{kind}", 0, rank, degree)], 1
        for name in (f"k.{kind}",) if spec.shared_kv else (f"k.{kind}", f"v.{kind}"):
            yield name, 0, [_even_range(module, name, 0, rank // copies, num_shards)], copies
    if spec.qk_norm and spec.qk_norm_over == "projection":
        yield "q_norm.weight", 0, [_even_range(module, "q_norm.weight", 0, rank, degree)], 1
        yield "k_norm.weight", 0, [_even_range(module, "k_norm.weight", 0, rank // copies, num_shards)], copies
    yield "out.weight", 1, [_even_range(module, "out.weight", 1, rank, degree)], 1
    if spec.sinks:
        yield "sinks", 0, [even_range(spec.num_heads, rank, degree)], 1


def _delta_shards(module: GatedDelta, rank: int, degree: int) -> ParameterShards:
    """Ranks get whole key heads. The channels of the convolution are all queries, then all keys, then all values."""
    spec = module.spec
    for name, dim in (("qkvz.weight", 0), ("ba.weight", 0), ("dt_bias", 0), ("a_log", 0), ("out.weight", 1)):
        yield name, dim, [_even_range(module, name, dim, rank, degree)], 1
    yield "conv", 0, _parts_ranges((spec.keys, spec.keys, spec.values), rank, degree), 1


def _mamba_shards(module: Mamba, rank: int, degree: int) -> ParameterShards:
    """Ranks get whole groups. The columns of the input projection are the gate, the channels of the convolution (x, B
    and C) and the steps."""
    spec = module.spec
    states = spec.num_groups * spec.state_dim
    channels = (spec.inner_dim, states, states)
    yield "in_proj.weight", 0, _parts_ranges((spec.inner_dim, *channels, spec.num_heads), rank, degree), 1
    for name in ("conv", "conv_bias"):
        yield name, 0, _parts_ranges(channels, rank, degree), 1
    for name, dim in (("dt_bias", 0), ("a_log", 0), ("skip", 0), ("norm.weight", 0), ("out.weight", 1)):
        yield name, dim, [_even_range(module, name, dim, rank, degree)], 1


def _parts_ranges(widths: Sequence[int], rank: int, degree: int) -> list[Range]:
    """An even range of each of the parts that a dim consists of."""
    ranges, first = [], 0
    for width in widths:
        start, stop = even_range(width, rank, degree)
        ranges.append((first + start, first + stop))
        first += width
    return ranges
