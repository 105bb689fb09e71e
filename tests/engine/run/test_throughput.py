"""Tests of the speed that a run reports: padding apart, FLOPs without it, MFU with its peak, memory of all ranks."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_runs import tiny_plan

from threefold.engine import throughput as module
from threefold.engine.batch import Batch
from threefold.engine.data.loader import Loader
from threefold.engine.data.shard_writer import ShardWriter
from threefold.engine.dist.mesh import Mesh
from threefold.engine.run.progress_display import ExperimentTrackers, Progress
from threefold.engine.throughput import StepWork, Throughput, named_peak
from threefold.engine.train import train
from threefold.engine.verify.forked_ranks import run_ranks
from threefold.layout.degrees import Layout
from threefold.plan.plan import Plan
from threefold.spec.flops import flops_per_token

LENGTHS = (10, 20, 5, 29)  # tokens of four documents, each alone in a sequence of 32


@pytest.fixture
def four_documents(tmp_path: Path) -> dict[str, Any]:
    with ShardWriter(tmp_path / "four.bin", 512, "bytes") as writer:
        for length in LENGTHS:
            writer.add(list(range(length)), [0] + [1] * (length - 1))
    return {"job.data": str(tmp_path / "four.bin"), "job.task": "sft", "job.steps": 1}


@pytest.mark.parametrize(("dynamic", "computed"), [(False, 4 * 32), (True, 4 * 32 - 3 * 4)])
def test_padding_is_shown_apart_and_makes_no_flops(
    four_documents: dict[str, Any], dynamic: bool, computed: int, tmp_path: Path
) -> None:
    """With dynamic lengths one microbatch of four sequences has the length of the longest, 29."""
    plan = tiny_plan({**four_documents, "job.micro_batch": 4, "job.dynamic_length": dynamic})
    values = train(plan, tmp_path / "run", lambda text: None).last
    seconds = values["seconds"]
    assert values["tokens_per_second"] * seconds == pytest.approx(computed)
    assert values["useful_tokens_per_second"] * seconds == pytest.approx(sum(LENGTHS))
    flops = sum(length * flops_per_token(plan.model, length, plan.mtp) for length in LENGTHS)
    assert values["tflops"] * seconds * 1e12 == pytest.approx(flops)
    assert values["tflops_per_gpu"] == values["tflops"]
    line = json.loads((tmp_path / "run" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()[0])
    assert line["useful_tokens_per_second"] == values["useful_tokens_per_second"]


def test_a_cpu_has_no_mfu(four_documents: dict[str, Any], tmp_path: Path) -> None:
    values = train(tiny_plan(four_documents), tmp_path, lambda text: None).last
    assert not {"mfu", "mfu_peak"} & values.keys()
    assert named_peak(tiny_plan({})) == (None, None)


@pytest.mark.parametrize(("chip", "precision", "name", "tflops"), [
    ("h100", "bf16", "h100 bf16 dense", 989.4),
    ("h100", "fp8-blockwise", "h100 fp8 dense", 1978.9),
    ("h100", "fp16", "h100 bf16 dense", 989.4),
    ("a100", "fp8-blockwise", "a100 bf16 dense", 312.0),
])  # fmt: skip
def test_mfu_names_the_dense_peak_of_the_precision(chip: str, precision: str, name: str, tflops: float) -> None:
    """The peaks are those of NVIDIA's datasheets, without sparsity; a format that a chip lacks is emulated in bf16."""
    plan = tiny_plan({"cluster.chip": chip, "cluster.gpus": 2, "knobs.precision": precision})
    speed = Throughput(plan, Mesh(Layout(), device=torch.device("cuda")))
    values = speed.metrics(StepWork(100, 80, 2e15, 5), seconds=4.0)
    assert values["mfu_peak"] == name
    assert values["tflops"] == 500
    assert values["tflops_per_gpu"] == 250
    assert values["mfu"] == pytest.approx(250 / tflops)


def work_of_rank(rank: int, plan: Plan) -> StepWork:
    """Rank r has r + 1 sequences without padding and says that it used 1000 * (r + 1) bytes."""
    module._peak_memory_bytes = lambda device: 1000 * (rank + 1)
    tokens = torch.zeros(2, 32, dtype=torch.long)
    speed = Throughput(plan, Mesh(plan.layout, rank))
    return speed.count_work([Batch(tokens, tokens, lengths=(32, 32 if speed.mesh.coordinate("dp") else 0))])


def test_ranks_add_their_tokens_and_report_the_fullest() -> None:
    """Two data-parallel ranks, each over two tensor-parallel ranks, which have the same tokens."""
    plan = tiny_plan({"cluster.gpus": 4, "layout.tp": 2})
    found = run_ranks(4, work_of_rank, plan)
    each = flops_per_token(plan.model, 32, plan.mtp, tp=2)
    assert found == [StepWork(128, 96, 96 * each, 4000)] * 4


def test_the_loader_says_what_is_padding(four_documents: dict[str, Any]) -> None:
    job = tiny_plan({**four_documents, "job.micro_batch": 4}).job
    with Loader(job, 512, prefetch=0) as loader:
        assert sorted(loader.batch(0).lengths or ()) == sorted(LENGTHS)


def test_the_terminal_shows_useful_tokens_and_mfu(capsys: pytest.CaptureFixture[str]) -> None:
    values = {"loss": 1.0, "tokens_per_second": 2000.0, "useful_tokens_per_second": 500.0, "tflops_per_gpu": 250.0}
    values |= {"memory_bytes": 2**30, "mfu": 0.2527, "mfu_peak": "h100 bf16 dense"}
    values |= {"grad_norm": 1.2345, "lr": 0.00015}
    Progress(4).show(1, values)
    said = capsys.readouterr().err
    assert said.startswith("step 1/4  loss 1.0000  grad norm 1.23  lr 0.00015  ")
    assert "2,000 tokens/s (500 useful)  250 TFLOP/s a rank  MFU 25.3% of h100 bf16 dense" in said
    Progress(4).show(4, {**values, "useful_tokens_per_second": 2000.0})
    said = capsys.readouterr().err
    assert "useful" not in said
    assert said.endswith("0:00 left\n")  # behind the last step


class Board:
    """Records what TensorBoard's writer is told."""

    def __init__(self) -> None:
        self.scalars: dict[str, float] = {}
        self.texts: list[tuple[str, str]] = []

    def add_scalar(self, name: str, value: float, step: int) -> None:
        self.scalars[name] = value

    def add_text(self, name: str, value: str, step: int) -> None:
        self.texts.append((name, value))


def test_boards_get_the_numbers_and_the_name_of_the_peak(tmp_path: Path) -> None:
    trackers, board = ExperimentTrackers(tmp_path, False, None, {}, print), Board()
    trackers._writer = board
    plan = tiny_plan({"cluster.chip": "h100"})
    speed = Throughput(plan, Mesh(Layout(), device=torch.device("cuda")))
    for step in range(2):
        trackers.write(step, speed.metrics(StepWork(100, 80, 2e15, 5), seconds=4.0))
    assert board.scalars.keys() >= {"useful_tokens_per_second", "tflops_per_gpu", "mfu", "memory_bytes"}
    assert board.texts == [("mfu_peak", "h100 fp32 dense")]
