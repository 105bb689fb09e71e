"""What Megatron-LM prints of an export's arguments when it starts is read as the plan behind the export."""

import subprocess
from pathlib import Path

import pytest
from megatron_exports import recipe_plans
from megatron_judges import NEEDS_WHEELS, WITH_LM, findings, python, wheels, write_export
from repository import ROOT

from threefold.interop.megatron.export_plan import LM, export_plan
from threefold.interop.megatron.import_text import import_text
from threefold.plan.plan import Plan

pytestmark = NEEDS_WHEELS
OF_MEGATRON = {"job.seed": 1234, "run.log_every": 100}  # its own defaults, which are none of a plan's


def told(release: str) -> dict[str, Plan]:
    """Recipes whose models an argument line describes in full."""
    plans = {name: findings(plan, release)[:2] for name, plan in recipe_plans().items()}
    judged = {name: plan for name, (plan, blocking) in plans.items() if not blocking}
    return {
        name: plan
        for name, plan in judged.items()
        if all(item.field != "model" for item in export_plan(plan, LM, release).lost)
    }


@pytest.mark.parametrize("release", WITH_LM)
def test_a_printed_table_is_the_plan(release: str, tmp_path: Path) -> None:
    plans = told(release)
    for name, plan in plans.items():
        write_export(plan, LM, release, tmp_path / name)
    program = [python(), str(ROOT / "tests" / "megatron" / "print_tables.py"), str(wheels(release))]
    done = subprocess.run([*program, *(str(tmp_path / name) for name in plans)], capture_output=True, text=True)
    wrong = {}
    for name, plan in plans.items():
        log = tmp_path / name / "arguments.log"
        assert log.exists(), done.stderr[-3000:]
        imported = import_text(log.read_text(), {"cluster.chip": plan.cluster.chip})
        assert imported.plan is not None, (name, imported.findings)
        assert {finding.rule for finding in imported.findings} == {"import-without-counterpart"}
        named = {item.field for item in export_plan(plan, LM, release).inexpressible}
        # A variable of the environment, and a number that older releases have for themselves.
        named |= {"stack.release", "knobs.max_connections", "knobs.dispatch_sms"}
        before, after = OF_MEGATRON | dict(plan.written), dict(imported.plan.written)
        if differs := {
            path: (before.get(path), after.get(path))
            for path in before.keys() | after.keys()
            if path not in named and before.get(path) != after.get(path)
        }:
            wrong[name] = differs
    assert wrong == {}
