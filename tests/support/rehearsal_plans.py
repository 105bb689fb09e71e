"""Plans that rehearsal tests share: `GPU` is a plan for 1,024 H100s as fields, `tiny` makes a plan for CPU ranks."""

import sys
from typing import Any

import torch
from repository import ROOT

from threefold.plan.plan import Plan

sys.path.insert(0, str(ROOT / "benchmarks"))
import rehearsal_cpu

__all__ = ["GPU", "rehearsal_cpu", "tiny"]

torch.set_num_threads(1)

GPU = {
    "model": "qwen3-30b-a3b",
    "target": "threefold",
    "cluster.chip": "h100",
    "cluster.gpus": 1024,
    "job.seq_len": 4096,
    "job.global_batch": 2048,
    "layout.ep": 8,
    "model.num_layers": 1,
}


def tiny(model: str, gpus: int, **changes: Any) -> Plan:
    return rehearsal_cpu.plan_of(model, gpus, {name.replace("__", "."): value for name, value in changes.items()})
