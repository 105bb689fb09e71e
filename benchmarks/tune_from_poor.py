"""How near `threefold tune` comes to the best plan known for a shape, from a deliberately poor plan.

python benchmarks/tune_from_poor.py [--budget 8m] [--out DIR] [--json FILE]        on one H200
python benchmarks/tune_from_poor.py --device cpu                                    the demo shape on two cores

The poor plan recomputes whole layers, takes one sequence a microbatch, and uses no fused kernel and no graph. The
tuning is one command with its default settings. Afterwards its winner and the best plan known run in turns in the same
processes; the ratio of their throughputs is what is printed.
"""

import argparse
import json
import platform
import statistics
import subprocess
import sys
import time
from datetime import date
from pathlib import Path
from typing import Any

from threefold.launch.plan_session import PlanSession
from threefold.plan.file import dump_plan, read_plan
from threefold.plan.parse import change, parse
from threefold.plan.plan import Plan

H200_SHAPE = {
    "model": "qwen3-30b-a3b",
    "model.num_layers": 8,
    "cluster.chip": "h200",
    "cluster.gpus": 1,
    "job.seq_len": 4096,
    "job.global_batch": 4,
    "job.steps": 1000,
    "run.tensorboard": False,
}
CPU_SHAPE = {
    "model": "demo-qwen3-moe",
    "cluster.chip": "cpu",
    "job.seq_len": 256,
    "job.global_batch": 4,
    "job.steps": 1000,
    "knobs.precision": "fp32",
    "run.tensorboard": False,
}
POOR = {
    "job.micro_batch": 1,
    "knobs.recompute": ["full"],
    "knobs.expert_fusion": False,
    "knobs.loss_fusion": False,
    "knobs.permute_fusion": False,
    "knobs.grad_accum_fusion": False,
}
# The fastest plan with fp32 masters in docs/log/step-speed.md, replayed as one graph, which gains 1 to 3 %.
BEST = {"job.micro_batch": 4, "knobs.expert_fusion": True, "knobs.graphs": ["full_iteration"]}
BEST_ON_CPU = {"job.micro_batch": 4}
TURNS = 5


def plan_of(fields: dict[str, Any]) -> Plan:
    parsed = parse(fields)
    assert parsed.plan is not None, parsed.findings
    return parsed.plan


def run_tuning(poor: Plan, folder: Path, budget: str) -> dict[str, Any]:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "poor.toml").write_text(dump_plan(poor), encoding="utf-8")
    words = [
        sys.executable,
        "-m",
        "threefold",
        "tune",
        str(folder / "poor.toml"),
        "--budget",
        budget,
        "--precision",
        "--json",
    ]
    done = subprocess.run([*words, "--out", str(folder / "tuning")], stdout=subprocess.PIPE, text=True, check=True)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def in_turns(plans: dict[str, Plan], folder: Path) -> dict[str, float]:
    """The median step of each plan, measured in turns."""
    times: dict[str, list[float]] = {name: [] for name in plans}
    with PlanSession(folder / "turns", 1, {}) as session:
        for _ in range(TURNS):
            for name, plan in plans.items():
                window = {"warmup": 3, "steps": 10, "seconds": 6.0, "trace": None}
                found = session.measure(dict(plan.written), window, 300.0)
                if "error" in found:
                    raise SystemExit(f"{name}: {found['error']}")
                times[name].append(statistics.median(found["steps"]))
    return {name: statistics.median(some) for name, some in times.items()}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--budget", default="8m")
    parser.add_argument("--out", type=Path, default=Path("runs/tune-from-poor"))
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    shape, best_fields = (H200_SHAPE, BEST) if args.device == "cuda" else (CPU_SHAPE, BEST_ON_CPU)
    poor, best = plan_of({**shape, **POOR}), plan_of({**shape, **best_fields})
    began = time.monotonic()
    found = run_tuning(poor, args.out, args.budget)
    taken = time.monotonic() - began
    winner = change(poor, found["winner"]["set"]) if found["winner"] else poor
    if found["winner"]:
        assert read_plan(found["winner"]["file"]).plan == winner
    steps = in_turns({"poor": poor, "winner": winner, "best known": best}, args.out)
    reached = steps["best known"] / steps["winner"]
    for name, seconds in steps.items():
        print(f"{name:12} {1e3 * seconds:8.1f} ms a step")
    print(f"winner: {found['winner']['set'] if found['winner'] else 'none'}")
    print(f"tuning: {taken:.0f} s, {found['speedup']:.2f} times as fast as the poor plan {found['interval']}")
    print(f"ratio of the winner's throughput to that of the best plan known: {reached:.3f}")
    if args.json:
        record = {
            "date": str(date.today()),
            "machine": platform.platform(),
            "tuning_seconds": taken,
            "step_seconds": steps,
            "reached": reached,
            "tuned": {key: value for key, value in found.items() if key not in ("trials", "contract")},
        }
        args.json.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
