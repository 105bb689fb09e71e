"""Do fixes lead somewhere? Random plans are checked, each fix is applied alone, and `repair` is run to the end.

    python benchmarks/fixes.py --plans 2000 --seed 1

A fix must bring no error and no warning that the plan had not, and say why each further field moves along. At the end a
plan has no error, or its errors say what is missing. Half of the plans are recipes with a few fields changed, half are
random fields of random models. The peer is a repair that applies each rule's first way untried, as validators advise:
how many of those bring a new finding.
"""

import argparse
import json
import random
import re
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

from threefold.findings import Finding, FindingsError
from threefold.plan.file import read_plan
from threefold.plan.parse import change, parse
from threefold.plan.plan import Plan
from threefold.plan.table import FIELDS
from threefold.rules.all import check, errors, judge, repair
from threefold.rules.fixes import ADVISED
from threefold.spec.models import MODELS

RECIPES = sorted((Path(__file__).parent.parent / "recipes").glob("*.toml"))
NUMBERS: dict[str, tuple[Any, ...]] = {
    "job.seq_len": (512, 2048, 4096, 8192, 16384, 28672, 32768, 65536, 100_000, 114_688, 131_072, 262_144, 1_048_576),
    "job.global_batch": (1, 7, 16, 64, 100, 128, 256, 512, 1024, 2048, 4096),
    "job.micro_batch": (1, 2, 3, 4, 8),
    "job.capacity_factor": (1.0, 1.25, 2.0),
    "job.mtp": (0, 1, 2, 3),
    "job.images": (0.0, 1.0, 4.0),
    "cluster.gpus": (1, 8, 16, 48, 64, 72, 96, 100, 128, 256, 512, 1000, 1024, 2048),
    "layout.tp": (1, 2, 3, 4, 8, 16),
    "layout.cp": (1, 2, 4, 5, 8, 16, 32, 64),
    "layout.pp": (1, 2, 3, 4, 6, 8, 16),
    "layout.vpp": (1, 2, 3, 4, 8),
    "layout.ep": (1, 2, 4, 7, 8, 16, 32, 64, 128),
    "layout.etp": (1, 2, 4, 8),
    "layout.replicate": (1, 2, 4),
    "layout.stages": ("Et|(tt|)*30mL", "Et*4|(t*4|)*14tmL", "Et*45|t*49L"),
    "knobs.cp_inner": (2, 4, 8),
    "knobs.dispatch_sms": (8, 24, 32),
    "knobs.max_connections": (1, 8, 32),
    "knobs.optimizer_offload": (0.5, 1.0),
    "knobs.recompute_layers": (1, 2),
    "knobs.activation_offload_layers": (1, 4),
    "stack.te": ("2.5", "2.6", "2.11", "2.12"),
    "stack.torch": ("2.4", "2.7", "2.11"),
    "stack.release": ("25.09", "26.06"),
}
CHIPS = ("a100", "h100", "h100", "h200", "b200", "b300", "gb200", "gb300")
LEFT_OUT = ("model.", "run.", "cluster.domain", "cluster.gpus_per_node", "job.lr", "job.adam", "job.data")


def value(path: str, draw: random.Random) -> Any:
    """A value of a field, legal on its own."""
    field = FIELDS[path]
    if path in NUMBERS:
        return draw.choice(NUMBERS[path])
    if path == "cluster.chip":
        return draw.choice(CHIPS)
    if list in field.types and field.choices and path != "knobs.cp_comm":
        return draw.sample(field.choices, draw.randint(1, min(3, len(field.choices))))
    if field.choices:
        return draw.choice(field.choices)
    return draw.random() < 0.5 if bool in field.types else None


def draw_plan(draw: random.Random) -> Plan | None:
    paths = [
        path
        for path, field in FIELDS.items()
        if path != "model"
        and not path.startswith(LEFT_OUT)
        and (path in NUMBERS or field.choices or bool in field.types)
    ]
    if draw.random() < 0.5:
        given = read_plan(str(draw.choice(RECIPES))).fields
        changed = draw.sample(paths, draw.randint(1, 5))
    else:
        given = {"model": draw.choice(sorted(MODELS)), "cluster.chip": draw.choice(CHIPS), "cluster.gpus": 64}
        given["target"] = draw.choice(("threefold", "megatron-bridge"))
        changed = draw.sample(paths, draw.randint(3, 14))
    fields = {**given, **{path: value(path, draw) for path in changed}}
    return parse({path: v for path, v in fields.items() if v is not None}).plan


