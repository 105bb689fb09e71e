"""Checks of a `ModelSpec` that was read from a file: sizes, heads, routing and the image encoder.

`spec/hf.py` calls them. Each raises ValueError, which becomes one `model-config` finding there.
"""

import math
import reprlib
from dataclasses import MISSING, fields, is_dataclass
from typing import Any, get_type_hints

from threefold.fields import MAX_INT, MAX_LAYERS
from threefold.spec.model import GqaSpec, ModelSpec


def check_sizes(spec: Any, at: str = "") -> None:
    """Raise ValueError where a spec made from a file holds something that is no size."""
    hints = get_type_hints(type(spec))
    for f in fields(spec):
        value, hint, name = getattr(spec, f.name), hints[f.name], f"{at}{f.name}"
        if is_dataclass(value):
            check_sizes(value, f"{name}.")
        elif hint == tuple[int, ...]:
            for size in value:
                _check_size(name, size, least=0, most=MAX_INT)
        elif hint == tuple[float, ...]:
            if not all(number > 0 and math.isfinite(number) for number in value):
                raise ValueError(f"{name} is {reprlib.repr(value)}, not positive numbers")
        elif hint is int or (hint == int | None and value is not None):
            least = 1 if f.default is MISSING else 0
            _check_size(name, value, least, most=MAX_LAYERS if f.name.endswith("layers") else MAX_INT)
        elif hint is float and not (value > 0 and math.isfinite(value)):
            raise ValueError(f"{name} is {value}, not a positive number")


def check_heads(model: ModelSpec) -> None:
    """Raise ValueError where heads do not share keys evenly, as every implementation takes for granted."""
    shared = [(a.num_heads, "heads", a.num_kv_heads, "key/value heads") for a in _grouped(model)]
    if delta := model.delta:
        shared.append((delta.num_v_heads, "value heads", delta.num_k_heads, "key heads"))
    if mamba := model.mamba:
        shared.append((mamba.num_heads, "Mamba heads", mamba.num_groups, "groups"))
    for heads, kind, keys, name in shared:
        if heads % keys:
            raise ValueError(f"{heads} {kind} cannot share {keys} {name} evenly")
    for spec in _grouped(model):
        for name in ("clip_qkv", "scale"):
            value = getattr(spec, name)
            if value is not None and not (value > 0 and math.isfinite(value)):
                raise ValueError(f"{name} of the attention heads is {value}, not a positive number")
    if model.logit_softcap is not None and not (model.logit_softcap > 0 and math.isfinite(model.logit_softcap)):
        raise ValueError(f"final_logit_softcapping is {model.logit_softcap}, not a positive number")


def check_vision(model: ModelSpec) -> None:
    """Raise ValueError where an image encoder has heads, positions or deepstack layers that it cannot have."""
    vision = model.vision
    if vision is None:
        return
    if vision.dim % vision.num_heads or vision.dim // vision.num_heads % 4:
        problem = f"{vision.dim} over {vision.num_heads} heads of the image encoder"
        raise ValueError(f"{problem} is no multiple of 4, in which rows and columns turn pairs of numbers")
    if math.isqrt(vision.num_positions) ** 2 != vision.num_positions:
        raise ValueError(f"{vision.num_positions} positions of the image encoder are no square")
    if any(layer >= vision.depth for layer in vision.deepstack) or len(set(vision.deepstack)) < len(vision.deepstack):
        raise ValueError(f"deepstack layers {vision.deepstack} are not different layers of {vision.depth}")


def check_routing(model: ModelSpec) -> None:
    """Raise ValueError where tokens cannot choose as many experts as they shall."""
    moe = model.moe
    if moe is None:
        return
    if moe.num_groups < 1 or moe.num_experts % moe.num_groups:
        raise ValueError(f"{moe.num_experts} experts do not fall into {moe.num_groups} groups of one size")
    if not 1 <= moe.top_groups <= moe.num_groups:
        raise ValueError(f"a token cannot use {moe.top_groups} of {moe.num_groups} groups of experts")
    choice = moe.num_experts // moe.num_groups * moe.top_groups
    if moe.top_k > choice:
        raise ValueError(f"a token cannot choose {moe.top_k} of {choice} experts")


def _grouped(model: ModelSpec) -> list[GqaSpec]:
    return [spec for spec in (model.attention, model.local_attention) if isinstance(spec, GqaSpec)]


def _check_size(name: str, size: Any, least: int, most: int) -> None:
    if type(size) is not int or not least <= size <= most:
        raise ValueError(f"{name} is {reprlib.repr(size)}, not a whole number from {least} to {most}")
