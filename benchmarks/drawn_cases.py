"""Cases drawn at random, in a background script that can be stopped and resumed, run by hand.

    python benchmarks/drawn_cases.py sft --ledger sft.jsonl [--count 300] [--seed 0]
    python benchmarks/drawn_cases.py export --ledger export.jsonl --count 200
    python benchmarks/drawn_cases.py hostile --ledger hostile.jsonl --count 500
    python benchmarks/drawn_cases.py shipped --ledger shipped.jsonl --count 1512
    python benchmarks/drawn_cases.py advice --ledger advice.jsonl --count 200

`sft` trains drawn fine-tuning jobs in drawn layouts and compares each with one rank (`tests/support/drawn_sft.py`).
`export` trains drawn models, exports them and reads them in transformers (`tests/support/drawn_exports.py`). `hostile`
draws damaged and crafted files and runs the verbs that open them (`tests/support/hostile_runs.py`). `shipped` asks for
plans of every shipped model in random order (`tests/support/shipped_models.py`). `advice` compares the first pieces of
advice of all verbs about drawn plans (`tests/support/same_advice.py`). The ledger has a line for each case
that was run; a case in it is not run again. Prints each fault with all that it takes to repeat it, and a summary of the
whole ledger. A case is repeated alone by its number: `--first 17 --count 1`, with another ledger.
"""

import argparse
import json
import os
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"  # before torch loads: ranks share the cores
sys.path.insert(0, str(Path(__file__).parent.parent / "tests" / "support"))
from layout_ledger import read_ledger
from layout_runs import FAULTS, Outcome


@dataclass(frozen=True)
class Case:
    """What became of a case that was run."""

    kind: str
    features: list[str]  # what the summary counts
    fault: str = ""  # with all that it takes to repeat it
    refused: str = ""  # by which rules


# Each subject imports what it needs: transformers alone takes seconds.
def run_sft(seed: str, number: int, folder: Path) -> Case:
    from drawn_sft import run_sft

    return of_outcome(run_sft(f"{seed}/{number}", folder))


def run_export(seed: str, number: int, folder: Path) -> Case:
    from drawn_exports import run_export

    return of_outcome(run_export(f"{seed}/{number}", folder))


def of_outcome(outcome: Outcome) -> Case:
    fault = str(outcome) if outcome.kind in FAULTS else ""
    return Case(outcome.kind, features(outcome), fault, outcome.said if outcome.kind == "refused" else "")


def run_hostile(seed: str, number: int, folder: Path) -> Case:
    from hostile_runs import faults, kind_of

    found = faults(number, seed, folder, Path(sound_files().name))
    return Case("WRONG" if found else "held", [kind_of(number)], "\n".join(found))


@cache
def sound_files() -> tempfile.TemporaryDirectory[str]:
    """What hostile files are made of: one folder for all cases, which goes when the script ends."""
    from hostile_runs import make_sound

    folder = tempfile.TemporaryDirectory()
    make_sound(Path(folder.name))
    return folder


def run_shipped(seed: str, number: int, folder: Path) -> Case:
    from shipped_models import answer_to, requests

    fields = requests(seed)[number]
    kind, problem = answer_to(fields)
    return Case(kind, [f"{fields['target']} {kind}"], f"{problem}: {fields}" if problem else "")


def run_advice(seed: str, number: int, folder: Path) -> Case:
    from same_advice import drawn_plans, faults, rehearsed_faults, searched_faults

    from threefold.plan.file import dump_plan

    plan = drawn_plans(200 * (number // 200 + 1))[number]
    parts = {"all verbs": faults, "plan": searched_faults, "dry-run": rehearsed_faults}
    found = [fault for part in parts.values() for fault in part(plan, folder)]
    return Case("WRONG" if found else "equal", [plan.target], "\n".join([*found, *([dump_plan(plan)] * bool(found))]))


SUBJECTS: dict[str, Callable[[str, int, Path], Case]] = {
    "sft": run_sft,
    "export": run_export,
    "hostile": run_hostile,
    "shipped": run_shipped,
    "advice": run_advice,
}


def run_case(subject: str, seed: str, number: int, folder: Path) -> Case:
    try:
        return SUBJECTS[subject](seed, number, folder)
    except Exception:  # whatever it is, the cases after this one are still to be run
        return Case("CRASH", [], f"{subject} {seed}/{number}: {traceback.format_exc()}")


def features(outcome: Outcome) -> list[str]:
    """What the summary counts of a plan that was run."""
    plan = outcome.resolved.plan
    if plan is None:
        return []
    layout, knobs, job = plan.layout, plan.knobs, plan.job
    axes = ("tp", "cp", "pp", "vpp", "dp", "ep", "etp", "edp", "replicate")
    found = [axis for axis in axes if layout.degree(axis) > 1] + [plan.model.family, knobs.data_parallel]
    found += [f"schedule {layout.pipeline_schedule}"] if layout.pp > 1 else []
    sources = 1 if isinstance(job.data, str) else len(job.data)
    sets = 0 if job.val_data is None else 1 if isinstance(job.val_data, str) else len(job.val_data)
    found += [f"{sources} sources", f"{sets} validation sets" if plan.run.eval_every else "no evaluation"]
    named = {"lora": job.lora_rank, "mtp": plan.mtp, "packing": job.packing, "dynamic length": job.dynamic_length}
    named |= {"ep overlap": knobs.ep_overlap, "dynamic cp": knobs.cp_dynamic, "frozen": job.freeze}
    return found + [name for name, value in named.items() if value]


def summary(cases: list[dict[str, Any]]) -> str:
    kinds, seen = Counter(case["kind"] for case in cases), Counter(name for case in cases for name in case["features"])
    each = ", ".join(f"{name} {count}" for name, count in sorted(seen.items()))
    return f"{each}\n{len(cases)} cases in {sum(case['seconds'] for case in cases):.0f} s: {dict(kinds)}"


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("subject", choices=SUBJECTS)
    parser.add_argument("--ledger", type=Path, required=True)
    parser.add_argument("--count", type=int, default=300)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--seed", default="0")
    args = parser.parse_args()
    done = {case["draw"] for case in read_ledger(args.ledger)}
    for number in range(args.first, args.first + args.count):
        draw = f"{args.subject} {args.seed}/{number}"
        if draw in done:
            continue
        begin = time.monotonic()
        with tempfile.TemporaryDirectory() as folder:
            os.environ["XDG_CACHE_HOME"] = f"{folder}/cache"
            case = run_case(args.subject, args.seed, number, Path(folder))
        record = {"draw": draw, "seconds": round(time.monotonic() - begin, 2), **asdict(case)}
        with args.ledger.open("a", encoding="utf-8") as file:
            file.write("\n" * _is_cut_off(args.ledger) + json.dumps(record) + "\n")
        if case.fault:
            print(case.fault, flush=True)
    cases = read_ledger(args.ledger)
    print(summary(cases))
    return 1 if any(case["fault"] for case in cases) else 0


def _is_cut_off(path: Path) -> bool:
    """Whether the last line of a file was cut off by a kill."""
    text = path.read_bytes() if path.exists() else b""
    return bool(text) and not text.endswith(b"\n")


if __name__ == "__main__":
    sys.exit(main())
