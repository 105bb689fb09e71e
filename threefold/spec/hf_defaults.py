"""What `transformers` takes where a config.json says nothing: the fields of its configuration classes, as data.

The planner runs without transformers, so its defaults are copied here. `tests/spec/test_hf_defaults.py` walks every
field of the installed classes: each is either read (`defaults`), accepted with one value only (`only`), or `unread`
for a reason that stands beside it. A field that transformers adds fails that test until somebody decides.
"""

from typing import Any

from threefold.spec.hf_families.config_class import BASE as _BASE
from threefold.spec.hf_families.config_class import NO_DROPOUT as _NO_DROPOUT
from threefold.spec.hf_families.config_class import REQUIRED as REQUIRED
from threefold.spec.hf_families.config_class import ROPE as _ROPE
from threefold.spec.hf_families.config_class import HfClass
from threefold.spec.hf_families.gemma4 import GEMMA4_TEXT
from threefold.spec.hf_families.mixture_defaults import MIXTURE_CLASSES

READ_FROM = "transformers 5.22.2"

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


_SPARSE = {**_NO_DROPOUT, "decoder_sparse_step": 1, "mlp_only_layers": None}
# Read with use_sliding_window only, which is refused.
_WINDOW = frozenset({"sliding_window"})
_DELTA = {
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
}
_DELTA_EXTRA = {**_ROPE, "full_attention_interval": 4, "num_nextn_predict_layers": None, "mtp_num_hidden_layers": None}
_NULL_HEADS = {"num_key_value_heads": None}

LLAMA = HfClass(
    defaults={
        **_BASE,
        "intermediate_size": 11008,
        "num_key_value_heads": None,
        "head_dim": None,
        "max_position_embeddings": 2048,
        "attention_bias": False,
    },
    only={**_NO_DROPOUT, "mlp_bias": False},
    extra=_ROPE,
)
QWEN3 = HfClass(
    defaults={
        **_BASE,
        "intermediate_size": 22016,
        "num_key_value_heads": 32,
        "head_dim": 128,
        "max_position_embeddings": 32768,
        "attention_bias": False,
        "layer_types": None,
    },
    only={**_NO_DROPOUT, "use_sliding_window": False},
    unread=_WINDOW | {"max_window_layers"},
    extra=_ROPE,
    null_means=_NULL_HEADS,
)
MIXTRAL = HfClass(
    defaults={
        **_BASE,
        "intermediate_size": 14336,
        "num_key_value_heads": 8,
        "head_dim": None,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "sliding_window": None,
        "num_experts_per_tok": 2,
        "num_local_experts": 8,
    },
    only={**_NO_DROPOUT, "router_jitter_noise": 0.0},
    aliases={"num_experts": "num_local_experts"},
    extra=_ROPE,
    theta=1_000_000.0,
)
QWEN3_MOE = HfClass(
    defaults={
        **_BASE,
        "intermediate_size": 6144,
        "num_key_value_heads": 4,
        "max_position_embeddings": 32768,
        "attention_bias": False,
        "moe_intermediate_size": 768,
        "num_experts_per_tok": 8,
        "num_experts": 128,
        "norm_topk_prob": False,
    },
    only={**_SPARSE, "use_sliding_window": False},
    unread=_WINDOW,
    aliases={"num_local_experts": "num_experts"},
    extra={**_ROPE, "head_dim": None},
)
_QWEN_DELTA = {  # what Qwen3-Next and Qwen3.5-MoE share
    **_BASE,
    **_DELTA,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "max_position_embeddings": 32768,
    "attention_bias": False,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
    "layer_types": None,
}
QWEN3_NEXT = HfClass(
    defaults={
        **_QWEN_DELTA,
        "intermediate_size": 5632,
        "num_experts_per_tok": 10,
        "num_experts": 512,
        "norm_topk_prob": True,
    },
    only=_SPARSE,
    extra={**_DELTA_EXTRA, "partial_rotary_factor": 0.25},
)
# Keys of DeepSeek's own code, which transformers passes over.
_DEEPSEEK_CODE = {"moe_layer_freq": 1, "scoring_func": "sigmoid", "topk_method": "noaux_tc"}
DEEPSEEK_V3 = HfClass(
    defaults={
        **_BASE,
        "intermediate_size": 18432,
        "moe_intermediate_size": 2048,
        "num_key_value_heads": 128,
        "n_shared_experts": 1,
        "n_routed_experts": 256,
        "routed_scaling_factor": 2.5,
        "kv_lora_rank": 512,
        "q_lora_rank": 1536,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "qk_nope_head_dim": 128,
        "n_group": 8,
        "topk_group": 4,
        "num_experts_per_tok": 8,
        "first_k_dense_replace": 3,
        "norm_topk_prob": True,
        "max_position_embeddings": 4096,
        "rope_interleave": True,
        "num_mtp_layers": 1,
    },
    only={**_NO_DROPOUT, "attention_bias": False},
    aliases={"num_local_experts": "n_routed_experts", "num_nextn_predict_layers": "num_mtp_layers"},
    extra={**_ROPE, "head_dim": None, **_DEEPSEEK_CODE},
    null_means={**_NULL_HEADS, "q_lora_rank": None, "norm_topk_prob": False, "rope_interleave": False},
)
GPT_OSS = HfClass(
    defaults={
        **{name: value for name, value in _BASE.items() if name != "hidden_act"},
        "intermediate_size": 2880,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "sliding_window": 128,
        "attention_bias": True,
        "num_local_experts": 128,
        "num_experts_per_tok": 4,
        "layer_types": None,
        # Where neither rope_parameters nor rope_scaling is given.
        "rope_parameters": {
            "rope_type": "yarn",
            "factor": 32.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
            "original_max_position_embeddings": 4096,
        },
    },
    only={**_NO_DROPOUT, "swiglu_alpha": 1.702, "swiglu_limit": 7.0},
    unread=frozenset({"hidden_act"}),  # its experts have a clamped SwiGLU, whatever the name
    aliases={"num_experts": "num_local_experts"},
    extra=_ROPE,
    null_means={"sliding_window": None},
    theta=150_000.0,
)

