"""Readers of families with parts of their own: rotary positions of pictures, an indexer, Mamba layers; and of the image
encoders."""

import reprlib
from dataclasses import replace
from typing import Any

from threefold.spec.hf_defaults import VISION_ONLY
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
    refuse_others,
)
from threefold.spec.model import GqaSpec, IndexerSpec, MambaSpec, VisionSpec, VisionTokens


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
    refuse_others(c, {"indexer_rope_interleave": True})
    parts = read_deepseek_v32(c)
    attention = parts["attention"]
    types, pattern, freq = c["indexer_types"], c["index_topk_pattern"], c["index_topk_freq"]
    is_reused = any(kind in ("S", "shared") for kind in types or pattern or ()) or (
        types is None and pattern is None and (freq or 1) > 1
    )
    indexer = replace(attention.indexer, rope_pairs=True, is_reused=is_reused)
    return {**parts, "family": "glm_moe_dsa", "attention": replace(attention, indexer=indexer)}


def read_deepseek_v32(c: Fields) -> dict[str, Any]:
    refuse_others(c, {"rope_interleave": True})
    indexer = IndexerSpec(c["index_n_heads"], c["index_head_dim"], c["index_topk"])
    dense = c["first_k_dense_replace"]
    if (types := c["mlp_layer_types"]) is not None:
        pattern = layer_pattern(types, {"dense": "-", "sparse": "E"}, num_layers(c))
        dense = pattern.count("-")
        if "E-" in pattern:
            raise ValueError("dense layers behind sparse ones (mlp_layer_types) are not supported")
    changed = {"first_k_dense_replace": dense, "num_mtp_layers": c["num_nextn_predict_layers"] or 0}
    parts = read_deepseek({**c, **changed, "rope_interleave": True})
    if indexer.head_dim < parts["attention"].rope_dim:
        raise ValueError(f"index_head_dim {indexer.head_dim} is less than the dims that turn, qk_rope_head_dim")
    return {**parts, "family": "deepseek_v32", "attention": replace(parts["attention"], indexer=indexer)}


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
    depth = _nemotron_pattern(c["mtp_layers_block_type"], c["mtp_hybrid_override_pattern"], "*E")
    if "E" not in pattern and "E" in depth:
        if c["num_nextn_predict_layers"]:
            raise ValueError("MTP depths with experts in a model without any are not supported")
        depth = depth.replace("E", "-")  # the default, of a depth that only a plan may add
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
        "mtp_pattern": depth,
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
