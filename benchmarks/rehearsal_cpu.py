"""Rehearsals of tiny models against the CPU's own allocations."""

import gc
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from threefold.dryrun.measured.real_rank import real_rank, run_real_step
from threefold.dryrun.rehearse_rank import rehearse_rank
from threefold.plan.parse import parse
from threefold.plan.plan import Plan
from threefold.report.terminal import table
from threefold.units import MIB

WANTED = 0.01


def plan_of(model: str, gpus: int, more: dict[str, Any]) -> Plan:
    """Experts in turn, two microbatches a rank."""
    fields = {
        "model": model,
        "target": "threefold",
        "cluster.chip": "cpu",
        "cluster.gpus": gpus,
        "knobs.precision": "fp32",
        "job.seq_len": 64,
        "job.global_batch": 2 * gpus,
        "job.routing": "forced-balance",
        "model.num_layers": 2,
        **more,
    }
    parsed = parse(fields)
    assert parsed.plan, parsed.findings
    return parsed.plan


# Name -> model, ranks, what else its plan says, the rank that is looked at.
CASES: dict[str, tuple[str, int, dict[str, Any], int]] = {
    "one rank": ("tiny-qwen3-moe", 1, {}, 0),
    "folded": ("tiny-deepseek-v3", 8, {"layout.tp": 2, "layout.ep": 4, "layout.pp": 2, "job.global_batch": 8}, 4),
    "fsdp": ("tiny-qwen3-moe", 4, {"layout.ep": 2, "knobs.data_parallel": "fsdp"}, 1),
    "delta": ("tiny-qwen3-next", 4, {"layout.cp": 2, "layout.ep": 4, "model.num_layers": 4}, 3),
    "sinks": ("tiny-gpt-oss", 4, {"layout.tp": 2, "layout.ep": 2}, 2),
    "recompute": ("tiny-qwen3-moe", 2, {"layout.ep": 2, "knobs.recompute": ["moe_act", "layernorm"]}, 0),
}


def both_peaks(name: str) -> tuple[int, int]:
    """Bytes: rehearsed, allocated."""
    model, gpus, more, rank = CASES[name]
    plan = plan_of(model, gpus, more)
    return rehearse_rank(plan, rank).peak_bytes, allocated(plan, rank)


def allocated(plan: Plan, rank: int) -> int:
    """The CPU allocator's peak, as torch's profiler tells it."""
    gc.collect()  # what ran before would be released in between, and count against this
    with (
        profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen,
        real_rank(plan, rank, torch.device("cpu")) as (parts, small),
    ):
        run_real_step(parts, small, plan)
    now = peak = 0
    for event in seen.profiler.kineto_results.events():
        if event.name() == "[memory]":
            now += event.nbytes()
            peak = max(peak, now)
    return peak


def on_cpu() -> tuple[int, list[dict[str, Any]]]:
    torch.set_num_threads(1)
    rows, kept = [], []
    for name, (model, gpus, more, rank) in CASES.items():
        rehearsed, real = both_peaks(name)
        kept.append({"name": name, "model": model, "gpus": gpus, "set": more, "rank": rank})
        kept[-1] |= {"rehearsed_bytes": rehearsed, "allocated_bytes": real, "off": rehearsed / real - 1}
        rows.append([name, model, f"{real / MIB:.3f}", f"{rehearsed / MIB:.3f}", f"{rehearsed / real - 1:+.3%}"])
    print(table(["case", "model", "allocated, MiB", "rehearsed, MiB", "off"], rows))
    return 0 if all(abs(row["off"]) <= WANTED for row in kept) else 1, kept
