"""Parameter counts, part by part, from a model's shape, and the parts that names of parameters belong to."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import lru_cache

from threefold.spec.model import (
    CompressedSpec,
    DeltaSpec,
    GqaSpec,
    Layer,
    MambaSpec,
    MlaSpec,
    ModelSpec,
    MoeSpec,
    VisionSpec,
)


@dataclass(frozen=True, slots=True)
class Params:
    """Parameters of a whole model."""

    embedding: int
    head: int  # 0 when tied to the embedding
    mixers: int
    dense: int
    experts: int
    shared: int
    routers: int
    norms: int
    mtp: int
    vision: int
    inactive: int  # routed experts a token does not visit

    @property
    def total(self) -> int:
        """Everything that gradient descent changes, MTP included."""
        parts = (self.embedding, self.head, self.mixers, self.dense, self.experts)
        return sum(parts) + self.shared + self.routers + self.norms + self.mtp + self.vision

    @property
    def main(self) -> int:
        """Without MTP: what most authors call the size."""
        return self.total - self.mtp

    @property
    def active(self) -> int:
        """Parameters one text token meets, embedding included, MTP and vision not."""
        return self.main - self.vision - self.inactive

    @property
    def active_matmul(self) -> int:
        """Active without the input embedding, which is looked up and not multiplied."""
        return self.active - (self.embedding if self.head else 0)


@lru_cache(maxsize=256)
def count_params(model: ModelSpec, mtp_layers: int | None = None) -> Params:
    """Count a model; `mtp_layers` overrides how many MTP depths it is trained with."""
    depths = model.mtp_layers if mtp_layers is None else mtp_layers
    if model.mtp_shared:
        depths = min(depths, 1)
    layers = model.layers
    moe_layers = sum(layer.ffn == "moe" for layer in layers)
    moe = model.moe
    table = model.vocab * model.dim
    return Params(
        embedding=table,
        head=0 if model.tied else table + (model.vocab if model.head_bias else 0),
        mixers=sum(mixer_params(model, layer) for layer in layers) + model.unlisted % model.num_layers,
        dense=sum(layer.ffn == "dense" for layer in layers) * dense_params(model),
        experts=moe_layers * moe.num_experts * expert_params(model) if moe else 0,
        shared=moe_layers * shared_params(model),
        routers=moe_layers * router_params(model),
        norms=sum(norm_params(model, layer) for layer in layers) + final_norm_params(model),
        mtp=depths * mtp_params(model),
        vision=vision_params(model.vision, model.dim) if model.vision else 0,
        inactive=moe_layers * (moe.num_experts - moe.top_k) * expert_params(model) if moe else 0,
    )


def layer_params(model: ModelSpec, layer: Layer) -> int:
    """One layer with all its experts."""
    ffn = 0
    if layer.ffn == "dense":
        ffn = dense_params(model)
    elif layer.ffn == "moe" and model.moe:
        ffn = model.moe.num_experts * expert_params(model) + shared_params(model) + router_params(model)
    return mixer_params(model, layer) + ffn + norm_params(model, layer)


def mixer_params(model: ModelSpec, layer: Layer) -> int:
    """The mixer of one layer, and the layer's share of what no part names."""
    return _listed_mixer(model, layer) + model.unlisted // model.num_layers


def _listed_mixer(model: ModelSpec, layer: Layer) -> int:
    attention = model.attention_of(layer)
    if isinstance(attention, CompressedSpec):
        return _compressed(attention, model.dim)
    if attention is not None:
        return _mla(attention, model.dim) if isinstance(attention, MlaSpec) else _gqa(attention, model.dim)
    if layer.mixer == "delta" and model.delta:
        return _delta(model.delta, model.dim)
    if layer.mixer == "mamba" and model.mamba:
        return _mamba(model.mamba, model.dim)
    return 0


def norm_params(model: ModelSpec, layer: Layer) -> int:
    """One norm before the mixer and one before the feed-forward part; Gemma 4's experts have five."""
    num_of_ffn = 5 if layer.ffn == "moe" and _moe(model).own_norms else int(layer.ffn != "none")
    return _norm_width(model) * ((layer.mixer != "none") + num_of_ffn) + stream_params(model)


def stream_params(model: ModelSpec) -> int:
    """What connects the parts of a layer to several residual streams: weights, biases and three factors each."""
    if model.streams is None:
        return 0
    return 2 * (model.streams.num_weights * (model.stream_dim + 1) + 3)


def final_norm_params(model: ModelSpec) -> int:
    """The final norm, and the sum of the residual streams before it."""
    streams = model.streams
    return _norm_width(model) + (streams.count * (model.stream_dim + 1) + 1 if streams else 0)


def _norm_width(model: ModelSpec) -> int:
    return model.dim * (2 if model.norm == "layer" else 1)


def dense_params(model: ModelSpec) -> int:
    return _mlp(model, model.dim, model.dense_dim)


def expert_params(model: ModelSpec) -> int:
    """One routed expert."""
    moe = _moe(model)
    width = moe.latent_dim or model.dim
    bias = (2 if model.glu else 1) * moe.expert_dim + width if moe.bias else 0
    return _mlp(model, width, moe.expert_dim) + bias


def shared_params(model: ModelSpec) -> int:
    """All shared experts of a layer, with their gate and the latent projections where there are any."""
    moe = _moe(model)
    latent = 2 * model.dim * moe.latent_dim if moe.latent_dim else 0
    gate = model.dim if moe.shared_gate else 0
    return _mlp(model, model.dim, moe.shared_width) + gate + latent


def router_params(model: ModelSpec) -> int:
    """The routing matrix and Gemma 4's scales. The aux-loss-free bias is not counted: no gradient reaches it."""
    moe = _moe(model)
    scales = (model.dim if moe.own_norms else 0) + (moe.num_experts if moe.expert_scale else 0)
    return moe.num_experts * (model.dim + (1 if moe.bias else 0)) + scales


