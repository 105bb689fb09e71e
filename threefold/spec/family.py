"""The declaration of a model family: one value that the planner, the weights of the engine and the rules read.

Each file of `spec/families` declares one family, or a few close relatives: its configuration as transformers reads it,
its shape facts, its models, the names of its weights and what it needs of the engine. docs/guide/add-a-family.md says
how to add one.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from threefold.spec.model import GqaSpec, MlaSpec, ModelSpec, MoeSpec

READ_FROM = "transformers 5.22.2"
Fields = Mapping[str, Any]  # of a config.json
Parts = dict[str, Any]  # arguments of ModelSpec; those of its parts are tables inside, such as `moe`
# Sizes that no two models share. transformers would take those of some model; here a file without them is refused.
REQUIRED = frozenset({"hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size"})
# Fields of every class that change neither sizes nor logits and gradients.
UNREAD = frozenset(
    {
        # how a model is called, saved and shown, and tasks other than predicting the next token
        *("use_cache", "output_hidden_states", "return_dict", "dtype", "architectures", "transformers_version"),
        *("chunk_size_feed_forward", "is_encoder_decoder", "id2label", "label2id", "problem_type", "pretraining_tp"),
        # Token ids. `pad_token_id` also keeps the gradient of padding out of its row of the embedding; the engine's
        # padding is no input of a loss, so that this gradient is zero there.
        *("pad_token_id", "bos_token_id", "eos_token_id"),
        # the loss that balances experts is stated by the plan (job.aux_loss)
        *("output_router_logits", "router_aux_loss_coef"),
    }
)
# The place in a ModelSpec of what a key states, in most families. `HfClass.places` has those of a family's own.
PLACES = {
    "rms_norm_eps": "norm_eps",
    "intermediate_size": "dense_dim",
    "first_k_dense_replace": "num_dense_layers",
    "num_mtp_layers": "mtp_layers",
    "num_experts": "moe.num_experts",
    "num_local_experts": "moe.num_experts",
    "n_routed_experts": "moe.num_experts",
    "num_experts_per_tok": "moe.top_k",
    "moe_intermediate_size": "moe.expert_dim",
    "n_shared_experts": "moe.num_shared",
    "norm_topk_prob": "moe.norm_topk",
    "n_group": "moe.num_groups",
    "topk_group": "moe.top_groups",
    "routed_scaling_factor": "moe.scale",
    "linear_num_key_heads": "delta.num_k_heads",
    "linear_num_value_heads": "delta.num_v_heads",
    "linear_key_head_dim": "delta.k_dim",
    "linear_value_head_dim": "delta.v_dim",
    "linear_conv_kernel_dim": "delta.conv",
    "q_lora_rank": "attention.q_rank",
    "kv_lora_rank": "attention.kv_rank",
    "qk_nope_head_dim": "attention.nope_dim",
    "qk_rope_head_dim": "attention.rope_dim",
    "v_head_dim": "attention.v_dim",
    "rope_interleave": "attention.rope_pairs",
    "index_n_heads": "attention.indexer.num_heads",
    "index_head_dim": "attention.indexer.head_dim",
    "index_topk": "attention.indexer.top_k",
}
Place = str | tuple[str, ...]
NO_DROPOUT = {"attention_dropout": 0.0}
ROPE = {
    "rope_theta": None,
    "rope_scaling": None,
    "partial_rotary_factor": None,
    "original_max_position_embeddings": None,
}


@dataclass(frozen=True, slots=True)
class HfClass:
    """A configuration class of transformers as data; the planner runs without transformers.

    `tests/spec/test_hf_defaults.py` walks every field of the installed class: it is in `defaults`, `only` or `unread`.
    """

    defaults: Mapping[str, Any]  # fields that are read
    only: Mapping[str, Any] = field(default_factory=lambda: NO_DROPOUT)  # one value is supported, the default
    unread: frozenset[str] = frozenset()
    # A key that transformers reads as another field, and before it where a file has both.
    aliases: Mapping[str, str] = field(default_factory=dict)
    # Keys that are no fields of the class and are read all the same; None where nothing stands for an absent one.
    extra: Mapping[str, Any] = field(default_factory=lambda: ROPE)
    null_means: Mapping[str, Any] = field(default_factory=dict)  # what null does in fields whose default is not null
    by_layer: frozenset[str] = frozenset()  # fields that may also be a list with one value for each layer
    theta: float = 10_000.0
    # Places that differ from PLACES; the empty text: nowhere, the family's own code reads the key.
    places: Mapping[str, Place] = field(default_factory=dict)

    def placed(self) -> dict[str, tuple[str, ...]]:
        """The keys of this class that state a number of a ModelSpec, and the places where it stands."""
        found = {**PLACES, **self.places}
        pairs = ((key, found.get(key)) for key in {**self.defaults, **self.extra})
        return {key: (place,) if isinstance(place, str) else place for key, place in pairs if place}


ROPE_AND_HEADS = {**ROPE, "head_dim": None}  # attention reads head_dim where a file has it
BASE = {
    "hidden_act": "silu",
    "initializer_range": 0.02,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "rope_parameters": None,
}


def decoder(intermediate_size: int, num_key_value_heads: int | None, max_position_embeddings: int) -> Fields:
    """Fields of the classes of most decoders, with the three defaults that differ between all of them."""
    heads = {"num_key_value_heads": num_key_value_heads, "attention_bias": False}
    lengths = {"intermediate_size": intermediate_size, "max_position_embeddings": max_position_embeddings}
    return {**BASE, **heads, **lengths}


NULL_HEADS = {"num_key_value_heads": None}
# Experts as DeepSeek-V3 routes them: sigmoid scores, and a bias that balances the load.
BALANCED_SIGMOID = {"moe.score": "sigmoid", "moe.balance_bias": True}

Paths = tuple[str, ...]  # the first one is written; others are those of newer transformers, or of memory
GQA_NAMES = {"q": "q_proj", "k": "k_proj", "v": "v_proj", "out": "o_proj", "sinks": "sinks"}
GQA_NAMES |= {"q_norm": "q_norm", "k_norm": "k_norm"}
MLA_NAMES = {
    "q": "q_proj",
    "q_down": "q_a_proj",
    "q_norm": "q_a_layernorm",
    "q_up": "q_b_proj",
    "kv_down": "kv_a_proj_with_mqa",
    "kv_norm": "kv_a_layernorm",
    "kv_up": "kv_b_proj",
    "out": "o_proj",
}
INDEXER_NAMES = {"q": "wq_b", "k": "wk", "k_norm": "k_norm", "weight": "weights_proj"}
DELTA_NAMES = {
    "qkvz": "in_proj_qkvz",
    "ba": "in_proj_ba",
    "conv": "conv1d.weight",
    "dt_bias": "dt_bias",
    "a_log": "A_log",
    "norm": "norm",
    "out": "out_proj",
}


@dataclass(frozen=True)
class WeightNames:
    """The paths under which a family's checkpoints hold what the engine calls otherwise. `engine/weights/hf_names.py`
    reads them; a path is inside a layer, without `.weight` where a weight is meant."""

    prefixes: Paths = ("model.",)
    embed: str = "embed_tokens"
    norm: str = "norm"
    own: Mapping[str, str] = field(default_factory=dict)  # other tensors of a layer: the engine's name and the stored
    layer_norms: tuple[str, str] = ("input_layernorm", "post_attention_layernorm")
    mixers: Mapping[str, str] = field(  # above the parts of a mixer, by its kind
        default_factory=lambda: {"attention": "self_attn.", "window": "self_attn.", "delta": "linear_attn."}
    )
    attention: Mapping[str, str] = field(default_factory=lambda: GQA_NAMES)
    mamba: Mapping[str, str] = field(default_factory=dict)
    qkvz_by_part: bool = False  # the gated delta rule has a projection for q, k and v, and one each for its other parts
    dense: str = "mlp"
    router: Paths = ("mlp.gate",)
    balance_bias: Paths = ("mlp.gate.e_score_correction_bias",)
    balance_bias_has_groups: bool = False  # stored as one row, for a group of all experts
    shared: Paths = ("mlp.shared_experts",)
    shared_gate: str = "mlp.shared_expert_gate"
    experts: str = "mlp.experts"  # above the number of an expert
    expert_parts: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")  # of one expert
    # All experts in one tensor, gates above ups, then the down projections: how newer transformers hold them.
    stacked_experts: tuple[str, str] = ("mlp.experts.gate_up_proj", "mlp.experts.down_proj")
    stacked_on_disk: tuple[str, str] | None = None  # the family stores stacked experts, under these names
    input_dim_first: Literal["", "published", "interleaved"] = ""  # stacked experts (also) have it first (Qwen3-VL);
    # interleaved: and columns of gate and up alternate, or there is MXFP4 (GPT-OSS)
    published_with_pictures: bool = False  # the text model is also read from a checkpoint with an image encoder
    # Checkpoints have other names than transformers in memory: patterns and what stands for them, a list for each kind
    # of checkpoint, of which the first is written.
    stored_as: tuple[tuple[tuple[str, str], ...], ...] = ()
    mtp: Literal["behind", "one", "layers"] = "behind"  # MTP depths: layers behind the last, one under `mtp.`, or a
    # list of layers there


@dataclass(frozen=True, slots=True)
class EncoderClass:
    """The image encoder in `vision_config`: all of it where the file has none, and the ids of tokens of images."""

    defaults: Mapping[str, Any]
    tokens: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class Published:
    """A published model: what its config.json states beyond the defaults of its class, and its authors' counts."""

    name: str
    config: Fields
    source: str
    counts: tuple[float | None, float | None]  # parameters in all, and those that a token meets
    vocab_multiple: int
    approximate: str  # what in these facts was inferred, in words


