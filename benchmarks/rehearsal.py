"""How far rehearsals are off, run by hand; prints a table and writes JSON.

    python benchmarks/rehearsal.py estimate [--plans 50] [--seed 0]   estimate against rehearsal, random accepted plans
                                   --wide                            of more kinds: schedules, FP8, overlap, Muon, ...
    python benchmarks/rehearsal.py speed                              seconds and memory of two large rehearsals
    python benchmarks/rehearsal.py cpu                                rehearsal against a CPU's allocations, tiny models
    python benchmarks/rehearsal.py cuda [NAME ...] [--seconds 600]    rehearsal against the allocator of one GPU

The last needs a CUDA device with 140 GB.
"""

import argparse
import json
import random
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from threefold.cost.memory.by_stack import memory
from threefold.findings import FindingsError
from threefold.plan.parse import parse
from threefold.plan.plan import Plan
from threefold.report.terminal import table
from threefold.rules.all import blockers, check
from threefold.rules.stacks import ENGINE_LIMITS
from threefold.units import GIB

RESULTS = Path(__file__).parent / "results"
LOOKED_AT = (
    101,
    202,
    303,
    404,
    505,
    707,
    4242,
    5353,
    1001,
    1002,
    1003,
)  # seeds whose misses were looked into: a check takes another
FAMILIES = ("qwen3-30b-a3b", "deepseek-v3", "qwen3-next-80b-a3b", "gpt-oss-20b", "mixtral-8x7b", "llama3-8b")


def random_fields(draw: random.Random) -> dict[str, Any]:
    """A plan with few layers, so that a rehearsal takes a second, and everything else of its real size."""
    pp = draw.choice((1, 1, 2, 4))
    vpp = draw.choice((1, 1, 2)) if pp > 1 else 1
    tp, cp = draw.choice((1, 1, 2, 4)), draw.choice((1, 1, 1, 2))
    gpus = draw.choice((8, 32, 128, 1024))
    name = draw.choice(FAMILIES)
    return {
        "model": name,
        "target": "threefold",
        "cluster.chip": "h200",
        "cluster.gpus": gpus,
        "model.num_layers": draw.choice((4, 8)) * (2 if pp * vpp > 4 else 1),
        "job.seq_len": draw.choice((4096, 8192, 16384)),
        "job.micro_batch": draw.choice((1, 1, 2)),
        "job.global_batch": gpus * draw.choice((1, 2, 4)),
        "job.mtp": draw.choice((0, None)),
        "layout.tp": tp,
        "layout.cp": cp,
        "layout.pp": pp,
        "layout.vpp": vpp,
        "layout.ep": draw.choice((1, 2, 4, 8, 16)),
        "knobs.precision": "bf16",
        "knobs.data_parallel": draw.choice(("zero1", "zero1", "zero1", "fsdp")),
        "knobs.recompute": draw.choice(((), (), ("moe_act",), ("layernorm", "mlp"), ("moe",), ("full",))),
        "knobs.recompute_method": None,
    }


def wider_fields(draw: random.Random) -> dict[str, Any]:
    """The same with what only some plans have: other schedules, FP8, overlap, fused experts, Muon, units of layers."""
    fields = random_fields(draw)
    fields["job.global_batch"] *= 2
    fields["knobs.precision"] = draw.choice(("bf16", "bf16", "fp8-blockwise", "fp8-rowwise"))
    fields["knobs.expert_fusion"] = draw.choice((False, True))
    fields["knobs.ep_overlap"] = draw.choice((False, False, True))
    fields["knobs.delay_wgrad"] = fields["knobs.ep_overlap"] and draw.choice((False, True))
    fields["job.optimizer"] = draw.choice(("adamw", "adamw", "adamw", "muon"))
    fields["layout.schedule"] = draw.choice((None, None, "zero-bubble", "dualpipev"))
    if fields["layout.schedule"] == "dualpipev":
        fields["layout.vpp"] = 2
    fields["knobs.recompute_method"] = draw.choice(("uniform", "block"))
    fields["knobs.recompute_layers"] = draw.choice((1, 1, 2, 3))
    return fields


def accepted(seed: int, wide: bool = False) -> Iterator[Plan]:
    """Plans that no rule objects to, of which only the memory is not asked about."""
    draw, make = random.Random(seed), wider_fields if wide else random_fields
    while True:
        fields = {path: value for path, value in make(draw).items() if value is not None}
        if "full" not in fields["knobs.recompute"]:
            fields = {path: value for path, value in fields.items() if not path.startswith("knobs.recompute_")}
        elif not wide:
            fields |= {"knobs.recompute_method": "uniform", "knobs.recompute_layers": 1}
        try:
            plan = parse(fields).plan
        except FindingsError:
            continue
        if plan is None:
            continue
        found = check(plan)
        memory_only = ("states-fit-memory", "peak-fits-memory")
        if any(f.rule not in memory_only for f in blockers(found)) or any(f.rule in ENGINE_LIMITS for f in found):
            continue
        yield plan


