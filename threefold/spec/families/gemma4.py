"""Gemma 4's Mixture-of-Experts text model, alone (`gemma4_text`) and in the configuration with images (`gemma4`)."""

import reprlib
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from threefold.spec.family import (
    NO_DROPOUT,
    ROPE,
    Family,
    Fields,
    HfClass,
    Parts,
    WeightNames,
    published,
    tiny,
    tiny_heads,
)
from threefold.spec.hf_config import scaling_keys
from threefold.spec.hf_fields import number, read_rope
from threefold.spec.hf_parts import LETTERS, layer_pattern, layer_types, num_layers, sliding_window, standard_parts
from threefold.spec.model import GqaSpec, ModelSpec, RopeScaling

ROPE_BY_TYPE: dict[str, dict[str, Any]] = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
    "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1_000_000.0},
}
_ROPE_KINDS = ("default", "proportional", "linear", "yarn", "llama3")


def _read(c: Fields, family: Family) -> Parts:
    """Windows and global attention with heads of their own, and a dense network beside the experts of every layer."""
    if not c["enable_moe_block"]:
        raise ValueError("only the Mixture-of-Experts members of Gemma 4 are supported (enable_moe_block)")
    if c["hidden_size_per_layer_input"]:
        raise ValueError("embeddings per layer (hidden_size_per_layer_input) are not supported")
    if c["use_bidirectional_attention"] not in (None, "vision"):  # the latter concerns tokens of pictures alone
        value = reprlib.repr(c["use_bidirectional_attention"])
        raise ValueError(f"use_bidirectional_attention {value} is not supported, only null or 'vision'")
    count = num_layers(c)
    default = ["full_attention" if (i + 1) % 6 == 0 else "sliding_attention" for i in range(count)]
    types = list(default if c["layer_types"] is None else c["layer_types"])
    types = [*types[:-1], "full_attention"]  # transformers forces the last one
    letters = {kind: LETTERS[kind] for kind in ROPE_BY_TYPE}
    parts, softcap = standard_parts(c, family), c["final_logit_softcapping"]
    return {
        **parts,
        "pattern": layer_pattern(types, letters, count),
        "attention": _attention(c, "full_attention", types, shared_kv=c["attention_k_eq_v"]),
        "local_attention": _attention(c, "sliding_attention", types, window=sliding_window(c)),
        "activation": {"gelu_pytorch_tanh": "gelu_tanh"}.get(parts["activation"], parts["activation"]),
        "embed_scale": float(c["hidden_size"] ** 0.5),
        "logit_softcap": None if softcap is None else number("final_logit_softcapping", softcap),
    }


def _attention(c: Fields, kind: str, types: list[str], **extra: Any) -> Parts:
    """Layers with a window and global ones have heads and rotary positions of their own."""
    sizes = _head_sizes(c, [at for at, name in enumerate(types) if name == kind], kind == "full_attention")
    return {
        "num_heads": c["num_attention_heads"],
        "num_kv_heads": sizes["num_key_value_heads"],
        "head_dim": sizes["head_dim"],
        **_NORMED,
        "bias": c["attention_bias"],
        **_rope(c, kind, sizes["head_dim"]),
        **extra,
    }


def _head_sizes(c: Fields, layers: list[int], is_global: bool) -> dict[str, Any]:
    """Sizes of the heads of these layers, which are alike in all of them."""
    sizes = {"num_key_value_heads": c["num_key_value_heads"], "head_dim": c["head_dim"]}
    if (by_layer := c["per_layer_config"]) is not None:
        if not isinstance(by_layer, Mapping) or not all(isinstance(one, Mapping) for one in by_layer.values()):
            raise ValueError(f"per_layer_config is {reprlib.repr(by_layer)}, not a table for each layer")
        tables = {int(layer): dict(table) for layer, table in by_layer.items()}
        found = [tables.get(layer, {}) for layer in layers]
        if unknown := sorted(set().union(*tables.values()) - set(sizes)):
            raise ValueError(f"per_layer_config with {', '.join(map(str, unknown))} is not supported")
        if any(one != found[0] for one in found):
            raise ValueError("per_layer_config with heads that differ between layers of one type is not supported")
        return sizes | (found[0] if found else {})
    if is_global:
        sizes["head_dim"] = c["global_head_dim"]
        if c["attention_k_eq_v"] and c["num_global_key_value_heads"] is not None:
            sizes["num_key_value_heads"] = c["num_global_key_value_heads"]
    return sizes


