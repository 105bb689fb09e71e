"""Rehearsals: the plan as our engine runs it, the loads of its experts, and the dry run itself. Torch loads with it."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from threefold.api.plans import OUR_ENGINE, for_our_engine
from threefold.cost.expert_load import is_uneven
from threefold.cost.fit import surely_fits
from threefold.findings import FindingsError, in_order
from threefold.plan.load import LOADS, read_load
from threefold.plan.parse import change
from threefold.plan.plan import Plan
from threefold.remedies.evidence import NOTHING_SEEN, Evidence
from threefold.rules.all import advice, blockers, check, promoted
from threefold.rules.stacks import ENGINE_LIMITS

if TYPE_CHECKING:
    from threefold.dryrun.rehearse_plan import Rehearsal
    from threefold.dryrun.simulated.expert_load import ExpertLoads


def rehearse(
    plan: Plan,
    ranks: Sequence[int] | str = "stages",
    skew: float = 1.0,
    loads: "str | Path | ExpertLoads | None" = None,
    jobs: int | None = None,
    say: Callable[[str], None] | None = None,
) -> "Rehearsal":
    """Run the engine on fake tensors: peak memory of each rank, when and where, and every collective. No GPU needed.

    `ranks` are numbers, "stages" (one of every distinct stage) or "all" (of a plan scaled down, with a check that
    collectives match). `skew` is the load of the busiest expert rank over the mean; `loads` are tokens of each expert,
    as a JSON file or the folder of a run. `jobs` ranks are rehearsed at a time. Raises the rules' errors.
    """
    from threefold.dryrun.rehearse_plan import rehearse as rehearse_ranks
    from threefold.dryrun.simulated.expert_load import ExpertLoads

    runs, left_out = as_the_engine_runs(plan)
    found, problem = (loads, "") if isinstance(loads, ExpertLoads) else loads_from(loads, skew, runs)
    if problem:
        raise ValueError(problem)
    return with_advice(rehearse_ranks(runs, ranks, found, say, jobs, left_out))


def with_advice(found: "Rehearsal") -> "Rehearsal":
    """The rehearsal with what could help: by what was rehearsed where that and the estimate do not agree whether the
    plan fits."""
    if found.scaled:
        return found
    fits = found.device_bytes <= found.plan.chip.memory_bytes
    evidence = NOTHING_SEEN if fits == surely_fits(found.plan) else Evidence(device_bytes=found.device_bytes)
    return replace(found, advice=advice(found.plan, evidence))


def predicted_snapshot(found: "Rehearsal", loads: "ExpertLoads | None" = None) -> bytes:
    """Every allocation of the largest rank's step, as a file of PyTorch's memory viewer. The rank runs once more."""
    from threefold.diagnose.snapshots.predicted import Change, snapshot_of
    from threefold.dryrun.rehearse_rank import rehearse_rank

    worst = rehearse_rank(found.plan, found.worst.rank, loads, found.worst.stages, with_changes=True)
    return snapshot_of([Change(*change) for change in worst.changes], worst.num_initial_changes)


def as_the_engine_runs(plan: Plan) -> tuple[Plan, list[str]]:
    """The plan with what the engine lacks put back to defaults, and what that was, in words; raises what is left."""
    said = []
    if plan.target != OUR_ENGINE:
        said.append(f"target: Threefold's own engine is rehearsed, not {plan.target}, for which the plan is")
    plan = for_our_engine(plan)
    for finding in [f for f in check(plan, notes=False) if f.rule in ENGINE_LIMITS and f.fix_data]:
        plan = change(plan, finding.fix_data or {})
        said.append(f"{finding.at}: {finding.problem}")
    if plan.job.packing:
        plan = change(plan, {"job.packing": None})
        said.append("job.packing: a sequence is rehearsed as one document")
    if plan.job.dynamic_length:
        plan = change(plan, {"job.dynamic_length": None})
        said.append("job.dynamic_length: every microbatch has its full length")
    if plan.shards_dynamically:
        said.append("knobs.cp_dynamic: every sequence has its full length, and so the degree of the layout")
    # Whether it fits is for the rehearsal to say, and where the memory goes if it does not.
    if wrong := [
        finding for finding in blockers(promoted(check(plan, notes=False))) if finding.rule != "states-fit-memory"
    ]:
        raise FindingsError(in_order(wrong))
    return plan, said


def loads_from(path: str | Path | None, skew: float, plan: Plan) -> "tuple[ExpertLoads | None, str]":
    """How tokens fall on the experts, or what is wrong with what was given. Without either it is the plan's load."""
    from threefold.dryrun.simulated.expert_load import DrawnLoads, ExpertLoads

    num_experts, ep = plan.model.num_experts, plan.layout.ep
    if skew != 1 and path is not None:
        return None, "--skew and --loads both say how tokens fall on the experts: give one"
    if problem := skew_problem(skew, ep):
        return None, problem
    if skew != 1:
        each = num_experts // ep
        return ExpertLoads((skew,) * each + ((ep - skew) / max(1, ep - 1),) * (num_experts - each)), ""
    if path is None:
        return (DrawnLoads.of(plan), "") if is_uneven(plan) else (None, "")
    shares, problem = shares_from(path, num_experts)
    return (None, problem) if problem else (ExpertLoads(shares), "")


def shares_from(path: str | Path, num_experts: int) -> tuple[tuple[float, ...], str]:
    """Tokens of each expert, from a file or the last step of a run; or what is wrong."""
    try:
        record = read_load(Path(path) / LOADS if Path(path).is_dir() else path)
    except FindingsError as error:
        return (), f"--loads {error.findings[0].problem}"
    if record.num_experts != num_experts:
        return (), f"--loads {path} has no {num_experts} loads, one an expert: it has {record.num_experts}"
    return tuple(map(sum, zip(*(row for rows in record.counts for row in rows), strict=True))), ""


def skew_problem(skew: float, ep: int) -> str:
    """What is wrong with a skew: the busiest rank has at least the mean, and at most what all have together."""
    return "" if 1 <= skew <= ep else f"--skew {skew:g} is not between 1 and EP {ep}"
