"""The fields of a Hugging Face configuration as `transformers` holds them once it has read the file.

`complete` puts in the defaults of absent fields, and `read_rope` follows what transformers makes of the keys, old and
new, that say how positions turn. `spec/hf.py` makes a ModelSpec of both. What they raise becomes one finding there.
"""

import reprlib
from collections.abc import Mapping
from typing import Any

from threefold.spec.family import REQUIRED, Fields, HfClass
from threefold.spec.model import RopeScaling


def complete(config: Fields, kind: HfClass) -> dict[str, Any]:
    """The fields that are read, absent ones with the defaults of their class.

    Raises KeyError for a size that is missing, and ValueError for a value that is not supported.
    """
    if config.get("per_layer_config") and "per_layer_config" not in kind.extra:
        raise ValueError("layers with sizes of their own (per_layer_config) are not supported")
    given = {key: config[key] for key in config if key in kind.defaults or key in kind.only or key in REQUIRED}
    given |= {name: config[alias] for alias, name in kind.aliases.items() if alias in config}
    for name, value in kind.only.items():
        if not _same(given.get(name, value), value):
            raise ValueError(f"{name} {reprlib.repr(given[name])} is not supported, only {value!r}")
    found = {**kind.defaults, **{name: given[name] for name in REQUIRED if name in given}}
    found |= {name: _checked(name, given[name], kind) for name in kind.defaults if name in given}
    extra = {**kind.extra, **({"rope_theta": kind.theta} if "rope_theta" in kind.extra else {})}
    return found | {name: config.get(name, default) for name, default in extra.items()}


def _same(value: Any, only: Any) -> bool:
    """An empty list is as good as none, and false is not the number 0."""
    return (only is None and value == []) or (value == only and isinstance(value, bool) == isinstance(only, bool))


def _checked(name: str, value: Any, kind: HfClass) -> Any:
    default = kind.defaults[name]
    if name in kind.by_layer and isinstance(value, list):
        return value
    if value is None:
        if default is None or isinstance(default, Mapping):
            return default
        if name not in kind.null_means:
            raise ValueError(f"{name} is null, which transformers does not take")
        return kind.null_means[name]
    if isinstance(default, bool):
        if not isinstance(value, bool):
            raise ValueError(f"{name} is {reprlib.repr(value)}, not true or false")
    elif isinstance(default, int | float):
        number(name, value)
    elif isinstance(default, str) and not isinstance(value, str):
        raise ValueError(f"{name} is {reprlib.repr(value)}, not a text")
    return value


def number(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"{name} is {reprlib.repr(value)}, not a number")
    return float(value)


def _numbers(name: str, values: Any) -> tuple[float, ...]:
    if not isinstance(values, list | tuple):
        raise ValueError(f"{name} is {reprlib.repr(values)}, not a list of numbers")
    return tuple(number(name, value) for value in values)


def read_rope(c: Fields, head_dim: Any, partial: bool = False, fixed_alpha: bool = False) -> dict[str, Any]:
    """`rope_theta` and `rope_scaling` of an attention, and its `rope_fraction` where the family rotates a part only.

    As transformers 5 does it: `rope_scaling` stands for all of `rope_parameters` where both are given; what stands in
    the table goes before the same key outside of it. A part of the head is rotated by the families that ask for it in
    their code; others pass `partial_rotary_factor` over, and fail where a scaling makes use of it. With `fixed_alpha`
    an `alpha` beside the scaling `dynamic` stretches the base once and for all (Hunyuan).
    """
    rope = c["rope_scaling"] or c["rope_parameters"] or {}
    if not isinstance(rope, Mapping):
        raise ValueError(f"rope_parameters is {reprlib.repr(rope)}, not a table")
    if nested := sorted(str(key) for key, value in rope.items() if isinstance(value, Mapping)):
        raise ValueError(f"rope_parameters by layer type ({reprlib.repr(nested)}) are not supported")
    theta = number("rope_theta", rope.get("rope_theta", c["rope_theta"]))
    fraction = rope.get("partial_rotary_factor", c["partial_rotary_factor"])
    fraction = 1.0 if fraction is None else number("partial_rotary_factor", fraction)
    kind = rope.get("rope_type", rope.get("type", "default"))
    if not isinstance(kind, str) or kind == "ntk_alpha":
        raise ValueError(f"rope_type is {reprlib.repr(kind)}, not one of transformers'")
    if fixed_alpha and kind == "dynamic" and rope.get("alpha"):
        kind = "ntk_alpha"
    if not partial and kind == "default":
        fraction = 1.0
    if not partial and fraction != 1.0:
        raise ValueError(f"partial_rotary_factor {fraction} with the rotary scaling {kind!r} is not supported")
    _check_rotated(head_dim, fraction, kind)
    scaling = None if kind == "default" else _read_scaling(c, rope, kind)
    if scaling is not None:
        _check_scaling(scaling, head_dim, fraction)
    if kind == "yarn" and theta <= 1:
        raise ValueError(f"rope_theta is {theta}; YaRN needs one above 1")
    return {"rope_theta": theta, "rope_scaling": scaling, **({"rope_fraction": fraction} if partial else {})}


