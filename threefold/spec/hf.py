"""A ModelSpec from a Hugging Face `config.json`, read as transformers reads it, and back.

The families are declared in `spec/families`; this module reads any of them and checks what it read.
"""

import math
import reprlib
from collections.abc import Mapping
from dataclasses import MISSING, fields, is_dataclass
from pathlib import Path
from typing import Any, get_type_hints

from threefold.fields import MAX_INT, MAX_LAYERS
from threefold.findings import Finding, FindingsError, did_you_mean
from threefold.safe_files import read_json
from threefold.spec.derived import kept_shape
from threefold.spec.families import BY_TYPE, FAMILIES
from threefold.spec.families.qwen_vision import read_encoder, write_encoder
from threefold.spec.family import Family, Fields, Parts
from threefold.spec.hf_config import text_config
from threefold.spec.hf_fields import complete
from threefold.spec.hf_parts import build_spec, standard_parts
from threefold.spec.model import GqaSpec, ModelSpec


def model_from_config(path: Path) -> ModelSpec:
    """Read `config.json` (or the folder that holds one); every failure is a finding."""
    try:
        if path.is_dir():
            path = path / "config.json"
        config = read_json(path)
    except (OSError, ValueError) as error:
        raise _refuse(f"cannot read {path}: {error}", "give a folder or file with a JSON configuration") from None
    if not isinstance(config, dict):
        raise _refuse(f"{path} holds no JSON object", "give a Hugging Face config.json")
    name = path.parent.name or path.stem
    if str(config.get("model_type")) not in BY_TYPE and (model := _derived(path, config, name)) is not None:
        return model
    return model_from_dict(config, name=name, source=str(path))


def _derived(path: Path, config: Fields, name: str) -> ModelSpec | None:
    """The model of a shape that was kept next to the file; a damaged one is none."""
    model = kept_shape(path.parent, config, name)
    try:
        if model is not None:
            check_sizes(model)
            check_heads(model)
            check_routing(model)
    except (TypeError, ValueError):
        return None
    return model


def model_from_dict(config: Fields, name: str, source: str) -> ModelSpec:
    """Read the fields of a config.json; every failure is a finding."""
    kind = config.get("model_type")
    family = BY_TYPE.get(str(kind))
    if family is None:
        near = did_you_mean(str(kind), BY_TYPE) or f"supported: {', '.join(sorted(BY_TYPE))}"
        advice = f"{near}; `threefold models hf:PATH` derives a shape to plan with from transformers' class"
        raise _refuse(f"model_type {reprlib.repr(kind)} is not supported", advice)
    try:
        model = read_config(config, family, name, source)
        check_sizes(model)
        check_heads(model)
        check_routing(model)
        check_vision(model)
        if not model.dense_dim and any(layer.ffn == "dense" for layer in model.layers):
            raise ValueError("dense layers need an intermediate_size")
        return model
    except KeyError as error:
        raise _refuse(f"{source} lacks {error} for model_type {kind}", "complete the configuration") from None
    except (TypeError, ValueError, AttributeError, ArithmeticError) as error:
        raise _refuse(f"{source} is no usable {kind} configuration: {error}", "correct the configuration") from None


def read_config(config: Fields, family: Family, name: str, source: str) -> ModelSpec:
    tied_by_default = family.composite_tied if config["model_type"] == family.name else None
    is_composite = tied_by_default is not None
    text = config.get("text_config") or {} if is_composite else config
    if not isinstance(text, Mapping):
        raise ValueError(f"text_config is {reprlib.repr(text)}, not a table")
    fields = complete(text, family.config)
    parts = (family.read or standard_parts)(fields, family)
    if is_composite and family.encoder is not None:
        parts["vision"] = read_encoder(config, family.encoder)
    tied = config.get("tie_word_embeddings", tied_by_default) if is_composite else fields["tie_word_embeddings"]
    if not isinstance(tied, bool):
        raise ValueError(f"tie_word_embeddings is {reprlib.repr(tied)}, not true or false")
    sizes = {"dim": fields["hidden_size"], "vocab": fields["vocab_size"]}
    return build_spec(parts, name=name, source=source, tied=tied, init_std=float(fields["initializer_range"]), **sizes)


def _refuse(problem: str, advice: str) -> FindingsError:
    return FindingsError([Finding(rule="model-config", at="model", problem=problem, advice=advice)])


def hf_config_of(spec: ModelSpec) -> Parts:
    """The configuration from which the same spec is read."""
    family = FAMILIES[spec.family]
    text = text_config(spec, family)
    if spec.vision is None or family.encoder is None:
        return {"architectures": [HF_CLASSES[text["model_type"]]], **text}
    return {
        "architectures": [HF_CLASSES[spec.family]],
        "model_type": spec.family,
        "tie_word_embeddings": spec.tied,
        "text_config": text,
        **write_encoder(spec),
    }


# What config.json calls the class of a model, by its model_type.
HF_CLASSES = {kind: name for family in FAMILIES.values() for kind, name in family.types.items() if name is not None}


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
            least, most = 1 if f.default is MISSING else 0, MAX_LAYERS if f.name.endswith("layers") else MAX_INT
            if f.name == "other_params":  # a difference of two counts
                least, most = -(MAX_INT**2), MAX_INT**2
            _check_size(name, value, least, most)
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
    return [spec for spec in model.attention_kinds if isinstance(spec, GqaSpec)]


def _check_size(name: str, size: Any, least: int, most: int) -> None:
    if type(size) is not int or not least <= size <= most:
        raise ValueError(f"{name} is {reprlib.repr(size)}, not a whole number from {least} to {most}")
