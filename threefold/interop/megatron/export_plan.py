"""A plan in the words of Megatron Bridge or Megatron-LM, with the table of what those cannot say."""

from dataclasses import dataclass
from typing import Any

from threefold.interop.megatron.architecture import FAMILIES, architecture, match_model
from threefold.interop.megatron.argument_line import read_arguments, write_arguments
from threefold.interop.megatron.environment import Variable, environment_of
from threefold.interop.megatron.field_names import FLEX, SCRIPT_CHIPS, Settings
from threefold.interop.megatron.models import Selection, dataset_kind, select_model
from threefold.interop.megatron.releases import Release, find_release
from threefold.interop.megatron.settings_writer import SAME_AS_ABSENT, Inexpressible, Writer, spell
from threefold.interop.megatron.write_settings import settings_of
from threefold.launch.slurm import shape
from threefold.notebook import ShownAsTable
from threefold.plan.plan import Plan

BRIDGE, LM = "megatron-bridge", "megatron-lm"
FORMATS = (BRIDGE, LM)


@dataclass(frozen=True, repr=False)
class Export(ShownAsTable):
    """A plan as Megatron takes it."""

    plan: Plan
    to: str
    release: Release
    remark: str  # where another release than the one that the plan names had to stand in
    selection: Selection
    settings: Settings  # in the spelling of the release; for Bridge without the precision recipe
    precision: str  # Bridge's mixed-precision recipe
    arguments: tuple[str, ...]  # of Megatron-LM
    environment: tuple[Variable, ...]
    inexpressible: tuple[Inexpressible, ...]

    @property
    def backend(self) -> str | None:
        """The flex dispatcher's, which Bridge activates by a function."""
        dispatcher = self.plan.knobs.dispatcher
        return dispatcher if self.plan.model.is_moe and dispatcher in FLEX else None

    @property
    def stack(self) -> str:
        return f"Megatron Bridge {self.release.bridge}" if self.to == BRIDGE else f"Megatron-LM {self.release.core}"

    @property
    def lost(self) -> tuple[Inexpressible, ...]:
        """The part of the table that Megatron will not do."""
        return tuple(item for item in self.inexpressible if not item.is_said)

    @property
    def respelled(self) -> tuple[Inexpressible, ...]:
        return tuple(item for item in self.inexpressible if item.is_said)

    def summary(self) -> str:
        return f"{len(self.settings)} settings for {self.stack}, {len(self.lost)} fields not expressed"

    def table(self) -> tuple[list[str], list[list[str]]]:
        """The settings, then what Megatron will not do."""
        rows = [[path, str(value)] for path, value in self.settings.items()]
        return ["setting", "value"], [*rows, *([item.field, f"not expressed: {item.reason}"] for item in self.lost)]

    def to_json(self) -> dict[str, Any]:
        settings = {path: list(value) if isinstance(value, tuple) else value for path, value in self.settings.items()}
        return {
            "to": self.to,
            "bridge": self.release.bridge,
            "core": self.release.core,
            "remark": self.remark,
            "recipe": self.selection.recipe,
            "model": self.selection.source,
            "precision": self.precision,
            "dispatcher": self.backend,
            "overrides": settings if self.to == BRIDGE else {},
            "arguments": list(self.arguments),
            "environment": [
                {"name": item.name, "value": item.value, "reason": item.reason} for item in self.environment
            ],
            "inexpressible": [item.to_json() for item in self.inexpressible],
        }


def export_plan(plan: Plan, to: str = BRIDGE, release: str | None = None) -> Export:
    """`release`: a NeMo container or a version of Megatron Bridge, in place of the plan's `stack.release`."""
    chosen, remark = find_release(release or plan.stack.release, has_arguments=to == LM)
    writer = settings_of(plan, chosen, to)
    selection = select_model(plan, chosen)
    arguments: tuple[str, ...] = ()
    if to == LM:
        sizes = architecture(plan.model, plan.job.seq_len) or {}
        arguments = tuple(write_arguments({**sizes, **writer.settings}, chosen))
        _check_argument_line(writer, bool(sizes), arguments)
    else:
        _check_selection(writer, selection)
    _check_launch(writer)
    precision = writer.settings.pop("mixed_precision", "")
    backend, dataset = plan.knobs.dispatcher, dataset_kind(plan)
    return Export(
        plan=plan,
        to=to,
        release=chosen,
        remark=remark,
        selection=selection,
        settings={spell(path, chosen, backend, dataset): value for path, value in writer.settings.items()},
        precision=precision,
        arguments=arguments,
        environment=tuple(environment_of(plan)),
        inexpressible=tuple(sorted(writer.lost, key=lambda item: (item.is_said, item.field))),
    )


def _check_selection(writer: Writer, selection: Selection) -> None:
    plan = writer.plan
    if not selection.stem or plan.model_name.startswith("hf:"):
        reason = "Bridge has no recipe for it; the script reads the shape from a checkpoint"
        if not selection.source:
            reason += ": set HF_MODEL to its folder"
        writer.respell("model", reason + ". A command line does not name it: import with --model")


def _check_argument_line(writer: Writer, has_shape: bool, arguments: tuple[str, ...]) -> None:
    plan = writer.plan
    if not has_shape:
        families = ", ".join(FAMILIES)
        reason = f"the arguments of pretrain_gpt.py describe models of {families} only: add the shape by hand"
        writer.lose("model", reason)
    elif match_model(read_arguments(arguments)[0]) != plan.model_name:
        reason = "arguments have sizes and no name, and another model has the same sizes: import with --model"
        writer.respell("model", reason)
    layout = plan.layout
    if writer.settings.get("model.pipeline_model_parallel_layout") is not None and len(plan.chunks) != layout.chunks:
        reason = "Megatron-LM takes the number of virtual stages from the layout string"
        writer.always_respell("layout.vpp", layout.vpp, reason)
        writer.respell("layout.stages", "with that number of virtual stages it may be the balanced layout")
    writer.always_respell("cluster.chip", plan.cluster.chip, "an argument line names no chip: import with --chip")


def _check_launch(writer: Writer) -> None:
    """What the command that starts a run says, or cannot say."""
    plan, cluster = writer.plan, writer.plan.cluster
    if plan.target != BRIDGE:
        reason = "an import is a plan for megatron-bridge"
        writer.always_respell("target", plan.target, reason)
    if writer.to == BRIDGE and cluster.chip not in SCRIPT_CHIPS:
        known = ", ".join(SCRIPT_CHIPS)
        reason = f"Bridge's performance scripts know {known}: import with --chip"
        writer.always_respell("cluster.chip", cluster.chip, reason)
    if cluster.gpus_per_node == cluster.spec.gpus_per_node:
        writer.respell("cluster.gpus_per_node", SAME_AS_ABSENT)
    place = shape(plan)
    if writer.to == LM and (place is None or place.nodes == 1):
        writer.respell("cluster.gpus_per_node", "torchrun on one node counts the GPUs of the run, not of the node")
