"""Model FLOPs by the formula behind published TFLOP/s/GPU: causal attention halved, no recompute credit.

Counts are forward FLOPs for one token; training is three times that.
"""

from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass
from functools import lru_cache

from threefold.spec.model import CompressedSpec, DeltaSpec, GqaSpec, Layer, MambaSpec, MlaSpec, ModelSpec, VisionSpec

# Until release 26.06 Megatron counted a gated MLP as two matrices unless its activation was SiLU, and
# ignored sliding windows: GPT-OSS figures before and after do not compare.
OLD_FORMULA_UNTIL = "26.06"


@dataclass(frozen=True, slots=True)
class LayerFlops:
    """Forward FLOPs of one layer for one token, by part."""

    projections: float
    attention: float  # the part that grows with length; the state part of linear mixers
    ffn: float
    shared: float
    router: float

    @property
    def counted(self) -> float:
        """What the formula counts: the router is too small to appear in it."""
        return self.projections + self.attention + self.ffn + self.shared


def old_formula(release: str | None) -> bool:
    return release is not None and release[:1].isdigit() and release < OLD_FORMULA_UNTIL


def padded_vocab(model: ModelSpec, tp: int) -> int:
    step = model.vocab_multiple * tp
    return -(-model.vocab // step) * step


def average_context(window: int | None, seq_len: int) -> float:
    """Keys a query sees on average, twice over: causal attention is counted as half the square."""
    if window is None or window >= seq_len:
        return float(seq_len)
    return 2 * (window - window * (window - 1) / (2 * seq_len))


@lru_cache(maxsize=4096)
def layer_flops(model: ModelSpec, layer: Layer, seq_len: int, old: bool = False) -> LayerFlops:
    h, moe = model.dim, model.moe
    matrices = 3 if model.glu and not (old and model.activation != "silu") else 2
    projections, attention = _mixer(model, layer, seq_len, old)
    projections = max(0.0, projections + 2.0 * model.unlisted / model.num_layers)
    ffn = shared = router = 0.0
    if layer.ffn == "dense":
        ffn = 2.0 * matrices * h * model.dense_dim
    elif layer.ffn == "moe" and moe:
        width = moe.latent_dim or h
        ffn = 2.0 * matrices * width * moe.expert_dim * moe.top_k
        shared = 2.0 * matrices * h * moe.shared_width + (4.0 * h * moe.latent_dim if moe.latent_dim else 0.0)
        router = 2.0 * h * moe.num_experts
    return LayerFlops(projections, attention, ffn, shared, router)


def flops_per_token(model: ModelSpec, seq_len: int, mtp: int, tp: int = 1, release: str | None = None) -> float:
    """Training FLOPs for one token, as `gflops_per_token` of published runs counts them."""
    old = old_formula(release)
    layers = sum(layer_flops(model, layer, seq_len, old).counted * n for layer, n in Counter(model.layers).items())
    depth = sum(layer_flops(model, layer, seq_len, old).counted for layer in model.mtp_depth)
    h = model.dim
    join = 2.0 * (3 * h + 2 * h * h) if model.mamba is None else 0.0  # the formula of hybrids leaves it out
    logits = 2.0 * h * padded_vocab(model, tp)
    return 3.0 * (layers + mtp * (depth + join) + logits * (1 + mtp))


def picture_flops(vision: VisionSpec, dim: int, num_patches: int) -> tuple[float, float]:
    """Forward FLOPs of the encoder and of the projector for one picture: each patch attends to all of the picture."""
    d, joined = vision.dim, vision.dim * vision.merge**2
    embed = 2.0 * 3 * vision.temporal_patch * vision.patch**2 * d
    layer = 2.0 * (4 * d * d + 2 * d * vision.mlp_dim) + 4.0 * d * num_patches
    merger = 2.0 * (joined * joined + joined * dim)
    num_tokens = num_patches / vision.merge**2
    return num_patches * (embed + vision.depth * layer), num_tokens * merger * (1 + len(vision.deepstack))


def picture_training_flops(model: ModelSpec, num_patches: int, frozen: Collection[str]) -> float:
    """Training FLOPs of encoding one picture; a frozen part (`vision`, `projector`) has no backward."""
    if model.vision is None:
        return 0.0
    encoder, projector = picture_flops(model.vision, model.dim, num_patches)
    return encoder * (1 if "vision" in frozen else 3) + projector * (1 if "projector" in frozen else 3)


def _mixer(model: ModelSpec, layer: Layer, seq_len: int, old: bool) -> tuple[float, float]:
    h, spec = model.dim, model.attention_of(layer)
    if isinstance(spec, CompressedSpec):
        projections, attention = _compressed(spec, h, seq_len)
        return projections + _stream_flops(model), attention
    if isinstance(spec, MlaSpec):
        return _mla(spec, h, seq_len)
    if spec is not None:
        return _gqa(spec, h, seq_len, None if old or layer.mixer == "attention" else spec.window)
    if layer.mixer == "delta" and model.delta:
        return _delta(model.delta, h)
    if layer.mixer == "mamba" and model.mamba:
        return _mamba(model.mamba, h)
    return 0.0, 0.0


def _gqa(spec: GqaSpec, h: int, seq_len: int, window: int | None) -> tuple[float, float]:
    q = spec.q_dim
    gate = q if spec.gated else 0
    projections = 2.0 * (h * (q + 2 * spec.kv_dim + gate) + q * h)
    return projections, 2.0 * q * average_context(window, seq_len)


def _compressed(spec: CompressedSpec, h: int, seq_len: int) -> tuple[float, float]:
    """The window and the entries that a query reads, and the scores of the indexer for all entries before it."""
    query = spec.q_rank * (h + spec.q_dim)
    out = spec.out_rank * (spec.q_dim + spec.out_groups * h)
    projections = query + h * (spec.head_dim + 2 * spec.pooled_columns) + out
    context, scores = average_context(spec.window, seq_len), 0.0
    if spec.rate:
        entries = seq_len / spec.rate
        context += entries if spec.indexer is None else min(entries, 2.0 * spec.indexer.top_k)
    if (index := spec.indexer) is not None:
        width, columns = index.num_heads * index.head_dim, index.head_dim * (4 if spec.overlaps else 2)
        projections += spec.q_rank * width + h * (columns + index.num_heads)
        scores = width * seq_len / spec.rate
    return 2.0 * projections, 2.0 * spec.q_dim * context + scores


def _stream_flops(model: ModelSpec) -> float:
    """Weights of the residual streams, their sums and their mixing, before and behind both parts of a layer."""
    streams = model.streams
    return 4.0 * model.stream_dim * (streams.num_weights + 2 + streams.count) if streams else 0.0


def _mla(spec: MlaSpec, h: int, seq_len: int) -> tuple[float, float]:
    heads, d, r, v = spec.num_heads, spec.nope_dim, spec.rope_dim, spec.v_dim
    query = spec.q_rank * (h + heads * (d + r) + 1) if spec.q_rank else h * heads * (d + r)
    projections = query + spec.kv_rank * (h + heads * (d + v) + 1) + h * r + heads * v * h
    context = seq_len if spec.indexer is None else min(seq_len, 2 * spec.indexer.top_k)
    return 2.0 * projections, 2.0 * context * heads * (d + r + v) / 2


def _delta(spec: DeltaSpec, h: int) -> tuple[float, float]:
    q, v, nv = spec.keys, spec.values, spec.num_v_heads
    projections = h * (2 * q + 2 * v + 2 * nv) + h * v
    state = spec.conv * (2 * q + v) + 4 * nv * spec.v_dim**2
    return 2.0 * projections, 2.0 * state


def _mamba(spec: MambaSpec, h: int) -> tuple[float, float]:
    inner = 2 * h  # the formula's own inner width, whatever the head count says
    projections = 2.0 * h * (2 * inner + 2 * spec.num_groups * spec.state_dim + spec.num_heads) + 2.0 * inner * h
    return projections, 7.0 * inner * spec.state_dim
