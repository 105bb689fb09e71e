"""Are planted walls found, and does the first cure that applies help? Real runs, profiled and cured.

python benchmarks/planted_walls.py [--only NAME ...] [--json FILE]

Each case is a run of `threefold train --profile` with a wall that was put there. `threefold profile` names the wall and
its cures; then the run is repeated with the first cure that changes the plan. On two CPU ranks: a link of 100 Mbit/s
between network namespaces (needs root, `ip` and `tc`), and a host that sleeps between launches. On one GPU: short
sequences, a host that sleeps, experts without fusion, and a nearly full card.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from overlap_network import network

from threefold.findings import as_overrides
from threefold.machine.inventory import this_machine
from threefold.plan.file import dump_fields

STEPS = 12
# Runs `threefold` with a host that sleeps in every layer's forward.
STALLED = """
import sys, time
from threefold.engine.models.block import Block
mix = Block.mix
Block.mix = lambda self, *inputs: (time.sleep({seconds}), mix(self, *inputs))[1]
from threefold.cli.main import main
sys.exit(main(sys.argv[1:]))
"""
BASE = {"target": "threefold", "job.data": "synthetic", "job.steps": STEPS, "run.log_every": 1, "run.save_every": 0}
TINY = {
    **BASE,
    "model": "tiny-qwen3-moe",
    "cluster.chip": "cpu",
    "cluster.gpus": 2,
    "job.seq_len": 256,
    "job.global_batch": 8,
    "knobs.precision": "fp32",
    "layout.ep": 2,
}
QWEN = {
    **BASE,
    "model": "qwen3-30b-a3b",
    "model.num_layers": 2,
    "job.seq_len": 4096,
    "cluster.gpus": 1,
    "knobs.expert_fusion": True,
    "knobs.optimizer_dtype": "bf16",
    "knobs.grad_dtype": "bf16",
    "knobs.master_weights": False,
}


@dataclass(frozen=True)
class Case:
    wall: str  # that was planted
    fields: dict[str, Any]
    bits_per_second: float | None = None  # of the link between the ranks
    stall_seconds: float = 0.0


ON_CPU = {
    "slow network": Case("communication", TINY, bits_per_second=1e8),
    "sleeping host": Case("host", TINY, stall_seconds=0.05),
}
ON_GPU = {
    "short sequences": Case("host", {**QWEN, "job.seq_len": 512, "job.global_batch": 1}),
    "sleeping host": Case("host", {**QWEN, "job.global_batch": 2}, stall_seconds=0.02),
    "unfused experts": Case(
        "compute", {**QWEN, "knobs.expert_fusion": False, "job.micro_batch": 4, "job.global_batch": 4}
    ),
    "nearly full card": Case("memory", {**QWEN, "job.micro_batch": 40, "job.global_batch": 40}),
}


def train(case: Case, plan: Path, run: Path, profile: bool) -> float:
    """Seconds of a step, by the last ones of the run."""
    words = ["train", str(plan), "--run", str(run), *(["--profile"] if profile else [])]
    module = ["-c", STALLED.format(seconds=case.stall_seconds)] if case.stall_seconds else ["-m", "threefold"]
    command = [sys.executable, *module, *words]
    ranks = case.fields["cluster.gpus"]
    if ranks == 1:
        subprocess.run(command, check=True, capture_output=True)
    else:
        shared = {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks), "MASTER_PORT": "29531"}
        slow = case.bits_per_second is not None
        with network(case.bits_per_second) if slow else nullcontext([""] * ranks) as names:
            shared |= (
                {"MASTER_ADDR": "10.77.0.1", "GLOO_SOCKET_IFNAME": "tf0"} if slow else {"MASTER_ADDR": "127.0.0.1"}
            )
            started = [
                subprocess.Popen(
                    [*(["ip", "netns", "exec", name] if name else []), *command],
                    env=os.environ | shared | {"RANK": str(rank), "LOCAL_RANK": str(rank), "OMP_NUM_THREADS": "1"},
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                )
                for rank, name in enumerate(names)
            ]
            codes = [process.wait(timeout=900) for process in started]
        assert not any(codes), f"ranks ended with {codes}"
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return statistics.median(line["seconds"] for line in lines[-5:])


def measure(case: Case, chip: str) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as given:
        folder = Path(given)
        plan, cured = folder / "plan.toml", folder / "cured.toml"
        fields = {"cluster.chip": chip, **case.fields}
        plan.write_text(dump_fields(fields))
        before = train(case, plan, folder / "run", profile=True)
        command = [sys.executable, "-m", "threefold", "profile", str(folder / "run"), "--json"]
        found = json.loads(subprocess.run(command, check=True, capture_output=True).stdout)
        result = {
            "planted": case.wall,
            "dominant": found["dominant"],
            "confidence": found["confidence"],
            "seconds": before,
        }
        cure = next((fix for fix in found["fixes"] if fix["set"]), None)
        if cure is None:
            return result
        cured.write_text(dump_fields({**fields, **cure["set"]}))
        after = train(case, cured, folder / "cured", profile=False)
        return {**result, "cure": cure["set"], "predicted_gain": cure["predicted_gain"], "seconds_cured": after}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    chip = this_machine(try_kernels=False).chip or ""
    rows = {}
    for name, case in (ON_CPU if chip == "cpu" else ON_GPU).items():
        if args.only and name not in args.only:
            continue
        rows[name] = row = measure(case, chip)
        print(f"{name}: planted {row['planted']}, found {row['dominant']} ({row['confidence']:.0%})", flush=True)
        if "cure" in row:
            print(f"  {as_overrides(row['cure'])}: {row['seconds']:.3f} s -> {row['seconds_cured']:.3f} s a step")
        if args.json:
            args.json.write_text(json.dumps({"chip": chip, "cases": rows}, indent=1) + "\n")
    return 0 if all(row["planted"] == row["dominant"] for row in rows.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
