"""Parts of a ModelSpec from the fields of a configuration: what the families of `spec/families` share.

`standard_parts` reads a whole family from its declaration; the readers of families call it and change what it made.
"""

import reprlib
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any, get_type_hints

from threefold.fields import MAX_LAYERS
from threefold.spec.family import Family, Fields, Parts
from threefold.spec.hf_fields import read_rope
from threefold.spec.model import (
    CompressedSpec,
    DeltaSpec,
    GqaSpec,
    IndexerSpec,
    MambaSpec,
    MlaSpec,
    ModelSpec,
    MoeSpec,
    StreamsSpec,
)

_SPECS: dict[str, type] = {"delta": DeltaSpec, "mamba": MambaSpec, "moe": MoeSpec, "streams": StreamsSpec}


def standard_parts(c: Fields, family: Family) -> Parts:
    """The facts of a family, and what the fields state at their places."""
    parts: Parts = {"family": family.name, "num_layers": c["num_hidden_layers"], "attention": {}}
    if "activation" not in family.facts:
        key = next(key for key in ("hidden_act", "hidden_activation", "mlp_hidden_act") if key in c)
        parts["activation"] = activation_name(c, key)
    if family.attention == "latent":
        parts["attention"] = _latent_attention(c)
    elif family.attention == "grouped":
        parts["attention"] = grouped_attention(c, family)
    for place, value in family.facts.items():
        put(parts, place, value)
    for key, places in family.config.placed().items():
        value = sliding_window(c) if key == "sliding_window" else c[key]
        for place in places:
            put(parts, place, value)
    return parts


def put(parts: Parts, place: str, value: Any) -> None:
    """Set `moe.top_k` in the table `moe` of the parts, and make it a float where the spec has one."""
    *tables, name = place.split(".")
    for table in tables:
        parts = parts.setdefault(table, {})
    parts[name] = float(value) if name in _floats() and value is not None else value


@cache
def _floats() -> frozenset[str]:
    """Names of the fields of specs that are floats."""
    kinds = (ModelSpec, GqaSpec, MlaSpec, MoeSpec, MambaSpec)
    hints = [pair for kind in kinds for pair in get_type_hints(kind).items()]
    return frozenset(name for name, hint in hints if hint in (float, float | None))


def build_spec(parts: Parts, **rest: Any) -> ModelSpec:
    """The ModelSpec of tables of arguments."""
    made = {name: _SPECS[name](**part) if name in _SPECS and part is not None else part for name, part in parts.items()}
    kinds = ("attention", "local_attention", "pooled_attention")
    made |= {name: _attention_spec(parts[name]) for name in kinds if parts.get(name) is not None}
    return ModelSpec(**made, **rest)


def _attention_spec(part: Parts) -> GqaSpec | MlaSpec:
    if part.get("indexer") is not None:
        part = {**part, "indexer": IndexerSpec(**part["indexer"])}
    kind = MlaSpec if "kv_rank" in part else CompressedSpec if "out_rank" in part else GqaSpec
    spec: GqaSpec | MlaSpec = kind(**part)
    return spec


def grouped_attention(c: Fields, family: Family) -> Parts:
    heads, head_dim = c["num_attention_heads"], c["head_dim"]
    head_dim = c["hidden_size"] // heads if head_dim is None else head_dim
    sizes = {"num_heads": heads, "num_kv_heads": _kv_heads(c), "head_dim": head_dim}
    if family.facts.get("attention.use_rope") is False:
        return sizes
    return {**sizes, "bias": c.get("attention_bias", False), **read_rope(c, head_dim, **family.rope)}


def _kv_heads(c: Fields) -> Any:
    return c["num_attention_heads"] if c["num_key_value_heads"] is None else c["num_key_value_heads"]


def _latent_attention(c: Fields) -> Parts:
    heads, rotated = c["num_attention_heads"], c["qk_rope_head_dim"]
    if _kv_heads(c) != heads:
        raise ValueError(f"num_key_value_heads {c['num_key_value_heads']} is not num_attention_heads {heads}")
    if c.get("head_dim") not in (None, rotated):
        raise ValueError(f"head_dim {c['head_dim']} is not qk_rope_head_dim {rotated}")
    return {"num_heads": heads, **read_rope(c, rotated)}


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


LAYER_TYPES = {"attention": "full_attention", "window": "sliding_attention", "delta": "linear_attention"}
LETTERS = {"full_attention": "t", "sliding_attention": "w", "linear_attention": "d"}


def layer_pattern(types: Sequence[str], letters: Mapping[str, str], num_layers: int | None = None) -> str:
    unknown = sorted(set(types) - set(letters))
    if unknown:
        raise ValueError(f"unknown layer types {reprlib.repr(unknown)} in layer_types")
    if num_layers not in (None, len(types)):
        raise ValueError(f"layer_types has {len(types)} layers, num_hidden_layers {num_layers}")
    return "".join(letters[kind] for kind in types)


def typed_pattern(c: Fields, default: Sequence[str], *kinds: str) -> str:
    """The pattern of `layer_types`, or of the types that transformers makes where a file has none."""
    types = default if c["layer_types"] is None else c["layer_types"]
    return layer_pattern(types, {kind: LETTERS[kind] for kind in kinds}, num_layers(c))


def layer_types(spec: ModelSpec) -> list[str]:
    return [LAYER_TYPES[layer.mixer] for layer in spec.layers]


def check_full_attention(c: Fields) -> None:
    """Raise ValueError where `layer_types` has other layers than full attention."""
    typed_pattern(c, ["full_attention"] * num_layers(c), "full_attention")


def sliding_window(c: Fields) -> Any:
    window = c["sliding_window"]
    if window is not None and (type(window) is not int or window < 1):
        raise ValueError(f"sliding_window is {reprlib.repr(window)}, not a whole number from 1 on")
    return window


def windowed_pattern(c: Fields, default: Sequence[str]) -> str:
    """The pattern of layers with full attention and layers with a window, which then need one."""
    pattern = typed_pattern(c, default, "full_attention", "sliding_attention")
    if "w" in pattern and sliding_window(c) is None:
        raise ValueError("layers of sliding_attention need a sliding_window")
    return pattern


def first_dense(c: Fields, default: Any) -> Any:
    """The number of dense layers before those with experts, by `mlp_layer_types` where a file has them."""
    if (types := c["mlp_layer_types"]) is None:
        return default
    pattern = layer_pattern(types, {"dense": "-", "sparse": "E"}, num_layers(c))
    if "E-" in pattern:
        raise ValueError("dense layers behind sparse ones (mlp_layer_types) are not supported")
    return pattern.count("-")


def check_whole_rotation(c: Fields) -> None:
    """Raise ValueError where a family that rotates whole heads is asked for a part of them, as transformers would."""
    table = c["rope_scaling"] or c["rope_parameters"] or {}
    fraction = table.get("partial_rotary_factor", c["partial_rotary_factor"]) if isinstance(table, Mapping) else None
    if fraction not in (None, 1.0):
        raise ValueError(f"partial_rotary_factor {reprlib.repr(fraction)} is not supported")


def refuse_others(c: Fields, supported: dict[str, Any]) -> None:
    """Raise ValueError where a key of a family's own code has another value than the one that transformers runs."""
    for key, only in supported.items():
        values = c[key] if isinstance(c[key], list) else [c[key]]
        if any(value not in (None, only) for value in values):
            raise ValueError(f"{key} {reprlib.repr(c[key])} is not supported, only {only!r}")
