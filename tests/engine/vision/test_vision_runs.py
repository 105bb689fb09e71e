"""Runs of vision-language models: a checkpoint moves from FSDP to 3D, and profiles name encoder and projector."""

import gzip
import json
from pathlib import Path

import pytest
from repository import ROOT
from tiny_runs import TINY, tiny_plan

from threefold.cli.main import main
from threefold.engine.profiler import PROFILE
from threefold.engine.run.folder import METRICS
from threefold.engine.train import train

RECIPE = str(ROOT / "recipes" / "tiny-qwen3-vl-moe-256-4xcpu-fp32-fsdp.toml")
SMALL = ["job.global_batch=4", "job.micro_batch=1", "model.num_layers=3"]
THREE_D = [
    "knobs.data_parallel=zero1",
    "layout.tp=2",
    "layout.pp=2",
    "layout.ep=2",
    "layout.stages=E|tttL",
]
FP32 = 1e-5  # relative: sums of the same step in another order


def losses(run: Path) -> dict[int, float]:
    lines = [json.loads(line) for line in (run / METRICS).read_text(encoding="utf-8").splitlines()]
    return {line["step"]: line["loss"] for line in lines if "loss" in line and "step" in line}


@pytest.mark.slow
def test_a_checkpoint_moves_from_fsdp_to_3d(tmp_path: Path) -> None:
    """The steps behind a checkpoint of four FSDP ranks are the same on two stages, the encoder on its own."""
    stays, moves = tmp_path / "stays", tmp_path / "moves"
    assert main(["train", RECIPE, *SMALL, "job.steps=4", "--run", str(stays)]) == 0
    assert main(["train", RECIPE, *SMALL, "job.steps=2", "--run", str(moves)]) == 0
    assert main(["train", RECIPE, *SMALL, "job.steps=4", *THREE_D, "--run", str(moves)]) == 0
    assert losses(moves).keys() == {1, 2, 3, 4}
    for step, loss in losses(stays).items():
        assert losses(moves)[step] == pytest.approx(loss, rel=FP32), step


@pytest.mark.usefixtures("one_thread")
def test_a_profile_names_encoder_and_projector(tmp_path: Path) -> None:
    """Their ranges lie beside those of the decoder, once a microbatch, also where it has no picture."""
    plan = tiny_plan({**TINY, "model": "tiny-qwen3-vl-moe", "job.data": "synthetic", "job.images": 1.0, "job.steps": 5})
    train(plan, tmp_path, lambda text: None, profile="torch")
    with gzip.open(tmp_path / PROFILE / "rank-0.json.gz") as file:
        names = [event["name"] for event in json.load(file)["traceEvents"] if event.get("cat") == "user_annotation"]
    assert names.count("threefold.encoder") == names.count("threefold.projector") == names.count("threefold.loss") > 0
