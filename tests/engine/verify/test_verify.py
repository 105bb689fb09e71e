"""`threefold verify`, and the small plans it runs."""

import json
from pathlib import Path

import pytest
from repository import ROOT

from threefold.cli.main import main
from threefold.engine.verify.compare import Comparison
from threefold.plan.file import read_plan
from threefold.plan.scale import MAX_RANKS, scale_down
from threefold.rules.all import check, errors

# Our engine runs the sparse attention of GLM-5.2 on whole sequences only.
RECIPES = sorted(path for path in (ROOT / "recipes").glob("*.toml") if not path.stem.startswith("glm-5.2-"))


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_a_small_plan_keeps_the_pattern_of_axes(path: Path) -> None:
    plan = read_plan(str(path)).plan
    assert plan is not None
    small, replaced = scale_down(plan)
    old, new = plan.layout, small.layout
    assert new.gpus <= MAX_RANKS
    for axis in ("tp", "cp", "pp", "vpp", "ep", "etp", "dp"):
        assert (old.degree(axis) > 1) == (new.degree(axis) > 1), axis
    assert (old.edp == 1) == (new.edp == 1) or old.ep == 1
    assert small.knobs.cp_comm == plan.knobs.cp_comm
    assert bool(small.model.moe) == bool(plan.model.moe)
    assert replaced
    assert errors(check(small, "threefold")) == []


def test_verify_says_what_it_replaced(capsys: pytest.CaptureFixture[str]) -> None:
    plan = "recipes/qwen3-30b-a3b-4k-16xh100-bf16-overlap.toml"
    assert main(["verify", str(RECIPES[0].parent.parent / plan), "--scale-down", "--json"]) == 0
    told = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert told["same"]
    assert told["ranks"] == 2
    assert "bf16 by fp64" in told["replaced"]
    assert max(told["differences"].values()) < 1e-10


def test_forced_balance_is_verified_with_learned_routing(capsys: pytest.CaptureFixture[str]) -> None:
    """By force the experts of a token follow from where it lies on its rank: with CP not as on one rank."""
    recipe = str(RECIPES[0].parent / "tiny-qwen3-moe-256-1xcpu-fp32.toml")
    small = ["job.seq_len=12", "job.global_batch=2", "job.micro_batch=1", "job.data=synthetic", "model.num_layers=1"]
    layout = ["cluster.gpus=2", "layout.cp=2", "layout.ep=2", "job.routing=forced-balance"]
    assert main(["verify", recipe, *small, *layout, "--json"]) == 0
    told = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert told["same"]
    assert told["replaced"] == ["forced balance by learned routing"]


@pytest.fixture
def unrun(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks that are not started, and agree."""
    same = Comparison(*[0.0] * 6, worst="", near_ties=0, num_parameters=1, steps=(), vanishing=(), idle=(), problems=())
    monkeypatch.setattr("threefold.engine.verify.oracle.compare_with_one_rank", lambda plan, limit: same)


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_graphs_of_a_recipe_are_replaced(path: Path, unrun: None, capsys: pytest.CaptureFixture[str]) -> None:
    """A CPU records none: what the engine cannot record on GPUs is no reason to refuse here."""
    plan = read_plan(str(path)).plan
    assert plan is not None
    assert main(["verify", str(path), "--scale-down", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert [what for what in told["replaced"] if "graphs" in what] == ["graphs by eager kernels"] * bool(
        plan.knobs.graphs
    )
    assert told["ranks"] <= MAX_RANKS


def test_other_faults_of_graphs_are_still_refused(unrun: None, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = str(RECIPES[0].parent / "qwen3-next-80b-a3b-8k-32xgb200-bf16.toml")
    assert main(["verify", recipe, "--scale-down", 'knobs.graphs=["full_iteration"]']) == 1
    said = capsys.readouterr().out
    assert "error[graph-needs-static-experts]" in said
    assert "engine-has-graphs" not in said


def test_a_large_plan_is_not_run_here(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", str(RECIPES[0])]) == 1
    assert "verify-fits-here" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "rule"),
    [
        (["deepseek-v3-4k-1024xh100-fp8.toml", "layout.ep=48"], "ep-divides-experts"),
        (["qwen3-vl-235b-a22b-4k-64xgb200-bf16-3d.toml", "model=nemotron-3-super"], "stack-runs-family"),
    ],
)
def test_what_rules_refuse_is_not_verified(words: list[str], rule: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Also where the shrunk plan would run."""
    name, *changes = words
    assert main(["verify", str(RECIPES[0].parent / name), *changes, "--scale-down"]) == 1
    assert f"error[{rule}]" in capsys.readouterr().out


def test_a_rehearsal_of_what_the_engine_lacks_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    recipe = "qwen3-vl-235b-a22b-4k-64xgb200-bf16-3d.toml"
    assert main(["dry-run", str(RECIPES[0].parent / recipe), "model=nemotron-3-super"]) == 1
    assert "error[stack-runs-family]" in capsys.readouterr().out
