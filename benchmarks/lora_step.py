"""A step of LoRA against one of full training, of the same model on the same data.

python benchmarks/lora_step.py [--layers 8] [--steps 8] [--json FILE]
python benchmarks/lora_step.py --device cpu --tiny           the same code on a small model; its times mean nothing

The shape is Qwen3-30B-A3B cut to a few layers, four sequences of 4096 tokens, bf16 weights with fp32 masters, gradients
and moments of whatever trains. Settings are measured in turns in processes that stay alive; the ratio is the time of
full training over that of LoRA.
"""

import argparse
import json
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

from threefold.launch.plan_session import PlanSession
from threefold.plan.parse import parse
from threefold.plan.plan import Plan

BASE: dict[str, Any] = {
    "model": "qwen3-30b-a3b",
    "cluster.chip": "h200",
    "job.seq_len": 4096,
    "job.global_batch": 4,
    "job.micro_batch": 4,
    "job.steps": 1000,
    "knobs.expert_fusion": True,
}
TINY: dict[str, Any] = {"model": "tiny-qwen3-moe", "cluster.chip": "cpu", "job.seq_len": 64, "knobs.precision": "fp32"}
DENSE, ALL = ["attention"], ["attention", "experts"]
SETTINGS: dict[str, dict[str, Any]] = {
    "full training": {},
    "LoRA 16, attention": {"job.lora_rank": 16, "job.lora_targets": DENSE},
    "LoRA 16, attention and experts": {"job.lora_rank": 16, "job.lora_targets": ALL},
}
TURNS = 3


def plan_of(tiny: bool, layers: int, more: dict[str, Any]) -> Plan:
    parsed = parse({**BASE, **(TINY if tiny else {"model.num_layers": layers}), **more})
    assert parsed.plan is not None, parsed.findings
    return parsed.plan


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    plans = {name: plan_of(args.tiny, args.layers, more) for name, more in SETTINGS.items()}
    window = {"warmup": 3, "steps": args.steps, "seconds": 8.0, "trace": None}
    rows: dict[str, dict[str, Any]] = {name: {"steps": [], "peak_bytes": None} for name in plans}
    with tempfile.TemporaryDirectory() as folder, PlanSession(Path(folder), 1, {}) as session:
        for _ in range(TURNS):
            for name, plan in plans.items():
                found = session.measure(dict(plan.written), window, 300.0)
                if "error" in found:
                    rows[name]["error"] = found["error"]
                    continue
                rows[name]["steps"].append(statistics.median(found["steps"]))
                rows[name]["peak_bytes"] = found["peak_bytes"]
                rows[name]["losses"] = found["losses"]
    for name, row in rows.items():
        row["fields"] = {path: list(v) if isinstance(v, tuple) else v for path, v in plans[name].written}
        row["ms"] = 1e3 * statistics.median(row["steps"]) if row["steps"] else None
        ratio = rows["full training"]["ms"] / row["ms"] if row["ms"] and rows["full training"]["ms"] else None
        said = row.get("error") or f"{row['ms']:8.1f} ms, peak {row['peak_bytes'] / 2**30:6.1f} GiB, ratio {ratio:.2f}"
        print(f"{name:34} {said}")
    if args.json:
        args.json.write_text(json.dumps({"rows": rows}, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
