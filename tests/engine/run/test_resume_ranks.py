"""A run saved under any layout goes on under any other, with the engine's own checkpoints: every pair bit for bit."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from plans import build as plan_of
from random_layouts import same_bits
from safetensors.torch import load_file
from tiny_models import config_of
from torch import Tensor

from threefold.engine.build import build
from threefold.engine.dist.join import World
from threefold.engine.dist.mesh import Mesh
from threefold.engine.run.checkpoints import Checkpoints, read_checkpoint
from threefold.engine.run.folder import CHECKPOINTS, open_run, record_plan
from threefold.engine.step import train_step
from threefold.engine.train_state import TrainState
from threefold.engine.verify.forked_ranks import run_ranks
from threefold.engine.weights.convert import export_hf
from threefold.plan.plan import Plan
from threefold.rules.all import check, errors
from threefold.rules.stacks import ENGINE_LIMITS

# Latents, shared and routed experts with a moving bias, an MTP depth, and an embedding that two stages hold.
MODEL = {
    **config_of("deepseek_v3"),
    "num_hidden_layers": 3,
    "num_nextn_predict_layers": 1,
    "tie_word_embeddings": True,
}
LAYOUTS: list[dict[str, Any]] = [
    {"cluster.gpus": 1},
    {"cluster.gpus": 2},
    {"cluster.gpus": 2, "layout.tp": 2},
    {"cluster.gpus": 2, "layout.cp": 2, "layout.ep": 2},
    {"cluster.gpus": 2, "layout.pp": 2, "layout.vpp": 2},
    {"cluster.gpus": 4, "layout.ep": 2, "layout.etp": 2},
    {"cluster.gpus": 4, "layout.tp": 2, "layout.ep": 4},
    {"cluster.gpus": 4, "layout.tp": 2, "layout.ep": 2, "knobs.data_parallel": "fsdp"},
    {"cluster.gpus": 4, "layout.replicate": 2, "knobs.data_parallel": "hsdp"},
    {
        "cluster.gpus": 4,
        "layout.pp": 2,
        "layout.vpp": 2,
        "layout.tp": 2,
        "layout.ep": 2,
        "layout.schedule": "dualpipev",
    },
]
STEP = "step-00000001"


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "config.json"
    path.write_text(json.dumps(MODEL), encoding="utf-8")
    return path


def tiny(config: Path, layout: dict[str, Any], precision: str) -> Plan:
    fields = {
        "model": f"hf:{config}",
        "target": "threefold",
        "cluster.chip": "cpu",
        "job.seq_len": 16,
        "job.global_batch": 4,
        "job.data": "synthetic",
        "job.bias_rate": 0.01,
        "knobs.precision": precision,
        **layout,
    }
    plan = plan_of(fields)
    assert not [finding for finding in errors(check(plan)) if finding.rule not in ENGINE_LIMITS]
    return plan


def opened(rank: int, plan: Plan, folder: Path, dtype: Any = None) -> TrainState:
    mesh = Mesh(plan.layout, rank)
    kept = Checkpoints(folder / CHECKPOINTS, 2, mesh.checkpoint_group())
    world = World(rank, plan.layout.gpus, rank, mesh.device, 0)
    return TrainState(plan, folder, build(plan, mesh, dtype), kept, world)


def load(trainer: TrainState, kept: Checkpoints) -> None:
    wanted = trainer.tensors_to_load()
    facts = kept.load_latest(print, wanted)
    assert facts is not None
    trainer.restore(wanted, facts)


def go_on(trainer: TrainState, steps: int, lr: float = 1e-3) -> None:
    loader, plan = trainer.parts.loader, trainer.plan
    assert loader is not None
    for _ in range(steps):
        batches = [loader.batch(trainer.step, m) for m in range(plan.num_microbatches)]
        assert train_step(trainer.parts, batches, lr, plan.job).applied
        trainer.step += 1
    loader.close()


# Every pair


def saves(rank: int, plan: Plan, folder: Path, lr: float) -> None:
    trainer = opened(rank, plan, folder)
    go_on(trainer, 1, lr)
    trainer.save(wait=True)


def loads_and_saves(rank: int, plan: Plan, folders: list[Path], out: list[Path]) -> None:
    """One model, filled from each checkpoint in turn: what a load leaves out is there from the one before, and seen."""
    trainer = opened(rank, plan, out[0])
    for folder, again in zip(folders, out, strict=True):
        load(trainer, Checkpoints(folder / CHECKPOINTS, 2, trainer.checkpoints.group))
        Checkpoints(again / CHECKPOINTS, 2, trainer.checkpoints.group).save(
            trainer.step, trainer.tensors(), trainer.facts(), wait=True
        )


def full_tensors(folder: Path) -> dict[str, Tensor]:
    return read_checkpoint(folder / CHECKPOINTS / STEP)[0]


def pairs(config: Path, root: Path, chosen: list[int]) -> Iterator[tuple[dict[str, Tensor], dict[str, Tensor]]]:
    """In bf16: weights, and master weights of fp32, are kept differently by ZeRO-1 and FSDP."""
    plans = {n: tiny(config, LAYOUTS[n], "bf16") for n in chosen}
    for n, plan in plans.items():
        run_ranks(plan.layout.gpus, saves, plan, root / f"{n}", 1e-3 * (n + 1))
    saved = {n: full_tensors(root / f"{n}") for n in chosen}
    for n, plan in plans.items():
        again = [root / f"{m}-{n}" for m in chosen]
        run_ranks(plan.layout.gpus, loads_and_saves, plan, [root / f"{m}" for m in chosen], again)
        yield from ((saved[m], full_tensors(root / f"{m}-{n}")) for m in chosen)


def check_pairs(config: Path, root: Path, chosen: list[int]) -> None:
    count = 0
    for before, after in pairs(config, root, chosen):
        assert before.keys() == after.keys()
        assert [name for name in before if not same_bits(before[name], after[name])] == []
        count += 1
    assert count == len(chosen) ** 2
    for kind in ("model.layers.1.ffn.experts.down", "optimizer.master.embed.weight", "optimizer.second.embed.weight"):
        assert kind in before
    bias = before["model.layers.1.ffn.router.balance_bias"]
    assert bias.any()


def test_a_few_pairs_bit_for_bit(config: Path, tmp_path: Path) -> None:
    check_pairs(config, tmp_path, [0, 7])


@pytest.mark.slow
@pytest.mark.timeout(6000)
def test_every_pair_bit_for_bit(config: Path, tmp_path: Path) -> None:
    assert len(LAYOUTS) == 10
    check_pairs(config, tmp_path, list(range(10)))


# From layout to layout


def goes_on(rank: int, plan: Plan, folder: Path, steps: int, fresh: bool) -> None:
    trainer = opened(rank, plan, folder, torch.float64)
    if not fresh:
        load(trainer, trainer.checkpoints)
    go_on(trainer, steps)
    trainer.save(wait=True)


def check_chain(config: Path, root: Path, chosen: list[int]) -> None:
    """A step under each layout, every one resumed from the one before, against as many steps on one rank."""
    for n, number in enumerate(chosen):
        plan = tiny(config, LAYOUTS[number], "fp32")
        run_ranks(plan.layout.gpus, goes_on, plan, root / "chain", 1, n == 0)
    run_ranks(1, goes_on, tiny(config, LAYOUTS[0], "fp32"), root / "one", len(chosen), True)
    last = f"step-{len(chosen):08d}"
    found, wanted = (read_checkpoint(root / run / CHECKPOINTS / last) for run in ("chain", "one"))
    assert found[1] == wanted[1]
    assert found[0].keys() == wanted[0].keys()
    for name, value in wanted[0].items():
        difference = (found[0][name].double() - value.double()).abs().max()
        # fp64; AdamW makes about 1e-12 a step of sums in another order.
        assert difference <= 1e-10 * max(1e-3, float(value.double().abs().max())), name


def test_a_run_goes_on_under_another_layout(config: Path, tmp_path: Path) -> None:
    check_chain(config, tmp_path, [3, 6, 4])


@pytest.mark.slow
def test_a_run_goes_on_under_every_layout(config: Path, tmp_path: Path) -> None:
    check_chain(config, tmp_path, [9, 8, 7, 6, 5, 4, 3, 2, 1, 0, 7, 4, 8])


# Hugging Face


def test_export_of_four_ranks_is_that_of_one(config: Path, tmp_path: Path) -> None:
    one, four = (tiny(config, LAYOUTS[n], "bf16") for n in (0, 6))
    for name, plan in (("one", one), ("four", four)):
        open_run(tmp_path / name, plan)
        record_plan(tmp_path / name, plan)
    run_ranks(4, saves, four, tmp_path / "four", 1e-3)
    run_ranks(1, loads_and_saves, one, [tmp_path / "four"], [tmp_path / "one"])
    for name in ("one", "four"):
        list(export_hf(tmp_path / name, tmp_path / f"{name}-hf"))
    left, right = (load_file(next((tmp_path / f"{name}-hf").glob("*.safetensors"))) for name in ("one", "four"))
    assert left.keys() == right.keys()
    assert all(same_bits(left[name], right[name]) for name in left)
    assert len(list((tmp_path / "four" / CHECKPOINTS / STEP).glob("*.distcp"))) == 4