def published(
    name: str,
    sizes: tuple[int, int, int, int],  # layers, model dim, heads and vocabulary, which every config.json states
    *config: Fields,
    source: str,
    counts: tuple[float | None, float | None] = (None, None),
    vocab_multiple: int = 128,
    approximate: str = "",
) -> Published:
    required = ("num_hidden_layers", "hidden_size", "num_attention_heads", "vocab_size")
    stated = [dict(zip(required, sizes, strict=True)), *config]
    merged = {key: value for table in stated for key, value in table.items()}
    return Published(name, merged, source, counts, vocab_multiple, approximate)


@dataclass(frozen=True)
class Family:
    """A model family. `types` are the values of model_type that are read, with the class in `architectures` of what is
    written; None where nothing of that type is."""

    name: str
    types: Mapping[str, str | None]
    config: HfClass
    facts: Mapping[str, Any] = field(default_factory=dict)  # at their places: what all its models have
    attention: Literal["grouped", "latent", "own"] = "grouped"
    rope: Mapping[str, bool] = field(default_factory=dict)  # options of `hf_fields.read_rope`
    read: "Callable[[Fields, Family], Parts] | None" = None  # in place of `hf_parts.standard_parts`
    write: Callable[[ModelSpec], Parts] | None = None  # the inverse: keys beside those with a place
    composite_tied: bool | None = None  # configurations with a `text_config`: whether embeddings are tied by default
    encoder: EncoderClass | None = None
    names: WeightNames = WeightNames()
    zero_centered_norms: bool = False  # norms store weight - 1
    models: tuple[Published | ModelSpec, ...] = ()


def tiny(name: str, family: str, attention: Any = None, moe: Any = None, **facts: Any) -> ModelSpec:
    """A small model for work on a CPU, with the settings in which its family differs from others. Attention and experts
    are given whole, or by what differs from eight heads and sixteen experts."""
    given: dict[str, Any] = {
        "num_layers": 4,
        "dim": 128,
        "vocab": 512,
        "source": "made here, for work on a CPU",
        **facts,
    }
    heads = attention if isinstance(attention, MlaSpec | GqaSpec) else tiny_heads(**(attention or {}))
    experts = MoeSpec(**{"num_experts": 16, "top_k": 4, "expert_dim": 64, **(moe or {})})
    return ModelSpec(name=name, family=family, attention=heads, moe=experts, **given)


def tiny_heads(**facts: Any) -> GqaSpec:
    return GqaSpec(**{"num_heads": 8, "num_kv_heads": 4, "head_dim": 16, **facts})
