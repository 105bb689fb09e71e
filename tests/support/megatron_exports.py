"""Exports of plans to Megatron for tests: every recipe, every usable published run, and the way back."""

from typing import Any

from repository import ROOT

from threefold.interop.megatron.bridge_files import argument_line, performance_command
from threefold.interop.megatron.export_plan import BRIDGE, Export, export_plan
from threefold.interop.megatron.import_text import Imported, import_text
from threefold.interop.published import is_usable, load_rows, plan_from_row
from threefold.plan.file import read_plan
from threefold.plan.plan import Plan


def recipe(name: str) -> Plan:
    parsed = read_plan(str(ROOT / "recipes" / f"{name}.toml"))
    assert parsed.plan is not None, parsed.findings
    return parsed.plan


def recipe_plans() -> dict[str, Plan]:
    return {path.stem: recipe(path.stem) for path in sorted((ROOT / "recipes").glob("*.toml"))}


def published_plans() -> dict[str, Plan]:
    """The plans of all usable published runs, by the id of the run."""
    rows = [row for row in load_rows(ROOT / "data" / "published_runs.json") if is_usable(row)]
    plans = {}
    for row in rows:
        plan = plan_from_row(row).plan
        assert plan is not None, row["id"]
        plans[str(row["id"])] = plan
    return plans


def command_of(export: Export) -> str:
    """The one command line that says all of an export."""
    return performance_command(export) if export.to == BRIDGE else argument_line(export)


def import_again(export: Export) -> Imported:
    """What an import makes of an export. Where the table says that no name is in it, the user gives it."""
    named = {item.field for item in export.inexpressible}
    given: dict[str, Any] = {}
    if "cluster.chip" in named:
        given["cluster.chip"] = export.plan.cluster.chip
    if "model" in named:
        given["model"] = export.plan.model_name
    return import_text(command_of(export), given)


def changes_on_the_way(plan: Plan, to: str) -> dict[str, tuple[Any, Any]]:
    """Fields that differ after export and import, but for those that the table names."""
    export = export_plan(plan, to)
    imported = import_again(export)
    assert imported.plan is not None, [str(finding) for finding in imported.findings]
    named = {item.field for item in export.inexpressible}
    before, after = dict(plan.written), dict(imported.plan.written)
    return {
        path: (before.get(path), after.get(path))
        for path in sorted(before.keys() | after.keys())
        if path not in named and before.get(path) != after.get(path)
    }