def _check_rotated(head_dim: Any, fraction: float, kind: str) -> None:
    """Dimensions turn in pairs; an odd number of them is rounded up where the head has one more."""
    if not 0 < fraction <= 1:
        raise ValueError(f"partial_rotary_factor is {fraction}, not above 0 and at most 1")
    if type(head_dim) is not int or head_dim < 1:
        return  # `check_sizes` says it
    dim = int(head_dim * fraction)
    if not dim:
        raise ValueError(f"partial_rotary_factor {fraction} rotates none of the {head_dim} dimensions of a head")
    if dim % 2 and (dim == head_dim or kind == "yarn"):
        what = "head_dim" if dim == head_dim else f"partial_rotary_factor {fraction} of head_dim {head_dim}"
        raise ValueError(f"{what} gives {dim} rotated dimensions, an odd number; they turn in pairs")


_NEEDED = {
    "yarn": ("factor",),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "ntk_alpha": ("alpha",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "longrope": ("short_factor", "long_factor"),
}


def _check_scaling(scaling: RopeScaling, head_dim: Any, fraction: float) -> None:
    """Raise ValueError where a scaling does not go with the number of rotated dimensions."""
    if type(head_dim) is not int or head_dim < 1:
        return  # `check_sizes` says it
    rotated = int(head_dim * fraction)
    if scaling.kind == "longrope" and scaling.original_len == 1:
        raise ValueError("the rotary scaling 'longrope' needs original_max_position_embeddings above 1")
    if scaling.kind in ("dynamic", "ntk_alpha") and rotated == 2:
        raise ValueError(f"the rotary scaling {scaling.kind!r} needs more than two rotated dimensions (head_dim)")
    for name in ("short_factor", "long_factor") if scaling.kind == "longrope" else ():
        count = len(getattr(scaling, name))
        if count != -(-rotated // 2):
            raise ValueError(f"{name} has {count} numbers for {-(-rotated // 2)} rotary frequencies")


def _read_scaling(c: Fields, rope: Fields, kind: str) -> RopeScaling:
    known = kind in _NEEDED  # others are read for what they are; only the engine must know more
    if missing := [key for key in _NEEDED.get(kind, ()) if key not in rope]:
        raise ValueError(f"the rotary scaling {kind!r} lacks {', '.join(missing)}")
    length = c["max_position_embeddings"]
    original = rope.get("original_max_position_embeddings", length)
    if kind in ("yarn", "llama3", "longrope") and c["original_max_position_embeddings"] is not None:
        original = c["original_max_position_embeddings"]
    if kind in ("dynamic", "ntk_alpha"):
        original = length  # whatever the table says
    factor = rope.get("alpha" if kind == "ntk_alpha" else "factor")
    if kind in ("yarn", "longrope") and factor is None:
        factor = number("max_position_embeddings", length) / number("original_max_position_embeddings", original)
    if not known:
        original, factor = original or 1, factor or 1.0
    optional = ("attention_factor", "mscale", "mscale_all_dim")
    betas = ("beta_fast", "beta_slow") if kind == "yarn" else ()
    bounds = ("low_freq_factor", "high_freq_factor") if kind == "llama3" else ()
    lists = ("short_factor", "long_factor") if kind == "longrope" else ()
    numbers: dict[str, Any] = {
        **{name: number(name, rope[name]) for name in optional if rope.get(name) is not None},
        **{name: number(name, rope[name]) for name in betas if rope.get(name)},
        **{name: number(name, rope[name]) for name in bounds},
        **{name: _numbers(name, rope[name]) for name in lists},
    }
    truncate = bool(rope.get("truncate", True))
    return RopeScaling(number("factor", factor), original, kind, truncate=truncate, **numbers)
