"""Whatever reads a whole model while updates of it are pending sees updated weights, though it knows nothing of them;
and where parameters do not wait by themselves, each of these readers sees old ones."""

from collections.abc import Callable, Mapping
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from test_pending_updates import CPU, KINDS, parts_of
from torch import Tensor

from threefold.engine.build import Parts
from threefold.engine.data_parallel import zero1
from threefold.engine.data_parallel.single_rank import SingleRank
from threefold.engine.data_parallel.zero1 import Zero1
from threefold.engine.dist.join import World
from threefold.engine.generate.generate import CachedDecoder
from threefold.engine.lora import lora_settings
from threefold.engine.optim import pending_updates
from threefold.engine.optim.pending_updates import PendingUpdates
from threefold.engine.run.checkpoints import Checkpoints
from threefold.engine.run.dcp import CheckpointShard
from threefold.engine.step import evaluate_batches, train_step
from threefold.engine.train_state import TrainState
from threefold.engine.verify.oracle import synthetic_batch
from threefold.engine.weights.peft import MergedTensors
from threefold.engine.weights.write_hf import write_hf
from threefold.plan.plan import Plan

Values = Mapping[str, Tensor]


def evaluate(parts: Parts, plan: Plan, folder: Path) -> Values:
    batches = [synthetic_batch(plan, 5, m, 0) for m in range(plan.num_microbatches)]
    return {"loss": torch.tensor(evaluate_batches(parts, batches, 1))}


def sample(parts: Parts, plan: Plan, folder: Path) -> Values:
    return {"logits": CachedDecoder(parts.model.eval()).prefill([[1, 2, 3], [4]])}


def save(parts: Parts, plan: Plan, folder: Path) -> Values:
    state = TrainState(plan, folder, parts, Checkpoints(folder, 1), World(0, 1, 0, CPU, 0))
    shards = {name: shard for name, shard in state.tensors().items() if isinstance(shard, CheckpointShard)}
    return {name: shard.snapshot().memory for name, shard in shards.items()}


def export(parts: Parts, plan: Plan, folder: Path) -> Values:
    write_hf(parts.model, parts.model.spec, folder)
    return load_file(folder / "model.safetensors")


def merge(parts: Parts, plan: Plan, folder: Path) -> Values:
    settings = lora_settings(plan.job)
    assert settings is not None
    return dict(MergedTensors(parts.model.state_dict(), settings))


def copy(parts: Parts, plan: Plan, folder: Path) -> Values:
    return dict(deepcopy(parts.model).named_parameters())


READERS: dict[str, tuple[Callable[[Parts, Plan, Path], Values], tuple[str, ...]]] = {
    "evaluation": (evaluate, ("one microbatch", "tied embedding")),
    "sampling": (sample, ("one microbatch", "tied embedding")),
    "checkpoint": (save, ("one microbatch", "sums in fp32", "part of the states")),
    "export": (export, ("one microbatch", "tied embedding")),
    "merge of adapters": (merge, ("adapters",)),
    "copy": (copy, ("sums in fp32",)),
}


def read(name: str, kind: str, offload: float, folder: Path) -> Values:
    """What a reader finds behind a step, with states on the host or not."""
    plan = KINDS[kind][0]
    parts = parts_of(plan, offload)
    train_step(parts, [synthetic_batch(plan, 0, m, 0) for m in range(plan.num_microbatches)], 1e-2, plan.job)
    folder.mkdir()
    return {key: value.clone() for key, value in READERS[name][0](parts, plan, folder).items()}


def nothing(*args: Any) -> None:
    """In the place of an explicit wait."""


@pytest.mark.parametrize(("name", "kind"), [(name, kind) for name, (_, kinds) in READERS.items() for kind in kinds])
def test_a_reader_need_not_know_of_pending_updates(
    name: str, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = read(name, kind, 0.0, tmp_path / "device")
    for module in (SingleRank, Zero1):
        monkeypatch.setattr(module, "finish_param_sync", nothing)
    found = read(name, kind, 1.0, tmp_path / "host")
    assert wanted
    assert found.keys() == wanted.keys()
    assert [key for key in wanted if not torch.equal(found[key], wanted[key])] == []
    for module in (pending_updates, zero1):
        monkeypatch.setattr(module, "mark_pending", nothing)
    monkeypatch.setattr(PendingUpdates, "wait", nothing)
    old = read(name, kind, 1.0, tmp_path / "unmarked")
    assert [key for key in wanted if not torch.equal(old[key], wanted[key])]
