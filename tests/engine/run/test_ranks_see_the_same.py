"""What ranks read from disk, and decide by, is the same on all of them; else the run ends on all of them by name."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from repository import ROOT
from safetensors.torch import save_file
from tiny_runs import tiny_plan, tiny_shard

from threefold.engine.build import build
from threefold.engine.dist.join import World, open_store, shared_fields
from threefold.engine.dist.mesh import Mesh
from threefold.engine.models.build import build_model
from threefold.engine.run.checkpoints import Checkpoints
from threefold.engine.run.folder import CHECKPOINTS
from threefold.engine.train_state import TrainState, start_or_resume
from threefold.engine.verify.forked_ranks import run_ranks
from threefold.engine.weights.imported_weights import INITIAL
from threefold.findings import FindingsError
from threefold.launch.agent import launch_ranks
from threefold.launch.rank_process import REFUSED
from threefold.plan.plan import Plan

SLUG = "ranks-see-the-same"


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


def start(rank: int, plan_of: Callable[[int], Plan], folder_of: Callable[[int], Path]) -> list[str]:
    """Start a run on this rank, and say what was found."""
    plan, folder = plan_of(rank), folder_of(rank)
    folder.mkdir(exist_ok=True)
    mesh = Mesh(plan.layout, rank)
    kept = Checkpoints(folder / CHECKPOINTS, 2, mesh.checkpoint_group())
    state = TrainState(plan, folder, build(plan, mesh), kept, World(rank, 2, rank, mesh.device, 0))
    try:
        start_or_resume(state, lambda text: None)
    except FindingsError as error:
        return [str(finding) for finding in error.findings]
    finally:
        state.parts.close()
    return []


def run_with_weights(folder: Path, plan: Plan) -> Path:
    (folder / INITIAL).mkdir(parents=True)
    weights = build_model(plan.model, plan.mtp, seed=1).state_dict()
    save_file({name: value.contiguous() for name, value in weights.items()}, str(folder / INITIAL / "a.safetensors"))
    return folder


def test_imported_weights_that_one_rank_does_not_see_end_the_run(tmp_path: Path) -> None:
    """Each rank looked for itself: one began with random weights beside the others, and nothing said so."""
    plan = tiny_plan({"cluster.gpus": 2, "job.data": "synthetic"})
    seen, unseen = run_with_weights(tmp_path / "seen", plan), tmp_path / "unseen"
    assert run_ranks(2, start, lambda rank: plan, lambda rank: seen, limit=60) == [[], []]
    said = run_ranks(2, start, lambda rank: plan, lambda rank: (seen, unseen)[rank], limit=60)
    assert said[0] == said[1]
    assert "rank 1 sees other imported weights than rank 0" in said[0][0]
    assert SLUG in said[0][0]


def test_data_that_differs_between_ranks_ends_the_run(tmp_path: Path) -> None:
    plans = [
        tiny_plan({"cluster.gpus": 2, "job.data": tiny_shard(tmp_path / "one.shard")}),
        tiny_plan({"cluster.gpus": 2, "job.data": tiny_shard(tmp_path / "copy.shard")}),
        tiny_plan({"cluster.gpus": 2, "job.data": "synthetic"}),
    ]
    assert run_ranks(2, start, lambda rank: plans[rank], lambda rank: tmp_path / "alike", limit=60) == [[], []]
    said = run_ranks(2, start, lambda rank: plans[2 * rank], lambda rank: tmp_path / "other", limit=60)
    assert said[0] == said[1]
    assert "rank 1 sees other data than rank 0" in said[0][0]


def test_ranks_share_a_plan_but_for_where_things_lie() -> None:
    plan = tiny_plan({"job.data": "a.shard", "run.cores": "0"})
    assert shared_fields(plan) == shared_fields(tiny_plan({"job.data": "b.shard", "run.cores": "1"}))
    for other in ({"layout.tp": 2}, {"model.num_layers": 2}, {"knobs.recompute": ["moe"]}, {"run.eval_every": 3}):
        assert shared_fields(plan) != shared_fields(tiny_plan(other)), other


# Two ranks, of which one has another plan.
MEET = """
import os, sys
from threefold.engine.dist.join import join
from threefold.findings import FindingsError
from threefold.plan.parse import parse
fields = {"model": "tiny-qwen3-moe", "cluster.gpus": 2, "job.micro_batch": 1 + int(os.environ["RANK"])}
try:
    join(parse(fields).plan)
except FindingsError as error:
    print(error.findings[0], flush=True)
    os._exit(int(sys.argv[1]))
"""


def test_a_rank_with_another_plan_ends_the_run_when_they_meet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "meet.py"
    file.write_text(MEET)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    command: list[Any] = [sys.executable, str(file), str(REFUSED)]
    assert launch_ranks(command, 2, 0, tmp_path, open_store) != 0
    said = "".join(path.read_text() for path in sorted((tmp_path / "logs").glob("rank-*.log")))
    assert "rank 1 sees other fields of the plan than rank 0: job.micro_batch" in said