# The families below are planned and priced; the engine does not train them, so only what changes sizes is read.
QWEN3_5_MOE_TEXT = HfClass(
    defaults={**_QWEN_DELTA, "num_experts_per_tok": 8, "num_experts": 256},
    only=_NO_DROPOUT,
    extra={**_DELTA_EXTRA, "partial_rotary_factor": 0.25},
)
QWEN3_VL_MOE_TEXT = HfClass(
    defaults={
        **_BASE,
        "intermediate_size": 5632,
        "num_key_value_heads": 16,
        "head_dim": None,
        "max_position_embeddings": 128000,
        "attention_bias": False,
        "moe_intermediate_size": 1408,
        "num_experts_per_tok": 4,
        "num_experts": 60,
        "tie_word_embeddings": True,
    },
    only=_SPARSE,
    aliases={"num_local_experts": "num_experts"},
    extra=_ROPE,
    theta=500_000.0,
)
GLM_MOE_DSA = HfClass(
    defaults={
        **{
            name: value
            for name, value in DEEPSEEK_V3.defaults.items()
            if name not in ("rope_interleave", "num_mtp_layers")
        },
        "rms_norm_eps": 1e-5,
        "intermediate_size": 12288,
        "num_key_value_heads": 64,
        "q_lora_rank": 2048,
        "v_head_dim": 256,
        "qk_nope_head_dim": 192,
        "n_group": 1,
        "topk_group": 1,
        "max_position_embeddings": 202752,
        "mlp_layer_types": None,
        "index_topk": 2048,
        "index_head_dim": 128,
        "index_n_heads": 32,
        "indexer_types": None,
    },
    only={**_NO_DROPOUT, "attention_bias": False, "mlp_bias": False},
    unread=frozenset({"head_dim", "layer_types"}),  # head_dim is overwritten; all layers are of one type
    aliases={"num_local_experts": "n_routed_experts", "num_experts": "n_routed_experts"},
    extra={
        **_ROPE,
        "num_nextn_predict_layers": None,
        "index_topk_pattern": None,
        "index_topk_freq": None,
        # Published files have them; transformers rotates neighbouring dimensions whatever they say.
        "rope_interleave": True,
        "indexer_rope_interleave": True,
        **_DEEPSEEK_CODE,
    },
)
DEEPSEEK_V32 = HfClass(
    defaults={
        **{name: value for name, value in GLM_MOE_DSA.defaults.items() if name != "indexer_types"},
        **{name: DEEPSEEK_V3.defaults[name] for name in GLM_MOE_DSA.defaults if name in DEEPSEEK_V3.defaults},
        "max_position_embeddings": 163840,
        "index_n_heads": 64,
    },
    only=GLM_MOE_DSA.only,
    unread=GLM_MOE_DSA.unread,
    aliases=GLM_MOE_DSA.aliases,
    extra={name: value for name, value in GLM_MOE_DSA.extra.items() if name != "indexer_rope_interleave"},
)
NEMOTRON_H = HfClass(
    defaults={
        "layers_block_type": None,
        "tie_word_embeddings": False,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "intermediate_size": 21504,
        "mlp_hidden_act": "relu2",
        "ssm_state_size": 128,
        "mamba_num_heads": 128,
        "mamba_head_dim": 64,
        "n_groups": 8,
        "conv_kernel": 4,
        "time_step_min": 0.001,
        "n_routed_experts": 8,
        "n_shared_experts": 1,
        "moe_intermediate_size": 7688,
        "moe_shared_expert_intermediate_size": 7688,
        "moe_latent_size": None,
        "num_experts_per_tok": 2,
        "routed_scaling_factor": 1.0,
        "n_group": 1,
        "topk_group": 1,
        "norm_topk_prob": True,
        "num_nextn_predict_layers": 0,
        "mtp_layers_block_type": None,
        "initializer_range": 0.02,
        "layer_norm_epsilon": 1e-5,
    },
    only={
        **_NO_DROPOUT,
        "hidden_dropout": 0.0,
        "mlp_bias": False,
        "use_bias": False,
        "mamba_proj_bias": False,
        "attention_bias": False,
        "mamba_hidden_act": "silu",
        "use_conv_bias": True,
    },
    unread=frozenset(
        {
            *(
                "num_logits_to_keep",
                "max_position_embeddings",
                "sliding_window",
                "use_mamba_kernels",
            ),
            # The widths of Mamba layers are stated; the limits of steps but the least one belong to initial weights, or
            # are not read by transformers either.
            *("expand", "time_step_max", "time_step_limit", "time_step_floor"),
            *("chunk_size", "mamba_ssm_cache_dtype", "moe_shared_expert_overlap", "residual_in_fp32"),
            *("rescale_prenorm_residual",),
        }
    ),
    aliases={
        "layer_types": "layers_block_type",
        "num_local_experts": "n_routed_experts",
        "mamba_n_groups": "n_groups",
        "mamba_d_conv": "conv_kernel",
        "mamba_dt_min": "time_step_min",
        "mamba_conv_bias": "use_conv_bias",
    },
    extra={"hybrid_override_pattern": None, "mtp_hybrid_override_pattern": None},
)

