"""The families that the engine trains: a ModelSpec's parts from the fields of their configurations.

`spec/hf.py` calls one of them with the fields that `complete` made, so that every one is there.
"""

import reprlib
from collections.abc import Mapping, Sequence
from typing import Any

from threefold.fields import MAX_LAYERS
from threefold.spec.hf_fields import Fields, read_rope
from threefold.spec.model import DeltaSpec, GqaSpec, MlaSpec, MoeSpec


def grouped_attention(c: Fields, partial: bool = False, fixed_alpha: bool = False, **extra: Any) -> GqaSpec:
    head_dim = _head_dim(c)
    sizes = {"num_heads": c["num_attention_heads"], "num_kv_heads": kv_heads(c), "head_dim": head_dim}
    bias = c.get("attention_bias", False)
    return GqaSpec(**{**sizes, "bias": bias, **read_rope(c, head_dim, partial, fixed_alpha), **extra})


def _head_dim(c: Fields) -> Any:
    return c["hidden_size"] // c["num_attention_heads"] if c["head_dim"] is None else c["head_dim"]


def kv_heads(c: Fields) -> Any:
    return c["num_attention_heads"] if c["num_key_value_heads"] is None else c["num_key_value_heads"]


def latent_attention(c: Fields) -> MlaSpec:
    heads, rotated = c["num_attention_heads"], c["qk_rope_head_dim"]
    if kv_heads(c) != heads:
        raise ValueError(f"num_key_value_heads {c['num_key_value_heads']} is not num_attention_heads {heads}")
    if c.get("head_dim") not in (None, rotated):
        raise ValueError(f"head_dim {c['head_dim']} is not qk_rope_head_dim {rotated}")
    return MlaSpec(
        num_heads=heads,
        q_rank=c["q_lora_rank"],
        kv_rank=c["kv_lora_rank"],
        nope_dim=c["qk_nope_head_dim"],
        rope_dim=rotated,
        v_dim=c["v_head_dim"],
        rope_pairs=bool(c["rope_interleave"]),
        **read_rope(c, rotated),
    )


def activation_name(c: Fields, key: str = "hidden_act") -> str:
    """By the name that transformers has for it; swish is its other word for silu."""
    name = str(c[key])
    if " " in name:  # such as what this package calls the activation of GPT-OSS
        raise ValueError(f"{key} {name!r} is no activation of transformers")
    return "silu" if name == "swish" else name


def num_layers(c: Fields) -> int:
    """Checked here already, for readers that make a list of so many layers."""
    count = c["num_hidden_layers"]
    if type(count) is not int or not 1 <= count <= MAX_LAYERS:
        raise ValueError(f"num_hidden_layers is {reprlib.repr(count)}, not a whole number from 1 to {MAX_LAYERS}")
    return count


def layer_pattern(types: Sequence[str], letters: Mapping[str, str], num_layers: int | None = None) -> str:
    unknown = sorted(set(types) - set(letters))
    if unknown:
        raise ValueError(f"unknown layer types {reprlib.repr(unknown)} in layer_types")
    if num_layers not in (None, len(types)):
        raise ValueError(f"layer_types has {len(types)} layers, num_hidden_layers {num_layers}")
    return "".join(letters[kind] for kind in types)


def read_llama(c: Fields) -> dict[str, Any]:
    return decoder_parts(c, "llama", grouped_attention(c))


def decoder_parts(c: Fields, family: str, attention: GqaSpec, **parts: Any) -> dict[str, Any]:
    """What the decoders of most families have, with `parts` of a family's own."""
    return {
        "family": family,
        "num_layers": c["num_hidden_layers"],
        "dense_dim": c["intermediate_size"],
        "attention": attention,
        "activation": activation_name(c),
        "norm_eps": float(c["rms_norm_eps"]),
        **parts,
    }


def read_qwen3(c: Fields) -> dict[str, Any]:
    if c.get("layer_types") is not None:
        layer_pattern(c["layer_types"], {"full_attention": "t"}, num_layers(c))
    return {**read_llama(c), "family": "qwen3", "attention": grouped_attention(c, qk_norm=True)}


def read_mixtral(c: Fields) -> dict[str, Any]:
    moe = MoeSpec(c["num_local_experts"], c["num_experts_per_tok"], c["intermediate_size"])
    attention = grouped_attention(c, window=sliding_window(c))
    return {**read_llama(c), "family": "mixtral", "dense_dim": 0, "moe": moe, "attention": attention}


def sliding_window(c: Fields) -> Any:
    window = c["sliding_window"]
    if window is not None and (type(window) is not int or window < 1):
        raise ValueError(f"sliding_window is {reprlib.repr(window)}, not a whole number from 1 on")
    return window


