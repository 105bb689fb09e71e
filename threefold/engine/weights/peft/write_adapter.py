"""Writes the adapters of a run as a folder that PEFT loads: `adapter_config.json` and `adapter_model.safetensors`.

`convert.py` calls `write_adapter` for `threefold export-hf RUN --out DIR --adapter`.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from threefold.engine.lora import LoraSettings, is_adapter
from threefold.engine.weights.base_checkpoint import BaseCheckpoint
from threefold.engine.weights.peft.adapter_tensors import PeftTensor, peft_tensors
from threefold.engine.weights.safetensors_files import refuse
from threefold.spec.model import ModelSpec

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
