"""`threefold overlap-ab`: no overlap, overlap, and delayed weight gradients too, measured on this machine's ranks."""

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from math import isfinite
from typing import Any

from threefold.api.plans import for_our_engine
from threefold.cli.command_line.inputs import add_plan_arguments, duration, plan_from, print_findings, whole_number
from threefold.compare.contract import label_of
from threefold.findings import Finding, in_order
from threefold.plan.plan import Plan
from threefold.rules.all import check, errors, promoted
from threefold.units import format_many

# Relative. Sums in another order differ by the rounding of the weights' dtype, over the steps of the run.
TOLERANCE = {"fp32": 1e-5, "bf16": 1e-2, "fp16": 1e-2}
LIGHT = 0.1  # of a step: the gain of overlap cannot be more than the exchanges' share
SHOWN = 6


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_plan_arguments(parser)
    parser.add_argument(
        "--warmup", type=whole_number(0), default=2, metavar="N", help="steps before the steady window (2)"
    )
    parser.add_argument("--steps", type=whole_number(1), default=5, metavar="N", help="steps of the steady window (5)")
    parser.add_argument("--limit", type=duration, default=600.0, metavar="TIME", help="what the ranks may take (10m)")


def run(args: argparse.Namespace) -> int:
    parsed, findings = plan_from(args)
    # A warning elsewhere: here the two must be told apart.
    findings = [replace(f, severity="error") if f.rule == "overlap-switch-couples" else f for f in findings]
    if parsed.plan is None or errors(findings):
        return print_findings(in_order(findings), args.json)
    plan = for_our_engine(parsed.plan)
    trial = replace(plan, knobs=replace(plan.knobs, ep_overlap=True, delay_wgrad=True, shared_expert_overlap=False))
    found = promoted(check(trial, "threefold", notes=False))
    blocking = [*errors(found), *_elsewhere(trial)]
    if blocking:
        return print_findings(in_order(blocking), args.json)
    useless = [finding for finding in found if finding.rule == "ep-overlap-needs-microbatches"]
    from threefold.engine.dist.join import check_ranks_start_here
    from threefold.engine.verify.forked_ranks import RankError, run_ranks
    from threefold.engine.verify.overlap_ab import loss_difference, run_variants, summarize

    print(
        f"{format_many(plan.layout.gpus, 'rank')}, {args.warmup} + {args.steps} steps of each variant", file=sys.stderr
    )
    try:
        check_ranks_start_here(plan, "choose fewer ranks: cluster.gpus")
        ranks = run_ranks(plan.layout.gpus, run_variants, plan, args.warmup, args.steps, limit=args.limit)
    except RankError as error:
        print(error, file=sys.stderr)
        return 1
    difference, rows = loss_difference(ranks), summarize(ranks)
    same = difference <= TOLERANCE.get(plan.knobs.precision, 1e-2)
    told = [*(finding.problem for finding in useless), *doubts(rows, args.steps)]
    if args.json:
        facts = [_facts(row, rows[0]) for row in rows]
        number = difference if isfinite(difference) else None
        answer = {"label": label_of(plan), "rows": facts, "loss_difference": number, "same": same, "warnings": told}
        print(json.dumps(answer))
    else:
        _print(rows, difference, same)
        print(f"{label_of(plan)}; the variants differ in knobs.ep_overlap and knobs.delay_wgrad alone")
        for doubt in told:
            print(f"warning: {doubt}")
    return 0 if same else 1


def doubts(rows: Sequence[Any], num_steps: int) -> list[str]:
    """Why the gain of the variants behind the first may mean nothing."""
    first, *others = rows
    told = []
    light = first.exchange_seconds / first.seconds
    if light < LIGHT:
        told.append(f"communication-light: exchanges are {light:.1%} of a step, so that a gain is noise")
    gain = first.seconds - min(row.seconds for row in others)
    if num_steps < 2:
        told.append("one step has no spread to compare a gain with")
    elif 0 < gain < 2 * max(row.spread for row in rows):
        told.append("the gain is within the spread of the steps")
    elif gain <= 0:
        told.append("no gain: overlap costs here what it hides, or more")
    return told


def _elsewhere(plan: Plan) -> list[Finding]:
    if plan.cluster.chip == "cpu":
        return []
    problem = f"the ranks run on this machine's CPU, the plan is for {plan.chip.name}"
    return [Finding("cluster.chip", problem, fix={"cluster.chip": "cpu"}, rule="overlap-ab-runs-here")]


def _speed_up(row: Any, first: Any) -> float:
    """How many times faster than the first variant: above 1 is faster, as published tables of overlap have it."""
    return float(first.seconds / row.seconds)


def _facts(row: Any, first: Any) -> dict[str, Any]:
    exposed = [{"layer": layer, "phase": phase, "seconds": s} for (layer, phase), s in row.exposed.items()]
    return {
        "variant": row.variant,
        "step_seconds": row.seconds,
        "speed_up": _speed_up(row, first),
        "spread_seconds": row.spread,
        "exchange_seconds": row.exchange_seconds,
        "hidden": row.hidden,
        "exposed": exposed,
    }


def _print(rows: list[Any], difference: float, same: bool) -> None:
    first = rows[0]
    print(f"{'variant':<26}{'steady mean':>14}{'speed-up':>10}{'exchange':>12}{'hidden':>9}")
    for row in rows:
        step, exchange = f"{row.seconds * 1e3:.1f} ms", f"{row.exchange_seconds * 1e3:.1f} ms"
        speed_up = f"{_speed_up(row, first):.3f}x"
        print(f"{row.variant:<26}{step:>14}{speed_up:>10}{exchange:>12}{row.hidden:>9.1%}")
    print(f"speed-up: step time of '{first.variant}' over that of the variant, so that above 1 is faster")
    print(f"losses differ by {difference:.1e}" + ("" if same else ": NOT the same training"))
    for row in rows[1:]:
        rest = [(key, took) for key, took in row.exposed.items() if took > 0][:SHOWN]
        if rest:
            print(f"exposed, {row.variant}:")
        for (layer, phase), took in rest:
            print(f"  {'layer ' + layer if layer else 'elsewhere':<16}{phase:<20}{took * 1e3:>8.2f} ms")
