"""Runs of the engine with planted faults: each is named with its remedy, and sound runs are left alone."""

import json
import random
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from job_logs import megatron_step
from run_folders import noisy_seconds, run_plan, write_run
from tiny_runs import tiny_plan, tiny_shard

from threefold.cli.main import main
from threefold.diagnose.diagnosis import diagnose
from threefold.diagnose.part import Context
from threefold.diagnose.redact import Redactor
from threefold.diagnose.run_health import judge_run
from threefold.engine.data.loader import _BatchMaker
from threefold.engine.dist.join import World
from threefold.engine.train import train
from threefold.plan.parse import parse
from threefold.plan.plan import Plan
from threefold.profile.readers.run_record import read_run

STEPS = 128


def write(folder: Path, plan: Plan | None = None, count: int = STEPS, **columns: Any) -> Path:
    """A run of 0.1 s a step; `columns` are numbers, or one number a step."""
    plan = plan or run_plan(job_warmup_steps=10)
    path = write_run(folder, plan, noisy_seconds(0.1, count, seed=1))
    lines = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
    for name, values in columns.items():
        for line, value in zip(lines, np.broadcast_to(values, (count,)).tolist(), strict=True):
            line[name.replace("__", "/")] = value
    (path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def at(step: int, value: float, rest: float) -> list[float]:
    return [value if number == step else rest for number in range(1, STEPS + 1)]


# tiny-qwen3-moe has 16 experts, top 4: all tokens at the same experts are a load of 4, and half of the way is 2.5.
@pytest.mark.parametrize(
    ("columns", "rules"),
    [
        ({"router__load_max": 1.4, "router__idle_experts": 0}, []),
        ({"router__load_max": 2.4}, []),
        ({"router__load_max": 3.9, "router__idle_experts": 40}, ["router-collapsed"]),
        ({"router__load_max": [4.0] * 100 + [1.2] * 28}, []),  # it was level again at the end
        ({"router__load_max": [1.2] * 100 + [4.0] * 28}, ["router-collapsed"]),
        ({"router__load_max": 1.5, "router__idle_experts": 1}, ["experts-idle"]),
        ({"router__load_max": 1.5, "router__idle_experts": [1, 0] * 64}, []),
        ({"skipped_steps": 3}, ["steps-skipped"]),
        ({"loss": at(100, 5.0, 2.0)}, ["loss-spikes"]),
        ({"loss": at(127, 5.0, 2.0)}, ["loss-spikes"]),  # in a block that is not full
        ({"grad_norm": at(70, 30.0, 1.0)}, ["gradient-spikes"]),
        ({"data_seconds": 0.001}, []),
        ({"data_seconds": [5.0, 5.0] + [0.001] * 126}, []),  # the queue fills
        ({"data_seconds": 0.05}, ["data-stalls"]),
        ({"data_seconds": at(90, 20.0, 0.0)}, ["data-stalls"]),
    ],
)
def test_planted_faults_are_named(columns: dict[str, Any], rules: list[str], tmp_path: Path) -> None:
    found = judge_run(read_run(write(tmp_path / "run", **columns)))
    assert [one.rule for one in found] == rules
    assert all(one.fix or one.advice for one in found)


def test_a_frozen_router_is_not_told_to_balance(tmp_path: Path) -> None:
    """Adapters leave the router as the checkpoint has it (docs/guide/lora.md): no weight of a loss moves it."""
    plan = run_plan(job_warmup_steps=10, job_lora_rank=8)
    [found] = judge_run(read_run(write(tmp_path / "run", plan, router__load_max=3.9)))
    assert found.rule == "router-collapsed"
    assert not found.fix
    assert "the router frozen" in found.advice


def test_the_share_of_waiting_for_data(tmp_path: Path) -> None:
    """Steps of 0.1 s, each with 0.05 s of waiting: half of the time."""
    [found] = judge_run(read_run(write(tmp_path / "run", data_seconds=0.05)))
    assert found.problem.startswith("50% of the steps' time is waiting for data, in 126 of 126 steps")


def test_chance_leaves_experts_idle(tmp_path: Path) -> None:
    """Two sequences of 2 tokens, 16 experts, top 4: an expert has one token on average, and 37 % of them have none."""
    small = run_plan(job_seq_len=2, job_global_batch=2, job_micro_batch=2, job_warmup_steps=0)
    assert judge_run(read_run(write(tmp_path / "run", small, router__idle_experts=6, router__load_max=3.0))) == []


def test_sound_runs_are_left_alone(tmp_path: Path) -> None:
    """50 runs whose loss falls with noise, whose norm has a tail, and whose routers vary."""
    draw = np.random.default_rng(7)
    for number in range(50):
        step = np.arange(1, STEPS + 1)
        columns = {
            "loss": 2 + 6 * np.exp(-step / draw.uniform(10, 60)) + draw.normal(0, draw.uniform(0.005, 0.05), STEPS),
            "grad_norm": draw.lognormal(0, 0.4, STEPS),
            "router__load_max": draw.uniform(1.1, 2.0, STEPS),
            "router__idle_experts": draw.poisson(0.1, STEPS),
            "data_seconds": draw.exponential(0.002, STEPS),
        }
        assert judge_run(read_run(write(tmp_path / str(number), **columns))) == []


def test_the_verbs_show_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write(tmp_path / "run", router__load_max=4.0)
    (folder / "loads.json").write_text(json.dumps([[10] * 16, [160] + [0] * 15]))
    slow = {"rank": 3, "host": "node17", "stage": 0, "own_seconds": 0.6, "median_seconds": 0.5, "error_seconds": 0.01}
    (folder / "effects.json").write_text(json.dumps({"own_times": {"slow": [slow, {"rank": "x"}, 3]}}))
    assert main(["diagnose", str(folder)]) == 0
    text = capsys.readouterr().out
    assert "warning[router-collapsed] MoE layer 1: the busiest expert gets 4.0 times the mean" in text
    assert "suggestion: job.aux_loss=0.01" in text
    assert "rank 3 on host-1: 0.6 s of its own a step, 20% (+- 2%) above the median" in text
    assert "node17" not in text
    page = tmp_path / "report.html"
    assert main(["report", str(folder), "--out", str(page)]) == 0
    assert "router-collapsed" in page.read_text(encoding="utf-8")


def test_a_folder_with_logs_of_ranks(tmp_path: Path) -> None:
    folder = write(tmp_path / "run")
    (folder / "logs").mkdir()
    (folder / "logs" / "rank-1.log").write_text("OSError: [Errno 28] No space left on device\n")
    (tmp_path / "other.log").write_text("RuntimeError: DeepEP error: timeout (dispatch CPU)\n")
    (folder / "logs" / "rank-2.log").symlink_to(tmp_path / "other.log")  # out of the folder
    found = diagnose([folder], Context(redact=Redactor()))
    assert [part.kind for part in found.parts] == ["run folder", "log"]
    assert found.death == "disk-full"
    assert "deepep" not in json.dumps(found.to_json())


def test_a_run_has_the_plan_of_its_logs(tmp_path: Path) -> None:
    """Steps of a log, given before the folder, are held against the plan in the folder."""
    fields = {"model": "qwen3-30b-a3b", "cluster.chip": "h100", "cluster.gpus": 16, "layout.pp": 2, "layout.ep": 8}
    plan = parse({**fields, "job.global_batch": 256}).plan
    assert plan is not None
    folder, log = write(tmp_path / "run", plan), tmp_path / "a.log"
    rng = random.Random(1)
    log.write_text("\n".join(megatron_step(rng, step, 99, seconds=90.0, tflops=15.0) for step in range(1, 60)) + "\n")
    found = diagnose([log, folder], Context(redact=Redactor()))
    [logs] = [part for part in found.parts if part.kind == "log"]
    text = "\n".join(logs.lines)
    assert "plan, from the run's folder: qwen3-30b-a3b on 16 x h100" in text
    assert "15 of about" in text


def test_a_starved_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A real run whose batches take 0.2 s to make, more than a step of this model takes."""
    make = _BatchMaker.make

    def slow(self: _BatchMaker, *index: int) -> Any:
        time.sleep(0.2)
        return make(self, *index)

    monkeypatch.setattr(_BatchMaker, "make", slow)
    plan = tiny_plan({"job.data": tiny_shard(tmp_path / "counting.tok"), "job.steps": 12, "cluster.gpus": 1})
    train(plan, tmp_path / "run", lambda text: None, world=World(0, 1, 0, torch.device("cpu"), 0))
    found = {one.rule: one for one in judge_run(read_run(tmp_path / "run"))}
    assert "data-stalls" in found