def new_findings(plan: Plan, fix: dict[str, Any], known: set[tuple[str, str]]) -> list[Finding] | None:
    """What `check` says of a plan after a fix that it did not say before; None where the fix cannot be applied."""
    try:
        other = change(plan, fix)
    except FindingsError:
        return None
    if all((finding.rule, finding.at) in known for finding in judge(other)):
        return []
    return [finding for finding in check(other, notes=False) if (finding.rule, finding.at) not in known]


def first_way(finding: Finding) -> dict[str, Any] | None:
    return dict(finding.fix) if finding.fix else next((dict(way) for way in finding.fixes), None)


def moved_silently(finding: Finding) -> list[str]:
    """Fields that a fix changes although its finding neither is about them nor says why they move. One field is the
    finding's own way, and the advice of the catalogue is about all that it names."""
    said = f"{finding.at} {finding.problem} {finding.advice}"
    words = set(re.findall(r"[a-z_0-9]+", said.lower().replace("microbatch", "micro_batch")))
    fields = dict(finding.fix or {}) if finding.rule not in ADVISED else {}
    silent = [path for path in fields if path not in said and path.rpartition(".")[2] not in words]
    return silent if len(silent) > (finding.at not in fields) else []


def study(plans: list[Plan], verbose: bool) -> dict[str, Any]:
    count: Counter[str] = Counter()
    ends: Counter[str] = Counter()
    slowest = 0.0
    for plan in plans:
        known = {(finding.rule, finding.at) for finding in judge(plan)}
        for finding in judge(plan):
            way = first_way(finding)
            if way:
                count["peer fixes"] += 1
                count["peer fixes that bring a finding"] += bool(new_findings(plan, way, known) != [])
        began = time.perf_counter()
        found = check(plan)
        slowest = max(slowest, time.perf_counter() - began)
        for finding in found:
            if finding.fix:
                count["fixes"] += 1
                new = new_findings(plan, dict(finding.fix), known)
                if moved := moved_silently(finding):
                    count["fixes that move a field without a word"] += 1
                    print(f"SILENT {moved} of {finding}", file=sys.stderr)
                if new is None or new:
                    count["fixes that bring a finding"] += 1
                    print(f"WRONG {finding}\n  brings {new}", file=sys.stderr)
            elif not finding.advice:
                count["findings without fix or advice"] += 1
                ends[f"silent {finding.rule}"] += 1
        if not errors(found):
            continue
        count["plans with errors"] += 1
        repaired, _ = repair(plan)
        left = errors(check(repaired))
        end = "clean" if not left else "said" if all(one.advice for one in left) else "stuck"
        count[end] += 1
        ends.update(f"{end} {one.rule}" for one in left)
        if verbose and left:
            print(f"{end}: {[str(one) for one in left]}", file=sys.stderr)
    return {
        "plans": len(plans),
        **count,
        "slowest_check_seconds": round(slowest, 3),
        "left": dict(ends.most_common(20)),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--plans", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--verbose", action="store_true")
    args = parser.parse_args()
    draw = random.Random(args.seed)
    plans = []
    while len(plans) < args.plans:
        plan = draw_plan(draw)
        if plan is not None:
            plans.append(plan)
    began = time.perf_counter()
    for plan in plans[:1000]:
        judge(plan)
    judged = time.perf_counter() - began
    found = study(plans, args.verbose)
    found["judge_1000_seconds"] = round(judged * 1000 / min(1000, len(plans)), 2)
    ratio = (found.get("peer fixes that bring a finding", 0) / found["peer fixes"]) / max(
        1e-9, found.get("fixes that bring a finding", 0) / found["fixes"]
    )
    found["ratio"] = "no fix here brings a finding" if ratio > 1e6 else round(ratio, 1)
    print(json.dumps(found, indent=2))


if __name__ == "__main__":
    main()
