"""The plan behind the configuration that a job printed."""

from dataclasses import dataclass, field, replace
from typing import Any

from threefold.diagnose.logs.health import Health
from threefold.diagnose.logs.printed import Printed
from threefold.diagnose.part import Context
from threefold.findings import Finding
from threefold.interop.megatron.bridge_summary import overrides
from threefold.interop.megatron.import_text import Imported, import_text
from threefold.interop.torchtitan import import_torchtitan
from threefold.plan.parse import change
from threefold.plan.plan import Plan
from threefold.rules.all import check
from threefold.spec.chips import chip_of_device
from threefold.spec.flops import flops_per_token

_GUESSED = "import-needs-cluster"
_ALIKE = 0.1  # how far a number of GPUs may be from what TFLOP/s and seconds say


@dataclass
class Configuration:
    """A plan, where there is one, with what its import and the rules say."""

    source: str = ""  # what the plan comes from; empty: nothing was printed
    plan: Plan | None = None
    findings: list[Finding] = field(default_factory=list)
    rest: dict[str, Any] = field(default_factory=dict)  # settings that no field of the plan stands for
    is_complete: bool = False  # whether a setting that was not printed has its default


def read_configuration(printed: Printed, context: Context, num_ranks: int, health: Health) -> Configuration:
    """The plan that the user gives, else that behind the printed configuration, judged by the rules if asked for."""
    plan = context.plan
    found = Configuration(context.plan_source, plan) if plan else _imported(printed, num_ranks, health)
    if found.plan and context.judges_plans:
        found.findings += check(found.plan, notes=False)
    return found


def _imported(printed: Printed, num_ranks: int, health: Health) -> Configuration:
    chip = chip_of_device(printed.device)
    given: dict[str, object] = {"cluster.chip": chip.name} if chip else {}
    if printed.arguments:
        return _as_configuration("Megatron-LM's arguments", import_text(printed.arguments, given))
    if printed.summary:
        imported = _counted(import_text(overrides(printed.summary), given), num_ranks, health)
        return _as_configuration("Megatron Bridge's summary", imported)
    if num_ranks > 1 and not printed.mesh:
        given["cluster.gpus"] = num_ranks
    if printed.titan:
        return _as_configuration("torchtitan's configuration", import_torchtitan(printed.titan, printed.mesh, given))
    return Configuration()


def _counted(imported: Imported, num_ranks: int, health: Health) -> Imported:
    """Put a plan of Bridge, whose summary names no number of GPUs, on as many as its log speaks of.

    They are those at which TFLOP/s and seconds are the work of a step, else the fewest for its layout that have every
    rank that wrote a line.
    """
    plan = imported.plan
    if plan is None:
        return imported
    least = plan.layout.min_gpus
    gpus, why = -(-max(num_ranks, least) // least) * least, "the fewest for this layout and the ranks in the log"
    if health.tflops and health.step_seconds:
        work = flops_per_token(plan.model, plan.job.seq_len, plan.mtp, plan.layout.tp, plan.stack.release)
        fits = work * plan.tokens_per_step / (health.tflops * 1e12 * health.step_seconds)
        near = round(fits / least) * least
        if near >= num_ranks and near and abs(fits / near - 1) < _ALIKE:
            gpus, why = near, "at which the log's TFLOP/s and seconds are the work of a step"
    problem = f"no number of GPUs named: {gpus}, {why}"
    findings = [replace(f, problem=problem) if f.at == "cluster.gpus" else f for f in imported.findings]
    return replace(imported, plan=change(plan, {"cluster.gpus": gpus}), findings=findings)


def _as_configuration(source: str, imported: Imported) -> Configuration:
    said = [one for one in imported.findings if one.severity == "error" or one.rule == _GUESSED]
    said = [replace(one, advice="give the plan that ran: --plan PLAN") if one.rule == _GUESSED else one for one in said]
    return Configuration(source, imported.plan, said, imported.rest, is_complete=imported.kind == "arguments")
