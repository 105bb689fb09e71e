"""Granite: Mixtral's experts, and multipliers on embeddings, attention logits, residual branches and logits.

The multiplier of residual branches scales the values of attention and the weights of experts.
"""

from threefold.spec.family import (
    ROPE_AND_HEADS,
    Family,
    Fields,
    HfClass,
    Parts,
    Place,
    WeightNames,
    decoder,
    published,
    tiny,
)
from threefold.spec.hf_parts import standard_parts


def _read(c: Fields, family: Family) -> Parts:
    if c["attention_bias"] and float(c["residual_multiplier"]) != 1.0:
        raise ValueError("attention_bias together with a residual_multiplier is not supported")
    return standard_parts(c, family)


_GRANITE_SCALE = 0.22  # residual_multiplier
TINY_GRANITE = tiny(
    "tiny-granite-moe",
    "granitemoe",
    attention={"scale": 0.0625, "out_scale": _GRANITE_SCALE},
    moe={"scale": _GRANITE_SCALE},
    tied=True,
    embed_scale=12.0,
    logit_divisor=6.0,
)
_PLACES: dict[str, Place] = {
    "intermediate_size": "moe.expert_dim",
    "embedding_multiplier": "embed_scale",
    "logits_scaling": "logit_divisor",
    "residual_multiplier": ("attention.out_scale", "moe.scale"),
    "attention_multiplier": "attention.scale",
}
GRANITEMOE = Family(
    "granitemoe",
    {"granitemoe": "GraniteMoeForCausalLM"},
    HfClass(
        defaults={
            **decoder(11008, None, 2048),
            "embedding_multiplier": 1.0,
            "logits_scaling": 1.0,
            "residual_multiplier": 1.0,
            "attention_multiplier": 1.0,
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
        },
        extra=ROPE_AND_HEADS,
        places=_PLACES,
    ),
    read=_read,
    names=WeightNames(
        router=("block_sparse_moe.router.layer", "block_sparse_moe.router"),
        stacked_experts=("block_sparse_moe.experts.gate_up_proj", "block_sparse_moe.experts.down_proj"),
        stacked_on_disk=("block_sparse_moe.input_linear.weight", "block_sparse_moe.output_linear.weight"),
    ),
    models=(
        published(
            "granite-3.1-3b-a800m",
            (32, 1536, 24, 49155),
            {"intermediate_size": 512, "tie_word_embeddings": True, "num_key_value_heads": 8},
            {"embedding_multiplier": 12.0, "logits_scaling": 6.0, "residual_multiplier": 0.22},
            {"attention_multiplier": 0.015625, "num_local_experts": 40, "num_experts_per_tok": 8},
            source="ibm-granite/granite-3.1-3b-a800m-base config.json",
            counts=(3.3e9, 0.8e9),
        ),
        published(
            "granite-3.1-1b-a400m",
            (24, 1024, 16, 49155),
            {"intermediate_size": 512, "tie_word_embeddings": True, "num_key_value_heads": 8},
            {"embedding_multiplier": 12.0, "logits_scaling": 6.0, "residual_multiplier": 0.22},
            {"attention_multiplier": 0.015625, "num_local_experts": 32, "num_experts_per_tok": 8},
            source="ibm-granite/granite-3.1-1b-a400m-base config.json",
            counts=(1.3e9, 0.4e9),
        ),
        TINY_GRANITE,
    ),
)
