"""Converts a Hugging Face checkpoint into a run that can be trained, and a run's checkpoint back, tensor by tensor.

`threefold import-hf` calls `import_hf`, `threefold export-hf` calls `export_hf`. Both yield lines of text to print.
"""

import os
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from threefold.engine.run.checkpoint_io import OpenCheckpoint, step_of_folder
from threefold.engine.run.checkpoints import Checkpoints
from threefold.engine.run.folder import CHECKPOINTS, PLAN, read_run_plan
from threefold.engine.weights.imported_weights import INITIAL, convertible_finding
from threefold.engine.weights.model_shapes import MODEL, check_is_model
from threefold.engine.weights.read_hf import HfWeights, open_hf
from threefold.engine.weights.write_hf import write_hf
from threefold.findings import FindingsError
from threefold.plan.file import dump_fields
from threefold.safe_files import MAX_JSON_BYTES, read_bounded, read_json_object
from threefold.spec.hf import model_from_config, model_from_dict
from threefold.spec.model import ModelSpec

HF_CONFIG = "hf_config.json"  # the imported config.json, in the run's folder
SHARD_BYTES = 1 << 30  # a file of initial weights is complete when it has this size
_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def import_hf(folder: Path, out: Path, dtype: str) -> Iterator[str]:
    """Make a run's folder that starts from these weights. At most one file of SHARD_BYTES is in memory.

    Where that fails nothing is left behind.
    """
    spec = model_from_config(folder)
    weights = open_hf(folder, spec)
    try:
        config = read_bounded(folder / "config.json", MAX_JSON_BYTES, within=folder)
    except OSError as error:
        raise _refuse(folder / "config.json", f"is not read: {error}", "give a folder that holds the file") from None
    _check_is_free(out)
    for finding in weights.findings:
        yield str(finding)
    initial, draft, was_there = out / INITIAL, (out / PLAN).with_suffix(".draft.toml"), out.is_dir()
    try:
        initial.mkdir(parents=True)
        count = _write_initial_weights(weights, initial, _DTYPES[dtype])
        (out / HF_CONFIG).write_bytes(config)
        changes = {"model": f"hf:{(out / HF_CONFIG).resolve()}", "knobs.precision": dtype, "job.mtp": spec.mtp_layers}
        draft.write_text(dump_fields(changes), encoding="utf-8")
    except BaseException as error:
        shutil.rmtree(initial if was_there else out, ignore_errors=True)
        for path in (out / HF_CONFIG, draft) if was_there else ():
            path.unlink(missing_ok=True)
        if isinstance(error, OSError | SafetensorError):
            raise _refuse(out, f"cannot be written: {error}", "free space, or choose another --out folder") from None
        raise
    yield f"{count:,} weights of {spec.family} in {initial}"
    yield f"train from them: threefold train {draft} --run {out}"


def _check_is_free(out: Path) -> None:
    try:
        problem = "the folder is not empty" if any(out.iterdir()) else ""
    except FileNotFoundError:
        return
    except OSError as error:
        problem = f"this is no folder that can be used: {error.strerror or error}"
    if problem:
        raise _refuse(out, problem, "choose another --out folder")


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

    def __init__(self, opened: OpenCheckpoint) -> None:
        self.opened = opened
        tensors = opened.manifest.tensors
        self.dtypes_and_shapes = {
            name.removeprefix(MODEL): value for name, value in tensors.items() if name.startswith(MODEL)
        }

    def __getitem__(self, name: str) -> Tensor:
        dtype, shape = self.dtypes_and_shapes[name]
        tensor = torch.zeros(shape, dtype=dtype)
        self.opened.fill({f"{MODEL}{name}": tensor})
        return tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self.dtypes_and_shapes)

    def __len__(self) -> int:
        return len(self.dtypes_and_shapes)


def export_hf(run: Path, out: Path) -> Iterator[str]:
    """Write the newest checkpoint of a run as a folder that transformers loads."""
    plan = read_run_plan(run)
    opened = Checkpoints(run / CHECKPOINTS, plan.run.keep).open_newest()
    if opened is None:
        raise _refuse(run, "the run has no checkpoint", "train it first")
    check_is_model(opened, plan)
    config = _imported_config(run, plan.model)
    write_hf(_CheckpointTensors(opened), plan.model, out, config)
    yield f"step {step_of_folder(opened.folder.name)} of {plan.model.name} in {out}"


def _imported_config(run: Path, spec: ModelSpec) -> dict[str, Any] | None:
    """The config.json that was imported, where the run has one and it is that of the plan's model."""
    path = run / HF_CONFIG
    if not os.path.lexists(path):
        return None
    advice = f"import the checkpoint again, or delete {HF_CONFIG}: then a configuration is made from the plan"
    try:
        config = read_json_object(path, within=run)
        found = replace(model_from_dict(config, spec.name, spec.source), name=spec.name, source=spec.source)
    except (OSError, ValueError) as error:
        raise _refuse(path, f"cannot be read: {error}", advice) from None
    except FindingsError as error:
        raise _refuse(path, error.findings[0].problem, advice) from None
    if found != spec:
        other = [field.name for field in fields(spec) if getattr(found, field.name) != getattr(spec, field.name)]
        raise _refuse(path, f"this is the configuration of another model: {', '.join(other)} differ", advice)
    return config


def _refuse(at: Path, problem: str, advice: str) -> FindingsError:
    return FindingsError([convertible_finding(at, problem, advice)])
