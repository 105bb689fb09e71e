"""The parameters that our own engine holds on a rank, in order of registration, and the buckets of its ZeRO-1.

The order decides which parameters share a bucket, and so how many collectives there are (`traffic/threefold/zero1.py`)
and which tensors a rank owns (`memory/threefold/timelines/optimizer_step.py`: Muon, and optimizer states on the host).
An entry reads `LocalParameter("layers.0.ffn.experts.down", shape=(128, 2048, 768), elements=12582912, group="edp",
num_copies=8)`.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from math import prod
from typing import NamedTuple

from threefold.cost.vision import vision_parameters
from threefold.layout.degrees import Layout
from threefold.layout.stages import Chunk, balance, chunk_rank
from threefold.plan.plan import Plan
from threefold.spec.model import CompressedSpec, DeltaSpec, GqaSpec, Layer, MambaSpec, MlaSpec, ModelSpec, MoeSpec
from threefold.spec.params import is_frozen, part_of

# How a parameter is sharded: not at all, over tp, over tp by rows of the vocabulary, over the expert grid, over ep
# alone. A number means over tp, by so many heads.
_REPLICATED, _TP, _VOCAB, _EXPERT, _EP = "replicated", "tp", "vocab", "expert", "ep"
Sharding = str | int
Shape = tuple[int, ...]
Parameters = Iterator[tuple[str, Shape, Sharding]]  # name, shape of the whole parameter, how it is sharded
Bucket = tuple[str, int, list["LocalParameter"]]  # group, ranks of the group, parameters
BUCKET_ELEMENTS = 40_000_000
_LEFT_TO_ADAMW = ("embed", "head", "conv")  # words in the names of matrices that Muon does not update


@dataclass(frozen=True, slots=True)
class LocalParameter:
    """The shard of one parameter on one rank."""

    name: str
    shape: Shape  # of the whole parameter
    elements: int  # of the shard
    group: str  # the group whose ranks hold the same shard
    num_copies: int  # ranks of the group
    num_shards: int = 1  # ranks of tp or etp that hold different shards of each matrix
    is_shared: bool = False  # whether other pipeline ranks hold it too
    is_frozen: bool = False  # whether it has neither a gradient nor optimizer states

    @property
    def is_expert(self) -> bool:
        return self.group.startswith("edp")

    @property
    def uses_muon(self) -> bool:
        """Whether Muon updates it where the plan has that optimizer: a matrix, or a stack of matrices."""
        is_matrix = len(self.shape) > 1 and not self.name.endswith("bias")
        return is_matrix and not any(word in self.name for word in _LEFT_TO_ADAMW)

    @property
    def num_matrices(self) -> int:
        """Matrices of a stack on this rank."""
        return max(1, self.elements * self.num_shards // (self.shape[-2] * self.shape[-1]))


def stage_parameters(plan: Plan, vocab_rows: int) -> Sequence[Sequence[LocalParameter]]:
    """The parameters of each pipeline rank, where a rank has `vocab_rows` rows of the vocabulary."""
    return _stage_parameters(_Stages(plan.model, plan.layout, plan.chunks, plan.mtp, vocab_rows, training_of(plan)))


def first_vocab_rows(plan: Plan) -> int:
    """Rows of the vocabulary on the first rank of a TP group, which has the most."""
    return -(-plan.model.vocab // plan.layout.tp)


def whole_parameters(plan: Plan) -> Sequence[LocalParameter]:
    """The parameters of the whole model, whatever the layout; those of an image encoder are not among them."""
    return language_parameters(plan.model, plan.mtp, training_of(plan))


def parameters_of_all_parts(plan: Plan) -> Sequence[LocalParameter]:
    """The parameters of the whole model with its image encoder and projector, whatever the layout."""
    return _whole_parameters(plan.model, plan.mtp, training_of(plan))


@lru_cache(maxsize=64)
def language_parameters(model: ModelSpec, num_depths: int, training: "Training") -> tuple[LocalParameter, ...]:
    """The parameters of the language model, whatever the layout."""
    every = _whole_parameters(model, num_depths, training)
    return tuple(parameter for parameter in every if part_of(parameter.name) == "language")


def _whole_parameters(model: ModelSpec, num_depths: int, training: "Training") -> Sequence[LocalParameter]:
    chunks = balance(model.num_layers, 1, num_depths)
    return _stage_parameters(_Stages(model, Layout(), chunks, num_depths, model.vocab, training))[0]


def training_of(plan: Plan) -> "Training":
    return Training(plan.job.freeze, plan.job.lora_rank, plan.job.lora_targets)


def trained_parameters(parameters: Sequence[LocalParameter]) -> list[LocalParameter]:
    """Those that have gradients and optimizer states."""
    return [parameter for parameter in parameters if not parameter.is_frozen]


@dataclass(frozen=True, slots=True)
class Training:
    """What a job says of the parameters that train."""

    freeze: tuple[str, ...]
    lora_rank: int | None
    lora_targets: tuple[str, ...]

    def freezes(self, name: str) -> bool:
        is_base = self.lora_rank is not None and not name.endswith(("lora_a", "lora_b"))
        return is_base or is_frozen(name, self.freeze)


class _Stages(NamedTuple):
    """What the parameters of the pipeline ranks depend on."""

    model: ModelSpec
    layout: Layout
    chunks: tuple[Chunk, ...]
    num_depths: int
    vocab_rows: int
    training: Training


@lru_cache(maxsize=64)
def _stage_parameters(stages: _Stages) -> Sequence[Sequence[LocalParameter]]:
    model, layout, chunks, num_depths, vocab_rows, training = stages
    held: list[dict[str, LocalParameter]] = [{} for _ in range(layout.pp)]
    v_shaped = layout.pipeline_schedule == "dualpipev"
    for number in range(len(chunks)):
        stage = held[chunk_rank(number, layout.pp, v_shaped)]
        for name, shape, sharding in _with_adapters(_chunk(model, chunks, num_depths, number), training):
            local = _local_parameter(model, layout, (name, shape, sharding), vocab_rows)
            stage.setdefault(name, replace(local, is_frozen=True) if training.freezes(name) else local)
    num_stages = {name: sum(name in stage for stage in held) for stage in held for name in stage}
    return [[_with_stages(parameter, num_stages[parameter.name]) for parameter in stage.values()] for stage in held]


def fill_buckets(parameters: Sequence[LocalParameter]) -> list[Bucket]:
    """Buckets from the last parameter that trains to the first, of parameters with the same copies. A parameter that
    other pipeline stages share has a bucket of its own."""
    full: list[Bucket] = []
    filling: dict[tuple[int, bool], list[LocalParameter]] = {}
    elements: dict[tuple[int, bool], int] = {}
    names: dict[tuple[int, bool], str] = {}
    for parameter in reversed(trained_parameters(parameters)):
        if parameter.is_shared:
            full.append((parameter.group, parameter.num_copies, [parameter]))
            continue
        # Groups of one grid contain each other, so that groups of one size are the same ranks.
        key = parameter.num_copies, parameter.is_expert
        names[key] = min(names.get(key, parameter.group), parameter.group, key=len)
        filling.setdefault(key, []).append(parameter)
        elements[key] = elements.get(key, 0) + parameter.elements
        if elements[key] >= BUCKET_ELEMENTS:
            full.append((names[key], parameter.num_copies, filling.pop(key)))
            elements[key] = 0
    return full + [(names[key], key[0], bucket) for key, bucket in filling.items()]


def owned_parts(bucket: Sequence[LocalParameter]) -> list[float]:
    """Elements that the first rank owns of each parameter of a bucket: its equal part is a run of them."""
    left, parts = sum(one.elements for one in bucket) / bucket[0].num_copies, []
    for parameter in bucket:
        part = min(left, parameter.elements)
        if part <= 0:
            break
        parts.append(part)
        left -= part
    return parts


def updated_sizes(plan: Plan) -> Sequence[Sequence[float]]:
    """Elements of each tensor that the optimizer updates on the first rank of each stage."""
    is_in_buckets = plan.knobs.data_parallel == "zero1" and plan.layout.gpus > 1
    stages = _Stages(plan.model, plan.layout, plan.chunks, plan.mtp, first_vocab_rows(plan), training_of(plan))
    return _updated_sizes(stages, is_in_buckets)


@lru_cache(maxsize=64)
def _updated_sizes(stages: _Stages, is_in_buckets: bool) -> Sequence[Sequence[float]]:
    by_stage = _stage_parameters(stages)
    if is_in_buckets:
        return [[part for _, _, bucket in fill_buckets(stage) for part in owned_parts(bucket)] for stage in by_stage]
    return [
        [one.elements / max(1, one.num_copies // stages.layout.replicate) for one in trained_parameters(stage)]
        for stage in by_stage
    ]


def _with_stages(parameter: LocalParameter, num_stages: int) -> LocalParameter:
    """The parameter with the group of all pipeline ranks that hold it."""
    if num_stages == 1:
        return parameter
    group, num_copies = f"{parameter.group} x pp", parameter.num_copies * num_stages
    return replace(parameter, group=group, num_copies=num_copies, is_shared=True)


def _local_parameter(
    model: ModelSpec, layout: Layout, parameter: tuple[str, Shape, Sharding], vocab_rows: int
) -> LocalParameter:
    """The shard of a parameter on a rank, and the group that holds the same shard."""
    name, shape, sharding = parameter
    dp, elements = layout.dp * layout.cp, prod(shape)
    if sharding == _EXPERT:
        return LocalParameter(name, shape, elements // layout.ep // layout.etp, "edp", layout.edp, layout.etp)
    if sharding == _EP:
        return LocalParameter(name, shape, elements // layout.ep, "edp x etp", layout.edp * layout.etp)
    if sharding == _REPLICATED or layout.tp == 1:
        return LocalParameter(name, shape, elements, "dp x cp x tp", dp * layout.tp)
    if sharding == _VOCAB:
        return LocalParameter(name, shape, elements // model.vocab * vocab_rows, "dp x cp", dp, layout.tp)
    if isinstance(sharding, int) and sharding < layout.tp:  # neighboring ranks hold the same head
        return LocalParameter(name, shape, elements // sharding, "dp x cp x kv", dp * (layout.tp // sharding), sharding)
    return LocalParameter(name, shape, elements // layout.tp, "dp x cp", dp, layout.tp)


# The linears of a mixer that get LoRA adapters; those whose columns tensor parallelism shards.
_ADAPTED = ("q", "k", "v", "kv", "q_down", "q_up", "kv_down", "kv_up", "qkvz", "out")
_SHARDED_BY_COLUMNS = ("out", "down")


def lora_target(name: str) -> str | None:
    """The entry of `job.lora_targets` that gives a weight an adapter; None for one that never has any."""
    parts = name.split(".")
    if parts[0] != "layers":
        return None
    if parts[2:] in (["ffn", "experts", "gate_up"], ["ffn", "experts", "down"]):
        return "experts"
    if parts[-1] != "weight":
        return None
    if parts[2] == "mixer" and parts[3] in _ADAPTED:
        return "attention"
    is_linear = parts[-2] in ("gate", "up", "down")
    return {("ffn",): "mlp", ("ffn", "shared"): "shared_experts"}.get(tuple(parts[2:-2])) if is_linear else None


def _with_adapters(parameters: Parameters, training: Training) -> Parameters:
    """The parameters, and those of each adapter behind the module that it belongs to."""
    waiting: list[tuple[str, Shape, Sharding]] = []
    for name, shape, sharding in parameters:
        owner = name.rpartition(".")[0]
        if waiting and waiting[0][0].rpartition(".")[0] != owner:
            yield from waiting
            waiting = []
        yield name, shape, sharding
        if training.lora_rank is not None and lora_target(name) in training.lora_targets:
            waiting += _adapter(name, shape, sharding, training.lora_rank)
    yield from waiting


def _adapter(name: str, shape: Shape, sharding: Sharding, rank: int) -> Parameters:
    """A and B of a weight: the one that shares the sharded dim is sharded as the weight is."""
    *stack, rows, columns = shape
    if stack:
        copied, is_by_columns, path = _EP, name.endswith("down"), f"{name}_"
    else:
        path = name.removesuffix("weight")
        copied, is_by_columns = _REPLICATED, path.split(".")[-2] in _SHARDED_BY_COLUMNS
    yield f"{path}lora_a", (*stack, rank, columns), sharding if is_by_columns else copied
    yield f"{path}lora_b", (*stack, rows, rank), copied if is_by_columns else sharding


def _chunk(model: ModelSpec, chunks: tuple[Chunk, ...], num_depths: int, number: int) -> Parameters:
    """Parameters of a virtual stage."""
    chunk = chunks[number]
    first_end = next(n for n, c in enumerate(chunks) if c.mtp or c.loss)
    if chunk.embedding or chunk.mtp or (chunk.loss and model.tied):
        yield "embed.weight", (model.vocab, model.dim), _VOCAB
    if chunk.embedding and model.vision is not None:
        yield from ((name, shape, _REPLICATED) for name, shape in vision_parameters(model.vision, model.dim))
    for layer in chunk.layers:
        yield from _layer(model, model.layers[layer], f"layers.{layer}")
    if number == first_end:
        yield from _norm(model, "norm")
        if model.streams is not None:
            yield from _streams(model, "norm.streams", model.streams.count, 1)
    if chunk.loss and not model.tied:
        yield "head.weight", (model.vocab, model.dim), _VOCAB
        if model.head_bias:
            yield "head.bias", (model.vocab,), _VOCAB
    first = sum(c.mtp for c in chunks[:number])
    own_depths = min(num_depths, 1) if model.mtp_shared else num_depths
    for depth in sorted({min(depth, own_depths - 1) for depth in range(first, first + chunk.mtp)}):
        yield from _mtp_depth(model, f"mtp.{depth}")


def _mtp_depth(model: ModelSpec, path: str) -> Parameters:
    yield from _norm(model, f"{path}.embed_norm")
    yield from _norm(model, f"{path}.hidden_norm")
    yield f"{path}.join.weight", (model.dim, 2 * model.dim), _REPLICATED
    for number, layer in enumerate(model.mtp_depth):
        yield from _layer(model, layer, f"{path}.layers.{number}")
    yield from _norm(model, f"{path}.norm")


def _norm(model: ModelSpec, path: str) -> Parameters:
    """A norm of the residual stream."""
    for name in ("weight", "bias") if model.norm == "layer" else ("weight",):
        yield f"{path}.{name}", (model.dim,), _REPLICATED


def _layer(model: ModelSpec, layer: Layer, path: str) -> Parameters:
    if layer.mixer != "none":
        yield from _norm(model, f"{path}.mixer_norm")
    for name, shape, sharding in _mixer(model, layer):
        yield f"{path}.mixer.{name}", shape, sharding
    if layer.ffn == "none":
        return
    if not (layer.ffn == "moe" and model.moe and model.moe.own_norms):
        yield from _norm(model, f"{path}.ffn_norm")
    ffn = _mlp(model, model.dense_dim) if layer.ffn == "dense" else _moe(model, model.moe, model.dim)
    for name, shape, sharding in ffn:
        yield f"{path}.ffn.{name}", shape, sharding
    if model.streams is not None:
        for part in ("mixer_streams", "ffn_streams"):
            yield from _streams(model, f"{path}.{part}", model.streams.num_weights, 3)


def _streams(model: ModelSpec, path: str, count: int, kinds: int) -> Parameters:
    for name, shape in (("weight", (count, model.stream_dim)), ("bias", (count,)), ("kind_scale", (kinds,))):
        yield f"{path}.{name}", shape, _REPLICATED


def _mixer(model: ModelSpec, layer: Layer) -> Parameters:
    spec = model.attention_of(layer)
    if layer.mixer == "none":
        return
    if layer.mixer == "mamba" and model.mamba:
        yield from _mamba(model.mamba, model.dim)
    elif layer.mixer == "delta" and model.delta:
        yield from _delta(model.delta, model.dim)
    elif isinstance(spec, MlaSpec):
        yield from _mla(spec, model.dim)
    elif isinstance(spec, CompressedSpec):
        yield from _compressed(spec, model.dim)
    elif isinstance(spec, GqaSpec):
        yield from _gqa(spec, model.dim)


def _gqa(spec: GqaSpec, dim: int) -> Parameters:
    if spec.sinks:
        yield "sinks", (spec.num_heads,), _TP
    queries = spec.q_dim * (2 if spec.gated else 1)
    heads = spec.num_kv_heads
    parts: tuple[tuple[str, int, Sharding], ...] = (
        ("q", queries, _TP),
        ("k", spec.kv_dim, heads),
        ("v", spec.kv_dim, heads),
    )
    for name, width, sharding in parts[:2] if spec.shared_kv else parts:
        yield f"{name}.weight", (width, dim), sharding
        if spec.bias:
            yield f"{name}.bias", (width,), sharding
    yield "out.weight", (dim, spec.q_dim), _TP
    if spec.has_out_bias:
        yield "out.bias", (dim,), _REPLICATED
    if spec.qk_norm and spec.qk_norm_over == "projection":
        yield "q_norm.weight", (spec.q_dim,), _TP
        yield "k_norm.weight", (spec.kv_dim,), heads
    elif spec.qk_norm:
        yield "q_norm.weight", (spec.head_dim,), _REPLICATED
        yield "k_norm.weight", (spec.head_dim,), _REPLICATED
    if spec.out_norm:
        yield "out_norm.weight", (dim,), _REPLICATED


def _compressed(spec: CompressedSpec, dim: int) -> Parameters:
    yield "group_down", (spec.out_groups * spec.out_rank, spec.q_dim // spec.out_groups), _TP
    yield "sinks", (spec.num_heads,), _TP
    yield "q_down.weight", (spec.q_rank, dim), _REPLICATED
    yield "q_norm.weight", (spec.q_rank,), _REPLICATED
    yield "q_up.weight", (spec.q_dim, spec.q_rank), _TP
    yield "kv.weight", (spec.head_dim, dim), _REPLICATED
    yield "kv_norm.weight", (spec.head_dim,), _REPLICATED
    yield "out.weight", (dim, spec.out_groups * spec.out_rank), _TP
    if spec.rate:
        yield from _pooling(spec, spec.head_dim, dim, "pooling")
    if spec.indexer is not None:
        index = spec.indexer
        yield from _pooling(spec, index.head_dim, dim, "indexer.pooling")
        yield "indexer.q.weight", (index.num_heads * index.head_dim, spec.q_rank), _REPLICATED
        yield "indexer.weight.weight", (index.num_heads, dim), _REPLICATED


def _pooling(spec: CompressedSpec, head_dim: int, dim: int, path: str) -> Parameters:
    columns = head_dim * (2 if spec.overlaps else 1)
    yield f"{path}.position_bias", (spec.rate, columns), _REPLICATED
    yield f"{path}.kv.weight", (columns, dim), _REPLICATED
    yield f"{path}.gate.weight", (columns, dim), _REPLICATED
    yield f"{path}.norm.weight", (head_dim,), _REPLICATED


def _mla(spec: MlaSpec, dim: int) -> Parameters:
    queries = spec.num_heads * spec.qk_dim
    if spec.q_rank is None:
        yield "q.weight", (queries, dim), _TP
    else:
        yield "q_down.weight", (spec.q_rank, dim), _REPLICATED
        yield "q_norm.weight", (spec.q_rank,), _REPLICATED
        yield "q_up.weight", (queries, spec.q_rank), _TP
    yield "kv_down.weight", (spec.kv_rank + spec.rope_dim, dim), _REPLICATED
    yield "kv_norm.weight", (spec.kv_rank,), _REPLICATED
    yield "kv_up.weight", (spec.num_heads * (spec.nope_dim + spec.v_dim), spec.kv_rank), _TP
    yield "out.weight", (dim, spec.num_heads * spec.v_dim), _TP
    if spec.indexer is not None:
        index, rank = spec.indexer, spec.q_rank or dim
        yield "indexer.q.weight", (index.num_heads * index.head_dim, rank), _REPLICATED
        yield "indexer.k.weight", (index.head_dim, dim), _REPLICATED
        yield "indexer.k_norm.weight", (index.head_dim,), _REPLICATED
        yield "indexer.k_norm.bias", (index.head_dim,), _REPLICATED
        yield "indexer.weight.weight", (index.num_heads, dim), _REPLICATED


def _delta(spec: DeltaSpec, dim: int) -> Parameters:
    yield "conv", (2 * spec.keys + spec.values, spec.conv), _TP
    yield "dt_bias", (spec.num_v_heads,), _TP
    yield "a_log", (spec.num_v_heads,), _TP
    yield "qkvz.weight", (2 * spec.keys + 2 * spec.values, dim), _TP
    yield "ba.weight", (2 * spec.num_v_heads, dim), _TP
    yield "norm.weight", (spec.v_dim,), _REPLICATED
    yield "out.weight", (dim, spec.values), _TP


def _mamba(spec: MambaSpec, dim: int) -> Parameters:
    yield "conv", (spec.conv_dim, spec.conv), _TP
    yield "conv_bias", (spec.conv_dim,), _TP
    for name in ("dt_bias", "a_log", "skip"):
        yield name, (spec.num_heads,), _TP
    yield "in_proj.weight", (spec.projected_dim, dim), _TP
    yield "norm.weight", (spec.inner_dim,), _TP
    yield "out.weight", (dim, spec.inner_dim), _TP


def _mlp(model: ModelSpec, hidden: int) -> Parameters:
    for name, shape in (("gate", (hidden, model.dim)), ("up", (hidden, model.dim)), ("down", (model.dim, hidden))):
        if model.glu or name != "gate":
            yield f"{name}.weight", shape, _TP


def _moe(model: ModelSpec, moe: MoeSpec | None, dim: int) -> Parameters:
    if moe is None:
        return
    number, width, num_fc1 = moe.num_experts, moe.expert_dim, 2 if model.glu else 1
    scales, norms = ("routed_scale", "shared_scale"), ("routed_norm.weight", "shared_norm.weight", "out_norm.weight")
    yield from ((name, (dim,), _REPLICATED) for name in scales if moe.own_norms)
    yield "router.weight", (number, dim), _REPLICATED
    if moe.bias:
        yield "router.bias", (number,), _REPLICATED
    if moe.own_norms:
        yield "router.input_scale", (dim,), _REPLICATED
    if moe.expert_scale:
        yield "router.expert_scale", (number,), _REPLICATED
    yield "experts.gate_up", (number, num_fc1 * width, dim), _EXPERT
    yield "experts.down", (number, dim, width), _EXPERT
    if moe.bias:
        yield "experts.gate_up_bias", (number, num_fc1 * width), _EXPERT
        yield "experts.down_bias", (number, dim), _EP
    if moe.num_shared:
        for name, shape, sharding in _mlp(model, moe.shared_width):
            yield f"shared.{name}", shape, sharding
    if moe.shared_gate:
        yield "shared_gate.weight", (1, dim), _REPLICATED
    yield from ((name, (dim,), _REPLICATED) for name in norms if moe.own_norms)
