"""How well a step of our engine is predicted on this machine, after `threefold calibrate`.

python benchmarks/predicted_steps.py [--json FILE] [--only NAME ...] [--shipped] [--save-runs FILE]

Plans that the calibration has not seen are run, and their steps compared with the estimate: shapes, microbatches,
recompute, FP8, graphs, 32K and 128K tokens on a GPU; sizes, families and layouts of two ranks on a CPU. `--shipped`
predicts with the rates that the package brings. `--save-runs` adds the measured steps to the calibration data of the
engine, `data/threefold_runs.json`.
"""

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Iterator
from datetime import date
from pathlib import Path
from typing import Any

from threefold.cost.estimate import estimate
from threefold.launch.plan_session import PlanSession
from threefold.machine.inventory import this_machine
from threefold.machine.own_chip_file import priced_here
from threefold.plan.parse import parse

Fields = dict[str, Any]
WINDOW, LIMIT_SECONDS = {"warmup": 4, "steps": 8, "seconds": 7.0}, 180.0
GPU = {"target": "threefold", "cluster.gpus": 1, "job.data": "synthetic", "knobs.expert_fusion": True}
Q = {"model": "qwen3-30b-a3b", "model.num_layers": 6, "job.seq_len": 4096}
SIXTEEN = {"knobs.optimizer_dtype": "bf16", "knobs.grad_dtype": "bf16", "knobs.master_weights": False}
DEEPSEEK = {
    "model": "deepseek-v3",
    "model.num_layers": 3,
    "model.num_experts": 32,
    "model.num_dense_layers": 1,
    "job.seq_len": 4096,
    "job.mtp": 0,
    "knobs.optimizer_dtype": "bf16",
}
FP8 = {"knobs.precision": "fp8-blockwise"}
LONG = {**Q, "model.num_layers": 3}


def micro(size: int, batch: int | None = None) -> Fields:
    return {"job.micro_batch": size, "job.global_batch": batch or size}


ON_GPU: dict[str, Fields] = {
    "qwen3 1 x 4K": {**Q, **micro(1)},
    "qwen3 2 x 4K, 3 microbatches": {**Q, **micro(2, 6)},
    "qwen3 8 x 4K": {**Q, **micro(8)},
    "qwen3 4 x 4K, 12 layers": {**Q, **micro(4), **SIXTEEN, "model.num_layers": 12},
    "qwen3 2K": {**Q, **micro(1), "job.seq_len": 2048},
    "full recompute": {**Q, **micro(4), "knobs.recompute": ["full"]},
    "recompute moe": {**Q, **micro(4), "knobs.recompute": ["moe"]},
    "recompute core_attn, layernorm": {**Q, **micro(4), "knobs.recompute": ["core_attn", "layernorm"]},
    "fp8 2 x 4K, 3 microbatches": {**Q, **FP8, **micro(2, 6)},
    "fp8 1 x 4K": {**Q, **FP8, **micro(1)},
    "fp8 32K": {**LONG, **FP8, **micro(1), "job.seq_len": 32768},
    "one graph, 1 x 4K": {**Q, **micro(1), "knobs.graphs": ["full_iteration"]},
    "graphs attn, moe_router": {**Q, **micro(1), "knobs.graphs": ["attn", "moe_router"]},
    "no fusion, 2 x 4K": {**Q, **micro(2), "knobs.expert_fusion": False},
    "16K": {**Q, **micro(1), "job.seq_len": 16384},
    "32K": {**LONG, **micro(1), "job.seq_len": 32768},
    "64K, full recompute": {**LONG, **micro(1), "job.seq_len": 65536, "knobs.recompute": ["full"]},
    "128K": {**LONG, **micro(1), "job.seq_len": 131072},
    "128K, recompute moe": {**LONG, **micro(1), "job.seq_len": 131072, "knobs.recompute": ["moe"]},
    "deepseek 1 x 4K": {**DEEPSEEK, **micro(1)},
    "deepseek 4 x 4K, mla_up_proj": {**DEEPSEEK, **micro(4), "knobs.recompute": ["mla_up_proj"]},
    "deepseek fp8, 2 x 4K": {**DEEPSEEK, **FP8, **micro(2)},
    "deepseek 32K": {**DEEPSEEK, **micro(1), "job.seq_len": 32768, "knobs.recompute": ["mla_up_proj", "moe"]},
    "mixtral 2 x 4K": {"model": "mixtral-8x7b", "model.num_layers": 3, "job.seq_len": 4096, **SIXTEEN, **micro(2)},
    "llama fp8, 2 x 8K": {"model": "llama3-8b", "model.num_layers": 8, "job.seq_len": 8192, **FP8, **micro(2)},
    "gpt-oss 16K": {"model": "gpt-oss-20b", "model.num_layers": 6, "job.seq_len": 16384, **SIXTEEN, **micro(1)},
    "qwen3-next 16K": {
        "model": "qwen3-next-80b-a3b",
        "model.num_layers": 4,
        "model.num_experts": 128,
        "job.seq_len": 16384,
        **SIXTEEN,
        **micro(1),
    },
    "qwen3-235b 2 x 4K": {
        "model": "qwen3-235b-a22b",
        "model.num_layers": 3,
        "model.num_experts": 64,
        "job.seq_len": 4096,
        **SIXTEEN,
        **micro(2),
    },
}
CPU = {"target": "threefold", "cluster.chip": "cpu", "job.data": "synthetic", "knobs.precision": "fp32"}
TINY = {"model": "tiny-qwen3-moe", "job.seq_len": 128, **micro(4)}
ON_ONE_CPU: dict[str, Fields] = {
    "4 x 128": TINY,
    "2 x 512": {**TINY, "job.seq_len": 512, **micro(2)},
    "1 x 1K": {**TINY, "job.seq_len": 1024, **micro(1)},
    "2 x 256, 3 microbatches": {**TINY, "job.seq_len": 256, **micro(2, 6)},
    "full recompute": {**TINY, "job.seq_len": 512, **micro(2), "knobs.recompute": ["full"]},
    "deepseek 2 x 256": {"model": "tiny-deepseek-v3", "job.seq_len": 256, **micro(2, 4)},
    "mixtral 4 x 256": {"model": "tiny-mixtral", "job.seq_len": 256, **micro(4)},
    "demo 4 x 256": {"model": "demo-qwen3-moe", "job.seq_len": 256, **micro(4)},
}
ON_TWO_CPUS: dict[str, Fields] = {
    "dp, 2 x 512": {**TINY, "job.seq_len": 512, **micro(2, 4)},
    "ep, 2 x 512": {**TINY, "job.seq_len": 512, **micro(2, 4), "layout.ep": 2},
    "tp, 2 x 512": {**TINY, "job.seq_len": 512, **micro(2), "layout.tp": 2},
    "cp, 2 x 512": {**TINY, "job.seq_len": 512, **micro(2), "layout.cp": 2},
    "pp, 4 x 2 x 256": {**TINY, "job.seq_len": 256, **micro(2, 8), "layout.pp": 2},
}


