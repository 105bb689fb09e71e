"""Adapters as folders of PEFT: `adapter_config.json` and `adapter_model.safetensors`, read and written.

`convert.py` calls `open_adapter` for `threefold import-hf DIR --adapter PEFT`, where every problem is a finding and no
tensor is read before names and shapes are checked, and `write_adapter` for `threefold export-hf RUN --adapter`.

PEFT names an adapter by the module of transformers that it belongs to. Adapters of stacked experts are those of
`target_parameters`: one wrapper around the module of the experts for each parameter, that of gate and up inside.

    layers.0.mixer.q.lora_a              base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight
    layers.0.ffn.experts.gate_up_lora_a  base_model.model.model.layers.0.mlp.experts.base_layer.lora_A.weight
    layers.0.ffn.experts.down_lora_a     base_model.model.model.layers.0.mlp.experts.lora_A.weight

The A of experts is stored with the rows of all experts one below the other, (E r, I), their B with the expert last,
(O, r E). `peft_tensors` maps each tensor of an adapter to those that PEFT stores.

Shapes: E experts, r rank, I and O dims in and out, H expert dim.
"""

import json
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from threefold.engine.lora import LORA_A, LORA_B, LoraSettings, is_adapter
from threefold.engine.model_options import Options
from threefold.engine.models.build import build_model
from threefold.engine.weights.base_checkpoint import BaseCheckpoint
from threefold.engine.weights.hf_names import HfTensor, layouts_in_memory, names_of
from threefold.engine.weights.safetensors_files import SafetensorsFolder, abbreviate, refuse
from threefold.findings import shown
from threefold.plan.plan import LORA_TARGETS
from threefold.safe_files import read_json_object
from threefold.spec.model import ModelSpec

PREFIX = "base_model.model."  # PEFT wraps the model twice
_LAYER = re.compile(r"(.*\.)?layers\.\d+\.")


@dataclass(frozen=True)
class PeftTensor:
    """One tensor of PEFT's file that holds values of an engine tensor."""

    key: str
    target: str  # the entry of `target_modules` or `target_parameters`
    is_parameter: bool  # whether it is one of `target_parameters`
    is_b: bool
    rows: HfTensor | None  # which rows of B it has; None for experts
    alternates: bool = False  # GPT-OSS: rows of gate and up take turns

    def read(self, engine: Tensor) -> Tensor:
        """The tensor as PEFT stores it, from the engine's."""
        if self.rows is not None:
            return (self.rows.read(engine) if self.is_b else engine).contiguous()
        if not self.is_b:
            return engine.flatten(0, 1).contiguous()
        if self.alternates:
            engine = engine.unflatten(1, (2, -1)).transpose(1, 2).flatten(1, 2)
        return engine.permute(1, 2, 0).flatten(1).contiguous()

    def write(self, engine: Tensor, stored: Tensor) -> None:
        """Fill the engine's tensor with what PEFT stored."""
        if self.rows is not None:
            if self.is_b:
                self.rows.write(engine, stored)
            else:
                engine.copy_(stored)
        elif not self.is_b:
            engine.copy_(stored.view_as(engine))
        else:
            num_experts, rows, rank = engine.shape
            values_EOr = stored.view(rows, rank, num_experts).permute(2, 0, 1)
            if self.alternates:
                values_EOr = values_EOr.unflatten(1, (-1, 2)).transpose(1, 2).flatten(1, 2)
            engine.copy_(values_EOr)

    def shape(self, engine: Tensor) -> tuple[int, ...]:
        """The shape that PEFT stores."""
        return tuple(self.read(engine).shape)


def weight_of(name: str) -> str:
    """The weight that an adapter belongs to: `layers.0.mixer.q.weight` of `layers.0.mixer.q.lora_a`."""
    base = name.removesuffix(LORA_A).removesuffix(LORA_B)
    return base.removesuffix("_") if base.endswith("_") else f"{base}weight"


def peft_tensors(name: str, spec: ModelSpec) -> list[PeftTensor]:
    """The tensors that PEFT stores for one of the engine's; several where transformers has several modules."""
    weight, is_b = weight_of(name), name.endswith(LORA_B)
    matrix = "lora_B.weight" if is_b else "lora_A.weight"
    layouts = layouts_in_memory(weight, spec)
    if ".experts." in weight:
        # The stacked parameter is how transformers holds experts in memory, whatever it writes: Granite's is stored
        # under another name.
        stacked = [layout[0] for layout in layouts if len(layout) == 1]
        in_memory = names_of(spec.family).stacked_experts
        part = next((part for part in stacked if part.key.endswith(in_memory)), stacked[0])
        module, _, parameter = part.key.rpartition(".")
        wrapper = f"{module}.base_layer" if parameter.startswith("gate_up") else module
        alternates = spec.family == "gpt_oss" and parameter.startswith("gate_up")
        return [PeftTensor(f"{PREFIX}{wrapper}.{matrix}", _within_layer(part.key), True, is_b, None, alternates)]
    # PEFT takes every module of an MoE model that is named like an expert's projection for an expert. Parameters, which
    # it finds by their whole name, are safe from that.
    is_parameter = spec.moe is not None and ".ffn." in weight
    found = []
    for part in layouts[0]:
        module = part.key.removesuffix(".weight")
        target = _within_layer(part.key if is_parameter else module)
        found.append(PeftTensor(f"{PREFIX}{module}.{matrix}", target, is_parameter, is_b, part))
    return found


