"""Where a family's checkpoints keep the parts of a layer whose names differ between families.

`hf_names.py` asks `names_of`. Each field has the path that is written first, then others under which newer versions of
transformers hold the same tensor. A family without an entry has the plain names.
"""

from dataclasses import dataclass

Paths = tuple[str, ...]  # inside a layer; the first one is written


@dataclass(frozen=True)
class FamilyNames:
    """Paths inside a layer, without `.weight` where a weight is meant."""

    own: tuple[tuple[str, str], ...] = ()  # other tensors of a layer: the engine's name and the one that is stored
    q_norm: str = "self_attn.q_norm"
    k_norm: str = "self_attn.k_norm"
    router: Paths = ("mlp.gate",)
    balance_bias: Paths = ("mlp.gate.e_score_correction_bias",)
    balance_bias_has_groups: bool = False  # stored as one row, for a group of all experts
    shared: str = "mlp.shared_experts"
    experts: str = "mlp.experts"  # above the number of an expert
    expert_parts: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")  # of one expert
    # All experts in one tensor, gates above ups, then the down projections: how newer transformers hold them.
    stacked_experts: tuple[str, str] = ("mlp.experts.gate_up_proj", "mlp.experts.down_proj")
    stacked_on_disk: tuple[str, str] | None = None  # the family stores stacked experts, under these names
    published_with_pictures: bool = False  # the text model is also read from a checkpoint with an image encoder
    one_mtp_depth: bool = False  # under `mtp.`; other families add layers behind the last


_MIXTRAL = FamilyNames(
    router=("block_sparse_moe.gate", "mlp.gate"),
    experts="block_sparse_moe.experts",
    expert_parts=("w1", "w3", "w2"),
)
_PLAIN = FamilyNames()
_NAMES = {
    "ernie4_5_moe": FamilyNames(
        balance_bias=(
            "mlp.moe_statics.e_score_correction_bias",
            "mlp.gate.moe_statics.e_score_correction_bias",
        ),
        balance_bias_has_groups=True,
    ),
    "gemma4": FamilyNames(
        own=(
            ("output_scale", "layer_scalar"),
            ("mixer.out_norm.weight", "post_attention_layernorm.weight"),
            ("ffn.shared_scale", "pre_feedforward_layernorm.weight"),
            ("ffn.routed_scale", "pre_feedforward_layernorm_2.weight"),
            ("ffn.shared_norm.weight", "post_feedforward_layernorm_1.weight"),
            ("ffn.routed_norm.weight", "post_feedforward_layernorm_2.weight"),
            ("ffn.out_norm.weight", "post_feedforward_layernorm.weight"),
            ("ffn.router.input_scale", "router.scale"),
            ("ffn.router.expert_scale", "router.per_expert_scale"),
        ),
        router=("router.proj",),
        shared="mlp",
        stacked_experts=("experts.gate_up_proj", "experts.down_proj"),
        stacked_on_disk=("experts.gate_up_proj", "experts.down_proj"),
        published_with_pictures=True,
    ),
    "gpt_oss": FamilyNames(router=("mlp.router", "mlp.gate")),
    "granitemoe": FamilyNames(
        router=("block_sparse_moe.router.layer", "block_sparse_moe.router"),
        stacked_experts=("block_sparse_moe.experts.gate_up_proj", "block_sparse_moe.experts.down_proj"),
        stacked_on_disk=("block_sparse_moe.input_linear.weight", "block_sparse_moe.output_linear.weight"),
    ),
    "hunyuan_v1_moe": FamilyNames(
        q_norm="self_attn.query_layernorm",
        k_norm="self_attn.key_layernorm",
        router=("mlp.gate.wg",),
        shared="mlp.shared_mlp",
    ),
    "minimax_m2": FamilyNames(
        router=_MIXTRAL.router,
        balance_bias=("block_sparse_moe.e_score_correction_bias", "mlp.e_score_correction_bias"),
        experts=_MIXTRAL.experts,
        expert_parts=_MIXTRAL.expert_parts,
    ),
    "mixtral": _MIXTRAL,
    "phimoe": FamilyNames(
        router=("block_sparse_moe.gate", "mlp.router"),
        experts=_MIXTRAL.experts,
        expert_parts=_MIXTRAL.expert_parts,
    ),
    "qwen2_moe": FamilyNames(shared="mlp.shared_expert"),
    "qwen3_5_moe": FamilyNames(shared="mlp.shared_expert", one_mtp_depth=True),
    "qwen3_next": FamilyNames(shared="mlp.shared_expert", one_mtp_depth=True),
}


def names_of(family: str) -> FamilyNames:
    """The names of a family: its Hugging Face model_type."""
    return _NAMES.get(family, _PLAIN)
