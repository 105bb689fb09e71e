"""`import threefold`: its names, when they load, what they show, and that the commands call the same functions."""

import ast
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from fake_measurer import FakeMeasurer
from repository import ROOT
from tuned_plans import plan_to_tune

import threefold
from threefold.cli.main import main
from threefold.findings import Finding, Findings
from threefold.notebook import MOST_ROWS, html_table
from threefold.tune import engine_measurer

PACKAGE = ROOT / "threefold"
TINY = ROOT / "recipes" / "tiny-qwen3-moe-256-1xcpu-fp32.toml"
RECIPE = ROOT / "recipes" / "qwen3-30b-a3b-4k-16xh100-bf16-overlap.toml"
# The verbs that have a function of the library, and the functions of `threefold.api` that they call.
CALLED = {
    "check": {"check"},
    "estimate": {"judged_estimate", "training_curve"},
    "plan": {"find_plan"},
    "dry_run": {"rehearse"},
    "train": {"train_rank", "start_ranks"},
    "compare": {"compare_runs"},
    "diagnose": {"diagnose_job"},
    "export": {"export"},
    "sweep": {"sweep"},
    "profile": {"profile_run"},
    "report": {"make_report"},
    "tune": {"tune_plan", "read_tuning"},
    "command_line/inputs": {"open_plan"},
}


def loaded_by(program: str) -> set[str]:
    """The modules that a fresh interpreter has loaded after a program."""
    code = f"{program}\nimport sys, json; print(json.dumps(sorted(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=300)
    return set(json.loads(done.stdout.splitlines()[-1]))


def test_importing_loads_nothing_else() -> None:
    """Under 0.1 s because there is nothing to load: no module of ours, no torch, no numpy."""
    modules = loaded_by("import threefold; dir(threefold)")
    assert {name for name in modules if name.startswith("threefold")} == {"threefold"}
    assert not modules & {"torch", "numpy", "tomli_w", "dataclasses"}


def test_help_loads_no_verb() -> None:
    """`threefold --help` is under 0.1 s because only the list of verbs loads."""
    program = "from threefold.cli.main import main\ntry:\n    main(['--help'])\nexcept SystemExit:\n    pass"
    modules = loaded_by(program)
    assert not modules & {"torch", "numpy", "threefold.plan.plan", "threefold.spec.models", "threefold.api.plans"}


def test_planning_from_the_library_loads_no_torch() -> None:
    fields = {"model": "qwen3-30b-a3b", "cluster.chip": "h100", "cluster.gpus": 16, "job.seq_len": 4096}
    program = (
        f"import threefold as tf\nplan = tf.find_plan({fields!r}, top=1).best\ntf.check(plan)\ntf.estimate(plan)\n"
        "tf.estimate_training(plan, 1e12)\ntf.rehearse, tf.train, tf.read_run, tf.profile_run, tf.compare_runs"
    )
    assert "torch" not in loaded_by(program)


def test_every_name_is_there() -> None:
    """None hides a folder of the package: that would depend on what was imported before."""
    assert set(threefold._HOMES) == set(threefold.__all__)
    assert set(threefold.__all__) <= set(dir(threefold))
    folders = {path.stem for path in PACKAGE.iterdir()}
    for name in threefold.__all__:
        assert name not in folders
        assert getattr(threefold, name).__doc__, name
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = threefold.nothing
    assert (PACKAGE / "py.typed").exists()


def test_every_name_is_typed_and_documented() -> None:
    """The names of type checkers are those that load, and the reference has every one with its parameters."""
    tree = ast.parse((PACKAGE / "__init__.py").read_text(encoding="utf-8"))
    imported = {
        alias.name: node.module
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and str(node.module).startswith("threefold")
        for alias in node.names
    }
    assert imported == threefold._HOMES
    text = (ROOT / "docs" / "reference" / "library.md").read_text(encoding="utf-8")
    for name in threefold.__all__:
        value: Any = getattr(threefold, name)
        if isinstance(value, type):
            assert f"`{name}`" in text, name
            continue
        signature = re.search(rf"^### `{name}\(([^)]*)\)`$", text, flags=re.MULTILINE)
        assert signature, name
        listed = [part.strip().lstrip("*").partition("=")[0] for part in signature[1].split(",")]
        assert listed == list(value.__annotations__)[:-1], name


@pytest.mark.parametrize("verb", CALLED)
def test_commands_call_the_library(verb: str) -> None:
    tree = ast.parse((PACKAGE / "cli" / f"{verb}.py").read_text(encoding="utf-8"))
    imported = {
        alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and str(node.module).startswith("threefold.api")
        for alias in node.names
    }
    called = {node.func.id for node in ast.walk(tree) if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)}
    assert CALLED[verb] <= imported & called


def test_values_show_themselves_shortly() -> None:
    plan = threefold.load_plan(RECIPE)
    values = [plan, threefold.check(plan), threefold.estimate(plan), threefold.estimate_training(plan, 1e12)]
    for value in values:
        assert len(repr(value)) < 200
        assert "\n" not in repr(value)
        shown = value._repr_html_()
        assert shown.startswith("<table")
        assert shown.count("<tr>") == 1 + len(value.table()[1])
    assert str(plan.layout.ep) in dict(zip(*zip(*plan.table()[1], strict=True), strict=True))["layout.ep"]


