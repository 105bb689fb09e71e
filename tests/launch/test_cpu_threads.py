"""Tests of the number of CPU threads: ranks times threads within the cores, and few for a small model."""

import os
from pathlib import Path

import pytest
from tiny_runs import tiny_plan

from threefold.launch import cpu_cores as cpu_threads
from threefold.launch.cpu_cores import choose_threads, num_cores, sleep_while_waiting
from threefold.plan.parse import parse

LARGE = {"model": "qwen3-30b-a3b", "cluster.chip": "cpu", "job.seq_len": 4096}  # 34 GFLOPs in a projection


@pytest.fixture(autouse=True)
def sixteen_cores(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(16)))
    monkeypatch.setattr(cpu_threads, "CGROUP", tmp_path / "cpu.max")


@pytest.mark.parametrize(("ranks", "threads"), [(1, 16), (3, 5), (16, 1), (64, 1)])
def test_ranks_share_the_cores(ranks: int, threads: int) -> None:
    plan = parse(LARGE).plan
    assert plan is not None
    found, why = choose_threads(plan, ranks, None, on_gpu=False)
    assert found == threads
    assert why.startswith("16 cores")


def test_a_small_model_gets_one_thread() -> None:
    assert choose_threads(tiny_plan({}), 1, None, on_gpu=False) == (1, "16 cores, and GEMMs too small for more")


def test_a_user_who_chose_is_obeyed(monkeypatch: pytest.MonkeyPatch) -> None:
    assert choose_threads(tiny_plan({}), 4, 7, on_gpu=False)[0] == 7
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert choose_threads(tiny_plan({}), 4, None, on_gpu=False) == (3, "as OMP_NUM_THREADS says")


@pytest.mark.parametrize(("quota", "cores"), [("250000 100000", 2), ("50000 100000", 1), ("max 100000", 16)])
def test_the_quota_of_a_container_counts(quota: str, cores: int, tmp_path: Path) -> None:
    (tmp_path / "cpu.max").write_text(quota + "\n")
    assert num_cores() == cores


def test_threads_sleep_while_they_wait() -> None:
    environ = {"OMP_WAIT_POLICY": "ACTIVE"}
    sleep_while_waiting(environ)
    assert environ == {"OMP_WAIT_POLICY": "ACTIVE"}
    environ = {}
    sleep_while_waiting(environ)
    assert environ == {"OMP_WAIT_POLICY": "PASSIVE"}
