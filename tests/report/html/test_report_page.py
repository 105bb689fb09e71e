"""Reports as text: self-contained, small, escaped, and with the numbers of the estimate, the run and the ledger."""

import json
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from command_line import run as command
from fake_measurer import FakeMeasurer
from markup_reader import read
from plans import build, make
from repository import ROOT
from run_folders import noisy_seconds, run_plan, write_run
from traces import GEMM, NCCL, kernel, write_trace
from tuned_plans import tuned

from threefold.cost.estimate import estimate
from threefold.plan.file import dump_plan
from threefold.profile.readers.run_record import read_run
from threefold.report.html.estimate_pictures import time_figure
from threefold.report.html.layout_picture import num_drawn_ranks
from threefold.report.html.plan_view import view_plan
from threefold.report.html.report import Subject, report_page
from threefold.report.html.run_pictures import thinned
from threefold.tune.ledger import open_ledger
from threefold.units import format_bytes

MOST_BYTES = 2 * 2**20
RECIPES = sorted((ROOT / "recipes").glob("*.toml"))
NASTY = "</script><script>document.title='owned'</script><img src=x onerror=alert(1)>\"'&"


def outside_addresses(page: str) -> list[str]:
    """Attributes that lead anywhere but into the page itself, and imports of styles."""
    names = ("src", "href", "action", "data", "xlink:href", "srcset", "poster", "formaction")
    found = [(attributes.get(name) or "") for _, attributes in read(page).tags for name in names if name in attributes]
    return [each for each in found if not each.startswith("#")] + re.findall(r"url\(|@import", page)


