"""MiniMax-M2: sigmoid scores with a balancing bias, norms over all queries and all keys, and a partial rotation."""

from threefold.spec.family import (
    BALANCED_SIGMOID,
    BASE,
    NO_DROPOUT,
    ROPE,
    Family,
    Fields,
    HfClass,
    Parts,
    WeightNames,
    published,
    tiny,
)
from threefold.spec.hf_parts import refuse_others, standard_parts

_FROM_ROTARY_DIM = "rotary_dim / head_dim"  # stands for an absent key; null means the whole head


def _read(c: Fields, family: Family) -> Parts:
    only = {"use_qk_norm": True, "qk_norm_type": "per_layer", "scoring_func": "sigmoid", "use_routing_bias": True}
    refuse_others(c, {**only, "shared_intermediate_size": 0, "attn_type_list": 1})
    fraction = c["partial_rotary_factor"]
    if fraction == _FROM_ROTARY_DIM:
        fraction = None if c["rotary_dim"] is None else c["rotary_dim"] / c["head_dim"]
    return standard_parts({**c, "partial_rotary_factor": fraction}, family)


TINY_MINIMAX_M2 = tiny(
    "tiny-minimax-m2",
    "minimax_m2",
    attention={"qk_norm": True, "qk_norm_over": "projection", "rope_fraction": 0.5},
    moe={"score": "sigmoid", "balance_bias": True},
)
MINIMAX_M2_FAMILY = Family(
    "minimax_m2",
    {"minimax_m2": "MiniMaxM2ForCausalLM"},
    HfClass(
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
            "partial_rotary_factor": _FROM_ROTARY_DIM,
            "rotary_dim": None,
            "use_qk_norm": True,
            "qk_norm_type": "per_layer",
            "scoring_func": "sigmoid",
            "use_routing_bias": True,
            "shared_intermediate_size": 0,
            "attn_type_list": None,
        },
        theta=5_000_000.0,
        places={"intermediate_size": "moe.expert_dim"},
    ),
    facts={**BALANCED_SIGMOID, "attention.qk_norm": True, "attention.qk_norm_over": "projection"},
    rope={"partial": True},
    read=_read,
    names=WeightNames(
        router=("block_sparse_moe.gate", "mlp.gate"),
        balance_bias=("block_sparse_moe.e_score_correction_bias", "mlp.e_score_correction_bias"),
        experts="block_sparse_moe.experts",
        expert_parts=("w1", "w3", "w2"),
    ),
    models=(
        published(
            "minimax-m2",
            (62, 3072, 48, 200064),
            {"partial_rotary_factor": 0.5},
            source="MiniMaxAI/MiniMax-M2 config.json, without its MTP modules, which transformers leaves out too",
            counts=(229e9, 10e9),  # the first as the Hub counts its tensors; MiniMax rounds to 230B
        ),
        TINY_MINIMAX_M2,
    ),
)
