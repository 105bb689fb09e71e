"""The switch by which ranks of a test share a GPU, and what the comparison of such ranks notices. Runs anywhere."""

import os
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from shared_gpu_cases import CASES, case_plan, judge, recipe_layouts
from shared_gpu_faults import run_fields
from tiny_runs import tiny_plan

from threefold.engine.dist import join as launch
from threefold.engine.dist.join import SHARED_GPU
from threefold.engine.verify.compare import Comparison
from threefold.findings import FindingsError
from threefold.rules.all import errors, promoted
from threefold.rules.all import judge as judge_plan

SEAT = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "3", "LOCAL_WORLD_SIZE": "4", "MASTER_ADDR": "here"}
FOUND = Comparison(
    loss=0.0,
    norm=0.0,
    gradient=0.0,
    weight=0.0,
    state=0.0,
    bias=0.0,
    worst="embed.weight",
    near_ties=0,
    num_parameters=1,
    steps=((1.0, 1.0),),
    vanishing=(),
    idle=(),
    problems=(),
)


@pytest.fixture
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """A machine that shows two GPUs; returns the devices that are chosen."""
    chosen: list[Any] = []
    monkeypatch.setattr(os, "environ", dict(os.environ))  # whatever a rank sets is gone behind the test
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    monkeypatch.setattr(launch, "_store", lambda *place: dist.HashStore())
    monkeypatch.setattr(dist, "init_process_group", lambda backend, **rest: None)
    monkeypatch.setattr(launch, "check_alike_on_ranks", lambda *what: None)  # there is no other rank to ask
    return chosen


def test_a_rank_has_a_gpu_of_its_own_unless_a_test_says_otherwise(two_gpus: list[Any]) -> None:
    plan = tiny_plan({"cluster.chip": "h200", "cluster.gpus": 4})
    seat = {**SEAT, "MASTER_PORT": "1"}
    with pytest.raises(FindingsError, match="local rank 3 has no GPU of its own"):
        launch.join(plan, environ=seat)
    assert launch.num_devices(plan) == 2
    assert "NCCL_HOSTID" not in os.environ
    launch.join(plan, environ={**seat, SHARED_GPU: "1"})
    assert two_gpus == [torch.device("cuda", 0)]
    assert os.environ["NCCL_HOSTID"].endswith("-3")
    assert os.environ["NCCL_SOCKET_IFNAME"] == "lo"
    os.environ[SHARED_GPU] = "1"
    assert launch.num_devices(plan) is None


@pytest.mark.parametrize(
    ("precision", "change", "kind"),
    [
        ("fp32", {}, "equal"),
        ("fp32", {"gradient": 1e-2}, "DIFFERENT"),
        ("fp32", {"loss": 1e-4}, "DIFFERENT"),
        ("fp32", {"state": 1e-1}, "DIFFERENT"),
        ("fp32", {"gradient": 1e-2, "near_ties": 1}, "tied"),
        ("fp32", {"problems": ("nothing traveled along tp",), "near_ties": 1}, "DIFFERENT"),
        ("bf16", {"gradient": 0.3}, "near"),
        ("bf16", {"loss": 1e-2}, "DIFFERENT"),
        ("bf16", {"norm": 0.1}, "DIFFERENT"),
        ("bf16", {"problems": ("nothing traveled along tp",)}, "DIFFERENT"),
    ],
)
def test_what_counts_as_equal(precision: str, change: dict[str, Any], kind: str) -> None:
    assert judge(replace(FOUND, **change), precision)[0] == kind


def test_cases_are_plans_that_the_rules_accept_on_a_gpu() -> None:
    for ranks, cases in CASES.items():
        for case in cases.values():
            plan = case_plan(case, "bf16", "h200")
            assert plan.layout.gpus == ranks
            assert [found.rule for found in errors(promoted(judge_plan(plan)))] == [], case.name
    disturbed = tiny_plan(run_fields("h200"))
    assert [found.rule for found in errors(promoted(judge_plan(disturbed)))] == []


def test_every_axis_of_the_recipes_is_started() -> None:
    layouts = recipe_layouts(4)
    assert all(layout.fits_ranks and layout.gpus == 4 for layout in layouts)
    for axis in ("tp", "cp", "pp", "dp", "ep", "etp", "edp"):
        assert any(layout.degree(axis) > 1 for layout in layouts), axis
