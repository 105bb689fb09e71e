"""Tensor parallel with sequence parallel: heads, widths and the vocabulary cut over `tp`, tokens cut between them.

Between modules a rank holds a share of the sequence. A cut module gathers it (`into`), computes with its share of the
heads or columns, and its last product is summed over ranks and cut to the sequence again (`RowLinear`). What is not cut
(norms, routers, latents) works on the share of the sequence, so that its gradients are parts of a sum.

Shapes: B batch, S sequence, D model dim, V this rank's part of the vocabulary.
"""

from collections.abc import Iterator, Sequence
from functools import partial

import torch.nn.functional as F
from torch import Tensor, nn

from threefold.engine.attention.delta import GatedDelta
from threefold.engine.attention.gqa import GqaAttention
from threefold.engine.attention.mla import MlaAttention
from threefold.engine.loss import VocabPart
from threefold.engine.mesh import Group, Mesh
from threefold.engine.mlp import Mlp
from threefold.engine.models.decoder import Decoder
from threefold.engine.precision.linear import LowLinear, low_linears
from threefold.engine.products import linear
from threefold.engine.recompute import is_hidden, remade
from threefold.engine.seams import each
from threefold.engine.shard.collectives import gather, scatter
from threefold.engine.shard.placement import Placement, Range, cut_parameter, even_part, whole
from threefold.engine.shard.ring_linear import gathered_linears, scattered_linear

Cuts = Iterator[tuple[str, int, list[Range], int]]  # parameter, dim, ranges, neighbours with the same piece
CUT, COPIED = ("dp", "cp"), ("dp", "cp", "tp")


class RowLinear(nn.Module):
    """A product whose inner dim is cut: partial results are summed and cut along the sequence; then the bias."""

    def __init__(self, inner: nn.Linear, group: Group, overlap: bool) -> None:
        super().__init__()
        self.weight, self.group, self.overlap = inner.weight, group, overlap
        self.bias: nn.Parameter | None = inner.bias
        self.low = inner.low if isinstance(inner, LowLinear) else None

    def forward(self, x: Tensor) -> Tensor:
        if self.overlap:
            y = scattered_linear(x, self.weight, self.group)
        else:
            y = scatter(self._product(x), self.group, dim=-2)
        return y if self.bias is None else y + self.bias

    def _product(self, x: Tensor) -> Tensor:
        return linear(x, self.weight) if self.low is None else low_linears(x, [(self.weight, self.low)])[0]


class VocabEmbedding(nn.Module):
    """Rows first.. of the embedding: other tokens are zeros here and something on another rank."""

    def __init__(self, inner: nn.Embedding, vocab: VocabPart) -> None:
        super().__init__()
        self.weight, self.vocab = inner.weight, vocab

    def forward(self, tokens_BS: Tensor) -> Tensor:
        at_BS = tokens_BS - self.vocab.first
        other_BS = (at_BS < 0) | (at_BS >= len(self.weight))
        if len(self.weight):
            x_BSD = F.embedding(at_BS.masked_fill(other_BS, 0), self.weight).masked_fill(other_BS[..., None], 0)
        else:  # more ranks than the vocabulary has parts
            x_BSD = self.weight.new_zeros(*tokens_BS.shape, self.weight.shape[1]) + self.weight.sum()
        return scatter(x_BSD, self.vocab.group, dim=1)


