"""Nemotron-H: Mamba-2, attention without positions and experts, each in a layer of its own."""

import reprlib
from typing import Any

from threefold.spec.family import (
    BALANCED_SIGMOID,
    NO_DROPOUT,
    Family,
    Fields,
    HfClass,
    Parts,
    WeightNames,
    published,
    tiny,
)
from threefold.spec.hf_parts import layer_pattern, standard_parts
from threefold.spec.model import Layer, MambaSpec, ModelSpec

_LETTERS = {"mamba": "M", "linear_attention": "M", "moe": "E", "attention": "*", "full_attention": "*", "mlp": "-"}


def _pattern(types: Any, letters: Any, default: str) -> str:
    """The kinds of the layers as letters: from the list of layer types, else from the string of letters, else
    the default of the configuration class."""
    pattern = default if letters is None else "".join(letters)
    if types is not None:
        pattern = layer_pattern(types, _LETTERS)
    if unknown := sorted(set(pattern) - set(_LETTERS.values())):
        raise ValueError(f"unknown layers {reprlib.repr(unknown)} in hybrid_override_pattern")
    return pattern


def _read(c: Fields, family: Family) -> Parts:
    if c["tie_word_embeddings"]:  # transformers gives it a head of its own all the same
        raise ValueError("a head tied to the embedding (tie_word_embeddings) is not supported")
    pattern = _pattern(c["layers_block_type"], c["hybrid_override_pattern"], "ME*-")
    depth = _pattern(c["mtp_layers_block_type"], c["mtp_hybrid_override_pattern"], "*E")
    if "E" not in pattern and "E" in depth:
        if c["num_nextn_predict_layers"]:
            raise ValueError("MTP depths with experts in a model without any are not supported")
        depth = depth.replace("E", "-")  # the default, of a depth that only a plan may add
    parts = standard_parts({**c, "num_hidden_layers": len(pattern)}, family)
    moe = parts["moe"] if "E" in pattern else None
    return {**parts, "pattern": pattern, "mtp_pattern": depth, "mtp_shared": True, "moe": moe}


_PLACES = {
    "layer_norm_epsilon": "norm_eps",
    "num_nextn_predict_layers": "mtp_layers",
    "moe_shared_expert_intermediate_size": "moe.shared_dim",
    "moe_latent_size": "moe.latent_dim",
    "mamba_num_heads": "mamba.num_heads",
    "mamba_head_dim": "mamba.head_dim",
    "ssm_state_size": "mamba.state_dim",
    "n_groups": "mamba.num_groups",
    "conv_kernel": "mamba.conv",
    "time_step_min": "mamba.time_step_min",
}
_BLOCKS = {  # transformers from 5.13 on has other names for the first two, and takes these for them
    Layer("mamba", "none"): "mamba",
    Layer("attention", "none"): "attention",
    Layer("none", "moe"): "moe",
    Layer("none", "dense"): "mlp",
}


def _write(spec: ModelSpec) -> Parts:
    return {
        "layers_block_type": [_BLOCKS[layer] for layer in spec.layers],
        "mtp_layers_block_type": [_BLOCKS[layer] for layer in spec.mtp_depth],
        "mlp_hidden_act": spec.activation,
        "pad_token_id": None,
    }


