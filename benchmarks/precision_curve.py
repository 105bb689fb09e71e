"""Training below sixteen bits against bf16: the same small MoE, data and first weights. How far apart at the end?

    python benchmarks/precision_curve.py [--steps 300] [--starts 8] [--precisions fp8-blockwise mxfp8] [--json FILE]

"fp8-blockwise+output" is that precision with the output layer in it too (`knobs.fp8_output`).

Each runs from several starts (first weights and order of data), compared one by one. "moved" is the base once more, its
first weights moved by half of bf16's last bit: how far two runs come apart by themselves, which is 0.4 % from one start
and no less than what is looked for. Runs that are in the file already are kept.

On a Hopper GPU FP8 runs on its own kernels; elsewhere, and in formats that the device lacks, products are emulated. On
a CPU the base is fp32, because few CPUs multiply in bf16.
"""

import argparse
import json
import statistics
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from threefold.engine.build import build
from threefold.engine.optim.lr_schedule import learning_rate
from threefold.engine.precision.recipes import RECIPES
from threefold.engine.step import to_device, train_step
from threefold.plan.parse import parse
from threefold.plan.plan import Plan
from threefold.spec.model import GqaSpec

MOVED, OUTPUT = "moved", "+output"
SMOOTHED = 0.1  # of the steps: what the last loss is a mean over
FOLLOW = ("fp8-blockwise", "fp8-rowwise", "fp8-blockwise+output")
LIMIT = 0.005  # how far these may be from the base, of the loss


def plan_of(precision: str, steps: int, seed: int, gpu: bool) -> Plan:
    """1.1 million parameters on a CPU, 3.8 on a GPU; all widths are whole blocks of 128."""
    fields = {
        "model": "tiny-qwen3-moe",
        "target": "threefold",
        "cluster.chip": "h200" if gpu else "cpu",
        "job.seq_len": 256 if gpu else 128,
        "job.global_batch": 16 if gpu else 4,
        "job.micro_batch": 16 if gpu else 4,
        "job.steps": steps,
        "job.seed": seed,
        "job.lr": 5e-4,  # with more, two runs from the same start come apart by themselves
        "job.packing": True,
        "knobs.precision": precision.removesuffix(OUTPUT),
        "knobs.fp8_output": precision.endswith(OUTPUT),
    }
    plan = parse(fields).plan
    assert plan is not None
    assert plan.model.moe is not None
    dim = 256 if gpu else 128
    attention = GqaSpec(num_heads=4, num_kv_heads=2, head_dim=64, qk_norm=True)
    moe = replace(plan.model.moe, num_experts=8, top_k=2, expert_dim=dim)
    return replace(plan, model=replace(plan.model, num_layers=2, dim=dim, attention=attention, moe=moe))


def curve(plan: Plan, moved: bool) -> list[float]:
    parts = build(plan, dtype=torch.float32 if plan.cluster.chip == "cpu" else None)
    assert parts.loader is not None
    if moved:
        with torch.no_grad():
            for parameter in parts.model.parameters():
                parameter.mul_(1 + 2**-9 * torch.randn_like(parameter))
        parts.optimizer.refresh()
    losses = []
    try:
        for step in range(plan.job.steps):
            batches = [to_device(parts.loader.batch(step, m), parts.device) for m in range(plan.num_microbatches)]
            losses.append(train_step(parts, batches, learning_rate(plan.job, step), plan.job).loss)
    finally:
        parts.close()
    return losses


def smoothed(losses: list[float]) -> float:
    return statistics.mean(losses[-max(1, round(SMOOTHED * len(losses))) :])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--precisions", nargs="+", default=[MOVED, *RECIPES])
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--starts", type=int, default=8)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    gpu = torch.cuda.is_available()
    base = "bf16" if gpu else "fp32"
    found = json.loads(args.json.read_text())["runs"] if args.json and args.json.exists() else {}
    print(f"{'precision':20} {'final loss':>10} {'to ' + base:>9} {'error':>8} {'seconds':>8}")
    for precision in (base, *args.precisions):
        if precision not in found:
            began = time.perf_counter()
            name = base if precision == MOVED else precision
            plans = [plan_of(name, args.steps, seed, gpu) for seed in range(args.starts)]
            losses = [curve(plan, moved=precision == MOVED) for plan in plans]
            found[precision] = {"seconds": time.perf_counter() - began, "losses": losses}
            compare(found[precision], found[base])
        run = found[precision]
        print(
            f"{precision:20} {run['final']:10.4f} {run['to_base']:+9.3%} {run['error']:8.3%} {run['seconds']:8.1f}",
            flush=True,
        )
        if args.json:
            where = torch.cuda.get_device_name() if gpu else "cpu"
            args.json.write_text(json.dumps({"device": where, "torch": torch.__version__, "runs": found}))
    far = [name for name, run in found.items() if name in FOLLOW and abs(run["to_base"]) > LIMIT]
    if far:
        raise SystemExit(f"further than {LIMIT:.1%} from {base}: {', '.join(far)}")


def compare(run: dict[str, Any], base: dict[str, Any]) -> None:
    """Start by start, as many as both have; the mean, and its standard error."""
    ends = [smoothed(losses) for losses in run["losses"]]
    gaps = [end / smoothed(losses) - 1 for end, losses in zip(ends, base["losses"], strict=False)]
    error = statistics.stdev(gaps) / len(gaps) ** 0.5 if len(gaps) > 1 else 0.0
    run |= {"final": statistics.mean(ends), "to_base": statistics.mean(gaps), "error": error}


if __name__ == "__main__":
    main()
