"""Readers of families with parts of their own: rotary positions of pictures, an indexer, Mamba layers, Gemma 4, which
the engine does not train yet; and of the image encoders."""

import reprlib
from dataclasses import replace
from typing import Any

from threefold.spec.hf_defaults import GEMMA4_ROPE, VISION_ONLY
from threefold.spec.hf_fields import Fields
from threefold.spec.hf_readers import (
    activation_name,
    group_limited_moe,
    kv_heads,
    layer_pattern,
    num_layers,
    read_deepseek,
    read_qwen3_moe,
    read_qwen3_next,
    sliding_window,
)
from threefold.spec.model import GqaSpec, IndexerSpec, MambaSpec, MoeSpec, VisionSpec, VisionTokens


def read_qwen3_vl_moe(c: Fields) -> dict[str, Any]:
    parts = read_qwen3_moe(c)
    return {**parts, "family": "qwen3_vl_moe", "attention": _with_sections(parts["attention"], c, (24, 20, 20))}


def read_qwen3_5_moe(c: Fields) -> dict[str, Any]:
    parts = read_qwen3_next(c)
    return {**parts, "family": "qwen3_5_moe", "attention": _with_sections(parts["attention"], c, (11, 11, 10))}


def _with_sections(attention: GqaSpec, c: Fields, default: tuple[int, ...]) -> GqaSpec:
    """The attention with its multimodal rotary sections. `default` is what transformers takes where a file has none."""
    found = (c["rope_scaling"] or c["rope_parameters"] or {}).get("mrope_section", default)
    if len(found) != len(default):
        raise ValueError(f"mrope_section is {reprlib.repr(found)}, not one number for time, height and width each")
    return replace(attention, rope_sections=tuple(found))


def read_glm_moe_dsa(c: Fields) -> dict[str, Any]:
    parts = read_deepseek_v32(c)
    indexer = parts["attention"].indexer
    if indexer is not None:
        types, pattern, freq = c["indexer_types"], c["index_topk_pattern"], c["index_topk_freq"]
        is_reused = any(kind in ("S", "shared") for kind in types or pattern or ()) or (
            types is None and pattern is None and (freq or 1) > 1
        )
        indexer = replace(indexer, rope_pairs=True, is_reused=is_reused)
    return {**parts, "family": "glm_moe_dsa", "attention": replace(parts["attention"], indexer=indexer)}


def read_deepseek_v32(c: Fields) -> dict[str, Any]:
    indexer = IndexerSpec(c["index_n_heads"], c["index_head_dim"], c["index_topk"]) if c["index_topk"] else None
    dense = c["first_k_dense_replace"]
    if (types := c["mlp_layer_types"]) is not None:
        dense = list(types).count("dense")
        if layer_pattern(types, {"dense": "-", "sparse": "E"}, num_layers(c)) != "-" * dense + "E" * (
            len(types) - dense
        ):
            raise ValueError("dense layers behind sparse ones (mlp_layer_types) are not supported")
    parts = read_deepseek({**c, "first_k_dense_replace": dense, "num_mtp_layers": c["num_nextn_predict_layers"] or 0})
    if indexer is not None and indexer.head_dim < parts["attention"].rope_dim:
        raise ValueError(f"index_head_dim {indexer.head_dim} is less than the dims that turn, qk_rope_head_dim")
    return {**parts, "family": "deepseek_v32", "attention": replace(parts["attention"], indexer=indexer)}


def read_gemma4(c: Fields) -> dict[str, Any]:
    if not c["enable_moe_block"]:
        raise ValueError("only the Mixture-of-Experts members of Gemma 4 are supported (enable_moe_block)")
    if c["hidden_size_per_layer_input"]:
        raise ValueError("embeddings per layer (hidden_size_per_layer_input) are not supported")
    count, act = num_layers(c), activation_name(c, "hidden_activation")
    default = ["full_attention" if (i + 1) % 6 == 0 else "sliding_attention" for i in range(count)]
    letters = {"sliding_attention": "w", "full_attention": "t"}
    types = list(default if c["layer_types"] is None else c["layer_types"])
    return {
        "family": "gemma4",
        "num_layers": count,
        "pattern": layer_pattern([*types[:-1], "full_attention"], letters, count),  # transformers forces the last one
        "attention": _gemma4_attention(c, "full_attention", shared_kv=c["attention_k_eq_v"]),
        "local_attention": _gemma4_attention(c, "sliding_attention", window=sliding_window(c)),
        "moe": MoeSpec(
            num_experts=c["num_experts"],
            top_k=c["top_k_experts"],
            expert_dim=c["moe_intermediate_size"],
            num_shared=1,
            shared_dim=c["intermediate_size"],
        ),
        "activation": {"gelu_pytorch_tanh": "gelu_tanh"}.get(act, act),
        "norm_eps": float(c["rms_norm_eps"]),
    }


