"""Imported weights at the start of a run: what goes with them, and weights that a run does not read."""

from pathlib import Path

from threefold.engine.weights.imported_weights import INITIAL, list_initial_weights
from threefold.findings import Finding, FindingsError
from threefold.plan.plan import Plan
from threefold.safe_files import read_json_object
from threefold.spec.longer_context import check_positions, num_positions

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
