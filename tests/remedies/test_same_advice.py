"""One adviser: all verbs give the same first pieces of advice about a plan, from what they print as JSON.

`benchmarks/drawn_cases.py advice` asks about more plans, with `plan` and `dry-run` for each.
"""

from pathlib import Path

import pytest
from same_advice import drawn_plans, faults, of_findings, of_pieces, rehearsed_faults, run_json, searched_faults


@pytest.mark.parametrize("number", range(20))
def test_all_verbs_give_the_same_advice(number: int, tmp_path: Path) -> None:
    assert list(faults(drawn_plans(20)[number], tmp_path)) == []


@pytest.mark.slow
@pytest.mark.parametrize("number", range(200))
def test_all_verbs_give_the_same_advice_about_many(number: int, tmp_path: Path) -> None:
    plan = drawn_plans(200)[number]
    assert [*faults(plan, tmp_path), *searched_faults(plan, tmp_path)] == []


@pytest.mark.slow
@pytest.mark.parametrize("number", range(0, 200, 20))
def test_rehearsals_give_the_same_advice(number: int, tmp_path: Path) -> None:
    assert list(rehearsed_faults(drawn_plans(200)[number], tmp_path)) == []


def test_a_search_and_a_rehearsal_say_what_check_says(tmp_path: Path) -> None:
    words = ("--model", "tiny-qwen3-moe", "--chip", "h100", "--gpus", "1", "--seq-len", "256")
    path = tmp_path / "plan.toml"
    found = run_json("plan", *words, "--target", "threefold", "--out", str(path))
    checked = of_findings(run_json("check", str(path))["findings"])
    assert of_pieces(found["retune"]) == checked
    assert of_pieces(run_json("dry-run", str(path))["advice"]) == checked
