"""The tensors that a model has, without memory for them, and whether a checkpoint holds these and no others.

The model's sizes may come from a stranger's config.json or plan.toml. They are held against the number of tensors that
are there before a module is made for each layer. `read_hf`, `convert` and `engine/train_state.py` call it.
"""

from torch import Tensor

from threefold.engine.lora import lora_settings
from threefold.engine.model_options import Options
from threefold.engine.models.build import build_model
from threefold.engine.run.checkpoint_io import OpenCheckpoint
from threefold.engine.weights.safetensors_files import abbreviate
from threefold.findings import Finding, FindingsError
from threefold.plan.plan import Plan
from threefold.spec.model import ModelSpec

MODEL = "model."  # what the names of weights begin with in a checkpoint of a run


def tensors_on_meta(
    spec: ModelSpec, mtp: int | None, num_stored: int, options: Options | None = None
) -> dict[str, Tensor]:
    """The engine's tensors of a model on the meta device. ValueError where `num_stored` tensors cannot be its own."""
    if spec.num_layers > num_stored:
        raise ValueError(f"the model has {spec.num_layers} layers, and only {num_stored} tensors are there")
    try:
        return dict(build_model(spec, mtp, device="meta", options=options).state_dict())
    except (RuntimeError, OverflowError, MemoryError, ZeroDivisionError) as error:
        raise ValueError(f"the model is too large: {str(error).splitlines()[0][:200]}") from None


def check_is_model(opened: OpenCheckpoint, plan: Plan) -> None:
    """Raise where a checkpoint of a run does not hold the weights of the plan's model."""
    stored = {
        name.removeprefix(MODEL): shape
        for name, (_, shape) in opened.manifest.tensors.items()
        if name.startswith(MODEL)
    }
    try:
        tensors = tensors_on_meta(plan.model, plan.mtp, len(stored), Options(lora=lora_settings(plan.job)))
        wanted = {name: tuple(t.shape) for name, t in tensors.items()}
    except ValueError as error:
        raise _misfit(opened, str(error)) from None
    missing, surplus = sorted(wanted.keys() - stored.keys()), sorted(stored.keys() - wanted.keys())
    other = sorted(name for name in wanted.keys() & stored.keys() if wanted[name] != stored[name])
    problems = [
        *([f"it lacks {abbreviate(missing)}"] if missing else []),
        *([f"the model has no {abbreviate(surplus)}"] if surplus else []),
        *([f"{other[0]} has {list(stored[other[0]])}, not {list(wanted[other[0]])}"] if other else []),
    ]
    if problems:
        raise _misfit(opened, "; ".join(problems))


def _misfit(opened: OpenCheckpoint, problem: str) -> FindingsError:
    return FindingsError(
        [
            Finding(
                rule="checkpoint-fits",
                at=str(opened.folder),
                problem=f"{opened.folder.name} does not hold the model of plan.toml: {problem}",
                advice="put the plan back that the run was started with",
            )
        ]
    )
