"""How a run starts: where its weights come from, phases with their lineage, and what a failed start leaves behind."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from hf_checkpoints import save_tokenizer
from repository import ROOT
from tiny_runs import tiny_plan, tiny_shard

from threefold.cli.train import _outcome
from threefold.engine.models.build import build_model
from threefold.engine.run.checkpoints import read_checkpoint
from threefold.engine.run.folder import CHECKPOINTS, CONTRACT, PLAN
from threefold.engine.start import Origin
from threefold.engine.train import train
from threefold.engine.weights.convert import export_hf, import_hf
from threefold.engine.weights.imported_weights import INITIAL
from threefold.engine.weights.write_hf import write_hf
from threefold.findings import FindingsError
from threefold.plan.file import dump_plan

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def shard(tmp_path_factory: pytest.TempPathFactory) -> str:
    return tiny_shard(tmp_path_factory.mktemp("data") / "counting.tok")


def run(fields: dict[str, Any], folder: Path, origin: Origin | None = None) -> list[str]:
    """Train a tiny plan; returns what it said."""
    said: list[str] = []
    train(tiny_plan(fields), folder, said.append, origin=origin)
    return said


def newest(folder: Path) -> dict[str, torch.Tensor]:
    return read_checkpoint(max((folder / CHECKPOINTS).glob("step-*")))[0]


def contract(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / CONTRACT).read_text())
    return found


def test_a_run_says_that_its_weights_are_random(shard: str, tmp_path: Path) -> None:
    assert (
        run({"job.data": shard, "job.steps": 1, "job.seed": 5}, tmp_path)[0]
        == "starting from random weights (job.seed 5)"
    )
    assert "lineage" not in contract(tmp_path)


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """The tiny model as a Hugging Face folder."""
    spec = tiny_plan({}).model
    write_hf(build_model(spec, seed=3), spec, tmp_path / "hf")
    return tmp_path / "hf"


def test_weights_beside_a_configuration_are_not_ignored_in_silence(
    checkpoint: Path, shard: str, tmp_path: Path
) -> None:
    fields = {"job.data": shard, "job.steps": 1, "model": f"hf:{checkpoint / 'config.json'}"}
    fields |= {"model.num_layers": None, "model.num_experts": None}
    said = run(fields, tmp_path / "run")
    assert said[0] == "starting from random weights (job.seed 0)"
    assert said[1].startswith("warning[weights-are-used] model: ")
    assert str(checkpoint) in said[1]
    (checkpoint / "model.safetensors").unlink()
    assert not any("weights-are-used" in line for line in run(fields, tmp_path / "other"))


def test_imported_weights_are_named_and_want_data(checkpoint: Path, shard: str, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    list(import_hf(checkpoint, folder, "auto"))
    fields = {"model": f"hf:{folder / 'hf_config.json'}", "job.steps": 1, "job.mtp": 0}
    fields |= {"model.num_layers": None, "model.num_experts": None}
    before = sorted(path.name for path in folder.iterdir())
    save_tokenizer(tmp_path / "tokenizer")
    for tokenizer in ({}, {"job.tokenizer": str(tmp_path / "tokenizer")}):  # before the embedded bytes are opened
        with pytest.raises(FindingsError, match="imported-weights-have-data"):
            run({**fields, **tokenizer}, folder)
    assert sorted(path.name for path in folder.iterdir()) == before, "a failed start leaves the import as it was"
    assert run({**fields, "job.data": shard}, folder)[0] == f"starting from the imported weights in {folder / INITIAL}"


# Phases


def test_a_phase_starts_from_the_weights_of_another_run(shard: str, tmp_path: Path) -> None:
    """Three plans with other length, batch, rate and seed are one lineage. A rate of 0 leaves weights alone."""
    first, second, third = (tmp_path / name for name in ("one", "two", "three"))
    base = {"job.data": shard, "job.steps": 2}
    run(base, first)
    still = {"job.lr": 0.0, "job.seq_len": 64, "job.global_batch": 2, "job.seed": 9, "job.steps": 1}
    said = run(base | still, second, Origin(first))
    assert said[0] == f"starting from the weights of {first} at step 2"
    came, went = newest(second), newest(first)
    weights = [name for name in went if name.startswith("model.")]
    assert len(weights) > 10
    for name in weights:
        assert torch.equal(came[name], went[name]), name
    run({**base, "job.seq_len": 96}, third, Origin(second))
    lineage = contract(third)["lineage"]
    assert [(entry["run"], entry["step"], entry["seq_len"]) for entry in lineage] == [
        (str(first), 2, 32),
        (str(second), 1, 64),
    ]
    assert lineage[0]["plan"] == tiny_plan(base).hash
    assert run({**base, "job.seq_len": 96, "job.steps": 3}, third, Origin(second))[0] == "resuming after step 2 of 3"


def test_a_phase_takes_the_optimizer_over_by_choice(shard: str, tmp_path: Path) -> None:
    """The next step is then the one that the first run would have made: same weights, moments and count of steps."""
    base = {"job.data": shard, "job.lr_schedule": "constant", "job.warmup_steps": 0, "job.steps": 3}
    run(base, tmp_path / "one")
    run({**base, "job.steps": 2}, tmp_path / "two")
    # The third batch of the data is the first one of a run that begins there: batches do not depend on the optimizer.
    run({**base, "job.steps": 1}, tmp_path / "with", Origin(tmp_path / "two", with_optimizer=True))
    run({**base, "job.steps": 1}, tmp_path / "without", Origin(tmp_path / "two"))
    one, taken, fresh = (newest(tmp_path / name) for name in ("two", "with", "without"))
    assert int(taken["optimizer.steps"]) == int(one["optimizer.steps"]) + 1 == 3
    assert int(fresh["optimizer.steps"]) == 1
    name = next(name for name in one if name.startswith("optimizer.") and name.endswith("embed.weight"))
    assert not torch.equal(taken[name], fresh[name])
    entry = contract(tmp_path / "with")["lineage"][0]
    assert entry["with_optimizer"] is True


def test_a_phase_may_change_the_rotary_scaling(shard: str, tmp_path: Path) -> None:
    """The configuration of the second phase stretches the rotary frequencies; shapes are the same."""
    spec = tiny_plan({}).model
    for name, scaling in (
        ("4k", None),
        ("32k", {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 32}),
    ):
        write_hf(build_model(spec, seed=3), spec, tmp_path / name)
        path = tmp_path / name / "config.json"
        config = json.loads(path.read_text())
        if scaling:
            theta = config.get("rope_theta") or config["rope_parameters"]["rope_theta"]
            config["rope_parameters"] = {"rope_theta": theta, **scaling}
        path.write_text(json.dumps(config))
    cut = {"model.num_layers": None, "model.num_experts": None, "job.data": shard, "job.steps": 1}
    run({**cut, "model": f"hf:{tmp_path / '4k' / 'config.json'}"}, tmp_path / "one")
    changed = {**cut, "model": f"hf:{tmp_path / '32k' / 'config.json'}", "job.seq_len": 256, "job.lr": 0.0}
    assert (
        tiny_plan(changed).model.attention
        != tiny_plan({**cut, "model": f"hf:{tmp_path / '4k' / 'config.json'}"}).model.attention
    )
    run(changed, tmp_path / "two", Origin(tmp_path / "one"))
    assert torch.equal(newest(tmp_path / "two")["model.embed.weight"], newest(tmp_path / "one")["model.embed.weight"])
    list(export_hf(tmp_path / "two", tmp_path / "exported"))
    exported = json.loads((tmp_path / "exported" / "config.json").read_text())
    assert exported == {**config, "dtype": exported["dtype"]}, "the configuration that the last phase names"


def test_what_does_not_fit_another_run_is_a_finding(shard: str, tmp_path: Path) -> None:
    base = {"job.data": shard, "job.steps": 1}
    run(base, tmp_path / "one")
    with pytest.raises(FindingsError, match="checkpoint-fits"):
        run({**base, "model.num_layers": 2}, tmp_path / "deeper", Origin(tmp_path / "one"))
    with pytest.raises(FindingsError, match="leave --with-optimizer out"):
        run({**base, "job.optimizer": "muon"}, tmp_path / "muon", Origin(tmp_path / "one", with_optimizer=True))
    with pytest.raises(FindingsError, match="run-readable"):
        run(base, tmp_path / "none", Origin(tmp_path / "no such run"))
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / PLAN).write_text((tmp_path / "one" / PLAN).read_text())
    with pytest.raises(FindingsError, match="run-has-checkpoint"):
        run(base, tmp_path / "early", Origin(tmp_path / "empty"))
    for name in ("deeper", "muon", "none", "early"):
        assert not (tmp_path / name).exists(), "a failed start leaves no folder behind"


# Failed starts


def test_a_failed_start_leaves_nothing_and_the_corrected_command_runs(shard: str, tmp_path: Path) -> None:
    folder = tmp_path / "runs" / "first"
    with pytest.raises(FindingsError):
        run({"job.data": str(tmp_path / "no.tok"), "job.steps": 1}, folder)
    assert not folder.exists()
    run({"job.data": shard, "job.steps": 1}, folder)
    with pytest.raises(FindingsError):  # and a run that exists keeps everything
        run({"job.data": str(tmp_path / "no.tok"), "job.steps": 2}, folder)
    assert run({"job.data": shard, "job.steps": 1}, folder)[0] == "resuming after step 1 of 1"


def test_the_plan_of_a_start_that_was_killed_does_not_bind(shard: str, tmp_path: Path) -> None:
    (tmp_path / PLAN).write_text('model = "tiny-qwen3-moe"\n[job]\nlr = 0.5\n')
    run({"job.data": shard, "job.steps": 1}, tmp_path)
    with pytest.raises(FindingsError) as refused:
        run({"job.data": shard, "job.steps": 2, "job.lr": 0.5}, tmp_path)
    (finding,) = refused.value.findings
    assert "job.lr" in finding.problem, "the field is named"
    assert f"--from {tmp_path}" in str(finding), "and a way on"


def test_what_is_said_of_a_run_that_is_past_its_steps() -> None:
    assert _outcome(40, 20) == "the run is at step 40 already, past job.steps = 20; nothing was done"
    assert (_outcome(20, 20), _outcome(7, 20)) == ("finished at step 20 of 20", "stopped at step 7 of 20")


@pytest.mark.slow
@pytest.mark.parametrize("with_optimizer", [False, True], ids=["weights", "weights and optimizer"])
def test_a_phase_on_two_ranks_starts_from_one(with_optimizer: bool, shard: str, tmp_path: Path) -> None:
    """With experts on two ranks and a rate of 0 the weights are those of the run before, bit for bit."""
    run({"job.data": shard, "job.steps": 2}, tmp_path / "one")
    plan = tmp_path / "plan.toml"
    still = {"job.data": shard, "job.steps": 1, "job.lr": 0.0, "cluster.gpus": 2, "layout.ep": 2}
    plan.write_text(dump_plan(tiny_plan(still)))
    words = [str(plan), "model.num_layers=1", "model.num_experts=4", "--from", str(tmp_path / "one")]
    words += ["--run", str(tmp_path / "two"), "--threads", "1", *(["--with-optimizer"] if with_optimizer else [])]
    command = [sys.executable, "-m", "threefold", "train", *words]
    subprocess.run(command, env=os.environ | {"PYTHONPATH": str(ROOT)}, check=True, timeout=600)
    went, came = newest(tmp_path / "one"), newest(tmp_path / "two")
    for name in (name for name in went if name.startswith("model.")):
        assert torch.equal(came[name], went[name]), name
    assert int(came["optimizer.steps"]) == (3 if with_optimizer else 1)
    assert contract(tmp_path / "two")["lineage"][0]["with_optimizer"] is with_optimizer
