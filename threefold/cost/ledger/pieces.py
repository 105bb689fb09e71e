"""The parameters our engine holds on a rank, in the order of registration, and over which ranks each is copied.

The order decides which parameters share a bucket, and so how many collectives there are.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from threefold.layout.stages import chunk_rank
from threefold.plan.plan import Plan
from threefold.spec.model import DeltaSpec, GqaSpec, Layer, MlaSpec, ModelSpec, MoeSpec

# How a tensor is cut: not at all, over tp, by vocabulary, over the expert grid, over ep alone; a number: over tp, by so
# many heads.
_COPIED, _TP, _VOCAB, _EXPERT, _EP = "copied", "tp", "vocab", "expert", "ep"
Cut = str | int
Tensors = Iterator[tuple[str, int, Cut]]  # name, elements of the whole, how it is cut


@dataclass(frozen=True, slots=True)
class Piece:
    name: str
    elements: int
    group: str
    copies: int  # ranks of the group
    shared: bool = False  # with other pipeline ranks

    @property
    def of_experts(self) -> bool:
        return self.group.startswith("edp")


def pieces_of_stages(plan: Plan, vocab: int) -> list[list[Piece]]:
    """By pipeline rank, where a rank has `vocab` rows of the vocabulary."""
    held: list[dict[str, Piece]] = [{} for _ in range(plan.layout.pp)]
    v_shaped = plan.layout.pipeline_schedule == "dualpipev"
    for number in range(len(plan.chunks)):
        stage = held[chunk_rank(number, plan.layout.pp, v_shaped)]
        for name, elements, cut in _chunk(plan, number):
            stage.setdefault(name, _piece(plan, name, elements, cut, vocab))
    homes = {name: sum(name in stage for stage in held) for stage in held for name in stage}
    return [[_across(piece, homes[piece.name]) for piece in stage.values()] for stage in held]


def _across(piece: Piece, homes: int) -> Piece:
    if homes == 1:
        return piece
    return replace(piece, group=f"{piece.group} x pp", copies=piece.copies * homes, shared=True)


def _piece(plan: Plan, name: str, elements: int, cut: Cut, vocab: int) -> Piece:
    layout = plan.layout
    alike = layout.dp * layout.cp
    if cut == _EXPERT:
        return Piece(name, elements // layout.ep // layout.etp, "edp", layout.edp)
    if cut == _EP:
        return Piece(name, elements // layout.ep, "edp x etp", layout.edp * layout.etp)
    if cut == _COPIED or layout.tp == 1:
        return Piece(name, elements, "dp x cp x tp", alike * layout.tp)
    if cut == _VOCAB:
        return Piece(name, elements // plan.model.vocab * vocab, "dp x cp", alike)
    if isinstance(cut, int) and cut < layout.tp:  # neighbours hold the same head
        return Piece(name, elements // cut, "dp x cp x kv", alike * (layout.tp // cut))
    return Piece(name, elements // layout.tp, "dp x cp", alike)


def _chunk(plan: Plan, number: int) -> Tensors:
    model, chunks = plan.model, plan.chunks
    chunk = chunks[number]
    first_end = next(n for n, c in enumerate(chunks) if c.mtp or c.loss)
    if chunk.embedding or chunk.mtp or (chunk.loss and model.tied):
        yield "embed", model.vocab * model.dim, _VOCAB
    for layer in chunk.layers:
        yield from _layer(model, model.layers[layer], f"layers.{layer}")
    if number == first_end:
        yield "norm", model.dim, _COPIED
    if chunk.loss and not model.tied:
        yield "head", model.vocab * model.dim, _VOCAB
    first = sum(c.mtp for c in chunks[:number])
    sets = min(plan.mtp, 1) if model.mtp_shared else plan.mtp
    for depth in sorted({min(depth, sets - 1) for depth in range(first, first + chunk.mtp)}):
        yield from _depth(model, f"mtp.{depth}")


def _depth(model: ModelSpec, path: str) -> Tensors:
    yield f"{path}.embed_norm", model.dim, _COPIED
    yield f"{path}.hidden_norm", model.dim, _COPIED
    yield f"{path}.join", 2 * model.dim**2, _COPIED
    for number, layer in enumerate(model.mtp_depth):
        yield from _layer(model, layer, f"{path}.layers.{number}")
    yield f"{path}.norm", model.dim, _COPIED


def _layer(model: ModelSpec, layer: Layer, path: str) -> Tensors:
    yield f"{path}.mixer_norm", model.dim, _COPIED
    for name, elements, cut in _mixer(model, layer):
        yield f"{path}.mixer.{name}", elements, cut
    yield f"{path}.ffn_norm", model.dim, _COPIED
    ffn = _mlp(model.dim, model.dense_dim) if layer.ffn == "dense" else _moe(model.moe, model.dim)
    for name, elements, cut in ffn:
        yield f"{path}.ffn.{name}", elements, cut


def _mixer(model: ModelSpec, layer: Layer) -> Tensors:
    spec = model.local_attention if layer.mixer == "window" else model.attention
    if layer.mixer == "delta" and model.delta:
        yield from _delta(model.delta, model.dim)
    elif isinstance(spec, MlaSpec):
        yield from _mla(spec, model.dim)
    elif isinstance(spec, GqaSpec):
        yield from _gqa(spec, model.dim)


def _gqa(spec: GqaSpec, dim: int) -> Tensors:
    if spec.sinks:
        yield "sinks", spec.num_heads, _TP
    queries = spec.q_dim * (2 if spec.gated else 1)
    heads = spec.num_kv_heads
    parts: tuple[tuple[str, int, Cut], ...] = (
        ("q", queries, _TP),
        ("k", spec.kv_dim, heads),
        ("v", spec.kv_dim, heads),
    )
    for name, width, cut in parts:
        yield f"{name}.weight", dim * width, cut
        if spec.bias:
            yield f"{name}.bias", width, cut
    yield "out.weight", spec.q_dim * dim, _TP
    if spec.bias:
        yield "out.bias", dim, _COPIED
    if spec.qk_norm:
        yield "q_norm", spec.head_dim, _COPIED
        yield "k_norm", spec.head_dim, _COPIED


def _mla(spec: MlaSpec, dim: int) -> Tensors:
    queries = spec.num_heads * spec.qk_dim
    if spec.q_rank is None:
        yield "q", dim * queries, _TP
    else:
        yield "q_down", dim * spec.q_rank, _COPIED
        yield "q_norm", spec.q_rank, _COPIED
        yield "q_up", spec.q_rank * queries, _TP
    yield "kv_down", dim * (spec.kv_rank + spec.rope_dim), _COPIED
    yield "kv_norm", spec.kv_rank, _COPIED
    yield "kv_up", spec.kv_rank * spec.num_heads * (spec.nope_dim + spec.v_dim), _TP
    yield "out", spec.num_heads * spec.v_dim * dim, _TP


def _delta(spec: DeltaSpec, dim: int) -> Tensors:
    yield "conv", (2 * spec.keys + spec.values) * spec.conv, _TP
    yield "dt_bias", spec.num_v_heads, _TP
    yield "a_log", spec.num_v_heads, _TP
    yield "qkvz", dim * (2 * spec.keys + 2 * spec.values), _TP
    yield "ba", dim * 2 * spec.num_v_heads, _TP
    yield "norm", spec.v_dim, _COPIED
    yield "out", spec.values * dim, _TP


def _mlp(dim: int, hidden: int) -> Tensors:
    for name in ("gate", "up", "down"):
        yield name, dim * hidden, _TP


def _moe(moe: MoeSpec | None, dim: int) -> Tensors:
    if moe is None:
        return
    number, width = moe.num_experts, moe.expert_dim
    yield "router.weight", number * dim, _COPIED
    if moe.bias:
        yield "router.bias", number, _COPIED
    yield "experts.gate_up", number * 2 * width * dim, _EXPERT
    yield "experts.down", number * dim * width, _EXPERT
    if moe.bias:
        yield "experts.gate_up_bias", number * 2 * width, _EXPERT
        yield "experts.down_bias", number * dim, _EP
    if moe.num_shared:
        for name, elements, cut in _mlp(dim, moe.shared_width):
            yield f"shared.{name}", elements, cut
    if moe.shared_gate:
        yield "shared_gate", dim, _COPIED
