"""Folders of runs written by hand, as the engine writes them: tests say what the times and losses were."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from threefold.plan.file import dump_plan
from threefold.plan.parse import parse
from threefold.plan.plan import Plan
from threefold.plan.same_run import model_facts
from threefold.spec.flops import flops_per_token

RUN_FIELDS: dict[str, Any] = {
    "model": "tiny-qwen3-moe",
    "job.seq_len": 128,
    "job.global_batch": 8,
    "job.micro_batch": 4,
    "knobs.precision": "fp32",
}


def run_plan(**changes: Any) -> Plan:
    """The plan of the runs with other fields: `job_seq_len=64` means job.seq_len, None deletes."""
    named = {name.replace("_", ".", 1) if name != "model" else name: value for name, value in changes.items()}
    parsed = parse({path: value for path, value in {**RUN_FIELDS, **named}.items() if value is not None})
    assert parsed.plan is not None, parsed.findings
    return parsed.plan


def noisy_seconds(mean: float, count: int, seed: int, noise: float = 0.02) -> list[float]:
    draw = np.random.default_rng(seed)
    return [float(value) for value in mean * np.exp(noise * draw.standard_normal(count))]


def write_run(
    folder: Path,
    plan: Plan,
    seconds: Sequence[float],
    losses: Sequence[float | None] | None = None,
    useful: float = 1.0,
    contract: dict[str, Any] | None = None,
    **columns: float,
) -> Path:
    """Write plan.toml, contract.json and metrics.jsonl. `useful` is the fraction of tokens that are no padding."""
    folder.mkdir(parents=True)
    (folder / "plan.toml").write_text(dump_plan(plan, complete=True))
    facts = {"plan": plan.hash, "model": model_facts(plan), "torch": "2.13.0", "device": "cpu x 2", "data": "abc"}
    (folder / "contract.json").write_text(json.dumps(facts | (contract or {})))
    tokens = plan.tokens_per_step
    flops = tokens * useful * flops_per_token(plan.model, plan.job.seq_len, plan.mtp, plan.layout.tp)
    lines = []
    for number, duration in enumerate(seconds):
        line = {
            "step": number + 1,
            "loss": losses[number] if losses is not None else 5.0,
            "seconds": duration,
            "tokens_per_second": tokens / duration,
            "useful_tokens_per_second": tokens * useful / duration,
            "tflops": flops / duration / 1e12,
            "memory_bytes": 4_000_000,
            "skipped_steps": 0,
            **columns,
        }
        lines.append(json.dumps(line))
    (folder / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    return folder
