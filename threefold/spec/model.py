"""What a model is: its shape as published, and nothing about how it is run."""

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Literal

Mixer = Literal["attention", "window", "pooled", "delta", "mamba", "none"]
Ffn = Literal["dense", "moe", "none"]
ATTENTION_MIXERS = ("attention", "window", "pooled")


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """How rotary frequencies are stretched to a longer context. The engine runs those of `ENGINE_ROPE_SCALING`.

    The frequencies of `dynamic` and `longrope` depend on the length of the longest document in a microbatch. Those of
    `ntk_alpha` (Hunyuan) do not: `factor`, which its configurations call alpha, stretches the base once and for all.
    """

    factor: float
    original_len: int  # context the unstretched frequencies were trained for
    kind: str = "yarn"
    beta_fast: float = 32.0  # dimensions that turn more often than this within original_len are left alone
    beta_slow: float = 1.0  # those that turn less often are divided by factor; between, a ramp
    attention_factor: float | None = None  # on cos and sin; None: from the factor and the two mscales
    mscale: float | None = None
    mscale_all_dim: float | None = None  # DeepSeek also scales the attention logits by it
    truncate: bool = True  # the ramp starts and ends at whole dimensions
    low_freq_factor: float = 1.0  # of llama3: wavelengths above original_len / this are multiplied by factor
    high_freq_factor: float = 4.0  # those below original_len / this are left alone; between, a ramp
    short_factor: tuple[float, ...] = ()  # of longrope: what each frequency is divided by, up to original_len
    long_factor: tuple[float, ...] = ()  # and beyond it
    turning_fraction: float = 1.0  # of proportional: the part of the frequencies, from the first on, that is not zero

    @property
    def depends_on_length(self) -> bool:
        """Whether frequencies depend on the length of the text."""
        return self.kind in ("dynamic", "longrope")


