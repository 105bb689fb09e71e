"""Starts a run from the newest checkpoint of another run, whatever the layout of either: `threefold train --from`.

`train_state.py` calls `fill_from_run`. The contract of the new run has the lineage: one entry for each run before it,
the oldest first, such as {"run": "runs/4k", "plan": "0f3a...", "step": 2000, "seq_len": 4096, "with_optimizer": false}.
"""

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from threefold.engine.dist.consensus import RankFailedError, run_on_all_ranks
from threefold.engine.dist.mesh import Group
from threefold.engine.lora.settings import is_adapter
from threefold.engine.run.checkpoint_io import OpenCheckpoint
from threefold.engine.run.checkpoints import Checkpoints
from threefold.engine.run.dcp import State
from threefold.engine.run.folder import CHECKPOINTS, CONTRACT, read_run_plan
from threefold.engine.start.imported import named_config
from threefold.engine.weights.base_checkpoint import read_base, record_base
from threefold.engine.weights.run_files import HF_CONFIG, TOKENIZER_FOLDER, copy_model_files
from threefold.engine.weights.safetensors_files import abbreviate
from threefold.findings import Finding, FindingsError
from threefold.plan.plan import Plan
from threefold.safe_files import MAX_JSON_BYTES, read_bounded, read_json_object
from threefold.spec.hf import model_from_dict

OPTIMIZER = "optimizer."


@dataclass(frozen=True)
class Origin:
    """The run that another one starts from."""

    run: Path
    with_optimizer: bool = False  # also the optimizer's moments and its count of steps


@dataclass(frozen=True)
class FilledFrom:
    """What was read of another run."""

    step: int
    lineage: list[dict[str, Any]]


def fill_from_run(origin: Origin, wanted: State, plan: Plan, group: Group, tell: Callable[[str], None]) -> FilledFrom:
    """Fill tensors and shards of this rank from the newest sound checkpoint of the run. All ranks make this call.

    `wanted` has the names of a checkpoint: `model.*`, and with the optimizer `optimizer.*`.
    """
    before = read_run_plan(origin.run)
    opened = Checkpoints(origin.run / CHECKPOINTS, before.run.keep, group).open_latest(tell)
    if opened is None:
        advice = "train it until it has saved, or give another run"
        raise FindingsError(
            [Finding(rule="run-has-checkpoint", at=str(origin.run), problem="no checkpoint yet", advice=advice)]
        )
    missing = [name for name in wanted if name not in opened.manifest.tensors]
    # A run without adapters may be the base of one with new ones.
    new = [name for name in missing if is_adapter(name) and not origin.with_optimizer]
    # Ranks of a pipeline want different names, and what one of them lacks ends all of them.
    run_on_all_ranks(group, lambda: _check_complete(origin, opened, sorted(set(missing) - set(new))))
    try:
        run_on_all_ranks(group, lambda: opened.fill({n: value for n, value in wanted.items() if n not in new}))
    except RankFailedError as error:
        problem, advice = f"{opened.folder.name} cannot be loaded: {error}", "give another run"
        raise FindingsError(
            [Finding(rule="checkpoint-whole", at=str(opened.folder), problem=problem, advice=advice)]
        ) from error
    return FilledFrom(opened.facts["step"], [*_lineage(origin.run), _entry(origin, before, opened)])


def _check_complete(origin: Origin, opened: OpenCheckpoint, missing: list[str]) -> None:
    if not missing:
        return
    if all(name.startswith(OPTIMIZER) for name in missing):
        problem = f"the checkpoint has no state for {abbreviate([name.removeprefix(OPTIMIZER) for name in missing])}"
        advice = "leave --with-optimizer out, or keep optimizer, precision and trained weights as they were"
    else:
        problem = f"{opened.folder.name} lacks {abbreviate(missing)}"
        advice = "give a run of the same model"
    raise FindingsError([Finding(rule="checkpoint-fits", at=str(origin.run), problem=problem, advice=advice)])


def _entry(origin: Origin, plan: Plan, opened: OpenCheckpoint) -> dict[str, Any]:
    return {
        "run": str(origin.run),
        "plan": plan.hash,
        "step": opened.facts["step"],
        "seq_len": plan.job.seq_len,
        "with_optimizer": origin.with_optimizer,
    }


def _lineage(run: Path) -> list[dict[str, Any]]:
    """The runs before this one, from its contract."""
    try:
        found = read_json_object(run / CONTRACT, within=run).get("lineage")
    except (OSError, ValueError):  # no contract
        return []
    return [entry for entry in found if isinstance(entry, dict)] if isinstance(found, list) else []


def inherit_files(origin: Origin, folder: Path, plan: Plan) -> None:
    """Give the new run the other one's tokenizer files, and the config.json of the plan's model.

    That is the other run's, or, where the model has changed, the one that the plan names. A file that is missing is no
    fault: `export-hf` makes a configuration where there is none.
    """
    before = read_run_plan(origin.run)
    if before.job.lora_rank is not None and (
        base := read_base(origin.run)
    ):  # the weights next to adapters are as they were
        with suppress(OSError):
            record_base(folder, base)
    with suppress(OSError, FindingsError):
        if not (folder / TOKENIZER_FOLDER).exists():
            copy_model_files(origin.run / TOKENIZER_FOLDER, folder / TOKENIZER_FOLDER)
    for path in (origin.run / HF_CONFIG, named_config(plan)):
        if path is None:
            continue
        with suppress(OSError, ValueError, FindingsError):
            spec = model_from_dict(read_json_object(path, within=path.parent), plan.model.name, plan.model.source)
            if replace(spec, name=plan.model.name, source=plan.model.source) == plan.model:
                (folder / HF_CONFIG).write_bytes(read_bounded(path, MAX_JSON_BYTES, within=path.parent))
                return
