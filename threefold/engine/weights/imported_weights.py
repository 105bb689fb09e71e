"""Loads imported weights (`initial/` of a run's folder) into the tensors and shards of this rank.

`threefold import-hf` leaves the weights there as safetensors with the engine's names. A run that has no checkpoint yet
starts from them: `engine/train_state.py` calls `start_from_initial_weights`. Every problem is a finding.
"""

import math
import re
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import safe_open
from torch import Tensor, nn

from threefold.engine.dist.shard_placement import Placement
from threefold.engine.lora import is_adapter, lora_settings
from threefold.engine.model_options import Options
from threefold.engine.models.build import build_model
from threefold.engine.run.dcp import CheckpointShard, State
from threefold.engine.weights.safetensors_files import READ_ERRORS, abbreviate
from threefold.findings import Finding, FindingsError
from threefold.plan.plan import Plan
from threefold.safe_files import check_inside, open_regular

INITIAL = "initial"
_IMPORT_AGAIN, _TRAIN_IMPORTED = "import the checkpoint again", "train the model that was imported"


def load_initial_weights(run: Path, model: nn.Module, placements: Mapping[str, Placement] | None = None) -> bool:
    """Fill a model with imported weights. Returns whether the run has any.

    Without placements the model is whole. With them its parameters are the shards of one rank, and it may have only
    some of the names.
    """
    state = model.state_dict()
    if placements is None:
        return fill_initial_weights(run, state, known_names=state)
    wanted = {
        name: CheckpointShard(placements[name], value) if name in placements else value for name, value in state.items()
    }
    return fill_initial_weights(run, wanted)


def list_initial_weights(run: Path) -> list[tuple[str, int]]:
    """Names and sizes of the files of imported weights; none where the run has no imported weights."""
    return [(path.name, path.stat().st_size) for path in _weight_files(run)]


def start_from_initial_weights(run: Path, wanted: State, plan: Plan) -> bool:
    """Fill the shards that this rank holds of the plan's model. Returns whether the run has imported weights."""
    if not _weight_files(run):
        return False
    options = Options(lora=lora_settings(plan.job))
    known_names = build_model(plan.model, plan.mtp, device="meta", options=options).state_dict()
    return fill_initial_weights(run, wanted, known_names, plan.model.mtp_layers)


def fill_initial_weights(
    run: Path, wanted: State, known_names: Collection[str] | None = None, imported_mtp: float = math.inf
) -> bool:
    """Fill tensors and shards with imported weights. Returns whether the run has any.

    Every wanted weight must have been imported, except for adapters and for MTP depths that the imported model does not
    have.

    Args:
        run: the run's folder.
        wanted: the tensors and shards to fill, by the engine's names.
        known_names: all names of the model; imported weights with another name are refused.
        imported_mtp: MTP depths of the imported model. A plan may train fewer of them, and then their weights are
            ignored, or more, and then the new depths keep their random initialization.
    """
    files = _weight_files(run)
    shapes: dict[str, list[int]] = {}
    for path in files:
        with _open_file(path) as file:
            shapes |= {name: list(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    problems = [*_differences(shapes, wanted, known_names, imported_mtp)] if files else []
    if problems:
        raise FindingsError(convertible_finding(run / INITIAL, problem, advice) for problem, advice in problems)
    for path in files:
        with _open_file(path) as file:
            for name in sorted(file.keys()):
                if name in wanted:
                    _fill(wanted[name], name, file)
    return bool(files)


def _weight_files(run: Path) -> list[Path]:
    try:
        check_inside(run / INITIAL, run)
    except OSError as error:
        raise FindingsError([convertible_finding(run / INITIAL, f"is not read: {error}", _IMPORT_AGAIN)]) from None
    return sorted((run / INITIAL).glob("*.safetensors"))


@contextmanager
def _open_file(path: Path) -> Iterator[Any]:
    try:
        open_regular(path, within=path.parent).close()
        with safe_open(str(path), "pt") as file:
            yield file
    except READ_ERRORS as error:
        raise FindingsError([convertible_finding(path, f"cannot be read: {error}", _IMPORT_AGAIN)]) from None


def _differences(
    shapes: Mapping[str, list[int]], wanted: State, known_names: Collection[str] | None, imported_mtp: float
) -> Iterator[tuple[str, str]]:
    """Each way in which the imported model differs from the wanted one, with advice."""
    absent = (name for name in wanted if name not in shapes and not is_adapter(name))
    missing = sorted(name for name in absent if _mtp_depth(name) < imported_mtp)
    if missing:
        yield f"no weights for {abbreviate(missing)}", f"{_IMPORT_AGAIN}, or {_TRAIN_IMPORTED}"
    surplus = sorted(
        name for name in shapes if known_names is not None and name not in known_names and _mtp_depth(name) < 0
    )
    if surplus:
        yield f"weights for {abbreviate(surplus)}, which the plan's model has not", _TRAIN_IMPORTED
    for name in sorted(wanted.keys() & shapes.keys()):
        imported_shape, planned_shape = shapes[name], list(wanted[name].size())
        if imported_shape != planned_shape:
            yield f"{name} has shape {imported_shape} there and {planned_shape} in the plan", _TRAIN_IMPORTED


def _mtp_depth(name: str) -> int:
    """The MTP depth that a weight belongs to; -1 for a weight of the model itself."""
    found = re.match(r"mtp\.(\d+)\.", name)
    return int(found[1]) if found else -1


def _fill(target: Tensor | CheckpointShard, name: str, file: Any) -> None:
    """Copy a weight from a file. For a shard only its rectangles are read."""
    stored = file.get_slice(name)
    if isinstance(target, Tensor) or not target.size():  # a scalar has no slices
        tensor = target if isinstance(target, Tensor) else target.chunks[()]
        tensor.copy_(file.get_tensor(name))
        return
    for offsets, part in target.chunks.items():
        part.copy_(stored[tuple(slice(at, at + size) for at, size in zip(offsets, part.shape, strict=True))])


def convertible_finding(at: Path, problem: str, advice: str) -> Finding:
    return Finding(rule="convertible", at=str(at), problem=problem, advice=advice)