def check_sound(page: str) -> None:
    """One file, small, with one script and the policy that allows no other."""
    assert outside_addresses(page) == []
    assert "http:" not in page
    assert "https:" not in page
    assert len(page.encode()) < MOST_BYTES
    assert [name for name, _ in read(page).tags].count("script") == 1
    assert not [name for _, attributes in read(page).tags for name in attributes if name.startswith("on")]
    assert "default-src &#x27;none&#x27;" in page


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_every_recipe_has_a_sound_page(
    recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    out = tmp_path / "page.html"
    code, _, err = command("report", str(recipe), "--out", str(out), capsys=capsys)
    assert (code, err) == (0, "")
    page = out.read_text(encoding="utf-8")
    check_sound(page)
    assert 'id="layout"' in page
    assert 'id="memory"' in page


def test_the_page_has_the_numbers_of_the_estimate() -> None:
    plan = make()
    found = estimate(plan)
    page = report_page(Subject("plan", "clean.toml", view_plan(plan)))
    worst = found.memory.worst
    for name, size in worst.by_size[:5]:
        assert f"{name}: {format_bytes(size)}" in page
    for name, seconds in sorted(found.time.terms.items(), key=lambda term: -term[1])[:5]:
        assert f"{seconds / found.time.step_seconds:.1%} of the step" in page, name
    assert page.count('class="mark"') > 200
    assert "Pipeline schedule: interleaved" in page
    assert dump_plan(plan).split("\n", 1)[0].replace('"', "&quot;") in page


@pytest.mark.parametrize("gpus", [4096, 16_384])
def test_thousands_of_ranks_stay_small(gpus: int) -> None:
    plan = make(cluster_gpus=gpus, job_global_batch=gpus * 8, layout_pp=16, layout_vpp=2)
    page = report_page(Subject("plan", "large", view_plan(plan)))
    check_sound(page)
    assert num_drawn_ranks(plan) == 64
    assert f"64 of {gpus // 16} ranks of a stage are drawn; the fold repeats every 64 ranks" in page


def test_a_refused_plan_has_findings_and_no_estimate() -> None:
    view = view_plan(make(layout_ep=48))
    page = report_page(Subject("plan", "bad", view))
    assert view.estimate is None
    assert "ep-divides-experts" in page
    assert 'id="memory"' not in page


def test_strings_of_strangers_are_only_text(tmp_path: Path) -> None:
    """A name of a folder, a contract, a ledger and a finding that would be markup."""
    folder = write_run(tmp_path / "run", run_plan(), [0.5] * 30, contract={"torch": NASTY, NASTY: {NASTY: NASTY}})
    run = read_run(folder)
    view = view_plan(run.plan)
    view = replace(view, plan=replace(view.plan, model_name=NASTY))
    effects = [{"knob": NASTY, "asked": NASTY, "took_effect": NASTY, "evidence": NASTY, "ran": [NASTY]}]
    page = report_page(Subject("run", NASTY, view, run=run, effects=effects, notes=[NASTY]))
    check_sound(page)
    assert "<img" not in page
    assert "<script>document" not in page
    assert page.count("&lt;/script&gt;") >= 6


@pytest.mark.parametrize("count", [10_000, pytest.param(100_000, marks=pytest.mark.slow)])
def test_a_long_run_is_thinned(tmp_path: Path, count: int) -> None:
    losses = [5.0 - 4.0 * i / count for i in range(count)]
    losses[count // 2] = 50.0  # one spike must not vanish
    folder = write_run(tmp_path / "run", run_plan(), [0.5] * count, losses, **{"router/load_max": 1.5})
    (folder / "loads.json").write_text(json.dumps([[1.0] * 512 for _ in range(90)]))
    run = read_run(folder)
    curve = thinned(run.columns["step"], run.columns["loss"])
    assert len(curve.steps) == 240
    assert max(curve.most) == 50.0
    page = report_page(Subject("run", "long", view_plan(run.plan), run=run))
    check_sound(page)
    assert "Load of every expert" in page


def test_a_run_says_what_was_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan = run_plan()
    losses = [4.0 - 0.02 * i for i in range(60)]
    more: dict[str, Any] = {"router/load_max": 1.75, "router/dropped": 0.0, "grad_norm": 0.5}
    folder = write_run(tmp_path / "run", plan, noisy_seconds(0.25, 60, seed=1), losses, **more)
    (folder / "loads.json").write_text(json.dumps([[10, 0, 30, 0] * 4] * 4))
    (folder / "effects.json").write_text(
        json.dumps({"effects": [{"knob": "graphs", "asked": "attn", "ran": "eager", "took_effect": False}]})
    )
    out = tmp_path / "run.html"
    code, text, _ = command("report", str(folder), "--out", str(out), "--json", capsys=capsys)
    assert code == 0
    assert json.loads(text)["kind"] == "run"
    page = out.read_text()
    check_sound(page)
    for words in ("2.8200", "step 60: 2.82", "3.00 times the mean", "Settings that took effect", "Gradient norm"):
        assert words in page, words


def test_validation_losses_are_drawn_beside_the_training_loss(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", run_plan(), [0.5] * 20, [5.0 - 0.1 * i for i in range(20)])
    with (folder / "metrics.jsonl").open("a") as file:
        for step, loss in ((10, 4.75), (20, 3.25), (20, 3.125)):  # the later line of a step counts
            file.write(json.dumps({"step": step, "eval_loss": loss, "eval/held-out/loss": loss}) + "\n")
    run = read_run(folder)
    assert run.validation == {"held-out": {10: 4.75, 20: 3.125}}
    page = report_page(Subject("run", "run", view_plan(run.plan), run=run))
    check_sound(page)
    for words in ("validation, held-out, step 10: 4.75", "validation, held-out, step 20: 3.125", "held-out 3.1250"):
        assert words in page, words
    assert "3.25" not in page


@pytest.mark.parametrize(
    "losses", [[1e308, -1e308], [5e-324, 1e-323], [-5e-324, 0.0], [None, None], [0.0, 0.0]], ids=str
)
def test_numbers_that_nobody_could_draw_are_left_out(tmp_path: Path, losses: list[float | None]) -> None:
    folder = write_run(tmp_path / "run", run_plan(), [0.5] * 300, losses * 150)
    (folder / "loads.json").write_text(f"[[1e308, 1e308, {'9' * 400}]]")
    run = read_run(folder)
    page = report_page(Subject("run", "run", view_plan(run.plan), run=run))
    check_sound(page)
    assert not re.search(r'"[^"]*\b(nan|inf)\b[^"]*"', page)


def test_damaged_traces_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write_run(tmp_path / "run", run_plan(), [0.5] * 20)
    (folder / "profile").mkdir()
    (folder / "profile" / "rank-0.json").write_text("no trace")
    out = tmp_path / "run.html"
    assert command("report", str(folder), "--out", str(out), capsys=capsys)[0] == 0
    assert "Its traces are left out: it is no trace" in out.read_text()


def test_traces_of_a_run_are_on_its_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """30 us of GEMMs, then 70 us of an exchange that nothing hides."""
    folder = write_run(tmp_path / "run", run_plan(), [0.5] * 20)
    (folder / "profile").mkdir()
    events = [kernel(GEMM, 0.0, 30.0), kernel(NCCL, 30.0, 70.0, stream=9)]
    write_trace(folder / "profile" / "rank-0.json.gz", events)
    out = tmp_path / "run.html"
    assert command("report", str(folder), "--out", str(out), capsys=capsys)[0] == 0
    page = out.read_text()
    check_sound(page)
    assert "Traces: the wall is communication" in page
    assert "exposed communication: 7e-05 s, 70.0%" in page


def test_a_tuning_shows_every_verdict_with_its_interval(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "tuning"
    found = tuned(FakeMeasurer(), folder)
    out = tmp_path / "tuning.html"
    code, _, err = command("report", str(folder), "--out", str(out), capsys=capsys)
    assert (code, err) == (0, "")
    page = out.read_text()
    check_sound(page)
    measured = [one for one in found.verdicts if one.get("interval")]
    assert measured
    for one in measured:
        low, high = one["interval"]
        assert f"{low:+.1%} to {high:+.1%}" in page
    assert page.count("ms a step</title>") == sum(bool(row.measurement.steps) for row in found.trials)


def test_a_tuning_shows_its_plan_or_says_why_not(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder, out = tmp_path / "tuning", tmp_path / "tuning.html"
    plan = tuned(FakeMeasurer(), folder).baseline
    command("report", str(folder), "--out", str(out), capsys=capsys)
    page = out.read_text()
    assert "There is no plan on this page" in page
    assert "the rules accept" not in page
    with open_ledger(folder) as ledger:
        ledger.set_fact("contract", {"plan": plan.hash, "ranks": "all", "hardware": {"chip": "cpu"}})
    command("report", str(folder), "--out", str(out), capsys=capsys)
    page = out.read_text()
    assert "No change is certain so far" in page
    assert f"Plan {plan.hash}" in page
    code, text, _ = command("report", str(folder), "--chip-file", str(tmp_path / "none.toml"), capsys=capsys)
    assert (code, "none.toml" in text) == (1, True)
    (folder / "winner.toml").write_text(dump_plan(plan))
    (folder / "result.json").write_text('{"speedup": 1.25, "interval": [1.2, 1e400]}')
    command("report", str(folder), "--out", str(out), capsys=capsys)
    page = out.read_text()
    assert "The plan below is the winner." in page
    assert "Speedup" not in page  # an interval that is none


def test_a_ledger_outside_its_folder_is_not_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tuned(FakeMeasurer(), tmp_path / "tuning")
    (tmp_path / "strange").mkdir()
    (tmp_path / "strange" / "ledger.sqlite").symlink_to(tmp_path / "tuning" / "ledger.sqlite")
    code, out, _ = command("report", str(tmp_path / "strange"), capsys=capsys)
    assert code == 1
    assert "error[ledger-readable]" in out


def test_pages_need_neither_torch_nor_matplotlib() -> None:
    program = "import sys, threefold.cli.report, threefold.cli.explore; "
    program += "sys.exit(bool({'torch', 'matplotlib'} & set(sys.modules)))"
    subprocess.run([sys.executable, "-c", program], check=True, timeout=600)


@pytest.mark.parametrize("words", [["no-such-plan.toml"], ["."]])
def test_what_cannot_be_read_is_a_finding(
    words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    code, out, _ = command("report", *words, capsys=capsys)
    assert code == 1
    assert "error[" in out
    assert list(tmp_path.iterdir()) == []


def test_a_page_that_cannot_be_written_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan = tmp_path / "plan.toml"
    plan.write_text(dump_plan(build({"model": "tiny-qwen3-moe"})))
    code, _, err = command("report", str(plan), "--out", str(tmp_path / "no" / "page.html"), capsys=capsys)
    assert code == 1
    assert "cannot write" in err
    assert len(err.splitlines()) == 1


def test_the_plan_of_a_run_takes_no_overrides(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write_run(tmp_path / "run", run_plan(), [0.5] * 5)
    assert command("report", str(folder), "layout.ep=2", capsys=capsys)[0] == 2


def test_terms_of_a_step_begin_at_zero() -> None:
    """Rows that began where the term before ended looked like a schedule."""
    plan = make()
    found = estimate(plan)
    boxes = [attributes for name, attributes in read(time_figure(plan, found)).tags if name == "rect"]
    rows = [box for box in boxes if float(box["height"] or 0) == 13]
    assert len(rows) > 5
    assert len({box["x"] for box in rows}) == 1
    widths = [float(box["width"] or 0) for box in rows]
    assert widths == sorted(widths, reverse=True)


def test_a_simulated_step_is_drawn(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The page has the text of `estimate --jitter`, and a drawing; what is too large is refused by name."""
    name, out = str(ROOT / "recipes" / "deepseek-v3-4k-256xgb200-mxfp8.toml"), tmp_path / "page.html"
    code, _, err = command("report", name, "--jitter", "0.02", "--out", str(out), capsys=capsys)
    assert code == 0, err
    page = out.read_text()
    check_sound(page)
    assert page.count("Simulated step, its first pipeline") == 1
    assert "each pass off by 2.0%" in page
    code, _, err = command("report", name, "--jitter", "0.02", "job.global_batch=33554432", capsys=capsys)
    assert code == 2
    assert "--jitter" in err
