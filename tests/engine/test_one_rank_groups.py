"""Every collective of a plan on one device: real groups of one rank, on gloo here and on NCCL where there is a GPU.

Summing over one rank, gathering from it and sending to it change nothing, so the run must equal the one without groups.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tiny_models import spec_of
from tiny_runs import tiny_plan

from threefold.engine.build import build, options_of
from threefold.engine.dist import join as launch
from threefold.engine.dist.collectives import CollectiveCall, observe_collectives
from threefold.engine.dist.mesh import Mesh
from threefold.engine.step import to_device, train_step
from threefold.engine.verify.forked_ranks import run_ranks
from threefold.engine.verify.oracle import synthetic_batch

CASES = {
    "ring": ("qwen3_moe", {"knobs.cp_comm": "p2p"}),
    "gather": ("gpt_oss", {"knobs.cp_comm": "all_gather"}),
    "trade": ("deepseek_v3", {"knobs.cp_comm": "a2a", "job.mtp": 1}),
    "delta": ("qwen3_next", {"knobs.cp_comm": "a2a"}),
    "fsdp": ("mixtral", {"knobs.data_parallel": "fsdp"}),
    "packed": ("qwen3_moe", {"job.packing": True}),
}


Seen = set[tuple[str, str]]


def one_run(case: str, grouped: bool, device: str, dtype: Any) -> tuple[list[float], dict[str, Any], Seen]:
    """Losses, weights after two steps, and which collectives ran."""
    family, fields = CASES[case]
    plan = replace(tiny_plan({"job.seq_len": 32, "job.global_batch": 2, "job.z_loss": 0.01, **fields}))
    plan = replace(plan, model=spec_of(family))
    mesh = Mesh(plan.layout, device=torch.device(device), with_single_rank_groups=grouped)
    options = replace(options_of(plan), expert_backend="loop")
    parts = build(plan, mesh, dtype=dtype, options=options, with_data=False)
    seen: set[tuple[str, str]] = set()

    def see(call: CollectiveCall) -> None:
        seen.add((call.group.name, call.operation))

    with observe_collectives(see):
        losses = []
        for step in range(2):
            batches = [to_device(synthetic_batch(plan, step, m, 0), mesh.device) for m in range(plan.num_microbatches)]
            losses.append(train_step(parts, batches, 1e-3, plan.job).loss)
    parts.data.finish_param_sync()
    return losses, {name: memory.detach().flatten().cpu() for name, _, memory, _ in parts.data.local_tensors()}, seen


def compare_runs(rank: int, case: str, device: str) -> set[tuple[str, str]]:
    dtype = torch.float64 if device == "cpu" else torch.float32
    plain, weights, nothing = one_run(case, False, device, dtype)
    grouped, same, seen = one_run(case, True, device, dtype)
    assert not nothing
    # fp64 on the CPU; fp32 on the GPU, where the order of atomic sums may differ.
    tolerance = 1e-12 if device == "cpu" else 1e-4
    assert grouped == pytest.approx(plain, rel=tolerance)
    assert weights.keys() == same.keys()
    for name, weight in weights.items():
        torch.testing.assert_close(same[name], weight, rtol=tolerance, atol=tolerance)
    return seen


def on_gloo(rank: int, case: str) -> set[tuple[str, str]]:
    return compare_runs(rank, case, "cpu")


@pytest.mark.parametrize("case", CASES)
def test_groups_of_one_change_nothing(case: str) -> None:
    (seen,) = run_ranks(1, on_gloo, case)
    expected = {("tp", "all_gather"), ("tp", "reduce_scatter"), ("ep", "all_to_all")}
    assert expected <= seen


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("case", CASES)
def test_nccl_groups_of_one_change_nothing(case: str, tmp_path: Path) -> None:
    store = dist.FileStore(str(tmp_path / "store"), 1)
    torch.cuda.set_device(0)
    dist.init_process_group("cpu:gloo,cuda:nccl", store=store, rank=0, world_size=1)  # as `join` does
    try:
        seen = compare_runs(0, case, "cuda")
    finally:
        dist.destroy_process_group()
    assert ("tp", "all_gather") in seen


def test_ranks_join_bound_to_no_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bound to one, torch splits each group off the default one with a call that waits for every rank of the world:
    ranks that make groups by their members alone, as a mesh does, would wait for ever on NCCL."""
    given: dict[str, Any] = {}
    chosen: list[Any] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    monkeypatch.setattr(launch, "_store", lambda *place: dist.HashStore())
    monkeypatch.setattr(dist, "init_process_group", lambda backend, **rest: given.update(rest, backend=backend))
    monkeypatch.setattr(launch, "check_alike_on_ranks", lambda *what: None)  # there is no other rank to ask
    seat = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "MASTER_ADDR": "here", "MASTER_PORT": "1"}
    plan = tiny_plan({"cluster.chip": "h100", "cluster.gpus": 2, "job.global_batch": 2})
    world = launch.join(plan, environ={**seat, "LOCAL_WORLD_SIZE": "2"})
    assert (given["backend"], given["rank"], chosen) == ("cpu:gloo,cuda:nccl", 1, [world.device])
    assert given.get("device_id") is None
