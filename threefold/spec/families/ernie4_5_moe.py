"""ERNIE 4.5: softmax scores with a balancing bias, and a rotation of neighboring dimensions."""

import reprlib

from threefold.spec.family import BASE, ROPE_AND_HEADS, Family, Fields, HfClass, Parts, WeightNames, published, tiny
from threefold.spec.hf_parts import num_layers, standard_parts
from threefold.spec.model import ModelSpec


def _read(c: Fields, family: Family) -> Parts:
    last = c["moe_layer_end_index"]
    if last not in (-1, num_layers(c) - 1):
        raise ValueError(f"moe_layer_end_index {reprlib.repr(last)} is not supported, only the last layer")
    return standard_parts(c, family)


def _write(spec: ModelSpec) -> Parts:
    return {"moe_layer_end_index": spec.num_layers - 1, "use_bias": False}


TINY_ERNIE45 = tiny(
    "tiny-ernie-4.5",
    "ernie4_5_moe",
    num_dense_layers=1,
    dense_dim=256,
    attention={"rope_theta": 500_000.0, "rope_pairs": True},
    moe={"num_shared": 2, "balance_bias": True},
    tied=True,
)
_PLACES = {
    "moe_num_experts": "moe.num_experts",
    "moe_k": "moe.top_k",
    "moe_num_shared_experts": "moe.num_shared",
    "moe_layer_start_index": "num_dense_layers",
}
ERNIE4_5_MOE = Family(
    "ernie4_5_moe",
    {"ernie4_5_moe": "Ernie4_5_MoeForCausalLM"},
    HfClass(
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
        extra=ROPE_AND_HEADS,
        theta=500_000.0,
        places=_PLACES,
    ),
    facts={"moe.balance_bias": True, "attention.rope_pairs": True},
    read=_read,
    write=_write,
    names=WeightNames(
        balance_bias=("mlp.moe_statics.e_score_correction_bias", "mlp.gate.moe_statics.e_score_correction_bias"),
        balance_bias_has_groups=True,
    ),
    models=(
        published(
            "ernie-4.5-21b-a3b",
            (28, 2560, 20, 103424),
            source="baidu/ERNIE-4.5-21B-A3B-PT config.json",
            counts=(21e9, 3e9),
        ),
        published(
            "ernie-4.5-300b-a47b",
            (54, 8192, 64, 103424),
            {"intermediate_size": 28672, "tie_word_embeddings": False, "num_key_value_heads": 8},
            {"moe_intermediate_size": 3584, "moe_k": 8, "moe_num_shared_experts": 0, "moe_layer_start_index": 3},
            source="baidu/ERNIE-4.5-300B-A47B-PT config.json",
            counts=(300e9, 47e9),
        ),
        TINY_ERNIE45,
    ),
)