def _rope(c: Fields, layer_type: str, head_dim: Any) -> dict[str, Any]:
    """The rotary positions of a type of layer. `proportional` turns the first frequencies of the whole head."""
    tables = c["rope_parameters"] or ROPE_BY_TYPE
    table = tables.get(layer_type) if isinstance(tables, Mapping) else None
    if not isinstance(table, Mapping):
        raise ValueError(f"rope_parameters is {reprlib.repr(tables)}, not a table for each type of layer")
    kind = table.get("rope_type", "default")
    if kind not in _ROPE_KINDS:
        raise ValueError(f"rope_type {reprlib.repr(kind)} in rope_parameters is not supported")
    if kind != "proportional":
        length = table.get("original_max_position_embeddings")
        own = {**dict.fromkeys(ROPE), "rope_parameters": table, "max_position_embeddings": length or 1}
        if kind in ("yarn", "llama3") and length is None:
            raise ValueError(f"the rotary scaling {kind!r} lacks original_max_position_embeddings")
        return read_rope({**c, **own}, head_dim)
    fraction = number("partial_rotary_factor", table.get("partial_rotary_factor", 1.0))
    factor = number("factor", table.get("factor", 1.0))
    if not 0 < fraction <= 1:
        raise ValueError(f"partial_rotary_factor is {fraction}, not above 0 and at most 1")
    if type(head_dim) is int and (head_dim % 2 or not int(head_dim * fraction // 2)):
        raise ValueError(f"partial_rotary_factor {fraction} turns no pair of a head of {head_dim} dimensions")
    scaling = RopeScaling(factor, original_len=1, kind="proportional", turning_fraction=fraction)
    return {"rope_theta": number("rope_theta", table["rope_theta"]), "rope_scaling": scaling}


def _write(spec: ModelSpec) -> Parts:
    full, local = spec.attention, spec.local_attention
    assert isinstance(full, GqaSpec)
    assert local is not None
    types = layer_types(spec)
    sizes = {"head_dim": full.head_dim, "num_key_value_heads": full.num_kv_heads}
    return {
        "hidden_activation": "gelu_pytorch_tanh",
        "layer_types": types,
        "num_key_value_heads": local.num_kv_heads,
        "head_dim": local.head_dim,
        "per_layer_config": {str(number): sizes for number, kind in enumerate(types) if kind == "full_attention"},
        "attention_k_eq_v": full.shared_kv,
        "sliding_window": local.window,
        "rope_parameters": {"full_attention": _layer_rope(full), "sliding_attention": _layer_rope(local)},
        "final_logit_softcapping": spec.logit_softcap,
        "hidden_size_per_layer_input": 0,
        "enable_moe_block": True,
    }


def _layer_rope(attention: GqaSpec) -> dict[str, Any]:
    """The rotary positions of Gemma's layers of one type."""
    scaling, theta = attention.rope_scaling, {"rope_theta": attention.rope_theta}
    if scaling is None:
        return {"rope_type": "default", **theta}
    if scaling.kind == "proportional":
        part = {"partial_rotary_factor": scaling.turning_fraction, "factor": scaling.factor}
        return {"rope_type": "proportional", **part, **theta}
    return {**scaling_keys(scaling), **theta}


_NORMED: dict[str, Any] = {"qk_norm": True, "v_norm": True, "out_norm": True, "scale": 1.0}

_TINY_ATTENTION = tiny_heads(**_NORMED)
TINY_GEMMA4 = tiny(
    "tiny-gemma4",
    "gemma4",
    pattern="wt",
    attention=replace(
        _TINY_ATTENTION,
        num_kv_heads=2,
        head_dim=32,
        shared_kv=True,
        rope_theta=1e6,
        rope_scaling=RopeScaling(1.0, 1, "proportional", turning_fraction=0.25),
    ),
    local_attention=replace(_TINY_ATTENTION, window=32),
    moe={"num_shared": 1, "shared_dim": 128, "own_norms": True, "expert_scale": True},
    activation="gelu_tanh",
    tied=True,
    embed_scale=128**0.5,
    logit_softcap=30.0,
    layer_scale=True,
)
GEMMA4 = Family(
    "gemma4",
    {"gemma4": None, "gemma4_text": "Gemma4ForCausalLM"},
    HfClass(
        defaults={
            "hidden_activation": "gelu_pytorch_tanh",
            "initializer_range": 0.02,
            "rms_norm_eps": 1e-6,
            "tie_word_embeddings": True,
            "rope_parameters": None,
            "intermediate_size": 9216,
            "num_key_value_heads": 4,
            "head_dim": 256,
            "attention_bias": False,
            "sliding_window": 512,
            "layer_types": None,
            "final_logit_softcapping": None,
            "use_bidirectional_attention": None,
            "hidden_size_per_layer_input": 256,
            "attention_k_eq_v": False,
            "enable_moe_block": False,
            "num_experts": None,
            "top_k_experts": None,
            "moe_intermediate_size": None,
        },
        only={**NO_DROPOUT, "num_kv_shared_layers": 0, "use_double_wide_mlp": False},
        # The second one belongs to embeddings per layer, which are refused.
        unread=frozenset({"max_position_embeddings", "vocab_size_per_layer_input"}),
        extra={"global_head_dim": 512, "num_global_key_value_heads": None, "per_layer_config": None},
        places={"intermediate_size": "moe.shared_dim", "top_k_experts": "moe.top_k"},
    ),
    facts={"moe.num_shared": 1, "moe.own_norms": True, "moe.expert_scale": True, "layer_scale": True},
    attention="own",
    read=_read,
    write=_write,
    composite_tied=True,
    names=WeightNames(
        own={
            "output_scale": "layer_scalar",
            "mixer.out_norm.weight": "post_attention_layernorm.weight",
            "ffn.shared_scale": "pre_feedforward_layernorm.weight",
            "ffn.routed_scale": "pre_feedforward_layernorm_2.weight",
            "ffn.shared_norm.weight": "post_feedforward_layernorm_1.weight",
            "ffn.routed_norm.weight": "post_feedforward_layernorm_2.weight",
            "ffn.out_norm.weight": "post_feedforward_layernorm.weight",
            "ffn.router.input_scale": "router.scale",
            "ffn.router.expert_scale": "router.per_expert_scale",
        },
        router=("router.proj",),
        shared=("mlp",),
        stacked_experts=("experts.gate_up_proj", "experts.down_proj"),
        stacked_on_disk=("experts.gate_up_proj", "experts.down_proj"),
        published_with_pictures=True,
    ),
    models=(
        published(
            "gemma-4-26b-a4b",
            (30, 2816, 16, 262144),
            {"intermediate_size": 2112, "num_key_value_heads": 8, "attention_k_eq_v": True, "sliding_window": 1024},
            {"final_logit_softcapping": 30.0, "hidden_size_per_layer_input": 0, "enable_moe_block": True},
            {"num_global_key_value_heads": 2, "num_experts": 128, "top_k_experts": 8, "moe_intermediate_size": 704},
            source="Megatron Bridge tests/unit_tests/models/gemma_vl/test_gemma4_vl_bridge.py; "
            "Gemma4TextConfig defaults",
            counts=(25.2e9, 3.8e9),
            approximate="layers, heads and softcap inferred from the published totals and members; no vision encoder",
        ),
        TINY_GEMMA4,
    ),
)