def describe(plan: Plan) -> str:
    layout = plan.layout
    axes = " ".join(f"{a}{layout.degree(a)}" for a in ("tp", "cp", "pp", "vpp", "ep") if layout.degree(a) > 1)
    words = [plan.model_name, f"{layout.gpus}x", axes, f"{plan.job.micro_batch}x{plan.job.seq_len}"]
    knobs = plan.knobs
    words += [knobs.data_parallel if knobs.data_parallel != "zero1" else "", "+".join(knobs.recompute)]
    words += [f"{knobs.recompute_method} {knobs.recompute_layers}" if knobs.recompute_method else ""]
    words += [layout.pipeline_schedule if layout.pipeline_schedule in ("zero-bubble", "dualpipev") else ""]
    words += [name for name in ("expert_fusion", "ep_overlap", "delay_wgrad") if getattr(knobs, name)]
    words += [knobs.precision if knobs.precision != "bf16" else "", "muon" if plan.job.optimizer == "muon" else ""]
    return " ".join(word for word in words if word)


def estimate_against_rehearsal(count: int, seed: int, wide: bool) -> int:
    from threefold.dryrun.rehearse_rank import rehearse_rank

    rows, kept = [], []
    for number, plan in enumerate(accepted(seed, wide)):
        if number == count:
            break
        guess = memory(plan).worst
        seen = rehearse_rank(plan, guess.stage * plan.layout.stride("pp"))
        off = guess.peak_bytes / seen.peak_bytes - 1
        kept.append({"plan": dict(plan.written), "off": off, "terms": seen.terms, "estimated": guess.terms})
        rows.append(
            [describe(plan), f"{seen.peak_bytes / GIB:.2f}", f"{guess.peak_bytes / GIB:.2f}", f"{off:+.1%}", seen.at]
        )
        print(" | ".join(rows[-1]), flush=True)
    print(table(["plan", "rehearsed", "estimated", "off", "peak at"], rows))
    errors = sorted(abs(row["off"]) for row in kept)
    inside = sum(error <= 0.03 for error in errors)
    median = errors[len(errors) // 2]
    print(f"\n{inside} of {len(errors)} within 3 %; median {median:.1%}, worst {errors[-1]:.1%}")
    summary = {"within_3_percent": inside, "of": len(errors), "median": median, "worst": errors[-1]}
    _write(
        f"rehearsal-estimate{'-wide' * wide}.json",
        {"seed": seed, "seeds_looked_at": LOOKED_AT, **summary, "plans": kept},
    )
    return 0


def _write(name: str, content: Any) -> None:
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / name).write_text(json.dumps(content, indent=1, default=str), encoding="utf-8")


def _qwen() -> Path:
    path = Path(tempfile.mkdtemp()) / "qwen.toml"
    cluster = 'model = "qwen3-30b-a3b"\ntarget = "threefold"\ncluster = { chip = "h100", gpus = 1024 }\n'
    path.write_text(f"{cluster}[job]\nseq_len = 4096\nglobal_batch = 2048\n[layout]\nep = 8\n", encoding="utf-8")
    return path


def speed() -> int:
    """A rank of 1,024, and all stages of the DeepSeek-V3 recipe, as the command line runs them."""
    root = Path(__file__).parent.parent
    jobs = {
        "one qwen3-30b-a3b rank of 1,024": [str(_qwen()), "--ranks", "0"],
        "all stages of deepseek-v3 on 1,024": [str(root / "recipes" / "deepseek-v3-4k-1024xh100-fp8.toml")],
    }
    rows, kept = [], []
    for name, words in jobs.items():
        began = time.perf_counter()
        command = [sys.executable, "-m", "threefold", "dry-run", *words, "--json"]
        subprocess.run(command, check=False, stdout=subprocess.DEVNULL)
        seconds = time.perf_counter() - began
        used = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024
        kept.append({"name": name, "seconds": seconds, "largest_process_bytes": used})
        rows.append([name, f"{seconds:.1f}", f"{used / GIB:.2f}"])
    print(table(["rehearsal", "seconds", "GiB of the largest process"], rows))
    _write("rehearsal-speed.json", kept)
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("estimate", "speed", "cpu", "cuda"))
    parser.add_argument("names", nargs="*", help="cases on CUDA (default: all)")
    parser.add_argument("--seconds", type=float, default=600.0, help="no case on CUDA begins later")
    parser.add_argument("--json", type=Path, help="where the cases on CUDA are written")
    parser.add_argument("--plans", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--wide", action="store_true", help="random plans with more kinds of schedule, precision, overlap"
    )
    args = parser.parse_args()
    if args.what == "speed":
        return speed()
    if args.what == "cpu":
        from rehearsal_cpu import on_cpu

        code, kept = on_cpu()
        _write("rehearsal-cpu.json", kept)
        return code
    if args.what == "cuda":
        from rehearsal_cuda import CASES, on_cuda

        return on_cuda(args.names or list(CASES), args.seconds, args.json, RESULTS)
    return estimate_against_rehearsal(args.plans, args.seed, args.wide)


if __name__ == "__main__":
    sys.exit(main())