@dataclass(frozen=True, slots=True)
class GqaSpec:
    """Grouped-query attention."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    qk_norm: bool = False
    v_norm: bool = False  # an RMS norm of each head of values, without weights (Gemma 4)
    out_norm: bool = False  # a norm of what attention adds to the residual stream (Gemma 4)
    qk_norm_over: Literal["head", "projection"] = "head"  # one norm of all heads together: OLMoE, MiniMax-M2
    norm_after_rope: bool = False  # norms of queries and keys behind the rotation (Hunyuan), which else comes last
    bias: bool = False  # on q, k, v and the output projection
    out_bias: bool = True  # where the others have a bias, the output projection has one too
    clip_qkv: float | None = None  # queries, keys and values are clipped to this size, before the rotation (OLMoE)
    scale: float | None = None  # of the attention logits; None: 1 / sqrt(head_dim)
    out_scale: float = 1.0  # of what attention adds to the residual stream (Granite)
    sinks: bool = False  # one learnt logit per head that takes probability and gives no value
    gated: bool = False  # the query projection also yields a sigmoid gate on the output
    shared_kv: bool = False  # keys serve as values: one projection for both
    window: int | None = None
    use_rope: bool = True  # False: no rotary positions, as between Mamba layers
    rope_theta: float = 10_000.0
    rope_fraction: float = 1.0
    rope_scaling: RopeScaling | None = None
    rope_pairs: bool = False  # neighboring dimensions turn together, not the two halves
    # Interleaved multimodal rotary positions: how many frequencies turn by time, height and width. Empty: one position.
    rope_sections: tuple[int, ...] = ()

    @property
    def rope_dim(self) -> int:
        """Rotated dims of a head."""
        return int(self.head_dim * self.rope_fraction) if self.use_rope else 0

    @property
    def has_out_bias(self) -> bool:
        return self.bias and self.out_bias

    @property
    def logit_scale(self) -> float:
        """What the products of queries and keys are multiplied by."""
        return float(self.head_dim**-0.5) if self.scale is None else self.scale

    @property
    def q_dim(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def kv_dim(self) -> int:
        return self.num_kv_heads * self.head_dim


@dataclass(frozen=True, slots=True)
class IndexerSpec:
    """The small scorer of sparse attention that picks which keys a query reads."""

    num_heads: int
    head_dim: int
    top_k: int
    rope_pairs: bool = False  # neighboring dimensions turn together, not the two halves
    is_reused: bool = False  # some layers have no indexer and read what one of a layer before them chose


@dataclass(frozen=True, slots=True)
class CompressedSpec(GqaSpec):
    """Attention over the last tokens and over entries that each stand for several tokens (DeepSeek-V4).

    All heads share one key, which also serves as value. Queries and outputs pass through low-rank projections; that of
    the outputs is block-diagonal, by groups of heads. The last dims of a head turn, those of the outputs turn back.
    """

    q_rank: int = 0
    out_groups: int = 1
    out_rank: int = 0  # of each group
    rate: int = 0  # tokens of an entry; 0: no entries, the window alone
    overlaps: bool = False  # an entry also reads the tokens of the one before it, by columns of their own
    indexer: IndexerSpec | None = None  # chooses the entries that a query reads; None: all before it

    @property
    def pooled_columns(self) -> int:
        """Columns of the projections from which entries are pooled."""
        return self.head_dim * (2 if self.overlaps else 1) if self.rate else 0


@dataclass(frozen=True, slots=True)
class MlaSpec:
    """Multi-head latent attention: queries and keys/values pass through low-rank projections."""

    num_heads: int
    q_rank: int | None
    kv_rank: int
    nope_dim: int
    rope_dim: int
    v_dim: int
    indexer: IndexerSpec | None = None
    rope_theta: float = 10_000.0
    rope_scaling: RopeScaling | None = None
    rope_pairs: bool = True  # neighboring dimensions turn together, not the two halves

    @property
    def num_kv_heads(self) -> int:
        return self.num_heads

    @property
    def qk_dim(self) -> int:
        return self.nope_dim + self.rope_dim


@dataclass(frozen=True, slots=True)
class DeltaSpec:
    """Gated delta rule: linear attention with a decaying state per value head."""

    num_k_heads: int
    num_v_heads: int
    k_dim: int
    v_dim: int
    conv: int = 4

    @property
    def keys(self) -> int:
        return self.num_k_heads * self.k_dim

    @property
    def values(self) -> int:
        return self.num_v_heads * self.v_dim


@dataclass(frozen=True, slots=True)
class MambaSpec:
    """Mamba-2 state-space mixer."""

    num_heads: int
    head_dim: int
    state_dim: int
    num_groups: int
    conv: int = 4
    time_step_min: float = 0.001  # a token's step is at least this long, behind the softplus

    @property
    def inner_dim(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def conv_dim(self) -> int:
        """Channels of the convolution: the inner ones, then B and C of all groups."""
        return self.inner_dim + 2 * self.num_groups * self.state_dim

    @property
    def projected_dim(self) -> int:
        """Columns of the input projection: the gate, the channels of the convolution, and a step for each head."""
        return self.inner_dim + self.conv_dim + self.num_heads


@dataclass(frozen=True, slots=True)
class MoeSpec:
    """Routed experts, and the shared ones every token passes."""

    num_experts: int
    top_k: int
    expert_dim: int
    num_shared: int = 0
    shared_dim: int | None = None  # width of all shared experts together; default num_shared * expert_dim
    shared_gate: bool = False
    score: Literal["softmax", "sigmoid", "sparsemixer", "sqrtsoftplus"] = "softmax"
    jitter: float = 0.01  # of sparsemixer (Phi-MoE): experts within twice this of the best one share in its softmax
    norm_topk: bool = True
    num_groups: int = 1  # group-limited routing: experts in groups, of which a token may use top_groups
    top_groups: int = 1
    scale: float = 1.0
    balance_bias: bool = False  # the aux-loss-free bias on selection, not on the weights
    bias: bool = False  # on router and expert projections
    latent_dim: int | None = None  # experts work on a down-projection of the token
    hash_layers: int = 0  # the first layers look experts up by token id; scores give the weights (DeepSeek-V4)
    glu_limit: float | None = None  # gates are at most this, the values that they multiply between minus and plus it
    # Gemma 4: router, routed and shared experts read the normed tokens times weights of their own; both outputs have a
    # norm, and so has their sum.
    own_norms: bool = False
    expert_scale: bool = False  # a learnt factor of each expert on the weights of the tokens that chose it

    @property
    def shared_width(self) -> int:
        return self.num_shared * self.expert_dim if self.shared_dim is None else self.shared_dim


@dataclass(frozen=True, slots=True)
class StreamsSpec:
    """Several residual streams (manifold-constrained hyper-connections, DeepSeek-V4).

    A part of a layer reads a weighted sum of the streams, and its output is added to each with a weight. Before that
    the streams are mixed by a matrix that Sinkhorn's iterations make doubly stochastic. Weights depend on the token.
    """

    count: int
    sinkhorn_iters: int = 20
    eps: float = 1e-6

    @property
    def num_weights(self) -> int:
        """Weights of a token: for reading, for writing, and between the streams."""
        return (2 + self.count) * self.count


@dataclass(frozen=True, slots=True)
class VisionTokens:
    """The ids around pictures and in their place: `start`, one `image` or `video` for each merged patch, `end`."""

    start: int
    end: int
    image: int
    video: int


@dataclass(frozen=True, slots=True)
class PictureSpec:
    """How pictures become patches: the values of a checkpoint's preprocessor_config.json."""

    min_pixels: int = 65_536  # a picture is resized to between min_pixels and max_pixels, in whole merged patches
    max_pixels: int = 16_777_216
    video_min_pixels: int = 4_096  # of all frames of a video together
    video_max_pixels: int = 25_165_824
    mean: float = 0.5  # of each channel, taken off values from 0 to 1
    std: float = 0.5


