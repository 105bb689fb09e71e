"""Rehearsal against the allocator of one GPU: real layers, one rank, collectives that do nothing.

Processes beside this one rehearse while the GPU measures. Of every case the peak is taken apart both ways; what differs
is printed.
"""

import gc
import json
import multiprocessing
import os
import time
import traceback
from concurrent.futures import Future, ProcessPoolExecutor
from pathlib import Path
from typing import Any

import torch
from peak_breakdown import measure_peak_breakdown

from threefold.cost.memory.by_stack import memory
from threefold.dryrun.measured.real_rank import with_balanced_routing
from threefold.dryrun.rehearse_rank import rehearse_rank
from threefold.plan.parse import parse
from threefold.plan.plan import Plan
from threefold.report.terminal import table
from threefold.units import GIB, MIB

QWEN = {"model": "qwen3-30b-a3b", "cluster.gpus": 64, "layout.ep": 8}
DEEPSEEK = {"model": "deepseek-v3", "model.num_layers": 4, "job.mtp": 0, "cluster.gpus": 256, "layout.ep": 32}
NEXT = {"model": "qwen3-next-80b-a3b", "model.num_layers": 4, "job.mtp": 0, "cluster.gpus": 64, "layout.ep": 16}
FULL = {"knobs.recompute": ("full",), "knobs.recompute_method": "uniform", "knobs.recompute_layers": 1}
FSDP = {"knobs.data_parallel": "fsdp"}
OVERLAP = {"knobs.ep_overlap": True, "knobs.delay_wgrad": True}
CASES: dict[str, dict[str, Any]] = {
    "qwen3-30b ep8 4k": {**QWEN, "job.seq_len": 4096},
    "deepseek-v3 ep32 4k, 4 layers": {**DEEPSEEK, "job.seq_len": 4096},
    "qwen3-next ep16 4k, 4 layers": {**NEXT, "job.seq_len": 4096},
    "qwen3-30b ep8 4k fsdp": {**QWEN, "job.seq_len": 4096, **FSDP},
    "qwen3-30b ep8 8k moe_act+layernorm": {**QWEN, "job.seq_len": 8192, "knobs.recompute": ("moe_act", "layernorm")},
    "deepseek-v3 ep32 4k fsdp, 4 layers": {**DEEPSEEK, "job.seq_len": 4096, **FSDP},
    "deepseek-v3 ep32 16k full, 4 layers": {**DEEPSEEK, "job.seq_len": 16384, **FULL},
    "qwen3-30b tp2 ep8 16k moe": {**QWEN, "layout.tp": 2, "job.seq_len": 16384, "knobs.recompute": ("moe",)},
    "qwen3-next ep16 16k full, 4 layers": {**NEXT, "job.seq_len": 16384, **FULL},
    "qwen3-30b ep8 4k fp8": {**QWEN, "job.seq_len": 4096, "knobs.precision": "fp8-blockwise"},
    "deepseek-v3 ep32 4k fp8, 4 layers": {**DEEPSEEK, "job.seq_len": 4096, "knobs.precision": "fp8-blockwise"},
    "qwen3-30b ep8 4k fused experts": {**QWEN, "job.seq_len": 4096, "knobs.expert_fusion": True},
    "gpt-oss-20b ep4 4k, 8 layers": {
        "model": "gpt-oss-20b", "model.num_layers": 8, "cluster.gpus": 32, "layout.ep": 4, "job.seq_len": 4096,
    },
    "qwen3-30b 1 gpu 4x4k, 8 layers": {
        "model": "qwen3-30b-a3b", "model.num_layers": 8, "cluster.gpus": 1, "job.seq_len": 4096, "job.micro_batch": 4,
    },
    "qwen3-30b ep8 64k full, 8 layers": {**QWEN, "model.num_layers": 8, "job.seq_len": 65536, **FULL},
    "qwen3-30b ep8 4k overlap, 8 layers": {**QWEN, "model.num_layers": 8, "job.seq_len": 4096, **OVERLAP},
    "deepseek-v3 ep32 4k overlap, 4 layers": {**DEEPSEEK, "job.seq_len": 4096, **OVERLAP},
    "qwen3-30b ep8 pp4 4k": {**QWEN, "layout.pp": 4, "job.seq_len": 4096},
}  # fmt: skip


def case(name: str) -> Plan:
    fields = {"target": "threefold", "cluster.chip": "h200", "knobs.precision": "bf16", **CASES[name]}
    fields["stack.torch"] = torch.__version__.partition("+")[0]
    fields["job.global_batch"] = 4 * fields["cluster.gpus"] * fields.get("job.micro_batch", 1)
    plan = parse(fields).plan
    assert plan is not None, name
    return with_balanced_routing(plan)


