"""The parameters that our own engine holds on a rank, in order of registration, and the group that copies each.

`zero1.py` fills buckets from them: the order decides which parameters share a bucket, and so how many collectives there
are. An entry reads `LocalParameter("layers.0.ffn.experts.down", elements=12582912, group="edp", num_copies=8)`.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from threefold.layout.stages import chunk_rank
from threefold.plan.plan import Plan
from threefold.spec.model import DeltaSpec, GqaSpec, Layer, MlaSpec, ModelSpec, MoeSpec

# How a parameter is sharded: not at all, over tp, over tp by rows of the vocabulary, over the expert grid, over ep
# alone. A number means over tp, by so many heads.
_REPLICATED, _TP, _VOCAB, _EXPERT, _EP = "replicated", "tp", "vocab", "expert", "ep"
Sharding = str | int
Parameters = Iterator[tuple[str, int, Sharding]]  # name, elements of the whole parameter, how it is sharded


@dataclass(frozen=True, slots=True)
class LocalParameter:
    """The shard of one parameter on one rank."""

    name: str
    elements: int  # of the shard
    group: str  # the group whose ranks hold the same shard
    num_copies: int  # ranks of the group
    is_shared: bool = False  # whether other pipeline ranks hold it too

    @property
    def is_expert(self) -> bool:
        return self.group.startswith("edp")


def stage_parameters(plan: Plan, vocab_rows: int) -> list[list[LocalParameter]]:
    """The parameters of each pipeline rank, where a rank has `vocab_rows` rows of the vocabulary."""
    held: list[dict[str, LocalParameter]] = [{} for _ in range(plan.layout.pp)]
    v_shaped = plan.layout.pipeline_schedule == "dualpipev"
    for number in range(len(plan.chunks)):
        stage = held[chunk_rank(number, plan.layout.pp, v_shaped)]
        for name, elements, sharding in _chunk(plan, number):
            stage.setdefault(name, _local_parameter(plan, name, elements, sharding, vocab_rows))
    num_stages = {name: sum(name in stage for stage in held) for stage in held for name in stage}
    return [[_with_stages(parameter, num_stages[parameter.name]) for parameter in stage.values()] for stage in held]


def _with_stages(parameter: LocalParameter, num_stages: int) -> LocalParameter:
    """The parameter with the group of all pipeline ranks that hold it."""
    if num_stages == 1:
        return parameter
    group, num_copies = f"{parameter.group} x pp", parameter.num_copies * num_stages
    return replace(parameter, group=group, num_copies=num_copies, is_shared=True)


def _local_parameter(plan: Plan, name: str, elements: int, sharding: Sharding, vocab_rows: int) -> LocalParameter:
    """The shard of a parameter on a rank, and the group that holds the same shard."""
    layout = plan.layout
    dp = layout.dp * layout.cp
    if sharding == _EXPERT:
        return LocalParameter(name, elements // layout.ep // layout.etp, "edp", layout.edp)
    if sharding == _EP:
        return LocalParameter(name, elements // layout.ep, "edp x etp", layout.edp * layout.etp)
    if sharding == _REPLICATED or layout.tp == 1:
        return LocalParameter(name, elements, "dp x cp x tp", dp * layout.tp)
    if sharding == _VOCAB:
        return LocalParameter(name, elements // plan.model.vocab * vocab_rows, "dp x cp", dp)
    if isinstance(sharding, int) and sharding < layout.tp:  # neighbouring ranks hold the same head
        return LocalParameter(name, elements // sharding, "dp x cp x kv", dp * (layout.tp // sharding))
    return LocalParameter(name, elements // layout.tp, "dp x cp", dp)


def _chunk(plan: Plan, number: int) -> Parameters:
    """Parameters of a virtual stage."""
    model, chunks = plan.model, plan.chunks
    chunk = chunks[number]
    first_end = next(n for n, c in enumerate(chunks) if c.mtp or c.loss)
    if chunk.embedding or chunk.mtp or (chunk.loss and model.tied):
        yield "embed", model.vocab * model.dim, _VOCAB
    for layer in chunk.layers:
        yield from _layer(model, model.layers[layer], f"layers.{layer}")
    if number == first_end:
        yield "norm", model.dim, _REPLICATED
    if chunk.loss and not model.tied:
        yield "head", model.vocab * model.dim, _VOCAB
    first = sum(c.mtp for c in chunks[:number])
    num_depths = min(plan.mtp, 1) if model.mtp_shared else plan.mtp
    for depth in sorted({min(depth, num_depths - 1) for depth in range(first, first + chunk.mtp)}):
        yield from _mtp_depth(model, f"mtp.{depth}")


def _mtp_depth(model: ModelSpec, path: str) -> Parameters:
    yield f"{path}.embed_norm", model.dim, _REPLICATED
    yield f"{path}.hidden_norm", model.dim, _REPLICATED
    yield f"{path}.join", 2 * model.dim**2, _REPLICATED
    for number, layer in enumerate(model.mtp_depth):
        yield from _layer(model, layer, f"{path}.layers.{number}")
    yield f"{path}.norm", model.dim, _REPLICATED


def _layer(model: ModelSpec, layer: Layer, path: str) -> Parameters:
    yield f"{path}.mixer_norm", model.dim, _REPLICATED
    for name, elements, sharding in _mixer(model, layer):
        yield f"{path}.mixer.{name}", elements, sharding
    yield f"{path}.ffn_norm", model.dim, _REPLICATED
    ffn = _mlp(model.dim, model.dense_dim) if layer.ffn == "dense" else _moe(model.moe, model.dim)
    for name, elements, sharding in ffn:
        yield f"{path}.ffn.{name}", elements, sharding


def _mixer(model: ModelSpec, layer: Layer) -> Parameters:
    spec = model.local_attention if layer.mixer == "window" else model.attention
    if layer.mixer == "delta" and model.delta:
        yield from _delta(model.delta, model.dim)
    elif isinstance(spec, MlaSpec):
        yield from _mla(spec, model.dim)
    elif isinstance(spec, GqaSpec):
        yield from _gqa(spec, model.dim)


def _gqa(spec: GqaSpec, dim: int) -> Parameters:
    if spec.sinks:
        yield "sinks", spec.num_heads, _TP
    queries = spec.q_dim * (2 if spec.gated else 1)
    heads = spec.num_kv_heads
    parts: tuple[tuple[str, int, Sharding], ...] = (
        ("q", queries, _TP),
        ("k", spec.kv_dim, heads),
        ("v", spec.kv_dim, heads),
    )
    for name, width, sharding in parts:
        yield f"{name}.weight", dim * width, sharding
        if spec.bias:
            yield f"{name}.bias", width, sharding
    yield "out.weight", spec.q_dim * dim, _TP
    if spec.bias:
        yield "out.bias", dim, _REPLICATED
    if spec.qk_norm:
        yield "q_norm", spec.head_dim, _REPLICATED
        yield "k_norm", spec.head_dim, _REPLICATED


def _mla(spec: MlaSpec, dim: int) -> Parameters:
    queries = spec.num_heads * spec.qk_dim
    if spec.q_rank is None:
        yield "q", dim * queries, _TP
    else:
        yield "q_down", dim * spec.q_rank, _REPLICATED
        yield "q_norm", spec.q_rank, _REPLICATED
        yield "q_up", spec.q_rank * queries, _TP
    yield "kv_down", dim * (spec.kv_rank + spec.rope_dim), _REPLICATED
    yield "kv_norm", spec.kv_rank, _REPLICATED
    yield "kv_up", spec.kv_rank * spec.num_heads * (spec.nope_dim + spec.v_dim), _TP
    yield "out", spec.num_heads * spec.v_dim * dim, _TP


def _delta(spec: DeltaSpec, dim: int) -> Parameters:
    yield "conv", (2 * spec.keys + spec.values) * spec.conv, _TP
    yield "dt_bias", spec.num_v_heads, _TP
    yield "a_log", spec.num_v_heads, _TP
    yield "qkvz", dim * (2 * spec.keys + 2 * spec.values), _TP
    yield "ba", dim * 2 * spec.num_v_heads, _TP
    yield "norm", spec.v_dim, _REPLICATED
    yield "out", spec.values * dim, _TP


def _mlp(dim: int, hidden: int) -> Parameters:
    for name in ("gate", "up", "down"):
        yield name, dim * hidden, _TP


def _moe(moe: MoeSpec | None, dim: int) -> Parameters:
    if moe is None:
        return
    number, width = moe.num_experts, moe.expert_dim
    yield "router.weight", number * dim, _REPLICATED
    if moe.bias:
        yield "router.bias", number, _REPLICATED
    yield "experts.gate_up", number * 2 * width * dim, _EXPERT
    yield "experts.down", number * dim * width, _EXPERT
    if moe.bias:
        yield "experts.gate_up_bias", number * 2 * width, _EXPERT
        yield "experts.down_bias", number * dim, _EP
    if moe.num_shared:
        for name, elements, sharding in _mlp(dim, moe.shared_width):
            yield f"shared.{name}", elements, sharding
    if moe.shared_gate:
        yield "shared_gate", dim, _REPLICATED
