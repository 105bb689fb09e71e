"""A checkpoint of a layout that is drawn at random goes to one rank and back, bit for bit."""

import os
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from drawn_layouts import draw_layout, resolve
from layout_runs import stand_ins
from random_layouts import same_bits
from torch import Tensor

from threefold.engine.build import build
from threefold.engine.dist.join import World
from threefold.engine.dist.mesh import Mesh
from threefold.engine.run.checkpoints import Checkpoints, read_checkpoint
from threefold.engine.step import train_step
from threefold.engine.train_state import TrainState
from threefold.engine.verify.forked_ranks import run_ranks
from threefold.layout.degrees import Layout
from threefold.plan.plan import Knobs, Plan

SEED = os.environ.get("THREEFOLD_SEED", str(time.time_ns() % 1_000_000))
LIMIT_SECONDS = 120.0  # of a run that takes a second


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


def opened(rank: int, plan: Plan, folder: Path) -> TrainState:
    mesh = Mesh(plan.layout, rank)
    world = World(rank, plan.layout.gpus, rank, mesh.device, 0)
    return TrainState(plan, folder, build(plan, mesh), Checkpoints(folder, 2, mesh.checkpoint_group()), world)


def train_and_save(rank: int, plan: Plan, folder: Path) -> None:
    state = opened(rank, plan, folder)
    loader = state.parts.loader
    assert loader is not None
    batches = [loader.batch(0, m) for m in range(plan.num_microbatches)]
    train_step(state.parts, batches, 1e-3, plan.job)
    state.step += 1
    loader.close()
    state.save(wait=True)


def load_and_save(rank: int, plan: Plan, folder: Path, out: Path) -> None:
    state = opened(rank, plan, out)
    wanted = state.tensors_to_load()
    facts = Checkpoints(folder, 2, state.checkpoints.group).load_latest(print, wanted)
    assert facts is not None
    state.restore(wanted, facts)
    state.save(wait=True)


def on_one_rank(plan: Plan) -> Plan:
    """The same model and job, with the knobs that say which tensors a checkpoint has."""
    named = ("precision", "optimizer_dtype", "master_weights")
    return replace(plan, layout=Layout(), knobs=Knobs(**{name: getattr(plan.knobs, name) for name in named}))


def full_tensors(folder: Path) -> dict[str, Tensor]:
    return read_checkpoint(folder / "step-00000001")[0]


def check_there_and_back(seed: str, root: Path) -> bool:
    """Whether the draw is accepted; fails where a checkpoint changes on its way."""
    plan = resolve(draw_layout(seed)).plan
    if plan is None:
        return False
    there, one, back = root / "there", root / "one", root / "back"
    with stand_ins(plan):
        run_ranks(plan.layout.gpus, train_and_save, plan, there, limit=LIMIT_SECONDS)
        run_ranks(1, load_and_save, on_one_rank(plan), there, one, limit=LIMIT_SECONDS)
        run_ranks(plan.layout.gpus, load_and_save, plan, one, back, limit=LIMIT_SECONDS)
    saved = full_tensors(there)
    assert any(name.startswith("optimizer.") for name in saved)
    for folder in (one, back):
        found = full_tensors(folder)
        assert found.keys() == saved.keys(), (seed, found.keys() ^ saved.keys())
        assert [name for name in saved if not same_bits(saved[name], found[name])] == [], seed
    return True


@pytest.mark.parametrize("number", [17, 21])
def test_drawn_checkpoint_goes_to_one_rank_and_back(number: int, tmp_path: Path) -> None:
    assert check_there_and_back(f"default suite/{number}", tmp_path)


@pytest.mark.slow
def test_drawn_checkpoints_go_to_one_rank_and_back(tmp_path: Path) -> None:
    accepted = [check_there_and_back(f"{SEED}/{number}", tmp_path / str(number)) for number in range(40)]
    assert sum(accepted) >= 20