def _rehearsed(name: str) -> dict[str, Any]:
    found = rehearse_rank(case(name), 0)
    return {**found.to_json(), "beside": found.peak_bytes - sum(found.terms.values())}


def on_cuda(names: list[str], seconds: float, path: Path | None, results: Path) -> int:
    """No case begins behind `seconds`."""
    began = time.monotonic()
    jobs = max(1, (os.cpu_count() or 2) - 2)
    rows, kept = [], []
    results.mkdir(exist_ok=True)
    # Forked before this process has a GPU.
    with ProcessPoolExecutor(jobs, mp_context=multiprocessing.get_context("fork")) as pool:
        coming = {name: pool.submit(_rehearsed, name) for name in names}
        for name in names:
            if time.monotonic() - began > seconds:
                print(f"{name}: no time left", flush=True)
                continue
            one = _one(name, coming[name])
            kept.append(one)
            rows.append(_row(one))
            (path or results / f"rehearsal-{_device()}.json").write_text(json.dumps(kept, indent=1), encoding="utf-8")
            print(f"[{time.monotonic() - began:.0f} s] " + " | ".join(rows[-1]), flush=True)
            _explain(one)
    header = ["case", "allocator, GiB", "rehearsed", "off", "estimate off", "peak at"]
    print(table(header, rows))
    return 1 if any("error" in one for one in kept) else 0


def _device() -> str:
    return torch.cuda.get_device_name().lower().replace("nvidia ", "").replace(" ", "-")


def _one(name: str, coming: "Future[dict[str, Any]]") -> dict[str, Any]:
    plan = {key: str(value) for key, value in CASES[name].items()}
    found: dict[str, Any] = {"name": name, "plan": plan, "torch": torch.__version__}
    began = time.monotonic()
    try:
        found["measured"] = measure_peak_breakdown(case(name), 0, torch.device("cuda", 0)).to_json()
    except Exception:  # kept, shown and the exit code: the other cases have answers still
        found["error"] = traceback.format_exc()
    found["measured_seconds"] = time.monotonic() - began
    gc.collect()
    torch._C._cuda_clearCublasWorkspaces()  # every case takes its own
    torch.cuda.empty_cache()
    found["left_bytes"] = torch.cuda.memory_allocated()
    try:
        found["rehearsed"] = coming.result()
        stage = memory(case(name)).stages[0]
        found["estimated"] = {"peak_bytes": stage.peak_bytes, "terms": stage.terms, "at": stage.moment}
    except Exception:  # as above
        found["error"] = found.get("error", "") + traceback.format_exc()
    return found


def _row(one: dict[str, Any]) -> list[str]:
    if "error" in one:
        return [one["name"], "-", "-", "-", "-", one["error"].strip().splitlines()[-1][:120]]
    real, seen, guess = (one[part]["peak_bytes"] for part in ("measured", "rehearsed", "estimated"))
    off = [f"{seen / real - 1:+.1%}", f"{guess / real - 1:+.1%}"]
    return [one["name"], f"{real / GIB:.2f}", f"{seen / GIB:.2f}", *off, one["rehearsed"]["at"]]


def _explain(one: dict[str, Any]) -> None:
    if "error" in one:
        print("  " + "\n  ".join(one["error"].strip().splitlines()[-14:]))
        return
    real, seen = one["measured"], one["rehearsed"]
    print(f"  {one['measured_seconds']:.0f} s; watched {real['watched_bytes'] / GIB:.3f} GiB at {real['at']}")
    print(f"  reserved {real['reserved_bytes'] / GIB:.2f}, left behind {one['left_bytes'] / MIB:.0f} MiB")
    terms = {name: (real["terms"].get(name, 0), seen["terms"].get(name, 0)) for name in seen["terms"] | real["terms"]}
    far = [f"{name} {a / MIB:.0f}/{b / MIB:.0f}" for name, (a, b) in terms.items() if abs(a - b) > 4 * MIB]
    print(f"  real/rehearsed MiB: {', '.join(far) or 'terms alike'}")
    print(f"  operator {real['working_bytes'] / MIB:.0f} MiB, others {real['other_bytes'] / MIB:.0f} MiB")
    beside = [f"{name} {size / MIB:.0f}" for name, size in real["beside"].items() if size > 2 * MIB]
    print(f"  beside results, MiB: {', '.join(beside)}")
    if abs(seen["peak_bytes"] / real["peak_bytes"] - 1) > 0.01:
        for size, what in real["top"]:
            print(f"    real {size / MIB:8.0f} {what}")
        for live in seen["top"]:
            print(f"    seen {live['bytes'] / MIB:8.0f} {live['dtype']} {live['shape']} {live['owner']}")
