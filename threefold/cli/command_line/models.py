"""The model of a folder, for the verbs that ask one: a run, a folder of imported weights, or a Hugging Face checkpoint.

`threefold eval` and `threefold sample` call `open_model`.
"""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from threefold.findings import Finding, FindingsError
from threefold.plan.file import read_plan
from threefold.plan.plan import Plan

if TYPE_CHECKING:
    from threefold.engine.models.decoder import Decoder

MODEL_FOLDER = "the folder of a run, or a Hugging Face checkpoint (config.json with safetensors next to it)"


def open_model(folder: Path, newest: bool = False) -> tuple[Plan, Callable[[], "Decoder"], bool]:
    """The plan of a folder, what loads its model, and whether the folder holds a run that has trained."""
    from threefold.engine.run.folder import PLAN, read_run_plan
    from threefold.engine.train_state import load_run, load_untrained
    from threefold.engine.weights.run_files import DRAFT
    from threefold.machine.finetune.checkpoint_facts import checkpoint_facts
    from threefold.machine.finetune.plan_finetune import checkpoint_plan, devices_here

    if (folder / PLAN).exists() or not folder.is_dir():
        return read_run_plan(folder), lambda: load_run(folder, _say, newest), True
    if (folder / DRAFT).exists():
        parsed = read_plan(str(folder / DRAFT))
        if parsed.plan is None:
            raise FindingsError(parsed.findings)
        plan = parsed.plan
    elif (folder / "config.json").exists():
        plan = checkpoint_plan(checkpoint_facts(folder), devices_here()[0])
    else:
        problem = "no run and no checkpoint: there is neither plan.toml nor config.json"
        raise FindingsError(
            [Finding(rule="run-readable", at=str(folder), problem=problem, advice=f"give {MODEL_FOLDER}")]
        )
    return plan, lambda: load_untrained(folder, plan, _say), False


def _say(text: str) -> None:
    print(text, file=sys.stderr)