CLASSES = {
    **MIXTURE_CLASSES,
    "deepseek_v3": DEEPSEEK_V3,
    "deepseek_v32": DEEPSEEK_V32,
    "gemma4": GEMMA4_TEXT,
    "gemma4_text": GEMMA4_TEXT,
    "glm_moe_dsa": GLM_MOE_DSA,
    "gpt_oss": GPT_OSS,
    "kimi_k2": DEEPSEEK_V3,  # its own code is a copy of DeepSeek's
    "llama": LLAMA,
    "mixtral": MIXTRAL,
    "nemotron_h": NEMOTRON_H,
    "qwen3": QWEN3,
    "qwen3_5_moe": QWEN3_5_MOE_TEXT,
    "qwen3_5_moe_text": QWEN3_5_MOE_TEXT,
    "qwen3_moe": QWEN3_MOE,
    "qwen3_next": QWEN3_NEXT,
    "qwen3_vl_moe": QWEN3_VL_MOE_TEXT,
}
# Configurations that hold their text model in `text_config`, and whether embeddings are tied where they do not say.
COMPOSITE_TIED = {"gemma4": True, "qwen3_5_moe": False, "qwen3_vl_moe": False}
# The image encoder in `vision_config` of the Qwen families: all of it where the file has none.
VISION: dict[str, Any] = {
    "depth": 27,
    "hidden_size": 1152,
    "intermediate_size": 4304,
    "num_heads": 16,
    "patch_size": 16,
    "temporal_patch_size": 2,
    "spatial_merge_size": 2,
    "num_position_embeddings": 2304,
}
VISION_FIELDS: dict[str, dict[str, Any]] = {
    "qwen3_5_moe": VISION,
    "qwen3_vl_moe": {**VISION, "deepstack_visual_indexes": (8, 16, 24)},
}
# The ids around pictures and in their place, beside `vision_config`.
_TOKEN_NAMES = ("vision_start_token_id", "vision_end_token_id", "image_token_id", "video_token_id")
VISION_TOKENS: dict[str, dict[str, Any]] = {
    "qwen3_5_moe": dict(zip(_TOKEN_NAMES, (248053, 248054, 248056, 248057), strict=True)),
    "qwen3_vl_moe": dict(zip(_TOKEN_NAMES, (151652, 151653, 151655, 151656), strict=True)),
}
VISION_UNREAD = frozenset({"hidden_act", "in_channels", "out_hidden_size", "rope_parameters", "initializer_range"})
# The engine supports one value of these fields; a file that states another is refused. `out_hidden_size` is the model
# dim.
VISION_ONLY: dict[str, Any] = {"hidden_act": "gelu_pytorch_tanh", "in_channels": 3}
