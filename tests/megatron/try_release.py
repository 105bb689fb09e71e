"""Which plans a release of Megatron that we do not know judges otherwise than the newest that we support, and where.

Plans are exported in the names of the newest. `make try-megatron BRIDGE=... CORE=...` gets the wheels and runs it.
"""

import argparse
import tempfile
from collections import defaultdict
from pathlib import Path

from megatron_draws import draw_plan
from megatron_exports import recipe_plans
from megatron_judges import RELEASES, Judge, refusals, write_export

from threefold.interop.megatron.export_plan import BRIDGE
from threefold.plan.parse import change
from threefold.rules.all import check, errors


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("release")
    parser.add_argument("--plans", type=int, default=200)
    args = parser.parse_args()
    plans = recipe_plans() | {f"seed {seed}": draw_plan(seed)[0] for seed in range(args.plans)}
    moved: dict[str, list[str]] = defaultdict(list)
    judges: list[Judge] = []
    with tempfile.TemporaryDirectory() as scratch:
        for name, drawn in plans.items():
            plan, folder = change(drawn, {"target": BRIDGE}), Path(scratch) / name
            job = write_export(plan, BRIDGE, RELEASES[-1], folder)
            judges = judges or [Judge(release, folder) for release in (RELEASES[-1], args.release)]
            old, new = (judge.judge(job, folder) for judge in judges)
            rules = sorted({finding.rule for finding in errors(check(plan, notes=False))})
            if old["verdict"] != new["verdict"]:
                reason = (refusals(old) + refusals(new))[0]
                moved[f"{old['verdict']} -> {new['verdict']}: {reason}"].append(
                    f"{name} {rules or 'accepted by check'}"
                )
            elif old["differs"] != new["differs"]:
                moved[f"values: {old['differs']} -> {new['differs']}"].append(name)
    for what, names in sorted(moved.items(), key=lambda item: -len(item[1])):
        print(f"{len(names)} of {len(plans)} plans, such as {names[0]}\n    {what}")
    print(f"{sum(map(len, moved.values()))} of {len(plans)} plans are judged otherwise than by {RELEASES[-1]}")


if __name__ == "__main__":
    main()
