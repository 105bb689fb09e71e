"""GPT-OSS: sinks and windows in attention, biases everywhere, and experts with a clamped SwiGLU, published in MXFP4."""

from dataclasses import replace

from threefold.spec.family import (
    BASE,
    NO_DROPOUT,
    Family,
    Fields,
    HfClass,
    Parts,
    WeightNames,
    published,
    tiny,
    tiny_heads,
)
from threefold.spec.hf_parts import layer_types, num_layers, standard_parts, windowed_pattern
from threefold.spec.model import ModelSpec


def _read(c: Fields, family: Family) -> Parts:
    default = ["sliding_attention" if i % 2 == 0 else "full_attention" for i in range(num_layers(c))]
    pattern, parts = windowed_pattern(c, default), standard_parts(c, family)
    return {**parts, "pattern": pattern, "local_attention": {**parts["attention"], "window": c["sliding_window"]}}


def _write(spec: ModelSpec) -> Parts:
    window = spec.local_attention.window if spec.local_attention else None
    return {"layer_types": layer_types(spec), "sliding_window": window}


_TINY_ATTENTION = tiny_heads(bias=True, sinks=True)
TINY_GPT_OSS = tiny(
    "tiny-gpt-oss",
    "gpt_oss",
    pattern="wt",
    attention=_TINY_ATTENTION,
    local_attention=replace(_TINY_ATTENTION, window=32),
    moe={"bias": True},
    activation="clamped swiglu",
)
GPT_OSS = Family(
    "gpt_oss",
    {"gpt_oss": "GptOssForCausalLM"},
    HfClass(
        defaults={
            **{name: value for name, value in BASE.items() if name != "hidden_act"},
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
        only={**NO_DROPOUT, "swiglu_alpha": 1.702, "swiglu_limit": 7.0},
        unread=frozenset({"hidden_act"}),  # its experts have a clamped SwiGLU, whatever the name
        aliases={"num_experts": "num_local_experts"},
        null_means={"sliding_window": None},
        theta=150_000.0,
        places={"intermediate_size": "moe.expert_dim"},
    ),
    facts={"activation": "clamped swiglu", "attention.sinks": True, "moe.bias": True},
    read=_read,
    write=_write,
    names=WeightNames(router=("mlp.router", "mlp.gate"), input_dim_first="interleaved"),
    models=(
        published(
            "gpt-oss-20b",
            (24, 2880, 64, 201088),
            {"num_local_experts": 32},
            source="Megatron Bridge GPTOSSProvider20B; counts from the gpt-oss model card (active without embedding)",
            counts=(20.91e9, 3.61e9),
        ),
        published(
            "gpt-oss-120b",
            (36, 2880, 64, 201088),
            source="transformers GptOssConfig defaults; counts from the gpt-oss model card (active without embedding)",
            counts=(116.83e9, 5.13e9),
        ),
        TINY_GPT_OSS,
    ),
)
