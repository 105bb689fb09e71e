"""`threefold calibrate`: measure this machine, and let estimates use what was measured."""

import argparse
import tempfile
from pathlib import Path

from threefold.cli.command_line.inputs import duration, print_findings, say, the_plan
from threefold.cli.command_line.out import print_json
from threefold.findings import Finding, FindingsError
from threefold.machine.calibrate import Calibrated, calibrate, write_chip_file
from threefold.machine.inventory import Machine, this_machine
from threefold.plan.plan import Plan
from threefold.report.calibration import calibration_text
from threefold.rules.all import check, errors, promoted
from threefold.spec.chips import CHIPS
from threefold.units import format_many


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("plan", nargs="?", help="a plan to measure besides, and whose kernels are tuned")
    parser.add_argument("overrides", nargs="*", metavar="path=value", help="fields to override")
    parser.add_argument("--budget", type=duration, default=170.0, metavar="TIME", help="such as 90s or 8m (170s)")
    parser.add_argument(
        "--out", type=Path, metavar="FILE", help="write the chip file here (default: where it is found)"
    )
    parser.add_argument("--json", action="store_true", help="machine-readable output")
    parser.set_defaults(target=None)


def arguments(plan: str, as_json: bool) -> argparse.Namespace:
    """The arguments of `threefold calibrate PLAN`."""
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return parser.parse_args([plan, *(["--json"] if as_json else [])])


def run(args: argparse.Namespace) -> int:
    import threefold.engine.tune.trial_steps  # noqa: F401  a missing package is said before anything is measured

    plan = None
    here = this_machine(try_kernels=False)
    if args.plan is not None:
        plan = the_plan(args)
        if blocking := errors(promoted(check(plan, notes=False))):
            raise FindingsError(blocking)
    own = plan.cluster.own if plan is not None and here.gpus else None
    chip = own.plan_name if own else here.chip  # a GPU that we do not know, by the user's own description
    if chip is None or (own is None and chip not in CHIPS):
        name = here.gpus[0].name if here.gpus else "this machine"
        advice = f"the known ones are {', '.join(CHIPS)}; or give a plan with cluster.chip=file:PATH"
        raise FindingsError([Finding(rule="known-value", at="chip", problem=f"{name} is no known chip", advice=advice)])
    if plan is not None:
        _check_runs_here(plan, chip, here)
        _tune_kernels(plan, here)
    with tempfile.TemporaryDirectory() as folder:
        found = calibrate(chip, plan, Path(folder), args.budget, say, two_ranks=chip == "cpu")
    return _tell(args, found, here)


def _check_runs_here(plan: Plan, chip: str, here: Machine) -> None:
    """Raise where the plan is for another chip, or for more GPUs than there are."""
    if plan.cluster.chip != chip:
        problem = f"the plan runs on {plan.cluster.chip}, this machine has {chip}"
        raise FindingsError(
            [Finding(rule="known-value", at="cluster.chip", problem=problem, fix={"cluster.chip": chip})]
        )
    if here.gpus and plan.cluster.gpus > len(here.gpus):
        problem = f"{format_many(plan.cluster.gpus, 'rank')}; this machine has {format_many(len(here.gpus), 'GPU')}"
        advice = "calibrate without a plan, or with one that runs here"
        raise FindingsError([Finding(rule="ranks-start-here", at="cluster.gpus", problem=problem, advice=advice)])


def _tune_kernels(plan: Plan, here: Machine) -> None:
    """Choose the fastest kernels of the plan's experts and attention, as later runs will use them."""
    if not here.gpus:
        return
    from threefold.engine.tune.attention_kernels import tune_attention_of_plan
    from threefold.engine.tune.expert_kernels import tune_experts_of_plan
    from threefold.engine.tune.trial_steps import free_gpu_memory

    for shape, choice in tune_experts_of_plan(plan).items():
        say(f"experts {shape}: {choice}")
    for one in tune_attention_of_plan(plan, say):
        say(f"attention of dim {one.dim} at {one.length}: " + ", ".join(f"{n} {t} TFLOP/s" for n, t in one.ranked()))
    free_gpu_memory()


def _tell(args: argparse.Namespace, found: Calibrated, here: Machine) -> int:
    if not found.measured:
        problem = f"no step could be measured: {found.steps[0].trouble if found.steps else 'the time was over'}"
        finding = Finding(rule="steps-are-measured", at="calibrate", problem=problem, advice="give a larger --budget")
        return print_findings([finding], args.json)
    path = write_chip_file(found, here.versions, args.out)
    if args.json:
        print_json({**found.to_json(), "file": str(path)})
    else:
        print(calibration_text(found))
        print(f"\nwritten to {path}; estimates of our own engine on {found.chip} use it from now on")
    return 0