def shard_tensors(model: Decoder, mesh: Mesh, overlap: bool) -> dict[str, Placement]:
    """Cut a model that has no memory yet; where every parameter but the experts' lies, by name.

    With `overlap` the sequence travels in pieces while products compute; MLA's narrow latents are gathered at once.
    """
    group = mesh.group("tp")
    placements = {name: whole(p.shape, COPIED) for name, p in model.named_parameters() if ".experts." not in name}
    if group.alone:
        return placements
    for path, module in list(model.named_modules()):
        for name, dim, ranges, shared_by in _cuts(module, model, group):
            full = f"{path}.{name}" if path else name
            placements[full] = cut = _cut(placements[full], dim, ranges, shared_by)
            owner, _, leaf = full.rpartition(".")
            cut_parameter(model.get_submodule(owner), leaf, cut)
        if isinstance(module, MlaAttention):
            module.enter = partial(gather, group=group, dim=-2)
        elif isinstance(module, GqaAttention | GatedDelta | Mlp):
            module.into = partial(gathered_linears if overlap else _gathered_first, group=group)
        else:
            continue
        last = "down" if isinstance(module, Mlp) else "out"
        setattr(module, last, RowLinear(getattr(module, last), group, overlap))
    first, width = even_part(model.spec.vocab, group.rank, group.size)[0], -(-model.spec.vocab // group.size)
    vocab = VocabPart(first, width, group)
    model.vocab, model.enter_loss = vocab, partial(gather, group=group, dim=1)
    if model.embed is not None:
        assert isinstance(model.embed, nn.Embedding)
        model.embed = VocabEmbedding(model.embed, vocab)
    return placements


def _gathered_first(x: Tensor, linears: Sequence[nn.Linear], group: Group) -> list[Tensor]:
    with remade(partial(gather, group=group, dim=-2), x, on=is_hidden(x)) as whole_x:
        return each(whole_x, linears)


def _cut(old: Placement, dim: int, ranges: list[Range], shared_by: int) -> Placement:
    parts = tuple(tuple(ranges) if d == dim else kept for d, kept in enumerate(old.ranges))
    return Placement(old.shape, parts, CUT, shared_by=shared_by)


def _cuts(module: nn.Module, model: Decoder, group: Group) -> Cuts:
    place, degree = group.rank, group.size
    if isinstance(module, GqaAttention):
        yield from _gqa(module, place, degree)
    elif isinstance(module, MlaAttention):
        up = "q.weight" if module.spec.q_rank is None else "q_up.weight"
        for name, dim in ((up, 0), ("kv_up.weight", 0), ("out.weight", 1)):
            yield name, dim, [_part(module, name, dim, place, degree)], 1
    elif isinstance(module, GatedDelta):
        yield from _delta(module, place, degree)
    elif isinstance(module, Mlp):
        for name, dim in (("gate.weight", 0), ("up.weight", 0), ("down.weight", 1)):
            yield name, dim, [_part(module, name, dim, place, degree)], 1
    elif module is model:
        for name in ("embed.weight", "head.weight"):
            if getattr(model, name.partition(".")[0]) is not None:
                yield name, 0, [even_part(model.spec.vocab, place, degree)], 1


def _part(module: nn.Module, name: str, dim: int, place: int, degree: int) -> Range:
    return even_part(module.get_parameter(name).shape[dim], place, degree)


def _gqa(module: GqaAttention, place: int, degree: int) -> Cuts:
    """Whole heads. With more ranks than key/value heads, neighbours hold the same one."""
    spec = module.spec
    kept = min(degree, spec.num_kv_heads)
    copies = degree // kept
    kinds = ("weight", "bias") if spec.bias else ("weight",)
    for kind in kinds:
        yield f"q.{kind}", 0, [_part(module, f"q.{kind}", 0, place, degree)], 1
        for name in (f"k.{kind}", f"v.{kind}"):
            yield name, 0, [_part(module, name, 0, place // copies, kept)], copies
    yield "out.weight", 1, [_part(module, "out.weight", 1, place, degree)], 1
    if spec.sinks:
        yield "sinks", 0, [even_part(spec.num_heads, place, degree)], 1


def _delta(module: GatedDelta, place: int, degree: int) -> Cuts:
    """By key head; the convolution's channels lie as all queries, all keys, all values."""
    spec = module.spec
    for name, dim in (("qkvz.weight", 0), ("ba.weight", 0), ("dt_bias", 0), ("a_log", 0), ("out.weight", 1)):
        yield name, dim, [_part(module, name, dim, place, degree)], 1
    ranges, first = [], 0
    for width in (spec.keys, spec.keys, spec.values):
        start, stop = even_part(width, place, degree)
        ranges.append((first + start, first + stop))
        first += width
    yield "conv", 0, ranges, 1