def _gemma4_attention(c: Fields, kind: str, **extra: Any) -> GqaSpec:
    """Global layers have heads of their own size, and rotate a part of them."""
    full = kind == "full_attention"
    rope = (c["rope_parameters"] or GEMMA4_ROPE)[kind]
    sizes = {"num_key_value_heads": c["num_key_value_heads"], "head_dim": c["head_dim"]}
    if full and c["per_layer_config"] is not None:
        for override in c["per_layer_config"].values():
            sizes |= {name: override[name] for name in sizes if name in override}
    elif full:
        sizes["head_dim"] = c["global_head_dim"]
        if c["attention_k_eq_v"] and c["num_global_key_value_heads"] is not None:
            sizes["num_key_value_heads"] = c["num_global_key_value_heads"]
    return GqaSpec(
        num_heads=c["num_attention_heads"],
        num_kv_heads=sizes["num_key_value_heads"],
        head_dim=sizes["head_dim"],
        qk_norm=True,
        bias=c["attention_bias"],
        rope_theta=float(rope["rope_theta"]),
        rope_fraction=float(rope.get("partial_rotary_factor") or 1.0),
        **extra,
    )


_NEMOTRON = {"mamba": "M", "linear_attention": "M", "moe": "E", "attention": "*", "full_attention": "*", "mlp": "-"}


def _nemotron_pattern(types: Any, letters: Any, default: str) -> str:
    """The kinds of the layers as letters: from the list of layer types, else from the string of letters, else
    the default of the configuration class."""
    pattern = default if letters is None else "".join(letters)
    if types is not None:
        pattern = layer_pattern(types, _NEMOTRON)
    if unknown := sorted(set(pattern) - set(_NEMOTRON.values())):
        raise ValueError(f"unknown layers {reprlib.repr(unknown)} in hybrid_override_pattern")
    return pattern


def read_nemotron_h(c: Fields) -> dict[str, Any]:
    if c["tie_word_embeddings"]:  # transformers gives it a head of its own all the same
        raise ValueError("a head tied to the embedding (tie_word_embeddings) is not supported")
    pattern = _nemotron_pattern(c["layers_block_type"], c["hybrid_override_pattern"], "ME*-")
    moe = group_limited_moe(c, shared_dim=c["moe_shared_expert_intermediate_size"], latent_dim=c["moe_latent_size"])
    return {
        "family": "nemotron_h",
        "num_layers": len(pattern),
        "pattern": pattern,
        "dense_dim": c["intermediate_size"],
        "attention": GqaSpec(c["num_attention_heads"], kv_heads(c), c["head_dim"], use_rope=False),
        "mamba": MambaSpec(
            num_heads=c["mamba_num_heads"],
            head_dim=c["mamba_head_dim"],
            state_dim=c["ssm_state_size"],
            num_groups=c["n_groups"],
            conv=c["conv_kernel"],
            time_step_min=float(c["time_step_min"]),
        ),
        "moe": moe if "E" in pattern else None,
        "glu": False,
        "activation": activation_name(c, "mlp_hidden_act"),
        "norm_eps": float(c["layer_norm_epsilon"]),
        "mtp_layers": c["num_nextn_predict_layers"],
        "mtp_pattern": _nemotron_pattern(c["mtp_layers_block_type"], c["mtp_hybrid_override_pattern"], "*E"),
        "mtp_shared": True,
    }


def read_vision(c: Fields, ids: Fields) -> VisionSpec:
    """The image encoder, from `vision_config` and the table around it, which has the ids of its tokens."""
    only = {**VISION_ONLY, "out_hidden_size": (ids.get("text_config") or {}).get("hidden_size")}
    for name, value in only.items():
        if name in c and value is not None and c[name] != value:
            raise ValueError(f"{name} {reprlib.repr(c[name])} of the image encoder is not supported, only {value!r}")
    return VisionSpec(
        depth=c["depth"],
        dim=c["hidden_size"],
        mlp_dim=c["intermediate_size"],
        num_heads=c["num_heads"],
        patch=c["patch_size"],
        temporal_patch=c["temporal_patch_size"],
        merge=c["spatial_merge_size"],
        num_positions=c["num_position_embeddings"],
        deepstack=tuple(c.get("deepstack_visual_indexes") or ()),
        tokens=VisionTokens(
            start=ids["vision_start_token_id"],
            end=ids["vision_end_token_id"],
            image=ids["image_token_id"],
            video=ids["video_token_id"],
        ),
    )
