"""Converts a Hugging Face checkpoint into a run that can be trained, and a run's checkpoint back, tensor by tensor.

`threefold import-hf` calls `import_hf`, `threefold export-hf` calls `export_hf`. Both yield lines of text to print.
"""

import json
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from threefold.engine.run.checkpoint_manifest import read_manifest, verify_files
from threefold.engine.run.checkpoints import Checkpoints
from threefold.engine.run.dcp import StoredTensors
from threefold.engine.run.folder import CHECKPOINTS, PLAN, read_run_plan
from threefold.engine.weights.imported_weights import INITIAL, convertible_finding
from threefold.engine.weights.read_hf import HfWeights, open_hf
from threefold.engine.weights.write_hf import write_hf
from threefold.findings import FindingsError
from threefold.plan.file import dump_fields
from threefold.spec.hf import model_from_config

HF_CONFIG = "hf_config.json"  # the imported config.json, in the run's folder
SHARD_BYTES = 1 << 30  # a file of initial weights is complete when it has this size
_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def import_hf(folder: Path, out: Path, dtype: str) -> Iterator[str]:
    """Make a run's folder that starts from these weights. At most one file of SHARD_BYTES is in memory."""
    spec = model_from_config(folder)
    weights = open_hf(folder, spec)
    initial = out / INITIAL
    if out.exists() and any(out.iterdir()):
        raise _refuse(out, "the folder is not empty", "choose another --out folder")
    for finding in weights.findings:
        yield str(finding)
    try:
        initial.mkdir(parents=True)
        count = _write_initial_weights(weights, initial, _DTYPES[dtype])
        shutil.copy(folder / "config.json", out / HF_CONFIG)
        fields = {"model": f"hf:{(out / HF_CONFIG).resolve()}", "knobs.precision": dtype, "job.mtp": spec.mtp_layers}
        draft = (out / PLAN).with_suffix(".draft.toml")
        draft.write_text(dump_fields(fields), encoding="utf-8")
    except (OSError, SafetensorError) as error:
        shutil.rmtree(initial, ignore_errors=True)
        raise _refuse(out, f"cannot be written: {error}", "free space, or choose another --out folder") from None
    yield f"{count:,} weights of {spec.family} in {initial}"
    yield f"train from them: threefold train {draft} --run {out}"


def _write_initial_weights(weights: HfWeights, folder: Path, dtype: torch.dtype) -> int:
    """Write all tensors in files of about SHARD_BYTES. Returns the number of weights."""
    file_number, num_weights, tensors = 0, 0, {}
    for name, tensor in weights:
        tensors[name] = tensor.to(dtype) if tensor.is_floating_point() and tensor.dim() else tensor
        num_weights += tensor.numel()
        if sum(value.numel() * value.element_size() for value in tensors.values()) >= SHARD_BYTES:
            save_file(tensors, folder / f"{file_number:05d}.safetensors")
            file_number, tensors = file_number + 1, {}
    if tensors:
        save_file(tensors, folder / f"{file_number:05d}.safetensors")
    return num_weights


class _CheckpointTensors(Mapping[str, Tensor]):
    """The full tensors of the model in a checkpoint of any layout. Each is read when it is asked for."""

    def __init__(self, folder: Path) -> None:
        self.stored = StoredTensors(folder)
        tensors: dict[str, Any] = read_manifest(folder)["tensors"]
        self.dtypes_and_shapes = {
            name.removeprefix("model."): value for name, value in tensors.items() if name.startswith("model.")
        }

    def __getitem__(self, name: str) -> Tensor:
        dtype, shape = self.dtypes_and_shapes[name]
        tensor = torch.empty(shape, dtype=getattr(torch, dtype.removeprefix("torch.")))
        self.stored.fill({f"model.{name}": tensor})
        return tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self.dtypes_and_shapes)

    def __len__(self) -> int:
        return len(self.dtypes_and_shapes)


def export_hf(run: Path, out: Path) -> Iterator[str]:
    """Write the newest checkpoint of a run as a folder that transformers loads."""
    plan = read_run_plan(run)
    checkpoints = Checkpoints(run / CHECKPOINTS, plan.run.keep)
    if not checkpoints.steps():
        raise _refuse(run, "the run has no checkpoint", "train it first")
    step = checkpoints.steps()[-1]
    verify_files(checkpoints.path(step))
    imported = run / HF_CONFIG
    config = json.loads(imported.read_text(encoding="utf-8")) if imported.exists() else None
    write_hf(_CheckpointTensors(checkpoints.path(step)), plan.model, out, config)
    yield f"step {step} of {plan.model.name} in {out}"


def _refuse(at: Path, problem: str, advice: str) -> FindingsError:
    return FindingsError([convertible_finding(at, problem, advice)])
