"""Drawn plans judged by our rules and by Megatron, in a ledger that a next call goes on with.

    MEGATRON_HOME=.venv-megatron PYTHONPATH=tests/support python tests/megatron/judge_seeds.py LEDGER FIRST COUNT

A line of the ledger is a plan: its seed, model, drawn fields, the rules that refuse it, Megatron's verdict, and what
Megatron says of the plan as `check --fix` leaves it. At the end it prints the cells of both verdicts. Where a pipeline
has one stage the last rank is judged alone: the first one builds the same layers.
"""

import argparse
import json
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

from megatron_draws import draw_plan, shown
from megatron_judges import RELEASES, disagreements, findings, refusals, verdict
from repository import ROOT

from threefold.interop.megatron.export_plan import BRIDGE
from threefold.plan.plan import Plan
from threefold.plan.table import FIELDS
from threefold.rules.fixes import repair

OF_MEMORY = {"states-fit-memory", "peak-fits-memory"}  # which Megatron's validation does not look at


def judge_seed(seed: int, release: str, folder: Path, asks_of_refused: bool) -> dict[str, Any]:
    drawn, changes = draw_plan(seed)
    plan, blocking, _ = findings(drawn, release)
    line = {"seed": seed, "model": plan.model_name, "plan": shown(plan.model_name, changes), "fields": [*changes]}
    line["rules"] = sorted({finding.rule for finding in blocking})
    if not blocking:
        return line | {"wrong": disagreements(plan, release, folder / "drawn", ranks=ranks_of(plan))}
    said, found = list[str](), "not asked"
    if asks_of_refused and not OF_MEMORY.issuperset(line["rules"]):
        try:
            answer = verdict(plan, BRIDGE, release, folder / "drawn", ranks_of(plan))
            found, said = answer["verdict"], refusals(answer)
        except (ArithmeticError, LookupError, ValueError):  # an export is made of plans without errors
            found = "no export"
    repaired, _ = repair(plan)
    left = sorted({finding.rule for finding in findings(repaired, release)[1]})
    wrong = disagreements(repaired, release, folder / "repaired", ranks=ranks_of(repaired))
    return line | {"verdict": found, "said": said, "left": left, "wrong": wrong}


def ranks_of(plan: Plan) -> tuple[int, ...]:
    return (plan.cluster.gpus - 1,) if plan.layout.pp == 1 else ()


def print_cells(lines: list[dict[str, Any]]) -> None:
    accepted = [line for line in lines if not line["rules"]]
    refused = [line for line in lines if line["rules"]]
    repaired = [line for line in refused if not line["left"]]
    print(f"{len(lines)} plans: {len(accepted)} accepted here as drawn, {len(repaired)} after check --fix")
    print(f"refused here: {dict(Counter(line['verdict'] for line in refused))} by Megatron")
    harmless = [line for line in refused if line["verdict"] == "accepted"]
    rules = Counter(rule for line in harmless for rule in line["rules"])
    alone = Counter(line["rules"][0] for line in harmless if len(line["rules"]) == 1)
    page = (ROOT / "docs" / "reference" / "export.md").read_text(encoding="utf-8").partition("## Refused here")[2]
    for rule, count in rules.most_common():
        unsaid = "" if f"`{rule}`" in page else "; docs/reference/export.md does not say why"
        print(f"  refused here, accepted there: {rule} {count}, of these by it alone {alone[rule]}{unsaid}")
    drawn = Counter(name for line in lines for name in {line["model"], *line["fields"]})
    knobs = {path: drawn[path] for path in FIELDS if path.startswith("knobs.")}
    print(f"knobs: {min(knobs.values())} to {max(knobs.values())} times each; {knobs}")
    for line in lines:
        if line["wrong"]:
            print(f"accepted here and not there: seed {line['seed']} {'after --fix ' if line['rules'] else ''}")
            print(f"    {line['plan']}\n    {line['wrong']}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("ledger", type=Path)
    parser.add_argument("first", type=int)
    parser.add_argument("count", type=int)
    parser.add_argument("--release", default=RELEASES[-1], choices=RELEASES)
    parser.add_argument("--accepted", action="store_true", help="ask of plans that our rules accept alone: faster")
    args = parser.parse_args()
    known = args.ledger.read_text().splitlines() if args.ledger.exists() else []
    lines = {line["seed"]: line for line in map(json.loads, known)}
    with args.ledger.open("a") as ledger:
        for seed in range(args.first, args.first + args.count):
            if seed in lines:
                continue
            with tempfile.TemporaryDirectory() as scratch:
                lines[seed] = judge_seed(seed, args.release, Path(scratch), not args.accepted)
            ledger.write(json.dumps(lines[seed]) + "\n")
            ledger.flush()
    print_cells([line for seed, line in lines.items() if args.first <= seed < args.first + args.count])


if __name__ == "__main__":
    main()