def test_sweeps_exports_and_diagnoses_are_those_of_the_commands(tmp_path: Path) -> None:
    plan = threefold.load_plan(RECIPE)
    found = threefold.sweep(plan, {"job.seq_len": [4096, "8K"]})
    assert [point.plan.job.seq_len for point in found.points] == [4096, 8192]
    with pytest.raises(threefold.FindingsError, match=r"1\.5"):
        threefold.sweep(plan, {"layout.ep": [1.5]})
    exported = threefold.export(plan, to="megatron-lm")
    assert exported.settings["model.expert_model_parallel_size"] == 16
    with pytest.raises(threefold.FindingsError, match="experts"):
        threefold.export(threefold.change(plan, {"layout.ep": 48}))
    log = tmp_path / "job.log"
    log.write_text("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.\n")
    diagnosis = threefold.diagnose_job(log)
    assert diagnosis.death == "cuda-out-of-memory"
    assert all(repr(value).startswith("<") and "\n" not in repr(value) for value in (found, exported, diagnosis))


def test_a_report_is_that_of_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = threefold.make_report(TINY, ["job.steps=7"])
    out = tmp_path / "page.html"
    assert main(["report", str(TINY), "job.steps=7", "--out", str(out)]) == 0
    assert out.read_text(encoding="utf-8") == found.html
    assert f"report of the {found.kind} {found.name}" in capsys.readouterr().out
    with pytest.raises(threefold.FindingsError, match="neither a run"):
        threefold.make_report(tmp_path)


def test_a_tuning_resumes_from_the_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a machine on which larger microbatches are faster."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    fake = FakeMeasurer(lambda plan: 1.0 - 0.1 * (plan.job.micro_batch // 4), noise=0.003)
    monkeypatch.setattr(engine_measurer, "EngineMeasurer", lambda *words: fake)
    lines: list[str] = []
    found = threefold.tune_plan(plan_to_tune(), tmp_path / "out", budget=1200.0, say=lines.append)
    assert found.winner is not None
    assert found.winner.job.micro_batch == 8
    assert lines[0] == f"trials are kept in {tmp_path / 'out'}"
    assert not (tmp_path / "out" / "card.toml").exists()  # no command line measures it again
    count = len(fake.plans)
    threefold.tune_plan(plan_to_tune(), tmp_path / "out", budget=1200.0)
    assert len(fake.plans) == count
    with pytest.raises(threefold.FindingsError, match=r"knobs\.precison"):
        threefold.tune_plan(plan_to_tune(), tmp_path / "out", keep=["knobs.precison"])


def test_tables_escape_what_files_hold() -> None:
    found = Findings([Finding(at="<script>", problem="a & b", rule="x", advice="y")])
    assert "&lt;script&gt;" in found._repr_html_()
    assert "<script>" not in found._repr_html_()
    assert "and 5 more" in html_table("long", ["n"], [[str(n)] for n in range(MOST_ROWS + 5)])


def test_loading_raises_findings() -> None:
    with pytest.raises(threefold.FindingsError, match=r"layout\.eq") as error:
        threefold.load_plan({"model": "qwen3-30b-a3b", "layout": {"eq": 8}})
    assert error.value.findings[0].rule == "unknown-field"
    with pytest.raises(threefold.FindingsError, match="cannot be read"):
        threefold.load_plan("no/such/plan.toml")
    with pytest.raises(threefold.FindingsError, match="this is a draft"):
        threefold.load_plan({"model": "qwen3-30b-a3b", "layout.ep": "auto"})
    with pytest.raises(threefold.FindingsError, match="no model named"):
        threefold.find_plan({"model": "qwen", "cluster.chip": "h100", "cluster.gpus": 8})
    with pytest.raises(threefold.FindingsError, match="batch-divides-dp"):
        threefold.estimate(threefold.load_plan(RECIPE, {"job.global_batch": 17}))


def test_changes_are_those_of_the_command_line() -> None:
    plan = threefold.load_plan(RECIPE, {"layout.ep": 8, "knobs.ep_overlap": None, "global_batch_size": 64})
    assert (plan.layout.ep, plan.knobs.ep_overlap, plan.job.global_batch) == (8, False, 64)
    assert threefold.change(plan, {"layout.ep": 4}).layout.ep == 4
    assert threefold.load_plan(TINY).layout.gpus == 1


@pytest.mark.slow
def test_the_notebook_runs(tmp_path: Path) -> None:
    """Every cell, in a process of its own, as docs/guide/ten-minutes.ipynb has it."""
    notebook = ROOT / "docs" / "guide" / "ten-minutes.ipynb"
    command = [sys.executable, str(ROOT / "tests" / "support" / "notebooks.py"), str(notebook)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, cwd=tmp_path, check=False)
    assert done.returncode == 0, done.stderr
    shown = json.loads(done.stdout.splitlines()[-1])
    assert sum(text.startswith("<table") for text in shown) >= 7
    cells = json.loads(notebook.read_text(encoding="utf-8"))["cells"]
    assert all(not cell.get("outputs") for cell in cells), "outputs are not kept: they would age"


@pytest.mark.slow
def test_several_ranks_train_from_the_library(tmp_path: Path) -> None:
    """Two processes, stopped and gone on with, give the losses of one rank."""
    fields = {"job.steps": 3, "job.global_batch": 8, "job.micro_batch": 4}
    two = threefold.load_plan(TINY, {**fields, "cluster.gpus": 2})
    stopped = threefold.train(two, tmp_path / "two", threads=1, stop_at=2)
    assert stopped.last("step") == 2
    found = threefold.train(two, tmp_path / "two", threads=1)
    one = threefold.train(threefold.load_plan(TINY, fields), tmp_path / "one", threads=1, say=lambda text: None)
    assert found.columns["loss"] == pytest.approx(one.columns["loss"], rel=1e-4)  # fp32, sums in another order
    with pytest.raises(RuntimeError, match="exit code 1"):
        threefold.train(threefold.change(two, {"job.seed": 7}), tmp_path / "two", threads=1)
    with pytest.raises(threefold.FindingsError, match=r"job\.seed"):
        threefold.train(threefold.change(one.plan, {"job.seed": 7}), tmp_path / "one", threads=1)
