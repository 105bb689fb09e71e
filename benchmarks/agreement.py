"""The same plan in fp32 on the CPU and in bf16 on the GPU: how far apart are the loss curves?

    python benchmarks/agreement.py [--model tiny-qwen3-moe] [--steps 100] [--json FILE]

Both runs see the same data in the same order and start from the same weights.
"""

import argparse
import json
import statistics
import tempfile
from pathlib import Path

import torch
from safetensors.torch import save_file

from threefold.engine.models.build import build_model
from threefold.engine.run.folder import METRICS
from threefold.engine.train import train
from threefold.engine.weights.imported_weights import INITIAL
from threefold.plan.parse import parse


def losses(model: str, chip: str, precision: str, steps: int, seq_len: int) -> list[float]:
    fields = {
        "model": model,
        "cluster.chip": chip,
        "job.seq_len": seq_len,
        "job.global_batch": 16,
        "job.micro_batch": 8,
        "job.steps": steps,
        "job.lr": 1e-3,
        "job.packing": True,
        "knobs.precision": precision,
        "run.tensorboard": False,
    }
    plan = parse(fields).plan
    assert plan is not None
    with tempfile.TemporaryDirectory() as folder:
        start = Path(folder) / INITIAL
        start.mkdir()
        # A GPU draws other random numbers than a CPU, so both begin with what the CPU drew.
        save_file(build_model(plan.model, plan.mtp, seed=0).state_dict(), start / "00000.safetensors")
        train(plan, Path(folder), say=lambda text: None)
        lines = (Path(folder) / METRICS).read_text().splitlines()
    return [json.loads(line)["loss"] for line in lines]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--models", nargs="+", default=["tiny-qwen3-moe", "tiny-deepseek-v3", "tiny-gpt-oss", "tiny-mixtral"]
    )
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--seq-len", type=int, default=256)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    where = ("h200", "bf16") if torch.cuda.is_available() else ("cpu", "bf16")
    found = {}
    print(f"{'model':18} {'fp32 cpu':>9} {'bf16 ' + where[0]:>10} {'largest gap':>12} {'gap at end':>11}")
    for model in args.models:
        wide = losses(model, "cpu", "fp32", args.steps, args.seq_len)
        narrow = losses(model, *where, args.steps, args.seq_len)
        gaps = [abs(a - b) / a for a, b in zip(wide, narrow, strict=True)]
        tail = max(1, args.steps // 10)
        ends = [statistics.mean(curve[-tail:]) for curve in (wide, narrow)]
        found[model] = {"fp32": wide, "bf16": narrow, "largest_gap": max(gaps), "end_gap": abs(ends[1] / ends[0] - 1)}
        print(
            f"{model:18} {ends[0]:9.4f} {ends[1]:10.4f} {max(gaps):12.2%} {found[model]['end_gap']:11.2%}", flush=True
        )
    if args.json:
        args.json.write_text(json.dumps(found))


if __name__ == "__main__":
    main()
