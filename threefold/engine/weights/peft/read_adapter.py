"""Reads a folder of PEFT as adapters of the engine: `adapter_config.json` and `adapter_model.safetensors`.

`convert.py` calls `open_adapter` for `threefold import-hf DIR --adapter PEFT`. Every problem is a finding; no tensor is
read before names and shapes are checked.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from threefold.engine.lora import LoraSettings, is_adapter
from threefold.engine.model_options import Options
from threefold.engine.models.build import build_model
from threefold.engine.weights.peft.adapter_tensors import PeftTensor, peft_tensors
from threefold.engine.weights.peft.write_adapter import CONFIG, WEIGHTS
from threefold.engine.weights.safetensors_files import SafetensorsFolder, abbreviate, refuse
from threefold.findings import shown
from threefold.plan.plan import LORA_TARGETS
from threefold.safe_files import read_json_object
from threefold.spec.model import ModelSpec

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
