"""Runs of vision-language models: a checkpoint moves from FSDP to 3D, and profiles name encoder and projector."""

import gzip
import json
import re
from pathlib import Path

import pytest
from repository import ROOT
from tiny_runs import TINY, tiny_plan

from threefold.cli.main import main
from threefold.engine.profiler import PROFILE
from threefold.engine.run.folder import METRICS
from threefold.engine.train import train
from threefold.profile.analyze import profile_traces
from threefold.report.profile import profile_text

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


@pytest.mark.slow
@pytest.mark.parametrize("verb", ["check", "estimate", "dry-run", "train"])
def test_every_verb_takes_an_fp8_decoder_over_context_ranks(verb: str, tmp_path: Path) -> None:
    """FP8 is emulated on a CPU; the encoder stays as it is."""
    fields = ["knobs.data_parallel=zero1", "layout.cp=2", "layout.ep=2", "cluster.gpus=2", "job.steps=2"]
    words = [RECIPE, *SMALL, *fields, "knobs.precision=fp8-blockwise"]
    assert main([verb, *words, *(["--run", str(tmp_path / "run")] if verb == "train" else [])]) == 0
    if verb == "train":
        assert losses(tmp_path / "run").keys() == {1, 2}


@pytest.mark.usefixtures("one_thread")
def test_a_run_and_its_profile_tell_encoder_projector_and_decoder_apart(tmp_path: Path) -> None:
    """Their ranges lie beside those of the decoder, once a microbatch, also where it has no picture. The seconds of the
    three are in every line of metrics, at the end of the run and in its profile; they do not exceed the step."""
    plan = tiny_plan({**TINY, "model": "tiny-qwen3-vl-moe", "job.data": "synthetic", "job.images": 1.0, "job.steps": 5})
    said: list[str] = []
    train(plan, tmp_path, said.append, profile="torch")
    with gzip.open(tmp_path / PROFILE / "rank-0.json.gz") as file:
        names = [event["name"] for event in json.load(file)["traceEvents"] if event.get("cat") == "user_annotation"]
    assert names.count("threefold.encoder") == names.count("threefold.projector") == names.count("threefold.loss") > 0
    lines = [json.loads(line) for line in (tmp_path / METRICS).read_text(encoding="utf-8").splitlines()]
    parts = ("encoder", "projector", "decoder")
    for line in lines:
        seconds = [line[f"{part}_seconds"] for part in parts]
        assert min(seconds) > 0
        assert sum(seconds) <= line["seconds"]
    [spent, work] = [text for text in said if text.startswith("median of 3 steps")]
    assert [part in spent for part in parts] == [True] * 3
    assert "images/s" in work
    assert "useful tokens/s" in work
    profile = profile_traces([tmp_path])
    assert list(profile.to_json()["part_seconds"]) == list(parts)
    text = profile_text(profile)
    assert [re.search(rf"^{part} .*\d%", text, re.MULTILINE) is not None for part in parts] == [True] * 3