def jobs(chip: str, only: list[str] | None) -> Iterator[tuple[int, dict[str, Fields]]]:
    given = {1: ON_ONE_CPU, 2: ON_TWO_CPUS} if chip == "cpu" else {1: ON_GPU}
    for ranks, plans in given.items():
        base = {**CPU, "cluster.gpus": ranks} if chip == "cpu" else {**GPU, "cluster.chip": chip}
        chosen = {name: {**base, **fields} for name, fields in plans.items() if only is None or name in only}
        if chosen:
            yield ranks, chosen


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+")
    parser.add_argument("--shipped", action="store_true")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--save-runs", type=Path)
    args = parser.parse_args()
    here = this_machine(try_kernels=False)
    rows: list[dict[str, Any]] = []
    for ranks, plans in jobs(here.chip or "", args.only):
        with tempfile.TemporaryDirectory() as folder, PlanSession(Path(folder), ranks, {}) as session:
            for name, fields in plans.items():
                result = session.measure(fields, WINDOW, LIMIT_SECONDS)
                if "error" in result:
                    print(f"{name:34} {result['error']}", flush=True)
                    continue
                plan, taken = parse(fields).plan, statistics.median(result["steps"])
                assert plan is not None
                predicted = estimate(plan if args.shipped else priced_here(plan)).time.step_seconds
                error = predicted / taken - 1
                rows.append({"plan": name, "fields": fields, "seconds": taken, "predicted": predicted, "error": error})
                print(f"{name:34} {1e3 * taken:9.1f} ms  {1e3 * predicted:9.1f} ms  {error:+7.1%}", flush=True)
    sizes = sorted(abs(row["error"]) for row in rows)
    print(f"{len(rows)} steps: mean error {statistics.mean(sizes):.1%}, largest {sizes[-1]:.1%}")
    said = {"machine": {**here.versions, "chip": here.chip}, "date": str(date.today()), "steps": rows}
    if args.json:
        args.json.write_text(json.dumps(said, indent=1) + "\n")
    if args.save_runs:
        kept = json.loads(args.save_runs.read_text()) if args.save_runs.exists() else []
        names = ("fields", "seconds")
        new = [{"date": said["date"], "torch": here.versions["torch"], **{n: row[n] for n in names}} for row in rows]
        args.save_runs.write_text(json.dumps([*kept, *new], indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
