"""What a whole training takes, against published trainings and against a checkpoint that the engine wrote."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from command_line import run
from plans import CLEAN, build, make
from repository import ROOT

import threefold
from threefold.cost.estimate import estimate
from threefold.cost.training_run.training_run import TrainingRun, checkpoint_bytes, host_bytes_by_term, training_run
from threefold.plan.plan import Plan
from threefold.spec.chip_description import OPERATIONS, SOURCES, Operations, problem_with
from threefold.spec.chips import CHIPS
from threefold.spec.params import count_params
from threefold.units import format_seconds

RECIPE = str(ROOT / "recipes" / "deepseek-v3-4k-1024xh100-fp8.toml")


def run_at(plan: Plan, gpu_hours_per_trillion: float, tokens: float, **assumed: float) -> TrainingRun:
    """The training of a plan whose step is as fast as a published figure says, not as we estimate it."""
    seconds = gpu_hours_per_trillion * 3600 / 1e12 * plan.tokens_per_step / plan.layout.gpus
    found = estimate(plan)
    step = replace(found, time=replace(found.time, step_seconds=seconds), seconds_band=(seconds, seconds))
    return training_run(plan, step, tokens, 2.0, assumed)


def test_deepseek_v3_takes_what_its_report_says() -> None:
    """arXiv:2412.19437: 180K GPU-hours a trillion tokens on 2,048 GPUs are 3.7 days, and 14.8T tokens 2,664K GPU-hours,
    $5.328M at $2. Without failures: the report counts none."""
    plan = make(cluster_gpus=2048)
    never = {"gpu_mtbf_hours": 1e12, "spare_nodes": 0}
    assert run_at(plan, 180_000, 1e12, **never).days == pytest.approx(3.7, rel=0.02)
    whole = run_at(plan, 180_000, 14.8e12, **never)
    assert whole.gpu_hours == pytest.approx(2.664e6, rel=0.002)
    assert whole.cost == pytest.approx(5.328e6, rel=0.002)


def test_llama_energy_is_as_its_paper_counts() -> None:
    """arXiv:2302.13971 counts GPUs alone: 1,022,362 GPU-hours of 400 W at PUE 1.1 are 449 MWh for the 65B model."""
    spec = replace(CHIPS["a100"], server_watts=400.0)
    plan = build({**CLEAN, "cluster.chip": "a100", "knobs.precision": "bf16"}).on_chip(spec)
    tokens = 1e12
    found = run_at(plan, 1_022_362, tokens, gpu_mtbf_hours=1e12, power_fraction=1, pue=1.1, spare_nodes=0)
    assert found.energy_mwh == pytest.approx(449, rel=0.005)


def test_failures_only_add() -> None:
    plan = make()
    step = estimate(plan)
    often, seldom = (training_run(plan, step, 1e12, None, {"gpu_mtbf_hours": hours}) for hours in (5_000.0, 1e6))
    assert often.days > seldom.days > 1e12 / plan.tokens_per_step * step.time.step_seconds / 86_400
    assert often.save_steps < seldom.save_steps
    assert often.spare_nodes > seldom.spare_nodes
    assert often.failures > seldom.failures
    assert often.energy_mwh is not None
    assert seldom.energy_mwh is not None
    assert often.energy_mwh > seldom.energy_mwh


def test_a_checkpoint_has_fourteen_bytes_a_parameter() -> None:
    """bf16 weights, fp32 master weights and two moments. DeepSeek-V3 has 671B parameters, and 11.5B in its MTP module
    without the embedding and head that it shares (README of its weights: 685B with them)."""
    assert checkpoint_bytes(make()) == pytest.approx(14 * 683e9, rel=0.005)
    assert checkpoint_bytes(make(job_mtp=0)) == pytest.approx(14 * 671e9, rel=0.001)
    assert checkpoint_bytes(make(knobs_optimizer_dtype="bf16", job_mtp=0)) == pytest.approx(10 * 671e9, rel=0.001)


@pytest.mark.parametrize("ep", [1, 8, 128])
def test_frozen_weights_have_no_states_in_a_checkpoint(ep: int) -> None:
    """Whatever the layout: bf16 weights of everything, and 12 bytes more for each trained parameter of the encoder."""
    changes = {"model": "qwen3-vl-30b-a3b", "cluster.gpus": 128, "layout.ep": ep, "job.freeze": ["language"]}
    plan = build({**CLEAN, **changes, "layout.pp": 1, "layout.vpp": 1, "layout.stages": None, "job.mtp": None})
    params = count_params(plan.model, plan.mtp)
    assert checkpoint_bytes(plan) == pytest.approx(2 * params.total + 12 * params.vision)


def test_the_host_holds_what_is_offloaded() -> None:
    plan = make(knobs_optimizer_offload=1.0)
    host, device = host_bytes_by_term(plan), host_bytes_by_term(make())
    assert device["optimizer"] == device["activations"] == 0
    dense, experts = 12 / 64, 12 / 2  # bytes a parameter over DP x CP = 64 and EDP = 2 ranks
    assert 0 < dense * 2e9 < host["optimizer"] < experts * 3e9
    assert host["checkpoint"] == checkpoint_bytes(plan) / 1024
    some, more = (make(target="threefold", knobs_activation_offload_layers=layers) for layers in (1, 2))
    assert 0 < host_bytes_by_term(some)["activations"] < host_bytes_by_term(more)["activations"]


def test_states_that_pass_through_the_device_are_on_the_host_too() -> None:
    """Two layers of Qwen3-30B-A3B on one GPU: twelve bytes for each of 1.87 billion parameters."""
    fields = {"target": "threefold", "cluster.chip": "h200", "cluster.gpus": 1, "layout.ep": 1, "job.global_batch": 1}
    plan = build({**fields, "model": "qwen3-30b-a3b", "model.num_layers": 2, "knobs.optimizer_offload": 1.0})
    count = count_params(plan.model, 0).total
    assert host_bytes_by_term(plan)["optimizer"] == pytest.approx(12 * count, rel=1e-3)


def test_figures_have_ranges_and_sources() -> None:
    assert set(OPERATIONS) == set(SOURCES)
    for name in OPERATIONS:
        default = getattr(Operations(), name)
        assert default is None or not problem_with(name, default)
        assert problem_with(name, -1)
        assert problem_with(name, float("nan"))
        assert problem_with(name, True)


def test_the_verb_tells_it(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run("estimate", RECIPE, "--tokens", "1.5T", "--price", "2.5", capsys=capsys)
    assert code == 0
    for word in ("days", "GPU-hours", "goodput", "checkpoint", "host memory", "energy", "cost", "arXiv:2407.21783"):
        assert word in out
    code, out, _ = run(
        *("estimate", RECIPE, "--tokens", "1.5T", "--price", "2.5", "--sizes", "512,1000,4096,98304", "--json"),
        *("--assume", "gpu_mtbf_hours=20000", "--assume", "restart_seconds=60"),
        capsys=capsys,
    )
    assert code == 0
    said = json.loads(out)
    assert said["assumed"]["gpu_mtbf_hours"] == {"value": 20000, "source": "given"}
    assert [point["gpus"] for point in said["curve"]] == [512, 1000, 4096, 98304]
    small, odd, large, largest = said["curve"]
    assert odd["training"] is None
    assert "grids-divide-ranks" in odd["verdict"]
    assert small["training"]["days"] > said["days"] > large["training"]["days"] > largest["training"]["days"]
    assert 0.1 < largest["training"]["goodput"]["useful"] < large["training"]["goodput"]["useful"] < 1
    assert said["cost"] == pytest.approx(2.5 * said["paid_gpu_hours"])


def test_a_run_that_never_ends_is_said_in_json(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("--tokens", "1T", "--assume", "gpu_mtbf_hours=1", "--json")
    code, out, _ = run("estimate", RECIPE, *words, capsys=capsys)
    assert code == 0
    assert json.loads(out)["days"] is None


@pytest.mark.parametrize(
    "words",
    [
        ["--tokens", "nan"],
        ["--tokens", "0"],
        ["--tokens", "1.5X"],
        ["--tokens", "T"],
        ["--tokens", "1T", "--price", "cheap"],
        ["--tokens", "1T", "--sizes", "8,,16"],
        ["--tokens", "1T", "--assume", "spare_nodes=0.5"],
        ["--price", "2"],
        ["--tokens", "1T", "--price", "-1"],
        ["--tokens", "1T", "--sizes", "0"],
        ["--tokens", "1T", "--sizes", "many"],
        ["--tokens", "1T", "--assume", "gpu_mtbf=3"],
        ["--tokens", "1T", "--assume", "pue=0.5"],
        ["--tokens", "1T", "--assume", "pue"],
    ],
)
def test_wrong_arguments_are_refused(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = run("estimate", RECIPE, *words, capsys=capsys)
    assert code == 2
    assert "threefold estimate:" in err
    assert " _" not in err  # the name of a function of ours says nothing to a user


def test_a_save_waits_for_the_write_before_it() -> None:
    """Storage that is so slow that a write takes 1.4 steps: checkpoints are two steps apart, not one."""
    plan = make()
    step = estimate(plan)
    seconds = step.time.step_seconds
    bandwidth = checkpoint_bytes(plan) / (plan.layout.gpus / 8) / (1.4 * seconds)
    often = {"gpu_mtbf_hours": 20.0, "restart_seconds": 0.0, "storage_bandwidth": bandwidth}
    found = training_run(plan, step, 1e12, None, often)
    assert found.write_seconds == pytest.approx(1.4 * seconds)
    assert found.save_seconds < 0.1 * seconds
    assert found.save_steps == 2


def test_the_library_gives_the_same_numbers(capsys: pytest.CaptureFixture[str]) -> None:
    plan = threefold.load_plan(RECIPE)
    found = threefold.estimate_training(plan, 1.5e12, price=2.5)
    said = json.loads(run("estimate", RECIPE, "--tokens", "1.5T", "--price", "2.5", "--json", capsys=capsys)[1])
    assert said["days"] == found.days
    with pytest.raises(ValueError, match="no such figure"):
        threefold.estimate_training(plan, 1.5e12, assumed={"mtbf": 3})
    curve = threefold.training_curve(plan, 1.5e12, [512, 1024])
    assert [point.value for point, _ in curve] == [512, 1024]
    assert curve[1][1] is not None
    assert curve[1][1].days == pytest.approx(found.days)


def test_seconds_are_shown_in_their_unit() -> None:
    assert [format_seconds(each) for each in (0.25, 90, 7200, 2e6)] == ["0.25 s", "1.5 min", "2 h", "23 days"]


def test_the_engine_writes_a_checkpoint_of_this_size(tmp_path: Path) -> None:
    """The formula against the files of a run of our own engine: within 3 %, for headers, random states and buffers."""
    file = ROOT / "recipes" / "tiny-qwen3-moe-256-1xcpu-fp32.toml"
    for changes in ({"knobs.precision": "bf16"}, {"job.optimizer": "muon"}):
        plan = threefold.load_plan(file, {"job.steps": 1, **changes})
        folder = tmp_path / plan.hash
        threefold.train(plan, folder, say=lambda text: None)
        written = sum(path.stat().st_size for path in folder.glob("checkpoints/*/*.distcp"))
        assert written == pytest.approx(checkpoint_bytes(plan), rel=0.03), changes


def test_figures_have_the_digits_that_a_step_leaves() -> None:
    """The step of an uncalibrated plan is half as long again at most: two digits say all that is known."""
    plan = make()
    found = threefold.estimate_training(plan, 1.5e12, price=2.5)
    assert found.seconds_band[1] / found.seconds > 1.2
    rows = {name: value for name, value, _ in found.table()[1]}
    for name in ("days", "GPU-hours", "cost"):
        about, digits = rows[name].split()
        assert about == "about"
        assert len(digits.replace(",", "").replace(".", "").strip("0")) <= 2, rows[name]
