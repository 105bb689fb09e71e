"""Plans that were written from upstream's rows of August 2026 alone are judged as the rows say."""

import tomllib
from pathlib import Path
from typing import Any

import pytest
from repository import ROOT

from threefold.api.plans import open_plan
from threefold.findings import Finding
from threefold.interop.megatron.bridge_files import export_files
from threefold.interop.megatron.export_plan import export_plan
from threefold.launch.slurm import Options
from threefold.rules.all import check

TABLE = tomllib.loads((Path(__file__).parent / "upstream_plans.toml").read_text())
CASES = TABLE["plans"]["cases"]


def judged(case: dict[str, Any]) -> list[Finding]:
    """All findings of the case's plan at one of its fields."""
    path = ROOT / "recipes" / TABLE["bases"][case["of"]]
    parsed, findings = open_plan(str(path), case["set"].split())
    if parsed.plan is not None:
        findings = [*findings, *check(parsed.plan)]
    return [finding for finding in findings if case["at"] == "*" or finding.at in case["at"].split()]


def exported(case: dict[str, Any]) -> str:
    """Every file of the case's export, without quotes and with truth values in lower case."""
    parsed, _ = open_plan(str(ROOT / "recipes" / TABLE["bases"][case["of"]]), case["set"].split())
    assert parsed.plan is not None
    text = "\n".join(export_files(export_plan(parsed.plan), "plan.toml", Options(), ".").values())
    return text.replace('"', "").replace("'", "")


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case['row']}:{case['of']}:{case['set'][:60]}")
def test_a_plan_is_judged_as_its_row_says(case: dict[str, Any]) -> None:
    if case["expect"] == "exported":
        text = exported(case)
        assert [held for held in case.get("holds", ()) if held not in text] == []
        assert [lacked for lacked in case.get("lacks", ()) if lacked in text] == []
        return
    findings = judged(case)
    severities = {finding.severity for finding in findings}
    holds = {
        "refused": "error" in severities,
        "advised": bool(severities & {"warning", "note"}),
        "found": bool(severities),
        "silent": not severities,
        "allowed": "error" not in severities,
    }
    assert holds[case["expect"]], findings
    words = case.get("says", "").lower().split()
    said = " ".join(f"{finding.problem} {finding.fix_text}" for finding in findings).lower()
    assert not words or any(word in said for word in words), said
    assert [lacked for lacked in case.get("lacks", ()) if lacked in said] == []
