"""Llama, and Mixtral, whose experts have Llama's attention around them."""

from threefold.spec.family import BASE, NO_DROPOUT, Family, HfClass, WeightNames, decoder, published, tiny

LLAMA = Family(
    "llama",
    {"llama": "LlamaForCausalLM"},
    HfClass(defaults={**decoder(11008, None, 2048), "head_dim": None}, only={**NO_DROPOUT, "mlp_bias": False}),
    models=(
        published(
            "llama3-8b",
            (32, 4096, 32, 128256),
            {"intermediate_size": 14336, "num_key_value_heads": 8, "rms_norm_eps": 1e-5, "rope_theta": 500_000.0},
            source="meta-llama/Meta-Llama-3-8B; Megatron Bridge Llama3ModelProvider8B",
            counts=(8.03e9, 8.03e9),
        ),
        published(
            "llama3-70b",
            (80, 8192, 64, 128256),
            {"intermediate_size": 28672, "num_key_value_heads": 8, "rms_norm_eps": 1e-5, "rope_theta": 500_000.0},
            source="meta-llama/Meta-Llama-3-70B; Megatron Bridge Llama3ModelProvider70B",
            counts=(70.6e9, 70.6e9),
        ),
        published(
            "llama3.1-405b",
            (126, 16384, 128, 128256),
            {"intermediate_size": 53248, "num_key_value_heads": 8, "rms_norm_eps": 1e-5, "rope_theta": 500_000.0},
            {
                "rope_scaling": {
                    "rope_type": "llama3",
                    "factor": 8.0,
                    "original_max_position_embeddings": 8192,
                    "low_freq_factor": 1.0,
                    "high_freq_factor": 4.0,
                }
            },
            source="meta-llama/Meta-Llama-3.1-405B; Megatron Bridge Llama31ModelProvider405B",
            counts=(405.9e9, 405.9e9),
        ),
    ),
)

TINY_MIXTRAL = tiny("tiny-mixtral", "mixtral", moe={"num_experts": 8, "top_k": 2, "expert_dim": 128})
MIXTRAL = Family(
    "mixtral",
    {"mixtral": "MixtralForCausalLM"},
    HfClass(
        defaults={
            **BASE,
            "intermediate_size": 14336,
            "num_key_value_heads": 8,
            "head_dim": None,
            "max_position_embeddings": 131072,
            "rms_norm_eps": 1e-5,
            "sliding_window": None,
            "num_experts_per_tok": 2,
            "num_local_experts": 8,
        },
        only={**NO_DROPOUT, "router_jitter_noise": 0.0},
        aliases={"num_experts": "num_local_experts"},
        theta=1_000_000.0,
        places={"intermediate_size": "moe.expert_dim", "sliding_window": "attention.window"},
    ),
    names=WeightNames(
        router=("block_sparse_moe.gate", "mlp.gate"),
        experts="block_sparse_moe.experts",
        expert_parts=("w1", "w3", "w2"),
    ),
    models=(
        published(
            "mixtral-8x7b",
            (32, 4096, 32, 32000),
            source="transformers MixtralConfig defaults; mistralai/Mixtral-8x7B-v0.1",
            counts=(46.7e9, 12.9e9),
        ),
        published(
            "mixtral-8x22b",
            (56, 6144, 48, 32768),
            {"intermediate_size": 16384},
            source="Megatron-LM functional test mixtral_8x22b_tp2pp8ep8vpp1_release; vocabulary of the v0.3 tokenizer",
            counts=(141e9, 39e9),
        ),
        TINY_MIXTRAL,
    ),
)