@dataclass(frozen=True, slots=True)
class VisionSpec:
    """The image encoder of a vision-language model and the projector behind it."""

    depth: int
    dim: int
    mlp_dim: int
    num_heads: int
    patch: int
    temporal_patch: int
    merge: int  # merge x merge patches become one token of the language model
    num_positions: int
    deepstack: tuple[int, ...] = ()  # encoder layers whose output is also injected into the decoder
    tokens: VisionTokens = VisionTokens(start=151652, end=151653, image=151655, video=151656)  # of Qwen3-VL
    pictures: PictureSpec = PictureSpec()


@dataclass(frozen=True, slots=True)
class Layer:
    """One layer: a mixer over positions and a feed-forward part, either of which may be absent."""

    mixer: Mixer
    ffn: Ffn
    hashed: bool = False  # experts are looked up by token id


# One letter a layer. The capitals and signs are those of Megatron's hybrid patterns.
_MIXER: dict[str, Mixer] = {"t": "attention", "w": "window", "p": "pooled", "d": "delta"}
_ALONE: dict[str, Layer] = {
    "M": Layer("mamba", "none"),
    "*": Layer("attention", "none"),
    "E": Layer("none", "moe"),
    "-": Layer("none", "dense"),
}


@lru_cache(maxsize=256)
def _layers(pattern: str, num_layers: int, num_dense: int, num_hashed: int = 0) -> tuple[Layer, ...]:
    """The pattern repeated; the first `num_dense` feed-forward parts are dense. A search asks for it all the time."""
    letters = (pattern[i % len(pattern)] for i in range(num_layers))
    return tuple(
        _ALONE[letter]
        if letter in _ALONE
        else Layer(_MIXER[letter], "dense" if i < num_dense else "moe", hashed=i < num_hashed)
        for i, letter in enumerate(letters)
    )


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """A model as its authors published it."""

    name: str
    family: str  # Hugging Face's model_type: what decides the code that runs it
    num_layers: int
    dim: int
    vocab: int
    source: str
    pattern: str = "t"  # repeated over the layers: t attention, w window, p pooled, d delta; alone: M * E -
    attention: GqaSpec | MlaSpec | None = None
    local_attention: GqaSpec | None = None  # of 'w' layers
    pooled_attention: GqaSpec | None = None  # of 'p' layers, a second kind of compressed attention
    streams: StreamsSpec | None = None  # None: one residual stream, to which the parts of a layer add
    delta: DeltaSpec | None = None
    mamba: MambaSpec | None = None
    moe: MoeSpec | None = None
    dense_dim: int = 0
    num_dense_layers: int = 0  # the first layers carry a dense feed-forward part instead of experts
    mtp_layers: int = 0
    mtp_pattern: str = "t"
    mtp_shared: bool = False  # all MTP depths use one set of weights
    glu: bool = True
    activation: str = "silu"
    tied: bool = False
    norm_eps: float = 1e-6
    norm: Literal["rms", "layer"] = "rms"  # of the residual stream: RMSNorm, or LayerNorm with a bias (Phi-MoE)
    head_bias: bool = False  # on the logits over the vocabulary (Phi-MoE)
    init_std: float = 0.02  # standard deviation of initial weights
    embed_scale: float = 1.0  # embedded tokens are multiplied by it (Granite)
    logit_divisor: float = 1.0  # logits over the vocabulary are divided by it (Granite)
    logit_softcap: float | None = None  # logits z over the vocabulary become softcap * tanh(z / softcap) (Gemma 4)
    layer_scale: bool = False  # each layer's output is multiplied by a stored number that is not trained (Gemma 4)
    vocab_multiple: int = 128  # Megatron pads the vocabulary to a multiple of this and TP
    vision: VisionSpec | None = None
    published_total: float | None = None  # parameters as the authors state them
    published_active: float | None = None
    approximate: str = ""  # what in these facts was inferred, in words

    @property
    def unlisted(self) -> int:
        """Parameters of layers that no part names; `spec/derived.py` has models with some."""
        return 0

    @property
    def is_moe(self) -> bool:
        return self.moe is not None

    @property
    def num_experts(self) -> int:
        return self.moe.num_experts if self.moe else 0

    @property
    def layers(self) -> tuple[Layer, ...]:
        """The layers in order, MTP not included."""
        num_dense = self.num_dense_layers if self.moe else self.num_layers
        return _layers(self.pattern, self.num_layers, num_dense, self.moe.hash_layers if self.moe else 0)

    def attention_of(self, layer: Layer) -> GqaSpec | MlaSpec | None:
        """The attention of a layer; None where it has none."""
        if layer.mixer == "attention":
            return self.attention
        kinds = {"window": self.local_attention, "pooled": self.pooled_attention}
        return kinds.get(layer.mixer)

    @property
    def attention_kinds(self) -> tuple[GqaSpec | MlaSpec, ...]:
        """Every attention that some layers may have."""
        return tuple(a for a in (self.attention, self.local_attention, self.pooled_attention) if a is not None)

    @property
    def stream_dim(self) -> int:
        """Numbers of a token between layers: of all residual streams together."""
        return self.dim * (self.streams.count if self.streams else 1)

    @property
    def mtp_depth(self) -> tuple[Layer, ...]:
        """The layers of one MTP depth."""
        dense = not self.moe or self.num_layers < self.num_dense_layers
        return _layers(self.mtp_pattern, len(self.mtp_pattern), len(self.mtp_pattern) if dense else 0)

    def cut(self, **changes: int) -> "ModelSpec":
        """The same family at another size: fewer layers or experts, another vocabulary."""
        num_experts = changes.pop("num_experts", None)
        moe = replace(self.moe, num_experts=num_experts) if self.moe and num_experts else self.moe
        model = replace(self, moe=moe, published_total=None, published_active=None)
        return replace(model, **changes)  # type: ignore[arg-type]
