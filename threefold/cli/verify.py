"""`threefold verify`: does this layout compute what one rank computes? In fp64, on this machine's CPU."""

import argparse
import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from threefold.api.plans import for_our_engine
from threefold.cli.command_line.inputs import add_plan_arguments, duration, print_findings, the_plan
from threefold.findings import Finding, in_order
from threefold.plan.parse import change
from threefold.plan.plan import Plan
from threefold.plan.scale import MAX_RANKS, scale_down
from threefold.report.layout import grids_text
from threefold.rules.all import blockers, check, errors, promoted
from threefold.units import format_many

WORDS = (
    "loss of steps and of an evaluation",
    "gradient norm",
    "gradient, parameter by parameter",
    "weights after three steps",
    "optimizer states",
    "router bias",
)
# Whether it fits a GPU is not asked here, and what a CPU has not is replaced.
ELSEWHERE = ("states-fit-memory", "engine-has-knob", "engine-has-graphs")
if TYPE_CHECKING:
    from threefold.engine.verify.compare import Comparison

TOLERANCE = 1e-10  # fp64 sums in another order differ by about 1e-15


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_plan_arguments(parser)
    parser.add_argument(
        "--scale-down", action="store_true", help=f"shrink the model, and the layout to at most {MAX_RANKS} ranks"
    )
    parser.add_argument("--limit", type=duration, default=600.0, metavar="TIME", help="what the ranks may take (10m)")


def run(args: argparse.Namespace) -> int:
    plan = for_our_engine(the_plan(args))  # as given: its shrunk version may be legal where it is not
    refused = [finding for finding in blockers(promoted(check(plan, notes=False))) if finding.rule not in ELSEWHERE]
    if refused:
        return print_findings(in_order(refused), args.json)
    replaced: list[str] = []
    if plan.knobs.graphs:
        plan = change(plan, {"knobs.graphs": []})
        replaced.append("graphs by eager kernels")
    if args.scale_down:
        plan, more = scale_down(plan)
        replaced += more
    if plan.job.routing == "forced-balance":  # experts by how tokens lie on ranks, which is not how they lie on one
        plan = replace(plan, job=replace(plan.job, routing="learned"))
        replaced.append("forced balance by learned routing")
    blocking = [*errors(check(plan, notes=False)), *_too_large(plan)]
    if blocking:
        return print_findings(in_order(blocking), args.json)
    from threefold.engine.verify.forked_ranks import RankError
    from threefold.engine.verify.oracle import compare_with_one_rank

    if not args.json:
        print(grids_text(plan))
        for what in replaced:
            print(f"replaced {what}")
        print("running it on one rank, then on all", file=sys.stderr)
    try:
        found = compare_with_one_rank(plan, limit=args.limit)
    except RankError as error:
        problem = f"the ranks did not finish: {str(error).splitlines()[0]}"
        print(error, file=sys.stderr)
        found_it = Finding("layout", problem, advice="report it with the plan", rule="layout-computes-the-same")
        return print_findings([found_it], args.json)
    same = found.largest <= TOLERANCE
    names = ("loss", "norm", "gradient", "weight", "state", "bias")
    values = {name: getattr(found, name) for name in names}
    if args.json:
        facts: dict[str, Any] = {"ranks": plan.layout.gpus, "replaced": replaced, "same": same, "differences": values}
        facts |= {"worst_gradient": found.worst, "near_ties": found.near_ties, "problems": list(found.problems)}
        facts |= {"vanishing": list(found.vanishing), "idle": list(found.idle), "tolerance": TOLERANCE}
        print(json.dumps(facts))
    else:
        for name, words in zip(names, WORDS, strict=True):
            print(f"{words:<35} differs by {values[name]:.1e}" + (f" in {found.worst}" if name == "gradient" else ""))
        for line in (*_how_compared(found), *found.problems):
            print(line)
        print("the same as one rank" if same else f"NOT the same as one rank: more than {TOLERANCE:.0e}")
    return 0 if same else 1


def _how_compared(found: "Comparison") -> Iterator[str]:
    """What the numbers above are relative to, and what was not compared."""
    yield "each difference is relative to the largest element of the tensor on one rank, in fp64"
    if found.vanishing:
        names = ", ".join(found.vanishing[:3]) + (", ..." if len(found.vanishing) > 3 else "")
        count = format_many(len(found.vanishing), "gradient")
        yield f"{count} zero up to rounding, compared with the largest gradient, weights left out: {names}"
    if found.idle:
        yield f"{format_many(len(found.idle), 'tensor')} zero on one rank, of which agreement says little"
    if found.near_ties:
        yield f"{format_many(found.near_ties, 'choice')} of experts or capacity nearly tied: rounding may turn them"


def _too_large(plan: Plan) -> list[Finding]:
    if plan.layout.gpus <= MAX_RANKS and plan.model.dim <= 4096:
        return []
    problem = f"{format_many(plan.layout.gpus, 'rank')} of {plan.model.name} do not run here"
    return [Finding("cluster.gpus", problem, advice="add --scale-down", rule="verify-fits-here")]
