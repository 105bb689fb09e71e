"""Plans in the words of other systems. No torch."""

from threefold.findings import FindingsError, in_order
from threefold.interop.megatron.export_plan import BRIDGE, Export, export_plan
from threefold.launch.slurm import Options, faults
from threefold.plan.parse import change
from threefold.plan.plan import Plan
from threefold.rules.all import check, errors


def export(plan: Plan, to: str = BRIDGE, release: str | None = None, job: Options | None = None) -> Export:
    """A plan as Megatron Bridge or, with to="megatron-lm", Megatron-LM takes it, with what they cannot express.

    `release` is a NeMo container or a version of Bridge, by default that of the plan or the newest. `job` is how Slurm
    starts it. Raises what keeps the target from running the plan.
    """
    judged = plan if plan.target == BRIDGE else change(plan, {"target": BRIDGE})
    if blocking := [*errors(check(judged, notes=False)), *faults(plan, job or Options())]:
        raise FindingsError(in_order(blocking))
    return export_plan(plan, to, release)