def read_qwen3_moe(c: Fields) -> dict[str, Any]:
    moe = MoeSpec(
        c["num_experts"], c["num_experts_per_tok"], c["moe_intermediate_size"], norm_topk=c.get("norm_topk_prob", True)
    )
    return {**read_qwen3(c), "family": "qwen3_moe", "moe": moe}


def read_qwen3_next(c: Fields) -> dict[str, Any]:
    count, interval = num_layers(c), c["full_attention_interval"]
    default = ["full_attention" if (i + 1) % interval == 0 else "linear_attention" for i in range(count)]
    letters = {"linear_attention": "d", "full_attention": "t"}
    shared = c["shared_expert_intermediate_size"]
    moe = MoeSpec(
        num_experts=c["num_experts"],
        top_k=c["num_experts_per_tok"],
        expert_dim=c["moe_intermediate_size"],
        num_shared=1 if shared else 0,
        shared_dim=shared,
        shared_gate=bool(shared),
        norm_topk=c.get("norm_topk_prob", True),
    )
    return {
        "family": "qwen3_next",
        "num_layers": count,
        "pattern": layer_pattern(default if c["layer_types"] is None else c["layer_types"], letters, count),
        "dense_dim": c.get("intermediate_size", 0),
        "attention": grouped_attention(c, partial=True, qk_norm=True, gated=True),
        "delta": DeltaSpec(
            num_k_heads=c["linear_num_key_heads"],
            num_v_heads=c["linear_num_value_heads"],
            k_dim=c["linear_key_head_dim"],
            v_dim=c["linear_value_head_dim"],
            conv=c["linear_conv_kernel_dim"],
        ),
        "moe": moe,
        "activation": activation_name(c),
        "norm_eps": float(c["rms_norm_eps"]),
        "mtp_layers": c["num_nextn_predict_layers"] or c["mtp_num_hidden_layers"] or 0,
    }


def group_limited_moe(c: Fields, **extra: Any) -> MoeSpec:
    """Experts as DeepSeek-V3 routes them: sigmoid scores, groups of experts, and a bias that balances the load."""
    return MoeSpec(
        num_experts=c["n_routed_experts"],
        top_k=c["num_experts_per_tok"],
        expert_dim=c["moe_intermediate_size"],
        num_shared=c["n_shared_experts"],
        score="sigmoid",
        norm_topk=c["norm_topk_prob"],
        num_groups=c["n_group"],
        top_groups=c["topk_group"],
        scale=float(c["routed_scaling_factor"]),
        balance_bias=True,
        **extra,
    )


def refuse_others(c: Fields, supported: dict[str, Any]) -> None:
    """Raise ValueError where a key of a family's own code has another value than the one that transformers runs."""
    for key, only in supported.items():
        values = c[key] if isinstance(c[key], list) else [c[key]]
        if any(value not in (None, only) for value in values):
            raise ValueError(f"{key} {reprlib.repr(c[key])} is not supported, only {only!r}")


def read_deepseek(c: Fields) -> dict[str, Any]:
    refuse_others(c, {"moe_layer_freq": 1, "scoring_func": "sigmoid", "topk_method": "noaux_tc"})
    return {
        "family": "deepseek_v3",
        "num_layers": c["num_hidden_layers"],
        "num_dense_layers": c["first_k_dense_replace"],
        "dense_dim": c["intermediate_size"],
        "attention": latent_attention(c),
        "moe": group_limited_moe(c),
        "activation": activation_name(c),
        "norm_eps": float(c["rms_norm_eps"]),
        "mtp_layers": c["num_mtp_layers"],
    }


def read_gpt_oss(c: Fields) -> dict[str, Any]:
    count = num_layers(c)
    letters = {"sliding_attention": "w", "full_attention": "t"}
    default = ["sliding_attention" if i % 2 == 0 else "full_attention" for i in range(count)]
    pattern = layer_pattern(default if c["layer_types"] is None else c["layer_types"], letters, count)
    window = sliding_window(c)
    if "w" in pattern and window is None:
        raise ValueError("layers of sliding_attention need a sliding_window")
    return {
        "family": "gpt_oss",
        "num_layers": count,
        "pattern": pattern,
        "attention": grouped_attention(c, sinks=True),
        "local_attention": grouped_attention(c, sinks=True, window=window),
        "moe": MoeSpec(c["num_local_experts"], c["num_experts_per_tok"], c["intermediate_size"], bias=True),
        "activation": "clamped swiglu",
        "norm_eps": float(c["rms_norm_eps"]),
    }
