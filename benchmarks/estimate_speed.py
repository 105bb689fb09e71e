"""How long one estimate takes: every usable row of the published runs as a plan, cold and warm.

python benchmarks/estimate_speed.py [--runs data/published_runs.json] [--repeat 5] [--json FILE]

Cold is the first estimate of a plan; warm finds the layers of the plan in the cache, as a search does.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path

from threefold.cost.estimate import estimate
from threefold.cost.memory.by_stack import memory
from threefold.cost.rates import calibration
from threefold.cost.time.step import step_time
from threefold.cost.traffic.by_stack import traffic
from threefold.interop.published import is_usable, load_rows, plan_from_row
from threefold.plan.plan import Plan

ROOT = Path(__file__).parent.parent
BOUND_MS = 5.0  # of one estimate, on two cores


def milliseconds(work: Callable[[Plan], object], plan: Plan) -> float:
    start = time.perf_counter()
    work(plan)
    return 1e3 * (time.perf_counter() - start)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=Path, default=ROOT / "data" / "published_runs.json")
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    parsed = [plan_from_row(row).plan for row in load_rows(args.runs) if is_usable(row)]
    plans = [plan for plan in parsed if plan]
    if not plans:
        parser.exit(1, f"{args.runs} has no usable row\n")
    rates = {stack: calibration(stack).rates for stack in {plan.target for plan in plans}}
    cold = [milliseconds(estimate, plan) for plan in plans]
    parts: dict[str, Callable[[Plan], object]] = {
        "estimate": estimate,
        "memory alone": memory,
        "time alone": lambda plan: step_time(plan, rates[plan.target]),
        "traffic alone": traffic,
    }
    took = {"estimate, cold": cold}
    for name, work in parts.items():
        took[name] = [milliseconds(work, plan) for _ in range(args.repeat) for plan in plans]
    print(f"{len(plans)} plans, {args.repeat} times; the bound is {BOUND_MS:.0f} ms")
    print(f"{'':16} {'mean ms':>8} {'median':>8} {'p90':>8} {'worst':>8}")
    summary = {}
    for name, values in took.items():
        ninth = statistics.quantiles(values, n=10)[-1] if len(values) > 1 else values[0]
        row = {
            "mean": statistics.mean(values),
            "median": statistics.median(values),
            "p90": ninth,
            "worst": max(values),
        }
        summary[name] = row
        print(f"{name:16} " + " ".join(f"{value:8.2f}" for value in row.values()))
    if args.json:
        args.json.write_text(json.dumps({"plans": len(plans), "bound_ms": BOUND_MS, "milliseconds": summary}, indent=2))


if __name__ == "__main__":
    main()
