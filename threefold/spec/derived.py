"""A ModelSpec for a model_type that nothing here knows, from the shape that transformers' class has.

`dryrun/derive_shape.py` reads the shape in a process of its own and `threefold models hf:PATH` keeps it next to the
config.json. This module makes a spec of it: sizes of attention and experts as the configuration names them, and all
other parameters as one number, so that the total is exact. Plans and estimates for Megatron Bridge use it; the engine
refuses it.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from threefold.safe_files import read_json
from threefold.spec.model import GqaSpec, ModelSpec, MoeSpec
from threefold.spec.params import count_params

SHAPE_FILE = "threefold-shape.json"


@dataclass(frozen=True, slots=True)
class DerivedModel(ModelSpec):
    """A model whose shape was derived from a class of transformers."""

    other_params: int = 0  # parameters that no part of the spec names; negative where the parts are too many
    architecture: str = ""  # the class
    parts: tuple[str, ...] = ()  # classes of modules inside its layers
    assumed: tuple[str, ...] = ()  # what was taken from names in the configuration, or for granted

    @property
    def unlisted(self) -> int:
        return self.other_params


def config_hash(config: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(config, sort_keys=True).encode()).hexdigest()


def kept_shape(folder: Path, config: Mapping[str, Any], name: str) -> DerivedModel | None:
    """The model of a shape that was kept for this very configuration; None where it is damaged or another's."""
    try:
        kept = read_json(folder / SHAPE_FILE)
        if kept["config"] != config_hash(config):
            return None
        return derived_model(kept["shape"], name, str(config.get("model_type")))
    except (OSError, KeyError, TypeError, ValueError, AttributeError, ArithmeticError):
        return None


def keep_shape(folder: Path, config: Mapping[str, Any], shape: Mapping[str, Any]) -> None:
    """Write a shape next to the config.json that it belongs to."""
    kept = {"config": config_hash(config), "shape": shape}
    (folder / SHAPE_FILE).write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")


def derived_model(shape: Mapping[str, Any], name: str, family: str) -> DerivedModel:
    """The spec of a shape, whose total is the shape's to the last parameter."""
    layers, stated = shape["layers"], shape["stated"]
    sparse = [layer for layer in layers if layer["num_experts"]]
    dim, heads = shape["dim"], stated["heads"] or 1
    assumed = [f"{what} {stated[what]}, as the configuration names it" for what in ("heads", "kv_heads", "head_dim")]
    moe, glu = None, True
    if sparse:
        most = max(sparse, key=lambda layer: layer["experts"])
        of_expert = most["experts"] // most["num_experts"]
        glu = of_expert != 2 * dim * (stated["expert_dim"] or 0)
        width = max(1, of_expert // ((3 if glu else 2) * dim))
        shared = most["shared"] // ((3 if glu else 2) * dim)
        moe = MoeSpec(most["num_experts"], stated["top_k"], width, num_shared=int(bool(shared)), shared_dim=shared)
        assumed.append(f"a token meets {stated['top_k']} experts of a layer ({stated['top_k_key']})")
        if [bool(layer["num_experts"]) for layer in layers] != [False] * (len(layers) - len(sparse)) + [True] * len(
            sparse
        ):
            assumed.append("layers without experts come first")
    assumed.append("attention over the whole sequence in each layer")
    model = DerivedModel(
        name=name,
        family=family,
        source=f"derived: {shape['class']} of transformers {shape['transformers']} on the meta device",
        num_layers=len(layers),
        num_dense_layers=len(layers) - len(sparse) if sparse else 0,
        dim=dim,
        vocab=shape["vocab"],
        tied=not shape["head"],
        attention=GqaSpec(heads, stated["kv_heads"] or heads, stated["head_dim"] or dim // heads),
        moe=moe,
        dense_dim=stated["dense_dim"] or 0,
        glu=glu,
        architecture=shape["class"],
        parts=tuple(shape["parts"]),
        assumed=tuple(assumed),
    )
    return replace(model, other_params=shape["total"] - count_params(model).main)
