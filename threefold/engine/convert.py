"""Hugging Face checkpoints into runs and back, one tensor at a time."""

import json
import math
import re
import shutil
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from threefold.engine.checkpoint import Checkpoints
from threefold.engine.manifest import read_manifest, verify_files
from threefold.engine.models.build import build_model
from threefold.engine.pieces import Piece, State, Stored
from threefold.engine.run import CHECKPOINTS, PLAN, plan_of_run
from threefold.engine.shard.placement import Placement
from threefold.engine.weights.files import some
from threefold.engine.weights.read import Source, open_hf
from threefold.engine.weights.write import write_hf
from threefold.findings import Finding, FindingsError
from threefold.plan.file import dump_fields
from threefold.plan.plan import Plan
from threefold.spec.hf import model_from_config

INITIAL, HF_CONFIG = "initial", "hf_config.json"
SHARD_BYTES = 1 << 30
_AGAIN, _SAME = "import the checkpoint again", "train the model that was imported"
_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def import_hf(folder: Path, out: Path, dtype: str) -> Iterator[str]:
    """Make a run that starts from these weights. Memory stays at a shard, whatever the model's size."""
    spec = model_from_config(folder)
    source = open_hf(folder, spec)
    initial = out / INITIAL
    if out.exists() and any(out.iterdir()):
        raise _refuse(out, "the folder is not empty", "choose another --out folder")
    for finding in source.findings:
        yield str(finding)
    try:
        initial.mkdir(parents=True)
        count = _write_shards(source, initial, _DTYPES[dtype])
        shutil.copy(folder / "config.json", out / HF_CONFIG)
        fields = {"model": f"hf:{(out / HF_CONFIG).resolve()}", "knobs.precision": dtype, "job.mtp": spec.mtp_layers}
        draft = (out / PLAN).with_suffix(".draft.toml")
        draft.write_text(dump_fields(fields), encoding="utf-8")
    except (OSError, SafetensorError) as error:
        shutil.rmtree(initial, ignore_errors=True)
        raise _refuse(out, f"cannot be written: {error}", "free space, or choose another --out folder") from None
    yield f"{count:,} weights of {spec.family} in {initial}"
    yield f"train from them: threefold train {draft} --run {out}"


def _write_shards(source: Source, folder: Path, dtype: torch.dtype) -> int:
    """One shard in memory at a time; returns the number of weights."""
    number, count, held = 0, 0, {}
    for name, tensor in source:
        held[name] = tensor.to(dtype) if tensor.is_floating_point() and tensor.dim() else tensor
        count += tensor.numel()
        if sum(value.numel() * value.element_size() for value in held.values()) >= SHARD_BYTES:
            save_file(held, folder / f"{number:05d}.safetensors")
            number, held = number + 1, {}
    if held:
        save_file(held, folder / f"{number:05d}.safetensors")
    return count


def load_initial(run: Path, model: nn.Module, placements: Mapping[str, Placement] | None = None) -> bool:
    """Fill the model with imported weights, where the run has any.

    With placements the model is this rank's share: parameters are pieces, and it may have only some of the names.
    """
    state = model.state_dict()
    if placements is None:
        return fill_initial(run, state, known=state)
    want = {name: Piece(placements[name], value) if name in placements else value for name, value in state.items()}
    return fill_initial(run, want)


def start_from_initial(run: Path, want: State, plan: Plan) -> bool:
    """Imported weights into what this rank holds of the plan's model, where the run has any."""
    if not _files(run):
        return False
    known = build_model(plan.model, plan.mtp, device="meta").state_dict()
    return fill_initial(run, want, known, plan.model.mtp_layers)