def _within_layer(path: str) -> str:
    return _LAYER.sub("", path)


class MergedTensors(Mapping[str, Tensor]):
    """The tensors of a model by name, without its adapters. Each weight is merged when it is asked for."""

    def __init__(self, state: Mapping[str, Tensor], settings: LoraSettings) -> None:
        self.state, self.settings = state, settings
        self._adapters = {weight_of(name): name.removesuffix(LORA_A) for name in state if name.endswith(LORA_A)}

    def __getitem__(self, name: str) -> Tensor:
        weight = self.state[name]
        prefix = self._adapters.get(name)
        if prefix is None:
            return weight
        return merge(weight, self.state[f"{prefix}{LORA_A}"], self.state[f"{prefix}{LORA_B}"], self.settings.scale)

    def __iter__(self) -> Iterator[str]:
        return (name for name in self.state if not is_adapter(name))

    def __len__(self) -> int:
        return sum(1 for _ in self)


def merge(weight: Tensor, a: Tensor, b: Tensor, scale: float) -> Tensor:
    """The weight, or the stack of weights, with its adapter."""
    dtype = torch.promote_types(weight.dtype, torch.float32)
    merged = weight.to(dtype).add(b.to(dtype) @ a.to(dtype), alpha=scale)
    return merged.to(weight.dtype)


# Fields of the configuration that change what an adapter computes, and the values with which the engine computes it.
_PLAIN: dict[str, tuple[Any, ...]] = {
    "use_dora": (None, False),
    "use_qalora": (None, False),
    "bias": (None, "none"),
    "lora_bias": (None, False),
    "fan_in_fan_out": (None, False),
    "rank_pattern": (None, {}),
    "alpha_pattern": (None, {}),
    "modules_to_save": (None, []),
    "trainable_token_indices": (None, [], {}),
    "layer_replication": (None, []),
}
_MAX_RANK = 4096


@dataclass(frozen=True)
class PeftAdapter:
    """The adapters of a folder for one model. Iterating gives the engine's names and tensors."""

    stored: SafetensorsFolder
    settings: LoraSettings
    parts: dict[str, list[PeftTensor]]  # of the engine's tensors that the folder has
    shapes: dict[str, tuple[int, ...]]
    absent: list[str]  # the engine's tensors of the same targets that the folder lacks: they begin anew

    @property
    def plan_fields(self) -> dict[str, Any]:
        """The fields of a plan that trains these adapters."""
        rank, scale, targets = self.settings.rank, self.settings.scale, self.settings.targets
        return {"job.lora_rank": rank, "job.lora_alpha": scale * rank, "job.lora_targets": list(targets)}

    @property
    def summary(self) -> str:
        """One line of what was found."""
        new = f"; {len(self.absent)} others of these targets begin anew" if self.absent else ""
        return f"{len(self.parts)} tensors of LoRA adapters of rank {self.settings.rank}{new}"

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        for name, parts in self.parts.items():
            stored = [self.stored.tensor(part.key) for part in parts]
            engine = torch.empty(self.shapes[name], dtype=stored[0].dtype)
            for part, value in zip(parts, stored, strict=True):
                part.write(engine, value)
            yield name, engine


def open_adapter(folder: Path, spec: ModelSpec) -> PeftAdapter:
    """Find the adapters of a folder in the model and check their shapes."""
    rank, alpha = _read_config(folder)
    stored = SafetensorsFolder(folder)
    every = LoraSettings(rank, alpha / rank, LORA_TARGETS)
    model = build_model(spec, 0, device="meta", options=Options(lora=every))
    tensors = {name: p for name, p in model.named_parameters() if is_adapter(name)}
    wanted = {name: peft_tensors(name, spec) for name in tensors}
    found = {name: parts for name, parts in wanted.items() if all(part.key in stored.file_of for part in parts)}
    used = {part.key for parts in found.values() for part in parts}
    surplus = sorted(stored.file_of.keys() - used)
    if surplus:
        advice = "give adapters of attention, MLP or expert weights of the model in config.json"
        raise refuse(f"{len(surplus)} tensors belong to no weight that gets adapters: {abbreviate(surplus)}", advice)
    if not found:
        raise refuse(f"{WEIGHTS} has no adapters", "give the folder that PEFT's save_pretrained wrote")
    for name, parts in found.items():
        _check_part(name, parts, tensors[name], stored)
    targets = tuple(target for target in LORA_TARGETS if any(_target_of(name) == target for name in found))
    absent = [name for name in tensors if _target_of(name) in targets and name not in found]
    shapes = {name: tuple(tensors[name].shape) for name in found}
    return PeftAdapter(stored, LoraSettings(rank, alpha / rank, targets), found, shapes, absent)


