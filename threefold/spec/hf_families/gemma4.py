"""Gemma 4's Mixture-of-Experts text model: what absent keys of its configuration mean, and parts of a ModelSpec.

`spec/hf.py` calls `read_gemma4` for the configuration with pictures (`gemma4`), of which it is the text model, and for
the text model alone (`gemma4_text`).
"""

import reprlib
from collections.abc import Mapping
from typing import Any

from threefold.spec.hf_families.config_class import NO_DROPOUT, ROPE, HfClass
from threefold.spec.hf_fields import Fields, number, read_rope
from threefold.spec.hf_readers import activation_name, layer_pattern, num_layers, sliding_window
from threefold.spec.model import GqaSpec, MoeSpec, RopeScaling

GEMMA4_TEXT = HfClass(
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
)
GEMMA4_ROPE: dict[str, dict[str, Any]] = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
    "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1_000_000.0},
}
_ROPE_KINDS = ("default", "proportional", "linear", "yarn", "llama3")


def read_gemma4(c: Fields) -> dict[str, Any]:
    """Windows and global attention with heads of their own, and a dense network beside the experts of every layer."""
    if not c["enable_moe_block"]:
        raise ValueError("only the Mixture-of-Experts members of Gemma 4 are supported (enable_moe_block)")
    if c["hidden_size_per_layer_input"]:
        raise ValueError("embeddings per layer (hidden_size_per_layer_input) are not supported")
    if c["use_bidirectional_attention"] not in (None, "vision"):  # the latter concerns tokens of pictures alone
        value = reprlib.repr(c["use_bidirectional_attention"])
        raise ValueError(f"use_bidirectional_attention {value} is not supported, only null or 'vision'")
    count, act = num_layers(c), activation_name(c, "hidden_activation")
    default = ["full_attention" if (i + 1) % 6 == 0 else "sliding_attention" for i in range(count)]
    letters = {"sliding_attention": "w", "full_attention": "t"}
    types = list(default if c["layer_types"] is None else c["layer_types"])
    types = [*types[:-1], "full_attention"]  # transformers forces the last one
    softcap = c["final_logit_softcapping"]
    return {
        "family": "gemma4",
        "num_layers": count,
        "pattern": layer_pattern(types, letters, count),
        "attention": _attention(c, "full_attention", types, shared_kv=c["attention_k_eq_v"]),
        "local_attention": _attention(c, "sliding_attention", types, window=sliding_window(c)),
        "moe": MoeSpec(
            num_experts=c["num_experts"],
            top_k=c["top_k_experts"],
            expert_dim=c["moe_intermediate_size"],
            num_shared=1,
            shared_dim=c["intermediate_size"],
            own_norms=True,
            expert_scale=True,
        ),
        "activation": {"gelu_pytorch_tanh": "gelu_tanh"}.get(act, act),
        "norm_eps": float(c["rms_norm_eps"]),
        "embed_scale": float(c["hidden_size"] ** 0.5),
        "logit_softcap": None if softcap is None else number("final_logit_softcapping", softcap),
        "layer_scale": True,
    }


def _attention(c: Fields, kind: str, types: list[str], **extra: Any) -> GqaSpec:
    """Layers with a window and global ones have heads and rotary positions of their own."""
    sizes = _head_sizes(c, [at for at, name in enumerate(types) if name == kind], kind == "full_attention")
    return GqaSpec(
        num_heads=c["num_attention_heads"],
        num_kv_heads=sizes["num_key_value_heads"],
        head_dim=sizes["head_dim"],
        qk_norm=True,
        v_norm=True,
        out_norm=True,
        scale=1.0,
        bias=c["attention_bias"],
        **_rope(c, kind, sizes["head_dim"]),
        **extra,
    )


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
    tables = c["rope_parameters"] or GEMMA4_ROPE
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