TINY_NEMOTRON_H = tiny(
    "tiny-nemotron-h",
    "nemotron_h",
    num_layers=6,
    pattern="MEM*E-",
    attention={"use_rope": False},
    mamba=MambaSpec(num_heads=8, head_dim=32, state_dim=16, num_groups=4),
    moe={"num_shared": 1, "shared_dim": 128, "score": "sigmoid", "balance_bias": True},
    dense_dim=256,
    glu=False,
    activation="relu2",
    mtp_pattern="*E",
    mtp_shared=True,
    norm_eps=1e-5,
)
_SUPER = "MEMEMEM*EMEMEMEM*EMEMEMEM*EMEMEMEMEM*EMEMEMEMEM*EMEMEMEMEM*EMEMEMEMEM*EMEMEMEM*EMEMEMEME"
_ULTRA = "MEMEMEM*EMEMEM*EMEMEMEM*EMEMEMEM*EMEMEM*EMEMEMEM*EMEMEMEM*EMEMEM*EMEMEMEM*EMEMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME"
NEMOTRON_H = Family(
    "nemotron_h",
    {"nemotron_h": "NemotronHForCausalLM"},
    HfClass(
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
            **NO_DROPOUT,
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
                *("num_logits_to_keep", "max_position_embeddings", "sliding_window", "use_mamba_kernels"),
                # The widths of Mamba layers are stated; the limits of steps but the least one belong to initial
                # weights, or are not read by transformers either.
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
        places=_PLACES,
    ),
    facts={**BALANCED_SIGMOID, "glu": False, "attention.use_rope": False},
    read=_read,
    write=_write,
    # One module a layer, called `mixer` whatever it is. In memory transformers has `model.` and stacked experts.
    names=WeightNames(
        prefixes=("backbone.", "model."),
        embed="embeddings",
        norm="norm_f",
        layer_norms=("norm", "norm"),
        mixers={"attention": "mixer.", "mamba": "mixer."},
        mamba={
            "in_proj": "in_proj",
            "conv": "conv1d.weight",
            "conv_bias": "conv1d.bias",
            "dt_bias": "dt_bias",
            "a_log": "A_log",
            "skip": "D",
            "norm": "norm",
            "out": "out_proj",
        },
        dense="mixer",
        router=("mixer.gate",),
        balance_bias=("mixer.gate.e_score_correction_bias",),
        shared=("mixer.shared_experts",),
        experts="mixer.experts",
        stacked_experts=("mixer.experts.up_proj", "mixer.experts.down_proj"),
        mtp="layers",
    ),
    models=(
        published(
            "nemotron-3-nano",
            (52, 2688, 32, 131072),
            {"intermediate_size": 0, "num_key_value_heads": 2, "mamba_num_heads": 64},
            {"n_routed_experts": 128, "moe_intermediate_size": 1856, "moe_shared_expert_intermediate_size": 3712},
            {"num_experts_per_tok": 6, "routed_scaling_factor": 2.5},
            {"hybrid_override_pattern": "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME"},
            source="Megatron-LM NVIDIA-Nemotron-3-Nano-30B-A3B-BF16.sh; convolution width from NemotronHConfig",
            counts=(31.6e9, 3.6e9),
        ),
        published(
            "nemotron-3.5-lightning",
            (52, 2688, 32, 131072),
            {"intermediate_size": 0, "num_key_value_heads": 2, "mamba_num_heads": 64},
            {"num_nextn_predict_layers": 2, "n_routed_experts": 128, "moe_intermediate_size": 1856},
            {"moe_shared_expert_intermediate_size": 3712, "num_experts_per_tok": 6, "routed_scaling_factor": 2.5},
            {"hybrid_override_pattern": "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME"},
            source="Megatron-LM functional test nemotron3_5_lightning_nightly: Nano with two repeated MTP depths",
        ),
        published(
            "nemotron-3-super",
            (88, 4096, 32, 131072),
            {"intermediate_size": 0, "num_key_value_heads": 2, "num_nextn_predict_layers": 2},
            {"n_routed_experts": 512, "moe_intermediate_size": 2688, "moe_shared_expert_intermediate_size": 5376},
            {"moe_latent_size": 1024, "num_experts_per_tok": 22, "routed_scaling_factor": 5.0},
            {"hybrid_override_pattern": _SUPER},
            source="Megatron-LM NVIDIA-Nemotron-3-Super-120B-A12B-BF16.sh",
            counts=(120e9, 12e9),
            approximate="Mamba state and groups are Megatron's defaults; the FLOP count of published runs agrees",
        ),
        published(
            "nemotron-3-ultra",
            (108, 8192, 64, 131072),
            {"intermediate_size": 0, "num_key_value_heads": 2, "mamba_num_heads": 256},
            {"num_nextn_predict_layers": 2, "n_routed_experts": 512, "moe_intermediate_size": 5120},
            {"moe_shared_expert_intermediate_size": 10240, "moe_latent_size": 2048, "num_experts_per_tok": 22},
            {"routed_scaling_factor": 5.0},
            {"hybrid_override_pattern": _ULTRA},
            source="Megatron-LM NVIDIA-Nemotron-3-Ultra-550B-A55B-BF16.sh",
            counts=(550e9, 55e9),
            approximate="vocabulary, Mamba state and groups taken from the family",
        ),
        TINY_NEMOTRON_H,
    ),
)
