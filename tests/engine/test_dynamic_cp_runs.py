"""Runs with dynamic context parallelism: they learn what static runs learn, and resume exactly."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_runs import tiny_plan, tiny_shard

from threefold.engine.dist.join import World
from threefold.engine.run.folder import METRICS
from threefold.engine.train import train
from threefold.engine.verify.forked_ranks import run_ranks

LIMIT_SECONDS = 240.0
FIELDS = {
    "target": "threefold",
    "cluster.gpus": 2,
    "layout.cp": 2,
    "layout.ep": 2,
    "job.packing": True,
    "job.micro_batch": 1,
    "job.steps": 3,
    "job.aux_loss": 0.0,  # it depends on which tokens share a microbatch
    "run.eval_every": 3,
}


def train_rank(rank: int, fields: dict[str, Any], folder: Path, stop_at: int | None) -> None:
    plan = tiny_plan({**FIELDS, **fields})
    train(plan, folder, lambda text: None, world=World(rank, 2, rank, torch.device("cpu"), 0), stop_at=stop_at)


def losses(folder: Path, fields: dict[str, Any], *stops: int | None) -> list[float]:
    """The losses and the evaluation of a run that stops behind some steps and goes on."""
    for stop_at in stops:
        run_ranks(2, train_rank, fields, folder, stop_at, limit=LIMIT_SECONDS)
    rows = [json.loads(line) for line in (folder / METRICS).read_text().splitlines()]
    return [row["loss"] if "loss" in row else row["eval_loss"] for row in rows]


def test_dynamic_run_resumes_exactly_and_learns_as_a_static_one(tmp_path: Path) -> None:
    data = {"job.data": tiny_shard(tmp_path / "shard.tok")}
    dynamic = {**data, "knobs.cp_dynamic": True}
    whole = losses(tmp_path / "whole", dynamic, None)
    assert len(whole) == 4
    assert losses(tmp_path / "parts", dynamic, 1, 2, None) == whole
    assert losses(tmp_path / "static", data, None) == pytest.approx(whole, rel=1e-5)  # fp32, sums in another order
