"""The start of a run: with weights of another run or imported ones, and what a failed start leaves.

`train_state.py` calls `fill_from_run` for `threefold train --from`, which starts from the newest checkpoint of another
run, whatever the layout of either. The contract of the new run has the lineage: one entry for each run before it, the
oldest first, such as {"run": "runs/4k", "plan": "0f3a...", "step": 2000, "seq_len": 4096, "with_optimizer": false}.

A start that failed removes what it has written, so that the corrected command finds the folder as it was: the first
rank enters `removed_on_failure`, and `cli/train.py` calls `remove_empty_start` after its agent.
"""

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from threefold.engine.dist.consensus import RankFailedError, run_on_all_ranks
from threefold.engine.dist.mesh import Group
from threefold.engine.lora import is_adapter
from threefold.engine.run.checkpoint_io import OpenCheckpoint
from threefold.engine.run.checkpoints import Checkpoints
from threefold.engine.run.dcp import State
from threefold.engine.run.folder import CHECKPOINTS, CONTRACT, PLAN, read_run_plan
from threefold.engine.run.lock import LOCK
from threefold.engine.weights.base_checkpoint import read_base, record_base
from threefold.engine.weights.imported_weights import INITIAL, list_initial_weights
from threefold.engine.weights.run_files import HF_CONFIG, TOKENIZER_FOLDER, copy_model_files
from threefold.engine.weights.safetensors_files import abbreviate
from threefold.findings import Finding, FindingsError
from threefold.launch.agent import LOGS
from threefold.plan.plan import Plan
from threefold.safe_files import MAX_JSON_BYTES, read_bounded, read_json_object
from threefold.spec.hf import model_from_dict
from threefold.spec.longer_context import check_positions, num_positions

_OF_A_START = (PLAN, CONTRACT, LOCK, f"{PLAN}.partial", f"{CONTRACT}.partial")


class Start:
    """The progress of a start."""

    has_folder = False  # the lock of the folder is held by this run
    has_begun = False  # from now on nothing is removed


@contextmanager
def removed_on_failure(folder: Path) -> Iterator[Start]:
    """Remove the files that were not there before, where the block raises before it sets `has_begun`.

    Checkpoints, imported weights and logs are never touched, nor anything of a run that had started earlier, nor of
    one that holds the folder's lock.
    """
    was_there = folder.exists()
    before = {name for name in _OF_A_START if (folder / name).exists()}
    start = Start()
    try:
        yield start
    except BaseException:
        had_started = CONTRACT in before or (folder / CHECKPOINTS).exists()
        if not start.has_begun and not had_started:
            for name in _OF_A_START if start.has_folder else ():
                if name not in before:
                    with suppress(OSError):
                        (folder / name).unlink()
            with suppress(OSError):  # other files are in it, or it was never made
                if not was_there:
                    folder.rmdir()
        raise


def remove_empty_start(folder: Path) -> None:
    """Remove the logs of ranks that refused to start, and the folder where nothing else is in it."""
    with suppress(OSError):
        if {path.name for path in folder.iterdir()} <= {LOGS}:
            shutil.rmtree(folder / LOGS, ignore_errors=True)
            folder.rmdir()


_HF = "hf:"


def check_data_is_named(folder: Path, plan: Plan) -> None:
    """Raise where a run would train imported weights on the embedded corpus because nobody named other data.

    That corpus is one token a byte; a checkpoint with a tokenizer of its own would unlearn what it knows.
    """
    if "job.data" in plan.stated or not list_initial_weights(folder):
        return
    problem = f"the run starts from the weights in {folder / INITIAL}, and no data is named to train them on"
    advice = "give job.data=FILE.jsonl, or job.data=embedded for the bytes of Python sources"
    raise FindingsError([Finding(rule="imported-weights-have-data", at="job.data", problem=problem, advice=advice)])


def check_context(folder: Path, plan: Plan, from_run: bool) -> None:
    """Raise where a run begins with weights whose positions do not reach its sequences."""
    path = named_config(plan)
    if path is None or not (from_run or list_initial_weights(folder)):
        return
    try:
        config = read_json_object(path, within=path.parent)
    except (OSError, ValueError):  # the plan was read from it: it is gone since then
        return
    check_positions(num_positions(config), plan.job.seq_len)


def named_config(plan: Plan) -> Path | None:
    """The config.json that the plan names as its model; None where the model is a built-in one."""
    if not plan.model_name.startswith(_HF):
        return None
    path = Path(plan.model_name.removeprefix(_HF))
    return path / "config.json" if path.is_dir() else path


def unused_weights_finding(plan: Plan) -> Finding | None:
    """A warning where the folder of the plan's config.json has safetensors that this run does not read."""
    path = named_config(plan)
    if path is None or not any(path.parent.glob("*.safetensors")):
        return None
    folder = path.parent
    return Finding(
        rule="weights-are-used",
        at="model",
        problem=f"{folder} holds weights, and this run does not start from them: a plan names a configuration only",
        advice=f"to start from them: `threefold finetune {folder} --data FILE --out RUN`, or `threefold import-hf`",
        severity="warning",
    )


OPTIMIZER = "optimizer."


@dataclass(frozen=True)
class Origin:
    """The run that another one starts from."""

    run: Path
    with_optimizer: bool = False  # also the optimizer's moments and its count of steps


@dataclass(frozen=True)
class FilledFrom:
    """The weights that were read of another run."""

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
        lineage = read_json_object(run / CONTRACT, within=run).get("lineage")
    except (OSError, ValueError):  # no contract
        return []
    return [entry for entry in lineage if isinstance(entry, dict)] if isinstance(lineage, list) else []


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