def mtp_params(model: ModelSpec) -> int:
    """One MTP depth: its layers, the 2h x h join of hidden state and embedding, three norms."""
    layers = sum(layer_params(model, layer) for layer in model.mtp_depth)
    return layers + 2 * model.dim**2 + 3 * model.dim


def vision_params(vision: VisionSpec, out_dim: int) -> int:
    """Encoder, position table, patch embedding, and one merger for the output and each deepstack tap."""
    d, wide = vision.dim, vision.dim * vision.merge**2
    patch = 3 * vision.temporal_patch * vision.patch**2 * d + d
    attention = d * 3 * d + 3 * d + d * d + d
    mlp = d * vision.mlp_dim + vision.mlp_dim + vision.mlp_dim * d + d
    block = attention + mlp + 4 * d
    fcs = wide * wide + wide + wide * out_dim + out_dim
    mergers = (fcs + 2 * d) + len(vision.deepstack) * (fcs + 2 * wide)
    return patch + vision.num_positions * d + vision.depth * block + mergers


def _moe(model: ModelSpec) -> MoeSpec:
    return model.moe or MoeSpec(num_experts=0, top_k=0, expert_dim=0)


def _mlp(model: ModelSpec, dim: int, hidden: int) -> int:
    return (3 if model.glu else 2) * dim * hidden


def _gqa(spec: GqaSpec, dim: int) -> int:
    q_out = spec.q_dim * (2 if spec.gated else 1)
    kv_out = spec.kv_dim * (1 if spec.shared_kv else 2)
    bias = (q_out + kv_out if spec.bias else 0) + (dim if spec.has_out_bias else 0)
    widths = spec.q_dim + spec.kv_dim if spec.qk_norm_over == "projection" else 2 * spec.head_dim
    norms = widths if spec.qk_norm else 0
    sinks = spec.num_heads if spec.sinks else 0
    out_norm = dim if spec.out_norm else 0
    return dim * (q_out + kv_out) + spec.q_dim * dim + bias + norms + out_norm + sinks


def _compressed(spec: CompressedSpec, dim: int) -> int:
    query = dim * spec.q_rank + spec.q_rank + spec.q_rank * spec.q_dim
    key = dim * spec.head_dim + spec.head_dim
    out = spec.q_dim * spec.out_rank + spec.out_groups * spec.out_rank * dim
    index = spec.indexer
    of_indexer = dim * index.num_heads + spec.q_rank * index.num_heads * index.head_dim if index else 0
    return query + key + out + spec.num_heads + _poolings(spec, dim) + of_indexer


def _poolings(spec: CompressedSpec, dim: int) -> int:
    """What makes entries, and those of the indexer: two projections, a bias for each token of a window, and a norm."""
    heads = [spec.head_dim, *([spec.indexer.head_dim] if spec.indexer else [])] if spec.rate else []
    series = 2 if spec.overlaps else 1
    return sum((2 * dim + spec.rate) * series * head + head for head in heads)


def _mla(spec: MlaSpec, dim: int) -> int:
    heads_qk = spec.num_heads * spec.qk_dim
    if spec.q_rank:
        query = dim * spec.q_rank + spec.q_rank + spec.q_rank * heads_qk
    else:
        query = dim * heads_qk
    down = dim * (spec.kv_rank + spec.rope_dim) + spec.kv_rank
    up = spec.kv_rank * spec.num_heads * (spec.nope_dim + spec.v_dim)
    out = spec.num_heads * spec.v_dim * dim
    return query + down + up + out + _indexer(spec, dim)


def _indexer(spec: MlaSpec, dim: int) -> int:
    index = spec.indexer
    if not index:
        return 0
    query = (spec.q_rank or dim) * index.num_heads * index.head_dim
    return query + dim * index.head_dim + 2 * index.head_dim + dim * index.num_heads


def _delta(spec: DeltaSpec, dim: int) -> int:
    channels = 2 * spec.keys + spec.values
    projections = dim * (channels + spec.values + 2 * spec.num_v_heads) + spec.values * dim
    return projections + channels * spec.conv + 2 * spec.num_v_heads + spec.v_dim


def _mamba(spec: MambaSpec, dim: int) -> int:
    channels = spec.inner_dim + 2 * spec.num_groups * spec.state_dim
    projections = dim * (spec.inner_dim + channels + spec.num_heads) + spec.inner_dim * dim
    return projections + channels * (spec.conv + 1) + 3 * spec.num_heads + spec.inner_dim


PARTS = ("vision", "projector", "language")
_PREFIXES = {"vision.": "vision", "projector.": "projector"}  # all other parameters are the language model's


def part_of(name: str) -> str:
    """The part of a model that a parameter belongs to: `vision`, `projector` or `language`."""
    return next((part for prefix, part in _PREFIXES.items() if name.startswith(prefix)), "language")


def freezes(entry: str, name: str) -> bool:
    """Whether one entry of `job.freeze`, the name of a part or a pattern of names, freezes a parameter."""
    return part_of(name) == entry if entry in PARTS else fnmatchcase(name, entry)


def is_frozen(name: str, freeze: Iterable[str]) -> bool:
    """Whether any entry of `job.freeze` freezes a parameter. Those of an indexer never train: its choice of keys has no
    gradient."""
    return ".indexer." in name or any(freezes(entry, name) for entry in freeze)


def idle_patterns(freeze: Iterable[str], names: Sequence[str]) -> list[str]:
    """The patterns of `job.freeze` that freeze none of these parameters."""
    return [entry for entry in freeze if entry not in PARTS and not any(freezes(entry, name) for name in names)]
