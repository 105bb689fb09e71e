"""The figures of docs/reference/estimate.md, from the benchmark itself; the bounds are those the planner promises."""

import hashlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from repository import ROOT

from threefold.cost.memory.by_stack import memory
from threefold.interop.published import cannot_express, is_usable, load_rows, plan_from_row

RUNS = ROOT / "data" / "published_runs.json"


def judge(runs: Path) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "benchmarks/accuracy.py", "--runs", str(runs), "--json"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=600,
        check=True,
        env={"PYTHONPATH": str(ROOT), "PATH": ""},
    )
    result: dict[str, Any] = json.loads(done.stdout)
    return result


@pytest.fixture(scope="module")
def result() -> dict[str, Any]:
    return judge(RUNS)


def test_throughput_is_within_its_bounds(result: dict[str, Any]) -> None:
    figures = result["throughput"]
    assert figures["rows"] == 94
    assert figures["mean_abs_pct"] <= 10
    assert figures["p90_abs_pct"] <= 20
    assert figures["rank_correlation"] > 0.95


def test_memory_is_within_its_bounds(result: dict[str, Any]) -> None:
    assert result["memory"]["rows"] >= 10
    assert result["memory"]["mean_abs_pct"] <= 5
    qwen = [row for row in result["per_row"] if row["figure"] == "peak_gib" and row["measured"] == 62.166]
    assert qwen
    assert all(abs(row["error_pct"]) <= 3 for row in qwen)


def test_one_field_changes_have_the_right_sign_and_size(result: dict[str, Any]) -> None:
    """Groups whose rows differ in one field and by more than 3 %: direction right, size within a third."""
    judged = [c for c in result["ab"] if len(c["fields"]) == 1 and abs(c["measured_change_pct"]) > 3]
    assert len(judged) >= 10
    for change in judged:
        assert abs(change["predicted_change_pct"] - change["measured_change_pct"]) <= abs(
            change["measured_change_pct"] / 3
        ), change


def test_the_documents_long_context_pattern_comes_out(result: dict[str, Any]) -> None:
    """DeepSeek-V3 on H100 flat from 4K to 256K when CP grows along; Qwen3-Next on GB200 loses clearly at 64K. Flat is
    13 %: settings of these rows are guessed, and 256K on 512 GPUs is predicted 12 % faster than 4K."""
    deepseek = [c["predicted_change_pct"] for c in result["ab"] if c["group"] == "longctx:deepseek-v3:h100"]
    assert len(deepseek) == 5
    assert all(abs(change) <= 13 for change in deepseek)
    qwen = [c["predicted_change_pct"] for c in result["ab"] if c["group"].startswith("longctx:qwen3-next")]
    assert qwen[-1] < -30


def test_runs_that_ran_out_of_memory_do_not_fit() -> None:
    """Every published OOM is predicted over the chip; no usable run is predicted over by more than the margin."""
    for row in load_rows(RUNS):
        if cannot_express(row) or not (row["status"] == "oom" or is_usable(row)):
            continue
        plan = plan_from_row(row).plan
        assert plan is not None
        full = memory(plan).device_bytes / plan.chip.memory_bytes
        assert full > 1 if row["status"] == "oom" else full < 1.18, row["id"]


def test_rows_nobody_has_seen_are_judged_or_skipped_with_a_reason(tmp_path: Path) -> None:
    """Ids, order and unknown values do not matter to the benchmark."""
    rows = load_rows(RUNS)[:40]
    for number, row in enumerate(rows):
        row["id"] = f"other-{number}"
    rows[0]["model"] = "no-such-model"
    rows[1]["gpus"] = None
    rows[2]["extra_knobs"] = None
    rows[3] = {"id": "bare"}
    path = tmp_path / "runs.json"
    path.write_text(json.dumps(rows))
    found = judge(path)
    assert found["throughput"]["rows"] > 5
    assert {"other-0", "bare"} <= {row["id"] for row in found["skipped"]}
    assert set(found["throughput"]) == {
        "rows",
        "mean_abs_pct",
        "median_abs_pct",
        "p90_abs_pct",
        "bias_pct",
        "rank_correlation",
    }


def test_the_split_follows_its_rule() -> None:
    """The first eight hexadecimal digits of the SHA-256 of model:system:precision, a multiple of four."""
    split = json.loads((ROOT / "data" / "split.json").read_text())
    rows = [row for row in load_rows(RUNS) if is_usable(row)]
    groups = {row["id"]: f"{row['model']}:{row['system']}:{row.get('precision')}" for row in rows}
    judged = {name for name, group in groups.items() if hashlib.sha256(group.encode()).digest()[3] % 4 == 0}
    assert set(split["judged"]) == judged
    assert set(split["fit"]) == set(groups) - judged
    assert (len(split["fit"]), len(split["judged"])) == (69, 25)


def test_choices_lose_little_and_pairs_have_their_order(result: dict[str, Any]) -> None:
    """Regret of at most 3 % and 95 % of pairs are what the planner promises (docs/log/estimate.md)."""
    found = result["choices"]
    assert found["groups"] >= 10
    assert found["regret_mean_pct"] <= 3
    assert found["pairs"] >= 15
    assert found["right_pct"] >= 95


def test_the_log_has_the_table_of_the_fit() -> None:
    """As `--table` prints it from what the fit wrote; the fit itself takes minutes."""
    result = "benchmarks/results/fit-published.json"
    command = [sys.executable, "tools/fit_rates.py", "--table", result]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True, env={"PYTHONPATH": str(ROOT)})
    assert f"--table -->\n{done.stdout}<!-- /errors" in (ROOT / "docs" / "log" / "estimate.md").read_text()


def test_the_shipped_band_and_anchors_are_those_of_the_fit() -> None:
    """A band holds 80 % of the runs that the fit had not seen, and so does one that is read off the other groups."""
    found = json.loads((ROOT / "benchmarks" / "results" / "fit-published.json").read_text())
    shipped = json.loads((ROOT / "threefold" / "cost" / "calibration.json").read_text())
    assert shipped["megatron-bridge"]["band"] == round(found["left out"]["model on a system"]["p80"], 3)
    assert shipped["anchors"] == found["anchors"]
    assert found["coefficients"] <= 35  # of the fit of 2026-11-15: 25 rates and ten drifts
    assert 0.75 <= found["held"] <= 0.85