def _check_part(name: str, parts: list[PeftTensor], tensor: Tensor, stored: SafetensorsFolder) -> None:
    if len(parts) > 1 and not parts[0].is_b:
        problem = f"{name} is stored as {len(parts)} adapters, and the engine has one for all of them"
        raise refuse(problem, "merge the adapter into the weights with PEFT, and import those")
    for part in parts:
        if stored.shape(part.key) != part.shape(tensor):
            problem = f"{part.key} has shape {stored.shape(part.key)}, the model wants {part.shape(tensor)}"
            raise refuse(problem, "use the adapter of this model, with the rank of its configuration")


def _target_of(name: str) -> str:
    if ".experts." in name:
        return "experts"
    if ".shared." in name:
        return "shared_experts"
    return "attention" if ".mixer." in name else "mlp"


def _read_config(folder: Path) -> tuple[int, float]:
    """Rank, and alpha as if the scale were alpha over the rank."""
    try:
        config = read_json_object(folder / CONFIG, within=folder)
    except (OSError, ValueError) as error:
        raise refuse(f"{CONFIG} cannot be read: {error}", "give the folder that PEFT's save_pretrained wrote") from None
    if config.get("peft_type") != "LORA":
        raise refuse(f"this is an adapter of type {shown(config.get('peft_type'))}", "give a LoRA adapter")
    other = [name for name, plain in _PLAIN.items() if config.get(name) not in plain]
    if other:
        problem = f"{', '.join(f'{name} = {shown(config[name])}' for name in other)} is not supported"
        raise refuse(problem, "merge the adapter into the weights with PEFT, and import those")
    rank: Any = config.get("r")
    alpha: Any = config.get("lora_alpha")
    if type(rank) is not int or not 0 < rank <= _MAX_RANK or type(alpha) not in (int, float) or not alpha > 0:
        raise refuse(f"r is {shown(rank)} and lora_alpha {shown(alpha)}", "download the configuration again")
    return rank, float(alpha) * (math.sqrt(rank) if config.get("use_rslora") else 1.0)


# peft 0.21.2, tuners/tuners_utils.py, _check_lora_target_modules_mamba: models with Mamba layers, whose fused kernel
# reads these weights past their adapters.
_REFUSED = {"nemotron_h": {"out_proj", "conv1d"}}
CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"


def write_adapter(
    state: Mapping[str, Tensor],
    spec: ModelSpec,
    settings: LoraSettings,
    folder: Path,
    base: BaseCheckpoint | None = None,
) -> int:
    """Write the adapters among the tensors of a model, for the checkpoint that they belong to. Returns their number of
    weights."""
    names = [name for name in state if is_adapter(name)]
    tensors, parts = {}, []
    for name in names:
        tensor = state[name]
        for part in peft_tensors(name, spec):
            tensors[part.key] = part.read(tensor).clone()  # safetensors refuses memory that two tensors share
            parts.append(part)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        save_file(tensors, str(folder / WEIGHTS), metadata={"format": "pt"})
        (folder / CONFIG).write_text(json.dumps(_config(settings, parts, base), indent=2) + "\n", encoding="utf-8")
    except (OSError, SafetensorError) as error:
        advice = "give a folder that can be written, with enough space"
        raise refuse(f"cannot write {folder}: {error}", advice) from None
    return sum(tensor.numel() for tensor in tensors.values())


def refused_targets(folder: Path, spec: ModelSpec) -> set[str]:
    """The targets of a written adapter that PEFT does not load for a model of this family."""
    targets = json.loads((folder / CONFIG).read_text(encoding="utf-8"))["target_modules"]
    return {target for target in targets if target.rpartition(".")[2] in _REFUSED.get(spec.family, ())}


def _config(settings: LoraSettings, parts: list[PeftTensor], base: BaseCheckpoint | None) -> dict[str, Any]:
    alpha = settings.scale * settings.rank
    parameters = sorted({part.target for part in parts if part.is_parameter})
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base.name if base else None,
        "revision": base.revision if base else None,
        "inference_mode": True,
        "r": settings.rank,
        "lora_alpha": int(alpha) if alpha == int(alpha) else alpha,
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "target_modules": sorted({part.target for part in parts if not part.is_parameter}),
        "target_parameters": parameters or None,
    }
