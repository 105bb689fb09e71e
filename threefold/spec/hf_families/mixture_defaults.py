"""What transformers takes for absent fields in the configurations of Mixture-of-Experts families, as in `hf_defaults`.

Each family is one `HfClass` here, one reader in `mixture_readers.py`, and one entry of weight names in
`engine/weights/families/family_names.py`. docs/guide/add-a-family.md says how to add one.
"""

from threefold.spec.hf_families.config_class import BASE, NO_DROPOUT, ROPE, HfClass

_ROPE_AND_HEADS = {**ROPE, "head_dim": None}  # attention reads head_dim where a file has it

GLM4_MOE = HfClass(
    defaults={
        **BASE,
        "rms_norm_eps": 1e-5,
        "intermediate_size": 10944,
        "num_key_value_heads": 8,
        "max_position_embeddings": 131072,
        "attention_bias": False,
        "use_qk_norm": False,
        "moe_intermediate_size": 1408,
        "num_experts_per_tok": 8,
        "n_shared_experts": 1,
        "n_routed_experts": 128,
        "routed_scaling_factor": 1.0,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "norm_topk_prob": True,
        "num_mtp_layers": 1,
    },
    only=NO_DROPOUT,
    aliases={"num_local_experts": "n_routed_experts", "num_nextn_predict_layers": "num_mtp_layers"},
    extra={**_ROPE_AND_HEADS, "partial_rotary_factor": 0.5},
)
QWEN2_MOE = HfClass(
    defaults={
        **BASE,
        "intermediate_size": 5632,
        "num_key_value_heads": 16,
        "max_position_embeddings": 32768,
        "qkv_bias": True,
        "moe_intermediate_size": 1408,
        "shared_expert_intermediate_size": 5632,
        "num_experts_per_tok": 4,
        "num_experts": 60,
        "norm_topk_prob": False,
        "layer_types": None,
    },
    only={**NO_DROPOUT, "decoder_sparse_step": 1, "mlp_only_layers": None, "use_sliding_window": False},
    unread=frozenset({"sliding_window", "max_window_layers"}),  # read with use_sliding_window only
    extra=_ROPE_AND_HEADS,
)
OLMOE = HfClass(
    defaults={
        **BASE,
        "rms_norm_eps": 1e-5,
        "intermediate_size": 2048,
        "num_key_value_heads": None,
        "max_position_embeddings": 4096,
        "attention_bias": False,
        "clip_qkv": None,
        "num_experts_per_tok": 8,
        "num_experts": 64,
        "norm_topk_prob": False,
    },
    only=NO_DROPOUT,
    aliases={"num_local_experts": "num_experts"},
    extra=_ROPE_AND_HEADS,
)
FROM_ROTARY_DIM = "rotary_dim / head_dim"  # stands for an absent key; null means the whole head
MINIMAX_M2 = HfClass(
    defaults={
        **BASE,
        "intermediate_size": 1536,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 196608,
        "num_experts_per_tok": 8,
        "num_local_experts": 256,
    },
    only={**NO_DROPOUT, "router_jitter_noise": 0.0},
    aliases={"num_experts": "num_local_experts"},
    # Those behind rotary_dim are of MiniMax's own code; transformers passes them over.
    extra={
        **ROPE,
        "partial_rotary_factor": FROM_ROTARY_DIM,
        "rotary_dim": None,
        "use_qk_norm": True,
        "qk_norm_type": "per_layer",
        "scoring_func": "sigmoid",
        "use_routing_bias": True,
        "shared_intermediate_size": 0,
        "attn_type_list": None,
    },
    theta=5_000_000.0,
)
ERNIE4_5_MOE = HfClass(
    defaults={
        **BASE,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": True,
        "intermediate_size": 12288,
        "num_key_value_heads": 4,
        "max_position_embeddings": 131072,
        "moe_intermediate_size": 1536,
        "moe_k": 6,
        "moe_num_experts": 64,
        "moe_num_shared_experts": 2,
        "moe_layer_start_index": 1,
        "moe_layer_end_index": -1,
    },
    only={"use_bias": False, "moe_layer_interval": 1, "moe_norm_min": 1e-12},
    aliases={"num_experts": "moe_num_experts", "num_experts_per_tok": "moe_k"},
    extra=_ROPE_AND_HEADS,
    theta=500_000.0,
)
DOTS1 = HfClass(
    defaults={
        **BASE,
        "intermediate_size": 10944,
        "moe_intermediate_size": 1408,
        "num_key_value_heads": 32,
        "n_shared_experts": None,
        "n_routed_experts": None,
        "num_experts_per_tok": None,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 0,
        "norm_topk_prob": False,
        "max_position_embeddings": 2048,
        "attention_bias": False,
        "routed_scaling_factor": 1.0,
        "sliding_window": 4096,
        "max_window_layers": 62,
        "layer_types": None,
    },
    only=NO_DROPOUT,
    aliases={"num_local_experts": "n_routed_experts"},
    extra=_ROPE_AND_HEADS,
    null_means={"num_key_value_heads": None, "norm_topk_prob": False, "sliding_window": None},
)
HUNYUAN_V1_MOE = HfClass(
    defaults={
        **BASE,
        "rms_norm_eps": 1e-5,
        "intermediate_size": 11008,
        "num_key_value_heads": None,
        "head_dim": None,
        "max_position_embeddings": 2048,
        "attention_bias": False,
        "num_experts": 1,
        "moe_topk": 1,
    },
    only=NO_DROPOUT,
    unread=frozenset({"eod_token_id", "sep_token_id"}),
    aliases={"num_experts_per_tok": "moe_topk", "num_local_experts": "num_experts"},
    # Those behind the rotary keys are of Tencent's own code; transformers passes them over.
    extra={
        **ROPE,
        "use_qk_norm": True,
        "use_cla": False,
        "use_mla": False,
        "mlp_bias": False,
        "moe_layer_num_skipped": 0,
        "moe_intermediate_size": None,
        "num_shared_expert": 1,
    },
    by_layer=frozenset({"moe_topk"}),
)
GRANITEMOE = HfClass(
    defaults={
        **BASE,
        "intermediate_size": 11008,
        "num_key_value_heads": None,
        "max_position_embeddings": 2048,
        "attention_bias": False,
        "embedding_multiplier": 1.0,
        "logits_scaling": 1.0,
        "residual_multiplier": 1.0,
        "attention_multiplier": 1.0,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
    },
    only=NO_DROPOUT,
    extra=_ROPE_AND_HEADS,
)

PHIMOE = HfClass(
    defaults={
        **BASE,
        "rms_norm_eps": 1e-5,
        "intermediate_size": 6400,
        "num_key_value_heads": 8,
        "max_position_embeddings": 4096 * 32,
        "sliding_window": None,
        "num_experts_per_tok": 2,
        "num_local_experts": 16,
        "router_jitter_noise": 0.01,
        "attention_bias": False,
        "lm_head_bias": False,
    },
    only={**NO_DROPOUT, "input_jitter_noise": 0.0},
    extra=_ROPE_AND_HEADS,
    theta=1_000_000.0,
)

MIXTURE_CLASSES = {
    "dots1": DOTS1,
    "ernie4_5_moe": ERNIE4_5_MOE,
    "glm4_moe": GLM4_MOE,
    "granitemoe": GRANITEMOE,
    "hunyuan_v1_moe": HUNYUAN_V1_MOE,
    "minimax_m2": MINIMAX_M2,
    "olmoe": OLMOE,
    "phimoe": PHIMOE,
    "qwen2_moe": QWEN2_MOE,
}
