"""Reads a Hugging Face checkpoint folder as engine tensors, one at a time.

`open_hf` checks names and shapes of the whole checkpoint before any tensor is read. `import_hf` iterates over the
result; `read_hf` fills a model with it.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from threefold.engine.models.build import build_model
from threefold.engine.models.decoder import Decoder
from threefold.engine.weights.dequantize import dequantize_fp8_blocks, dequantize_mxfp4
from threefold.engine.weights.hf_names import HfTensor, duplicated_keys, hf_layouts, stored_keys
from threefold.engine.weights.safetensors_files import SafetensorsFolder, abbreviate, finding
from threefold.findings import Finding, FindingsError
from threefold.spec.model import ModelSpec

_PLAIN = {"F64", "F32", "F16", "BF16"}


@dataclass(frozen=True)
class HfWeights:
    """The weights of a checkpoint for one model. Iterating gives the engine's names and tensors."""

    checkpoint: SafetensorsFolder
    hf_tensors: dict[str, list[HfTensor]]  # by engine tensor
    shapes: dict[str, tuple[int, ...]]  # of the engine tensors
    findings: list[Finding]  # warnings about tensors that were dequantized or not used

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        """Engine name and tensor, in the stored dtype, or in bf16 if the tensor was quantized."""
        for name, hf_tensors in self.hf_tensors.items():
            yield name, self._assemble(name, hf_tensors)

    def _assemble(self, name: str, hf_tensors: list[HfTensor]) -> Tensor:
        engine_tensor = None
        for hf_tensor in hf_tensors:
            value = _load(self.checkpoint, hf_tensor)
            if engine_tensor is None:
                engine_tensor = torch.empty(self.shapes[name], dtype=value.dtype)
            hf_tensor.write(engine_tensor, value)
        assert engine_tensor is not None
        return engine_tensor


def open_hf(folder: Path, spec: ModelSpec, mtp: int | None = None) -> HfWeights:
    """Find every tensor of the model and check its shape. Raises all problems at once; no tensor is read yet."""
    checkpoint = SafetensorsFolder(folder)
    model = build_model(spec, mtp, device="meta")
    chosen, problems, used = {}, [], set(duplicated_keys(spec, max(spec.mtp_layers, model.num_mtp)))
    for name, tensor in model.state_dict().items():
        layouts = hf_layouts(name, spec)
        layout = next((layout for layout in layouts if _is_complete(layout, checkpoint)), None)
        if layout is None:
            missing = [key for part in layouts[0] for key in stored_keys(part) if key not in checkpoint.file_of]
            problems.append(finding(f"no weights for {name}: {abbreviate(missing)} missing", "complete the checkpoint"))
            continue
        problems += [problem for part in layout for problem in _check(part, tensor, checkpoint)]
        used |= {key for part in layout for key in stored_keys(part)}
        chosen[name] = layout
    if problems:
        raise FindingsError(problems)
    shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    return HfWeights(checkpoint, chosen, shapes, list(_warnings(checkpoint, chosen, used)))


def read_hf(folder: Path, model: Decoder) -> list[Finding]:
    """Fill `model`, converting to its dtype. Returns warnings about tensors that were dequantized or not used."""
    weights = open_hf(folder, model.spec, model.num_mtp)
    state = model.state_dict()
    with torch.no_grad():
        for name, tensor in weights:
            state[name].copy_(tensor)
    return weights.findings


def _is_complete(layout: list[HfTensor], checkpoint: SafetensorsFolder) -> bool:
    return all(key in checkpoint.file_of for part in layout for key in stored_keys(part))


def _scale_key(hf_tensor: HfTensor, checkpoint: SafetensorsFolder) -> str | None:
    key = f"{hf_tensor.key}_scale_inv"
    return key if key in checkpoint.file_of else None


def _check(hf_tensor: HfTensor, tensor: Tensor, checkpoint: SafetensorsFolder) -> Iterator[Finding]:
    keys = stored_keys(hf_tensor)
    expected, found = hf_tensor.shape(tensor), checkpoint.shape(keys[0])
    if hf_tensor.stored == "mxfp4":
        found = (*found[:-2], found[-2] * found[-1] * 2)
    elif checkpoint.dtype(keys[0]) not in _PLAIN and _scale_key(hf_tensor, checkpoint) is None:
        problem = f"{keys[0]} is stored as {checkpoint.dtype(keys[0])} without a known scale"
        yield finding(problem, "use the bf16, block-fp8 or MXFP4 checkpoint")
    if expected != found:
        yield finding(f"{keys[0]} has shape {found}, the model wants {expected}", "use the config.json beside it")


def _load(checkpoint: SafetensorsFolder, hf_tensor: HfTensor) -> Tensor:
    parts = [checkpoint.tensor(key) for key in stored_keys(hf_tensor)]
    if hf_tensor.stored == "mxfp4":
        return dequantize_mxfp4(*parts)
    scale = _scale_key(hf_tensor, checkpoint)
    return (
        parts[0] if scale is None else dequantize_fp8_blocks(parts[0], checkpoint.tensor(scale), checkpoint.fp8_block)
    )


def _warnings(checkpoint: SafetensorsFolder, chosen: dict[str, list[HfTensor]], used: set[str]) -> Iterator[Finding]:
    kinds: Counter[str] = Counter()
    for hf_tensor in (part for layout in chosen.values() for part in layout):
        scale = _scale_key(hf_tensor, checkpoint)
        if hf_tensor.stored == "mxfp4":
            kinds["MXFP4"] += 1
        elif scale is not None:
            kinds["block fp8"] += 1
            used.add(scale)
    for kind, number in kinds.items():
        yield _warning(f"{number} {kind} tensors were dequantised to bf16", "training goes on from the rounded weights")
    unused = sorted(key for key in checkpoint.file_of if key not in used and not key.endswith("rotary_emb.inv_freq"))
    if unused:
        yield _warning(f"{len(unused)} tensors were not used: {abbreviate(unused)}", "expected when MTP is off or tied")


def _warning(problem: str, advice: str) -> Finding:
    return Finding(rule="hf-weights", at="weights", problem=problem, advice=advice, severity="warning")