def fill_initial(run: Path, want: State, known: Collection[str] | None = None, depths: float = math.inf) -> bool:
    """Imported weights into tensors and pieces; every weight that is wanted must be there, but for new MTP depths.

    `known`: names of the whole model, where the run should have no others. `depths`: MTP depths of the model that was
    imported. A plan may train fewer, whose weights are passed over, or more, which start afresh.
    """
    files = _files(run)
    shapes: dict[str, list[int]] = {}
    for path in files:
        with _opened(path) as shard:
            shapes |= {name: list(shard.get_slice(name).get_shape()) for name in shard.keys()}  # noqa: SIM118
    problems = [*_unlike(shapes, want, known, depths)] if files else []
    if problems:
        raise FindingsError(_fault(run / INITIAL, problem, advice) for problem, advice in problems)
    for path in files:
        with _opened(path) as shard:
            for name in sorted(shard.keys()):
                if name in want:
                    _fill_one(want[name], name, shard)
    return bool(files)


def _files(run: Path) -> list[Path]:
    return sorted((run / INITIAL).glob("*.safetensors"))


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    try:
        with safe_open(str(path), "pt") as shard:
            yield shard
    except (SafetensorError, OSError) as error:
        raise _refuse(path, f"cannot be read: {error}", _AGAIN) from None


def _unlike(
    shapes: Mapping[str, list[int]], want: State, known: Collection[str] | None, depths: float
) -> Iterator[tuple[str, str]]:
    """How the model that was imported differs from the wanted one, with advice."""
    lost = sorted(name for name in want if name not in shapes and _depth(name) < depths)
    if lost:
        yield f"no weights for {some(lost)}", f"{_AGAIN}, or {_SAME}"
    more = sorted(name for name in shapes if known is not None and name not in known and _depth(name) < 0)
    if more:
        yield f"weights for {some(more)}, which the plan's model has not", _SAME
    for name in sorted(want.keys() & shapes.keys()):
        there, here = shapes[name], list(want[name].size())
        if there != here:
            yield f"{name} has shape {there} there and {here} in the plan", _SAME


def _depth(name: str) -> int:
    """Of a weight of MTP; below 0: of the model itself."""
    found = re.match(r"mtp\.(\d+)\.", name)
    return int(found[1]) if found else -1


def _fill_one(into: Tensor | Piece, name: str, shard: Any) -> None:
    """A piece reads its rectangles only. A scalar has no slices."""
    stored = shard.get_slice(name)
    if isinstance(into, Tensor) or not into.size():
        target = into if isinstance(into, Tensor) else into.parts[()]
        target.copy_(shard.get_tensor(name))
        return
    for offsets, part in into.parts.items():
        part.copy_(stored[tuple(slice(at, at + size) for at, size in zip(offsets, part.shape, strict=True))])


class _Saved(Mapping[str, Tensor]):
    """The model's whole tensors in a checkpoint of any layout, each read when asked for."""

    def __init__(self, folder: Path) -> None:
        self.stored = Stored(folder)
        tensors: dict[str, Any] = read_manifest(folder)["tensors"]
        self.facts = {
            name.removeprefix("model."): value for name, value in tensors.items() if name.startswith("model.")
        }

    def __getitem__(self, name: str) -> Tensor:
        dtype, shape = self.facts[name]
        tensor = torch.empty(shape, dtype=getattr(torch, dtype.removeprefix("torch.")))
        self.stored.fill({f"model.{name}": tensor})
        return tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self.facts)

    def __len__(self) -> int:
        return len(self.facts)


def export_hf(run: Path, out: Path) -> Iterator[str]:
    """The newest checkpoint as a folder that transformers loads."""
    plan = plan_of_run(run)
    checkpoints = Checkpoints(run / CHECKPOINTS, plan.run.keep)
    if not checkpoints.steps():
        raise _refuse(run, "the run has no checkpoint", "train it first")
    step = checkpoints.steps()[-1]
    verify_files(checkpoints.path(step))
    kept = run / HF_CONFIG
    config = json.loads(kept.read_text(encoding="utf-8")) if kept.exists() else None
    write_hf(_Saved(checkpoints.path(step)), plan.model, out, config)
    yield f"step {step} of {plan.model.name} in {out}"


def _refuse(at: Path, problem: str, advice: str) -> FindingsError:
    return FindingsError([_fault(at, problem, advice)])


def _fault(at: Path, problem: str, advice: str) -> Finding:
    return Finding(rule="convertible", at=str(at), problem=problem, advice=advice)
